package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// facts are all that a story is told from, as they were read. What could not be read is in unknown.
type facts struct {
	now             time.Time
	namespace, name string
	pod             *corev1.Pod // nil if there is none
	workload        *unstructured.Unstructured
	template        *corev1.PodTemplateSpec // of the workload
	kept            []*keptIP               // for the pod, or its identity
	asksPools       string                  // the pools that its own or its namespace's annotation asks for
	workloads       workloads
	state           *kruisev1alpha1.PersistentPodState
	nodes           []corev1.Node
	events          []corev1.Event
	looks           map[string]*inspection.Node
	lookErrors      map[string]error
	lease           *coordinationv1.Lease // of the controllers, nil if not read, or none led yet
	unknown         []string
}

// lookPatience is how long the agents have to answer. A story without their ledgers is still one.
const lookPatience = 15 * time.Second

// gather reads all that is known of a pod, given its name or that of a RetainedIP.
func gather(ctx context.Context, k *cluster, name string) (*facts, error) {
	f := &facts{
		now: time.Now(), namespace: k.namespace, name: name,
		looks: map[string]*inspection.Node{}, lookErrors: map[string]error{},
	}
	if err := f.findPod(ctx, k); err != nil {
		return nil, err
	}
	f.workloads = workloadsOf(ctx, k, f.kept)
	f.doubt("its workload", f.findWorkload(ctx, k))
	f.doubt("the pools of its namespace", f.findPools(ctx, k))
	f.doubt("PersistentPodStates", f.findRecord(ctx, k))
	if f.pod == nil && len(f.kept) == 0 && f.state == nil {
		return nil, fmt.Errorf("pod %s in namespace %s does not exist, and no address is kept for it", f.name, f.namespace)
	}
	var nodes corev1.NodeList
	f.doubt("the nodes", k.List(ctx, &nodes))
	f.nodes = nodes.Items
	var lease coordinationv1.Lease
	err := k.Get(ctx, types.NamespacedName{Namespace: k.installation, Name: home.LeaseName}, &lease)
	if err == nil {
		f.lease = &lease
	}
	f.doubt("whether a controller is the leader", err)
	f.doubt("Events", f.findEvents(ctx, k))
	f.askNodes(ctx, k.agents)
	return f, nil
}

// doubt notes what could not be read, if there is an error.
func (f *facts) doubt(what string, err error) {
	if err != nil {
		f.unknown = append(f.unknown, what+": "+err.Error())
	}
}

// findPod reads the pod, and what is kept under its name or identity. If there is none, the name may be that of a
// RetainedIP or a PodIP, which has the pod's.
func (f *facts) findPod(ctx context.Context, c client.Client) error {
	var pod corev1.Pod
	identity := ""
	switch err := c.Get(ctx, types.NamespacedName{Namespace: f.namespace, Name: f.name}, &pod); {
	case err == nil:
		f.pod, identity = &pod, pod.Annotations[stayputv1alpha1.AnnotationIdentity]
	case !apierrors.IsNotFound(err):
		return err
	}
	all, unseen, err := keptIPs(ctx, c, f.namespace)
	if err != nil {
		return err
	}
	for _, k := range all {
		if f.pod == nil && k.GetName() == f.name && k.pod != f.name {
			f.name = k.pod
			return f.findPod(ctx, c)
		}
	}
	for _, k := range all {
		if k.pod == f.name || identity != "" && k.identity == identity {
			f.kept = append(f.kept, k)
		}
	}
	f.doubt("addresses of pools", unseen)
	return nil
}

// askNodes asks the agents of the pod's nodes for their ledgers.
func (f *facts) askNodes(ctx context.Context, agents Agents) {
	ctx, cancel := context.WithTimeout(ctx, lookPatience)
	defer cancel()
	for _, node := range f.itsNodes() {
		n, err := inspect(ctx, agents, node)
		if err != nil {
			f.lookErrors[node] = err
			f.doubt("the ledger of node "+node, err)
			continue
		}
		f.looks[node] = n
	}
}

// itsNodes returns the node of the pod and those that keep addresses for it.
func (f *facts) itsNodes() (all []string) {
	if f.pod != nil && f.pod.Spec.NodeName != "" {
		all = append(all, f.pod.Spec.NodeName)
	}
	for _, k := range f.kept {
		if k.retainedIP() != nil && k.pod == f.name && !slices.Contains(all, k.node) {
			all = append(all, k.node)
		}
	}
	return all
}

// owner returns the controller of the pod.
func (f *facts) owner() (home.Ref, bool) {
	if f.pod == nil {
		return home.Ref{}, false
	}
	owner, _, ok := home.OwnerOf(f.pod)
	return owner, ok
}

