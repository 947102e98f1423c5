package placement

import (
	"strings"
	"testing"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/podip"
)

func TestAPodOfAPoolIsPulledToNoNode(t *testing.T) {
	pod := hometest.Pod(ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationPools, "blue"))
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	p.pools = &podip.Controller{}
	if is := p.looksAt(t, pod); !home.Gated(is) {
		t.Error("it is placed without its addresses")
	}
	for asks, want := range map[string]string{"": "", stayputv1alpha1.HomeRequired: "node-1"} {
		pod := pod.DeepCopy()
		if asks != "" {
			hometest.Annotation(stayputv1alpha1.AnnotationHome, asks)(pod)
		}
		to, placed, ok, _, err := p.homeBesides(t.Context(), pod, "node-1")
		if err != nil || !ok || to.Affinity.Node != want {
			t.Errorf("%q: required on %q, %t, %v", asks, to.Affinity.Node, ok, err)
		}
		if placed != nil {
			placed()
		}
	}
	hometest.Annotation(stayputv1alpha1.AnnotationHome, stayputv1alpha1.HomeRequired)(pod)
	p = testPlacer(fakeAPI(t, hometest.Node("node-1", "a", hometest.Cordoned)))
	if _, _, ok, retry, err := p.homeBesides(t.Context(), pod, "node-1"); err != nil || ok || retry <= 0 {
		t.Errorf("it does not wait for the home that it asks for: %t, %v, %v", ok, retry, err)
	}
	if notes := p.notes(); len(notes) == 0 || !strings.Contains(notes[0], "node node-1") {
		t.Errorf("said %q", notes)
	}
}

func TestOtherPodsWaitUntilItIsKnownWhetherThereArePools(t *testing.T) {
	pod := hometest.Pod(ownedBySet)
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a")))
	p.pools = &podip.Controller{}
	if is := p.looksAt(t, pod); !home.Gated(is) {
		t.Error("its namespace may have a pool by default, and it is placed")
	}
	p.pools = nil
	if is := p.looksAt(t, pod); home.Gated(is) {
		t.Error("it waits though there are no pools")
	}
}
