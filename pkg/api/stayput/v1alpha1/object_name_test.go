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

func TestEveryPodAndNodeGetTheirOwnName(t *testing.T) {
	long := strings.Repeat("x", 250)
	names := map[string]string{}
	for _, c := range [][2]string{
		{"web-0", "a.b"}, {"web-0.a", "b"}, {"web-0", "a"}, {long, "node"}, {long, "nodf"}, {"web-0", "Node_A"},
		{"web-0", "node-a"},
		{"web-0", "node_a"}, {strings.Repeat("y.", 120) + "y", "node"}, {"web-0", "-"}, {"web-0", strings.Repeat("-", 300)},
		{"_", "_"},
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
