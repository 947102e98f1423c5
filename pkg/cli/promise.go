package cli

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/retention"
)

// Annotations of Spiderpool that count as stayput.io/pools does, if the value pools.spiderpool is set.
const (
	annotationIPPool    = "ipam.spidernet.io/ippool"
	annotationIPPools   = "ipam.spidernet.io/ippools"
	annotationDefaultV4 = "ipam.spidernet.io/default-ipv4-ippool"
	annotationDefaultV6 = "ipam.spidernet.io/default-ipv6-ippool"
)

type annotationOfPods struct {
	key     string
	meaning func(value string, all map[string]string) string
}

// annotationsOfPods are those about address and node, in the order of docs/annotations.md, and what each asks for
// beside the others of the pod.
var annotationsOfPods = []annotationOfPods{
	{stayputv1alpha1.AnnotationRetainIP, func(value string, _ map[string]string) string {
		switch value {
		case stayputv1alpha1.RetentionWhileOwned:
			return "its address is kept as long as its workload exists and wants the pod"
		case retention.None:
			return "its address is not kept, whatever the default of its namespace is"
		}
		return "its address is kept for " + value + " after the pod stops"
	}},
	{stayputv1alpha1.AnnotationReservedIPDuration, func(value string, all map[string]string) string {
		if _, own := all[stayputv1alpha1.AnnotationRetainIP]; own {
			return "ignored, because of " + stayputv1alpha1.AnnotationRetainIP
		}
		return "its address is kept for " + value + " minutes after the pod stops"
	}},
	{stayputv1alpha1.AnnotationWhenInUse, choice("AllocateNew",
		"a new pod gets another address while its predecessor still has this one",
		"a new pod waits until its predecessor has released the address")},
	{stayputv1alpha1.AnnotationIdentity, always("it shares its addresses with the other pods of this identity in the " +
		"namespace")},
	{stayputv1alpha1.AnnotationWhenScaled, whenGone("its workload is scaled down below the pod")},
	{stayputv1alpha1.AnnotationWhenDeleted, whenGone("its workload is deleted")},
	{stayputv1alpha1.AnnotationWhenMoved, whenGone("the pod has been Ready on another node for a while")},
	{stayputv1alpha1.AnnotationHomeWait, func(value string, _ map[string]string) string {
		if value == stayputv1alpha1.HomeWaitRetention {
			return "a new pod waits for a home that cannot take it, as long as its address is kept there"
		}
		return "a new pod waits " + value + " for a home that cannot take it"
	}},
	{stayputv1alpha1.AnnotationHome, choice(stayputv1alpha1.HomePreferred,
		"a new pod prefers the node that keeps its address, but may start elsewhere",
		"a new pod starts only on the node that keeps its address, as long as that node can take it")},
	{stayputv1alpha1.AnnotationPinned, always("set by Stayput: the home to which it pinned the pod")},
	{stayputv1alpha1.AnnotationPools, choice("", "it requests no pool addresses, even if its namespace does",
		"its addresses come from these pools, on any node")},
	{annotationIPPools, inSpiderpools(stayputv1alpha1.AnnotationPools)},
	{annotationIPPool, inSpiderpools(stayputv1alpha1.AnnotationPools, annotationIPPools)},
	{stayputv1alpha1.AnnotationAddresses, always("set by Stayput: its pool addresses, for its node")},
}

func always(meaning string) func(string, map[string]string) string {
	return choice("", meaning, meaning)
}

// choice tells one value from all others.
func choice(of, meaning, otherwise string) func(string, map[string]string) string {
	return func(value string, _ map[string]string) string {
		if value == of {
			return meaning
		}
		return otherwise
	}
}

func whenGone(when string) func(string, map[string]string) string {
	return choice(stayputv1alpha1.PolicyRetain, "its address stays kept when "+when, "its address is released when "+when)
}

// inSpiderpools is what an annotation of Spiderpool asks for without others, which come before it.
func inSpiderpools(others ...string) func(string, map[string]string) string {
	return func(_ string, all map[string]string) string {
		for _, key := range others {
			if _, there := all[key]; there {
				return "ignored, because of " + key
			}
		}
		return "its addresses come from these pools if Spiderpool's annotations are honored (pools.spiderpool)"
	}
}

// askedBy explains annotations, and names those that look like Stayput's and are none.
func askedBy(annotations map[string]string) []Asked {
	all := []Asked{}
	var bad *retention.AnnotationError
	_, _, err := retention.Parse(annotations)
	errors.As(err, &bad)
	for _, a := range annotationsOfPods {
		value, ok := annotations[a.key]
		switch {
		case !ok:
		case bad != nil && bad.Key == a.key:
			all = append(all, Asked{a.key, value, "not valid: expected " + bad.Expected})
		default:
			all = append(all, Asked{a.key, value, a.meaning(value, annotations)})
		}
	}
	for _, key := range unknownKeys(annotations) {
		all = append(all, Asked{key, annotations[key], "unknown and without effect: expected " + meantBy(key)})
	}
	return all
}

