package cli

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/ledger"
)

// askedBy explains annotations, in the order of the README.
func askedBy(annotations map[string]string) []Asked {
	all := []Asked{}
	_, own := annotations[stayputv1alpha1.AnnotationRetainIP]
	for _, key := range []string{
		stayputv1alpha1.AnnotationRetainIP, stayputv1alpha1.AnnotationReservedIPDuration, stayputv1alpha1.AnnotationWhenInUse, stayputv1alpha1.AnnotationIdentity,
		stayputv1alpha1.AnnotationWhenScaled, stayputv1alpha1.AnnotationWhenDeleted, stayputv1alpha1.AnnotationHomeWait, stayputv1alpha1.AnnotationHome,
	} {
		value, there := annotations[key]
		if !there {
			continue
		}
		meaning := ""
		switch key {
		case stayputv1alpha1.AnnotationRetainIP:
			meaning = "its address is kept for " + value + " after the pod stops"
			if value == stayputv1alpha1.RetentionWhileOwned {
				meaning = "its address is kept for as long as its workload exists and wants the pod"
			}
		case stayputv1alpha1.AnnotationReservedIPDuration:
			meaning = "its address is kept for " + value + " minutes after the pod stops"
			if own {
				meaning = "counts for nothing beside " + stayputv1alpha1.AnnotationRetainIP
			}
		case stayputv1alpha1.AnnotationWhenInUse:
			meaning = "a new pod of the name waits until its predecessor has given the address up"
			if value == "AllocateNew" {
				meaning = "a new pod of the name takes a fresh address while its predecessor still has this one"
			}
		case stayputv1alpha1.AnnotationIdentity:
			meaning = "it shares its addresses with the other pods of this identity in the namespace"
		case stayputv1alpha1.AnnotationWhenScaled:
			meaning = whenGone(value, "its workload is scaled down below the pod")
		case stayputv1alpha1.AnnotationWhenDeleted:
			meaning = whenGone(value, "its workload is deleted")
		case stayputv1alpha1.AnnotationHomeWait:
			meaning = "a new pod waits " + value + " for a home that cannot take it"
			if value == stayputv1alpha1.HomeWaitRetention {
				meaning = "a new pod waits for a home that cannot take it, as long as its address is kept there"
			}
		case stayputv1alpha1.AnnotationHome:
			meaning = "set by stayput: the pod was drawn to this home"
		}
		all = append(all, Asked{key, value, meaning})
	}
	if _, _, err := ledger.ParseAnnotations(annotations); err != nil {
		var bad *ledger.AnnotationError
		if errors.As(err, &bad) {
			for i := range all {
				if all[i].Annotation == bad.Key {
					all[i].Meaning = "not valid: expected " + bad.Expected
				}
			}
		}
	}
	return all
}

func whenGone(policy, when string) string {
	if policy == stayputv1alpha1.PolicyRetain {
		return "its address stays kept when " + when
	}
	return "its address is given up when " + when
}

// promise says what is promised to the pod, or why nothing is.
func (f *facts) promise() (say []string) {
	var mine []stayputv1alpha1.RetainedIP
	for _, r := range f.kept {
		if r.Spec.PodName == f.name {
			mine = append(mine, r)
		}
	}
	annotations := f.annotations()
	_, _, bad := ledger.ParseAnnotations(annotations)
	for _, r := range mine {
		w := ""
		if r.Spec.Release {
			w = "It is being given up, as was asked for by spec.release."
		} else if at, left := until(&r, f.now); at == "never" {
			w = fmt.Sprintf("%s is kept on node %s: %s.", ipsOf(&r), r.Spec.NodeName, reason(&r, f.workloads))
		} else if left != none {
			w = fmt.Sprintf("%s is kept on node %s until %s (%s).", ipsOf(&r), r.Spec.NodeName, at, left)
		} else if f.pod != nil && r.Spec.NodeName != f.pod.Spec.NodeName && f.pod.Spec.NodeName != "" {
			w = fmt.Sprintf("Node %s still says that %s is used by a pod of this name: the node or its agent may be down.", r.Spec.NodeName, ipsOf(&r))
		} else {
			w = fmt.Sprintf("%s on node %s is promised to it: kept %s.", ipsOf(&r), r.Spec.NodeName, reason(&r, f.workloads))
		}
		say = append(say, w)
	}
	switch {
	case len(mine) > 0:
		return say
	case bad != nil:
		return []string{"Nothing: " + bad.Error()}
	case !home.Annotated(annotations):
		return []string{"Nothing: it has no annotation " + stayputv1alpha1.AnnotationRetainIP + ". Put one on the pod template, such as " +
			stayputv1alpha1.AnnotationRetainIP + ": 10m"}
	case f.pod == nil:
		return []string{"Nothing is kept: its time is over, it was released, or it never had an address from stayput."}
	case f.pod.Spec.HostNetwork:
		return []string{"Nothing: the pod is on the network of its host and has no address of its own."}
	case f.pod.Status.PodIP == "":
		return []string{"Nothing yet: the pod has no address."}
	}
	return f.whyNothing()
}

