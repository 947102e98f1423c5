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
	// Rejections are those of the pod's predecessors.
	Rejections Rejections
	// Pooled says that the pod has addresses of pools: then package pool keeps it off nodes that are lost.
	Pooled bool
	Nodes  Nodes
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
	// Patience is how much longer the pod may wait for its home, zero or less if no longer.
	Patience time.Duration
	// Node or, if it is empty, the nodes with Labels are the home: a change of theirs can end a wait for it.
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
	if over := oversized(s.Pod); over != "" {
		d.Notes = append(d.Notes, over+": its home is not looked for, and its node affinity stays as it is")
		return d
	}
	wait, whileKept, err := Wait(s.Pod.Annotations)
	prefers, errPrefers := Prefers(s.Pod.Annotations)
	for _, err := range []error{err, errPrefers} {
		if err != nil {
			d.Notes = append(d.Notes, err.Error())
		}
	}
	p := placing{Situation: s, pod: candidateOf(s.Pod), prefers: prefers}
	if !Gated(s.Pod) {
		p.Rejections = Rejections{} // the scheduler has it now
		d.Patience = p.patience(wait, whileKept)
		return p.decidePinned(d)
	}
	p.findHome(&d)
	if d.Patience = p.patience(wait, whileKept); p.prefers && p.node != s.Address.Node {
		d.Patience = 0 // a node that is only recorded is preferred, not waited for
	}
	p.decideGated(&d)
	d.avoidLost(s)
	if s.Waited != d.Home {
		d.Lost = s.Waited
	}
	return d
}

// placing is a decision in the making.
type placing struct {
	Situation
	pod     candidate
	prefers bool
	// node is the home by name. If that is empty, required are the labels of the nodes that are the home.
	node     string
	required map[string]string
}

// findHome finds the home. The address comes first: a record of another place is older than it.
func (p *placing) findHome(d *Decision) {
	p.required, d.Affinity = p.Record.affinity(p.Nodes)
	p.node = p.Address.Node
	if p.node == "" && p.Record != nil && p.Record.ByName {
		p.node = p.Record.State.NodeName
	}
	if node := p.Nodes.Node(p.Address.Node); node != nil && !hasLabels(node, p.required) {
		d.Notes = append(d.Notes, fmt.Sprintf("PersistentPodState %s records %s, but node %s, which keeps the pod's IP, "+
			"has other labels: using the node of the IP", p.Record.Object.Name, spell(p.required), p.Address.Node))
		d.Affinity.Required, p.required = nil, nil
	}
	home := p.node
	switch {
	case home != "":
		d.Home = NodeHome(home)
	case len(p.required) > 0:
		d.Home = nodesWith + spell(p.required)
	case p.Record.lost(p.Nodes):
		d.Home = NodeHome(p.Record.State.NodeName)
	case !d.Affinity.Empty():
		home = p.Record.State.NodeName
		d.Home = home
	}
	if !p.Rejections.concern(home, p.required, p.Nodes) {
		p.Rejections = Rejections{}
	}
	d.Node, d.Labels = p.node, p.required
}

// decideGated decides whether the pod goes to its home.
func (p *placing) decideGated(d *Decision) {
	switch {
	case p.node != "":
		p.decideHome(d, p.obstacle(d, p.Nodes.Node(p.node)))
	case len(p.required) > 0:
		p.decideHome(d, p.obstacleToAll(d))
	default:
		p.decideUnheld(d)
	}
	if d.Outcome != OutcomeWait && p.rejecting(d) { // the scheduler does not know
		d.Affinity.Without = append(d.Affinity.Without, p.Rejections.Nodes...)
	}
}

// decideUnheld is for a pod that nothing holds at a home, or whose home is gone. What is preferred holds no pod up.
func (p *placing) decideUnheld(d *Decision) {
	switch {
	case !d.Affinity.Empty():
		d.Outcome = OutcomeHome
		if node := p.Nodes.Node(p.Record.drawnTo()); p.prefers && node != nil && p.obstacle(d, node).reason == "" {
			d.nominate(p.Situation, node.Name)
		}
	case d.Home != "":
		d.elsewhere("no longer exists")
	}
}

// decideHome is for a pod that may be held at its home, given what keeps that from taking it.
func (p *placing) decideHome(d *Decision, o obstacle) {
	switch {
	case o.reason == "" && p.GivenUp:
		d.elsewhere("had no room for the pod")
		p.pull(d) // there may be room by now
	case o.reason == "" && p.node != "" && p.prefers:
		d.Outcome = OutcomeHome
		p.pull(d)
	case o.reason == "":
		d.Outcome, d.Affinity.Node = OutcomeHome, p.node
		if p.node != "" {
			d.Affinity.Required = nil // that node has these labels, and what is written is what the pod says of its home
		}
	case !o.permanent && !p.GivenUp && d.Patience > 0:
		d.Affinity = Affinity{}
		d.wait(p.Situation, o)
	default:
		d.elsewhere(o.reason)
	}
}

// rejecting reports whether the nodes that rejected the pod's predecessors are still to be avoided.
func (p *placing) rejecting(d *Decision) bool {
	return p.Rejections.Times > 0 && (p.Now.Before(p.Rejections.again()) || d.Patience <= 0)
}

