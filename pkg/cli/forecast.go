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

// Forecast is what would happen if the pod were deleted now or, if there is none, created now.
type Forecast struct {
	Title string `json:"title"`
	// Outcome is the controller's decision: home, wait, elsewhere or free; of a pod of pools, whose addresses go with it,
	// it is about its node alone. It is none if no pod of the name would be created, and unknown if the nodes cannot be
	// listed.
	Outcome string `json:"outcome"`
	// Node is where the successor would start, or what it would wait for, empty if it may be any.
	Node string `json:"node,omitempty"`
	// IPs are those that it would have there, empty if it would have others.
	IPs   []string `json:"ips,omitempty"`
	Lines []string `json:"lines"`
}

func (fc *Forecast) say(format string, args ...any) {
	fc.Lines = append(fc.Lines, fmt.Sprintf(format, args...))
}

// outlook is a Forecast in the making.
type outlook struct {
	*facts
	Forecast
}

// successor returns the pod that would be created, or why none of the name would be.
func (o *outlook) successor() (pod *corev1.Pod, none string) {
	switch {
	case o.pod != nil && o.pod.Spec.NodeName == "":
		return o.pod, ""
	case o.template == nil && o.unread.workload != nil:
		return nil, "Unknown: its workload cannot be read."
	case o.template == nil && o.pod == nil:
		return nil, "No known workload would create it."
	case o.template == nil && metav1.GetControllerOf(o.pod) == nil:
		return nil, "The pod is not re-created: it has no controller."
	case o.template == nil:
		return o.pod, ""
	}
	switch kind := o.workload.GetKind(); kind {
	case "ReplicaSet", "Deployment", "ReplicationController", "Job", "DaemonSet":
		if o.template.Annotations[stayputv1alpha1.AnnotationIdentity] == "" {
			return nil, fmt.Sprintf("%s %s creates a pod with another name, which inherits nothing from this pod. With the "+
				"annotation %s it would share its addresses.", kind, o.workload.GetName(), stayputv1alpha1.AnnotationIdentity)
		}
	default:
		if wanted, known := wants(o.workload, o.name); known && !wanted {
			return nil, fmt.Sprintf("%s %s does not want a pod with this ordinal: "+
				"it is not re-created until the workload is scaled up.", kind, o.workload.GetName())
		}
	}
	pod = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.namespace, Name: o.name, Labels: o.template.Labels, Annotations: o.template.Annotations,
		},
		Spec: o.template.Spec,
	}
	if o.pod != nil {
		pod.Spec.NodeName = o.pod.Spec.NodeName // on which it was last
	}
	return pod, ""
}

// forecast asks the controller's rules.
func (f *facts) forecast() Forecast {
	o := outlook{f, Forecast{Title: "If it is deleted now", Outcome: "none"}}
	switch {
	case f.pod == nil:
		o.Title = "If it is created now"
	case f.pod.Spec.NodeName == "":
		o.Title = "As things are now"
	}
	pod, none := o.successor()
	switch {
	case pod == nil:
		o.say("%s", none)
		if o.template == nil && o.unread.workload != nil {
			o.Outcome = "unknown"
			return o.Forecast
		}
		o.foretellKept()
		return o.Forecast
	case f.asksPools == "" && f.unread.namespace != nil &&
		!slices.ContainsFunc(f.kept, func(k *keptIP) bool { return k.retainedIP() != nil }):
		o.Outcome = "unknown"
		o.say("Unknown: whether its namespace names pools cannot be read.")
		return o.Forecast
	case f.nodes == nil:
		o.Outcome = "unknown"
		o.say("Unknown: the nodes of the cluster cannot be listed.")
		return o.Forecast
	}
	if f.pod != nil && home.Annotated(f.pod.Annotations) != home.Annotated(pod.Annotations) {
		o.say("The pod template has changed since: this describes a pod created from the current template.")
	}
	o.foretell(pod)
	if why := f.leaderless(); why != "" && home.Annotated(pod.Annotations) {
		o.say("Before that it waits: %s.", why)
	}
	return o.Forecast
}

