package home

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/retention"
)

// Publishing is how long the RetainedIP of an address may be on its way: far longer than an agent takes that can reach
// the API server.
const Publishing = time.Minute

// Address says which node keeps the addresses of a pod. By the zero value, none does.
type Address struct {
	Node string
	// Until is when Node frees them, zero if no end is known.
	Until time.Time
	// Guess is set if Node is only where the pod's predecessor ended and no RetainedIP says yet that it keeps anything:
	// from then on Node is no longer assumed to.
	Guess time.Time
}

// Ended says where the predecessor of a pod was deleted. The zero value means that it is not known.
type Ended struct {
	Node string
	At   time.Time
	// Fresh says that it had run for so short a time that its RetainedIP may still be on its way.
	Fresh bool
	// Vanished are the pod's RetainedIPs that were deleted without having been released. Their nodes still keep the
	// addresses, and publish them again.
	Vanished []Vanished
}

// Vanished is a RetainedIP as it was when it was deleted.
type Vanished struct {
	*stayputv1alpha1.RetainedIP
	At time.Time
}

// AddressOf returns where the addresses of a pod are kept, given the RetainedIPs of its own name. A node on which its
// predecessor ended counts before it has published that it keeps them, for as long as [Publishing]: another node where
// the pod ran before may keep some too. So does a node whose RetainedIP vanished. While a node is not Ready it
// publishes nothing, and that time does not count.
func AddressOf(pod *corev1.Pod, kept []*stayputv1alpha1.RetainedIP, ended Ended, nodes Nodes, now time.Time) Address {
	speaks := func(node string) bool {
		return slices.ContainsFunc(kept, func(r *stayputv1alpha1.RetainedIP) bool { return r.Spec.NodeName == node })
	}
	guesses, all := map[*stayputv1alpha1.RetainedIP]time.Time{}, slices.Clip(kept)
	for _, v := range ended.Vanished {
		node := v.Spec.NodeName
		if until := published(nodes.Node(node), v.At, now); !speaks(node) && now.Before(until) {
			guesses[v.RetainedIP], all = until, append(all, v.RetainedIP)
		}
	}
	newest := newestOf(all, ended.Node, now)
	if newest == nil || newest.Spec.NodeName != ended.Node {
		until := published(nodes.Node(ended.Node), ended.At, now)
		if ended.Node != "" && !speaks(ended.Node) && (newest == nil || ended.Fresh) && now.Before(until) {
			return Address{Node: ended.Node, Until: asked(pod), Guess: until}
		}
	}
	a := AddressIn(newest, pod)
	a.Guess = guesses[newest]
	return a
}

// published returns until when a node may still publish what it has kept since then.
func published(node *corev1.Node, since, now time.Time) time.Time {
	if node == nil {
		return since.Add(Publishing)
	}
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type != corev1.NodeReady:
		case c.Status != corev1.ConditionTrue:
			since = now
		case c.LastTransitionTime.After(since):
			since = c.LastTransitionTime.Time
		}
	}
	return since.Add(Publishing)
}

// asked returns until when a node keeps addresses for a pod at least, if it keeps what the pod asks for. The time is
// zero if no end is known.
func asked(pod *corev1.Pod) time.Time {
	policy, _, err := retention.Parse(pod.Annotations)
	if err != nil || policy.Duration() == 0 {
		return time.Time{}
	}
	return pod.CreationTimestamp.Add(policy.Duration())
}

// AddressIn returns where the addresses of a RetainedIP are kept and for how long a pod can count on them, nil if they
// are kept nowhere.
func AddressIn(r *stayputv1alpha1.RetainedIP, pod *corev1.Pod) Address {
	if r == nil {
		return Address{}
	}
	return Address{Node: r.Spec.NodeName, Until: keptFor(r, pod)}
}

// newestOf returns the RetainedIP of the node where the pod was last, nil if none is kept now. ended is the node on
// which its predecessor was seen to end. If that is empty, it is the node on which they were bound last. Phases tell
// less: a node that is down says Bound of a pod that left it long ago, and notices that only when it comes back.
func newestOf(kept []*stayputv1alpha1.RetainedIP, ended string, now time.Time) *stayputv1alpha1.RetainedIP {
	var newest *stayputv1alpha1.RetainedIP
	for _, r := range kept {
		switch {
		case !Keeps(r, now):
		case ended != "" && r.Spec.NodeName == ended:
			return r
		case newest == nil || LastBound(r, now).After(LastBound(newest, now)):
			newest = r
		}
	}
	return newest
}

// Scheduled reports whether the controller has seen bound to its node what a RetainedIP is for: the pod, or a pod of
// the shared identity. Without that it is only the word of the node, and no home.
func Scheduled(r *stayputv1alpha1.RetainedIP) bool { return r.Spec.Scheduled == Claimant(r) }

// Claimant returns what a RetainedIP is for, as spec.scheduled has it.
func Claimant(r *stayputv1alpha1.RetainedIP) string { return claimant(r.Spec.PodName, r.Spec.Identity) }

// Bound returns what a pod that has a node stands for there, as spec.scheduled has it, empty if for nothing. A node can
// create the mirror pods of its own static pods, by any name, so they stand for nothing.
func Bound(pod *corev1.Pod) string {
	owner := metav1.GetControllerOf(pod)
	if pod.Spec.NodeName == "" || pod.Spec.HostNetwork ||
		owner != nil && owner.APIVersion == corev1.SchemeGroupVersion.String() && owner.Kind == "Node" {
		return ""
	}
	return SuccessorsOf(pod)
}

// SuccessorsOf names what a pod shares with its successors: its own name, or a shared identity.
func SuccessorsOf(pod *corev1.Pod) string {
	return claimant(pod.Name, pod.Annotations[stayputv1alpha1.AnnotationIdentity])
}

func claimant(pod, identity string) string {
	if identity != "" {
		return "identity/" + identity
	}
	return "pod/" + pod
}

// Keeps reports whether the addresses of a RetainedIP are still kept: not given up, deleted or expired.
func Keeps(r *stayputv1alpha1.RetainedIP, now time.Time) bool {
	until := keptUntil(r)
	return r.Spec.Release == "" && r.DeletionTimestamp.IsZero() && (until.IsZero() || now.Before(until))
}

// ahead is how far the clock of a node may be ahead of the controller's.
const ahead = time.Minute

// LastBound returns when the addresses of a RetainedIP were bound last, by the clock of the node. A RetainedIP that
// does not say so lost it with its node's power: then it is when the phase began, which for retained addresses is when
// they ceased to be bound. No time that has yet to come is believed.
func LastBound(r *stayputv1alpha1.RetainedIP, now time.Time) time.Time {
	t := cmp.Or(r.Status.LastBoundTime, r.Status.Since)
	if t == nil || t.Time.After(now.Add(ahead)) {
		return r.CreationTimestamp.Time
	}
	return t.Time
}

// keptUntil returns when the addresses become free, zero if no end is known.
func keptUntil(r *stayputv1alpha1.RetainedIP) time.Time {
	if r.Status.Phase != stayputv1alpha1.PhaseRetained || r.Status.Expires == nil {
		return time.Time{}
	}
	return r.Status.Expires.Time
}

// keptFor returns until when a pod can count on the addresses, zero if no end is known. While the node has not reported
// the predecessor's end (it may be down), the retention has not begun: they are kept at least as long as if it had
// begun when the pod was created.
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
