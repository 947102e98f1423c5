package cli

import (
	"context"
	"fmt"
	"regexp"
	"slices"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/pool"
)

const (
	// policyNominations is there only if the controller nominates homes.
	policyNominations = "stayput-nominations"
	// policyAdvice warns, and denies nothing.
	policyAdvice = "stayput-advice"
)

// policies are the admission policies, whose bindings have the same names.
var policies = []struct {
	kind, name, without string
	missing             Level
}{
	{"MutatingAdmissionPolicy", home.PolicyGateAnnotated, "new pods are not gated and can start anywhere", LevelFail},
	{"MutatingAdmissionPolicy", home.PolicyGateRecorded,
		"new pods with a PersistentPodState are not gated and can start anywhere", LevelFail},
	{"MutatingAdmissionPolicy", home.PolicyRestored,
		"a pod that is restored from a backup is pinned to the node of the original, or refused for its addresses",
		LevelWarn},
	{"ValidatingAdmissionPolicy", "stayput-annotations",
		"invalid annotations are rejected only by the node, when the pod starts", LevelWarn},
	{"ValidatingAdmissionPolicy", "stayput-addresses",
		"users other than the controller may assign addresses to pods", LevelFail},
	{"ValidatingAdmissionPolicy", "stayput-gated-workloads",
		"any ConfigMap can be labelled so that it slows down the creation of pods in its namespace", LevelWarn},
	{"ValidatingAdmissionPolicy", home.PolicyUniqueTarget, "a workload can have two PersistentPodStates", LevelWarn},
	{"ValidatingAdmissionPolicy", "stayput-controller",
		"the controller may change more fields of a pod than necessary", LevelFail},
	{"ValidatingAdmissionPolicy", policyNominations,
		"the controller may change more of a pod's status than its nominated node", LevelFail},
	{"ValidatingAdmissionPolicy", "stayput-agent", "an agent may write the RetainedIPs of other nodes", LevelFail},
	{"ValidatingAdmissionPolicy", "stayput-users",
		"users with the role edit may write all fields of a RetainedIP", LevelFail},
	{"ValidatingAdmissionPolicy", policyAdvice,
		"no warning is given of misspelt or misplaced annotations, and of pods that never come back", LevelWarn},
	{"MutatingAdmissionPolicy", home.PolicyGateDefaults,
		"new pods of namespaces with " + stayputv1alpha1.AnnotationRetainIP + " retain no addresses", LevelFail},
	{"MutatingAdmissionPolicy", home.PolicyDefaultRetention,
		"the annotation " + stayputv1alpha1.AnnotationRetainIP + " on a namespace has no effect", LevelFail},
	{"MutatingAdmissionPolicy", home.PolicyGatePools,
		"new pods of namespaces that name pools are not gated, and start without addresses of them", LevelFail},
	{"MutatingAdmissionPolicy", home.PolicyDefaultPools,
		"a pod that is created right after its namespace names pools can start without an address of them", LevelFail},
	{"ValidatingAdmissionPolicy", "stayput-agent-pools", "an agent may report pool addresses for other nodes",
		LevelFail},
	{"ValidatingAdmissionPolicy", "stayput-calico",
		"the controller may write more of Calico's IPAM than necessary", LevelFail},
	{"ValidatingAdmissionPolicy", "stayput-calico-addresses",
		"any author of a pod may take addresses of pools of mode Calico", LevelFail},
}

// The policies that are there only if a part of Stayput is, and must be then.
var (
	policiesOfPools  = []string{home.PolicyGatePools, home.PolicyDefaultPools, "stayput-agent-pools"}
	policiesOfCalico = []string{"stayput-calico", "stayput-calico-addresses"}
	policiesOfAgents = []string{home.PolicyGateAnnotated, home.PolicyGateDefaults, home.PolicyDefaultRetention,
		"stayput-agent", "stayput-agent-pools"}
)

// parts are what an installation has that needs policies of its own.
type parts struct{ agents, nominations, pools, calico, kruise bool }

// whatToDo about a policy that is missing; empty if it may be.
func (p parts) whatToDo(policy string) string {
	is := func(some []string) bool { return slices.Contains(some, policy) }
	for _, row := range []struct {
		is   bool
		todo string
	}{
		{policy == home.PolicyUniqueTarget && p.kruise, ""},
		{policy == policyNominations && !p.nominations, ""},
		{is(policiesOfAgents) && !p.agents, ""},
		{is(policiesOfCalico) && !p.calico, ""},
		{is(policiesOfCalico), calicoWanted},
		{is(policiesOfPools) && !p.pools, ""},
		{is(policiesOfPools), poolsWanted},
	} {
		if row.is {
			return row.todo
		}
	}
	return reinstall
}

