package podip

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/pkg/retention"
)

// This file says in the words of package pool what the API says, and the other way round.

func poolOf(o *stayputv1alpha1.PodIPPool) pool.Pool {
	p := pool.Pool{Name: o.Name, Version: o.ResourceVersion, Revision: fmt.Sprint(o.UID, "/", o.Generation),
		Disabled: o.Spec.Allocation == stayputv1alpha1.AllocationDisabled,
		Deleting: o.DeletionTimestamp != nil, Held: slices.Contains(o.Finalizers, stayputv1alpha1.FinalizerInUse)}
	p.Range, p.Invalid = pool.Parse(o.Spec)
	if selector := o.Spec.NamespaceSelector; selector != nil {
		selects, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil && p.Invalid == nil {
			p.Invalid = fmt.Errorf("spec.namespaceSelector: %w", err)
		}
		p.Serves = func(of map[string]string) bool { return err == nil && selects.Matches(labels.Set(of)) }
	}
	if _, err := nodesOf(o); err != nil && p.Invalid == nil {
		p.Invalid = err
	}
	if selects, err := metav1.LabelSelectorAsSelector(o.Spec.NodeSelector); err == nil && o.Spec.NodeSelector != nil {
		p.ForNode = func(of map[string]string) bool { return selects.Matches(labels.Set(of)) }
	}
	return p
}

// nodesOf returns what a pool requires of the labels of nodes.
func nodesOf(o *stayputv1alpha1.PodIPPool) (all []corev1.NodeSelectorRequirement, err error) {
	selector := o.Spec.NodeSelector
	if selector == nil {
		return nil, nil
	}
	if _, err := metav1.LabelSelectorAsSelector(selector); err != nil {
		return nil, fmt.Errorf("spec.nodeSelector: %w", err)
	}
	for _, key := range slices.Sorted(maps.Keys(selector.MatchLabels)) {
		all = append(all, corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn,
			Values: []string{selector.MatchLabels[key]}})
	}
	for _, e := range selector.MatchExpressions {
		all = append(all, corev1.NodeSelectorRequirement{Key: e.Key, Operator: corev1.NodeSelectorOperator(e.Operator),
			Values: e.Values})
	}
	return all, nil
}

// stripIP keeps of a PodIP what [pool.PodIPOf] reads, and once what many of them say.
func stripIP(o *stayputv1alpha1.PodIP, once *cluster.Interner) {
	o.ManagedFields, o.Annotations, o.Labels, o.TypeMeta = nil, nil, nil, metav1.TypeMeta{}
	for _, s := range []*string{&o.Spec.Pool, (*string)(&o.Spec.Mode), &o.Spec.Namespace, &o.Spec.Identity,
		&o.Spec.Network, &o.Spec.Interface, &o.Spec.Retention, &o.Spec.WhenScaled, &o.Spec.WhenDeleted,
		(*string)(&o.Status.Phase), &o.Status.NodeName} {
		*s = once.One(*s)
	}
	if w := o.Spec.Workload; w != nil {
		for _, s := range []*string{&w.APIVersion, &w.Kind, &w.Name, &w.UID} {
			*s = once.One(*s)
		}
	}
	if o.Status.PodUID == o.Spec.PodUID {
		o.Status.PodUID = o.Spec.PodUID
	}
}

// nodeOf reads a node. agents is the pod template of the agents' DaemonSet, nil if it is not known.
func nodeOf(o *corev1.Node, agents *corev1.Pod) pool.Node {
	is := pool.Node{
		Name: o.Name, Ready: home.NodeReady(o),
		Off: slices.ContainsFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == pool.OutOfService }),
		// Agents run on Linux only.
		Foreign: o.Labels[corev1.LabelOSStable] == string(corev1.Windows) ||
			o.Labels[pool.AgentLabel] == pool.NoAgent || !selects(agents, o),
	}
	for _, condition := range o.Status.Conditions {
		if condition.Type == corev1.NodeReady && is.Ready {
			is.ReadySince = condition.LastTransitionTime.Time
		}
	}
	return is
}

// selects reports whether a DaemonSet has its pods run on a node, as far as node selector and affinity tell: by taints
// that it does not tolerate they may still run there.
func selects(agents *corev1.Pod, node *corev1.Node) bool {
	if agents == nil {
		return true
	}
	match, err := nodeaffinity.GetRequiredNodeAffinity(agents).Match(node)
	return match || err != nil
}

// podOf reads a pod, with what its namespace asks for. The error says what of its annotations is not valid; such a pod
// is given nothing. spiderpool: those of Spiderpool count. Its addresses are kept for longest at most.
func podOf(pod *corev1.Pod, in namespace, spiderpool, numbered bool, longest time.Duration) (pool.Pod, error) {
	p := pool.Pod{
		UID: pod.UID, Version: pod.ResourceVersion, Namespace: pod.Namespace, Name: pod.Name,
		Identity: pod.Annotations[stayputv1alpha1.AnnotationIdentity], Created: pod.CreationTimestamp.Time,
		Node: pod.Spec.NodeName, Gated: home.Gated(pod), Ending: pod.DeletionTimestamp != nil,
		Terminal:   pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed,
		Noted:      cluster.NotedByCalico(pod.Annotations),
		Namespaced: in.labels,
	}
	if p.Node != "" {
		p.ReportedIP, _ = netip.ParseAddr(pod.Status.PodIP)
		p.Sandboxless = slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionFalse
		})
	}
	if owner := metav1.GetControllerOf(pod); owner != nil {
		p.Workload = pool.Workload{APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name, UID: string(owner.UID)}
	}
	if text, ok := pod.Annotations[stayputv1alpha1.AnnotationAddresses]; ok {
		err := json.Unmarshal([]byte(text), &p.Assigned)
		if err == nil && slices.ContainsFunc(p.Assigned, func(h pool.Address) bool { return !h.Prefix.IsValid() }) {
			err = errors.New("expected an address in each")
		}
		if err != nil {
			p.Assigned = nil
			return p, invalid(stayputv1alpha1.AnnotationAddresses, "%w", err)
		}
		if p.Assigned == nil {
			p.Assigned = []pool.Address{}
		}
	}
	if !p.Gated { // a running pod has started without addresses of its namespace's pools
		in.asks = nil
	}
	var err error
	if p.Wants, err = pool.Asks(pod.Annotations, in.asks, spiderpool); err != nil {
		return p, err
	}
	comesBack := p.Workload != (pool.Workload{}) && (numbered || p.Identity != "")
	policy, err := retention.ParsePooled(pod.Annotations, comesBack)
	p.Keep, p.AllocateNew = pool.KeepOf(policy, longest), policy.AllocateNew
	return p, err
}

func invalid(annotation, format string, args ...any) error {
	return fmt.Errorf("annotation %s: "+format, append([]any{annotation}, args...)...)
}

// static reports whether kubelet itself made a pod, which the API server only shows.
func static(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "Node"
}

// asks reports whether a pod asks for addresses of pools, or has some.
func asks(pod *cluster.Pod, in namespace, spiderpool bool) bool {
	annotations := pod.GetAnnotations()
	if _, has := annotations[stayputv1alpha1.AnnotationAddresses]; has {
		return true
	}
	asks, decides := pool.AsksItself(annotations, spiderpool)
	return asks || !decides && pod.Gated() && pool.AsksByDefault(in.asks, spiderpool)
}
