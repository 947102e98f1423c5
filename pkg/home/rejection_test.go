package home

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestOnlyAPodThatItsKubeletDidNotAdmitWasRejected(t *testing.T) {
	waiting := corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}
	ended := corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}
	again := waiting
	again.LastTerminationState = ended.State
	failed := func(reason, message string) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodFailed, Reason: reason, Message: message,
			StartTime: &metav1.Time{Time: noon}}
	}
	with := func(s corev1.PodStatus, change func(*corev1.PodStatus)) corev1.PodStatus {
		change(&s)
		return s
	}
	for name, c := range map[string]struct {
		status corev1.PodStatus
		words  string // empty: it was admitted, or that is not known
	}{
		"a forbidden sysctl": {failed("SysctlForbidden", `Pod was rejected: forbidden sysctl: "kernel.msgmax" not `+
			`allowlisted`),
			`SysctlForbidden: forbidden sysctl: "kernel.msgmax" not allowlisted`},
		"as an older kubelet says it": {failed("OutOfcpu", "Pod Node didn't have enough resource: cpu"),
			"OutOfcpu: Pod Node didn't have enough resource: cpu"},
		"without a message":                  {failed("NodeAffinity", ""), "NodeAffinity"},
		"before its kubelet gave it a start": {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfpods"}, "OutOfpods"},
		"by a node that shuts down": {failed("NodeShutdown", "Pod was rejected: Node is shutting down"),
			"NodeShutdown: Node is shutting down"},
		"by a node short of disk": {failed("Evicted", "Pod was rejected: The node had condition: [DiskPressure]. "), "Evicted: The node had condition: [DiskPressure]"},
		"evicted before a container started": {with(failed("Evicted", ""), func(s *corev1.PodStatus) {
			s.ContainerStatuses = []corev1.ContainerStatus{waiting}
		}), "Evicted"},
		"evicted": {with(failed("Evicted", ""), func(s *corev1.PodStatus) {
			s.ContainerStatuses = []corev1.ContainerStatus{ended}
		}), ""},
		"preempted by a critical pod": {with(failed("Preempting", ""), func(s *corev1.PodStatus) {
			s.ContainerStatuses = []corev1.ContainerStatus{again}
		}), ""},
		"ended with its node": {with(failed("Terminated", ""), func(s *corev1.PodStatus) { s.PodIP = "192.0.2.7" }), ""},
		"failed in an init container": {with(failed("Error", ""), func(s *corev1.PodStatus) {
			s.InitContainerStatuses = []corev1.ContainerStatus{ended}
			s.ContainerStatuses = []corev1.ContainerStatus{waiting}
		}), ""},
		"ended by the garbage collector": {failed("", "PodGC: node no longer exists"), ""},
		"running":                        {corev1.PodStatus{Phase: corev1.PodRunning, Reason: "NodeLost"}, ""},
		"succeeded":                      {corev1.PodStatus{Phase: corev1.PodSucceeded, Reason: "Completed"}, ""},
	} {
		words, rejected := Rejected(&corev1.Pod{Status: c.status})
		if words != c.words || rejected != (c.words != "") {
			t.Errorf("%s: %q, %t", name, words, rejected)
		}
	}
}

func TestASeriesOfRejectionsBeginsWithTheFirstAndIsBounded(t *testing.T) {
	var r Rejections
	for i := range 3 * RejectingMost {
		r = r.With("node-"+string(rune('A'+i)), "OutOfcpu", noon.Add(time.Duration(i)*time.Second))
		r = r.With("node-A", "OutOfpods", noon.Add(time.Duration(i)*time.Second))
	}
	if len(r.Nodes) != RejectingMost || r.First != noon || r.Times != 6*RejectingMost || r.Words != "OutOfpods" ||
		r.again() != r.Last.Add(time.Minute) {
		t.Errorf("%+v, again at %s", r, r.again())
	}
}
