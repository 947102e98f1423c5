package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// poolsWanted is what to do if pools are there without what they take.
const poolsWanted = "set pools.enabled in the Helm chart, or apply deploy/pools.yaml and " +
	"deploy/pools-gate-policies.yaml"

// pools returns the PodIPPools; none if the cluster does not know them.
func pools(ctx context.Context, k client.Client) ([]stayputv1alpha1.PodIPPool, error) {
	var list stayputv1alpha1.PodIPPoolList
	if err := k.List(ctx, &list); err != nil && !meta.IsNoMatchError(err) {
		return nil, rightTo("list podippools", err)
	}
	return list.Items, nil
}

// podIPs returns the PodIPs of the pods of a namespace, or of all if it is empty, sorted as people look for them; none
// if the cluster does not know them.
func podIPs(ctx context.Context, k client.Client, namespace string) ([]stayputv1alpha1.PodIP, error) {
	var list stayputv1alpha1.PodIPList
	if err := k.List(ctx, &list); err != nil {
		if meta.IsNoMatchError(err) {
			return nil, nil
		}
		return nil, rightTo("list podips", err)
	}
	all := slices.DeleteFunc(list.Items, func(p stayputv1alpha1.PodIP) bool {
		return namespace != "" && p.Spec.Namespace != namespace
	})
	for i := range all {
		all[i].SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind("PodIP"))
	}
	slices.SortFunc(all, func(a, b stayputv1alpha1.PodIP) int {
		return cmp.Or(strings.Compare(a.Spec.Namespace, b.Spec.Namespace), comparePods(a.Spec.PodName, b.Spec.PodName),
			strings.Compare(a.Spec.Interface, b.Spec.Interface), strings.Compare(a.Name, b.Name))
	})
	return all, nil
}

// addressIn returns the address of a PodIP as people write it.
func addressIn(p *stayputv1alpha1.PodIP) string {
	a, err := stayputv1alpha1.ParsePodIPName(p.Name)
	if err != nil {
		return p.Name
	}
	return a.String()
}

// phaseOf returns the phase of the address for the pod that it is given to. What no node has said anything about is
// Allocated.
func phaseOf(p *stayputv1alpha1.PodIP) stayputv1alpha1.PodIPPhase {
	if p.Status.PodUID != p.Spec.PodUID {
		return stayputv1alpha1.PodIPAllocated
	}
	return cmp.Or(p.Status.Phase, stayputv1alpha1.PodIPAllocated)
}

// asRetained returns a PodIP in the words of a RetainedIP of its name, which has the same questions to answer.
func asRetained(p *stayputv1alpha1.PodIP) *stayputv1alpha1.RetainedIP {
	r := &stayputv1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Spec.Namespace, Name: p.Name, UID: p.UID},
		Spec: stayputv1alpha1.RetainedIPSpec{
			PodName: p.Spec.PodName, Identity: p.Spec.Identity, Workload: p.Spec.Workload, Retention: p.Spec.Retention,
			WhenScaled: p.Spec.WhenScaled, WhenDeleted: p.Spec.WhenDeleted, Release: p.Spec.Release,
		},
		Status: stayputv1alpha1.RetainedIPStatus{
			Phase: stayputv1alpha1.PhaseBound, IPs: []string{addressIn(p)}, PodUID: p.Spec.PodUID,
		},
	}
	if p.Status.PodUID == p.Spec.PodUID {
		r.Spec.NodeName = p.Status.NodeName
	}
	if phaseOf(p) == stayputv1alpha1.PodIPRetained {
		r.Status.Phase, r.Status.Expires = stayputv1alpha1.PhaseRetained, p.Status.Expires
	}
	return r
}

// retainedAs returns PodIPs in the words of RetainedIPs.
func retainedAs(all []stayputv1alpha1.PodIP) (as []stayputv1alpha1.RetainedIP) {
	for i := range all {
		as = append(as, *asRetained(&all[i]))
	}
	return as
}