// parts reads what the installation has. What cannot be read is a finding.
func (f *findings) parts(ctx context.Context, k client.Client, namespace string, is asInstalled) parts {
	nominates, err := nominatesHomes(ctx, k, namespace)
	if err != nil {
		f.unread(err)
	}
	pooled, err := pools(ctx, k)
	if err != nil {
		f.unread(err)
	}
	_, err = admission(ctx, k, "MutatingWebhookConfiguration", home.KruiseWebhooks)
	return parts{
		agents: !is.nodesOnly, nominations: nominates, pools: len(pooled) > 0, kruise: err == nil,
		calico: slices.ContainsFunc(pooled, func(o stayputv1alpha1.PodIPPool) bool {
			return o.Spec.Mode == stayputv1alpha1.ModeCalico
		}),
	}
}

func checkPolicies(ctx context.Context, k client.Client, namespace string, is asInstalled) []Finding {
	f := findings{check: "policies"}
	has := f.parts(ctx, k, namespace, is)
	gates, byPolicies := checkGate(ctx, k, is)
	for _, p := range policies {
		if !byPolicies && p.kind == "MutatingAdmissionPolicy" {
			continue
		}
		for _, kind := range []string{p.kind, p.kind + "Binding"} {
			o, err := admission(ctx, k, kind, p.name)
			todo, why := installAgain, ""
			if apierrors.IsNotFound(err) {
				todo, why = has.whatToDo(p.name), "is missing"
			} else if err != nil {
				f.unread(err)
			} else {
				why = unguarding(o, namespace)
			}
			if why != "" && todo != "" {
				f.add(p.missing, kind+" "+p.name+" "+why+": "+p.without, todo)
			}
		}
	}
	f.checkDefaults(ctx, k)
	f.orOK("all admission policies are in place")
	if has.kruise {
		f.add(LevelOK, "OpenKruise is running and serves PersistentPodStates itself", "")
	}
	return append(f.all, gates...)
}

// checkDefaults finds the namespaces that name pools without the label by which a policy gates their pods.
func (f *findings) checkDefaults(ctx context.Context, k client.Client) {
	if _, err := admission(ctx, k, "MutatingAdmissionPolicy", home.PolicyGatePools); err != nil {
		return // missing, or reported
	}
	var all corev1.NamespaceList
	if err := k.List(ctx, &all); err != nil {
		f.unread(err)
		return
	}
	for _, n := range all.Items {
		if _, ok := n.Labels[stayputv1alpha1.LabelDefaultPools]; !ok && pool.AsksByDefault(n.Annotations, true) {
			f.fail("namespace "+n.Name+" names pools, but lacks the label "+stayputv1alpha1.LabelDefaultPools+
				": its new pods start without addresses of them", "the leading controller adds the label: check that one "+
				"runs, or run kubectl label namespace "+n.Name+" "+stayputv1alpha1.LabelDefaultPools+"=")
		}
	}
}

// admission returns an object of admissionregistration.k8s.io, in the newest version of its kind that is served.
func admission(ctx context.Context, k client.Client, kind, name string) (o *unstructured.Unstructured, err error) {
	for _, version := range home.PolicyVersions {
		o = object("admissionregistration.k8s.io/"+version, kind)
		if err = k.Get(ctx, types.NamespacedName{Name: name}, o); !meta.IsNoMatchError(err) {
			return o, err
		}
	}
	return nil, err
}

// installAgain is what to do if a policy is there and guards nothing.
const installAgain = "install again with the Helm chart or the output of helm template --namespace: the namespace " +
	"field of kustomize moves the service accounts, but not the policies' references to them. If Stayput is in another " +
	"namespace, set --stayput-namespace"

// accountOfPolicy is how the CEL of a policy names an account of Stayput; its namespace is in one of the groups.
var accountOfPolicy = regexp.MustCompile(`system:serviceaccount:([^:']*):stayput-|serviceAccount\('([^']*)'`)

// unguarding returns why a policy, or its binding, guards nothing in an installation in a namespace, empty if it does,
// as far as its text tells.
func unguarding(o *unstructured.Unstructured, namespace string) string {
	for _, m := range accountOfPolicy.FindAllStringSubmatch(fmt.Sprint(o.Object["spec"]), -1) {
		if of := m[1] + m[2]; of != namespace {
			return fmt.Sprintf("references service accounts of namespace %s, but Stayput is in %s", of, namespace)
		}
	}
	matched, _, _ := unstructured.NestedMap(o.Object, "spec", "matchResources")
	actions, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "validationActions")
	switch {
	case o.GetKind() != "ValidatingAdmissionPolicyBinding" && o.GetKind() != "MutatingAdmissionPolicyBinding":
		return ""
	case len(matched) > 0:
		return "binds it only for the objects that match spec.matchResources"
	case len(actions) > 0 && o.GetName() != policyAdvice && !slices.Contains(actions, "Deny"):
		return fmt.Sprintf("denies nothing: its validationActions are %q", actions)
	}
	return ""
}

