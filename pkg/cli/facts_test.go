package cli

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/retention"
)

// unreachable are agents that the user may not ask.
type unreachable struct{}

func (unreachable) Run(context.Context, string, []byte, ...string) ([]byte, error) {
	return nil, rightTo("create pods/exec", apierrors.NewForbidden(corev1.Resource("pods"), "agent", nil))
}

func aCluster(forbidden func(client.ObjectList) bool, objects ...client.Object) client.Client {
	return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithIndex(&corev1.Event{}, "involvedObject.name", func(o client.Object) []string {
			return []string{o.(*corev1.Event).InvolvedObject.Name}
		}).
		WithIndex(&corev1.ConfigMap{}, "metadata.name", func(o client.Object) []string { return []string{o.GetName()} }).
		WithInterceptorFuncs(interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList,
			o ...client.ListOption) error {
			if forbidden(list) {
				return apierrors.NewForbidden(corev1.Resource("things"), "", nil)
			}
			return c.List(ctx, list, o...)
		}}).Build()
}

func nothing(client.ObjectList) bool { return false }

func TestWithoutRightsAStorySaysWhatItDoesNotKnow(t *testing.T) {
	f := someFacts()
	k := aCluster(func(list client.ObjectList) bool {
		switch list.(type) {
		case *corev1.EventList, *corev1.NodeList:
			return true
		}
		return false
	}, f.pod, f.workload, f.kept[0].Object)
	f, err := gather(t.Context(), &cluster{Client: k, agents: unreachable{}, namespace: "default",
		installation: DefaultNamespace}, "web-2")
	if err != nil {
		t.Fatal(err)
	}
	s := f.story()
	unknown := strings.Join(s.Unknown, "\n")
	for _, what := range []string{"the nodes: ", "Events: ", "the ledger of node node-1: "} {
		if !strings.Contains(unknown, what) {
			t.Errorf("%q is not said to be unknown: %q", what, unknown)
		}
	}
	if s.Node != "node-1" || s.IfDeleted.Outcome != "unknown" {
		t.Errorf("told is %+v", s)
	}
	told(t, f)
}

func TestAPodThatIsGoneIsFoundByItsRetainedIP(t *testing.T) {
	k := aCluster(nothing, aRetainedIP(), aSet(map[string]any{"replicas": int64(3)}))
	for _, name := range []string{"web-2", "web-2.node-1"} {
		f, err := gather(t.Context(), &cluster{Client: k, agents: unreachable{}, namespace: "default",
			installation: DefaultNamespace}, name)
		if err != nil {
			t.Fatal(err)
		}
		if s := f.story(); s.Pod != "web-2" || s.Workload != "StatefulSet/web" ||
			len(s.Kept) != 1 || s.Kept[0].Phase != "Retained" {
			t.Errorf("%s: %+v", name, s)
		}
	}
	// A pod may have the name of another one's object.
	k = aCluster(nothing, aPodIP(), aRetainedIP(func(r *stayputv1alpha1.RetainedIP) {
		r.Name, r.Spec.PodName = "10.6.168.101.node-1", "10.6.168.101"
	}))
	f, err := gather(t.Context(), &cluster{Client: k, agents: unreachable{}, namespace: "default",
		installation: DefaultNamespace}, "10.6.168.101")
	if err != nil || f.name != "web-2" || len(f.kept) != 1 || f.kept[0].pod != "web-2" {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err := gather(t.Context(), &cluster{Client: k, agents: unreachable{}, namespace: "default",
		installation: DefaultNamespace}, "web-7"); err == nil ||
		!strings.Contains(err.Error(), "pod web-7 in namespace default does not exist") {
		t.Error(err)
	}
}

// forbids is a client of a user who may not read certain kinds.
func forbids(k client.Client, kinds ...string) client.Client {
	refuse := func(o runtime.Object) error {
		gvk, err := apiutil.GVKForObject(o, scheme)
		if err == nil && slices.Contains(kinds, strings.TrimSuffix(gvk.Kind, "List")) {
			return apierrors.NewForbidden(corev1.Resource(gvk.Kind), "", nil)
		}
		return err
	}
	return interceptor.NewClient(k.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
			opts ...client.GetOption) error {
			if err := refuse(o); err != nil {
				return err
			}
			return c.Get(ctx, key, o, opts...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if err := refuse(list); err != nil {
				return err
			}
			return c.List(ctx, list, opts...)
		},
	})
}

