package cli

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// anEvent is about a pod web-2, told by the scheduler or the node's kubelet.
func anEvent(uid string, at time.Time, reason, message string) corev1.Event {
	e := corev1.Event{
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-2", UID: types.UID(uid)},
		Type:           corev1.EventTypeNormal, Reason: reason, Message: message,
		Source:        corev1.EventSource{Component: "kubelet", Host: "node-1"},
		LastTimestamp: metav1.NewTime(at), FirstTimestamp: metav1.NewTime(at), Count: 1,
	}
	if reason == "Scheduled" || reason == "FailedScheduling" {
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
		anEvent(uid, from, "Scheduled", "Successfully assigned default/web-2 to node-1"),
		anEvent(uid, from.Add(time.Second), "Pulled", "Container image already present on machine"),
		anEvent(uid, from.Add(time.Second), "Created", "Container created"),
		anEvent(uid, from.Add(2*time.Second), "Started", "Container started"),
		anEvent(uid, from.Add(4*time.Minute), "Killing", "Stopping container web"),
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
		anEvent("p", noon.Add(-4*time.Minute), "Scheduled", "Successfully assigned default/web-2 to node-1"),
		anEvent("p", noon.Add(-4*time.Minute), "Started", "Container started"))
	f.pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(noon.Add(-4 * time.Minute))}}
}

const lastRestart = `
  6m ago Killing: Stopping container web
  5m ago WaitingForHome (2 times): its home, node node-1, is cordoned: the pod
    still waits
  4m ago Scheduled: Successfully assigned default/web-2 to node-1

`

func told(t *testing.T, f *facts) string {
	t.Helper()
	var b strings.Builder
	if err := f.story().write(&b, noon); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTenRestartsAreToldByTheirEvents(t *testing.T) {
	out := told(t, someFacts(restarted))
	if !strings.Contains(out, "\nWhat happened\n") || !strings.Contains(out, lastRestart) {
		t.Errorf("told is\n%s", out)
	}
	if n := strings.Count(out, "Successfully assigned default/web-2 to node-1"); n != 11 {
		t.Errorf("%d of 11 pods are told of:\n%s", n, out)
	}
}

func TestOnlyWhatBearsOnNodeAndAddressIsTold(t *testing.T) {
	f := someFacts(restarted, func(f *facts) {
		f.events = append(f.events, anEvent("p", noon, "Unhealthy", "Readiness probe failed"),
			anEvent("p", noon, "FailedCreatePodSandBox", "no address"))
	})
	var reasons []string
	for _, e := range f.story().Events[20:] {
		reasons = append(reasons, fmt.Sprint(e.Reason, e.Count))
	}
	if got := strings.Join(reasons, " "); got != "WaitingForHome2 Scheduled1 FailedCreatePodSandBox1" {
		t.Errorf("told are %s", got)
	}
}
