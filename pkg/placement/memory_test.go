package placement

import (
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
)

func TestWhereAPodEndedIsRememberedForAWhile(t *testing.T) {
	now := hometest.Noon
	m := newMemory(func() time.Time { return now })
	key := client.ObjectKeyFromObject(hometest.Pod())
	m.deleted(hometest.Pod(hometest.RanOn("node-1"), func(p *corev1.Pod) { p.Annotations = nil }))
	if node := m.ended(key).Node; node != "" {
		t.Fatalf("a pod that asked for no address was on %q", node)
	}
	m.deleted(hometest.Pod(hometest.RanOn("node-0"), func(p *corev1.Pod) { p.Status.PodIP = "" }))
	if e := m.ended(key); e.Node != "node-0" || e.Fresh {
		t.Fatalf("a pod of which no IP was known yet ended as %+v", e)
	}
	m.deleted(hometest.Pod(hometest.RanOn("node-1")))
	now = now.Add(home.Publishing / 2)
	m.deleted(hometest.Pod(hometest.RanOn("node-2")))
	now = now.Add(home.Publishing/2 + time.Second) // the first has been forgotten, the second has not
	m.deleted(hometest.Pod(func(p *corev1.Pod) { p.Name = "other" }))
	if node := m.ended(key).Node; node != "node-2" {
		t.Errorf("it was on %q", node)
	}
	now = now.Add(home.Publishing)
	m.deleted(hometest.Pod(func(p *corev1.Pod) { p.Name = "other" }))
	if node := m.ended(key).Node; node != "" || len(m.last)+len(m.order) > 0 {
		t.Errorf("it was on %q, and %d and %d are remembered", node, len(m.last), len(m.order))
	}
}

func TestWhereAPodEndedIsRememberedWhileItsSuccessorIsGated(t *testing.T) {
	now := hometest.Noon
	m := newMemory(func() time.Time { return now })
	key := client.ObjectKeyFromObject(hometest.Pod())
	m.deleted(hometest.Pod(hometest.RanOn("node-1")))
	m.seen(hometest.Pod())
	for range 3 {
		now = now.Add(home.Publishing + time.Second)
		m.deleted(hometest.Pod(func(p *corev1.Pod) { p.Name = "other" }))
		if l := m.ended(key); l.Node != "node-1" || !l.At.Equal(hometest.Noon) {
			t.Fatalf("it was on %q at %s", l.Node, l.At)
		}
	}
	m.seen(hometest.Pod(func(p *corev1.Pod) { p.Spec.SchedulingGates = nil }))
	now = now.Add(home.Publishing + time.Second)
	m.deleted(hometest.Pod(func(p *corev1.Pod) { p.Name = "other" }))
	if len(m.last)+len(m.order) > 0 {
		t.Errorf("%v is remembered for ever", m.last)
	}
}

// A list after a watch that was cut shows the next pod of the name only: to the cache, the one before has changed.
func TestWhereAPodThatWasReplacedUnseenEndedIsRemembered(t *testing.T) {
	m := newMemory(func() time.Time { return hometest.Noon })
	was := hometest.Pod(hometest.RanOn("node-1"))
	next := hometest.Pod(func(p *corev1.Pod) { p.UID = "next" })
	m.handler().OnUpdate(cluster.PodOf(was), cluster.PodOf(next))
	if e := m.ended(client.ObjectKeyFromObject(was)); e.Node != "node-1" {
		t.Errorf("it ended as %+v", e)
	}
}

func TestAPodThatRanForLongHasBeenPublished(t *testing.T) {
	m := newMemory(func() time.Time { return hometest.Noon })
	for ran, fresh := range map[time.Duration]bool{time.Second: true, time.Hour: false} {
		m.deleted(hometest.Pod(hometest.RanOn("node-1"), func(p *corev1.Pod) {
			since := metav1.NewTime(hometest.Noon.Add(-ran))
			p.Status.StartTime = &since
		}))
		if m.ended(client.ObjectKeyFromObject(hometest.Pod())).Fresh != fresh {
			t.Errorf("after %s its RetainedIP may be on its way: %v", ran, !fresh)
		}
	}
}