// unknownKeys returns the annotations that look like Stayput's and are none. The policy stayput-advice warns of the
// same.
func unknownKeys(annotations map[string]string) (all []string) {
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		known := slices.ContainsFunc(annotationsOfPods, func(a annotationOfPods) bool { return a.key == key })
		if !known && (strings.HasPrefix(key, "stayput.io/") || strings.HasSuffix(key, "retain-ip")) {
			all = append(all, key)
		}
	}
	return all
}

// meantBy returns the annotation that an unknown one stands for, or all that there are.
func meantBy(unknown string) string {
	bare := strings.NewReplacer("-", "", "_", "")
	name := bare.Replace(strings.ToLower(unknown[strings.LastIndexByte(unknown, '/')+1:]))
	for _, key := range stayputv1alpha1.PodAnnotations {
		if strings.HasSuffix(bare.Replace(key), name) {
			return key
		}
	}
	return strings.Join(stayputv1alpha1.PodAnnotations, ", ")
}

// lookalikes returns what may have been meant to ask for the pod's address, as the rest of a sentence about that: keys
// that are unknown, and known ones on the workload itself.
func (f *facts) lookalikes() (says string) {
	for _, key := range unknownKeys(f.annotations()) {
		says += fmt.Sprintf(", but %s, which is unknown and has no effect", key)
	}
	if f.workload == nil {
		return says
	}
	for _, key := range stayputv1alpha1.PodAnnotations {
		if _, there := f.workload.GetAnnotations()[key]; there {
			says += fmt.Sprintf(", but its %s has %s in metadata.annotations, where it has no effect", f.workload.GetKind(), key)
		}
	}
	return says
}

// promise returns what is promised to the pod, or why nothing is.
func (f *facts) promise() (all []string) {
	for _, k := range f.kept {
		if k.pod == f.name {
			all = append(all, f.promiseOf(k))
		}
	}
	switch {
	case len(all) > 0:
	case f.mayHavePools() && f.unread.podIPs != nil:
		all = append(all, fmt.Sprintf("Unknown: the addresses of pools cannot be read: %v", f.unread.podIPs))
	case f.asksPools != "":
		all = append(all, f.whyNoneOfPools())
	case f.unread.namespace != nil:
		all = append(all, fmt.Sprintf("Unknown: whether its namespace names pools cannot be read: %v", f.unread.namespace))
	default:
		all = append(all, f.whyNothing())
	}
	return all
}

// promiseOf returns what is promised of addresses that are kept.
func (f *facts) promiseOf(k *keptIP) string {
	about, own, kept, anywhere := k.about(), " is promised to it", k.addresses()+" is kept on "+k.keeper(), ""
	if k.podIP() != nil {
		own, kept, anywhere = " is assigned to it on any node", about+" is kept", ", on any node"
	}
	at, left := k.until(f.now)
	switch {
	case k.conflict != "":
		return about + " is " + k.conflict + ": the pod waits until that machine has given it up."
	case k.releasing && k.retainedIP() != nil:
		return about + " is being released: spec.release of its RetainedIP is set."
	case k.releasing:
		return about + " is being released."
	case left != none:
		return fmt.Sprintf("%s until %s (%s)%s.", kept, at, left, anywhere)
	case k.retained():
		return fmt.Sprintf("%s%s: %s.", kept, anywhere, k.reason(f.workloads))
	case k.retainedIP() != nil && f.pod != nil && f.pod.Spec.NodeName != "" && k.node != f.pod.Spec.NodeName:
		return fmt.Sprintf("Node %s still reports that a pod of this name uses %s: the node or its agent may be down.",
			k.node, k.addresses())
	case k.retention == "":
		return about + " is assigned to it until it is gone."
	}
	return about + own + ": kept " + k.reason(f.workloads) + "."
}

// refusals are the reasons of the Events that say why a pod got no promise.
var refusals = []string{
	retention.ReasonRefused, retention.ReasonNamespaceRefused, home.ReasonInvalidAnnotation, home.ReasonNotOwned,
}

