package podip

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// Each call that placing a gated pod makes is the one that fails, in each way.
func TestNoFailureOfAGatedPodGoesUntried(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	refusals := map[string]error{
		"refused":              apierrors.NewForbidden(pods, "web-0", errors.New("exceeded quota")),
		"invalid":              apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "web-0", nil),
		"broken":               apierrors.NewInternalError(errors.New("webhook is away")),
		"said not to be":       apierrors.NewNotFound(pods, "web-0"),
		"said to have changed": apierrors.NewConflict(pods, "web-0", errors.New("changed")),
		"said to be there":     apierrors.NewAlreadyExists(pods, "web-0"),
		"away":                 errors.New("connection refused"),
	}
	calls := map[string]func(c *controlling, err error){}
	for _, write := range []string{"patch PodIPPool blue", "create PodIP 10.6.168.101", "patch Pod web-0"} {
		calls[write] = func(c *controlling, err error) {
			c.api.before = func(w string) error {
				if w == write {
					return err
				}
				return nil
			}
		}
	}
	calls["the home"] = func(c *controlling, err error) {
		c.home = func() (gate.Placement, error) { return gate.Placement{}, err }
	}
	for call, fail := range calls {
		for how, err := range refusals {
			t.Run(call+" is "+how, func(t *testing.T) {
				a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
				c := control(t, a)
				c.looks()
				fail(c, err)
				for range 3 {
					c.looks()
					result, err := c.place("web-0")
					if result.RequeueAfter == 0 && err == nil {
						t.Fatal("it is not tried again")
					}
				}
				if pod, _ := a.pod(t, "web-0"); !home.Gated(pod) {
					t.Fatal("it is not gated: the test shows nothing")
				}
				a.before, c.home = nil, nil
				c.works()
				a.consistent(t)
				if pod, _ := a.pod(t, "web-0"); home.Gated(pod) {
					t.Errorf("it is gated once nothing fails: %q", c.notes())
				}
			})
		}
	}
}

func TestAPodWhoseNamespaceAsksForNothingAnyMoreTakesNoAddress(t *testing.T) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{stayputv1alpha1.AnnotationPools: "blue"}}}
	first := asking("web-0", "blue")
	second := asking("web-1", "", made(time.Second), func(p *corev1.Pod) { p.Annotations = nil })
	a := newAPI(t, hometest.Node("node-1", "a"), ns, aPool("blue", "10.6.168.101"), first, second)
	a.before = func(write string) error { // as the policy stayput-addresses refuses it
		if write == "patch Pod web-1" {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "web-1", errors.New("asks for no pools"))
		}
		return nil
	}
	c := control(t, a)
	c.works()
	if owns, err := c.claimer.asks(t.Context(), second); !owns || err != nil || len(c.session.book.Waiting("blue")) != 1 {
		t.Fatalf("owned %t, %v: the test shows nothing", owns, err)
	}
	ns.Annotations, ns.ResourceVersion = nil, ""
	if err := a.Update(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	if err := a.Delete(t.Context(), first); err != nil { // its address is free
		t.Fatal(err)
	}
	c.works()
	a.now = a.now.Add(time.Minute)
	c.works()
	if owns, err := c.claimer.asks(t.Context(), second); owns || err != nil {
		t.Errorf("it is still placed by pools: %t, %v", owns, err)
	}
	for name, ip := range a.ips(t) {
		if ip.Spec.PodName == "web-1" {
			t.Errorf("it takes %s", name)
		}
	}
	if waiting := c.session.book.Waiting("blue"); len(waiting) > 0 {
		t.Errorf("it keeps its place in the line: %q", waiting)
	}
}

func TestAPodThatIsTooLongToBeKeptGetsNoAddress(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"),
		asking("web-0", "blue", func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"a": strings.Repeat("x", 1<<17)}
		}))
	c := control(t, a)
	c.works()
	if pod, has := a.pod(t, "web-0"); !home.Gated(pod) || has != nil || len(a.ips(t)) > 0 {
		t.Errorf("gated %t, it has %v", home.Gated(pod), has)
	}
	if notes := strings.Join(c.notes(), "\n"); !strings.Contains(notes, "64 KiB") {
		t.Errorf("said %q", notes)
	}
}

func TestWhatAPodWaitsForIsSaidAgain(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"), asking("web-0", "blue"),
		asking("web-1", "blue", made(time.Second)))
	c := control(t, a)
	c.works()
	c.notes()
	for _, pause := range []time.Duration{ordinaryWait + time.Second, time.Minute, cluster.SayAgainAfter} {
		a.now = a.now.Add(pause)
		c.wakesWaiting()
		c.works()
		if notes := c.notes(); (len(notes) > 0) != (pause != time.Minute) {
			t.Errorf("after %s more: %q", pause, notes)
		}
	}
}

// unreadable is an API server whose namespaces cannot be read.
type unreadable struct {
	client.WithWatch
	err error
}

func (u unreadable) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	if o.GetObjectKind().GroupVersionKind().Kind == "Namespace" {
		return u.err
	}
	return u.WithWatch.Get(ctx, key, o, options...)
}

func TestADefaultThatCannotBeReadIsAnErrorOfThePod(t *testing.T) {
	a := newAPI(t, aPool("blue", "10.6.168.101"), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	c := control(t, a)
	pod := asking("web-0", "", func(p *corev1.Pod) { p.Annotations = nil })
	for _, err := range []error{
		apierrors.NewForbidden(schema.GroupResource{Resource: "namespaces"}, "default", errors.New("no right")),
		errors.New("connection refused"),
	} {
		c.live = unreadable{a, err}
		if owns, is := c.claimer.asks(t.Context(), pod); owns || !errors.Is(is, err) || errors.Is(is, ErrUnknown) ||
			!strings.Contains(is.Error(), "namespace default") {
			t.Errorf("owned %t, %v", owns, is)
		}
	}
	c.live = a
	if owns, err := c.claimer.asks(t.Context(), pod); owns || err != nil {
		t.Errorf("owned %t, %v", owns, err)
	}
}
