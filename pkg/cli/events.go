package cli

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// aboutPlace are the reasons of other programs' Events that bear on the node or the address of a pod. All others of
// theirs are left out of a story: they say that it lives.
var aboutPlace = map[string]bool{
	"Scheduled": true, "FailedScheduling": true, "Preempted": true, // schedulers
	"NotTriggerScaleUp": true, "TriggeredScaleUp": true, // autoscalers
	"Killing": true, "Evicted": true, "FailedCreatePodSandBox": true, "SandboxChanged": true, // kubelet
	"NetworkNotReady":      true,
	"TaintManagerEviction": true, "NodeNotReady": true, "SuccessfulDelete": true, "FailedCreate": true, // controllers
	"AddedInterface": true, // Multus
}

// bears reports whether an Event bears on node and address, as all of Stayput's do.
func bears(e *corev1.Event) bool {
	reporter := cmp.Or(e.ReportingController, e.Source.Component)
	return aboutPlace[e.Reason] || e.InvolvedObject.Kind == "RetainedIP" ||
		reporter == stayputv1alpha1.AgentFieldManager || reporter == stayputv1alpha1.ControllerFieldManager
}

// Told is one or several Events in a row that say the same.
type Told struct {
	// Time is that of the last one.
	Time   time.Time `json:"time"`
	Count  int32     `json:"count"`
	Type   string    `json:"type"`
	Reason string    `json:"reason"`
	About  string    `json:"about"` // Kind/name
	// UID is of what it is about.
	UID  string `json:"uid,omitempty"`
	Note string `json:"note"`
}

// told returns the Events that bear on node and address, oldest first.
func (f *facts) told() []Told {
	all := []Told{}
	for i := range f.events {
		e := &f.events[i]
		if !bears(e) || f.toldTwice(e) {
			continue
		}
		o := e.InvolvedObject
		t := Told{
			Time: happened(e).UTC(), Count: max(1, e.Count), Type: e.Type, Reason: e.Reason,
			About: o.Kind + "/" + o.Name, UID: string(o.UID), Note: e.Message,
		}
		if e.Series != nil {
			t.Count = max(t.Count, e.Series.Count)
		}
		if n := len(all); n > 0 && all[n-1].Reason == t.Reason && all[n-1].About == t.About && all[n-1].UID == t.UID {
			t.Count += all[n-1].Count
			all[n-1] = t
			continue
		}
		all = append(all, t)
	}
	return all
}

// toldTwice reports whether an Event of the workload repeats one of the pod.
func (f *facts) toldTwice(e *corev1.Event) bool {
	return e.InvolvedObject.Kind != "Pod" && slices.ContainsFunc(f.events, func(o corev1.Event) bool {
		return o.InvolvedObject.Kind == "Pod" && o.Reason == e.Reason && e.Message == "pod "+f.name+": "+o.Message
	})
}

// text returns a line about the Event, in the story of a pod.
func (e *Told) text(pod string, now time.Time) string {
	said := e.Reason
	if e.Count > 1 {
		said += fmt.Sprintf(" (%d times)", e.Count)
	}
	if e.About != "Pod/"+pod {
		said = e.About + " " + said
	}
	return fmt.Sprintf("%s ago %s: %s", duration.HumanDuration(now.Sub(e.Time)), said, e.Note)
}
