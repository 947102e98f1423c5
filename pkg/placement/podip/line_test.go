package podip

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// pods returns the pods that are to be looked at, and forgets all that is.
func (l *line) pods() (uids []string) {
	for _, k := range l.now {
		if k.Kind == pool.KeyPod {
			uids = append(uids, k.Name)
		}
	}
	l.now = nil
	return uids
}

// Ten thousand pods wait for one address: who gets it is looked at, and nobody else.
func TestOfThePodsThatWaitThoseAreLookedAtForWhichThereIsRoom(t *testing.T) {
	const many = 10_000
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.102"))
	c := control(t, a)
	c.works()
	addrs := []netip.Addr{netip.MustParseAddr("10.6.168.101"), netip.MustParseAddr("10.6.168.102")}
	put := func(addr netip.Addr) {
		c.mu.Lock()
		defer c.unlock()
		c.session.setIPLocked(&stayputv1alpha1.PodIP{
			ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPName(addr), UID: "ip", ResourceVersion: "1"},
			Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeL2, Namespace: "default",
				PodName: "other", PodUID: "other", Interface: "eth0"},
		})
	}
	for _, addr := range addrs {
		put(addr)
	}
	c.line.pods()
	var pods []*cluster.Pod
	waits := func(uid pool.UID) {
		c.mu.Lock()
		defer c.unlock()
		plan := c.session.book.Place(uid, a.now)
		if plan.Reason == "" {
			t.Fatalf("%s gets an address: %+v", uid, plan)
		}
	}
	for i := range many { // the youngest first
		pod := cluster.PodOf(asking(fmt.Sprintf("web-%05d", many-1-i), "blue", made(time.Duration(many-1-i)*time.Second)))
		pods = append(pods, pod)
		c.follower.podEvents(c.t.Context(), c.session).OnAdd(pod, false)
		if got := c.line.pods(); len(got) != 1 {
			t.Fatalf("a new pod has %d looked at", len(got))
		}
		waits(pod.GetUID())
		if got := c.line.pods(); len(got) != 0 {
			t.Fatalf("a pod that waits has %d looked at", len(got))
		}
	}
	free := func(addr netip.Addr) []string {
		c.mu.Lock()
		c.session.removeIPLocked(addr)
		c.unlock()
		return c.line.pods()
	}
	is := func(when string, got []string, want ...string) {
		t.Helper()
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v are looked at, want %v", when, got, want)
		}
	}
	is("one address is free", free(addrs[0]), "other", "web-00000")
	c.mu.Lock()
	plan := c.session.book.Place("uid-web-00000", a.now)
	c.unlock()
	if len(plan.Writes) == 0 {
		t.Fatalf("the oldest waits: %+v", plan)
	}
	is("it is about to be given, and another one is free", free(addrs[1]), "other", "web-00001")
	c.session.unreserve(plan.Writes)
	is("it was not given", c.line.pods(), "web-00001", "web-00002")
	put(addrs[0])
	put(addrs[1])
	c.line.pods()
	c.wakesWaiting()
	is("none is free", c.line.pods())
	for _, pod := range pods {
		c.follower.podEvents(c.t.Context(), c.session).OnDelete(pod)
		is("a pod that waits is deleted", c.line.pods())
	}
	if left := c.session.book.Waiting("blue"); len(left) > 0 {
		t.Errorf("%v wait", left)
	}
}

// A pod whose annotation is no longer valid can be given nothing.
func TestAPodThatIsGivenNothingKeepsNoOtherPodWaiting(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"), asking("has", "blue"),
		asking("web-1", "blue", made(time.Second)), asking("web-2", "blue", made(2*time.Second)))
	c := control(t, a)
	c.works()
	first, _ := a.pod(t, "web-1")
	first.Annotations[stayputv1alpha1.AnnotationRetainIP] = "for ever"
	if err := a.Update(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	c.works()
	has, _ := a.pod(t, "has")
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(has.UID), "node-1")
	if err := a.Delete(t.Context(), has); err != nil {
		t.Fatal(err)
	}
	c.works()
	if pod, got := a.pod(t, "web-2"); home.Gated(pod) || len(got) != 1 {
		t.Errorf("web-2 waits behind a pod that is given nothing: %q", c.notes())
	}
	first, _ = a.pod(t, "web-1")
	delete(first.Annotations, stayputv1alpha1.AnnotationRetainIP)
	if err := a.Update(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	c.works()
	if got := c.session.book.Waiting("blue"); len(got) != 1 || got[0] != "uid-web-1" {
		t.Errorf("%v wait", got)
	}
}

// The watch of namespaces is behind that of pods.
func TestAPodThatIsSeenBeforeTheDefaultOfItsNamespaceGetsAnAddress(t *testing.T) {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	a := newAPI(t, space, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"))
	c := control(t, a)
	c.works()
	plain := hometest.Pod(func(p *corev1.Pod) { p.Name, p.UID = "plain", "uid-plain" })
	if owns, err := c.claimer.asks(t.Context(), plain); owns || err != nil {
		t.Errorf("a pod of a namespace without a default: %t, %v", owns, err)
	}
	space.Annotations = map[string]string{stayputv1alpha1.AnnotationPools: "blue"}
	pod := hometest.Pod(func(p *corev1.Pod) { p.Name, p.UID = "web-0", "uid-web-0" })
	for _, err := range []error{a.Update(t.Context(), space), a.WithWatch.Create(t.Context(), pod)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	c.follower.podEvents(c.t.Context(), c.session).OnAdd(cluster.PodOf(pod), false)
	if owns, err := c.claimer.asks(t.Context(), pod); !owns || err != nil {
		t.Fatalf("it is let go without: %t, %v", owns, err)
	}
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
		t.Fatal(err)
	}
	c.line.Add(podKey("web-0"))
	for len(c.line.now) > 0 {
		if err := c.step(); err != nil {
			t.Fatal(err)
		}
	}
	if is, has := a.pod(t, "web-0"); home.Gated(is) || len(has) != 1 {
		t.Errorf("gated %t with %v: %q", home.Gated(is), has, c.notes())
	}
	// One whose end was seen before is not put in.
	gone := hometest.Pod(func(p *corev1.Pod) { p.Name, p.UID = "gone", types.UID("uid-gone") })
	if claim, err := c.claimer.Claim(t.Context(), cluster.PodOf(gone)); err != nil || claim == nil || claim.Ready {
		t.Errorf("a pod that has ended claims %+v, %v", claim, err)
	}
	if is := c.session.book.Pod("uid-gone"); is != nil {
		t.Errorf("a pod that has ended is known: %+v", is)
	}
}
