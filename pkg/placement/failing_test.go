package placement

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// Each call that placing a pod makes is the one that fails, in each way.
func TestNoFailureOfAGatedPodGoesUnsaidOrUntried(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	refusals := map[string]error{
		"refused":              apierrors.NewForbidden(pods, "web-0", errors.New("exceeded quota")),
		"invalid":              apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "web-0", nil),
		"broken":               apierrors.NewInternalError(errors.New("webhook is away")),
		"said not to be":       apierrors.NewNotFound(pods, "web-0"),
		"said to have changed": apierrors.NewConflict(pods, "web-0", errors.New("changed")),
		"away":                 errors.New("connection refused"),
	}
	var failing error
	calls := map[string]interceptor.Funcs{
		"the patch of the pod": {Patch: func(context.Context, client.WithWatch, client.Object, client.Patch,
			...client.PatchOption) error {
			return failing
		}},
		"the list of RetainedIPs": {List: func(ctx context.Context, c client.WithWatch, list client.ObjectList,
			options ...client.ListOption) error {
			if _, ok := list.(*stayputv1alpha1.RetainedIPList); ok {
				return failing
			}
			return c.List(ctx, list, options...)
		}},
		"the read of a node": {Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
			options ...client.GetOption) error {
			if _, ok := o.(*corev1.Node); ok {
				return failing
			}
			return c.Get(ctx, key, o, options...)
		}},
	}
	for call, funcs := range calls {
		for how, err := range refusals {
			if call == "the read of a node" && how == "said not to be" {
				continue // then its home is gone, and the pod goes elsewhere
			}
			t.Run(call+" is "+how, func(t *testing.T) {
				pod := hometest.Pod()
				api := fakeAPI(t, pod, hometest.Node("node-1", "a"), keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon))
				failing = err
				p := testPlacer(interceptor.NewClient(api, funcs))
				key := client.ObjectKeyFromObject(pod)
				for _, pause := range []time.Duration{0, cluster.SayFailureAfter - 1, 1} {
					p.time = p.time.Add(pause)
					result, err := p.Reconcile(t.Context(), reconcile.Request{NamespacedName: key})
					if result.RequeueAfter == 0 && err == nil {
						t.Fatal("it is not tried again")
					}
					said := slices.ContainsFunc(p.notes(), func(note string) bool {
						return strings.HasPrefix(note, "Warning "+home.ReasonNotPlaced) && strings.Contains(note, failing.Error())
					})
					if said != (pause == 1) {
						t.Fatalf("after %s more it says so: %t", pause, said)
					}
				}
				p.placer.client, p.placer.cache = api, api
				if is := p.looksAt(t, pod); home.Gated(is) {
					t.Error("it is gated once nothing fails")
				}
			})
		}
	}
}

func TestAPodThatIsTooLongToBeKeptGoesWithoutItsHome(t *testing.T) {
	pod := hometest.Pod(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"a": strings.Repeat("x", 1<<17)} })
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	is := p.looksAt(t, pod)
	if home.Gated(is) || len(is.Spec.NodeSelector["a"]) != 1<<17 || len(nodesOfPod(is)) > 0 {
		t.Errorf("it is gated, or has changed: %.200v", is.Spec)
	}
	if notes := p.notes(); len(notes) != 1 || !strings.HasPrefix(notes[0], "Warning "+home.ReasonPodTooLong) {
		t.Errorf("said %q", notes)
	}
}

func TestAPodThatWaitsForHoursSaysSoAgain(t *testing.T) {
	pod := hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "24h"))
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a", hometest.Cordoned),
		keptOn("node-1", stayputv1alpha1.PhaseBound, hometest.Noon)))
	for _, pause := range []time.Duration{0, time.Minute, cluster.SayAgainAfter} {
		p.time = p.time.Add(pause)
		result, err := p.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(pod)})
		if err != nil || result.RequeueAfter == 0 || result.RequeueAfter > cluster.SayAgainAfter {
			t.Errorf("after %s more it is looked at again after %s, %v", pause, result.RequeueAfter, err)
		}
		if notes := p.notes(); (len(notes) > 0) != (pause != time.Minute) {
			t.Errorf("after %s more it says %q", pause, notes)
		}
	}
}

// unreadable is a cache that cannot be read.
type unreadable struct{ client.Reader }

func (unreadable) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("unreadable")
}

func TestAPodThatCannotBeReadIsTriedAgain(t *testing.T) {
	pod := hometest.Pod()
	p := testPlacer(fakeAPI(t, pod))
	p.cache = unreadable{p.cache}
	if _, err := p.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(pod)}); err == nil {
		t.Error("it is not tried again")
	}
}

func TestAPodSaysThatPoolsCannotBeRead(t *testing.T) {
	pod := hometest.Pod()
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a")))
	p.pools = podip.New(nil, nil, nil, nil, podip.Options{}).Claims() // which has not read any
	key := client.ObjectKeyFromObject(pod)
	for _, pause := range []time.Duration{0, cluster.SayFailureAfter - 1, 1} {
		p.time = p.time.Add(pause)
		result, err := p.Reconcile(t.Context(), reconcile.Request{NamespacedName: key})
		if result.RequeueAfter != cluster.SayFailureAfter || err != nil {
			t.Fatalf("it is looked at again after %s, %v", result.RequeueAfter, err)
		}
		notes := p.notes()
		if said := len(notes) == 1 && strings.HasPrefix(notes[0], "Warning "+home.ReasonNotPlaced); said != (pause == 1) {
			t.Fatalf("after %s more it says %q", pause, notes)
		}
	}
}