// whyNothing returns why nothing is promised to the pod.
func (f *facts) whyNothing() string {
	annotations := f.annotations()
	_, _, bad := retention.Parse(annotations)
	switch {
	case bad != nil:
		return "Nothing: " + bad.Error()
	case annotations[stayputv1alpha1.AnnotationRetainIP] == retention.None:
		return "Nothing: it has the annotation " + stayputv1alpha1.AnnotationRetainIP + ": " + retention.None + "."
	case !home.Annotated(annotations):
		return fmt.Sprintf("Nothing: it has no annotation %[1]s%[2]s. Add it to the pod template, for example %[1]s: 10m",
			stayputv1alpha1.AnnotationRetainIP, f.lookalikes())
	case f.pod == nil:
		return "Nothing is kept: its address has expired or was released, or it never got one from Stayput."
	case f.pod.Spec.HostNetwork:
		return "Nothing: the pod uses the host network and has no address of its own."
	case f.pod.Status.PodIP == "":
		return "Nothing yet: the pod has no address."
	}
	for _, e := range slices.Backward(f.events) {
		if e.InvolvedObject.UID == f.pod.UID && slices.Contains(refusals, e.Reason) {
			return "Nothing: " + e.Message
		}
	}
	if f.unread.events != nil {
		return fmt.Sprintf("Nothing is published. Events, which may say why, cannot be read: %v", f.unread.events)
	}
	node := f.pod.Spec.NodeName
	n := f.looks[node]
	if n == nil {
		return fmt.Sprintf("Nothing is published. The ledger of its node, which would show why, cannot be read: %v",
			f.lookErrors[node])
	}
	net, a := addressOf(n, f.pod.Status.PodIP)
	switch {
	case net == nil:
		return fmt.Sprintf("Nothing: its address is not from Stayput. The CNI configuration of node %s: %s "+
			"(kubectl stayput check %[1]s)", node, n.CNI.Message)
	case a.Promise != nil:
		return fmt.Sprintf("The ledger of node %s has the promise, but there is no RetainedIP. "+
			"The agent's connection to the API server: %s", node, cmp.Or(n.Agent.API, "none"))
	}
	for _, set := range net.RangeSets {
		if set.Promised >= set.PromiseLimit && set.Contains(a.IP) {
			return fmt.Sprintf("Nothing: %d of at most %d addresses of network %s on node %s are promised "+
				"(%s). The pod has an ordinary address.",
				set.Promised, set.PromiseLimit, net.Name, node, promiseSetting(net, set))
		}
	}
	return fmt.Sprintf("Nothing: node %s assigned it an address without the annotation, "+
		"which may have been added later. Its successor gets a promise.", node)
}

// describe returns what why prints of an address that is kept.
func (f *facts) describe(k *keptIP) Kept {
	told := Kept{Kind: k.GetObjectKind().GroupVersionKind().Kind, Name: k.GetName(), Node: k.node, IPs: k.ips,
		Interface: k.iface, Phase: k.phase, Why: k.why(f.workloads), Until: k.expiry()}
	if p := k.podIP(); p != nil {
		told.Pool = p.Spec.Pool
		for _, e := range slices.Backward(f.events) {
			if e.Reason == home.ReasonAddressHeld && e.InvolvedObject.Name == p.Name && !k.retained() {
				told.Held = e.Message
				break
			}
		}
		return told
	}
	if !home.Scheduled(k.retainedIP()) && (f.pod == nil || f.pod.Spec.NodeName != k.node) {
		told.NoHome = "the controller has not seen its pod on that node, so the node is not a home"
	}
	if n := f.looks[k.node]; n != nil {
		for _, ip := range k.ips {
			_, a := addressOf(n, ip)
			told.Ledger = append(told.Ledger, ip+" "+stateOf(a))
		}
	}
	return told
}

// addressOf returns the entry of an address and its network, nil if the address is free.
func addressOf(n *inspection.Node, ip string) (*inspection.Network, *inspection.Address) {
	for i := range n.Networks {
		net := &n.Networks[i]
		for j := range net.Addresses {
			if net.Addresses[j].IP.String() == ip {
				return net, &net.Addresses[j]
			}
		}
	}
	return nil, nil
}

// stateOf returns in words what a ledger says of an address, nil if nothing.
func stateOf(a *inspection.Address) string {
	switch {
	case a == nil:
		return "is free"
	case a.State == inspection.Unreadable:
		return "has an unreadable file"
	case a.State == inspection.Newer:
		return "is kept by a version of Stayput newer than the agent"
	case a.State == inspection.Retained && a.Promise == nil:
		return "is retained"
	case a.State == inspection.Retained && a.LeftSeconds == nil:
		return "is retained for " + a.Promise.Identity + " indefinitely"
	case a.State == inspection.Retained:
		left := time.Duration(*a.LeftSeconds) * time.Second
		return fmt.Sprintf("is retained for %s, %s left", a.Promise.Identity, duration.HumanDuration(left))
	case a.Promise != nil:
		return fmt.Sprintf("is bound to sandbox %.12s, promised to %s", a.ContainerID, a.Promise.Identity)
	}
	return fmt.Sprintf("is bound to sandbox %.12s, without a promise", a.ContainerID)
}
