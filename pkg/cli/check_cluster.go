package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/installation"
)

// reinstall is what to do if a part of the installation is missing.
const reinstall = "apply Stayput's manifests or Helm chart again"

// asInstalled is what the installation's ConfigMap says of itself.
type asInstalled struct {
	nodesOnly bool   // without agents, on purpose
	gate      string // the chart's gate.mechanism, empty if not by the chart
}

// howInstalled reads that ConfigMap. The error is ErrNotInstalled if the namespace has neither it nor the controllers'
// Deployment. What is only partly there is for the checks, and what cannot be read, too.
func howInstalled(ctx context.Context, k client.Client, namespace string) (asInstalled, error) {
	var of corev1.ConfigMap
	err := k.Get(ctx, types.NamespacedName{Namespace: namespace, Name: installation.ConfigMap}, &of)
	if apierrors.IsNotFound(err) {
		return asInstalled{}, notInstalled(ctx, k, namespace)
	}
	return asInstalled{nodesOnly: of.Data["agents"] == "false", gate: of.Data["gate"]}, err
}

// notInstalled says that a namespace without the installation's ConfigMap has no Stayput, nil if it has a part of it.
func notInstalled(ctx context.Context, k client.Client, namespace string) error {
	err := k.Get(ctx, types.NamespacedName{Namespace: namespace, Name: controllerDeployment}, &appsv1.Deployment{})
	if !apierrors.IsNotFound(err) {
		return nil
	}
	var all corev1.ConfigMapList
	if k.List(ctx, &all, client.MatchingFields{"metadata.name": installation.ConfigMap}) == nil && len(all.Items) > 0 {
		return fmt.Errorf("%w's namespace %s: set --stayput-namespace=%s", ErrNotInstalled, namespace,
			all.Items[0].Namespace)
	}
	if _, err := definition(ctx, k, "retainedips.stayput.io"); err == nil {
		return fmt.Errorf("%w any more: its definitions and what they keep are left, as after an uninstallation. "+
			"If it is in another namespace than %s, set --stayput-namespace", ErrNotInstalled, namespace)
	}
	return fmt.Errorf("%w: kubectl stayput check --preflight reports what would work here", ErrNotInstalled)
}

// checkCluster checks what Stayput has in the cluster. now is the API server's time.
func checkCluster(ctx context.Context, k client.Client, namespace string, now time.Time, is asInstalled) []Finding {
	policies := checkPolicies(ctx, k, namespace, is)
	gates := !is.nodesOnly && is.gate != "Template" && namespace != metav1.NamespaceDefault && // its pods never are
		!slices.ContainsFunc(policies, func(f Finding) bool { return f.Level == LevelFail })
	if gates {
		policies = append(policies, tryGate(ctx, k)...)
	}
	return slices.Concat(
		checkDefinitions(ctx, k), policies, checkLeader(ctx, k, namespace, now),
		checkPending(ctx, k, now), checkPools(ctx, k, now),
	)
}

func definition(ctx context.Context, k client.Client, name string) (*unstructured.Unstructured, error) {
	o := object("apiextensions.k8s.io/v1", "CustomResourceDefinition")
	return o, k.Get(ctx, types.NamespacedName{Name: name}, o)
}

// object returns an object of a kind to read into.
func object(apiVersion, kind string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetAPIVersion(apiVersion)
	o.SetKind(kind)
	return o
}

func checkDefinitions(ctx context.Context, k client.Client) []Finding {
	f := findings{check: "definitions"}
	for _, crd := range []struct {
		name    string
		missing Level
	}{{"retainedips.stayput.io", LevelFail}, {"persistentpodstates.apps.kruise.io", LevelWarn}} {
		switch o, err := definition(ctx, k, crd.name); {
		case apierrors.IsNotFound(err):
			f.add(crd.missing, "CustomResourceDefinition "+crd.name+" is missing", reinstall)
		case err != nil:
			f.unread(err)
		case !conditionTrue(o, "Established"):
			f.add(crd.missing, "CustomResourceDefinition "+crd.name+" is not established",
				"kubectl describe crd "+crd.name+" says why")
		}
	}
	return f.orOK("the CustomResourceDefinitions are established")
}

func conditionTrue(o *unstructured.Unstructured, kind string) bool {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, ok := c.(map[string]any)
		return ok && m["type"] == kind && m["status"] == "True"
	})
}

// controllerDeployment is the workload of the controllers.
const controllerDeployment = "stayput-controller"

// argument returns the value that a pod's programs are given for a flag, empty if the flag has none.
func argument(pod *corev1.PodSpec, flag string) (value string, there bool) {
	for i := range pod.Containers {
		for _, a := range pod.Containers[i].Args {
			if name, value, _ := strings.Cut(a, "="); name == "--"+flag {
				return value, true
			}
		}
	}
	return "", false
}

func checkLeader(ctx context.Context, k client.Client, namespace string, now time.Time) []Finding {
	f := findings{check: "controller"}
	var lease coordinationv1.Lease
	err := k.Get(ctx, types.NamespacedName{Namespace: namespace, Name: home.LeaseName}, &lease)
	todo := fmt.Sprintf("see kubectl -n %s get pods -l %s=controller. "+
		"Until a controller is elected, new annotated pods stay gated", namespace, labelComponent)
	switch {
	case apierrors.IsNotFound(err):
		f.fail(fmt.Sprintf("no controller has been elected yet: lease %s/%s does not exist", namespace, home.LeaseName),
			todo+". If Stayput is in another namespace, set --stayput-namespace")
		return f.all
	case err != nil:
		return f.unread(err)
	}
	if why := staleLease(&lease, now); why != "" {
		f.fail("no controller is the leader: "+why, todo)
		return f.all
	}
	leader, _, _ := home.LeaderOf(*lease.Spec.HolderIdentity)
	return f.orOK(leader + " is the leader")
}