// checkGate says what gates pods, and whether policies are to.
func checkGate(ctx context.Context, k client.Client, is asInstalled) (found []Finding, byPolicies bool) {
	f := findings{check: "gate"}
	const kind = "MutatingAdmissionPolicyBinding"
	binding, err := admission(ctx, k, kind, home.PolicyGateRecorded)
	policies, served := err == nil, !meta.IsNoMatchError(err)
	if err != nil && served && !apierrors.IsNotFound(err) {
		return f.unread(err), true
	}
	var webhook admissionregistrationv1.MutatingWebhookConfiguration
	err = k.Get(ctx, types.NamespacedName{Name: home.GateWebhook}, &webhook)
	if err != nil && !apierrors.IsNotFound(err) {
		return f.unread(err), policies
	}
	hooked := err == nil
	untrusted := slices.ContainsFunc(webhook.Webhooks, func(w admissionregistrationv1.MutatingWebhook) bool {
		return len(w.ClientConfig.CABundle) == 0
	})
	switch {
	case policies && hooked:
		f.warn("policies gate pods, but a webhook does too, as while one replaces the other",
			"run helm upgrade once more; without Helm, delete gate-webhook.yaml")
	case policies:
		f.add(LevelOK, "policies gate pods ("+policyVersion(binding)+")", "")
	case hooked && untrusted:
		f.fail("the webhook that gates pods has no certificate that the API server trusts: new pods are not gated "+
			"and can start anywhere", "see the controllers' logs, or cert-manager if it issues the certificate")
	case hooked && served && is.gate != "Webhook":
		f.warn("a webhook in the controllers gates pods, although the API server now supports policies for that",
			"run helm upgrade; without Helm, apply gate-policies.yaml and delete gate-webhook.yaml")
	case hooked:
		f.add(LevelOK, "a webhook in the controllers gates pods; while no controller responds, pods start ungated", "")
	case is.gate == "Template":
		f.add(LevelOK, "nothing gates pods (gate.mechanism is Template): pods whose template has the gate "+
			stayputv1alpha1.PlacementGate+" come home", "")
	case served:
		return nil, true // its policies are missing
	default:
		f.fail("nothing gates new pods: they can start anywhere. The API server has no MutatingAdmissionPolicies, which "+
			"require Kubernetes 1.36", "run helm upgrade, or apply gate-webhook.yaml; or put the scheduling gate "+
			stayputv1alpha1.PlacementGate+" into the pod templates and set gate.mechanism to Template")
	}
	return f.all, policies
}

// policyVersion names the version in which a policy is served, given its binding.
func policyVersion(binding *unstructured.Unstructured) string {
	return "MutatingAdmissionPolicy " + binding.GroupVersionKind().Version
}

// tryGate finds by a dry run that a new pod would not be gated, though what is to do it is in place: no object shows
// whether the API server applies v1beta1 policies, for which it has a feature gate, or reaches the webhook. It finds
// nothing if it may not create pods, or another admission plugin refuses this one.
func tryGate(ctx context.Context, k client.Client) []Finding {
	no, yes := false, true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, GenerateName: "stayput-check-",
			Annotations: map[string]string{stayputv1alpha1.AnnotationRetainIP: "1m"},
		},
		Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot:   &yes,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: "none", Image: "none",
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
	if err := k.Create(ctx, pod, client.DryRunAll); err == nil && !home.Gated(pod) {
		return finding("gate", LevelFail, "a dry run shows that a new pod is not gated and can start anywhere",
			"v1beta1 policies require the API server's feature gate MutatingAdmissionPolicy; a webhook requires a running "+
				"controller, and that the API server can reach port 9443 of its pod")
	}
	return nil
}

// nominatesHomes reports whether the controllers run with --nominate-homes.
func nominatesHomes(ctx context.Context, k client.Client, namespace string) (bool, error) {
	var d appsv1.Deployment
	err := k.Get(ctx, types.NamespacedName{Namespace: namespace, Name: controllerDeployment}, &d)
	value, there := argument(&d.Spec.Template.Spec, "nominate-homes")
	return there && value != "false", client.IgnoreNotFound(err)
}
