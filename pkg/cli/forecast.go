package cli

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// Forecast is what would happen if the pod were deleted now, or, where there is none, created now.
type Forecast struct {
	Title string `json:"title"`
	// Outcome is what the controller would decide: home, wait, elsewhere, free; none where no pod of the name
	// would be made.
	Outcome string `json:"outcome"`
	// Node is where the successor would start or what it would wait for; empty: anywhere.
	Node string `json:"node,omitempty"`
	// IPs are what it would have there; empty: others.
	IPs   []string `json:"ips,omitempty"`
	Lines []string `json:"lines"`
}

// successor is the pod that would be made, nil where none is.
func (f *facts) successor() (pod *corev1.Pod, why string) {
	switch {
	case f.pod != nil && f.pod.Spec.NodeName == "":
		return f.pod, ""
	case f.template != nil:
		pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: f.name, Labels: f.template.Labels, Annotations: f.template.Annotations}, Spec: f.template.Spec}
		if f.pod != nil {
			pod.Spec.NodeName = f.pod.Spec.NodeName // where it was last
		}
		switch f.workload.GetKind() {
		case "ReplicaSet", "Deployment", "ReplicationController", "Job", "DaemonSet":
			if f.template.Annotations[stayputv1alpha1.AnnotationIdentity] == "" {
				return pod, fmt.Sprintf("%s %s makes another pod, of another name: nothing of this one's comes to it. With the annotation %s it would share its addresses.",
					f.workload.GetKind(), f.workload.GetName(), stayputv1alpha1.AnnotationIdentity)
			}
			return pod, ""
		}
		if wanted, known := wants(f.workload, f.name); known && !wanted {
			return nil, fmt.Sprintf("%s %s does not want a pod of this ordinal: nothing makes it again until it is scaled up.", f.workload.GetKind(), f.workload.GetName())
		}
		return pod, ""
	case f.pod != nil && metav1.GetControllerOf(f.pod) == nil:
		return nil, "No controller makes the pod again."
	case f.pod != nil:
		return f.pod, ""
	}
	return nil, "No workload is known that would make it."
}

// forecast is made by the controller's own rules.
func (f *facts) forecast() Forecast {
	fc := Forecast{Title: "If it is deleted now", Outcome: "none"}
	who := "the new pod"
	switch {
	case f.pod == nil:
		fc.Title = "If it is created now"
	case f.pod.Spec.NodeName == "":
		fc.Title, who = "As things are now", "the pod"
	}
	say := func(format string, args ...any) { fc.Lines = append(fc.Lines, fmt.Sprintf(format, args...)) }
	pod, why := f.successor()
	if pod == nil {
		say("%s", why)
		f.sayKept(say)
		return fc
	}
	if why != "" {
		say("%s", why)
		f.sayKept(say)
		return fc
	}
	if f.nodes == nil {
		say("The nodes of the cluster cannot be listed, so that nothing can be said.")
		fc.Outcome = "unknown"
		return fc
	}
	if f.pod != nil && home.Annotated(f.pod.Annotations) != home.Annotated(pod.Annotations) {
		say("The pod template has changed since: what follows is for a pod as it is made now.")
	}
	identity := pod.Annotations[stayputv1alpha1.AnnotationIdentity]
	var kept []*stayputv1alpha1.RetainedIP
	for i := range f.kept {
		r := &f.kept[i]
		if r.Spec.Identity == identity && (identity != "" || r.Spec.PodName == f.name) {
			kept = append(kept, r)
		}
	}
	d, node := home.Foresee(f.now, pod, kept, f.state, f.nodes)
	fc.Outcome = string(d.Outcome)
	var there *stayputv1alpha1.RetainedIP
	for _, r := range kept {
		if r.Spec.NodeName == node && (there == nil || r.Spec.PodName == f.name) {
			there = r
		}
	}
	wait := "until it can"
	if d.Retry > 0 {
		wait = "at most " + duration.HumanDuration(d.Retry)
	}
	ips := ""
	if there != nil {
		ips = strings.Join(there.Status.IPs, ", ")
	}
	switch d.Outcome {
	case home.OutcomeHome:
		fc.Node = node
		name := strings.TrimPrefix(strings.Replace(d.Home, "nodes with ", "one with ", 1), "node ")
		if d.Affinity.Requires() {
			say("Node: %s, and no other as long as it can take the pod.", name)
		} else {
			say("Node: %s if the scheduler likes: it is preferred, not required.", name)
		}
		f.sayIP(&fc, say, there, ips)
		if d.Affinity.Requires() {
			say("If its home is down, cordoned, tainted or full by then, %s waits %s for it (%s), then goes elsewhere with another IP.",
				who, patience(pod), stayputv1alpha1.AnnotationHomeWait)
		}
	case home.OutcomeWait:
		fc.Node = node
		say("Node: its home, %s, %s: %s waits for it, gated, %s, and then goes elsewhere.", d.Home, d.Reason, who, wait)
		if ips != "" {
			say("IP: %s if its home is back by then, else another one. The address stays kept there for its time.", ips)
		}
	case home.OutcomeElsewhere:
		say("Node: another one. Its home, %s, %s.", d.Home, d.Reason)
		say("IP: another one.")
	default:
		say("Node: wherever the scheduler likes. No node keeps an address for it, and nothing is recorded of it.")
		say("IP: any that is free.")
		if home.Annotated(pod.Annotations) && f.pod != nil && f.pod.Spec.NodeName != "" {
			say("The new pod asks for a promise, which counts from its start on.")
		}
	}
	fc.Lines = append(fc.Lines, d.Notes...)
	if why := f.leaderless(); why != "" && home.Annotated(pod.Annotations) {
		say("It waits before all that: %s.", why)
	}
	return fc
}

