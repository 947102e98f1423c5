//go:build conformance

// Package conformance runs the upstream test suites of the systems that stayput is part of, against stayput.
//
//	kubernetes_test.go  Kubernetes' e2e.test on a cluster with stayput, which retains the address of every pod
//	runtime_test.go     critest on a node with stayput
//	pods_test.go        the pods' homes and addresses meanwhile, which upstream does not check
//	report_test.go      which tests ran, and their results
//
// Every test is named. A named test that did not run, or another one that did, is a failure.
//
// Building them takes as long as building Kubernetes, so they have a build tag and a Makefile target of their own: make
// conformance.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestMain(m *testing.M) {
	if os.Getenv(checkEnv) != "" {
		os.Exit(checkLedgers())
	}
	os.Exit(m.Run())
}

// patience bounds a hanging step; it measures nothing.
const patience = 3 * time.Minute

func testContext(t *testing.T, patience time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// build returns stayput and the upstream test suites.
func build(t *testing.T) (lab.Product, lab.ConformanceBin) {
	t.Helper()
	_, err := lab.BuildCluster(t.Context()) // may take as long as the compiler
	must.Do(t, err)
	tests, err := lab.BuildConformance(t.Context())
	must.Do(t, err)
	dir, remove, err := lab.TempDir("product")
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, remove()) })
	product, err := lab.BuildWholeProduct(t.Context(), dir)
	must.Do(t, err)
	return product, tests
}

const checkEnv = "STAYPUT_TEST_CHECK"

// holds checks the invariants of every ledger of a node.
func holds(t *testing.T, n *lab.Node) {
	t.Helper()
	exe, err := os.Executable()
	must.Do(t, err)
	const inside = "/opt/stayput/check"
	must.Do(t, n.Install(exe, inside))
	if _, err := n.RunInput(testContext(t, patience), []string{checkEnv + "=1"}, nil, inside); err != nil {
		t.Errorf("the ledger does not hold: %v", err)
	}
}

// checkLedgers is the main function of a process in a node. What a command that was killed has left is completed by
// the next one that touches it, so a List comes first.
func checkLedgers() int {
	ledgers, err := ledger.Networks(ledger.Options{})
	if err == nil && len(ledgers) == 0 {
		err = errors.New("no network has a ledger")
	}
	for _, l := range ledgers {
		_, listErr := l.List()
		bad, checkErr := l.Check()
		err = errors.Join(append(bad, err, listErr, checkErr)...)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
