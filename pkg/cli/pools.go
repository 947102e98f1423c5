package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/pool"
)

// calicoWanted is the same for pools of mode Calico.
const calicoWanted = "set pools.calico in the Helm chart"

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

// checkPools checks the pools, if there are any.
func checkPools(ctx context.Context, k client.Client, now time.Time) []Finding {
	f := findings{check: "pools"}
	all, err := pools(ctx, k)
	if err != nil {
		return f.unread(err)
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
	for _, k := range ips {
		if k.conflict != "" {
			f.warn(fmt.Sprintf("pod %s/%s cannot start: %s is %s", k.namespace, k.pod, k.about(), k.conflict),
				"remove the address from that machine; or exclude it from the pool, delete the PodIP, then the pod")
		}
	}
	return f.orOK(fmt.Sprintf("%s, %d of %d addresses in use or kept", count(len(all), "pool", "pools"), used, total))
}

// checkAskedPools finds the gated pods that request pools which do not exist. Whether Spiderpool's annotations count is
// not known here.
func checkAskedPools(ctx context.Context, k client.Client, pods corev1.PodList) []Finding {
	f := findings{check: "requested pools"}
	ours, err := pools(ctx, k)
	var theirs spiderpoolv2beta1.SpiderIPPoolList
	if err := errors.Join(err, k.List(ctx, &theirs)); err != nil && !meta.IsNoMatchError(err) {
		return nil // checkPools says so, or Spiderpool's are not for us to read
	}
	exists := map[string]bool{}
	for i := range ours {
		exists[ours[i].Name] = true
	}
	for i := range theirs.Items {
		exists[theirs.Items[i].Name] = true
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		var ns corev1.Namespace
		if !home.Gated(p) || p.DeletionTimestamp != nil || k.Get(ctx, client.ObjectKey{Name: p.Namespace}, &ns) != nil {
			continue
		}
		wants, _ := pool.Asks(p.Annotations, ns.Annotations, false) // an invalid annotation is refused at apply
		for _, want := range wants {
			for _, name := range want.Pools {
				if !exists[name] {
					f.fail(fmt.Sprintf("pod %s/%s waits for addresses of PodIPPool %s, which does not exist", p.Namespace, p.Name,
						name), "create the pool, or correct the annotation "+stayputv1alpha1.AnnotationPools)
				}
			}
		}
	}
	return f.all
}

// poolSlack is how long the controller may take to reconcile a new pool.
const poolSlack = 30 * time.Second

// pool adds what is wrong with a pool.
func (f *findings) pool(p *stayputv1alpha1.PodIPPool, now time.Time) {
	about := "PodIPPool " + p.Name + ": "
	ready := meta.FindStatusCondition(p.Status.Conditions, stayputv1alpha1.ConditionReady)
	switch {
	case ready == nil && now.Sub(p.CreationTimestamp.Time) > poolSlack:
		f.fail(about+"no controller has reconciled it", "check whether a controller is the leader, and see its log. "+
			"It must have its permissions: "+poolsWanted)
	case ready != nil && ready.Status == metav1.ConditionFalse && ready.Reason == "Invalid":
		f.fail(about+ready.Message, "change the pool")
	case ready != nil && ready.Status == metav1.ConditionFalse:
		f.warn(about+"allocates no addresses: "+ready.Message, "nothing if this is intended")
	}
	for kind, todo := range map[string]string{
		stayputv1alpha1.ConditionOverlaps: "remove the addresses from one of them: " +
			"overlapping addresses can be allocated twice",
		stayputv1alpha1.ConditionExhausted: "add addresses, or release retained ones (kubectl stayput release): " +
			"waiting pods proceed as soon as addresses are free",
	} {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status == metav1.ConditionTrue {
			f.warn(about+c.Message, todo)
		}
	}
}

// recall adds that no addresses are given until all nodes have said which ones they have.
func (f *findings) recall(ctx context.Context, k client.Client) {
	var audit stayputv1alpha1.PodIPAudit
	err := k.Get(ctx, client.ObjectKey{Name: stayputv1alpha1.PodIPAuditName}, &audit)
	if client.IgnoreNotFound(err) != nil {
		f.unread(rightTo("get podipaudits", err))
		return
	}
	if err != nil || audit.Spec.Phase == stayputv1alpha1.PodIPAuditSettled {
		return
	}
	nodes, err := nodesNamed(ctx, k, nil)
	var reports stayputv1alpha1.PodIPReportList
	if err := errors.Join(err, k.List(ctx, &reports)); err != nil {
		f.unread(err)
		return
	}
	var names []string
	for i := range nodes {
		at := slices.IndexFunc(reports.Items, func(a stayputv1alpha1.PodIPReport) bool { return a.Name == nodes[i].Name })
		switch {
		case at < 0 && agentless(&nodes[i]) != "": // need not report, as no agent has run there
		case at < 0, reports.Items[at].Spec.Epoch.Before(audit.Spec.Epoch):
			names = append(names, nodes[i].Name)
		}
	}
	slices.Sort(names)
	f.fail("pools allocate no addresses until every node has reported the addresses that it uses, "+
		"as after a restore of etcd; missing: "+
		orNone(strings.Join(firstOf(names, 5), ", ")),
		"recover these nodes. If a node is known to be powered off, delete the Node or taint it "+
			"node.kubernetes.io/out-of-service:NoExecute")
}

// findPools finds out which pools the pod asks for, or its successor.
func (g *gathering) findPools(ctx context.Context) error {
	value, own := g.annotations()[stayputv1alpha1.AnnotationPools]
	if !own && g.countsSpiderpool() {
		value, own = g.inSpiderpoolsWords()
	}
	if own || g.pod == nil && g.template == nil {
		g.asksPools = value
		return nil
	}
	if !g.hasPodIP() { // then it matters only if there are pools
		if all, err := pools(ctx, g.k); err == nil && len(all) == 0 {
			return nil
		}
	}
	var ns corev1.Namespace
	err := g.k.Get(ctx, client.ObjectKey{Name: g.namespace}, &ns)
	if value, ok := ns.Annotations[stayputv1alpha1.AnnotationPools]; ok {
		g.asksPools = value
	} else if g.countsSpiderpool() {
		var all []string
		for _, key := range []string{annotationDefaultV4, annotationDefaultV6} {
			if value := ns.Annotations[key]; value != "" {
				all = append(all, value)
			}
		}
		g.asksPools = strings.Join(all, " ")
	}
	return client.IgnoreNotFound(err)
}

// countsSpiderpool reports whether Spiderpool's words seem to count for the pod, which only the controller and the gate
// know: it has addresses of pools, or waits.
func (f *facts) countsSpiderpool() bool {
	return f.hasPodIP() || f.pod != nil && (has(f.pod, stayputv1alpha1.AnnotationAddresses) || home.Gated(f.pod))
}

func (f *facts) hasPodIP() bool {
	return slices.ContainsFunc(f.kept, func(k *keptIP) bool { return k.podIP() != nil })
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

// mayHavePools reports whether the pod requests addresses of pools, or may, by a namespace that could not be read.
func (f *facts) mayHavePools() bool {
	assigned := f.pod != nil && has(f.pod, stayputv1alpha1.AnnotationAddresses)
	return assigned || f.asksPools != "" || f.unread.namespace != nil
}

// whyNoneOfPools returns why the pod has no address of the pools that it asks for.
func (f *facts) whyNoneOfPools() string {
	none := "Nothing: it requests pool addresses (" + f.asksPools + ") and has been assigned none"
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
func (o *outlook) foretellPools(pod *corev1.Pod) {
	d, node := home.Foresee(o.now, pod, nil, o.state, o.nodes)
	o.Outcome = string(d.Outcome)
	switch d.Outcome {
	case home.OutcomeHome:
		o.Node = node
		o.say("Node: %s, recorded by its PersistentPodState.", d.Home)
	case home.OutcomeWait:
		o.Node = node
		o.say("Node: its home, %s, %s: it waits for it.", d.Home, d.Reason)
	case home.OutcomeElsewhere:
		o.say("Node: another one. Its home, %s, %s.", d.Home, d.Reason)
	default:
		if o.unread.record != nil {
			o.Outcome = "unknown"
			o.say("Node: unknown: PersistentPodStates, which may record it, cannot be read.")
			break
		}
		o.say("Node: any node that its pools select.")
	}
	mine := 0
	for _, k := range o.keptFor(pod.Annotations[stayputv1alpha1.AnnotationIdentity]) {
		if k.podIP() == nil {
			continue
		}
		switch {
		case k.retention == "" && !k.retained():
			o.say("IP: any free address. %s is freed once the pod is gone.", k.addresses())
		case k.releasing:
			o.say("IP: %s", o.promiseOf(k))
		default:
			o.IPs = append(o.IPs, k.addresses())
			o.say("IP: %s, once the node of its predecessor has reported that it is gone.", k.about())
		}
		mine++
	}
	switch {
	case o.unread.podIPs != nil:
		o.say("IP: unknown: the addresses of pools cannot be read.")
	case mine == 0:
		o.say("IP: any free address of its pools, %s.", o.asksPools)
	}
	o.Lines = append(o.Lines, d.Notes...)
}

// writePodIPs lists the addresses of pools that pods have on a node, or had there last.
func writePodIPs(ctx context.Context, k client.Client, w io.Writer, node string) error {
	all, err := podIPs(ctx, k, "")
	if errors.Is(err, errRight) {
		_, err = fmt.Fprintf(w, "\nPool addresses are not shown: %v\n", printableError{err})
		return err
	}
	if err != nil {
		return err
	}
	title := "\nPool addresses\n"
	for _, k := range all {
		p := k.podIP()
		if p.Status.NodeName != node {
			continue
		}
		phase := strings.ToLower(k.phase)
		if p.Status.PodUID != k.podUID {
			phase = "assigned to a later pod"
		}
		line := fmt.Sprintf("%s  %s/%s  %s  %s, %s", k.addresses(), k.namespace, k.pod, k.iface, k.keeper(), phase)
		if _, err := fmt.Fprintf(w, "%s  %s\n", title, printable(line)); err != nil {
			return err
		}
		title = ""
	}
	return nil
}
