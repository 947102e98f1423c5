package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// patience bounds a test that hangs; it asserts nothing.
const patience = 2 * time.Minute

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// once returns a function that calls f at its first call. Unlike with sync.OnceFunc, f may end the test although the
// function is also deferred: OnceFunc would panic at the second call and end all tests.
func once(f func()) func() {
	var o sync.Once
	return func() { o.Do(f) }
}

// until waits until ok returns true.
func until(t *testing.T, what string, ok func(context.Context) bool) {
	t.Helper()
	ctx := testContext(t)
	must.Within(t, patience, what, func() bool { return ok(ctx) })
}

// saysOf waits for an Event with a reason about an object that says all of this, and returns its message.
func saysOf(t *testing.T, c *lab.Cluster, ns, kind, name, reason string, all ...string) string {
	t.Helper()
	var message string
	until(t, fmt.Sprintf("the Event %s about %s %s", reason, kind, name), func(ctx context.Context) bool {
		events, err := c.Client().CoreV1().Events(ns).List(ctx, metav1.ListOptions{
			FieldSelector: fmt.Sprintf("reason=%s,involvedObject.kind=%s,involvedObject.name=%s", reason, kind, name),
		})
		if err != nil {
			return false
		}
		for _, e := range slices.Backward(events.Items) {
			if !slices.ContainsFunc(all, func(want string) bool { return !strings.Contains(e.Message, want) }) {
				message = e.Message
				return true
			}
		}
		return false
	})
	return message
}
