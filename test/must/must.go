// Package must ends a test that cannot continue. Only tests import it.
package must

import (
	"io"
	"testing"
	"time"
)

// Do ends the test if err is not nil.
func Do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually is [Within] for conditions that take milliseconds: its patience of 30 s only bounds a hanging test.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Within(t, 30*time.Second, what, ok)
}

// Within polls ok until it returns true, and ends the test after patience or when the test's context ends. what
// completes the sentence "waiting for …". An ok that takes long is called less often: asking must not be the machine's
// main work.
func Within(t testing.TB, patience time.Duration, what string, ok func() bool) {
	t.Helper()
	start, end := time.Now(), time.After(patience)
	for {
		asked := time.Now()
		if ok() {
			return
		}
		pause := min(max(time.Since(start)/10, 5*time.Millisecond), 50*time.Millisecond)
		select {
		case <-time.After(max(pause, min(2*time.Since(asked), time.Second))):
		case <-end:
			t.Fatalf("timed out after %v waiting for %s", patience, what)
		case <-t.Context().Done():
			t.Fatalf("waiting for %s: %v", what, t.Context().Err())
		}
	}
}

// Machine is a node or a cluster of the lab.
type Machine interface {
	WriteLogs(io.Writer)
	Close() error
}

// Close closes the machine at the end of the test. If the test failed, it prints the machine's logs first.
func Close(t testing.TB, m Machine) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			m.WriteLogs(t.Output())
		}
		Do(t, m.Close())
	})
}