// poolReason returns in words why an address of a pool is somebody's, and until when.
func poolReason(p *stayputv1alpha1.PodIP, all workloads) string {
	of := "of pool " + p.Spec.Pool + ", "
	switch q := p.Spec.Quarantine; {
	case q != nil:
		return of + "in quarantine: " + q.Reason
	case conflicts(p):
		return of + inConflict(p)
	case p.DeletionTimestamp != nil:
		return of + "being released"
	case p.Spec.Retention == "" && !p.Spec.Release:
		return of + "until the pod is gone"
	}
	return of + reason(asRetained(p), all)
}

// conflicts reports whether the pod cannot start because another machine has its address.
func conflicts(p *stayputv1alpha1.PodIP) bool {
	return p.Status.Conflict != "" && p.Status.PodUID == p.Spec.PodUID
}

func inConflict(p *stayputv1alpha1.PodIP) string {
	return fmt.Sprintf("in use by another machine on the link of node %s, which has the MAC address %s",
		p.Status.NodeName, p.Status.Conflict)
}

// checkPools checks the pools, if there are any.
func checkPools(ctx context.Context, k client.Client, now time.Time) []Finding {
	f := findings{check: "pools"}
	all, err := pools(ctx, k)
	if err != nil {
		f.unread(err)
		return f.all
	}
	if len(all) == 0 {
		return nil
	}
	var used, total int64
	for i := range all {
		p := &all[i]
		used, total = used+p.Status.Addresses.Used, total+p.Status.Addresses.Total
		f.pool(p, now)
	}
	f.recall(ctx, k)
	ips, err := podIPs(ctx, k, "")
	if err != nil {
		f.unread(err)
	}
	for i := range ips {
		p := &ips[i]
		switch {
		case p.Spec.Quarantine == nil && conflicts(p):
			f.warn(fmt.Sprintf("pod %s/%s cannot start: %s of pool %s is %s", p.Spec.Namespace, p.Spec.PodName, addressIn(p),
				p.Spec.Pool, inConflict(p)), "take the address from that machine")
		case p.Spec.Quarantine != nil:
			f.warn(fmt.Sprintf("%s of pool %s is in quarantine since %s: %s", addressIn(p), p.Spec.Pool,
				p.Spec.Quarantine.Since.UTC().Format(time.RFC3339), p.Spec.Quarantine.Reason),
				"kubectl describe podip "+p.Name+" says what is known of it")
		}
	}
	return f.orOK(fmt.Sprintf("%s, %d of %d addresses are somebody's", count(len(all), "pool", "pools"), used, total))
}

// poolSlack is how long the controller may take to look at a pool.
const poolSlack = 30 * time.Second

// pool adds what is wrong with a pool.
func (f *findings) pool(p *stayputv1alpha1.PodIPPool, now time.Time) {
	about := "PodIPPool " + p.Name + ": "
	ready := meta.FindStatusCondition(p.Status.Conditions, stayputv1alpha1.ConditionReady)
	switch {
	case ready == nil && now.Sub(p.CreationTimestamp.Time) > poolSlack:
		f.fail(about+"no controller has reconciled it", "see whether a controller leads, and its log. "+
			"It must have its rights: "+poolsWanted)
	case ready != nil && ready.Status == metav1.ConditionFalse && ready.Reason == "Invalid":
		f.fail(about+ready.Message, "change the pool")
	case ready != nil && ready.Status == metav1.ConditionFalse:
		f.warn(about+"gives no addresses: "+ready.Message, "nothing, if that is meant")
	}
	for kind, todo := range map[string]string{
		stayputv1alpha1.ConditionOverlaps: "take the addresses out of one of them: what overlaps can be given twice",
		stayputv1alpha1.ConditionExhausted: "add addresses, or release retained ones (kubectl stayput release): " +
			"the pods go as soon as there are some",
	} {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status == metav1.ConditionTrue {
			f.warn(about+c.Message, todo)
		}
	}
}

