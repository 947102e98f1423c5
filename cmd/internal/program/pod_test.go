package program

import (
	"strings"
	"testing"
)

func TestAManifestForAnotherNamespaceIsRefused(t *testing.T) {
	for _, c := range []struct{ given, pod, want, err string }{
		{"", "", "", ""},
		{"", "web", "web", ""},
		{"web", "", "web", ""}, // not in a pod
		{"web", "web", "web", ""},
		{"stayput-system", "web", "", "the manifest was rendered for namespace stayput-system"},
	} {
		t.Setenv("POD_NAMESPACE", c.pod)
		got, err := InstalledIn(c.given)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q in a pod of %q: %q, %v", c.given, c.pod, got, err)
		}
	}
}