// foretell says what the controller would decide for the successor.
func (o *outlook) foretell(pod *corev1.Pod) {
	if o.asksPools != "" {
		o.foretellPools(pod)
		return
	}
	kept := o.keptFor(pod.Annotations[stayputv1alpha1.AnnotationIdentity])
	var ofNodes []*stayputv1alpha1.RetainedIP
	for _, k := range kept {
		if r := k.retainedIP(); r != nil {
			ofNodes = append(ofNodes, r)
		}
	}
	d, node := home.Foresee(o.now, pod, ofNodes, o.state, o.nodes)
	o.Outcome = string(d.Outcome)
	var there *keptIP
	for _, k := range kept {
		if k.retainedIP() != nil && k.node == node && (there == nil || k.pod == o.name) {
			there = k
		}
	}
	who := "the new pod"
	if o.pod != nil && o.pod.Spec.NodeName == "" {
		who = "the pod"
	}
	switch d.Outcome {
	case home.OutcomeHome:
		o.Node = node
		name := strings.TrimPrefix(strings.Replace(d.Home, "nodes with ", "one with ", 1), "node ")
		if !d.Affinity.Requires() {
			o.say("Node: preferably %s, but the scheduler may choose another one.", name)
			o.foretellIP(there)
			break
		}
		o.say("Node: %s, and no other node as long as it can take the pod.", name)
		o.foretellIP(there)
		o.say("If its home is down, cordoned, tainted or full by then, or its kubelet rejects it, %s waits %s for it (%s), "+
			"then goes elsewhere with another IP.", who, patience(pod), stayputv1alpha1.AnnotationHomeWait)
	case home.OutcomeWait:
		o.Node = node
		wait := "until it can take the pod"
		if d.Retry > 0 {
			wait = "at most " + duration.HumanDuration(d.Retry)
		}
		o.say("Node: its home, %s, %s: %s waits for it, gated, %s, then goes elsewhere.", d.Home, d.Reason, who, wait)
		if there != nil {
			o.say("IP: %s if its home is back by then, otherwise another one. The old one still expires as scheduled.",
				there.addresses())
		}
	case home.OutcomeElsewhere:
		o.say("Node: another one. Its home, %s, %s.", d.Home, d.Reason)
		o.say("IP: another one.")
	default:
		o.foretellAnywhere(pod)
	}
	o.Lines = append(o.Lines, d.Notes...)
}

// foretellAnywhere is for a successor without a home.
func (o *outlook) foretellAnywhere(pod *corev1.Pod) {
	if o.unread.record != nil {
		o.Outcome = "unknown"
		o.say("Unknown: PersistentPodStates, which may record its node, cannot be read.")
		return
	}
	o.say("Node: any. No node keeps an address for it, and no node is recorded.")
	o.say("IP: any free address.")
	if home.Annotated(pod.Annotations) && o.pod != nil && o.pod.Spec.NodeName != "" {
		o.say("The new pod requests a promise, which takes effect when it starts.")
	}
}

// keptFor returns what is kept for a shared identity, or without one for pods of the name.
func (o *outlook) keptFor(identity string) (kept []*keptIP) {
	for _, k := range o.kept {
		if k.identity == identity && (identity != "" || k.pod == o.name) {
			kept = append(kept, k)
		}
	}
	return kept
}

// foretellIP says which address the successor gets at its home, where k is kept.
func (o *outlook) foretellIP(k *keptIP) {
	if k == nil {
		o.say("IP: any free address there. None is kept for it.")
		return
	}
	if lost := k.outside(o.looks[k.node]); lost != "" {
		o.say("IP: another one. %s", lost)
		return
	}
	o.IPs = k.ips
	end := ""
	switch until := k.expiry(); {
	case k.bound() && k.retention == stayputv1alpha1.RetentionWhileOwned:
		end = "kept as long as its workload wants the pod"
	case k.bound():
		end = "kept for " + k.retention + " after the pod stops"
	case until == expiresNever:
		end = "kept indefinitely"
	case until == "": // not published yet
		end = "kept"
	default:
		end = "kept until " + until
	}
	ips := k.addresses()
	if k.identity != "" && k.pod != o.name {
		ips += " or another one of identity " + k.identity
	}
	o.say("IP: %s, %s.", ips, end)
}

// outside says that an address is lost because it has left the ranges of its network on its node.
func (k *keptIP) outside(n *inspection.Node) string {
	if n == nil {
		return ""
	}
	for _, of := range k.retainedIP().Status.Addresses {
		for _, net := range n.Networks {
			if net.Name != of.Network || net.Error != "" || len(net.RangeSets) == 0 {
				continue
			}
			for _, ip := range of.IPs {
				a, err := netip.ParseAddr(ip)
				within := func(s inspection.RangeSet) bool { return s.Contains(a) }
				if err == nil && !slices.ContainsFunc(net.RangeSets, within) {
					return fmt.Sprintf("%s is outside the current ranges of network %s on node %s.", ip, net.Name, k.node)
				}
			}
		}
	}
	return ""
}

// foretellKept says what becomes of the addresses if no pod is created.
func (o *outlook) foretellKept() {
	for _, k := range o.kept {
		if k.pod != o.name {
			continue
		}
		on := k.about()
		switch at, left := k.until(o.now); {
		case k.conflict != "", k.releasing:
			o.say("%s is %s.", on, k.reason(o.workloads))
		case k.retention == "" && !k.retained():
			o.say("%s is freed once the pod is gone.", on)
		case k.bound() && k.retention == stayputv1alpha1.RetentionWhileOwned:
			o.say("%s is kept as long as its workload wants the pod.", on)
		case k.bound():
			o.say("%s is kept for %s: a pod of this name created within that time gets it.", on, k.retention)
		case left == none:
			o.say("%s stays kept: %s.", on, k.reason(o.workloads))
		default:
			o.say("%s stays kept until %s (%s).", on, at, left)
		}
	}
}

// patience returns in words how long a pod waits for its home.
func patience(pod *corev1.Pod) string {
	wait, whileKept, _ := home.Wait(pod.Annotations) // of an invalid value it is the default
	if whileKept {
		return "as long as its address is kept"
	}
	return duration.HumanDuration(wait)
}
