package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

// Story is what -o json prints: one pod's address and node.
type Story struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// State is how the pod is, in words; UID, Node and IPs are empty where there is no pod or it has none.
	State    string   `json:"state"`
	UID      string   `json:"uid,omitempty"`
	Node     string   `json:"node,omitempty"`
	IPs      []string `json:"ips,omitempty"`
	Workload string   `json:"workload,omitempty"` // Kind/name
	// Asked are the annotations about address and node, each with its meaning.
	Asked []Asked `json:"asked"`
	// Promise says in words what is promised, or why nothing is.
	Promise []string `json:"promise"`
	Kept    []Kept   `json:"kept"`
	Record  string   `json:"record,omitempty"`
	// Placement says how the pod came, or comes, to its node.
	Placement []string `json:"placement,omitempty"`
	Events    []Told   `json:"events"`
	IfDeleted Forecast `json:"ifDeleted"`
	// Unknown is what could not be found out.
	Unknown []string `json:"unknown,omitempty"`
}

// Asked is an annotation.
type Asked struct {
	Annotation string `json:"annotation"`
	Value      string `json:"value"`
	Meaning    string `json:"meaning"`
}

// Kept is a RetainedIP and what the ledger of its node says of it.
type Kept struct {
	RetainedIP string   `json:"retainedIP"`
	Node       string   `json:"node"`
	IPs        []string `json:"ips"`
	Phase      string   `json:"phase"`
	Why        string   `json:"why"`
	Until      string   `json:"until,omitempty"` // RFC 3339, or never
	Ledger     []string `json:"ledger,omitempty"`
}

// Told is an Event.
type Told struct {
	Time   time.Time `json:"time"`
	Type   string    `json:"type"`
	Reason string    `json:"reason"`
	About  string    `json:"about"` // Kind/name
	Note   string    `json:"note"`
}

func whyCommand(c *cluster) *cobra.Command {
	var d document
	cmd := &cobra.Command{
		Use:   "why POD",
		Short: "Tell the story of a pod's address and node, and what happens if it is deleted now",
		Long: "Tell the story of a pod's address and node: what its annotations ask for, what is kept for it where, what is recorded,\n" +
			"Events, what the ledger of its node says, and what happens if it is deleted now. A pod that is gone has a story\n" +
			"as long as something is kept for it.",
		Example:           "  kubectl stayput why web-0",
		Args:              exactlyOne("POD", "the name of a pod"),
		ValidArgsFunction: c.complete(anyPods, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			name, err := names(args)
			if err != nil {
				return err
			}
			ns, err := c.namespace(false)
			if err != nil {
				return err
			}
			k, err := c.client()
			if err != nil {
				return err
			}
			reach, err := c.agents()
			if err != nil {
				return err
			}
			line := newProgress(cmd.ErrOrStderr())
			line.say("looking up pod %s and its node ...", name[0])
			f, err := gather(cmd.Context(), k, reach, c.home, ns, name[0])
			line.done()
			if err != nil {
				return err
			}
			s := f.story()
			if d.asked() {
				return d.print(cmd.OutOrStdout(), s)
			}
			return s.write(cmd.OutOrStdout(), f.now)
		},
	}
	d.addFlags(cmd)
	return cmd
}

// facts are all that a story is told from, as they were read. What is not known is in unknown.
type facts struct {
	now             time.Time
	namespace, name string
	pod             *corev1.Pod // nil: there is none
	workload        *unstructured.Unstructured
	template        *corev1.PodTemplateSpec // of the workload
	kept            []stayputv1alpha1.RetainedIP
	workloads       workloads
	state           *kruisev1alpha1.PersistentPodState
	nodes           []corev1.Node
	events          []corev1.Event
	looks           map[string]*inspection.Node
	lookErrors      map[string]error
	lease           *coordinationv1.Lease // of the controllers; nil: not read, or nobody ever led
	unknown         []string
}

// lookPatience is how long a node's agent is waited for. A story without it is still one.
const lookPatience = 15 * time.Second

