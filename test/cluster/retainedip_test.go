package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func apiSays(t *testing.T, n *lab.ClusterNode) string {
	t.Helper()
	for line := range strings.Lines(ask(t, n, "/readyz")) {
		if said, ok := strings.CutPrefix(line, "api: "); ok {
			return strings.TrimSpace(said)
		}
	}
	return ""
}

// promptly is how late a RetainedIP may be.
const promptly = 2 * time.Second

func TestARetainedIPShowsTheStateOfItsAddress(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	pod := ready(t, c, ns, "web-0")
	r := shows(t, c, ns, pod.Name, "node-1", "bound", bound)
	node, err := c.Client().CoreV1().Nodes().Get(testContext(t), "node-1", metav1.GetOptions{})
	must.Do(t, err)
	if len(r.OwnerReferences) != 1 || r.OwnerReferences[0].UID != node.UID ||
		r.OwnerReferences[0].BlockOwnerDeletion != nil {
		t.Errorf("owners %+v", r.OwnerReferences)
	}
	if !slices.Equal(r.Status.IPs, []string{pod.Status.PodIP}) || r.Status.PodUID != string(pod.UID) ||
		r.Status.Expires != nil || r.Status.Since == nil {
		t.Errorf("status %+v", r.Status)
	}
	r.Spec.Workload, r.Spec.Scheduled = nil, "" // the controller writes them when it comes to it
	if (r.Spec != v1alpha1.RetainedIPSpec{
		NodeName: "node-1", PodName: "web-0", Retention: "10m", WhenScaled: "Retain", WhenDeleted: "Retain",
		WhenMoved: "Retain",
	}) {
		t.Errorf("spec %+v", r.Spec)
	}

	// Bound -> Retained, timed from the pod's end in the API server.
	scale(t, c, ns, "web", 0)
	until(t, "the pod to be gone", func(context.Context) bool { return getPod(t, c, ns, "web-0") == nil })
	ended := time.Now()
	r = shows(t, c, ns, pod.Name, "node-1", "retained", retained)
	if late := time.Since(ended); late > promptly {
		t.Errorf("the object shows Retained %s after the pod ended", late)
	}
	if r.Status.Expires == nil {
		t.Fatalf("status %+v", r.Status)
	}
	left := r.Status.Expires.Sub(r.Status.Since.Time)
	if left < 10*time.Minute-2*time.Second || left > 10*time.Minute+2*time.Second {
		t.Errorf("since %s, expires %s", r.Status.Since, r.Status.Expires)
	}
	if !slices.Equal(r.Status.IPs, []string{pod.Status.PodIP}) || r.Status.PodUID != string(pod.UID) {
		t.Errorf("status %+v", r.Status)
	}
	line := kubectl(t, c, "get", "retip", "-n", ns, "--no-headers")
	if f := strings.Fields(line); len(f) != 6 || f[1] != pod.Status.PodIP || f[2] != "node-1" || f[3] != "Retained" ||
		f[4] != r.Status.Expires.UTC().Format(time.RFC3339) {
		t.Errorf("kubectl get retip prints %q", line)
	}

	// Retained -> Bound.
	scale(t, c, ns, "web", 1)
	again := ready(t, c, ns, "web-0")
	was := time.Now()
	shows(t, c, ns, pod.Name, "node-1", "bound to the new pod", boundTo(again))
	if late := time.Since(was); late > promptly {
		t.Errorf("the object shows Bound %s after the pod was Ready", late)
	}
	if again.Status.PodIP != pod.Status.PodIP {
		t.Errorf("the pod had %s and has %s", pod.Status.PodIP, again.Status.PodIP)
	}
}

func TestAnExpiredRetentionTakesItsObjectWithIt(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("5s"), Node: "node-1"})
	r := stopped(t, c, ready(t, c, ns, "web-0"))
	vanishes(t, c, r)
	freed(t, c.Node("node-1"), r)
	if message := saysOf(t, c, ns, "RetainedIP", r.Name, "IPExpired"); !strings.Contains(message, r.Status.IPs[0]) {
		t.Errorf("the Event says %q", message)
	}
}

func TestReleaseFreesARetainedAddress(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("while-owned", "stayput.io/when-scaled", "Retain"), Node: "node-1",
	})
	r := stopped(t, c, ready(t, c, ns, "web-0"))
	// The chart's longest retention bounds it.
	if r.Status.Expires == nil || r.Spec.Retention != v1alpha1.RetentionWhileOwned ||
		r.Spec.WhenDeleted != "Release" {
		t.Errorf("%+v %+v", r.Spec, r.Status)
	}
	setRelease(t, c, r)
	vanishes(t, c, r)
	freed(t, c.Node("node-1"), r)
	if message := saysOf(t, c, ns, "RetainedIP", r.Name, "IPReleased"); !strings.Contains(message, r.Status.IPs[0]) {
		t.Errorf("the Event says %q", message)
	}
}