// recall adds that no addresses are given until all nodes have said which ones they have.
func (f *findings) recall(ctx context.Context, k client.Client) {
	var roll stayputv1alpha1.PodIPRoll
	err := k.Get(ctx, client.ObjectKey{Name: stayputv1alpha1.PodIPRollName}, &roll)
	if client.IgnoreNotFound(err) != nil {
		f.unread(rightTo("get podiprolls", err))
		return
	}
	if err != nil || !roll.Spec.Recalling {
		return
	}
	var nodes metav1.PartialObjectMetadataList
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	var answers stayputv1alpha1.PodIPAnswerList
	if err := errors.Join(k.List(ctx, &nodes), k.List(ctx, &answers)); err != nil {
		f.unread(err)
		return
	}
	silent := map[string]bool{}
	for i := range nodes.Items {
		silent[nodes.Items[i].Name] = true
	}
	for _, a := range answers.Items {
		if a.Spec.Round >= roll.Spec.Epoch {
			delete(silent, a.Name)
		}
	}
	names := slices.Sorted(maps.Keys(silent))
	f.fail("no pool gives addresses until every node has said which ones it has, as after a restore of etcd; not yet: "+
		orNone(strings.Join(firstOf(names, 5), ", ")),
		"bring these nodes back. Of one that is surely off, delete the Node or taint it "+
			"node.kubernetes.io/out-of-service:NoExecute")
}

// findPools finds out which pools the pod asks for, or its successor.
func (f *facts) findPools(ctx context.Context, k client.Client) error {
	value, own := f.annotations()[stayputv1alpha1.AnnotationPools]
	if !own && f.countsSpiderpool() {
		value, own = f.inSpiderpoolsWords()
	}
	if own || f.pod == nil && f.template == nil {
		f.asksPools = value
		return nil
	}
	ns := &metav1.PartialObjectMetadata{}
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if len(f.pooled) == 0 { // then it matters only if there are pools
		if all, err := pools(ctx, k); err == nil && len(all) == 0 {
			return nil
		}
	}
	err := k.Get(ctx, client.ObjectKey{Name: f.namespace}, ns)
	if value, ok := ns.Annotations[stayputv1alpha1.AnnotationPools]; ok {
		f.asksPools = value
	} else if f.countsSpiderpool() {
		var all []string
		for _, key := range []string{annotationDefaultV4, annotationDefaultV6} {
			if value := ns.Annotations[key]; value != "" {
				all = append(all, value)
			}
		}
		f.asksPools = strings.Join(all, " ")
	}
	return client.IgnoreNotFound(err)
}

// countsSpiderpool reports whether Spiderpool's words seem to count for the pod, which only the controller and the gate
// know: it has addresses of pools, or waits.
func (f *facts) countsSpiderpool() bool {
	if len(f.pooled) > 0 {
		return true
	}
	if f.pod == nil {
		return false
	}
	_, has := f.pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	return has || home.Gated(f.pod)
}

// inSpiderpoolsWords returns the annotation of Spiderpool by which the pod asks for addresses of pools, without white
// space.
func (f *facts) inSpiderpoolsWords() (value string, asks bool) {
	for _, key := range []string{annotationIPPools, annotationIPPool} {
		if value := f.annotations()[key]; value != "" {
			return strings.Join(strings.Fields(value), ""), true
		}
	}
	return "", false
}

// ofPool tells of a PodIP.
func (f *facts) ofPool(p *stayputv1alpha1.PodIP) OfPool {
	o := OfPool{
		PodIP: p.Name, IP: addressIn(p), Pool: p.Spec.Pool, Interface: p.Spec.Interface, Phase: string(phaseOf(p)),
		Node: p.Status.NodeName, Why: poolReason(p, f.workloads),
	}
	if phaseOf(p) == stayputv1alpha1.PodIPRetained {
		o.Until = p.Status.Expires
		return o
	}
	for _, e := range slices.Backward(f.events) {
		if e.Reason == home.ReasonAddressHeld && e.InvolvedObject.Name == p.Name {
			o.Held = e.Message
			break
		}
	}
	return o
}

