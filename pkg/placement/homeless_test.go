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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/gate"
)

func TestAPodWhoseHomeAPolicyForbidsGoesWithoutItAfterHomeWait(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	for name, refusal := range map[string]error{
		"a webhook": apierrors.NewForbidden(pods, "web-0", errors.New("Node affinity cannot be used")),
		"a policy": apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "web-0",
			field.ErrorList{{Detail: "Node affinity cannot be used"}}),
		"a kyverno webhook":  apierrors.NewBadRequest("admission webhook denied the request: Node affinity cannot be used"),
		"a change meanwhile": apierrors.NewConflict(pods, "web-0", errors.New("Node affinity cannot be used")),
		"an outage":          apierrors.NewInternalError(errors.New("Node affinity cannot be used")),
	} {
		t.Run(name, func(t *testing.T) {
			forbidden := gate.Refused(refusal)
			pod := hometest.Pod(hometest.Annotation("kept", "so"))
			p := testPlacer(patched(fakeAPI(t, pod, hometest.Node("node-1", "a"),
				keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)), func(patch string) error {
				if strings.Contains(patch, "nodeAffinity") {
					return refusal
				}
				return nil
			}, nil))
			end := pod.CreationTimestamp.Add(home.DefaultWait)
			request := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(pod)}
			for p.time.Before(end) {
				result, err := p.Reconcile(t.Context(), request)
				if is := p.sees(t, pod); !home.Gated(is) {
					t.Fatalf("ungated %s before its home-wait was over", end.Sub(p.time))
				}
				if err != nil { // tried again by the queue
					result.RequeueAfter = time.Second
				}
				p.time = p.time.Add(result.RequeueAfter)
			}
			notes := p.notes()
			if !slices.ContainsFunc(notes, func(note string) bool {
				return strings.HasPrefix(note, "Warning PodNotPlaced ") && strings.Contains(note, "Node affinity cannot be used")
			}) && forbidden {
				t.Errorf("said %q", notes)
			}
			_, _ = p.Reconcile(t.Context(), request)
			if is := p.sees(t, pod); home.Gated(is) == forbidden || home.NodeAffinityOf(is) != nil ||
				is.Annotations[stayputv1alpha1.AnnotationPinned] != "" {
				t.Errorf("gated %t with %+v", home.Gated(is), is.ObjectMeta)
			}
			notes = p.notes()
			if said := slices.ContainsFunc(notes, func(note string) bool {
				return strings.HasPrefix(note, "Warning HomeGivenUp its home, node node-1, cannot be in the pod's node affinity: "+
					"") &&
					strings.Contains(note, "Node affinity cannot be used")
			}); said != forbidden {
				t.Errorf("said %q", notes)
			}
		})
	}
}

func TestAnAffinityThatAnotherProgramRemovesIsSaid(t *testing.T) {
	pod := hometest.Pod()
	p := testPlacer(patched(fakeAPI(t, pod, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)), nil,
		func(is *corev1.Pod) { is.Spec.Affinity = nil }))
	is := p.looksAt(t, pod)
	notes := p.notes()
	if home.Gated(is) || !slices.Contains(notes, "Warning HomeGivenUp its home, node node-1, cannot be in the pod's node "+
		"affinity: "+gate.ErrAffinityRemoved.Error()+": the pod goes elsewhere; its address there still expires as "+
		"scheduled") {
		t.Errorf("gated %t, said %q", home.Gated(is), notes)
	}
}

// What is refused with what a pod's predecessor had as well as with its home is left out part by part.
func TestAPodLosesNoMoreThanWhatIsRefused(t *testing.T) {
	refused := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "web-0", errors.New("no"))
	for name, c := range map[string]struct {
		words    []string // of a patch that is refused
		optional bool
		want     []gate.Part
		gated    bool
	}{
		"nothing":                      {nil, true, nil, false},
		"the home":                     {[]string{"nodeAffinity"}, true, []gate.Part{gate.PartHome}, false},
		"a home that it must not lose": {[]string{"nodeAffinity"}, false, nil, true},
		"what is recorded":             {[]string{"recorded"}, false, []gate.Part{gate.PartRecorded}, false},
		"both":                         {[]string{"nodeAffinity", "recorded"}, true, []gate.Part{gate.PartHome, gate.PartRecorded}, false},
		"anything":                     {[]string{"schedulingGates"}, true, nil, true},
	} {
		pod := hometest.Pod()
		api := patched(fakeAPI(t, pod), func(patch string) error {
			if slices.ContainsFunc(c.words, func(word string) bool { return strings.Contains(patch, word) }) {
				return refused
			}
			return nil
		}, nil)
		var missing []gate.Part
		err := gate.Place(t.Context(), api, pod, gate.Placement{Home: home.Affinity{Node: "node-1"}, Pinned: "node node-1",
			HomeOptional: c.optional, Recorded: map[string]string{"recorded": "so"},
			Missing: func(part gate.Part, _ error) { missing = append(missing, part) }})
		slices.Sort(missing)
		if !slices.Equal(missing, c.want) || gate.Refused(err) != c.gated {
			t.Errorf("%s: without %q, %v", name, missing, err)
		}
	}
}

// patched is an API server whose admission refuses patches of pods, or changes what they make.
func patched(api client.WithWatch, refuses func(patch string) error, changes func(*corev1.Pod)) client.WithWatch {
	return interceptor.NewClient(api, interceptor.Funcs{Patch: func(ctx context.Context, c client.WithWatch,
		o client.Object,
		patch client.Patch, options ...client.PatchOption) error {
		data, err := patch.Data(o)
		if err != nil {
			return err
		}
		if refuses != nil {
			if err := refuses(string(data)); err != nil {
				return err
			}
		}
		if err := c.Patch(ctx, o, patch, options...); err != nil || changes == nil {
			return err
		}
		pod, ok := o.(*corev1.Pod)
		if !ok {
			return nil
		}
		changes(pod)
		return c.Update(ctx, pod)
	}})
}

// sees returns a pod as it is.
func (p *placing) sees(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	is := &corev1.Pod{}
	if err := p.client.Get(t.Context(), types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, is); err != nil {
		t.Fatal(err)
	}
	return is
}
