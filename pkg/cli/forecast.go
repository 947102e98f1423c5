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

// successor returns the pod that would be created, or why none of the name would be.
func (f *facts) successor() (pod *corev1.Pod, none string) {
	switch {
	case f.pod != nil && f.pod.Spec.NodeName == "":
		return f.pod, ""
	case f.template == nil && f.pod == nil:
		return nil, "No known workload would create it."
	case f.template == nil && metav1.GetControllerOf(f.pod) == nil:
		return nil, "The pod is not re-created: it has no controller."
	case f.template == nil:
		return f.pod, ""
	}
	switch kind := f.workload.GetKind(); kind {
	case "ReplicaSet", "Deployment", "ReplicationController", "Job", "DaemonSet":
		if f.template.Annotations[stayputv1alpha1.AnnotationIdentity] == "" {
			return nil, fmt.Sprintf("%s %s creates a pod with another name, which inherits nothing from this pod. With the "+
				"annotation %s it would share its addresses.", kind, f.workload.GetName(), stayputv1alpha1.AnnotationIdentity)
		}
	default:
		if wanted, known := wants(f.workload, f.name); known && !wanted {
			return nil, fmt.Sprintf("%s %s does not want a pod with this ordinal: "+
				"it is not re-created until the workload is scaled up.", kind, f.workload.GetName())
		}
	}
	pod = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: f.namespace, Name: f.name, Labels: f.template.Labels, Annotations: f.template.Annotations,
		},
		Spec: f.template.Spec,
	}
	if f.pod != nil {
		pod.Spec.NodeName = f.pod.Spec.NodeName // on which it was last
	}
	return pod, ""
}

// forecast asks the controller's rules.
func (f *facts) forecast() Forecast {
	fc := Forecast{Title: "If it is deleted now", Outcome: "none"}
	switch {
	case f.pod == nil:
		fc.Title = "If it is created now"
	case f.pod.Spec.NodeName == "":
		fc.Title = "As things are now"
	}
	pod, none := f.successor()
	if pod == nil {
		fc.say("%s", none)
		f.foretellKept(&fc)
		return fc
	}
	if f.nodes == nil {
		fc.Outcome = "unknown"
		fc.say("Unknown: the nodes of the cluster cannot be listed.")
		return fc
	}
	if f.pod != nil && home.Annotated(f.pod.Annotations) != home.Annotated(pod.Annotations) {
		fc.say("The pod template has changed since: this describes a pod created from the current template.")
	}
	f.foretell(&fc, pod)
	if why := f.leaderless(); why != "" && home.Annotated(pod.Annotations) {
		fc.say("Before that it waits: %s.", why)
	}
	return fc
}

// foretell says what the controller would decide for the successor.
func (f *facts) foretell(fc *Forecast, pod *corev1.Pod) {
	if f.asksPools != "" {
		f.foretellPools(fc, pod)
		return
	}
	kept := f.keptFor(pod.Annotations[stayputv1alpha1.AnnotationIdentity])
	var ofNodes []*stayputv1alpha1.RetainedIP
	for _, k := range kept {
		if r := k.retainedIP(); r != nil {
			ofNodes = append(ofNodes, r)
		}
	}
	d, node := home.Foresee(f.now, pod, ofNodes, f.state, f.nodes)
	fc.Outcome = string(d.Outcome)
	var there *keptIP
	for _, k := range kept {
		if k.retainedIP() != nil && k.node == node && (there == nil || k.pod == f.name) {
			there = k
		}
	}
	who := "the new pod"
	if f.pod != nil && f.pod.Spec.NodeName == "" {
		who = "the pod"
	}
	switch d.Outcome {
	case home.OutcomeHome:
		fc.Node = node
		name := strings.TrimPrefix(strings.Replace(d.Home, "nodes with ", "one with ", 1), "node ")
		if !d.Affinity.Requires() {
			fc.say("Node: preferably %s, but the scheduler may choose another one.", name)
			f.foretellIP(fc, there)
			break
		}
		fc.say("Node: %s, and no other node as long as it can take the pod.", name)
		f.foretellIP(fc, there)
		fc.say("If its home is down, cordoned, tainted or full by then, %s waits %s for it (%s), "+
			"then goes elsewhere with another IP.", who, patience(pod), stayputv1alpha1.AnnotationHomeWait)
	case home.OutcomeWait:
		fc.Node = node
		wait := "until it can take the pod"
		if d.Retry > 0 {
			wait = "at most " + duration.HumanDuration(d.Retry)
		}
		fc.say("Node: its home, %s, %s: %s waits for it, gated, %s, then goes elsewhere.", d.Home, d.Reason, who, wait)
		if there != nil {
			fc.say("IP: %s if its home is back by then, otherwise another one. The old one still expires as scheduled.",
				there.addresses())
		}
	case home.OutcomeElsewhere:
		fc.say("Node: another one. Its home, %s, %s.", d.Home, d.Reason)
		fc.say("IP: another one.")
	default:
		fc.say("Node: any. No node keeps an address for it, and no node is recorded.")
		fc.say("IP: any free address.")
		if home.Annotated(pod.Annotations) && f.pod != nil && f.pod.Spec.NodeName != "" {
			fc.say("The new pod requests a promise, which takes effect when it starts.")
		}
	}
	fc.Lines = append(fc.Lines, d.Notes...)
}

// keptFor returns what is kept for a shared identity, or without one for pods of the name.
func (f *facts) keptFor(identity string) (kept []*keptIP) {
	for _, k := range f.kept {
		if k.identity == identity && (identity != "" || k.pod == f.name) {
			kept = append(kept, k)
		}
	}
	return kept
}

// foretellIP says which address the successor gets at its home, where k is kept.
func (f *facts) foretellIP(fc *Forecast, k *keptIP) {
	if k == nil {
		fc.say("IP: any free address there. None is kept for it.")
		return
	}
	if lost := f.outside(k); lost != "" {
		fc.say("IP: another one. %s", lost)
		return
	}
	fc.IPs = k.ips
	end := "kept until " + k.expires
	switch {
	case k.bound() && k.retention == stayputv1alpha1.RetentionWhileOwned:
		end = "kept as long as its workload wants the pod"
	case k.bound():
		end = "kept for " + k.retention + " after the pod stops"
	case k.expires == stayputv1alpha1.ExpiresNever:
		end = "kept indefinitely"
	}
	ips := k.addresses()
	if k.identity != "" && k.pod != f.name {
		ips += " or another one of identity " + k.identity
	}
	fc.say("IP: %s, %s.", ips, end)
}

// outside says that an address is lost because it has left the ranges of its network.
func (f *facts) outside(k *keptIP) string {
	n := f.looks[k.node]
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
func (f *facts) foretellKept(fc *Forecast) {
	for _, k := range f.kept {
		if k.pod != f.name {
			continue
		}
		on := k.about()
		switch at, left := k.until(f.now); {
		case k.quarantine != nil, k.conflict != "", k.releasing:
			fc.say("%s is %s.", on, k.reason(f.workloads))
		case k.retention == "" && !k.retained():
			fc.say("%s is freed once the pod is gone.", on)
		case k.bound() && k.retention == stayputv1alpha1.RetentionWhileOwned:
			fc.say("%s is kept as long as its workload wants the pod.", on)
		case k.bound():
			fc.say("%s is kept for %s: a pod of this name created within that time gets it.", on, k.retention)
		case left == none:
			fc.say("%s stays kept: %s.", on, k.reason(f.workloads))
		default:
			fc.say("%s stays kept until %s (%s).", on, at, left)
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
