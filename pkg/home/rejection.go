package home

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Rejections are what the kubelets of nodes did to the predecessors of a pod, one after the other: they refused to
// admit them. Pods that ran in between end the series. The zero value is none.
type Rejections struct {
	Nodes       []string // those whose kubelets did, at most [RejectingMost]
	First, Last time.Time
	Times       int
	Words       string // of the last kubelet
}

// RejectingMost bounds the nodes that a pod is kept off because they rejected its predecessors.
const RejectingMost = 20

// longestPause is the longest pause before a pod may try again at home after its predecessor was rejected there.
const longestPause = time.Minute

// again returns when a pod may go again where its predecessors were rejected: after 1 s, and after twice as long each
// further time.
func (r Rejections) again() time.Time {
	pause := longestPause
	if r.Times < 7 {
		pause = min(pause, time.Second<<max(r.Times-1, 0))
	}
	return r.Last.Add(pause)
}

// With returns the series with one more rejection, by a node.
func (r Rejections) With(node, words string, now time.Time) Rejections {
	if r.Times == 0 {
		r.First = now
	}
	r.Last, r.Words, r.Times = now, words, r.Times+1
	if r.Nodes = slices.Clone(r.Nodes); !slices.Contains(r.Nodes, node) && len(r.Nodes) < RejectingMost {
		r.Nodes = append(r.Nodes, node)
	}
	return r
}

// Rejected reports whether the kubelet of a pod's node did not admit the pod, and says why in its words: the pod is
// Failed for a reason, though none of its containers ever ran. A pod that failed, was evicted or preempted, or ended
// with its node after it had run was admitted. Kubernetes' garbage collector gives no reason.
func Rejected(pod *corev1.Pod) (words string, rejected bool) {
	if pod.Status.Phase != corev1.PodFailed || pod.Status.Reason == "" || pod.Status.PodIP != "" {
		return "", false
	}
	for _, containers := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses,
		pod.Status.EphemeralContainerStatuses} {
		if slices.ContainsFunc(containers, ran) {
			return "", false
		}
	}
	words = pod.Status.Reason
	if message := strings.TrimSpace(strings.TrimPrefix(pod.Status.Message, "Pod was rejected: ")); message != "" {
		words += ": " + message
	}
	return gist(words), true
}

// ran reports whether a container runs, or has run.
func ran(c corev1.ContainerStatus) bool {
	return c.State.Running != nil || c.State.Terminated != nil || c.LastTerminationState.Terminated != nil
}

// concern reports whether one of the nodes is the home, which is a node by name or those with labels.
func (r Rejections) concern(name string, required map[string]string, nodes Nodes) bool {
	return slices.ContainsFunc(r.Nodes, func(rejecting string) bool {
		if name != "" || len(required) == 0 {
			return rejecting == name
		}
		node := nodes.Node(rejecting)
		return node != nil && hasLabels(node, required)
	})
}
