package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	// calicoSection is measured only if it is asked for: what only clusters with Calico need takes minutes to build.
	calicoSection = "calico"

	calicoSubnet = "10.244.248.0/21" // in Calico's IPPool; no node's tunnel has one of its addresses
	calicoKept   = "10.244.252.0"    // the first address of those that are kept while the controllers rest
	calicoPodIPs = 1000
	calicoRest   = 2 * time.Minute
	calicoCrowd  = 60 // pods of each StatefulSet, 20 a node

	// The API server logs all requests of the controllers once they are over.
	calicoAuditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: Metadata
  users: ["` + controllerUser + `"]
- level: None
`
)

// inCalico is a cluster with Calico's IPAM and a pool inside it. What makes no use of the pool is Calico that keeps
// nothing.
type inCalico struct {
	*moving
	events <-chan podEvent // of a namespace
	is     *corev1.Pod     // web-0 there, as it was Ready last
	err    error           // the first that anything has waited in vain for
}

func measureCalico(ctx context.Context, b *bench) (rows []table.Row, err error) {
	w, err := b.start(ctx, lab.ClusterOptions{
		Product: b.product, Calico: &lab.CalicoOptions{},
		APIServerArgs: []string{"--audit-policy-file=" + auditPolicyFile, "--audit-log-path=" + auditLog},
		ControlFiles:  map[string][]byte{auditPolicyFile: []byte(calicoAuditPolicy)},
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	c := &inCalico{moving: &moving{world: w, homes: w.Nodes[:2], third: w.Nodes[2]}}
	for _, part := range []func(context.Context, *bench) ([]table.Row, error){
		c.measureADDs, c.install, c.measureMoves, c.measureLostNodes, c.measureRest, c.measureCrowd,
	} {
		more, err := part(ctx, b)
		rows = append(rows, more...)
		if err != nil {
			return rows, err
		}
	}
	return rows, nil
}

// measureADDs compares ADDs of Calico's IPAM while a subnet is reserved with those while none is. It runs the plugin as
// a runtime does, for addresses of ordinary pods. There is no stayput yet, which would reserve the subnet again.
func (c *inCalico) measureADDs(ctx context.Context, b *bench) ([]table.Row, error) {
	data, err := os.ReadFile(c.third.Path("/etc/cni/net.d/10-calico.conflist"))
	if err != nil {
		return nil, err
	}
	var list struct {
		Name, CNIVersion string
		Plugins          []map[string]any
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, err
	}
	list.Plugins[0]["name"], list.Plugins[0]["cniVersion"] = list.Name, list.CNIVersion
	conf, err := json.Marshal(list.Plugins[0])
	if err != nil {
		return nil, err
	}
	id := 0
	call := func(command string) error {
		_, err := c.third.RunInput(ctx, []string{"CNI_COMMAND=" + command, fmt.Sprintf("CNI_CONTAINERID=bench%d", id),
			"CNI_NETNS=/run/netns/bench", "CNI_IFNAME=eth0", "CNI_PATH=/opt/cni/bin",
			"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=bench"}, conf, "/opt/cni/bin/calico-ipam")
		return err
	}
	add := func() (float64, error) {
		id++
		begin := time.Now()
		if err := call("ADD"); err != nil {
			return 0, err
		}
		took := time.Since(begin)
		return took.Seconds() * 1e3, call("DEL")
	}
	reservation := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "crd.projectcalico.org/v1", "kind": "IPReservation", "metadata": map[string]any{"name": "bench"},
		"spec": map[string]any{"reservedCIDRs": []any{calicoSubnet}},
	}}
	// Both kinds of turns write as much.
	write := func(verb func() error) error { return errors.Join(verb(), sleep(ctx, 100*time.Millisecond)) }
	reserve := func() error { return c.world.client.Create(ctx, reservation.DeepCopy()) }
	release := func() error { return c.world.client.Delete(ctx, reservation.DeepCopy()) }
	reserved := func() (float64, error) {
		if err := write(reserve); err != nil {
			return 0, err
		}
		took, err := add()
		return took, errors.Join(err, write(release))
	}
	unreserved := func() (float64, error) {
		if err := errors.Join(write(reserve), write(release)); err != nil {
			return 0, err
		}
		return add()
	}
	if _, err := add(); err != nil { // the first one may claim a block for the node
		return nil, err
	}
	times, err := turns(ctx, "calico: ADDs", b.times(300), reserved, unreserved)
	if err != nil {
		return nil, err
	}
	return []table.Row{{
		What: "ADD of calico-ipam for an ordinary pod, a subnet reserved", Against: "none reserved",
		Goal: table.AtMost(1.05), Figure: measured("", ratio, times...),
		Detail: extent("%.1f ms", times[ours]) + " / " + extent("%.1f ms", times[stock]),
	}}, nil
}

// install installs stayput as users do, and makes the pool.
func (c *inCalico) install(ctx context.Context, _ *bench) ([]table.Row, error) {
	err := c.Install(ctx, lab.InstallOptions{Values: map[string]any{
		"pools": map[string]any{"enabled": true, "calico": true}, "agent": map[string]any{"enabled": false},
		"controller": map[string]any{"logLevel": "info"},
	}})
	if err != nil {
		return nil, err
	}
	return nil, c.makePool(ctx, stayputv1alpha1.ModeCalico, calicoSubnet)
}

// see waits for an event.
func (c *inCalico) see(ctx context.Context, what string, ok func(podEvent) bool) (e podEvent) {
	if c.err == nil {
		e, c.err = await(ctx, what, c.events, ok)
	}
	return e
}

// seeReady waits until web-0 is Ready which is not the one that was Ready last.
func (c *inCalico) seeReady(ctx context.Context) {
	e := c.see(ctx, "web-0 to be Ready", func(e podEvent) bool {
		return e.pod.Name == "web-0" && (c.is == nil || e.pod.UID != c.is.UID) && lab.Ready(e.pod)
	})
	if c.err == nil {
		c.is = e.pod
	}
}

// answers waits until an address answers the client on the third node, and returns when it did.
func (c *inCalico) answers(ctx context.Context, ip string) (at time.Time) {
	if c.err != nil {
		return at
	}
	talk, err := c.listen(ctx, ip)
	if c.err = err; err == nil {
		talk.end()
		at = talk.begun
	}
	return at
}

// measureMoves splits the time from the end of a pod until its successor answers, which is on another node. What is
// Calico's and kubelet's of it is compared with an ordinary pod.
func (c *inCalico) measureMoves(ctx context.Context, b *bench) ([]table.Row, error) {
	const namespace = "moves"
	err := errors.Join(c.namespace(ctx, namespace), c.cordon(ctx, c.third, true))
	if err != nil {
		return nil, err
	}
	if c.client, err = c.run(ctx, plainPod(namespace, "client", nil), c.third); err != nil {
		return nil, err
	}
	if c.events, err = c.watchPods(ctx, namespace); err != nil {
		return nil, err
	}
	set := lab.Workload{Name: "web", Replicas: 1, Annotations: pooled, Unprobed: true}.StatefulSet(namespace)
	c.err = c.world.client.Create(ctx, set)
	c.seeReady(ctx)
	var made, gate []float64
	moved := func() (float64, error) {
		was := c.is
		for _, n := range c.homes {
			c.err = errors.Join(c.err, c.cordon(ctx, n, n.Name == was.Spec.NodeName))
		}
		// The scheduler knows, and the last move is over.
		c.err = errors.Join(c.err, sleep(ctx, 2*time.Second), c.world.client.Delete(ctx, was.DeepCopy()))
		end := c.see(ctx, "its end", func(e podEvent) bool { return e.kind == watch.Deleted && e.pod.UID == was.UID })
		at := c.answers(ctx, was.Status.PodIP)
		next := c.see(ctx, "the next one", func(e podEvent) bool { return e.pod.Name == was.Name })
		ungated := c.see(ctx, "it to be ungated", func(e podEvent) bool {
			return e.pod.UID == next.pod.UID && !gated(e.pod)
		})
		if c.seeReady(ctx); c.err != nil {
			return 0, c.err
		}
		if c.is.Status.PodIP != was.Status.PodIP || c.is.Spec.NodeName == was.Spec.NodeName {
			return 0, fmt.Errorf("web-0 had %s on %s and has %s on %s", was.Status.PodIP, was.Spec.NodeName,
				c.is.Status.PodIP, c.is.Spec.NodeName)
		}
		made = append(made, next.at.Sub(end.at).Seconds()*1e3)
		gate = append(gate, ungated.at.Sub(end.at).Seconds()*1e3)
		return at.Sub(ungated.at).Seconds(), nil
	}
	ordinary := func() (float64, error) {
		pod := lab.Workload{Kind: "Pod", Name: "plain", Unprobed: true}.Object(namespace)
		c.err = c.world.client.Create(ctx, pod)
		is := func(e podEvent) bool { return e.pod.UID == pod.GetUID() }
		const has = "cni.projectcalico.org/podIP" // sooner than its status
		begun := c.see(ctx, "an ordinary pod", is)
		e := c.see(ctx, "its address", func(e podEvent) bool { return is(e) && e.pod.Annotations[has] != "" })
		if c.err != nil {
			return 0, c.err
		}
		ip, _, _ := strings.Cut(e.pod.Annotations[has], "/")
		took := c.answers(ctx, ip).Sub(begun.at)
		return took.Seconds(), errors.Join(c.err, c.gone(ctx, c.events, e.pod))
	}
	_, offset, err := c.audit(0)
	if err = errors.Join(err, c.err); err != nil {
		return nil, err
	}
	times, err := turns(ctx, "calico: moves", b.times(25), moved, ordinary)
	if err != nil {
		return nil, err
	}
	calls, err := c.callsRow(ctx, offset, len(gate), "one at a time")
	return []table.Row{
		{
			What: "pod of a pool in Calico's IPAM: ungated -> answers elsewhere, p50", Against: "Calico's, kubelet's",
			Goal: table.AtMost(1.5), Figure: measured(" s", median, times[ours]), Detail: extent("%.2f s", times[ours]),
		},
		{
			What: "  the same", Against: "an ordinary pod, from its creation on", Figure: measured("", ratio, times...),
			Detail: "the ordinary one " + extent("%.2f s", times[stock]),
		},
		{
			What: "  before that, the pod before ended -> ungated, p50", Against: "ours, and the StatefulSet's",
			Figure: measured(" ms", median, gate), Detail: extent("%.0f ms", gate) + ", until it is created " +
				extent("%.0f ms", made),
		},
		calls,
	}, err
}

// measureLostNodes measures how long after its Node is deleted a pod of a node that is off answers elsewhere. The pod
// is deleted by force before, which Kubernetes does minutes later, and its successor waits.
func (c *inCalico) measureLostNodes(ctx context.Context, b *bench) ([]table.Row, error) {
	for _, n := range c.homes {
		if err := c.cordon(ctx, n, false); err != nil {
			return nil, err
		}
	}
	times, err := turns(ctx, "calico: lost nodes", b.times(5), func() (float64, error) {
		was, n := c.is, c.Node(c.is.Spec.NodeName)
		if err := n.PowerLoss(); err != nil {
			return 0, err
		}
		c.err = errors.Join(c.WaitNotReady(ctx, n), c.remove(ctx, was.DeepCopy()))
		c.see(ctx, "a successor that waits", func(e podEvent) bool {
			return e.pod.Name == was.Name && e.pod.UID != was.UID && gated(e.pod)
		})
		c.err = errors.Join(c.err, sleep(ctx, afterwards))
		begin := time.Now()
		c.err = errors.Join(c.err, c.world.client.Delete(ctx,
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}))
		took := c.answers(ctx, was.Status.PodIP).Sub(begin)
		if c.seeReady(ctx); c.err != nil {
			return 0, c.err
		}
		if err := n.Boot(ctx); err != nil {
			return 0, err
		}
		return took.Seconds(), c.WaitReady(ctx, n)
	})
	if err != nil {
		return nil, err
	}
	return []table.Row{{
		What: "node off, its Node deleted -> its pod answers elsewhere", Against: "the pod deleted by force before",
		Goal: table.AtMost(3), Figure: measured(" s", median, times[ours]), Detail: extent("%.2f s", times[ours]),
	}}, nil
}

// requests counts the requests that are meant, by what they are.
func requests(all []write, meant func(write) bool) (sum int, detail map[string]int) {
	detail = map[string]int{}
	for _, one := range all {
		if meant(one) {
			sum++
			detail[one.what()]++
		}
	}
	return sum, detail
}

// atAnyTime are resources that the controllers read again from time to time, whatever happens.
var atAnyTime = []string{"", "selfsubjectaccessreviews", "validatingadmissionpolicies",
	"validatingadmissionpolicybindings", "mutatingadmissionpolicybindings", "ippools", "ipreservations", "ipamconfigs",
	"clusterinformations", "servicecidrs"}

// callsRow says how many requests the controllers have made for each of n re-creations since an offset of the audit
// log. What they ask for at any time is left out, as are their Lease and the mark of the PodIPAudit, which is read
// before it is written.
func (c *inCalico) callsRow(ctx context.Context, offset int64, n int, against string) (table.Row, error) {
	if err := sleep(ctx, afterwards); err != nil { // the status of the last one
		return table.Row{}, err
	}
	all, _, err := c.audit(offset)
	sum, detail := requests(all, func(w write) bool {
		o := w.ObjectRef
		return !slices.Contains(atAnyTime, o.Resource) && o.Resource != "events" && o.Namespace != lab.SystemNamespace &&
			w.Verb != "watch"
	})
	const mark, read = "update podipaudits", "get podipaudits"
	sum -= 2 * detail[mark]
	detail[read] -= detail[mark]
	delete(detail, mark)
	return table.Row{
		What: "API calls per re-creation", Against: against, Goal: table.AtMost(5), Detail: spell(detail, n),
		Figure: table.Figure{Value: float64(sum) / float64(n), Unit: " calls", N: n},
	}, err
}

// measureRest counts the requests of the controllers while nothing happens.
func (c *inCalico) measureRest(ctx context.Context, _ *bench) ([]table.Row, error) {
	err := c.keepMany(ctx, stayputv1alpha1.ModeCalico, netip.MustParseAddr(calicoKept), calicoPodIPs, c.third.Name)
	if err != nil {
		return nil, err
	}
	if err := sleep(ctx, 30*time.Second); err != nil { // they have been reviewed
		return nil, err
	}
	_, offset, err := c.audit(0)
	if err != nil {
		return nil, err
	}
	say("calico: at rest for %v", calicoRest)
	if err := sleep(ctx, calicoRest); err != nil {
		return nil, err
	}
	all, _, err := c.audit(offset)
	about := func(w write) bool { return strings.Contains(w.URI, "projectcalico.org") }
	sum, detail := requests(all, about)
	others, more := requests(all, func(w write) bool { return !about(w) })
	return []table.Row{
		{
			What: fmt.Sprintf("API calls about Calico in %v at rest", calicoRest), Goal: table.AtMost(0),
			Against: fmt.Sprintf("%d PodIPs that are kept", calicoPodIPs), Detail: spell(detail, 1),
			Figure: table.Figure{Value: float64(sum), Unit: " calls", N: 1},
		},
		{
			What: "  others", Against: "as without the pool", Detail: spell(more, 1),
			Figure: table.Figure{Value: float64(others), Unit: " calls", N: 1},
		},
	}, err
}

// measureCrowd compares the pods of two StatefulSets, each deleted at once: those of one keep their addresses.
func (c *inCalico) measureCrowd(ctx context.Context, b *bench) ([]table.Row, error) {
	for _, n := range c.Nodes {
		if err := c.cordon(ctx, n, false); err != nil {
			return nil, err
		}
	}
	var again []func() (float64, error)
	var used [2][]float64
	var same [2]int
	for i, annotations := range []map[string]string{pooled, nil} {
		namespace := []string{"kept", "plain"}[i]
		if err := c.namespace(ctx, namespace); err != nil {
			return nil, err
		}
		f, err := c.follow(ctx, namespace)
		if err != nil {
			return nil, err
		}
		set := lab.Workload{Name: "web", Replicas: calicoCrowd, Annotations: annotations}.StatefulSet(namespace)
		if err := c.world.client.Create(ctx, set); err != nil {
			return nil, err
		}
		if _, err := f.allReady(ctx, calicoCrowd, nil); err != nil {
			return nil, err
		}
		again = append(again, func() (float64, error) {
			idle, err := usageOfAll()
			before, begin := maps.Clone(f.ready), time.Now()
			if err := errors.Join(err, c.deleteAll(ctx, namespace, before)); err != nil {
				return 0, err
			}
			at, err := f.allReady(ctx, calicoCrowd, before)
			if err != nil {
				return 0, err
			}
			if err := sleep(ctx, 2*afterwards); err != nil { // late DELs, and what is said of the new pods
				return 0, err
			}
			all, err := usageOfAll()
			used[i] = append(used[i], all.sub(idle).sum()/calicoCrowd)
			_, ips, _ := kept(before, f.ready)
			same[i] += ips
			say("calico: %s: again in %.1f s, load %s", namespace, at.Sub(begin).Seconds(), table.Load())
			return at.Sub(begin).Seconds(), err
		})
	}
	if err := sleep(ctx, 2*afterwards); err != nil {
		return nil, err
	}
	_, offset, err := c.audit(0)
	if err != nil {
		return nil, err
	}
	times, err := turns(ctx, "calico: crowd", b.times(5), again...)
	if err != nil {
		return nil, err
	}
	n := len(times[ours]) * calicoCrowd
	calls, err := c.callsRow(ctx, offset, n, fmt.Sprintf("%d at once", calicoCrowd))
	const against = "pods that keep none, in turns"
	return []table.Row{
		{
			What: fmt.Sprintf("%d pods of a pool in Calico's IPAM deleted at once -> Ready", calicoCrowd), Against: against,
			Goal: table.AtMost(1.1), Figure: measured("", ratio, times...),
			Detail: extent(seconds, times[ours]) + " / " + extent(seconds, times[stock]),
		},
		{
			What: "  CPU time of all programs", Against: against, Figure: measured("", ratio, used[ours], used[stock]),
			Detail: "ms for each pod: " + extent("%.0f", used[ours]) + " / " + extent("%.0f", used[stock]),
		},
		{
			What: "  with the IP kept", Against: "all of them", Goal: table.AtLeast(100),
			Figure: table.Figure{Value: float64(same[ours]) / float64(n) * 100, Unit: " %", N: n},
			Detail: fmt.Sprintf("%d of %d, of those that keep none %d", same[ours], n, same[stock]),
		},
		calls,
	}, err
}
