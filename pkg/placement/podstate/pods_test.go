package podstate

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestAnOrphanTellsTheNameOfItsWorkload(t *testing.T) {
	yes := true
	for name, c := range map[string]struct {
		pod  metav1.ObjectMeta
		want string
	}{
		"orphan": {metav1.ObjectMeta{Name: "my-web-3"}, "my-web"},
		"owned": {metav1.ObjectMeta{Name: "my-web-3", OwnerReferences: []metav1.OwnerReference{{Controller: &yes}}},
			""},
		"no ordinal":    {metav1.ObjectMeta{Name: "my-web"}, ""},
		"only a number": {metav1.ObjectMeta{Name: "-3"}, ""},
	} {
		stem, ok := orphanOf(&c.pod)
		if ok != (c.want != "") || ok && stem != c.want {
			t.Errorf("%s: %q, %v, want %q", name, stem, ok, c.want)
		}
	}
}
