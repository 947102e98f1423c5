package home

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Situation is all that the placement of a pod depends on. It is a snapshot: every part of it must be known. What is
// not known is a reason to try again, never to decide.
type Situation struct {
	Now     time.Time
	Pod     *corev1.Pod
	Address Address
	// Record is what the pod's PersistentPodState records, nil if that is nothing.
	Record *Record
	// GivenUp says that the pod's predecessor waited for its home in vain.
	GivenUp bool
	// Since is when the wait of the pod began, zero if that was at its creation.
	Since time.Time
	// Waited is the home for which the pod is known to have waited until now, empty if there is none.
	Waited string
	Nodes  Nodes
	// Lost reports whether the cluster lost a node a moment ago, nil if it lost none. The scheduler may not know that yet.
	Lost func(node string) bool
}

// Outcome of a decision.
type Outcome string

// The outcomes. Their values are those of a metric's label and of kubectl stayput why -o json.
const (
	OutcomeFree      Outcome = "free"      // has no home: anywhere
	OutcomeHome      Outcome = "home"      // to its home
	OutcomeWait      Outcome = "wait"      // its home cannot take it now
	OutcomeElsewhere Outcome = "elsewhere" // has a home that cannot take it: anywhere
	// pinned to a home that has no room: to be deleted, its successor goes elsewhere
	OutcomeEvict Outcome = "evict"
)

// Decision is what becomes of a pod now.
type Decision struct {
	Outcome Outcome
	// Affinity to give the pod.
	Affinity Affinity
	// Nominate is the node that the scheduler is asked to try before all others, empty if there is none. It holds the pod
	// nowhere.
	Nominate string
	// Home is where the pod goes, what it waits for or what it gives up, for people.
	Home string
	// Reason says why the pod waits or goes elsewhere. It continues the sentence "home … ".
	Reason string
	// Retry is when to decide again at the latest, zero if not before something changes.
	Retry time.Duration
	// Node or, if it is empty, the nodes with Labels are what a pod waits for: a change of theirs can end the wait.
	Node   string
	Labels map[string]string
	// Lost is the home for which the pod waited, if it no longer qualifies as its home; empty otherwise.
	Lost string
	// Notes are what else the owner of the pod should know.
	Notes []string
}

// forever is a wait without an end.
const forever = time.Duration(1<<63 - 1)

// Decide places a pod that is gated, or that is pinned to its home and has no node yet.
func Decide(s Situation) Decision {
	d := Decision{Outcome: OutcomeFree}
	left, err := s.patience()
	prefers, errPrefers := Prefers(s.Pod.Annotations)
	for _, err := range []error{err, errPrefers} {
		if err != nil {
			d.Notes = append(d.Notes, err.Error())
		}
	}
	if !Gated(s.Pod) {
		return decidePinned(s, d, left)
	}
	d = decideGated(s, d, left, prefers)
	d.avoidLost(s)
	if s.Waited != d.Home {
		d.Lost = s.Waited
	}
	return d
}

func decideGated(s Situation, d Decision, left time.Duration, prefers bool) Decision {

	// 1. The home. The address comes first: a record of another place is older than it.
	required, affinity := s.Record.affinity(s.Nodes)
	d.Affinity = affinity
	node := s.Nodes.Node(s.Address.Node)
	switch {
	case s.Address.Node == "" && len(required) == 0 && s.Record.lost(s.Nodes):
		d.Outcome, d.Home, d.Reason = OutcomeElsewhere, NodeHome(s.Record.State.NodeName), "no longer exists"
		return d
	case s.Address.Node == "" && len(required) == 0:
		if !d.Affinity.Empty() {
			d.Outcome, d.Home = OutcomeHome, s.Record.State.NodeName
		}
		if node := s.Nodes.Node(s.Record.drawnTo()); prefers && node != nil && obstacleTo(node, s.Pod).reason == "" {
			d.nominate(s, node.Name)
		}
		return d
	case s.Address.Node != "" && node != nil && !hasLabels(node, required):
		d.Notes = append(d.Notes, fmt.Sprintf("PersistentPodState %s records %s, but node %s, which keeps the pod's IP, "+
			"has other labels: using the node of the IP", s.Record.Object.Name, spell(required), s.Address.Node))
		d.Affinity.Required, required = nil, nil
	}

	// 2. Whether it can take the pod.
	var o obstacle
	if s.Address.Node != "" {
		d.Home = NodeHome(s.Address.Node)
		o = obstacleTo(node, s.Pod)
	} else {
		d.Home = "nodes with " + spell(required)
		o = obstacleToAll(s.Nodes, s.Record.State.NodeName, required, s.Pod)
	}
	switch {
	case o.reason == "" && s.GivenUp:
		d.elsewhere("had no room for the pod")
		d.pull(s, required) // there may be room by now
	case o.reason == "" && s.Address.Node != "" && prefers:
		d.Outcome = OutcomeHome
		d.pull(s, nil)
	case o.reason == "":
		d.Outcome, d.Affinity.Node = OutcomeHome, s.Address.Node
	case !o.permanent && !s.GivenUp && left > 0:
		d.Affinity = Affinity{}
		d.wait(s, o.reason, required, left)
	default:
		d.elsewhere(o.reason)
	}
	return d
}