func gather(ctx context.Context, k client.Client, reach Agents, home, ns, name string) (*facts, error) {
	f := &facts{now: time.Now(), namespace: ns, name: name, looks: map[string]*inspection.Node{}, lookErrors: map[string]error{}}
	doubt := func(what string, err error) {
		if err != nil {
			f.unknown = append(f.unknown, what+": "+err.Error())
		}
	}

	// 1. The pod, and what is kept under its name.
	var pod corev1.Pod
	switch err := k.Get(ctx, types.NamespacedName{Namespace: ns, Name: name}, &pod); {
	case err == nil:
		f.pod = &pod
	case !apierrors.IsNotFound(err):
		return nil, err
	}
	all, err := retainedIPs(ctx, k, ns)
	if err != nil {
		return nil, err
	}
	identity := ""
	if f.pod != nil {
		identity = f.pod.Annotations[stayputv1alpha1.AnnotationIdentity]
	}
	for _, r := range all {
		if r.Name == name { // it was asked by the RetainedIP's name
			f.name = r.Spec.PodName
		}
	}
	if f.name != name && f.pod == nil {
		return gather(ctx, k, reach, home, ns, f.name)
	}
	for _, r := range all {
		if r.Spec.PodName == name || identity != "" && r.Spec.Identity == identity {
			f.kept = append(f.kept, r)
		}
	}

	// 2. Its workload: who would make it again, and how.
	f.workloads = workloadsOf(ctx, k, f.kept)
	doubt("its workload", f.findWorkload(ctx, k))

	// 3. What is recorded.
	doubt("PersistentPodStates", f.findRecord(ctx, k))
	if f.pod == nil && len(f.kept) == 0 && f.state == nil {
		return nil, fmt.Errorf("there is no pod %s in namespace %s, and no address is kept for one", name, ns)
	}

	// 4. Nodes, the controllers' lease, Events.
	var nodes corev1.NodeList
	err = k.List(ctx, &nodes)
	doubt("the nodes", err)
	f.nodes = nodes.Items
	var lease coordinationv1.Lease
	err = k.Get(ctx, types.NamespacedName{Namespace: home, Name: leaseName}, &lease)
	if err == nil {
		f.lease = &lease
	}
	doubt("whether a controller leads", err)
	doubt("Events", f.findEvents(ctx, k))

	// 5. The ledgers.
	asked, cancel := context.WithTimeout(ctx, lookPatience)
	defer cancel()
	for _, node := range f.itsNodes() {
		n, err := inspect(asked, reach, node)
		if err != nil {
			f.lookErrors[node] = err
			doubt("the ledger of node "+node, err)
			continue
		}
		f.looks[node] = n
	}
	return f, nil
}

// leaseName is of the lease that controllers lead by.
const leaseName = "stayput-controller"

// itsNodes are where the pod is and where something is kept for it.
func (f *facts) itsNodes() (all []string) {
	if f.pod != nil && f.pod.Spec.NodeName != "" {
		all = append(all, f.pod.Spec.NodeName)
	}
	for _, r := range f.kept {
		if r.Spec.PodName == f.name && !slices.Contains(all, r.Spec.NodeName) {
			all = append(all, r.Spec.NodeName)
		}
	}
	return all
}

// findWorkload looks for the controller of the pod; of a ReplicaSet for its Deployment, of a pod that is gone for
// the workload that it had, or whose name it bears.
func (f *facts) findWorkload(ctx context.Context, k client.Client) error {
	for _, r := range f.kept {
		if w := r.Spec.Workload; w != nil && r.Spec.PodName == f.name && f.workloads[w.UID] != nil {
			f.workload = f.workloads[w.UID]
		}
	}
	set, _, numbered := ordinal(f.name)
	if f.workload == nil {
		o := &unstructured.Unstructured{}
		switch owner := controllerOf(f.pod); {
		case owner != nil:
			o.SetAPIVersion(owner.APIVersion)
			o.SetKind(owner.Kind)
			o.SetName(owner.Name)
		case f.pod == nil && numbered:
			o.SetAPIVersion("apps/v1")
			o.SetKind("StatefulSet")
			o.SetName(set)
		default:
			return nil
		}
		switch err := k.Get(ctx, types.NamespacedName{Namespace: f.namespace, Name: o.GetName()}, o); {
		case err == nil:
			f.workload = o
		case !apierrors.IsNotFound(err):
			return err
		default:
			return nil
		}
	}
	raw, found, err := unstructured.NestedMap(f.workload.Object, "spec", "template")
	if err != nil || !found {
		return err
	}
	f.template, err = templateOf(raw)
	return err
}

