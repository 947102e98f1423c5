package cluster

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestPodsComeHomeAfterAPowerLossOfTheirNode(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 2, Annotations: retain("10m", "stayput.io/home-wait", "5m"),
	})
	was := before["web-0"]
	node := c.Node(was.Spec.NodeName)
	hasty := startedOn(t, c, ns, node.Name, lab.Workload{
		Name: "hasty", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait", "5s"),
	})
	must.Do(t, node.PowerLoss())
	must.Do(t, c.WaitNotReady(testContext(t), node))
	// The pods are deleted by force, as an operator would; the successor of web-0 must not start elsewhere.
	now := int64(0)
	for _, name := range []string{"web-0", "hasty-0"} {
		must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}
	waitsFor(t, c, was, "is not Ready")
	waitsFor(t, c, hasty, "is not Ready")
	wentElsewhere(t, c, hasty, "is not Ready")
	if pod := getPod(t, c, ns, "web-0"); !isGated(pod) {
		t.Errorf("web-0 no longer waits and is on %q", pod.Spec.NodeName)
	}
	must.Do(t, node.Boot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), node))
	after := successor(t, c, was)
	cameHome(t, map[string]*corev1.Pod{"web-0": was}, map[string]*corev1.Pod{"web-0": after})
}

func TestPodsDoNotWaitForADeletedNode(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	// Without a kubelet, a deleted node does not come back.
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait", "retention"),
	})["web-0"]
	node := c.Node(before.Spec.NodeName)
	must.Do(t, node.Kubelet.Stop())
	kubectl(t, c, "delete", "node", node.Name)
	start := once(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		must.Do(t, node.Kubelet.Start(ctx)) // it registers the node again
		must.Do(t, c.WaitReady(ctx, node))
	})
	t.Cleanup(start)
	now := int64(0)
	// It fails if the garbage collector was faster.
	_ = c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-0", metav1.DeleteOptions{GracePeriodSeconds: &now})
	after := successor(t, c, before)
	if after.Spec.NodeName == node.Name {
		t.Errorf("it is on the deleted node")
	}
	message := saysOf(t, c, ns, "Pod", "web-0", "HomeGivenUp")
	if !strings.Contains(message, node.Name+", no longer exists") {
		t.Errorf("the Event says %q", message)
	}
	// Until its agent knows the new Node, what it publishes is the deleted one's, and goes with it.
	start()
	is, err := c.Client().CoreV1().Nodes().Get(testContext(t), node.Name, metav1.GetOptions{})
	must.Do(t, err)
	shows(t, c, ns, "web-0", node.Name, "the new Node's", func(r *v1alpha1.RetainedIP) bool {
		return len(r.OwnerReferences) == 1 && r.OwnerReferences[0].UID == is.UID
	})
}

func TestWithoutTheControllerGatedPodsWaitAndAllOthersStart(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: retain("10m")})
	for _, pod := range before { // a node is a home once a controller has seen the pod there
		shows(t, c, ns, pod.Name, pod.Spec.NodeName, "to be a home", func(r *v1alpha1.RetainedIP) bool {
			return r.Spec.Scheduled != ""
		})
	}
	must.Do(t, c.Controllers.Stop(testContext(t)))
	start := onceStarted(t, c)
	defer start()
	deletePods(t, c, ns, "web")
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 2})
	places(t, c, ns, "plain", 2, nil)
	for name, was := range before {
		until(t, "a gated "+name, func(context.Context) bool {
			pod := getPod(t, c, ns, name)
			return pod != nil && pod.UID != was.UID && isGated(pod) && pod.Spec.NodeName == ""
		})
	}
	start()
	cameHome(t, before, places(t, c, ns, "web", 3, before))
}

func TestControllersKilledInTurnDuringARolloutLoseNothing(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("10m")})
	kubectl(t, c, "set", "env", "statefulset/web", "ROLLED=yes", "-n", ns)
	for i := range 4 {
		must.Do(t, c.Controllers.KillOne(testContext(t), i%2))
		time.Sleep(2 * time.Second) // the other one leads meanwhile, or is about to
		must.Do(t, c.Controllers.WaitReady(testContext(t)))
	}
	cameHome(t, before, places(t, c, ns, "web", 6, before))
	noneGated(t, c)
}