// sayIP says which address the successor has at its home.
func (f *facts) sayIP(fc *Forecast, say func(string, ...any), r *stayputv1alpha1.RetainedIP, ips string) {
	if r == nil {
		say("IP: any that is free there: no address is kept for it.")
		return
	}
	if lost := f.outside(r); lost != "" {
		say("IP: another one: %s", lost)
		return
	}
	fc.IPs = r.Status.IPs
	end := "kept until " + r.Status.Expires
	switch {
	case r.Status.Phase == stayputv1alpha1.PhaseBound && r.Spec.Retention == stayputv1alpha1.RetentionWhileOwned:
		end = "kept for as long as its workload wants the pod"
	case r.Status.Phase == stayputv1alpha1.PhaseBound:
		end = "kept for " + r.Spec.Retention + " from the moment the pod stops"
	case r.Status.Expires == stayputv1alpha1.ExpiresNever:
		end = "kept without an end"
	}
	if r.Spec.Identity != "" && r.Spec.PodName != f.name {
		ips += " or another one of the identity " + r.Spec.Identity
	}
	say("IP: %s, %s.", ips, end)
}

// outside says that an address cannot be given back since it lies in none of the node's ranges any more.
func (f *facts) outside(r *stayputv1alpha1.RetainedIP) string {
	n := f.looks[r.Spec.NodeName]
	if n == nil {
		return ""
	}
	for _, of := range r.Status.Addresses {
		for _, net := range n.Networks {
			if net.Name != of.Network || net.Error != "" || len(net.RangeSets) == 0 {
				continue
			}
			for _, ip := range of.IPs {
				a, err := netip.ParseAddr(ip)
				if err == nil && !inRanges(net.RangeSets, a) {
					return fmt.Sprintf("%s is outside the ranges that network %s has on node %s now.", ip, net.Name, r.Spec.NodeName)
				}
			}
		}
	}
	return ""
}

func inRanges(sets []inspection.RangeSet, a netip.Addr) bool {
	return slices.ContainsFunc(sets, func(s inspection.RangeSet) bool {
		return slices.ContainsFunc(s.Ranges, func(r inspection.Range) bool { return r.Contains(a) })
	})
}

// sayKept says what becomes of addresses for which no pod comes.
func (f *facts) sayKept(say func(string, ...any)) {
	for i := range f.kept {
		r := &f.kept[i]
		if r.Spec.PodName != f.name {
			continue
		}
		ips := ipsOf(r)
		switch at, left := until(r, f.now); {
		case r.Spec.Release:
			say("%s on node %s is being given up.", ips, r.Spec.NodeName)
		case r.Status.Phase == stayputv1alpha1.PhaseBound && r.Spec.Retention == stayputv1alpha1.RetentionWhileOwned:
			say("%s on node %s is kept while its workload wants the pod.", ips, r.Spec.NodeName)
		case r.Status.Phase == stayputv1alpha1.PhaseBound:
			say("%s on node %s is kept for %s; a pod of this name that is made by then gets it.", ips, r.Spec.NodeName, r.Spec.Retention)
		case left == none:
			say("%s on node %s stays kept: %s.", ips, r.Spec.NodeName, reason(r, f.workloads))
		default:
			say("%s on node %s stays kept until %s (%s).", ips, r.Spec.NodeName, at, left)
		}
	}
}

// patience is how long a pod waits for its home, in words.
func patience(pod *corev1.Pod) string {
	wait, whileKept, _ := home.Wait(pod.Annotations) // of an invalid value it is the default
	if whileKept {
		return "as long as its address is kept"
	}
	return duration.HumanDuration(wait)
}
