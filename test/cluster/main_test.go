// Package cluster holds the tests that run on a real Kubernetes: etcd, API server, controller manager, scheduler
// and nodes with kubelet and containerd, see package lab.
//
// What several subjects need is in
//
//	cluster_test.go         the clusters that tests have, namespaces, kubectl, and what breaks a node
//	workload_test.go        pods that come, go, and come home
//	probe_test.go           what the API, the nodes' files and the network say of pods and addresses
//	asked_test.go           who answers at an address, asked all the time by every node and by a pod of each
//	crowd_test.go           many pods that ask for addresses and run nowhere, and where addresses are
//	calico_test.go          what Calico's IPAM says of addresses
//	kubectlstayput_test.go  the command as people install it
//	waiting_test.go         conditions and Events
//	schedule_test.go        which tests run when, beside which others
//
// Each other file is a subject, with the helpers that it needs alone. Tests that share a cluster run in the order of
// the files, and one cluster runs after the other, so the names of files keep its tests together:
//
//	admission*_test.go, authorization_test.go, authors_test.go
//	                        a cluster with the manifests of stayput but none of its programs, see guard_test.go
//	bare_test.go            the lab itself, on stock host-local
//	calls_test.go to retainedip_test.go
//	                        where tests call installed or beside: stayput, from its image
//
// A test that breaks what others need, such as a node, restores it before it ends. A test of the last cluster that
// looks at its namespace only, and breaks nothing, calls beside, and so runs after those, in parallel with others of
// its kind. A test with a cluster of its own calls alone, one of pools withPools: these run in parallel too. Tests wait
// for conditions and assert no times. They are one package because clusters are what takes time.
//
// # To add a test
//
// Take the cluster with installed or beside, a namespace with namespace, pods with deploy or other objects with apply,
// and wait with until. Name the test after the behaviour.
package cluster

import (
	"flag"
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	// Tests that may run in parallel wait for others and for a place: see beside and alone.
	if err := flag.Set("test.parallel", "100"); err != nil {
		fmt.Fprintln(os.Stderr, "test/cluster:", err)
		return 1
	}
	code := m.Run()
	ends := []func() error{common.end, pooled.end}
	if built.remove != nil {
		ends = append(ends, built.remove)
	}
	for _, end := range ends {
		if err := end(); err != nil {
			fmt.Fprintln(os.Stderr, "test/cluster:", err)
			code = 1
		}
	}
	return code
}