func TestTheNodeOfAReleasedAddressIsForgotten(t *testing.T) {
	m := newMemory(func() time.Time { return hometest.Noon })
	m.deleted(hometest.Pod(hometest.RanOn("node-1")))
	r := &stayputv1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default"},
		Spec:       stayputv1alpha1.RetainedIPSpec{PodName: "web-0", NodeName: "node-1"},
	}
	m.releases().OnDelete(r) // it vanished: that says nothing
	if l := m.ended(client.ObjectKeyFromObject(hometest.Pod())); l.Node != "node-1" || !l.At.Equal(hometest.Noon) {
		t.Fatalf("it was on %q until %s", l.Node, l.At)
	}
	r.Spec.Release = stayputv1alpha1.ReleaseNow
	m.releases().OnUpdate(nil, r)
	if node := m.ended(client.ObjectKeyFromObject(hometest.Pod())).Node; node != "" {
		t.Errorf("it was on %q", node)
	}
}

func TestAnEvictedPodIsRememberedUntilItsSuccessorHasANode(t *testing.T) {
	m := newMemory(func() time.Time { return hometest.Noon })
	pod := hometest.Pod()
	old := hometest.Pod(func(p *corev1.Pod) { p.UID = "old" })
	m.giveUp(old, "node node-1")
	if m.gaveUp(old) || !m.gaveUp(pod) {
		t.Error("it is for the pod itself, or not for its successor")
	}
	m.seen(hometest.Pod(hometest.RanOn("node-2")))
	if m.gaveUp(pod) {
		t.Error("it is remembered though the successor runs")
	}
}

func TestAPodCreatedDaysLaterSucceedsNoEvictedOne(t *testing.T) {
	now := hometest.Noon
	m := newMemory(func() time.Time { return now })
	m.giveUp(hometest.Pod(func(p *corev1.Pod) { p.UID = "old" }), "node node-1")
	created := func(at time.Time) *corev1.Pod {
		return hometest.Pod(func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(at) })
	}
	if !m.gaveUp(created(hometest.Noon.Add(-time.Second))) || !m.gaveUp(created(hometest.Noon.Add(time.Minute))) {
		t.Error("it is not for the successor, of which the API server's clock says when it was created")
	}
	now = hometest.Noon.Add(72 * time.Hour)
	if m.gaveUp(created(now)) {
		t.Error("it is for whoever comes")
	}
	m.giveUp(hometest.Pod(func(p *corev1.Pod) { p.Name, p.UID = "web-1", "another" }), "node node-1")
	if len(m.records) != 1 {
		t.Errorf("%v are remembered for ever", m.records)
	}
}

func TestAnUngatedPodIsLeftAloneWhileItLooksGated(t *testing.T) {
	m := newMemory(time.Now)
	pod := hometest.Pod()
	m.Ungated(pod)
	if !m.WasUngated(pod) || m.WasUngated(hometest.Pod(func(p *corev1.Pod) { p.UID = "another" })) {
		t.Error("another pod than the ungated one is left alone")
	}
	m.seen(hometest.Pod(func(p *corev1.Pod) { p.Spec.SchedulingGates = nil }))
	if len(m.records) > 0 {
		t.Error("it is remembered for ever")
	}
}