func controllerOf(pod *corev1.Pod) *metav1.OwnerReference {
	if pod == nil {
		return nil
	}
	return metav1.GetControllerOf(pod)
}

// findRecord looks for the PersistentPodState of the workload: the oldest one, as the controller does.
func (f *facts) findRecord(ctx context.Context, k client.Client) error {
	var list kruisev1alpha1.PersistentPodStateList
	if err := k.List(ctx, &list, client.InNamespace(f.namespace)); err != nil {
		if meta.IsNoMatchError(err) {
			return nil // the CRD is not installed: there are none
		}
		return err
	}
	for i := range list.Items {
		s := &list.Items[i]
		_, has := s.Status.PodStates[f.name]
		of := f.workload != nil && s.Spec.TargetReference.Name == f.workload.GetName() && s.Spec.TargetReference.Kind == f.workload.GetKind()
		if s.DeletionTimestamp != nil || !of && (f.workload != nil || !has) {
			continue
		}
		if f.state == nil || s.CreationTimestamp.Before(&f.state.CreationTimestamp) {
			f.state = s
		}
	}
	return nil
}

// findEvents looks for the Events of the pod, its RetainedIPs and its workload. Of the workload's only those that
// are about the pod.
func (f *facts) findEvents(ctx context.Context, k client.Client) error {
	about := map[string]bool{f.name: true}
	for _, r := range f.kept {
		if r.Spec.PodName == f.name {
			about[r.Name] = true
		}
	}
	if f.workload != nil {
		about[f.workload.GetName()] = true
	}
	for name := range about {
		var list corev1.EventList
		err := k.List(ctx, &list, client.InNamespace(f.namespace), client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("involvedObject.name", name)})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			switch e.InvolvedObject.Kind {
			case "Pod", "RetainedIP":
			default:
				if f.workload == nil || e.InvolvedObject.Kind != f.workload.GetKind() || !mentions(e.Message, f.name) {
					continue
				}
			}
			f.events = append(f.events, e)
		}
	}
	slices.SortStableFunc(f.events, func(a, b corev1.Event) int { return happened(&a).Compare(happened(&b)) })
	return nil
}

// mentions says whether a text has a name as a word: web-1 is not in web-10.
func mentions(text, name string) bool {
	return slices.Contains(strings.FieldsFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '.'
	}), name)
}