func TestReleaseLeavesARunningPodItsAddressUntilItEnds(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	pod := ready(t, c, ns, "web-0")
	r := shows(t, c, ns, pod.Name, "node-1", "bound", boundTo(pod))
	setRelease(t, c, r)
	vanishes(t, c, r)
	if _, there := addressFile(t, c.Node("node-1"), r); !there {
		t.Fatalf("%s is free under a running pod", r.Status.IPs[0])
	}
	if answer, err := c.Node("node-1").Get(testContext(t), ip(t, pod)); err != nil || answer.Name != pod.Name {
		t.Errorf("the pod answers %v, %v", answer, err)
	}
	scale(t, c, ns, "web", 0)
	freed(t, c.Node("node-1"), r)
	if again := retainedIP(t, c, ns, pod.Name, "node-1"); again != nil {
		t.Errorf("the object was published again: %+v", again.Status)
	}
}

func TestAReleaseDoesNotAffectTheNextPod(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	pod := ready(t, c, ns, "web-0")
	r := stopped(t, c, pod)
	n := c.Node("node-1")
	must.Do(t, n.Agent.Stop(testContext(t)))
	setRelease(t, c, r)
	scale(t, c, ns, "web", 1)
	again := ready(t, c, ns, "web-0")
	must.Do(t, n.Agent.Start(testContext(t)))
	fresh := shows(t, c, ns, pod.Name, "node-1", "bound to the new pod", boundTo(again))
	if fresh.UID == r.UID || fresh.Spec.Release != "" {
		t.Errorf("the object is still the released one: %+v", fresh.Spec)
	}
	if again.Status.PodIP != pod.Status.PodIP {
		t.Errorf("the pod had %s and has %s", pod.Status.PodIP, again.Status.PodIP)
	}
	if kept := stopped(t, c, again); kept.Status.IPs[0] != pod.Status.PodIP {
		t.Errorf("the pod had %s, but %v is retained", pod.Status.PodIP, kept.Status.IPs)
	}
}

func TestADeletedObjectIsPublishedAgain(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	pod := ready(t, c, ns, "web-0")
	for _, state := range []func() *v1alpha1.RetainedIP{
		func() *v1alpha1.RetainedIP { return shows(t, c, ns, pod.Name, "node-1", "bound", boundTo(pod)) },
		func() *v1alpha1.RetainedIP { return stopped(t, c, pod) },
	} {
		r := state()
		kubectl(t, c, "delete", "retip", "-n", ns, "--all")
		again := shows(t, c, ns, pod.Name, "node-1", "another one", func(is *v1alpha1.RetainedIP) bool {
			return is.Status.Phase == r.Status.Phase && is.UID != r.UID
		})
		if !slices.Equal(again.Status.IPs, r.Status.IPs) || !again.Status.Expires.Equal(r.Status.Expires) ||
			again.Status.PodUID != r.Status.PodUID {
			t.Errorf("was %+v, is %+v", r.Status, again.Status)
		}
	}
}

func TestTheObjectOfASharedIdentityFollowsTheAddress(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{
		Kind: "Deployment", Name: "front", Replicas: 1, Annotations: retain("10m", "stayput.io/identity", "front"),
		Node: "node-1", Strategy: recreate,
	})
	var has v1alpha1.RetainedIP
	hasOne := func(not string) func(context.Context) bool {
		return func(ctx context.Context) bool {
			var all v1alpha1.RetainedIPList
			if err := typed(t, c).List(ctx, &all, client.InNamespace(ns)); err != nil || len(all.Items) != 1 {
				return false
			}
			has = all.Items[0]
			return bound(&has) && has.Spec.PodName != not
		}
	}
	until(t, "the pod's RetainedIP", hasOne(""))
	was := has
	if was.Spec.Identity != "front" {
		t.Errorf("%+v", was.Spec)
	}
	kubectl(t, c, "rollout", "restart", "deployment/front", "-n", ns)
	until(t, "the next pod's RetainedIP alone", hasOne(was.Spec.PodName))
	if !slices.Equal(has.Status.IPs, was.Status.IPs) || has.Spec.Identity != "front" {
		t.Errorf("was %+v, is %+v", was.Status, has.Status)
	}
}

