//go:build conformance

// The packages of the conformance component, which is built from this module as well. The build tag keeps them
// out of the kubernetes component.
package main

import (
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/images/agnhost/porter"
)
