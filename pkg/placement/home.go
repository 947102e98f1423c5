package placement

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// DefaultHomeWait is how long a pod waits for a home that cannot take it, unless its template says otherwise.
const DefaultHomeWait = 60 * time.Second

// forever is a wait without an end.
const forever = time.Duration(1<<63 - 1)

// situation is all that the placement of a pod depends on. It is a snapshot: whoever makes it must know every
// part of it, or not make it. Not to know is a reason to try again, never to decide.
type situation struct {
	now time.Time
	pod *corev1.Pod
	// home is the node that keeps the pod's addresses; empty: none does.
	home string
	// kept is until when home keeps them; zero: without an end.
	kept time.Time
	// guess: home is only where the pod's predecessor was, its RetainedIP being on its way, until then; zero: it is
	// published.
	guess time.Time
	// record is of the pod's PersistentPodState; nil: there is none.
	record *record
	// given up: the pod's predecessor waited for its home in vain.
	givenUp bool
	nodes   nodes
}

// nodes are the nodes of the cluster.
type nodes interface {
	// node returns the node of that name; nil: there is none.
	node(name string) *corev1.Node
	// labelled returns all nodes with these labels.
	labelled(map[string]string) []*corev1.Node
}

// outcome of a placement.
type outcome string

const (
	outcomeFree      outcome = "free"      // there is no home: anywhere
	outcomeHome      outcome = "home"      // drawn to its home
	outcomeWait      outcome = "wait"      // the home cannot take the pod now
	outcomeElsewhere outcome = "elsewhere" // there is a home, but not for this pod: anywhere
	outcomeEvict     outcome = "evict"     // drawn home, but the scheduler has no place for it there: make a new one
)

// decision is what becomes of a pod now.
type decision struct {
	outcome outcome
	pull    pull
	// home is what the pod is drawn to, waits for or gives up, for people.
	home string
	// reason says why the pod waits or goes elsewhere: it continues the sentence "home … ".
	reason string
	// retry is when to decide again at the latest; zero: when something changes.
	retry time.Duration
	// notes are what the pod's owner should hear of besides.
	notes []string
}

// decide is the placement of a pod that is gated, or that was drawn home and has no node yet.
func decide(s situation) decision {
	since := waitsSince(s.pod)
	wait, err := homeWait(s.pod, since, s.home != "", s.kept)
	d := decision{outcome: outcomeFree}
	if err != nil {
		d.notes = append(d.notes, err.Error())
	}
	left := forever
	if wait != forever {
		left = since.Add(wait).Sub(s.now)
	}
	if !gated(s.pod) {
		return decideDrawn(s, d, left)
	}

	// 1. What draws the pod. The address comes first: a record that says another place is older than it.
	var required map[string]string
	if s.record != nil {
		required, d.pull = recorded(s.record, s.nodes)
	}
	home := s.nodes.node(s.home)
	switch {
	case s.home == "" && len(required) == 0 && s.record.lost(s.nodes):
		d.outcome, d.home, d.reason = outcomeElsewhere, "node "+s.record.state.NodeName, "is gone from the cluster"
		return d
	case s.home == "" && len(required) == 0:
		if !d.pull.empty() {
			d.outcome, d.home = outcomeHome, s.record.state.NodeName
		}
		return d
	case s.home != "" && home != nil && !has(home, required):
		d.notes = append(d.notes, fmt.Sprintf("PersistentPodState %s records %s, but node %s, which keeps the pod's IP, has other labels: the IP's node is taken",
			s.record.object.Name, spell(required), s.home))
		d.pull.required, required = nil, nil
	}

	// 2. Whether it can take the pod.
	var blocked blockage
	if s.home != "" {
		d.home = "node " + s.home
		blocked = cannotTake(home, s.pod)
	} else {
		d.home = "nodes with " + spell(required)
		blocked = noneCanTake(s.nodes, s.record.state.NodeName, required, s.pod)
	}
	switch {
	case blocked.reason == "" && !s.givenUp:
		d.outcome, d.pull.node = outcomeHome, s.home
		return d
	case blocked.reason == "":
		blocked.reason = "had no room for the pod"
	case !blocked.forGood && !s.givenUp && left > 0:
		d.outcome, d.reason, d.pull = outcomeWait, blocked.reason, pull{}
		if left != forever {
			d.retry = left
		}
		if sure := s.guess.Sub(s.now); !s.guess.IsZero() && (d.retry == 0 || sure < d.retry) {
			d.retry = max(sure, time.Millisecond)
		}
		return d
	}
	d.outcome, d.reason = outcomeElsewhere, blocked.reason
	d.pull.required = nil // what is preferred does not hold anybody up
	return d
}

