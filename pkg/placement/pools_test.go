package placement

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/podip"
)

func TestAPodOfAPoolIsPulledToNoNode(t *testing.T) {
	pod := hometest.Pod(ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationPools, "blue"))
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	p.pools = podip.New(nil, nil, nil, nil, podip.Options{}).Claims()
	if current := p.looksAt(t, pod); !home.Gated(current) {
		t.Error("it is placed without its addresses")
	}
	decide := func() home.Decision {
		t.Helper()
		s, err := p.situation(t.Context(), pod, cluster.NewNodes(t.Context(), p.client), &podip.Claim{Last: "node-1"})
		if err != nil {
			t.Fatal(err)
		}
		return home.Decide(s)
	}
	if d := decide(); d.Outcome != home.OutcomeFree || !d.Affinity.Empty() {
		t.Errorf("%+v", d)
	}
	hometest.Annotation(stayputv1alpha1.AnnotationHome, stayputv1alpha1.HomeRequired)(pod)
	if d := decide(); d.Outcome != home.OutcomeHome || d.Affinity.Node != "node-1" {
		t.Errorf("it is not pulled to the home that it asks for: %+v", d)
	}
	p = testPlacer(fakeAPI(t, hometest.Node("node-1", "a", hometest.Cordoned)))
	if d := decide(); d.Outcome != home.OutcomeWait || d.Retry <= 0 {
		t.Errorf("it does not wait for the home that it asks for: %+v", d)
	}
}

func TestOtherPodsWaitUntilItIsKnownWhetherThereArePools(t *testing.T) {
	pod := hometest.Pod(ownedBySet)
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a")))
	p.pools = podip.New(nil, nil, nil, nil, podip.Options{}).Claims()
	if current := p.looksAt(t, pod); !home.Gated(current) {
		t.Error("its namespace may have a pool by default, and it is placed")
	}
	p.pools = nil
	if current := p.looksAt(t, pod); home.Gated(current) {
		t.Error("it waits though there are no pools")
	}
}

// While its watches are behind, an API server that was away is not asked over and over.
func TestAPodThatHasChangedIsTriedEverLater(t *testing.T) {
	pod := hometest.Pod(ownedBySet)
	api := fakeAPI(t, pod, hometest.Node("node-1", "a"))
	p := testPlacer(interceptor.NewClient(api, interceptor.Funcs{Patch: func(context.Context, client.WithWatch,
		client.Object, client.Patch, ...client.PatchOption) error {
		return apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, pod.Name, errors.New("changed"))
	}}))
	req := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(pod)}
	last := time.Duration(0)
	for range 10 {
		result, err := p.Reconcile(t.Context(), req)
		if err != nil || result.RequeueAfter <= last && result.RequeueAfter != longestLag {
			t.Fatalf("after %s again in %s: %v", last, result.RequeueAfter, err)
		}
		last = result.RequeueAfter
	}
	p.client = api
	if current := p.looksAt(t, pod); last != longestLag || home.Gated(current) || p.lag.NumRequeues(req) != 0 {
		t.Errorf("again in %s, gated %t, or the next pause is no short one", last, home.Gated(current))
	}
}