// promiseOfPool returns what is promised of an address of a pool.
func (f *facts) promiseOfPool(p *stayputv1alpha1.PodIP) string {
	about := addressIn(p) + " of pool " + p.Spec.Pool
	at, left := until(asRetained(p), f.now)
	switch {
	case p.Spec.Quarantine != nil:
		return about + " is in quarantine, so that nobody gets it: " + p.Spec.Quarantine.Reason + "."
	case conflicts(p):
		return about + " is " + inConflict(p) + ": the pod waits until that has gone."
	case p.Spec.Release || p.DeletionTimestamp != nil:
		return about + " is being released."
	case left != none:
		return fmt.Sprintf("%s is kept until %s (%s), for whichever node.", about, at, left)
	case phaseOf(p) == stayputv1alpha1.PodIPRetained:
		return fmt.Sprintf("%s is kept, for whichever node: %s.", about, reason(asRetained(p), f.workloads))
	case p.Spec.Retention == "":
		return about + " is its own until it is gone."
	}
	return fmt.Sprintf("%s is its own on whichever node: kept %s.", about, reason(asRetained(p), f.workloads))
}

// whyNoneOfPools returns why the pod has no address of the pools that it asks for.
func (f *facts) whyNoneOfPools() string {
	none := "Nothing: it asks for addresses of pools (" + f.asksPools + "), and none is its own"
	if f.pod == nil {
		return none + "."
	}
	if note := f.lastNote(home.ReasonAddressWait); note != "" {
		return none + ": " + note
	}
	if note := f.lastNote(home.ReasonInvalidAnnotation); note != "" {
		return none + ": " + note
	}
	return none + "."
}

// foretellPools says which node and which addresses of pools the successor would have.
func (f *facts) foretellPools(fc *Forecast, pod *corev1.Pod) {
	d, node := home.Foresee(f.now, pod, nil, f.state, f.nodes)
	fc.Outcome = string(d.Outcome)
	switch d.Outcome {
	case home.OutcomeHome:
		fc.Node = node
		fc.say("Node: %s, as its PersistentPodState says.", d.Home)
	case home.OutcomeWait:
		fc.Node = node
		fc.say("Node: its home, %s, %s: it waits for it.", d.Home, d.Reason)
	case home.OutcomeElsewhere:
		fc.say("Node: another one. Its home, %s, %s.", d.Home, d.Reason)
	default:
		fc.say("Node: any that its pools are for.")
	}
	mine := 0
	for i := range f.pooled {
		p := &f.pooled[i]
		if identity := pod.Annotations[stayputv1alpha1.AnnotationIdentity]; p.Spec.Identity != identity ||
			identity == "" && p.Spec.PodName != f.name {
			continue
		}
		switch {
		case p.Spec.Retention == "" && phaseOf(p) != stayputv1alpha1.PodIPRetained:
			fc.say("IP: a free one. %s is freed once the pod is gone.", addressIn(p))
		case p.Spec.Release || p.DeletionTimestamp != nil || p.Spec.Quarantine != nil:
			fc.say("IP: %s.", f.promiseOfPool(p))
		default:
			fc.IPs = append(fc.IPs, addressIn(p))
			fc.say("IP: %s of pool %s, once the node of its predecessor has said that this is gone.", addressIn(p), p.Spec.Pool)
		}
		mine++
	}
	if mine == 0 {
		fc.say("IP: a free one of its pools, %s.", f.asksPools)
	}
	fc.Lines = append(fc.Lines, d.Notes...)
}

// writePodIPs lists the addresses of pools that pods have on a node, or had there last.
func writePodIPs(ctx context.Context, k client.Client, w io.Writer, node string) error {
	all, err := podIPs(ctx, k, "")
	if errors.Is(err, errRight) {
		_, err = fmt.Fprintf(w, "\nAddresses of pools are not shown: %v\n", printableError{err})
		return err
	}
	if err != nil {
		return err
	}
	title := "\nAddresses of pools\n"
	for i := range all {
		p := &all[i]
		if p.Status.NodeName != node {
			continue
		}
		phase := strings.ToLower(string(phaseOf(p)))
		if p.Status.PodUID != p.Spec.PodUID {
			phase = "given to a later pod"
		}
		line := fmt.Sprintf("%s  %s/%s  %s  pool %s, %s", addressIn(p), p.Spec.Namespace, p.Spec.PodName, p.Spec.Interface,
			p.Spec.Pool, phase)
		_, err := fmt.Fprintf(w, "%s  %s\n", title, printable(line))
		if err != nil {
			return err
		}
		title = ""
	}
	return nil
}
