// Package v1alpha1 is the API group stayput.io: the objects RetainedIP, PodIPPool, PodIP, PodIPAudit and PodIPReport,
// and the annotations, labels and the scheduling gate that people and programs put on other objects.
//
// +kubebuilder:object:generate=true
// +groupName=stayput.io
package v1alpha1

//go:generate go tool controller-gen object crd:maxDescLen=500 paths=. output:crd:dir=../../../../deploy/chart/files/crds