// decideDrawn is for a pod that is not gated any more and has no node yet. Only the scheduler's own word that
// there is no place for it counts; before that it may just be slow.
func decideDrawn(s situation, d decision, left time.Duration) decision {
	if !drawn(s.pod) || s.pod.Spec.NodeName != "" || !unschedulable(s.pod) {
		return d
	}
	d.home, d.reason = s.pod.Annotations[stayputv1alpha1.AnnotationHome], "has no room for the pod"
	if left > 0 {
		d.outcome = outcomeWait
		if left != forever {
			d.retry = left
		}
		return d
	}
	d.outcome = outcomeEvict
	return d
}

// homeWait is how long a pod waits for its home, counted from since on. A value that cannot be read is the
// default, and an error that says so.
func homeWait(pod *corev1.Pod, since time.Time, kept bool, until time.Time) (time.Duration, error) {
	value, ok := pod.Annotations[stayputv1alpha1.AnnotationHomeWait]
	if !ok {
		return DefaultHomeWait, nil
	}
	if value == stayputv1alpha1.HomeWaitRetention {
		if kept && !until.IsZero() {
			return max(0, until.Sub(since)), nil
		}
		return forever, nil
	}
	wait, err := time.ParseDuration(value)
	if err != nil || wait < 0 {
		return DefaultHomeWait, fmt.Errorf("annotation %s: %q is not valid: expected a duration such as 60s or 10m, or %s; it is taken as %s",
			stayputv1alpha1.AnnotationHomeWait, value, stayputv1alpha1.HomeWaitRetention, DefaultHomeWait)
	}
	return wait, nil
}

// recorded is what a record draws to: the labels it requires, and the pull of both. Labels that are not in the
// record, which has none from a number of pods on, are those that the recorded node has now.
func recorded(r *record, nodes nodes) (required map[string]string, p pull) {
	node := nodes.node(r.state.NodeName)
	label := func(key string) (corev1.NodeSelectorRequirement, bool) {
		value, ok := r.state.NodeTopologyLabels[key]
		if !ok && node != nil {
			value, ok = node.Labels[key]
		}
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}, ok
	}
	if term := r.spec.RequiredPersistentTopology; term != nil {
		for _, key := range term.NodeTopologyKeys {
			if req, ok := label(key); ok {
				if required == nil {
					required = map[string]string{}
				}
				required[key] = req.Values[0]
				p.required = and(p.required, req)
			}
		}
	}
	for _, term := range r.spec.PreferredPersistentTopology {
		var preference corev1.NodeSelectorTerm
		for _, key := range term.Preference.NodeTopologyKeys {
			if req, ok := label(key); ok {
				preference.MatchExpressions = and(preference.MatchExpressions, req)
			}
		}
		if len(preference.MatchExpressions) > 0 { // an empty preference matches every node
			p.preferred = append(p.preferred, corev1.PreferredSchedulingTerm{Weight: term.Weight, Preference: preference})
		}
	}
	return required, p
}

// lost says whether nobody can tell any more what a record requires: it has no labels, and its node is gone.
func (r *record) lost(nodes nodes) bool {
	return r != nil && r.spec.RequiredPersistentTopology != nil && len(r.state.NodeTopologyLabels) == 0 && nodes.node(r.state.NodeName) == nil
}

// blockage is why a node cannot take a pod; without a reason it can.
type blockage struct {
	reason  string
	forGood bool // waiting does not help
}

// cannotTake says what keeps a node from taking a pod, room aside: that is the scheduler's to say.
func cannotTake(node *corev1.Node, pod *corev1.Pod) blockage {
	switch {
	case node == nil:
		return blockage{"is gone from the cluster", true}
	case !accepts(pod, node):
		return blockage{"is not allowed by the pod's own node selector or node affinity", true}
	case !ready(node):
		return blockage{reason: "is not Ready"}
	case node.Spec.Unschedulable && !tolerates(pod, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}):
		return blockage{reason: "is cordoned"}
	}
	taint, untolerated := corev1helpers.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, pod.Spec.Tolerations, func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, true)
	switch {
	case !untolerated:
		return blockage{}
	// The taints of what is said above come and go a moment apart from it.
	case taint.Key == corev1.TaintNodeUnschedulable:
		return blockage{reason: "is cordoned"}
	case taint.Key == corev1.TaintNodeNotReady, taint.Key == corev1.TaintNodeUnreachable:
		return blockage{reason: "is not Ready"}
	default:
		return blockage{reason: "has the taint " + taint.ToString() + ", which the pod does not tolerate"}
	}
}

