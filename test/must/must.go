// Package must ends a test that cannot go on. It is for tests alone: no program links it.
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

// Eventually is [Within] for what takes milliseconds: its patience of 30 s only bounds a test that hangs.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Within(t, 30*time.Second, what, ok)
}

// Within calls ok until it returns true, and ends the test if that takes longer than patience, or than the test may.
// what completes the sentence "waited for …".
func Within(t testing.TB, patience time.Duration, what string, ok func() bool) {
	t.Helper()
	start, end := time.Now(), time.After(patience)
	for !ok() {
		select {
		case <-time.After(min(max(time.Since(start)/10, 5*time.Millisecond), 50*time.Millisecond)):
		case <-end:
			t.Fatalf("waited for %s in vain, for %v", what, patience)
		case <-t.Context().Done():
			t.Fatalf("waited for %s: %v", what, t.Context().Err())
		}
	}
}

// Machine is a node or a cluster of the lab.
type Machine interface {
	WriteLogs(io.Writer)
	Close() error
}

// Close closes the machine when the test has ended. If that failed, it prints the machine's logs before.
func Close(t testing.TB, m Machine) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			m.WriteLogs(t.Output())
		}
		Do(t, m.Close())
	})
}
