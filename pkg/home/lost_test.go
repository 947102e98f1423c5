package home

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home/hometest"
)

func TestAPodIsKeptOffTheNodeThatWasJustLost(t *testing.T) {
	address := Address{Node: "node-1"}
	term := kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{corev1.LabelTopologyZone}}
	record := &Record{Spec: kruisev1alpha1.PersistentPodStateSpec{RequiredPersistentTopology: &term},
		State: kruisev1alpha1.PodState{NodeName: "node-1",
			NodeTopologyLabels: map[string]string{corev1.LabelTopologyZone: "a"}}}
	other, lost := hometest.Node("node-2", "a"), hometest.Node("node-1", "a")
	lately, long := func(node string) bool { return node == "node-1" }, func(string) bool { return false }
	for name, c := range map[string]struct {
		s    Situation
		want bool
	}{
		"its address was there":       {Situation{Address: address, Lost: lately}, true},
		"its zone's record was there": {Situation{Record: record, Lost: lately}, true},
		"that was long ago":           {Situation{Address: address, Lost: long}, false},
		"it is not followed":          {Situation{Address: address}, false},
		"it is back":                  {Situation{Address: address, Lost: lately, Nodes: hometest.Nodes{other, lost}}, false},
		"another one was lost":        {Situation{Address: Address{Node: "node-2"}, Lost: lately}, false},
		"it was nowhere":              {Situation{Lost: lately}, false},
	} {
		c.s.Now, c.s.Pod = hometest.Noon, hometest.Pod()
		if c.s.Nodes == nil {
			c.s.Nodes = hometest.Nodes{other}
		}
		d := Decide(c.s)
		if slices.Equal(d.Affinity.Without, []string{"node-1"}) != c.want || !c.want && len(d.Affinity.Without) > 0 {
			t.Errorf("%s: %s without %q", name, d.Outcome, d.Affinity.Without)
		}
	}
}