// obstacle returns what keeps a node from taking the pod.
func (p *placing) obstacle(d *Decision, node *corev1.Node) obstacle {
	o := p.pod.obstacle(node)
	if o.reason == "" && p.rejecting(d) && slices.Contains(p.Rejections.Nodes, node.Name) {
		return obstacle{reason: "rejected the pod (" + p.Rejections.Words + ")", retry: p.Rejections.again().Sub(p.Now)}
	}
	return o
}

// obstacleToAll returns what keeps every node with the required labels from taking the pod. It tries the recorded node
// before it lists the others.
func (p *placing) obstacleToAll(d *Decision) obstacle {
	if n := p.Nodes.Node(p.Record.State.NodeName); n != nil && hasLabels(n, p.required) {
		if o := p.obstacle(d, n); o.reason == "" {
			return o
		}
	}
	worst := obstacle{reason: "no longer exist", permanent: true}
	for i, n := range p.Nodes.Labelled(p.required) {
		o := p.obstacle(d, n)
		if o.reason == "" {
			return o
		}
		if i == 0 || worst.permanent {
			worst = o
			worst.reason = "cannot take the pod: node " + n.Name + " " + o.reason
		}
	}
	return worst
}

// avoidLost keeps a pod off the node where it was, if that is gone or declared off: the scheduler may not know yet, or
// find that the pod tolerates the taint. It would bind the pod to it, and only the garbage collector would end that
// pod, 40 s later. A pod that found no other node in time is replaced by one that may go anywhere.
func (d *Decision) avoidLost(s Situation) {
	last := s.Address.Node
	if last == "" && s.Record != nil {
		last = s.Record.State.NodeName
	}
	if last == "" || s.Pooled || s.GivenUp || d.Outcome == OutcomeWait {
		return
	}
	if node := s.Nodes.Node(last); node == nil || outOfService(node) {
		d.Affinity.Without = append(d.Affinity.Without, last)
	}
}

// What begins a home that is known by labels, or by the nodes that it is not.
const (
	nodesWith = "nodes with "
	nodesBut  = "any node but "
)

// NodeHome writes a node as a home, for people.
func NodeHome(node string) string { return "node " + node }

// NotNodes writes all nodes but some as a home, for people.
func NotNodes(nodes []string) string { return nodesBut + strings.Join(nodes, ", ") }

// decidePinned is for a pod that is no longer gated and has no node yet. Only the scheduler can say that there is no
// room for it; until it has, it may just be slow.
func (p *placing) decidePinned(d Decision) Decision {
	says, refused := Refused(p.Pod)
	if !Pinned(p.Pod) || p.Pod.Spec.NodeName != "" || !refused {
		return d
	}
	const full = "has no room for the pod"
	d.Home = p.Pod.Annotations[stayputv1alpha1.AnnotationPinned]
	d.Node = p.Address.Node
	d.Labels, _ = p.Record.affinity(p.Nodes)
	var o obstacle
	if node, ok := strings.CutPrefix(d.Home, NodeHome("")); ok {
		o = p.pod.obstacle(p.Nodes.Node(node))
	}
	switch {
	case o.permanent:
		d.Outcome, d.Reason = OutcomeEvict, o.reason
	case d.Patience > 0:
		d.wait(p.Situation, obstacle{reason: full})
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
func (p *placing) pull(d *Decision) {
	var home corev1.NodeSelectorTerm
	switch {
	case p.node != "":
		home.MatchFields = []corev1.NodeSelectorRequirement{byName(corev1.NodeSelectorOpIn, p.node)}
		d.nominate(p.Situation, p.node)
	default:
		for _, key := range slices.Sorted(maps.Keys(p.required)) {
			home.MatchExpressions = append(home.MatchExpressions, corev1.NodeSelectorRequirement{
				Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{p.required[key]},
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

func (d *Decision) wait(s Situation, o obstacle) {
	d.Outcome, d.Reason = OutcomeWait, o.reason
	if d.Patience != forever {
		d.Retry = d.Patience
	}
	sooner := func(retry time.Duration) {
		if d.Retry == 0 || retry < d.Retry {
			d.Retry = max(retry, time.Millisecond)
		}
	}
	if o.retry > 0 {
		sooner(o.retry)
	}
	if Gated(s.Pod) && !s.Address.Guess.IsZero() {
		sooner(s.Address.Guess.Sub(s.Now))
	}
}

func (d *Decision) elsewhere(reason string) {
	d.Outcome, d.Reason = OutcomeElsewhere, reason
	d.Affinity.Required = nil // what is preferred holds no pod up
}

// patience returns how much longer the pod waits for its home. The time of pods that were rejected there counts.
func (s Situation) patience(wait time.Duration, whileKept bool) time.Duration {
	since := s.Since
	if since.IsZero() {
		since = s.Pod.CreationTimestamp.Time
	}
	if s.Rejections.Times > 0 && s.Rejections.First.Before(since) {
		since = s.Rejections.First
	}
	switch {
	case !whileKept:
		return since.Add(wait).Sub(s.Now)
	case s.Address.Node == "" || s.Address.Until.IsZero():
		return forever
	}
	return s.Address.Until.Sub(s.Now)
}

// spell writes labels for people.
func spell(l map[string]string) string {
	var s []string
	for _, k := range slices.Sorted(maps.Keys(l)) {
		s = append(s, k+"="+l[k])
	}
	return strings.Join(s, ",")
}