func happened(e *corev1.Event) time.Time {
	switch {
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case e.Series != nil && !e.Series.LastObservedTime.IsZero():
		return e.Series.LastObservedTime.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// story tells what the facts say.
func (f *facts) story() *Story {
	s := &Story{Namespace: f.namespace, Pod: f.name, Asked: []Asked{}, Kept: []Kept{}, Events: []Told{}, Unknown: f.unknown}
	s.State = f.podIs()
	if f.pod != nil {
		s.UID, s.Node = string(f.pod.UID), f.pod.Spec.NodeName
		for _, ip := range f.pod.Status.PodIPs {
			s.IPs = append(s.IPs, ip.IP)
		}
	}
	switch owner := controllerOf(f.pod); {
	case f.workload != nil:
		s.Workload = f.workload.GetKind() + "/" + f.workload.GetName()
	case owner != nil:
		s.Workload = owner.Kind + "/" + owner.Name
	}
	s.Asked = askedBy(f.annotations())
	s.Promise = f.promise()
	for i := range f.kept {
		s.Kept = append(s.Kept, f.keptBy(&f.kept[i]))
	}
	s.Record = f.recorded()
	s.Placement = f.placement()
	for i := range f.events {
		e := &f.events[i]
		if f.toldTwice(e) {
			continue
		}
		s.Events = append(s.Events, Told{
			Time: happened(e).UTC(), Type: e.Type, Reason: e.Reason, About: e.InvolvedObject.Kind + "/" + e.InvolvedObject.Name, Note: e.Message,
		})
	}
	s.IfDeleted = f.forecast()
	return s
}

// toldTwice says of an Event of the workload that the pod has one that says the same.
func (f *facts) toldTwice(e *corev1.Event) bool {
	return e.InvolvedObject.Kind != "Pod" && slices.ContainsFunc(f.events, func(o corev1.Event) bool {
		return o.InvolvedObject.Kind == "Pod" && o.Reason == e.Reason && e.Message == "pod "+f.name+": "+o.Message
	})
}

// annotations are the pod's; of one that is gone those of its successor.
func (f *facts) annotations() map[string]string {
	switch {
	case f.pod != nil:
		return f.pod.Annotations
	case f.template != nil:
		return f.template.Annotations
	}
	return nil
}

func (f *facts) podIs() string {
	p := f.pod
	if p == nil {
		return "there is no such pod now"
	}
	is := fmt.Sprintf("%s on node %s", strings.ToLower(string(p.Status.Phase)), p.Spec.NodeName)
	switch {
	case p.DeletionTimestamp != nil && p.Spec.NodeName != "":
		is = "is ending on node " + p.Spec.NodeName
	case p.Spec.NodeName == "" && isGated(p):
		is = "waits, gated, for its placement by stayput"
	case p.Spec.NodeName == "" && len(p.Spec.SchedulingGates) > 0:
		is = "waits, gated by somebody else than stayput"
	case p.Spec.NodeName == "":
		is = "waits for the scheduler"
	}
	return is + ", for " + duration.HumanDuration(f.now.Sub(p.CreationTimestamp.Time))
}

func isGated(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == stayputv1alpha1.PlacementGate })
}

// asksFor says whether annotations ask for an address to be kept.
func asksFor(annotations map[string]string) bool {
	_, ours := annotations[stayputv1alpha1.AnnotationRetainIP]
	_, kruise := annotations[stayputv1alpha1.AnnotationReservedIPDuration]
	return ours || kruise
}

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
			w = fmt.Sprintf("%s is kept on node %s: %s.", strings.Join(r.Status.IPs, ", "), r.Spec.NodeName, reason(&r, f.workloads))
		} else if left != none {
			w = fmt.Sprintf("%s is kept on node %s until %s (%s).", strings.Join(r.Status.IPs, ", "), r.Spec.NodeName, at, left)
		} else if f.pod != nil && r.Spec.NodeName != f.pod.Spec.NodeName && f.pod.Spec.NodeName != "" {
			w = fmt.Sprintf("Node %s still says that %s is used by a pod of this name: the node or its agent may be down.", r.Spec.NodeName, strings.Join(r.Status.IPs, ", "))
		} else {
			w = fmt.Sprintf("%s on node %s is promised to it: kept %s.", strings.Join(r.Status.IPs, ", "), r.Spec.NodeName, reason(&r, f.workloads))
		}
		say = append(say, w)
	}
	switch {
	case len(mine) > 0:
		return say
	case bad != nil:
		return []string{"Nothing: " + bad.Error()}
	case !asksFor(annotations):
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

// whyNothing is for a running pod that asks for a promise and has none.
func (f *facts) whyNothing() []string {
	for i := len(f.events) - 1; i >= 0; i-- {
		if e := f.events[i]; e.InvolvedObject.UID == f.pod.UID && slices.Contains([]string{"IPRetentionRefused", "InvalidAnnotation", "WhileOwnedWithoutOrdinal"}, e.Reason) {
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

func (f *facts) recorded() string {
	if f.state == nil {
		return ""
	}
	of, there := f.state.Status.PodStates[f.name]
	if !there {
		return fmt.Sprintf("PersistentPodState %s has nothing of this pod: it records pods once they are Ready", f.state.Name)
	}
	is := fmt.Sprintf("PersistentPodState %s: it was Ready on node %s last", f.state.Name, of.NodeName)
	if len(of.NodeTopologyLabels) > 0 {
		is += ", with " + metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: of.NodeTopologyLabels})
	}
	return is
}

func (f *facts) placement() (say []string) {
	p := f.pod
	if p == nil {
		return nil
	}
	if home, drawn := p.Annotations[stayputv1alpha1.AnnotationHome]; drawn {
		say = append(say, "stayput required its home of it: "+home)
	}
	switch {
	case isGated(p):
		say = append(say, "it has the scheduling gate "+stayputv1alpha1.PlacementGate+", which the controller takes off")
		if why, ok := f.lastSaid("WaitingForHome"); ok {
			say = append(say, why)
		}
		if why := f.leaderless(); why != "" {
			say = append(say, why)
		}
	case p.Spec.NodeName == "":
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				say = append(say, "the scheduler says: "+c.Message)
			}
		}
	}
	for _, r := range []string{"HomeGivenUp", "HomeHasNoRoom", "HomeIgnored"} {
		if why, ok := f.lastSaid(r); ok {
			say = append(say, why)
		}
	}
	return say
}

