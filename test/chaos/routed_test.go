package main

import (
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

var (
	addrA, addrB = netip.MustParseAddr("10.50.0.1"), netip.MustParseAddr("10.50.0.2")
	noon         = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
)

// said checks the violations of a report.
func said(t *testing.T, r *report, want ...string) {
	t.Helper()
	if len(r.violations) != len(want) {
		t.Fatalf("%d violations, want %d: %q", len(r.violations), len(want), r.violations)
	}
	for i, v := range r.violations {
		if !strings.Contains(v, want[i]) {
			t.Errorf("%q, want %q", v, want[i])
		}
	}
}

// tenantPod is a state of a pod of the pool far. Without an address it is not Ready.
func tenantPod(name, uid, node, ip string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), Labels: map[string]string{"app": "far"}},
		Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{PodIP: ip},
	}
	if ip != "" {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	return p
}

// podIP is that of an address.
func podIP(addr, pod string) *v1alpha1.PodIP {
	return &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: addr}, Spec: v1alpha1.PodIPSpec{PodName: pod}}
}

func TestALostAddressIsSeen(t *testing.T) {
	const ip, other = "10.50.0.1", "10.50.0.2"
	for _, is := range []struct {
		name    string
		happens func(*tenants)
		want    []string
	}{
		{"kept on another node", func(a *tenants) { a.seePod(tenantPod("far-0", "b", "node-2", ip)) }, nil},
		{"not yet there", func(a *tenants) { a.seePod(tenantPod("far-0", "b", "node-2", "")) }, nil},
		{"another one", func(a *tenants) { a.seePod(tenantPod("far-0", "b", "node-2", other)) },
			[]string{"far-0 had 10.50.0.1 and has 10.50.0.2 on node-2"}},
		{"of another pod", func(a *tenants) { a.seePod(tenantPod("far-1", "b", "node-2", ip)) },
			[]string{"far-1 has 10.50.0.1, the address of far-0"}},
		{"given to another pod", func(a *tenants) { a.seeIP(podIP(ip, "far-1")) },
			[]string{"PodIP 10.50.0.1 is given to far-1, and was that of far-0"}},
		{"in conflict", func(a *tenants) {
			is := podIP(ip, "far-0")
			is.Status.Conflict = "02:00:00:00:00:01"
			a.seeIP(is)
		}, []string{"PodIP 10.50.0.1 is said to be that of the machine 02:00:00:00:00:01"}},
		{"freed", func(a *tenants) { a.goneIP(podIP(ip, "far-0")) }, []string{"the address 10.50.0.1 of far-0 was freed"}},
		{"freed at the end", func(a *tenants) { a.end(); a.goneIP(podIP(ip, "far-0")) }, nil},
	} {
		t.Run(is.name, func(t *testing.T) {
			r := newReport(io.Discard, io.Discard, "a test")
			a := newTenants(r, &weather{now: r.now})
			pod := tenantPod("far-0", "a", "node-1", ip)
			a.seePod(pod)
			a.seeIP(podIP(ip, "far-0"))
			a.gonePod(pod)
			is.happens(a)
			said(t, r, is.want...)
		})
	}
}

func TestAPodOfALostNodeThatWaitsLongIsSeen(t *testing.T) {
	const ip, long = "10.50.0.1", "far-0 (c) took 45s from the lost node-1 to node-2"
	for _, is := range []struct {
		name   string
		wait   time.Duration
		broken string // meanwhile
		want   []string
	}{
		{"at once", time.Second, "", nil},
		{"long", 45 * time.Second, "", []string{long}},
		{"without an API server", 45 * time.Second, theServer, nil},
		{"with another node down", 45 * time.Second, "node-2", nil},
		{"with the lost node down", 45 * time.Second, "node-1", []string{long}},
	} {
		t.Run(is.name, func(t *testing.T) {
			r := newReport(io.Discard, io.Discard, "a test")
			now := noon
			r.now = func() time.Time { return now }
			w := &weather{now: r.now}
			a := newTenants(r, w)
			a.nodes = []string{"node-1", "node-2"}
			a.seePod(tenantPod("far-0", "a", "node-1", ip))
			w.begins(deletedNode("node-1"), "declared out of service")
			if is.broken != "" {
				w.strikes(is.broken, "broken", lately)
			}
			a.gonePod(tenantPod("far-0", "a", "node-1", ip))
			a.seePod(tenantPod("far-0", "b", "node-1", "")) // the wait goes on
			now = now.Add(is.wait)
			a.gonePod(tenantPod("far-0", "b", "node-1", ""))
			a.seePod(tenantPod("far-0", "c", "node-2", ip))
			said(t, r, is.want...)
		})
	}
}

func TestAnAddressThatMovesIsAskedForMoreOften(t *testing.T) {
	r := newReport(io.Discard, io.Discard, "a test")
	now := noon
	r.now = func() time.Time { return now }
	a := newTenants(r, &weather{now: r.now})
	a.seePod(tenantPod("far-0", "a", "node-1", "10.50.0.1"))
	a.seePod(tenantPod("far-1", "b", "node-1", "10.50.0.2"))
	now = now.Add(restless + time.Second)
	a.gonePod(tenantPod("far-1", "b", "node-1", "10.50.0.2"))
	all, moving := a.addresses()
	if !slices.Equal(all, []netip.Addr{addrA, addrB}) || !slices.Equal(moving, []netip.Addr{addrB}) {
		t.Errorf("%v, of which %v move", all, moving)
	}
}

func TestAnAddressAtTwoPlacesIsSeen(t *testing.T) {
	at := map[netip.Addr]string{addrA: "node-1"}
	for want, places := range map[string][]string{
		"":                                       {"node-1"},
		"configured at [node-1 node-2]":          {"node-1", "node-2"},
		"of a pod on node-1, is configured at [": {},
		"configured at [node-1 node-1]":          {"node-1", "node-1"},
		"configured at [node-2]":                 {"node-2"},
	} {
		wrong := misplaced(at, map[netip.Addr][]string{addrA: places})
		if want == "" && len(wrong) > 0 || want != "" && (len(wrong) != 1 || !strings.Contains(wrong[0], want)) {
			t.Errorf("at %v: %q, want %q", places, wrong, want)
		}
	}
}

func TestAnAllocationThatIsNoPodsIsSeen(t *testing.T) {
	pods := map[netip.Addr]string{addrA: "chaos/far-0 on node-1"}
	for want, blocks := range map[string]map[netip.Addr]string{
		"":                                     pods,
		"that of \"\"":                         {},
		"that of \"chaos/far-0 on node-2\"":    {addrA: "chaos/far-0 on node-2"},
		"10.50.0.2 is that of \"\", by Calico": {addrA: pods[addrA], addrB: "chaos/far-1 on node-1"},
	} {
		wrong := unlike(pods, blocks)
		if want == "" && len(wrong) > 0 || want != "" && (len(wrong) != 1 || !strings.Contains(wrong[0], want)) {
			t.Errorf("%v: %q, want %q", blocks, wrong, want)
		}
	}
}