func TestAnAPIServerRestartDuringReplacementsLosesNothing(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 4, Annotations: retain("10m")})
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 2, Own: requiresNode})
	recorded := places(t, c, ns, "plain", 2, nil)
	until(t, "both pods to be recorded", func(context.Context) bool {
		return kubectl(t, c, "get", "persistentpodstate", "plain", "-n", ns, "-o", "jsonpath={.status.recorded}",
			"--ignore-not-found") == "2"
	})
	until(t, "pods to be gated for their record", func(ctx context.Context) bool {
		pod, err := c.Client().CoreV1().Pods(ns).Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "probe", OwnerReferences: recorded["plain-0"].OwnerReferences},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
		}, metav1.CreateOptions{DryRun: []string{"All"}})
		return err == nil && isGated(pod)
	})
	deletePods(t, c, ns, "web")
	deletePods(t, c, ns, "plain")
	must.Do(t, c.APIServer.Kill())
	time.Sleep(11 * time.Second) // so that the leader gives up renewing its lease, and restarts
	must.Do(t, c.APIServer.Start(testContext(t)))
	cameHome(t, before, places(t, c, ns, "web", 4, before))
	sameNodes(t, recorded, places(t, c, ns, "plain", 2, recorded))
	noneGated(t, c)
}

func TestUngateAllUngatesEveryPod(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	must.Do(t, c.Controllers.Stop(testContext(t)))
	defer onceStarted(t, c)()
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 3, Annotations: retain("10m"),
		Pod: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: "example.com/other"}}},
	})
	deploy(t, c, ns, lab.Workload{Name: "free", Replicas: 3, Annotations: retain("10m")})
	gated := func(name string) bool {
		pod := getPod(t, c, ns, name)
		return pod != nil && isGated(pod)
	}
	until(t, "gated pods", func(context.Context) bool {
		for i := range 3 {
			if !gated(fmt.Sprintf("web-%d", i)) || !gated(fmt.Sprintf("free-%d", i)) {
				return false
			}
		}
		return true
	})
	out := runController(t, c, "ungate", "--all")
	if n := strings.Count(out, "ungated"); n != 6 {
		t.Errorf("the output is\n%s", out)
	}
	places(t, c, ns, "free", 3, nil)
	for i := range 3 { // other gates stay
		if pod := getPod(t, c, ns, fmt.Sprintf("web-%d", i)); len(pod.Spec.SchedulingGates) != 1 ||
			pod.Spec.SchedulingGates[0].Name != "example.com/other" {
			t.Errorf("%s has the gates %v", pod.Name, pod.Spec.SchedulingGates)
		}
	}
}

// runController runs stayput-controller to its end with the controllers' account, and returns its output.
func runController(t *testing.T, c *lab.Cluster, args ...string) string {
	t.Helper()
	deployment, err := c.Client().AppsV1().Deployments(lab.SystemNamespace).Get(testContext(t), "stayput-controller",
		metav1.GetOptions{})
	must.Do(t, err)
	spec := deployment.Spec.Template.Spec
	spec.Containers[0].Args, spec.Containers[0].ReadinessProbe, spec.Containers[0].LivenessProbe = args, nil, nil
	spec.RestartPolicy = corev1.RestartPolicyNever
	pods := c.Client().CoreV1().Pods(lab.SystemNamespace)
	pod, err := pods.Create(testContext(t), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "run-"}, Spec: spec},
		metav1.CreateOptions{})
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, pods.Delete(context.Background(), pod.Name, metav1.DeleteOptions{})) })
	until(t, "stayput-controller "+strings.Join(args, " ")+" to end", func(ctx context.Context) bool {
		pod, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		return err == nil && (pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed)
	})
	out := kubectl(t, c, "logs", pod.Name, "-n", lab.SystemNamespace)
	if pod, err := pods.Get(testContext(t), pod.Name, metav1.GetOptions{}); err != nil ||
		pod.Status.Phase != corev1.PodSucceeded {
		t.Fatalf("stayput-controller %v failed: %v\n%s", args, err, out)
	}
	return out
}

