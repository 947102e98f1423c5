package cli

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
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
	if len(s.Lives) != 1 || !s.Lives[0].Present || s.Lives[0].Node != "node-1" || s.IfDeleted.Outcome != "unknown" {
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
		if s := f.story(); s.Pod != "web-2" || s.Workload != "StatefulSet/web" || len(s.Lives) != 1 ||
			s.Lives[0].State != "stopped" {
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
