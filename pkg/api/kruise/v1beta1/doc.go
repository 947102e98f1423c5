// Package v1beta1 is the version of PersistentPodState that newer releases of OpenKruise store, for manifests that are
// written in it. Its objects are v1alpha1's, which the API server hands out without a conversion: a client that reads
// one as v1alpha1 has all of it. Nothing in Stayput uses this package but the definition that is generated from it.
//
// +groupName=apps.kruise.io
package v1beta1
