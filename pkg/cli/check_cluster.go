package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// reinstall is what to do where something of the installation is missing.
const reinstall = "apply the manifests or the Helm chart of stayput again"

// checkCluster looks at what stayput has in the cluster. now is the API server's time.
func checkCluster(ctx context.Context, k client.Client, namespace string, now time.Time) []Finding {
	return slices.Concat(
		checkDefinitions(ctx, k), checkPolicies(ctx, k), checkLeader(ctx, k, namespace, now), checkGated(ctx, k, now),
	)
}

func checkDefinitions(ctx context.Context, k client.Client) (all []Finding) {
	const check = "definitions"
	for _, crd := range []struct {
		name string
		miss Level
	}{{"retainedips.stayput.io", LevelFail}, {"persistentpodstates.apps.kruise.io", LevelWarn}} {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
		err := k.Get(ctx, types.NamespacedName{Name: crd.name}, o)
		switch {
		case apierrors.IsNotFound(err):
			all = append(all, Finding{crd.miss, "", check, "CustomResourceDefinition " + crd.name + " is missing", reinstall})
		case err != nil:
			all = append(all, unseen(check, err))
		case !conditionTrue(o, "Established"):
			all = append(all, Finding{crd.miss, "", check, "CustomResourceDefinition " + crd.name + " is not established", "kubectl describe crd " + crd.name + " says why"})
		}
	}
	if len(all) == 0 {
		all = append(all, Finding{LevelOK, "", check, "the CustomResourceDefinitions are established", ""})
	}
	return all
}

func conditionTrue(o *unstructured.Unstructured, kind string) bool {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, ok := c.(map[string]any)
		return ok && m["type"] == kind && m["status"] == "True"
	})
}

func checkPolicies(ctx context.Context, k client.Client) (all []Finding) {
	const check = "policies"
	get := func(kind, name string) error {
		o := &metav1.PartialObjectMetadata{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: kind})
		return k.Get(ctx, types.NamespacedName{Name: name}, o)
	}
	kruise := get("MutatingWebhookConfiguration", home.KruiseWebhooks) == nil
	for _, p := range []struct {
		kind, name, without string
		miss                Level
	}{
		{"MutatingAdmissionPolicy", home.PolicyGateAnnotated, "new pods are not gated, and go wherever the scheduler likes", LevelFail},
		{"MutatingAdmissionPolicy", home.PolicyGateRecorded, "new pods with a PersistentPodState are not gated, and go wherever the scheduler likes", LevelFail},
		{"ValidatingAdmissionPolicy", "stayput-annotations", "bad annotations are refused by nodes only", LevelWarn},
		{"ValidatingAdmissionPolicy", home.PolicyUniqueTarget, "two PersistentPodStates for one workload are not refused", LevelWarn},
		{"ValidatingAdmissionPolicy", "stayput-controller", "the controller's rights on pods are not narrowed", LevelFail},
		{"ValidatingAdmissionPolicy", "stayput-agent", "an agent may write other nodes' RetainedIPs", LevelFail},
	} {
		for _, kind := range []string{p.kind, p.kind + "Binding"} {
			err := get(kind, p.name)
			switch {
			case meta.IsNoMatchError(err):
				text := "the API server does not know " + kind + " (it is Kubernetes 1.36's): " + p.without
				todo := "write the scheduling gate " + stayputv1alpha1.PlacementGate + " into the pod templates"
				if !slices.ContainsFunc(all, func(f Finding) bool { return f.Todo == todo }) {
					all = append(all, Finding{LevelWarn, "", check, text, todo})
				}
			case apierrors.IsNotFound(err) && p.name == home.PolicyGateRecorded && kruise:
			case apierrors.IsNotFound(err):
				all = append(all, Finding{p.miss, "", check, kind + " " + p.name + " is missing: " + p.without, reinstall})
			case err != nil:
				all = append(all, unseen(check, err))
			}
		}
	}
	if len(all) == 0 {
		all = append(all, Finding{LevelOK, "", check, "the admission policies and their bindings are there", ""})
	}
	if kruise {
		all = append(all, Finding{LevelOK, "", check, "OpenKruise runs here: PersistentPodStates are left to it", ""})
	}
	return all
}

func checkLeader(ctx context.Context, k client.Client, namespace string, now time.Time) []Finding {
	const check = "controller"
	var lease coordinationv1.Lease
	err := k.Get(ctx, types.NamespacedName{Namespace: namespace, Name: home.LeaseName}, &lease)
	todo := fmt.Sprintf("kubectl -n %s get pods -l %s=controller; until one leads, new annotated pods stay gated", namespace, labelComponent)
	switch {
	case apierrors.IsNotFound(err):
		return []Finding{{LevelFail, "", check, fmt.Sprintf("no controller has ever led: there is no lease %s/%s", namespace, home.LeaseName), todo + "; --stayput-namespace says where to look"}}
	case err != nil:
		return []Finding{unseen(check, err)}
	}
	if why := staleLease(&lease, now); why != "" {
		return []Finding{{LevelFail, "", check, "no controller leads: " + why, todo}}
	}
	pod, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_") // what follows is a UID
	return []Finding{{LevelOK, "", check, pod + " leads", ""}}
}

// gateSlack is how long after its home-wait a pod may still be gated: the controller may have changed meanwhile.
const gateSlack = 30 * time.Second

func checkGated(ctx context.Context, k client.Client, now time.Time) (all []Finding) {
	const check = "gated pods"
	var pods corev1.PodList
	if err := k.List(ctx, &pods, client.MatchingFields{"status.phase": string(corev1.PodPending)}); err != nil {
		return []Finding{unseen(check, err)}
	}
	waiting := 0
	for i := range pods.Items {
		p := &pods.Items[i]
		if !home.Gated(p) || p.DeletionTimestamp != nil {
			continue
		}
		waiting++
		wait, whileKept, _ := home.Wait(p.Annotations) // of an invalid value it is the default
		if whileKept {
			continue
		}
		if age := now.Sub(p.CreationTimestamp.Time); age > wait+gateSlack {
			all = append(all, Finding{LevelFail, "", check, fmt.Sprintf("pod %s/%s has been gated for %s, longer than it was to wait (%s)", p.Namespace, p.Name, duration.HumanDuration(age), duration.HumanDuration(wait)),
				fmt.Sprintf("kubectl stayput why %s -n %s", p.Name, p.Namespace)})
		}
	}
	if len(all) > 0 {
		return all
	}
	if waiting == 0 {
		return []Finding{{LevelOK, "", check, "no pod waits for its placement", ""}}
	}
	return []Finding{{LevelOK, "", check, count(waiting, "pod", "pods") + " waiting, none longer than it was to", ""}}
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
	return []Finding{{LevelWarn, "", "versions", "agents of several versions run: " + strings.Join(s, "; "), "if no upgrade is under way, look at the DaemonSet stayput-agent"}}
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