// findWorkload reads the workload of the pod: of a pod that is gone the workload that it had, or the StatefulSet whose
// pod its name says it is.
func (f *facts) findWorkload(ctx context.Context, c client.Client) error {
	for _, k := range f.kept {
		if w := k.workload; w != nil && k.pod == f.name && f.workloads[w.UID] != nil {
			f.workload = f.workloads[w.UID]
		}
	}
	if f.workload == nil {
		stem, _, numbered := home.SplitOrdinal(f.name)
		owner := &metav1.OwnerReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: stem}
		if f.pod != nil {
			owner = metav1.GetControllerOf(f.pod)
		}
		if owner == nil || f.pod == nil && !numbered {
			return nil
		}
		o := object(owner.APIVersion, owner.Kind)
		if err := c.Get(ctx, types.NamespacedName{Namespace: f.namespace, Name: owner.Name}, o); err != nil {
			return client.IgnoreNotFound(err)
		}
		f.workload = o
	}
	raw, found, err := unstructured.NestedMap(f.workload.Object, "spec", "template")
	if err != nil || !found {
		return err
	}
	var t corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &t); err != nil {
		return fmt.Errorf("its pod template: %w", err)
	}
	f.template = &t
	return nil
}

// findRecord reads the PersistentPodState that the controller obeys for the workload or, if that is not known, a
// PersistentPodState that records the pod.
func (f *facts) findRecord(ctx context.Context, k client.Client) error {
	var list kruisev1alpha1.PersistentPodStateList
	if err := k.List(ctx, &list, client.InNamespace(f.namespace)); err != nil {
		if meta.IsNoMatchError(err) {
			return nil // the CRD is not installed: there are none
		}
		return err
	}
	f.state = f.recordAmong(list.Items)
	return nil
}

// recordAmong returns the PersistentPodState that the controller obeys for the pod, or nil.
func (f *facts) recordAmong(all []kruisev1alpha1.PersistentPodState) *kruisev1alpha1.PersistentPodState {
	for _, s := range home.ByAge(all) {
		switch {
		case f.workload == nil && home.RecordIn(s, f.name) != nil:
			return s
		case f.workload != nil && home.TargetOf(s) == refOf(f.workload):
			return s
		}
	}
	return nil
}

// refOf returns the workload's Ref.
func refOf(w *unstructured.Unstructured) home.Ref {
	return home.RefOf(w.GetAPIVersion(), w.GetKind(), w.GetNamespace(), w.GetName())
}

// findEvents reads the Events of the pod, of what is kept for it, and of its workload if they name the pod.
func (f *facts) findEvents(ctx context.Context, c client.Client) error {
	about := map[types.NamespacedName]bool{{Namespace: f.namespace, Name: f.name}: true}
	for _, k := range f.kept {
		switch {
		case k.podIP() != nil: // of no namespace: its Events are in the default one
			about[types.NamespacedName{Namespace: metav1.NamespaceDefault, Name: k.GetName()}] = true
		case k.pod == f.name:
			about[types.NamespacedName{Namespace: f.namespace, Name: k.GetName()}] = true
		}
	}
	if f.workload != nil {
		about[types.NamespacedName{Namespace: f.namespace, Name: f.workload.GetName()}] = true
	}
	for of := range about {
		var list corev1.EventList
		err := c.List(ctx, &list, client.InNamespace(of.Namespace), client.MatchingFields{"involvedObject.name": of.Name})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			kind, workloads := e.InvolvedObject.Kind, f.workload != nil && e.InvolvedObject.Kind == f.workload.GetKind()
			if (kind != "Pod" || e.InvolvedObject.Name != f.name) && kind != "RetainedIP" && kind != "PodIP" &&
				(!workloads || !mentions(e.Message, f.name)) {
				continue
			}
			f.events = append(f.events, e)
		}
	}
	slices.SortStableFunc(f.events, func(a, b corev1.Event) int { return happened(&a).Compare(happened(&b)) })
	return nil
}

// mentions reports whether a text has a name as a word: web-1 is not in web-10.
func mentions(text, name string) bool {
	return slices.Contains(strings.FieldsFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '.'
	}), name)
}

// began returns when an Event happened first.
func began(e *corev1.Event) time.Time {
	switch {
	case !e.FirstTimestamp.IsZero():
		return e.FirstTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// happened returns when an Event happened last.
func happened(e *corev1.Event) time.Time {
	switch {
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case e.Series != nil && !e.Series.LastObservedTime.IsZero():
		return e.Series.LastObservedTime.Time
	}
	return began(e)
}

// annotations returns those of the pod or, if it is gone, of its successor.
func (f *facts) annotations() map[string]string {
	switch {
	case f.pod != nil:
		return f.pod.Annotations
	case f.template != nil:
		return f.template.Annotations
	}
	return nil
}