// staleLease returns why no controller leads, empty if one does.
func staleLease(l *coordinationv1.Lease, now time.Time) string {
	holder := ""
	if l.Spec.HolderIdentity != nil {
		holder = *l.Spec.HolderIdentity
	}
	if holder == "" || l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
		return fmt.Sprintf("lease %s/%s has no holder", l.Namespace, l.Name)
	}
	// Twice the duration, because the holder's clock may differ from ours.
	if age := now.Sub(l.Spec.RenewTime.Time); age > 2*time.Duration(*l.Spec.LeaseDurationSeconds)*time.Second {
		return fmt.Sprintf("%s last renewed lease %s/%s %s ago",
			holder, l.Namespace, l.Name, duration.HumanDuration(age))
	}
	return ""
}

// gateSlack is how long after its home-wait a pod may still be gated: the controller may have changed meanwhile.
const gateSlack = 30 * time.Second

// checkPending finds the pods that wait too long to be placed, and those that their nodes cannot start.
func checkPending(ctx context.Context, k client.Client, now time.Time) []Finding {
	var pods corev1.PodList
	if err := k.List(ctx, &pods, client.MatchingFields{"status.phase": string(corev1.PodPending)}); err != nil {
		return (&findings{check: "gated pods"}).unread(err)
	}
	return slices.Concat(checkGated(pods, now), checkAskedPools(ctx, k, pods), checkSandboxes(ctx, k, pods, now))
}

// sandboxSlack is how long the sandbox of a pod may fail: a predecessor's end, or an agent's word, is waited for.
const sandboxSlack = time.Minute

// checkSandboxes finds the pods whose sandboxes kubelet cannot make, by its Events: their network may be what fails.
func checkSandboxes(ctx context.Context, k client.Client, pods corev1.PodList, now time.Time) []Finding {
	f := findings{check: "pod sandboxes"}
	starting := slices.DeleteFunc(slices.Clone(pods.Items), func(p corev1.Pod) bool {
		return p.Status.StartTime == nil || p.DeletionTimestamp != nil || now.Sub(p.Status.StartTime.Time) < sandboxSlack ||
			slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionTrue
			})
	})
	if len(starting) == 0 {
		return nil
	}
	var events corev1.EventList
	if err := k.List(ctx, &events, client.MatchingFields{"reason": "FailedCreatePodSandBox"}); err != nil {
		return f.unread(err)
	}
	last := map[types.UID]*corev1.Event{} // each try has an Event of its own, since its text names the sandbox
	for i := range events.Items {
		e := &events.Items[i]
		if was := last[e.InvolvedObject.UID]; was == nil || happened(was).Before(happened(e)) {
			last[e.InvolvedObject.UID] = e
		}
	}
	for _, p := range starting {
		if e := last[p.UID]; e != nil {
			f.fail(fmt.Sprintf("pod %s/%s on %s has not started for %s: %s", p.Namespace, p.Name, p.Spec.NodeName,
				duration.HumanDuration(now.Sub(p.Status.StartTime.Time)), e.Message),
				fmt.Sprintf("kubectl -n %s describe pod %s shows all of its Events", p.Namespace, p.Name))
		}
	}
	return f.all
}

func checkGated(pods corev1.PodList, now time.Time) []Finding {
	f := findings{check: "gated pods"}
	waiting := 0
	for i := range pods.Items {
		p := &pods.Items[i]
		if !home.Gated(p) || p.DeletionTimestamp != nil {
			continue
		}
		waiting++
		wait, whileKept, _ := home.Wait(p.Annotations) // of an invalid value it is the default
		if age := now.Sub(p.CreationTimestamp.Time); !whileKept && age > wait+gateSlack {
			f.fail(fmt.Sprintf("pod %s/%s has been gated for %s, longer than its home-wait of %s",
				p.Namespace, p.Name, duration.HumanDuration(age), duration.HumanDuration(wait)),
				fmt.Sprintf("kubectl stayput why %s -n %s says what it waits for", p.Name, p.Namespace))
		}
	}
	if waiting == 0 {
		return f.orOK("no pod is waiting for placement")
	}
	return f.orOK(count(waiting, "pod is waiting", "pods are waiting") + " for placement, within the home-wait")
}

func compareVersions(all []looked) []Finding {
	nodes := map[string][]string{}
	for _, l := range all {
		if l.is != nil {
			nodes[l.is.Version] = append(nodes[l.is.Version], l.node)
		}
	}
	if len(nodes) <= 1 {
		return nil
	}
	var s []string
	for _, v := range slices.Sorted(maps.Keys(nodes)) {
		s = append(s, fmt.Sprintf("%s on %s", v, strings.Join(firstOf(nodes[v], 5), ", ")))
	}
	return finding("versions", LevelWarn, "agents of different versions are running: "+strings.Join(s, "; "),
		"unless an upgrade is in progress, check why the rollout of the DaemonSet stayput-agent is not complete")
}
