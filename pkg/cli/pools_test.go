package cli

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// aPool gives addresses.
func aPool(change ...func(*stayputv1alpha1.PodIPPool)) *stayputv1alpha1.PodIPPool {
	p := &stayputv1alpha1.PodIPPool{
		ObjectMeta: metav1.ObjectMeta{Name: "blue", CreationTimestamp: metav1.NewTime(noon.Add(-time.Hour))},
		Spec:       stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeL2, Subnet: "10.6.0.0/16"},
		Status: stayputv1alpha1.PodIPPoolStatus{
			Addresses: stayputv1alpha1.PodIPPoolAddresses{Total: 10, Used: 2, Free: 8},
			Conditions: []metav1.Condition{{Type: stayputv1alpha1.ConditionReady, Status: metav1.ConditionTrue,
				Reason: "Ready"}},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func condition(kind string, status metav1.ConditionStatus, reason, message string) func(*stayputv1alpha1.PodIPPool) {
	return func(p *stayputv1alpha1.PodIPPool) {
		if kind == stayputv1alpha1.ConditionReady {
			p.Status.Conditions = nil
		}
		p.Status.Conditions = append(p.Status.Conditions,
			metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message})
	}
}

// aPodIP is of pod web-2 of StatefulSet web, which runs on node-1.
func aPodIP(change ...func(*stayputv1alpha1.PodIP)) *stayputv1alpha1.PodIP {
	p := &stayputv1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.101", UID: "ip", ResourceVersion: "7"},
		Spec: stayputv1alpha1.PodIPSpec{
			Pool: "blue", Mode: stayputv1alpha1.ModeL2, Namespace: "default", PodName: "web-2", PodUID: "p",
			Interface: "eth0", Retention: "10m0s", WhenScaled: "Retain", WhenDeleted: "Retain",
			Workload: &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "w"},
		},
		Status: stayputv1alpha1.PodIPStatus{Phase: stayputv1alpha1.PodIPBound, PodUID: "p", NodeName: "node-1"},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func quarantined(p *stayputv1alpha1.PodIP) {
	p.Spec.Quarantine = &stayputv1alpha1.PodIPQuarantine{Reason: "two pods have it", Since: metav1.NewMicroTime(noon)}
}

func TestWhatIsWrongWithPoolsIsFound(t *testing.T) {
	invalid := condition(stayputv1alpha1.ConditionReady, metav1.ConditionFalse, "Invalid", "spec.subnet: no")
	recalling := &stayputv1alpha1.PodIPRoll{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPRollName},
		Spec: stayputv1alpha1.PodIPRollSpec{Round: 9, Epoch: 7, Recalling: true}}
	answer := func(node string, round int64) *stayputv1alpha1.PodIPAnswer {
		return &stayputv1alpha1.PodIPAnswer{ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec: stayputv1alpha1.PodIPAnswerSpec{Round: round}}
	}
	node := func(name string) *corev1.Node { n := aNode(name); return &n }
	for name, test := range map[string]struct {
		objects []client.Object
		level   Level // empty: nothing is said
		says    string
	}{
		"no pool":         {nil, "", ""},
		"a pool":          {[]client.Object{aPool(), aPodIP()}, LevelOK, "1 pool, 2 of 10 addresses are somebody's"},
		"an invalid pool": {[]client.Object{aPool(invalid)}, LevelFail, "PodIPPool blue: spec.subnet: no"},
		"a disabled pool": {[]client.Object{aPool(condition(stayputv1alpha1.ConditionReady, metav1.ConditionFalse,
			"Disabled", "spec.disabled"))}, LevelWarn, "gives no addresses: spec.disabled"},
		"a pool that nobody serves": {[]client.Object{aPool(func(p *stayputv1alpha1.PodIPPool) {
			p.Status = stayputv1alpha1.PodIPPoolStatus{}
		})}, LevelFail, "no controller has looked at it"},
		"a new pool": {[]client.Object{aPool(func(p *stayputv1alpha1.PodIPPool) {
			p.Status, p.CreationTimestamp = stayputv1alpha1.PodIPPoolStatus{}, metav1.NewTime(noon.Add(-poolSlack))
		})}, LevelOK, "1 pool"},
		"an overlap": {[]client.Object{aPool(condition(stayputv1alpha1.ConditionOverlaps, metav1.ConditionTrue,
			"Overlaps", "it shares addresses with pool green"))}, LevelWarn, "it shares addresses with pool green"},
		"an exhausted pool": {[]client.Object{aPool(condition(stayputv1alpha1.ConditionExhausted, metav1.ConditionTrue,
			"PodsWait", "3 pods wait for an address"))}, LevelWarn, "3 pods wait"},
		"a quarantine": {[]client.Object{aPool(), aPodIP(quarantined)}, LevelWarn,
			"10.6.168.101 of pool blue is in quarantine since 2026-01-02T12:00:00Z: two pods have it"},
		"a recall": {[]client.Object{aPool(), recalling, node("node-1"), node("node-2"), answer("node-1", 7),
			answer("node-2", 6)}, LevelFail, "not yet: node-2"},
	} {
		all := checkPools(t.Context(), aCluster(nothing, test.objects...), noon)
		if test.level == "" && len(all) == 0 {
			continue
		}
		if len(all) != 1 || all[0].Level != test.level || !strings.Contains(all[0].Text, test.says) ||
			(all[0].Todo == "") != (test.level == LevelOK) {
			t.Errorf("%s: %+v, want %s %q", name, all, test.level, test.says)
		}
	}
}