func TestAnObjectWithoutAnAddressInTheLedgerIsDeleted(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	network := shows(t, c, ns, "web-0", "node-1", "bound", bound).Status.Addresses[0].Network
	manifest := func(pod, network string) string {
		return fmt.Sprintf(`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: %s}, spec: {nodeName: node-1, podName: %s, retention: 10m},
			status: {phase: Retained, ips: [192.0.2.1], addresses: [{network: %s, interface: eth0, ips: [192.0.2.1]}]}}`,
			v1alpha1.RetainedIPName(pod, "node-1"), pod, network)
	}
	// Of an unknown network, the agent knows nothing, so it keeps the object.
	apply(t, c, ns, manifest("unknown", "unseen"))
	apply(t, c, ns, manifest("ghost", network))
	until(t, "the ghost to be gone", func(context.Context) bool { return retainedIP(t, c, ns, "ghost", "node-1") == nil })
	if retainedIP(t, c, ns, "unknown", "node-1") == nil {
		t.Error("the object of an unknown network was deleted")
	}
	kubectl(t, c, "delete", "retip", "-n", ns, v1alpha1.RetainedIPName("unknown", "node-1"))
}

func TestAnAgentRestartCausesNoNeedlessWrites(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: retain("10m"), Node: "node-1"})
	for _, pod := range places(t, c, ns, "web", 3, nil) {
		shows(t, c, ns, pod.Name, "node-1", "bound", boundTo(pod))
	}
	scale(t, c, ns, "web", 1)
	for _, pod := range []string{"web-1", "web-2"} {
		shows(t, c, ns, pod, "node-1", "retained", retained)
	}
	n := c.Node("node-1")
	must.Do(t, n.Agent.Stop(testContext(t)))
	since := time.Now()
	must.Do(t, n.Agent.Start(testContext(t)))
	until(t, "the agent to follow the API server", func(context.Context) bool { return apiSays(t, n) == "ok" })
	// A later change is written after any other.
	scale(t, c, ns, "web", 0)
	shows(t, c, ns, "web-0", "node-1", "retained", retained)
	change := "patch retainedips  " + v1alpha1.RetainedIPName("web-0", "node-1")
	var writes []string
	until(t, "the audit log to have the change", func(context.Context) bool {
		writes = agentWrites(t, c, ns, since)
		return slices.Contains(writes, change)
	})
	if !slices.Equal(writes, []string{change}) {
		t.Errorf("the agent wrote %q", writes)
	}
}

func TestAnAgentWritesTwiceForAReplacedPod(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 5, Annotations: retain("10m"), Node: "node-2"})
	before := places(t, c, ns, "web", 5, nil)
	for _, pod := range before {
		shows(t, c, ns, pod.Name, "node-2", "bound", boundTo(pod))
	}
	const rounds = 3
	since := time.Now()
	for range rounds {
		deletePods(t, c, ns, "web")
		before = places(t, c, ns, "web", 5, before)
		for _, pod := range before {
			shows(t, c, ns, pod.Name, "node-2", "bound", boundTo(pod))
		}
	}
	// Each pod took at least one write.
	var writes []string
	until(t, "the audit log to have the last writes", func(context.Context) bool {
		writes = agentWrites(t, c, ns, since)
		return len(writes) >= 5*rounds
	})
	if len(writes) > 2*5*rounds {
		t.Errorf("%d writes for %d replaced pods: %q", len(writes), 5*rounds, writes)
	}
	t.Logf("%d writes for %d replaced pods", len(writes), 5*rounds)
}

func TestDeletingANodeObjectLosesNoPromise(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-3"})
	n := c.Node("node-3")
	r := stopped(t, c, ready(t, c, ns, "web-0"))
	kubectl(t, c, "delete", "node", "node-3")
	vanishes(t, c, r)
	if file, there := addressFile(t, n, r); !there || !strings.HasPrefix(file, "{") {
		t.Errorf("the address file says %q", file)
	}
	must.Do(t, n.Kubelet.Restart(testContext(t))) // which registers a new Node
	must.Do(t, c.WaitReady(testContext(t), n))
	node, err := c.Client().CoreV1().Nodes().Get(testContext(t), "node-3", metav1.GetOptions{})
	must.Do(t, err)
	again := shows(t, c, ns, "web-0", "node-3", "owned by the new Node", func(is *v1alpha1.RetainedIP) bool {
		return len(is.OwnerReferences) == 1 && is.OwnerReferences[0].UID == node.UID
	})
	if !slices.Equal(again.Status.IPs, r.Status.IPs) || !again.Status.Expires.Equal(r.Status.Expires) {
		t.Errorf("was %+v, is %+v", r.Status, again.Status)
	}
}