// lastSaid is the latest Event with a reason about the pod.
func (f *facts) lastSaid(reason string) (string, bool) {
	for i := len(f.events) - 1; i >= 0; i-- {
		if e := f.events[i]; e.Reason == reason && e.InvolvedObject.Kind == "Pod" && (f.pod == nil || e.InvolvedObject.UID == f.pod.UID) {
			return e.Message, true
		}
	}
	return "", false
}

// leaderless says that no controller leads, or nothing.
func (f *facts) leaderless() string {
	if f.lease == nil {
		return ""
	}
	if why := staleLease(f.lease, f.now); why != "" {
		return "no controller leads, so that gated pods wait: " + why
	}
	return ""
}

// staleLease says why nobody leads; empty: somebody does.
func staleLease(l *coordinationv1.Lease, now time.Time) string {
	holder := ""
	if l.Spec.HolderIdentity != nil {
		holder = *l.Spec.HolderIdentity
	}
	if holder == "" || l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
		return fmt.Sprintf("lease %s/%s has no holder", l.Namespace, l.Name)
	}
	// Twice, since the clock of whoever asks is another one.
	if old := now.Sub(l.Spec.RenewTime.Time); old > 2*time.Duration(*l.Spec.LeaseDurationSeconds)*time.Second {
		return fmt.Sprintf("lease %s/%s of %s was renewed %s ago", l.Namespace, l.Name, holder, duration.HumanDuration(old))
	}
	return ""
}

// write tells a story to people.
func (s *Story) write(w io.Writer, now time.Time) error {
	most := width(w)
	var b strings.Builder
	section := func(title string) { fmt.Fprintf(&b, "\n%s\n", title) }
	say := func(text string) { fmt.Fprintf(&b, "  %s\n", wrapped(text, "    ", most-2)) }

	fmt.Fprintf(&b, "Pod %s/%s\n", s.Namespace, s.Pod)
	is := s.State
	if len(s.IPs) > 0 {
		is += ", with " + strings.Join(s.IPs, ", ")
	}
	if s.Workload != "" {
		is += ", of " + strings.Replace(s.Workload, "/", " ", 1)
	}
	say(is)
	if len(s.Asked) > 0 {
		section("What it asks for")
		for _, a := range s.Asked {
			say(a.Annotation + ": " + a.Value + " - " + a.Meaning)
		}
	}
	section("What is promised")
	for _, p := range s.Promise {
		say(p)
	}
	for _, k := range s.Kept {
		say(fmt.Sprintf("RetainedIP %s: %s, %s", k.RetainedIP, k.Phase, strings.Join(k.IPs, ", ")))
		for _, l := range k.Ledger {
			say("ledger of node " + k.Node + ": " + l)
		}
	}
	if s.Record != "" || len(s.Placement) > 0 {
		section("Its node")
		for _, p := range s.Placement {
			say(p)
		}
		if s.Record != "" {
			say(s.Record)
		}
	}
	if len(s.Events) > 0 {
		section("What happened")
		for _, e := range s.Events {
			say(fmt.Sprintf("%4s ago  %s  %s: %s", duration.HumanDuration(now.Sub(e.Time)), e.Reason, e.About, e.Note))
		}
	}
	section(s.IfDeleted.Title)
	for _, line := range s.IfDeleted.Lines {
		say(line)
	}
	if len(s.Unknown) > 0 {
		section("What could not be found out")
		for _, u := range s.Unknown {
			say(u)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
