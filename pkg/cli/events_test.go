package cli

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// anEvent is about a pod web-2, told by the scheduler or the node's kubelet.
func anEvent(uid string, at time.Time, reason, message string) corev1.Event {
	e := corev1.Event{
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-2", UID: types.UID(uid)},
		Type:           corev1.EventTypeNormal, Reason: reason, Message: message,
		Source:        corev1.EventSource{Component: kubelet, Host: "node-1"},
		LastTimestamp: metav1.NewTime(at), FirstTimestamp: metav1.NewTime(at), Count: 1,
	}
	if reason == eventScheduled || reason == "FailedScheduling" {
		e.Source = corev1.EventSource{}
		e.ReportingController, e.LastTimestamp, e.FirstTimestamp, e.EventTime = "default-scheduler", metav1.Time{},
			metav1.Time{}, metav1.NewMicroTime(at)
	}
	return e
}

// fromController is an Event of Stayput's controller.
func fromController(uid string, at time.Time, reason, message string) corev1.Event {
	e := anEvent(uid, at, reason, message)
	e.Source, e.ReportingController = corev1.EventSource{}, stayputv1alpha1.ControllerFieldManager
	return e
}

// aLife is what the scheduler and the kubelet tell of a pod that ran for four minutes.
func aLife(uid string, from time.Time) []corev1.Event {
	return []corev1.Event{
		anEvent(uid, from, eventScheduled, "Successfully assigned default/web-2 to node-1"),
		anEvent(uid, from.Add(time.Second), "Pulled", "Container image already present on machine"),
		anEvent(uid, from.Add(time.Second), "Created", "Container created"),
		anEvent(uid, from.Add(2*time.Second), eventStarted, "Container started"),
		anEvent(uid, from.Add(4*time.Minute), eventKilling, "Stopping container web"),
	}
}

// restarted gives web-2 ten lives before its present one; the tenth waited for its home.
func restarted(f *facts) {
	for i := range 10 {
		f.events = append(f.events, aLife(fmt.Sprintf("p%d", i), noon.Add(-55*time.Minute+time.Duration(i)*5*time.Minute))...)
	}
	f.events = append(f.events,
		fromController("p", noon.Add(-5*time.Minute), "WaitingForHome", "its home, node node-1, is cordoned: the pod waits"),
		fromController("p", noon.Add(-5*time.Minute), "WaitingForHome",
			"its home, node node-1, is cordoned: the pod still waits"),
		anEvent("p", noon.Add(-4*time.Minute), eventScheduled, "Successfully assigned default/web-2 to node-1"),
		anEvent("p", noon.Add(-4*time.Minute), eventStarted, "Container started"))
	f.pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(noon.Add(-4 * time.Minute))}}
}

const tenRestarts = `What happened
  NODE     IP         FROM      TO        STATE
  node-1   unknown    55m ago   51m ago   stopped
  node-1   unknown    50m ago   46m ago   stopped
  node-1   unknown    45m ago   41m ago   stopped
  node-1   unknown    40m ago   36m ago   stopped
  node-1   unknown    35m ago   31m ago   stopped
  node-1   unknown    30m ago   26m ago   stopped
  node-1   unknown    25m ago   21m ago   stopped
  node-1   unknown    20m ago   16m ago   stopped
  node-1   unknown    15m ago   11m ago   stopped
  node-1   unknown    10m ago   6m ago    stopped
    5m ago WaitingForHome (2 times): its home, node node-1, is cordoned: the pod
      still waits
  node-1   10.1.0.9   4m ago    <none>    running

`

