//go:build conformance

// Package conformance runs the tests that others wrote for what stayput is a part of, against stayput.
//
//	kubernetes_test.go  e2e.test of Kubernetes on a cluster with stayput, which keeps the address of every pod they make
//	runtime_test.go     critest on a node with stayput
//	pods_test.go        what became of the pods meanwhile: upstream knows nothing of homes and addresses
//	report_test.go      which tests ran, and how they ended
//
// The tests are named one by one. That none ran, or another one than named, is a failure.
//
// Building them takes as long as building Kubernetes, therefore they have a build tag and a target of the Makefile,
// make conformance.
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

// patience bounds a step that hangs; it is no measure of anything.
const patience = 3 * time.Minute

func testContext(t *testing.T, patience time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// build returns stayput and upstream's tests.
func build(t *testing.T) (lab.Product, lab.ConformanceBin) {
	t.Helper()
	_, err := lab.BuildCluster(t.Context()) // as long as a compiler takes
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