func TestRemovingTheDefinitionLosesNoPromise(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("10m"), Node: "node-1"})
	pods := places(t, c, ns, "web", 2, nil)
	scale(t, c, ns, "web", 1)
	r := shows(t, c, ns, "web-1", "node-1", "retained", retained)
	n := c.Node("node-1")
	kubectl(t, c, "delete", "crd", "retainedips.stayput.io", "--timeout=60s")
	until(t, "the agent to say so", func(context.Context) bool { return strings.HasPrefix(apiSays(t, n), "degraded: ") })
	if _, there := addressFile(t, n, r); !there {
		t.Error("the address was freed")
	}
	_, err := c.Kubectl(testContext(t), "", "apply", "--server-side", "-f",
		"../../deploy/chart/files/crds/stayput.io_retainedips.yaml")
	must.Do(t, err)
	back := time.Now()
	shows(t, c, ns, "web-0", "node-1", "bound", boundTo(pods["web-0"]))
	again := shows(t, c, ns, "web-1", "node-1", "retained", retained)
	t.Logf("back after %s", time.Since(back).Round(100*time.Millisecond))
	if !slices.Equal(again.Status.IPs, r.Status.IPs) || !again.Status.Expires.Equal(r.Status.Expires) {
		t.Errorf("was %+v, is %+v", r.Status, again.Status)
	}
}

func TestObjectsCatchUpAfterAnAPIServerOutage(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	deploy(t, c, ns, lab.Workload{Name: "short", Replicas: 1, Annotations: retain("15s"), Node: "node-1"})
	pod := ready(t, c, ns, "web-0")
	shows(t, c, ns, pod.Name, "node-1", "bound", boundTo(pod))
	short := stopped(t, c, ready(t, c, ns, "short-0"))
	n := c.Node("node-1")

	must.Do(t, c.APIServer.Stop())
	was := sandbox(t, c, pod)
	must.Do(t, n.StopPod(testContext(t), was.ID)) // DEL, and then ADD for the same pod
	var is lab.Pod
	until(t, "another sandbox of the pod", func(ctx context.Context) bool {
		var err error
		is, err = n.Sandbox(ctx, ns, pod.Name)
		return err == nil && is.ID != was.ID
	})
	if !slices.Equal(is.IPs, was.IPs) {
		t.Errorf("the pod had %v and has %v", was.IPs, is.IPs)
	}
	freed(t, n, short)
	if said := apiSays(t, n); !strings.HasPrefix(said, "degraded: ") {
		t.Errorf("the agent reports %q for the API server", said)
	}
	must.Do(t, c.APIServer.Start(testContext(t)))
	back := time.Now()
	vanishes(t, c, short)
	t.Logf("caught up after %s", time.Since(back).Round(100*time.Millisecond))
	shows(t, c, ns, pod.Name, "node-1", "bound", boundTo(pod))
	until(t, "the agent to report no trouble", func(context.Context) bool { return apiSays(t, n) == "ok" })
}

func TestRestoringAnEtcdBackupFreesNothing(t *testing.T) {
	alone(t)
	// It has its own cluster because a kubelet does not notice that the API server went back in time.
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	c, err := startProduct(lab.ClusterOptions{Nodes: 1}, lab.InstallOptions{
		Values: map[string]any{"controller": map[string]any{"replicas": 1}},
	}, nil)
	if c != nil {
		must.Close(t, c)
	}
	must.Do(t, err)
	ns := namespace(t, c)
	n := c.Nodes[0]
	for _, name := range []string{"kept", "freed", "bound"} {
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	}
	running := ready(t, c, ns, "bound-0")
	kept := stopped(t, c, ready(t, c, ns, "kept-0"))
	given := stopped(t, c, ready(t, c, ns, "freed-0"))
	backup := filepath.Join(t.TempDir(), "etcd.db")
	must.Do(t, c.SaveEtcd(ctx, backup))

	deploy(t, c, ns, lab.Workload{Name: "later", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	later := stopped(t, c, ready(t, c, ns, "later-0"))
	setRelease(t, c, given)
	vanishes(t, c, given)
	freed(t, n, given)
	isKept := func(r *v1alpha1.RetainedIP) func(*v1alpha1.RetainedIP) bool {
		return func(is *v1alpha1.RetainedIP) bool {
			return retained(is) && slices.Equal(is.Status.IPs, r.Status.IPs) && is.Status.Expires.Equal(r.Status.Expires)
		}
	}

	must.Do(t, c.RestoreEtcd(ctx, backup)) // resource versions go back
	back := time.Now()
	again := shows(t, c, ns, "later-0", "node-1", "published again", isKept(later))
	t.Logf("published again after %s", time.Since(back).Round(100*time.Millisecond))
	if again.UID == later.UID {
		t.Error("the backup had it: this test shows nothing")
	}
	vanishes(t, c, given)
	shows(t, c, ns, "kept-0", "node-1", "retained as before", isKept(kept))
	shows(t, c, ns, "bound-0", "node-1", "bound", boundTo(running))
	for _, r := range []*v1alpha1.RetainedIP{kept, later} {
		if file, there := addressFile(t, n, r); !there || !strings.HasPrefix(file, "{") {
			t.Errorf("the address file of %s says %q", r.Spec.PodName, file)
		}
	}
	// A new release is carried out.
	setRelease(t, c, again)
	vanishes(t, c, again)
	freed(t, n, later)
}
