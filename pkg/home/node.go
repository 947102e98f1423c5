package home

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Nodes are the nodes of the cluster.
type Nodes interface {
	// Node returns the node of that name, nil if there is none.
	Node(name string) *corev1.Node
	// Labelled returns all nodes with these labels.
	Labelled(map[string]string) []*corev1.Node
}

// NodeReady reports whether a node is Ready.
func NodeReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// obstacle keeps a node from taking a pod; without a reason there is none.
type obstacle struct {
	reason    string
	permanent bool          // waiting does not help
	retry     time.Duration // until it is over by itself, 0 if only a change of the node ends it
}

// candidate is a pod whose own node selector and affinity are parsed, once for however many nodes.
type candidate struct {
	*corev1.Pod
	required nodeaffinity.RequiredNodeAffinity
}

func candidateOf(pod *corev1.Pod) candidate {
	return candidate{pod, nodeaffinity.GetRequiredNodeAffinity(pod)}
}

// obstacle returns what keeps a node from taking the pod, apart from a lack of room: only the scheduler knows that.
func (pod candidate) obstacle(node *corev1.Node) obstacle {
	switch {
	case node == nil:
		return obstacle{reason: "no longer exists", permanent: true}
	case leaving(node) != "": // whether or not the pod tolerates it
		return obstacle{reason: leaving(node), permanent: true}
	case !pod.accepts(node):
		return obstacle{reason: "is not allowed by the pod's own node selector or node affinity", permanent: true}
	case !NodeReady(node):
		return obstacle{reason: "is not Ready"}
	case node.Spec.Unschedulable &&
		!tolerates(pod.Pod, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}):
		return obstacle{reason: "is cordoned"}
	}
	taint, untolerated := corev1helpers.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints,
		pod.Spec.Tolerations, func(t *corev1.Taint) bool {
			return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
		}, true)
	switch {
	case !untolerated:
		return obstacle{}
	// The taints for the cases above come and go a moment apart from them.
	case taint.Key == corev1.TaintNodeUnschedulable:
		return obstacle{reason: "is cordoned"}
	case taint.Key == corev1.TaintNodeNotReady, taint.Key == corev1.TaintNodeUnreachable:
		return obstacle{reason: "is not Ready"}
	default:
		return obstacle{reason: "has the taint " + taint.ToString() + ", which the pod does not tolerate"}
	}
}

// leaving says that a node is being removed for good, and by whom, empty if it is not. A drain by hand does not say so:
// it may be for a repair.
func leaving(node *corev1.Node) string {
	if !node.DeletionTimestamp.IsZero() {
		return "is being deleted"
	}
	if outOfService(node) {
		return "is out of service"
	}
	for _, t := range node.Spec.Taints {
		switch {
		case t.Key == "ToBeDeletedByClusterAutoscaler":
			return "is being removed by cluster-autoscaler"
		case t.Key == "karpenter.sh/disrupted",
			t.Key == "karpenter.sh/disruption" && t.Value == "disrupting": // before Karpenter 1.0
			return "is being removed by Karpenter"
		}
	}
	return ""
}

// outOfService reports whether an operator has declared a node to be off. As for Kubernetes' garbage collector, that
// does not count while it is Ready.
func outOfService(node *corev1.Node) bool {
	return !NodeReady(node) && slices.ContainsFunc(node.Spec.Taints,
		func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
}

// EndsWait reports whether the change of one node can end the wait of a pod for any of several nodes that include or
// included it: the node takes the pod now, or it was the last node for which waiting helped. was and is are the node
// before and after, nil if it was, or is, none of them.
func EndsWait(was, is *corev1.Node, pod *corev1.Pod) bool {
	c := candidateOf(pod)
	before, after := c.obstacle(was), c.obstacle(is)
	return after.reason == "" || after.permanent && !before.permanent
}

// The most that a pod may say of where it goes. A decision looks at each part of that for each node, and a patch
// narrows each term, so that more would delay all other pods, or make a patch that the API server never takes.
const (
	termsMost = 100  // of node affinity, required or preferred
	partsMost = 1000 // requirements and values of these terms, node labels, tolerations
)

// oversized says that a pod says too much of where it goes, and how much it may say; empty if it does not.
func oversized(pod *corev1.Pod) string {
	terms, parts := 0, len(pod.Spec.NodeSelector)+len(pod.Spec.Tolerations)
	count := func(t corev1.NodeSelectorTerm) {
		terms++
		for _, r := range slices.Concat(t.MatchExpressions, t.MatchFields) {
			parts += 1 + len(r.Values)
		}
	}
	if own := NodeAffinityOf(pod); own != nil {
		if required := own.RequiredDuringSchedulingIgnoredDuringExecution; required != nil {
			for _, t := range required.NodeSelectorTerms {
				count(t)
			}
		}
		for _, t := range own.PreferredDuringSchedulingIgnoredDuringExecution {
			count(t.Preference)
		}
	}
	switch {
	case terms > termsMost:
		return fmt.Sprintf("the pod has %d terms of node affinity, more than %d", terms, termsMost)
	case parts > partsMost:
		return fmt.Sprintf("the pod has %d requirements and values of node affinity, node selectors and tolerations, "+
			"more than %d", parts, partsMost)
	}
	return ""
}

func tolerates(pod *corev1.Pod, taint corev1.Taint) bool {
	return corev1helpers.TolerationsTolerateTaint(klog.Background(), pod.Spec.Tolerations, &taint, true)
}

// accepts reports whether the pod's own node selector and required node affinity allow a node. Terms that cannot be
// parsed allow none, as in the scheduler.
func (pod candidate) accepts(node *corev1.Node) bool {
	ok, err := pod.required.Match(node)
	return ok && err == nil
}

func hasLabels(node *corev1.Node, want map[string]string) bool {
	return labels.SelectorFromSet(want).Matches(labels.Set(node.Labels))
}
