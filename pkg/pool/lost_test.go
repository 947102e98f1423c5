package pool

import (
	"slices"
	"testing"
	"time"
)

// The scheduler may not know yet what the controller knows.
func TestAPodIsKeptFromTheNodeThatWasJustLost(t *testing.T) {
	for _, c := range []struct {
		name  string
		lose  func(*Book)
		noted time.Duration // since this the address is known to be left; negative: that is not noted yet
		want  []string
	}{
		{"the Node is deleted", func(b *Book) { b.RemoveNode("n1") }, -1, []string{"n1"}},
		{"it is out of service", func(b *Book) { b.SetNode(Node{Name: "n1", Off: true}) }, -1, []string{"n1"}},
		{"that was noted first", func(b *Book) { b.RemoveNode("n1") }, time.Second, []string{"n1"}},
		{"it was lost long ago", func(b *Book) { b.RemoveNode("n1") }, time.Hour, nil},
		{"the node says that the pod is gone", func(*Book) {}, time.Second, nil},
		{"and is not Ready since", func(b *Book) { b.SetNode(Node{Name: "n1"}) }, time.Second, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: Routed, Subnet: "10.6.0.0/24"})
			b.SetNode(Node{Name: "n2", Ready: true})
			was := gatedPod(1)
			a, _ := place(t, b, was, noon)
			was = *b.Pod(was.UID)
			was.Node = "n1"
			b.SetPod(was)
			ip := *b.PodIP(a)
			ip.Phase, ip.StatusUID, ip.Node = Bound, was.UID, "n1"
			b.SetPodIP(ip)
			b.RemovePod(was.UID, "100", noon)
			c.lose(b)
			if c.noted >= 0 {
				ip.Phase, ip.Since = Retained, noon.Add(-c.noted)
				b.SetPodIP(ip)
			}
			next := gatedPod(1)
			next.UID = "next"
			got, plan := place(t, b, next, noon)
			if got != a {
				t.Fatalf("it gets %s: %+v", got, plan)
			}
			if without := plan.Writes[len(plan.Writes)-1].(PlacePod).Without; !slices.Equal(without, c.want) {
				t.Errorf("it is kept from %v, want %v", without, c.want)
			}
			// It has found no other node when that one is back.
			if all := b.Barren("n1"); c.want != nil && all != nil {
				t.Errorf("%v are ended while the node is lost", all)
			}
			b.SetNode(Node{Name: "n1", Ready: true})
			if all := b.Barren("n1"); !slices.Equal(all, []UID{"next"}) {
				t.Errorf("%v have no node", all)
			}
			bound := *b.Pod("next")
			bound.Node = "n2"
			b.SetPod(bound)
			if all := b.Barren("n1"); all != nil {
				t.Errorf("%v are ended though they have a node", all)
			}
		})
	}
}
