package cli

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Life is what is known of one pod of the name, from its arrival on a node to its end there. A fact that nothing
// tells is left out.
type Life struct {
	UID  string     `json:"uid"`
	Node string     `json:"node,omitempty"`
	IPs  []string   `json:"ips,omitempty"`
	From *time.Time `json:"from,omitempty"`
	// To is when the pod stopped or began to; nil for the pod that is there now.
	To *time.Time `json:"to,omitempty"`
	// State is how the pod ended: stopped, evicted, preempted or unknown. Of the pod that is there now it is how it is.
	State string `json:"state"`
	// Present marks the pod that is there now.
	Present bool `json:"present,omitempty"`

	heard time.Time // of it first
}

// lives returns the lives of the pods of this name, oldest first: what the pod, its Events, the RetainedIPs and the
// ledgers tell of each UID. Events are kept for an hour by default, so that earlier lives are seldom known. A pod that
// never came to a node had no life.
func (f *facts) lives() []Life {
	byUID := livesIn(f.events)
	for _, k := range f.kept {
		if r := k.retainedIP(); r != nil && k.podUID != "" && k.pod == f.name {
			byUID.life(types.UID(k.podUID)).keptAs(r)
		}
	}
	if p := f.pod; p != nil {
		if p.Spec.NodeName == "" {
			delete(byUID, p.UID)
		} else {
			byUID.life(p.UID).presentAs(p)
		}
	}
	all := make([]Life, 0, len(byUID))
	for _, l := range byUID {
		l.inLedger(f.looks[l.Node])
		all = append(all, *l)
	}
	slices.SortFunc(all, func(a, b Life) int {
		return cmp.Or(rank(a.Present)-rank(b.Present), a.at().Compare(b.at()), strings.Compare(a.UID, b.UID))
	})
	return all
}

// lives are those that are known, by the UID of the pod.
type lives map[types.UID]*Life

func (all lives) life(uid types.UID) *Life {
	if all[uid] == nil {
		all[uid] = &Life{UID: string(uid), State: "unknown"}
	}
	return all[uid]
}

// livesIn returns what Events, oldest first, tell of pods.
func livesIn(events []corev1.Event) lives {
	all := lives{}
	started := map[types.UID]time.Time{} // the last of its containers
	for i := range events {
		e := &events[i]
		uid := e.InvolvedObject.UID
		onNode := e.Source.Component == kubelet || e.Reason == eventScheduled
		if e.InvolvedObject.Kind != "Pod" || uid == "" || !onNode {
			continue
		}
		l, at := all.life(uid), happened(e)
		if first := began(e); l.heard.IsZero() || first.Before(l.heard) {
			l.heard = first
		}
		if e.Source.Component == kubelet {
			l.Node = cmp.Or(l.Node, e.Source.Host)
		}
		switch e.Reason {
		case eventScheduled:
			l.From = &at
		case eventStarted:
			started[uid] = at
		case eventKilling:
			l.To, l.State = &at, "stopped"
		}
	}
	for uid, at := range started {
		if l := all[uid]; l.To != nil && at.After(*l.To) { // a container was killed to be started again
			l.To, l.State = nil, "unknown"
		}
	}
	for i := range events {
		e := &events[i]
		if l := all[e.InvolvedObject.UID]; l != nil && endings[e.Reason] != "" && !calledOff(e) {
			l.State = endings[e.Reason]
		}
	}
	return all
}

// rank sorts by a bool: true comes last.
func rank(last bool) int {
	if last {
		return 1
	}
	return 0
}

// Reasons of Events of the kubelet, the scheduler and kube-controller-manager
// (kubernetes/pkg/kubelet/events/event.go, pkg/scheduler, pkg/controller).
const (
	kubelet = "kubelet"

	eventScheduled = "Scheduled"
	eventStarted   = "Started"
	eventKilling   = "Killing"
	eventTainted   = "TaintManagerEviction"
)

// endings are the Events that say how a pod ended.
var endings = map[string]string{"Evicted": "evicted", eventTainted: "evicted", "Preempted": "preempted"}

// calledOff reports whether an Event takes an announced eviction back: both have the same reason.
func calledOff(e *corev1.Event) bool {
	return e.Reason == eventTainted && strings.HasPrefix(e.Message, "Cancelling")
}

// keptAs adds what the RetainedIP of the pod tells.
func (l *Life) keptAs(r *stayputv1alpha1.RetainedIP) {
	l.Node = cmp.Or(l.Node, r.Spec.NodeName)
	l.addIPs(r.Status.IPs...)
	if r.Status.Phase == stayputv1alpha1.PhaseRetained && r.Status.Since != nil {
		l.ended(r.Status.Since.Time)
	}
}

