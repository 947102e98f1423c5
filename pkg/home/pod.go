package home

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/retention"
)

// Annotated reports whether a pod with these annotations asks for its addresses to be retained.
func Annotated(annotations map[string]string) bool {
	if value, ours := annotations[stayputv1alpha1.AnnotationRetainIP]; ours {
		return value != retention.None
	}
	_, kruise := annotations[stayputv1alpha1.AnnotationReservedIPDuration]
	return kruise
}

// Gated reports whether a pod waits for the controller to place it.
func Gated(pod *corev1.Pod) bool { return GateOf(pod) >= 0 }

// GateOf returns the index of our gate in the scheduling gates of a pod, or -1.
func GateOf(pod *corev1.Pod) int {
	return slices.IndexFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == stayputv1alpha1.PlacementGate
	})
}

// LastGate reports whether our gate is the only one that a pod has left. Before, another program may still change what
// the pod needs, or hold it for hours.
func LastGate(pod *corev1.Pod) bool { return Gated(pod) && len(pod.Spec.SchedulingGates) == 1 }

// Pinned reports whether the controller narrowed the node affinity of a pod to its home. The annotation alone does not
// tell: a template that was copied from such a pod has it too, and so has every pod made from it.
func Pinned(pod *corev1.Pod) bool { return len(PinnedBy(pod)) > 0 }

// PinnedBy returns the managed fields by which [Pinned] knows. The rest of them does not matter to any rule.
func PinnedBy(pod *corev1.Pod) (ours []metav1.ManagedFieldsEntry) {
	if _, ok := pod.Annotations[stayputv1alpha1.AnnotationPinned]; !ok {
		return nil // almost every pod: spares it the search
	}
	for _, e := range pod.ManagedFields {
		if e.Manager == stayputv1alpha1.ControllerFieldManager && e.FieldsV1 != nil &&
			strings.Contains(e.FieldsV1.GetRawString(), pinnedField) {
			ours = append(ours, e)
		}
	}
	return ours
}

// PinnedField is a managed field by which [Pinned] knows, without anything else.
var PinnedField = metav1.ManagedFieldsEntry{Manager: stayputv1alpha1.ControllerFieldManager,
	Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
	FieldsV1: metav1.NewFieldsV1(`{` + pinnedField + `:{}}`)}

const pinnedField = `"f:requiredDuringSchedulingIgnoredDuringExecution"`

// Refused reports whether the scheduler finds no room for a pod where it may go, and what it says. It does not count if
// the scheduler makes room by preemption, or if no node at all would take the pod, for example because a volume or
// resource claim of its does not exist yet: another home would not help.
func Refused(pod *corev1.Pod) (says string, refused bool) {
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
	if i < 0 || pod.Status.NominatedNodeName != "" {
		return "", false
	}
	says = pod.Status.Conditions[i].Message
	// "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) …" counts nodes; what keeps the pod from all of them is
	// reported without a count. Another scheduler may say anything.
	if _, cause, ok := strings.Cut(says, " nodes are available: "); ok && !strings.HasPrefix(cause, "node(s) ") {
		return says, cause != "" && '0' <= cause[0] && cause[0] <= '9'
	}
	return says, true
}

// DefaultWait is how long a pod waits for a home that cannot take it, unless its template says otherwise.
const DefaultWait = 60 * time.Second

// Wait returns how long a pod with these annotations waits for a home that cannot take it: a duration, or for as long
// as its address is kept. A value that is not valid counts as [DefaultWait], and the error says so.
func Wait(annotations map[string]string) (wait time.Duration, whileKept bool, err error) {
	value, ok := annotations[stayputv1alpha1.AnnotationHomeWait]
	switch {
	case !ok:
		return DefaultWait, false, nil
	case value == stayputv1alpha1.HomeWaitRetention:
		return 0, true, nil
	}
	if wait, err = time.ParseDuration(value); err != nil || wait < 0 {
		return DefaultWait, false,
			fmt.Errorf("annotation %s: %q is not valid: expected a duration above 0 in h, m and s such as 60s or 10m, or %s; "+
				"using %s",
				stayputv1alpha1.AnnotationHomeWait, value, stayputv1alpha1.HomeWaitRetention, DefaultWait)
	}
	return wait, false, nil
}

// Prefers reports whether a pod with these annotations only prefers the home that keeps its address, so that it is
// never held there. A value that is not valid counts as Required, and the error says so.
func Prefers(annotations map[string]string) (bool, error) {
	switch value := annotations[stayputv1alpha1.AnnotationHome]; value {
	case "", stayputv1alpha1.HomeRequired:
		return false, nil
	case stayputv1alpha1.HomePreferred:
		return true, nil
	default:
		return false, fmt.Errorf("annotation %s: %q is not valid: expected %s or %s; using %[3]s",
			stayputv1alpha1.AnnotationHome, value, stayputv1alpha1.HomeRequired, stayputv1alpha1.HomePreferred)
	}
}
