package v1alpha1

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

func TestTheNameOfAnObjectIsPodAndNodeIfThatIsValid(t *testing.T) {
	if got := RetainedIPName("web-0", "node-a.example.com"); got != "web-0.node-a.example.com" {
		t.Error(got)
	}
}

// The policy stayput-agent lets an agent write no other names.
func TestANameIsOfOneNodeOnly(t *testing.T) {
	long := strings.Repeat("x", 250)
	for _, node := range []string{"b", "a.b", "web-0.a.b", "node-a.example.com", strings.Repeat("n", 242)} {
		for _, pod := range []string{"web-0", "web", "web-0.a", "web.web-0.a", "web-12345678", long, long + ".a", ".", "a.b"} {
			name := RetainedIPName(pod, node)
			if before, ok := strings.CutSuffix(name, "."+node); !ok || before == "" || strings.Contains(before, ".") {
				t.Errorf("%q of node %q", name, node)
			}
		}
	}
}

func TestEveryPodAndNodeGetTheirOwnName(t *testing.T) {
	long := strings.Repeat("x", 250)
	names := map[string]string{}
	for _, c := range [][2]string{
		{"web-0", "a.b"}, {"web-0.a", "b"}, {"web-0", "a"}, {long, "node"}, {long, "nodf"}, {"web-0", "Node_A"},
		{"web-0", "node-a"},
		{"web-0", "node_a"}, {strings.Repeat("y.", 120) + "y", "node"}, {"web-0", "-"}, {"web-0", strings.Repeat("-", 300)},
		{"_", "_"}, {"web-0", "a-b"}, {"web-0-a", "b"}, {strings.Repeat("x", 252), "node"}, {"web-0", strings.Repeat("n", 253)},
		{"web-1", strings.Repeat("n", 253)}, {"web-0.x", strings.Repeat("n", 242)}, {"web-1.x", strings.Repeat("n", 242)},
		{strings.TrimSuffix(RetainedIPName("web.0", "node"), ".node"), "node"}, {"web.0", "node"},
	} {
		name := RetainedIPName(c[0], c[1])
		if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
			t.Errorf("%q: %v", name, errs)
		}
		if was, taken := names[name]; taken {
			t.Errorf("%q is of %v and of %s", name, c, was)
		}
		names[name] = c[0] + " " + c[1]
	}
}