func TestWaitingPodsAreWokenByTheirNodesAndByTheirNamespace(t *testing.T) {
	m := newMemory(time.Now)
	pod := hometest.Pod()
	const cordoned, notReady = "is cordoned", "is not Ready"
	if !m.waits(pod, "node node-1", "node-1", cordoned) || m.waits(pod, "node node-1", "node-1", cordoned) {
		t.Error("that it waits is not said once")
	}
	if !m.waits(pod, "node node-1", "node-1", notReady) {
		t.Error("another reason is not said")
	}
	anywhere := hometest.Pod(func(p *corev1.Pod) { p.Name = "anywhere" })
	m.waits(anywhere, "nodes with zone a", corev1.LabelTopologyZone+"=a", notReady)
	for at, want := range map[string]string{"node-1": "web-0", corev1.LabelTopologyZone + "=a": "anywhere", "node-2": ""} {
		name := ""
		for _, key := range m.waitingFor(at) {
			name += key.Name
		}
		if name != want {
			t.Errorf("%s wakes %q, want %q", at, name, want)
		}
	}
	if len(m.waitingIn("default")) != 2 || len(m.waitingIn("other")) != 0 {
		t.Errorf("the namespaces wake %v and %v", m.waitingIn("default"), m.waitingIn("other"))
	}
	m.decided(client.ObjectKeyFromObject(pod))
	m.decided(client.ObjectKeyFromObject(anywhere))
	if m.waitingPods() != 0 || len(m.records)+len(m.waiting) > 0 {
		t.Error("they are remembered for ever")
	}
}

func TestAnAddressOfASharedIdentityIsForOnePod(t *testing.T) {
	at := func(name string) *stayputv1alpha1.RetainedIP {
		since := metav1.NewTime(hometest.Noon)
		return &stayputv1alpha1.RetainedIP{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:       stayputv1alpha1.RetainedIPSpec{NodeName: name},
			Status: stayputv1alpha1.RetainedIPStatus{
				Phase: stayputv1alpha1.PhaseRetained, IPs: []string{"10.0.0." + name[len(name)-1:]}, Since: &since,
			},
		}
	}
	kept := []*stayputv1alpha1.RetainedIP{at("node-1"), at("node-3")}
	m := newMemory(time.Now)
	pods := make([]*corev1.Pod, 3)
	for i := range pods {
		pods[i] = hometest.Pod(func(p *corev1.Pod) { p.UID = types.UID(rune('a' + i)) })
	}
	assign := func(pod *corev1.Pod) *stayputv1alpha1.RetainedIP {
		r, _ := m.assign(pod, kept, hometest.Noon)
		return r
	}
	first, second := assign(pods[0]), assign(pods[1])
	if first == nil || second == nil || first == second {
		t.Fatalf("two pods were assigned %v and %v", first, second)
	}
	if third := assign(pods[2]); third != nil {
		t.Errorf("a third was assigned %v", third)
	}
	if again := assign(pods[0]); again != first {
		t.Errorf("the first was assigned %v and %v", first, again)
	}
	pods[0].Spec.NodeName = first.Spec.NodeName
	for _, ip := range []string{"", first.Status.IPs[0]} {
		pods[0].Status.PodIP = ip
		m.seen(pods[0])
		if third := assign(pods[2]); third != nil {
			t.Errorf("a third was assigned %v before its node said that the first has it, with the IP %q", third, ip)
		}
	}
	pods[0].Status.PodIP = "10.0.0.9" // it got another address
	m.seen(pods[0])
	if third := assign(pods[2]); third != first {
		t.Errorf("what the first left was not given to the third, but %v", third)
	}
	pods[1].Spec.NodeName = "node-4"
	m.seen(pods[1])
	m.deleted(pods[2])
	if len(m.assignments.pods)+len(m.holds) > 0 {
		t.Error("they are remembered for ever")
	}
}

// A pod that is there when the controller starts is decoded only if something is remembered of it.
func TestAPodWithANodeIsRememberedNoLonger(t *testing.T) {
	m := newMemory(time.Now)
	ran := cluster.PodOf(hometest.Pod(hometest.RanOn("node-1")))
	if m.remembers(ran) {
		t.Error("something is remembered of a pod that was never seen")
	}
	gated := hometest.Pod(func(p *corev1.Pod) { p.UID = ran.GetUID() })
	m.handler().OnAdd(cluster.PodOf(gated), true)
	if !m.remembers(ran) || m.gatedPods()[waitsForNothing].pods != 1 {
		t.Error("a gated pod is not remembered")
	}
	m.handler().OnUpdate(cluster.PodOf(gated), ran)
	if m.remembers(ran) || m.gatedPods()[waitsForNothing].pods != 0 {
		t.Error("a pod that has a node now is still remembered as gated")
	}
}