// noneCanTake is cannotTake for the nodes with some labels. first is looked at first, so that all nodes are only
// where that one cannot.
func noneCanTake(all nodes, first string, required map[string]string, pod *corev1.Pod) blockage {
	if n := all.node(first); n != nil && has(n, required) && cannotTake(n, pod).reason == "" {
		return blockage{}
	}
	worst := blockage{"are gone from the cluster", true}
	for i, n := range all.labelled(required) {
		b := cannotTake(n, pod)
		if b.reason == "" {
			return b
		}
		if i == 0 || worst.forGood {
			worst = blockage{"cannot take the pod: node " + n.Name + " " + b.reason, b.forGood}
		}
	}
	return worst
}

func tolerates(pod *corev1.Pod, taint corev1.Taint) bool {
	return corev1helpers.TolerationsTolerateTaint(klog.Background(), pod.Spec.Tolerations, &taint, true)
}

func ready(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// gated says whether a pod waits for its placement by us.
func gated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == stayputv1alpha1.PlacementGate })
}

// annotated says whether a pod asks for its addresses to be retained.
func annotated(annotations map[string]string) bool {
	_, ours := annotations[stayputv1alpha1.AnnotationRetainIP]
	_, kruise := annotations[stayputv1alpha1.AnnotationReservedIPDuration]
	return ours || kruise
}

func unschedulable(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

// spell writes labels for people.
func spell(l map[string]string) string {
	var s []string
	for _, k := range slices.Sorted(maps.Keys(l)) {
		s = append(s, k+"="+l[k])
	}
	return strings.Join(s, ",")
}

// newest chooses the home among the nodes that keep addresses for a pod: where it was last. last is the node on
// which its predecessor was seen to end; empty: nobody saw it. Then it is where the phase began last. That is the
// word of different clocks, and of a node that comes back it is when it noticed the end, not when the pod left it;
// but neither does the phase tell: a node that is still down says Bound of a pod that left it long ago.
// What is not kept any more does not count.
func newest(kept []*stayputv1alpha1.RetainedIP, last string, now time.Time) *stayputv1alpha1.RetainedIP {
	var home *stayputv1alpha1.RetainedIP
	for _, r := range kept {
		switch {
		case !keeps(r, now):
		case last != "" && r.Spec.NodeName == last:
			return r
		case home == nil || began(r).After(began(home)):
			home = r
		}
	}
	return home
}

// homeOf sets the home of a pod among the nodes that keep, or kept, addresses of its own name. A node on which its
// predecessor ended counts before it has published that it keeps them, for as long as that may take: a node where
// the pod was before may keep some as well.
func (s *situation) homeOf(kept []*stayputv1alpha1.RetainedIP, last lastNode) {
	home, published := newest(kept, last.node, s.now), last.at.Add(publishing)
	silent := !slices.ContainsFunc(kept, func(r *stayputv1alpha1.RetainedIP) bool { return r.Spec.NodeName == last.node })
	if last.node != "" && silent && (home == nil || last.fresh) && s.now.Before(published) {
		s.home, s.guess = last.node, published
		return
	}
	s.keptBy(home)
}

// keptBy sets the home of a pod to a node that keeps addresses for it; nil: none does.
func (s *situation) keptBy(home *stayputv1alpha1.RetainedIP) {
	if home != nil {
		s.home, s.kept = home.Spec.NodeName, keptFor(home, s.pod)
	}
}

// keeps says whether a node still keeps addresses: they are not given up, deleted or expired.
func keeps(r *stayputv1alpha1.RetainedIP, now time.Time) bool {
	until := keptUntil(r)
	return !r.Spec.Release && r.DeletionTimestamp.IsZero() && (until.IsZero() || now.Before(until))
}

// keptUntil is when the addresses become free; zero: not known to end.
func keptUntil(r *stayputv1alpha1.RetainedIP) time.Time {
	if r.Status.Phase != stayputv1alpha1.PhaseRetained {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, r.Status.Expires)
	if err != nil {
		return time.Time{} // never, or of a later version
	}
	return t
}

// keptFor is until when a pod can count on the addresses. Of addresses whose node has not told that the
// predecessor has ended (it may be down) the time has not begun: they are kept at least as long as if it had when
// the pod was created.
func keptFor(r *stayputv1alpha1.RetainedIP, pod *corev1.Pod) time.Time {
	if r.Status.Phase == stayputv1alpha1.PhaseRetained {
		return keptUntil(r)
	}
	retention, err := time.ParseDuration(r.Spec.Retention)
	if err != nil {
		return time.Time{} // while-owned
	}
	return pod.CreationTimestamp.Add(retention)
}

// began is when the phase began, as far as it is known.
func began(r *stayputv1alpha1.RetainedIP) time.Time {
	if r.Status.Since != nil {
		return r.Status.Since.Time
	}
	return r.CreationTimestamp.Time
}