// What someone with few rights is told is what an administrator is told, or that it is unknown.
func TestWithFewRightsNoStoryContradictsTheWholeOne(t *testing.T) {
	pod := func(name string, annotations map[string]string) *corev1.Pod {
		p := someFacts().pod
		p.Name, p.UID, p.Annotations = name, types.UID(name), annotations
		return p
	}
	pools := map[string]string{stayputv1alpha1.AnnotationPools: "blue"}
	template := func(annotations map[string]string) *unstructured.Unstructured {
		all := map[string]any{}
		for key, value := range annotations {
			all[key] = value
		}
		return aSet(map[string]any{"replicas": int64(9),
			"template": map[string]any{"metadata": map[string]any{"annotations": all}}})
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	asking := ns.DeepCopy()
	asking.Annotations = pools
	refused := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "refused"},
		Reason: retention.ReasonRefused, Message: "the node promises no more addresses",
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-2", UID: "web-2"}}
	state := &kruisev1alpha1.PersistentPodState{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	state.Spec.TargetReference = kruisev1alpha1.TargetReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web"}
	state.Spec.RequiredPersistentTopology = &kruisev1alpha1.NodeTopologyTerm{
		NodeTopologyKeys: []string{corev1.LabelHostname}}
	state.Status.PodStates = map[string]kruisev1alpha1.PodState{"web-2": {NodeName: "node-1",
		NodeTopologyLabels: map[string]string{corev1.LabelHostname: "node-1"}}}
	node := aNode("node-1")
	retain := map[string]string{stayputv1alpha1.AnnotationRetainIP: "10m"}
	for what, objects := range map[string][]client.Object{
		"a pod of a pool":                    {pod("web-2", pools), template(pools), ns, aPool(), aPodIP()},
		"a pod whose namespace names a pool": {pod("web-2", nil), template(nil), asking, aPool(), aPodIP()},
		"a pod that waits for a pool":        {pod("web-2", pools), template(pools), ns, aPool()},
		"a pod of a pool that is gone":       {template(pools), ns, aPool(), aPodIP(podIPRetained)},
		"a pod that is gone":                 {template(retain), ns, aRetainedIP()},
		"a pod without a promise":            {pod("web-2", nil), template(nil), ns, aPool()},
		"a pod whose promise was refused":    {pod("web-2", retain), template(retain), ns, refused},
		"a pod with a record":                {pod("web-2", nil), template(nil), ns, state},
	} {
		k := aCluster(nothing, append(objects, &node)...)
		told := func(kinds ...string) (*Story, error) {
			f, err := gather(t.Context(), &cluster{Client: forbids(k, kinds...), agents: unreachable{}, namespace: "default",
				installation: DefaultNamespace}, "web-2")
			if err != nil {
				return nil, err
			}
			f.now = noon
			return f.story(), nil
		}
		whole, err := told()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		kinds := []string{"PodIP", "PodIPPool", "Namespace", "StatefulSet", "PersistentPodState", "Node", "Event", "Lease"}
		for _, kinds := range append([][]string{kinds}, slices.Collect(slices.Chunk(kinds, 1))...) {
			s, err := told(kinds...)
			if err != nil {
				if !strings.Contains(err.Error(), "unknown") {
					t.Errorf("%s, without %v: %v", what, kinds, err)
				}
				continue
			}
			for _, line := range slices.Concat(s.Promise, s.IfDeleted.Lines) {
				if !slices.Contains(slices.Concat(whole.Promise, whole.IfDeleted.Lines), line) &&
					!strings.Contains(line, "nknown") && !strings.Contains(line, "cannot be read") {
					t.Errorf("%s, without %v: told %q, the whole is %q and %q", what, kinds, line, whole.Promise,
						whole.IfDeleted.Lines)
				}
			}
			if got := s.IfDeleted.Outcome; got != whole.IfDeleted.Outcome && got != "unknown" {
				t.Errorf("%s, without %v: the outcome is %s, the whole %s", what, kinds, got, whole.IfDeleted.Outcome)
			}
		}
	}
}
