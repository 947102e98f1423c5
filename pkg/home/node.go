package home

import (
	"slices"

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
	permanent bool // waiting does not help
}

// obstacleTo returns what keeps a node from taking a pod, apart from a lack of room: only the scheduler knows that.
func obstacleTo(node *corev1.Node, pod *corev1.Pod) obstacle {
	switch {
	case node == nil:
		return obstacle{"no longer exists", true}
	case leaving(node) != "": // whether or not the pod tolerates it
		return obstacle{leaving(node), true}
	case !accepts(pod, node):
		return obstacle{"is not allowed by the pod's own node selector or node affinity", true}
	case !NodeReady(node):
		return obstacle{reason: "is not Ready"}
	case node.Spec.Unschedulable &&
		!tolerates(pod, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}):
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

// obstacleToAll returns what keeps every node with these labels from taking a pod. It tries the node called first
// before it lists the others.
func obstacleToAll(all Nodes, first string, required map[string]string, pod *corev1.Pod) obstacle {
	if n := all.Node(first); n != nil && hasLabels(n, required) && obstacleTo(n, pod).reason == "" {
		return obstacle{}
	}
	worst := obstacle{"no longer exist", true}
	for i, n := range all.Labelled(required) {
		o := obstacleTo(n, pod)
		if o.reason == "" {
			return o
		}
		if i == 0 || worst.permanent {
			worst = obstacle{"cannot take the pod: node " + n.Name + " " + o.reason, o.permanent}
		}
	}
	return worst
}

// EndsWait reports whether the change of one node can end the wait of a pod for any of several nodes that include or
// included it: the node takes the pod now, or it was the last node for which waiting helped. was and is are the node
// before and after, nil if it was, or is, none of them.
func EndsWait(was, is *corev1.Node, pod *corev1.Pod) bool {
	before, after := obstacleTo(was, pod), obstacleTo(is, pod)
	return after.reason == "" || after.permanent && !before.permanent
}

func tolerates(pod *corev1.Pod, taint corev1.Taint) bool {
	return corev1helpers.TolerationsTolerateTaint(klog.Background(), pod.Spec.Tolerations, &taint, true)
}

// accepts reports whether a pod's own node selector and required node affinity allow a node. Terms that cannot be
// parsed allow none, as in the scheduler.
func accepts(pod *corev1.Pod, node *corev1.Node) bool {
	ok, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	return ok && err == nil
}

func hasLabels(node *corev1.Node, want map[string]string) bool {
	return labels.SelectorFromSet(want).Matches(labels.Set(node.Labels))
}
