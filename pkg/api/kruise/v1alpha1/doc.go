// Package v1alpha1 is the part of OpenKruise's API group apps.kruise.io that stayput serves: PersistentPodState,
// field for field as in OpenKruise (apis/apps/v1alpha1/persistent_pod_state_types.go there), so that existing
// manifests apply unchanged. Validation, printer columns and a few fields of the status are added.
//
// +kubebuilder:object:generate=true
// +kubebuilder:ac:generate=true
// +groupName=apps.kruise.io
package v1alpha1

//go:generate go tool controller-gen object applyconfiguration paths=. output:applyconfiguration:dir=.
//go:generate go tool controller-gen crd:maxDescLen=500 paths=.;../v1beta1 output:crd:dir=../../../../deploy/chart/files/crds
