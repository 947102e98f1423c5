package podstate

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	kruiseac "github.com/stayput/stayput/pkg/api/kruise/v1alpha1/applyconfiguration/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// Conditions of a PersistentPodState and their reasons.
const (
	conditionRecorded = "Recorded" // every pod that the workload wants is recorded
	conditionConflict = "Conflict" // another object for the same target is obeyed
	conditionDegraded = "Degraded" // nothing is recorded, or less than the spec asks for

	reasonAllRecorded       = "AllRecorded"
	reasonPodsNotReady      = "PodsNotReady"
	reasonTargetNotFound    = "TargetNotFound"
	reasonOlderObject       = "OlderObject"
	reasonObeyed            = "Obeyed"
	reasonUnsupportedTarget = "UnsupportedTarget"
	reasonTargetNotServed   = "TargetNotServed"
	reasonPermissionMissing = "PermissionMissing"
	reasonTooManyPods       = "TooManyPods"
	reasonNotRecordable     = "AnnotationNotRecordable"
	reasonOpenKruise        = "OpenKruise"
	reasonAsExpected        = "AsExpected"
)

// recordEvery is the least time between two writes of one object: a rollout changes it with every pod.
const recordEvery = time.Second

// plainFor is how long the CRD is assumed to lack our additions once it did.
const plainFor = 10 * time.Minute

// statusOf returns the status for a verdict.
func statusOf(s *kruisev1alpha1.PersistentPodState, v verdict, now time.Time) kruisev1alpha1.PersistentPodStateStatus {
	n := int32(len(v.states))
	status := kruisev1alpha1.PersistentPodStateStatus{
		ObservedGeneration: s.Generation, PodStates: v.states, Pods: v.pods, Recorded: &n,
		Conditions: ownConditions(s.Status.Conditions),
	}
	set := func(kind string, is metav1.ConditionStatus, f finding) {
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: kind, Status: is, Reason: f.reason, Message: f.message, ObservedGeneration: s.Generation,
			LastTransitionTime: metav1.NewTime(now),
		})
	}
	// A problem has a condition while it lasts, and a false one afterwards.
	wrong := func(kind string, f finding, fine string) {
		switch {
		case f.reason != "":
			set(kind, metav1.ConditionTrue, f)
		case meta.FindStatusCondition(status.Conditions, kind) != nil:
			set(kind, metav1.ConditionFalse, finding{fine, ""})
		}
	}
	var conflict finding
	if v.conflict != "" {
		conflict = finding{reasonOlderObject,
			fmt.Sprintf("PersistentPodState %s for the same target is older and in effect, this one is ignored", v.conflict)}
	}
	wrong(conditionConflict, conflict, reasonObeyed)
	wrong(conditionDegraded, v.degraded, reasonAsExpected)
	switch {
	case v.recorded.reason != "":
		set(conditionRecorded, metav1.ConditionFalse, v.recorded)
	case v.of != nil:
		set(conditionRecorded, metav1.ConditionTrue, finding{reasonAllRecorded, "every pod of the target is recorded"})
	case v.conflict != "":
		meta.RemoveStatusCondition(&status.Conditions, conditionRecorded)
	}
	return status
}

// ownConditions returns copies of our conditions, in a fixed order.
func ownConditions(all []metav1.Condition) []metav1.Condition {
	var own []metav1.Condition
	for _, kind := range []string{conditionConflict, conditionDegraded, conditionRecorded} {
		if c := meta.FindStatusCondition(all, kind); c != nil {
			own = append(own, *c)
		}
	}
	return own
}

// statusWriter writes the status of PersistentPodStates: those for one workload at a bounded pace.
type statusWriter struct {
	client client.Client
	now    func() time.Time
	pace   pace
	// plainUntil is set while the CRD is known to be OpenKruise's own, which lacks our additions; in nanoseconds.
	plainUntil atomic.Int64
}

// wait returns how long to wait before the next write for a workload.
func (w *statusWriter) wait(ref home.Ref) time.Duration { return w.pace.left(ref, w.now()) }