func TestAPodReplacedBeforeItsAddressIsPublishedComesHome(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	// Agents publish an address at about the time when the pod's status has it; without agents, it is not published.
	for _, node := range []string{"node-1", "node-2"} {
		must.Do(t, c.Node(node).Agent.Stop(testContext(t)))
	}
	start := once(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		for _, node := range []string{"node-1", "node-2"} {
			must.Do(t, c.Node(node).Agent.Start(ctx))
		}
	})
	t.Cleanup(start)
	kubectl(t, c, "cordon", "node-3")
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 4, Annotations: retain("10m")})
	names := []string{"web-0", "web-1", "web-2", "web-3"}
	for _, name := range names {
		until(t, name+" to have a node", func(context.Context) bool {
			pod := getPod(t, c, ns, name)
			return pod != nil && pod.Spec.NodeName != ""
		})
	}
	kubectl(t, c, "uncordon", "node-3") // now the emptiest node
	before := map[string]*corev1.Pod{}
	for round := range 4 {
		after := map[string]*corev1.Pod{}
		for _, name := range names {
			// As soon as it has an address, Ready or not.
			until(t, "an address of another "+name, func(context.Context) bool {
				pod := getPod(t, c, ns, name)
				after[name] = pod
				return pod != nil && pod.Status.PodIP != "" && (before[name] == nil || pod.UID != before[name].UID)
			})
			if was := before[name]; was != nil {
				cameHome(t, map[string]*corev1.Pod{name: was}, after)
			}
			var published v1alpha1.RetainedIPList
			must.Do(t, typed(t, c).List(testContext(t), &published, client.InNamespace(ns)))
			if len(published.Items) > 0 {
				t.Fatalf("the test is wrong: %s is published", published.Items[0].Name)
			}
			if round < 3 {
				now, uid := int64(0), after[name].UID
				must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), name, metav1.DeleteOptions{
					GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &uid},
				}))
			}
		}
		before = after
	}
	start()
	for name, pod := range before {
		shows(t, c, ns, name, pod.Spec.NodeName, "bound to the last pod", func(r *v1alpha1.RetainedIP) bool {
			return boundTo(pod)(r) && r.Status.IPs[0] == pod.Status.PodIP
		})
	}
}