func told(t *testing.T, f *facts) string {
	t.Helper()
	var b strings.Builder
	if err := f.story().write(&b, noon); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTenRestartsAreALineEach(t *testing.T) {
	f := someFacts(restarted)
	if out := told(t, f); !strings.Contains(out, tenRestarts) {
		t.Errorf("told is\n%s", out)
	}
	lives := f.story().Lives
	if len(lives) != 11 || lives[0].UID != "p0" || lives[0].Present || !lives[10].Present || lives[10].To != nil ||
		lives[0].IPs != nil {
		t.Errorf("the lives are %+v", lives)
	}
}

func TestALifeIsToldByAllThatKnowsOfIt(t *testing.T) {
	withUID := func(f *facts) {
		left, since := int64(60), noon.Add(-4*time.Minute)
		f.looks["node-1"].Networks[0].Addresses = []inspection.Address{
			{
				IP: addr("10.1.0.7"), State: inspection.Retained, UID: "before", Since: &since, LeftSeconds: &left,
				Promise: &inspection.Promise{},
			},
		}
	}
	from := noon.Add(-10 * time.Minute)
	for name, test := range map[string]struct {
		facts *facts
		want  string
	}{
		"gone, its address kept": {someFacts(gone), "node-1 [10.1.0.9] - -5m stopped"},
		"gone, with its Events": {someFacts(gone, func(f *facts) { f.events = aLife("p", from) }),
			"node-1 [10.1.0.9] -10m -5m stopped"},
		"gated, after a pod that ran": {someFacts(gatedSince(time.Minute), func(f *facts) { f.pod.UID = "now" }),
			"node-1 [10.1.0.9] - -5m stopped"},
		"gated, the first": {someFacts(gatedSince(time.Minute),
			func(f *facts) { f.kept = nil; f.events = []corev1.Event{fromController("p", from, "HomeIgnored", "")} }), ""},
		"in the ledger alone": {someFacts(gone, withUID,
			func(f *facts) { f.kept, f.events = nil, aLife("before", from)[:4] }), "node-1 [10.1.0.7] -10m -4m stopped"},
		"cut off": {someFacts(gone, func(f *facts) { f.kept, f.events = nil, aLife("p", from)[:4] }),
			"node-1 [] -10m - unknown"},
		"evicted": {someFacts(gone, func(f *facts) {
			f.kept, f.events = nil, append(aLife("p", from)[:4], anEvent("p", from.Add(time.Minute), "Evicted", "low on memory"))
		}), "node-1 [] -10m - evicted"},
		"an eviction called off": {someFacts(gone, func(f *facts) {
			f.kept, f.events = nil, append(aLife("p", from)[:4],
				anEvent("p", from.Add(time.Minute), eventTainted, "Cancelling deletion of Pod default/web-2"))
		}), "node-1 [] -10m - unknown"},
		"a container started again": {someFacts(gone, func(f *facts) {
			f.kept, f.events = nil, append(aLife("p", from),
				anEvent("p", from.Add(5*time.Minute), eventStarted, "Container started"))
		}), "node-1 [] -10m - unknown"},
		"its beginning is forgotten": {someFacts(gone, func(f *facts) { f.kept, f.events = nil, aLife("p", from)[3:] }),
			"node-1 [] - -6m stopped"},
		"running, Events may not be listed": {someFacts(func(f *facts) {
			f.unknown = []string{"Events: " + apierrors.NewForbidden(corev1.Resource("events"), "", errors.New("no")).Error()}
		}), "node-1 [10.1.0.9] -180m - running"},
		"running, nothing else may be read": {someFacts(
			func(f *facts) { f.kept, f.looks, f.nodes, f.workload, f.template = nil, nil, nil, nil, nil }),
			"node-1 [10.1.0.9] -180m - running"},
	} {
		minutes := func(at *time.Time) string {
			if at == nil {
				return "-"
			}
			return fmt.Sprintf("%.0fm", at.Sub(noon).Minutes())
		}
		got := ""
		for _, l := range test.facts.story().Lives {
			got += fmt.Sprintf("%s %v %s %s %s", l.Node, l.IPs, minutes(l.From), minutes(l.To), l.State)
		}
		if got != test.want {
			t.Errorf("%s: %q, expected %q", name, got, test.want)
		}
	}
}

func TestOnlyWhatBearsOnNodeAndAddressIsTold(t *testing.T) {
	f := someFacts(restarted, func(f *facts) {
		f.events = append(f.events, anEvent("p", noon, "Unhealthy", "Readiness probe failed"),
			anEvent("p", noon, "FailedCreatePodSandBox", "no address"))
	})
	var reasons []string
	for _, e := range f.story().Events {
		reasons = append(reasons, fmt.Sprint(e.Reason, e.Count))
	}
	if got := strings.Join(reasons, " "); got != "WaitingForHome2 FailedCreatePodSandBox1" {
		t.Errorf("told are %s", got)
	}
}
