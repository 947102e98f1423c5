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
	unread          unread
}

// unread are the causes of what could not be read and would change what a story says, nil for what was read.
type unread struct {
	podIPs, namespace, workload, record, events error
}

// gathering are facts that are being read.
type gathering struct {
	*facts
	k *cluster
}

// lookPatience is how long the agents have to answer. A story without their ledgers is still one.
const lookPatience = 15 * time.Second

// gather reads all that is known of a pod, given its name or that of a RetainedIP.
func gather(ctx context.Context, k *cluster, name string) (*facts, error) {
	g := gathering{k: k, facts: &facts{
		now: time.Now(), namespace: k.namespace, name: name,
		looks: map[string]*inspection.Node{}, lookErrors: map[string]error{},
	}}
	if err := g.findPod(ctx); err != nil {
		return nil, err
	}
	g.workloads = workloadsOf(ctx, k, g.kept)
	g.miss(&g.unread.workload, "its workload", g.findWorkload(ctx))
	g.miss(&g.unread.namespace, "the pools of its namespace", g.findPools(ctx))
	g.miss(&g.unread.record, "PersistentPodStates", g.findRecord(ctx))
	if g.pod == nil && len(g.kept) == 0 && g.state == nil {
		return nil, g.missing()
	}
	var nodes corev1.NodeList
	g.doubt("the nodes", k.List(ctx, &nodes))
	g.nodes = nodes.Items
	var lease coordinationv1.Lease
	err := k.Get(ctx, types.NamespacedName{Namespace: k.installation, Name: home.LeaseName}, &lease)
	if err == nil {
		g.lease = &lease
	}
	g.doubt("whether a controller is the leader", err)
	g.miss(&g.unread.events, "Events", g.findEvents(ctx))
	g.askNodes(ctx)
	return g.facts, nil
}

// doubt notes what could not be read, if there is an error.
func (g *gathering) doubt(what string, err error) {
	if err != nil {
		g.unknown = append(g.unknown, what+": "+err.Error())
	}
}

// miss is doubt about what would change what a story says: it keeps the cause.
func (g *gathering) miss(cause *error, what string, err error) {
	*cause = err
	g.doubt(what, err)
}

// missing says that there is nothing to tell of the pod, as far as that is known.
func (f *facts) missing() error {
	about := fmt.Sprintf("pod %s in namespace %s does not exist, and no", f.name, f.namespace)
	if err := f.unread.podIPs; err != nil {
		return fmt.Errorf("%s node keeps an address for it; whether a pool does is unknown: %w", about, err)
	}
	return fmt.Errorf("%s address is kept for it", about)
}

// findPod reads the pod, and what is kept under its name or identity. If there is none, the name may be that of a
// RetainedIP or a PodIP, which has the pod's.
func (g *gathering) findPod(ctx context.Context) error {
	var pod corev1.Pod
	identity := ""
	switch err := g.k.Get(ctx, types.NamespacedName{Namespace: g.namespace, Name: g.name}, &pod); {
	case err == nil:
		g.pod, identity = &pod, pod.Annotations[stayputv1alpha1.AnnotationIdentity]
	case !apierrors.IsNotFound(err):
		return err
	}
	all, unseen, err := keptIPs(ctx, g.k, g.namespace)
	if err != nil {
		return err
	}
	for _, k := range all {
		if g.pod == nil && k.GetName() == g.name && k.pod != g.name {
			g.name = k.pod
			return g.findPod(ctx)
		}
	}
	for _, k := range all {
		if k.pod == g.name || identity != "" && k.identity == identity {
			g.kept = append(g.kept, k)
		}
	}
	g.miss(&g.unread.podIPs, "addresses of pools", unseen)
	return nil
}

// askNodes asks the agents for their ledgers: of the node of the pod, and of those that keep addresses for it.
func (g *gathering) askNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookPatience)
	defer cancel()
	var nodes []string
	if g.pod != nil && g.pod.Spec.NodeName != "" {
		nodes = append(nodes, g.pod.Spec.NodeName)
	}
	for _, k := range g.kept {
		if k.retainedIP() != nil && k.pod == g.name && !slices.Contains(nodes, k.node) {
			nodes = append(nodes, k.node)
		}
	}
	for _, node := range nodes {
		n, err := inspect(ctx, g.k.agents, node)
		if err != nil {
			g.lookErrors[node] = err
			g.doubt("the ledger of node "+node, err)
			continue
		}
		g.looks[node] = n
	}
}

// findWorkload reads the workload of the pod: of a pod that is gone the workload that it had, or the StatefulSet whose
// pod its name says it is.
func (g *gathering) findWorkload(ctx context.Context) error {
	for _, k := range g.kept {
		if w := k.workload; w != nil && k.pod == g.name && g.workloads[w.UID] != nil {
			g.workload = g.workloads[w.UID]
		}
	}
	if g.workload == nil {
		stem, _, numbered := home.SplitOrdinal(g.name)
		owner := &metav1.OwnerReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: stem}
		if g.pod != nil {
			owner = metav1.GetControllerOf(g.pod)
		}
		if owner == nil || g.pod == nil && !numbered {
			return nil
		}
		o := object(owner.APIVersion, owner.Kind)
		if err := g.k.Get(ctx, types.NamespacedName{Namespace: g.namespace, Name: owner.Name}, o); err != nil {
			return client.IgnoreNotFound(err)
		}
		g.workload = o
	}
	raw, found, err := unstructured.NestedMap(g.workload.Object, "spec", "template")
	if err != nil || !found {
		return err
	}
	var t corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &t); err != nil {
		return fmt.Errorf("its pod template: %w", err)
	}
	g.template = &t
	return nil
}

// findRecord reads the PersistentPodState that the controller obeys for the workload or, if that is not known, a
// PersistentPodState that records the pod.
func (g *gathering) findRecord(ctx context.Context) error {
	var list kruisev1alpha1.PersistentPodStateList
	if err := g.k.List(ctx, &list, client.InNamespace(g.namespace)); err != nil {
		if meta.IsNoMatchError(err) {
			return nil // the CRD is not installed: there are none
		}
		return err
	}
	g.state = g.recordAmong(list.Items)
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
func (g *gathering) findEvents(ctx context.Context) error {
	about := map[types.NamespacedName]bool{{Namespace: g.namespace, Name: g.name}: true}
	for _, k := range g.kept {
		switch {
		case k.podIP() != nil: // of no namespace: its Events are in the default one
			about[types.NamespacedName{Namespace: metav1.NamespaceDefault, Name: k.GetName()}] = true
		case k.pod == g.name:
			about[types.NamespacedName{Namespace: g.namespace, Name: k.GetName()}] = true
		}
	}
	if g.workload != nil {
		about[types.NamespacedName{Namespace: g.namespace, Name: g.workload.GetName()}] = true
	}
	for of := range about {
		var list corev1.EventList
		err := g.k.List(ctx, &list, client.InNamespace(of.Namespace), client.MatchingFields{"involvedObject.name": of.Name})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			kind, workloads := e.InvolvedObject.Kind, g.workload != nil && e.InvolvedObject.Kind == g.workload.GetKind()
			if (kind != "Pod" || e.InvolvedObject.Name != g.name) && kind != "RetainedIP" && kind != "PodIP" &&
				(!workloads || !mentions(e.Message, g.name)) {
				continue
			}
			g.events = append(g.events, e)
		}
	}
	slices.SortStableFunc(g.events, func(a, b corev1.Event) int { return happened(&a).Compare(happened(&b)) })
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