// As a prune of Argo CD does, or a restore from a backup.
func TestAnInstallationDeletedForAMomentEndsNoPromise(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 4, Annotations: retain("10m")})
	owned := tilted(t, c, ns, lab.Workload{
		Name: "owned", Replicas: 2, Annotations: retain("while-owned", "stayput.io/when-scaled", "Retain"),
	})
	deploy(t, c, ns, lab.Workload{Name: "recorded", Replicas: 1, Own: requiresNode})
	gated := func(context.Context) bool { return gates(t, c, ns, "StatefulSet.apps.recorded") }
	until(t, "recorded pods to be gated", gated)
	scale(t, c, ns, "web", 0)
	scale(t, c, ns, "owned", 0)
	maps.Copy(before, owned)
	kept, files := map[string]*v1alpha1.RetainedIP{}, map[string]string{}
	for name, pod := range before {
		kept[name] = shows(t, c, ns, name, pod.Spec.NodeName, "retained", retained)
		files[name], _ = addressFile(t, c.Node(pod.Spec.NodeName), kept[name])
	}

	configMaps := c.Client().CoreV1().ConfigMaps(lab.SystemNamespace)
	deleted, err := configMaps.Get(testContext(t), installation.ConfigMap, metav1.GetOptions{})
	must.Do(t, err)
	must.Do(t, configMaps.Delete(testContext(t), deleted.Name, metav1.DeleteOptions{}))
	putBack := once(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		deleted.UID, deleted.ResourceVersion = "", ""
		_, err := configMaps.Create(ctx, deleted, metav1.CreateOptions{})
		must.Do(t, err)
		must.Do(t, c.WaitInstalled(ctx))
	})
	defer putBack()
	// Nor is it missed by those that end and start meanwhile.
	must.Do(t, c.Controllers.Restart(testContext(t)))
	for _, n := range c.Nodes {
		must.Do(t, n.Agent.Stop(testContext(t)))
		must.Do(t, n.Agent.Start(testContext(t)))
	}
	scale(t, c, ns, "owned", 2)
	after := places(t, c, ns, "owned", 2, nil)
	cameHome(t, owned, after)
	deploy(t, c, ns, lab.Workload{Name: "guest", Replicas: 6})
	guests := places(t, c, ns, "guest", 6, nil)
	putBack()

	for name, pod := range before {
		if owned[name] != nil {
			continue
		}
		if is, _ := addressFile(t, c.Node(pod.Spec.NodeName), kept[name]); is != files[name] {
			t.Errorf("the address file of %s was %q and is %q", name, files[name], is)
		}
		if r := retainedIP(t, c, ns, name, pod.Spec.NodeName); r == nil || r.UID != kept[name].UID || !retained(r) {
			t.Errorf("the RetainedIP of %s is %+v", name, r)
		}
	}
	scale(t, c, ns, "web", 4)
	maps.Copy(after, places(t, c, ns, "web", 4, nil))
	cameHome(t, before, after)
	untouched(t, c, guests)
	unique(t, c)
	until(t, "recorded pods to be gated", gated)
	if r, code := checked(t, c); code != 0 {
		t.Errorf("check says %+v", r)
	}
}

func TestPodsComeHomeAfterAKubeletRestartAndCrashedContainersStay(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 4, Annotations: retain("10m")})
	node := c.Node(before["web-0"].Spec.NodeName)
	must.Do(t, node.KillContainer(testContext(t), before["web-0"], "web"))
	crashed := before["web-0"]
	until(t, "web-0 to be Ready again", func(context.Context) bool {
		crashed = getPod(t, c, ns, "web-0")
		return lab.Ready(crashed) && crashed.Status.ContainerStatuses[0].RestartCount == 1
	})
	if crashed.UID != before["web-0"].UID {
		t.Error("the pod was replaced")
	}
	cameHome(t, map[string]*corev1.Pod{"web-0": before["web-0"]}, map[string]*corev1.Pod{"web-0": crashed})

	sandboxes := map[string]string{}
	for name, pod := range before {
		sandboxes[name] = sandbox(t, c, pod).ID
	}
	// The kubelet is killed while it stops a pod.
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-0", metav1.DeleteOptions{}))
	must.Do(t, node.Kubelet.Kill())
	if was := getPod(t, c, ns, "web-0"); was == nil || was.UID != before["web-0"].UID {
		t.Fatal("the test is wrong: the pod is gone already")
	}
	must.Do(t, node.Kubelet.Start(testContext(t)))
	after := map[string]*corev1.Pod{"web-0": successor(t, c, before["web-0"])}
	for _, name := range []string{"web-1", "web-2", "web-3"} {
		after[name] = ready(t, c, ns, name)
		if after[name].UID != before[name].UID || after[name].Status.ContainerStatuses[0].RestartCount != 0 ||
			sandbox(t, c, after[name]).ID != sandboxes[name] {
			t.Errorf("%s was replaced or restarted: %+v", name, after[name].Status)
		}
	}
	cameHome(t, before, after)
}

// startedOn starts the only pod of a StatefulSet on a node without pinning it there.
func startedOn(t *testing.T, c *lab.Cluster, ns, node string, w lab.Workload) *corev1.Pod {
	t.Helper()
	for _, n := range c.Nodes {
		if n.Name != node {
			kubectl(t, c, "cordon", n.Name)
			defer kubectl(t, c, "uncordon", n.Name)
		}
	}
	deploy(t, c, ns, w)
	return ready(t, c, ns, w.Name+"-0")
}