// refusals are the reasons of the Events that say why a pod got no promise.
var refusals = []string{string(ledger.EventRefused), home.ReasonInvalidAnnotation, home.ReasonNotOwned}

// whyNothing is for a running pod that asks for a promise and has none.
func (f *facts) whyNothing() []string {
	for i := len(f.events) - 1; i >= 0; i-- {
		if e := f.events[i]; e.InvolvedObject.UID == f.pod.UID && slices.Contains(refusals, e.Reason) {
			return []string{"Nothing: " + e.Message}
		}
	}
	node := f.pod.Spec.NodeName
	n := f.looks[node]
	if n == nil {
		return []string{fmt.Sprintf("Nothing is published. Its node's ledger, which would say why, cannot be read: %v", f.lookErrors[node])}
	}
	for _, net := range n.Networks {
		for _, a := range net.Addresses {
			if a.IP.String() != f.pod.Status.PodIP {
				continue
			}
			if a.Promise != nil {
				return []string{fmt.Sprintf("The ledger of node %s has the promise, but there is no RetainedIP: its agent says of the API server: %s", node, cmp.Or(n.Agent.API, "that it has none"))}
			}
			for _, set := range net.RangeSets {
				if set.Promised >= set.PromiseLimit && slices.ContainsFunc(set.Ranges, func(r inspection.Range) bool { return r.Contains(a.IP) }) {
					return []string{fmt.Sprintf("Nothing: of network %s on node %s %d addresses are promised, of at most %d (promisedShare %g); the pod has an ordinary address",
						net.Name, node, set.Promised, set.PromiseLimit, net.PromisedShare)}
				}
			}
			return []string{fmt.Sprintf("Nothing: its address was given to it before the annotation was there, or was decided on without it; its successor is promised one (node %s)", node)}
		}
	}
	return []string{fmt.Sprintf("Nothing: its address did not come from stayput. The CNI configuration of node %s: %s (kubectl stayput check %s)", node, n.CNI.Message, node)}
}

func (f *facts) keptBy(r *stayputv1alpha1.RetainedIP) Kept {
	is := Kept{RetainedIP: r.Name, Node: r.Spec.NodeName, IPs: r.Status.IPs, Phase: string(r.Status.Phase), Why: reason(r, f.workloads)}
	if r.Status.Phase == stayputv1alpha1.PhaseRetained {
		is.Until = r.Status.Expires
	}
	n := f.looks[r.Spec.NodeName]
	if n == nil {
		return is
	}
	for _, ip := range r.Status.IPs {
		is.Ledger = append(is.Ledger, ip+" "+entryOf(n, ip))
	}
	return is
}

// entryOf is what a ledger says of an address.
func entryOf(n *inspection.Node, ip string) string {
	for _, net := range n.Networks {
		for _, a := range net.Addresses {
			if a.IP.String() != ip {
				continue
			}
			switch {
			case a.State == inspection.Unreadable:
				return "has a file that says nothing"
			case a.State == inspection.Newer:
				return "is kept by a newer version of stayput than the agent's"
			case a.State == inspection.Retained && a.LeftSeconds == nil:
				return "is retained for " + a.Promise.Identity + " without an end"
			case a.State == inspection.Retained:
				return fmt.Sprintf("is retained for %s, %s left", a.Promise.Identity, duration.HumanDuration(time.Duration(*a.LeftSeconds)*time.Second))
			case a.Promise != nil:
				return fmt.Sprintf("is bound to sandbox %.12s, promised to %s", a.ContainerID, a.Promise.Identity)
			}
			return fmt.Sprintf("is bound to sandbox %.12s, promised to nobody", a.ContainerID)
		}
	}
	return "is free"
}