// ended sets when the pod's address was given up, which is surer than when its containers were killed.
func (l *Life) ended(at time.Time) {
	l.To = &at
	if l.State == "unknown" {
		l.State = "stopped"
	}
}

func (l *Life) presentAs(p *corev1.Pod) {
	l.Present, l.Node, l.IPs, l.To = true, p.Spec.NodeName, nil, nil
	for _, ip := range p.Status.PodIPs {
		l.IPs = append(l.IPs, ip.IP)
	}
	l.State = strings.ToLower(string(p.Status.Phase))
	if p.DeletionTimestamp != nil {
		l.State = "ending"
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue {
			l.From = &c.LastTransitionTime.Time
		}
	}
	if l.From == nil {
		l.From = &p.CreationTimestamp.Time
	}
}

// inLedger adds what its node tells, which is nil if it does not.
func (l *Life) inLedger(n *inspection.Node) {
	if n == nil || l.Present {
		return
	}
	for _, net := range n.Networks {
		for _, a := range net.Addresses {
			if a.UID == l.UID && l.UID != "" {
				l.addIPs(a.IP.String())
				if a.Since != nil && l.To == nil {
					l.ended(*a.Since)
				}
			}
		}
	}
}

func (l *Life) addIPs(ips ...string) {
	for _, ip := range ips {
		if !slices.Contains(l.IPs, ip) {
			l.IPs = append(l.IPs, ip)
		}
	}
}

// at is the life's place in the story.
func (l *Life) at() time.Time {
	switch {
	case l.From != nil:
		return *l.From
	case !l.heard.IsZero() || l.To == nil:
		return l.heard
	}
	return *l.To
}

// aboutPlace are the reasons of other programs' Events that bear on the node or the address of a pod. All others of
// theirs are left out of a story: they say that it lives.
var aboutPlace = map[string]bool{
	"FailedScheduling": true, "Preempted": true, "NotTriggerScaleUp": true, "TriggeredScaleUp": true, // schedulers
	"Evicted": true, "FailedCreatePodSandBox": true, "SandboxChanged": true, "NetworkNotReady": true, // kubelet
	eventTainted: true, "NodeNotReady": true, "SuccessfulDelete": true, "FailedCreate": true, // controllers
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
	// UID is of what it is about, such as one of the lives.
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

// writeLives writes a line for each life and, between them, what was told.
func (s *Story) writeLives(w io.Writer, now time.Time, most int) error {
	ago := func(t *time.Time, otherwise string) string {
		if t == nil {
			return otherwise
		}
		return duration.HumanDuration(now.Sub(*t)) + " ago"
	}
	var table strings.Builder
	tabs := tabwriter.NewWriter(&table, 0, 8, 3, ' ', 0)
	fmt.Fprintln(tabs, "  NODE\tIP\tFROM\tTO\tSTATE")
	for _, l := range s.Lives {
		missing := "unknown"
		if l.Present {
			missing = none
		}
		fmt.Fprintf(tabs, "  %s\t%s\t%s\t%s\t%s\n", cmp.Or(printable(l.Node), missing),
			cmp.Or(printable(strings.Join(l.IPs, ",")), missing), ago(l.From, "unknown"), ago(l.To, missing), printable(l.State))
	}
	if err := tabs.Flush(); err != nil {
		return err
	}
	header, rows, _ := strings.Cut(table.String(), "\n")
	if len(s.Lives) > 0 {
		fmt.Fprintln(w, header)
	}
	events := s.Events
	tellUntil := func(at time.Time) {
		for len(events) > 0 && events[0].Time.Before(at) {
			fmt.Fprintf(w, "    %s\n", wrapped(events[0].text(s, now), "      ", most-4))
			events = events[1:]
		}
	}
	for i, row := range slices.Collect(strings.Lines(rows)) {
		tellUntil(s.Lives[i].at())
		fmt.Fprint(w, row)
	}
	tellUntil(now.Add(time.Hour)) // the rest: clocks differ
	return nil
}

func (e *Told) text(s *Story, now time.Time) string {
	said := e.Reason
	if e.Count > 1 {
		said += fmt.Sprintf(" (%d times)", e.Count)
	}
	if e.About != "Pod/"+s.Pod {
		said = e.About + " " + said
	}
	return fmt.Sprintf("%s ago %s: %s", duration.HumanDuration(now.Sub(e.Time)), said, e.Note)
}