// avoidLost keeps a pod off the node where it was, if the cluster has just lost that: the scheduler may not know yet,
// and likes a node whose pods are gone. It would bind the pod to it, and only the garbage collector would end that pod,
// 40 s later.
func (d *Decision) avoidLost(s Situation) {
	last := s.Address.Node
	if last == "" && s.Record != nil {
		last = s.Record.State.NodeName
	}
	if last == "" || s.Lost == nil || !s.Lost(last) || s.Nodes.Node(last) != nil || d.Outcome == OutcomeWait {
		return
	}
	d.Affinity.Without = []string{last}
}

// NodeHome writes a node as a home, for people.
func NodeHome(node string) string { return "node " + node }

// NotNode writes all nodes but one as a home, for people.
func NotNode(node string) string { return "any node but " + node }

// decidePinned is for a pod that is no longer gated and has no node yet. Only the scheduler can say that there is no
// room for it; until it has, it may just be slow.
func decidePinned(s Situation, d Decision, left time.Duration) Decision {
	says, refused := Refused(s.Pod)
	if !Pinned(s.Pod) || s.Pod.Spec.NodeName != "" || !refused {
		return d
	}
	const full = "has no room for the pod"
	d.Home = s.Pod.Annotations[stayputv1alpha1.AnnotationPinned]
	required, _ := s.Record.affinity(s.Nodes)
	var o obstacle
	if node, ok := strings.CutPrefix(d.Home, NodeHome("")); ok {
		o = obstacleTo(s.Nodes.Node(node), s.Pod)
	}
	switch {
	case o.permanent:
		d.Outcome, d.Reason = OutcomeEvict, o.reason
	case left > 0:
		d.wait(s, full, required, left)
	default:
		d.Outcome, d.Reason = OutcomeEvict, full+" ("+gist(says)+")"
	}
	return d
}

// gist shortens what the scheduler says to why no node takes the pod.
func gist(says string) string {
	says, _, _ = strings.Cut(says, " preemption: ")
	if runes := []rune(says); len(runes) > 400 { // an Event takes 1,024 characters
		says = string(runes[:400]) + "…"
	}
	return strings.TrimSuffix(says, ".")
}

// pull draws the pod to its home without holding it there.
func (d *Decision) pull(s Situation, required map[string]string) {
	var home corev1.NodeSelectorTerm
	switch {
	case s.Address.Node != "":
		home.MatchFields = []corev1.NodeSelectorRequirement{byName(corev1.NodeSelectorOpIn, s.Address.Node)}
		d.nominate(s, s.Address.Node)
	default:
		for _, key := range slices.Sorted(maps.Keys(required)) {
			home.MatchExpressions = append(home.MatchExpressions, corev1.NodeSelectorRequirement{
				Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{required[key]},
			})
		}
	}
	d.Affinity.Preferred = append(d.Affinity.Preferred, corev1.PreferredSchedulingTerm{Weight: 100, Preference: home})
}

// nominate has the scheduler try a node first. The nomination of a pod that never preempts it would not take back, and
// autoscalers would add no node for the pod.
func (d *Decision) nominate(s Situation, node string) {
	if p := s.Pod.Spec.PreemptionPolicy; p == nil || *p != corev1.PreemptNever {
		d.Nominate = node
	}
}

func (d *Decision) wait(s Situation, reason string, required map[string]string, left time.Duration) {
	d.Outcome, d.Reason, d.Node, d.Labels = OutcomeWait, reason, s.Address.Node, required
	if left != forever {
		d.Retry = left
	}
	if sure := s.Address.Guess.Sub(s.Now); Gated(s.Pod) && !s.Address.Guess.IsZero() && (d.Retry == 0 || sure < d.Retry) {
		d.Retry = max(sure, time.Millisecond)
	}
}

func (d *Decision) elsewhere(reason string) {
	d.Outcome, d.Reason = OutcomeElsewhere, reason
	d.Affinity.Required = nil // what is preferred holds no pod up
}

// patience returns how much longer the pod waits for its home.
func (s Situation) patience() (left time.Duration, err error) {
	since := s.Since
	if since.IsZero() {
		since = s.Pod.CreationTimestamp.Time
	}
	wait, whileKept, err := Wait(s.Pod.Annotations)
	switch {
	case !whileKept:
		return since.Add(wait).Sub(s.Now), err
	case s.Address.Node == "" || s.Address.Until.IsZero():
		return forever, nil
	}
	return s.Address.Until.Sub(s.Now), nil
}

// spell writes labels for people.
func spell(l map[string]string) string {
	var s []string
	for _, k := range slices.Sorted(maps.Keys(l)) {
		s = append(s, k+"="+l[k])
	}
	return strings.Join(s, ",")
}