// write applies the status of an object if it differs.
func (w *statusWriter) write(ctx context.Context, ref home.Ref, s *kruisev1alpha1.PersistentPodState, v verdict) error {
	is, want := s.Status, statusOf(s, v, w.now())
	is.Conditions, want.Conditions = ownConditions(is.Conditions), ownConditions(want.Conditions)
	if w.plain() {
		is, want = plain(is), plain(want)
	}
	if equality.Semantic.DeepEqual(is, want) {
		return nil
	}
	err := w.apply(ctx, s, want)
	if err != nil && strings.Contains(err.Error(), "field not declared in schema") && !w.plain() {
		log.FromContext(ctx).Info("Omitting status.conditions, pods and recorded, which OpenKruise's CRD does not have",
			"reason", err.Error())
		w.plainUntil.Store(w.now().Add(plainFor).UnixNano())
		err = w.apply(ctx, s, plain(want))
	}
	if err != nil {
		return fmt.Errorf("applying the status of PersistentPodState %s/%s: %w", s.Namespace, s.Name, err)
	}
	w.pace.wrote(ref, len(want.PodStates), w.now())
	return nil
}

// plain reports whether our additions have to be left out.
func (w *statusWriter) plain() bool { return w.now().UnixNano() < w.plainUntil.Load() }

// plain returns the part of a status that OpenKruise's CRD has.
func plain(s kruisev1alpha1.PersistentPodStateStatus) kruisev1alpha1.PersistentPodStateStatus {
	return kruisev1alpha1.PersistentPodStateStatus{ObservedGeneration: s.ObservedGeneration, PodStates: s.PodStates}
}

func (w *statusWriter) apply(ctx context.Context, s *kruisev1alpha1.PersistentPodState,
	want kruisev1alpha1.PersistentPodStateStatus) error {
	status := kruiseac.PersistentPodStateStatus().WithObservedGeneration(want.ObservedGeneration)
	status.Pods, status.Recorded = want.Pods, want.Recorded
	states := make(map[string]kruiseac.PodStateApplyConfiguration, len(want.PodStates))
	for name, state := range want.PodStates {
		states[name] = *kruiseac.PodState().WithNodeName(state.NodeName).
			WithNodeTopologyLabels(state.NodeTopologyLabels).WithAnnotations(state.Annotations)
	}
	status.WithPodStates(states)
	for _, c := range want.Conditions {
		status.WithConditions(metav1ac.Condition().WithType(c.Type).WithStatus(c.Status).
			WithReason(c.Reason).WithMessage(c.Message).
			WithObservedGeneration(c.ObservedGeneration).WithLastTransitionTime(c.LastTransitionTime))
	}
	object := kruiseac.PersistentPodState(s.Name, s.Namespace).
		WithUID(s.UID).WithResourceVersion(s.ResourceVersion).WithStatus(status)
	err := w.client.Status().Apply(ctx, object, client.ForceOwnership,
		client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
	if err != nil {
		return err
	}
	// An apply leaves what another manager wrote, such as OpenKruise if it ran before.
	result, err := json.Marshal(object)
	if err != nil {
		return err
	}
	applied := &kruisev1alpha1.PersistentPodState{}
	if err := json.Unmarshal(result, applied); err != nil ||
		equality.Semantic.DeepEqual(applied.Status.PodStates, want.PodStates) {
		return err
	}
	clean := applied.DeepCopy()
	clean.Status.PodStates = want.PodStates
	return w.client.Status().Patch(ctx, clean, client.MergeFromWithOptions(applied, client.MergeFromWithOptimisticLock{}),
		client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
}

// pace bounds how often the objects for one workload are written. The zero value is ready.
type pace struct {
	mu   sync.Mutex
	next map[home.Ref]time.Time
}

// left returns how long to wait before the next write.
func (p *pace) left(ref home.Ref, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := p.next[ref].Sub(now); left > 0 {
		return left
	}
	delete(p.next, ref)
	return 0
}

// wrote notes a write of so many records. A thousand cost the API server a good part of a second.
func (p *pace) wrote(ref home.Ref, records int, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next == nil {
		p.next = map[home.Ref]time.Time{}
	}
	p.next[ref] = now.Add(recordEvery * time.Duration(1+records/1000))
}
