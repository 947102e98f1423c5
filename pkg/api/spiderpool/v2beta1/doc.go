// Package v2beta1 is the part of Spiderpool's API group spiderpool.spidernet.io that stayput serves: SpiderIPPool,
// field for field as in Spiderpool (pkg/k8s/apis/spiderpool.spidernet.io/v2beta1/spiderippool_types.go there), so that
// existing manifests apply unchanged. Not every field is supported.
//
// +kubebuilder:object:generate=true
// +groupName=spiderpool.spidernet.io
package v2beta1

//go:generate go tool controller-gen object crd:maxDescLen=500 paths=. output:crd:dir=../../../../deploy/chart/files/crds
