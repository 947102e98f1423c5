package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/uninstall"
)

// ErrNotClean is returned by Run if an agent has not finished in time.
var ErrNotClean = errors.New("uninstallation is not complete")

// errUndefined means that the API server does not serve RetainedIPs, which show how far the agents are.
var errUndefined = errors.New("the RetainedIP CRD no longer exists")

const pollInterval = time.Second

// agentPods selects the agents' pods.
var agentPods = client.MatchingLabels{"app.kubernetes.io/name": "stayput", "app.kubernetes.io/component": "agent"}

// Run uninstalls stayput as far as the rest of its objects can then be deleted in any order. It may be run again.
//
//  1. It deletes the gate bindings and the webhook, so that no further pod is gated.
//  2. It deletes the installation's ConfigMap, the signal for running agents and controllers, and confirms that before,
//     so that promises end at once.
//  3. It ungates every pod, and deletes the policies that no longer have bindings.
//  4. It takes the finalizers off PodIPs and PodIPPools, which stay.
//  5. It waits until the RetainedIPs of all nodes with a running agent are deleted: such an agent has put its node
//     back.
//
// Finalizers of others are theirs to take off: it names the objects that these keep, and does not wait for them. It
// also names the nodes without a running agent, which stay as they are. If the RetainedIP CRD no longer exists, it
// does not wait for the agents. After timeout it returns ErrNotClean. c must read from the API server, not from a
// cache.
func Run(ctx context.Context, c client.Client, namespace string, timeout time.Duration, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	installation := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: uninstall.ConfigMap}}
	confirm := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, uninstall.AnnotationConfirmed)
	if err := c.Patch(ctx, installation, client.RawPatch(types.MergePatchType, confirm)); err != nil && !missing(err) {
		return fmt.Errorf("annotating %s: %w", uninstall.ConfigMap, err)
	}
	bindings, err := policyBindings(c.RESTMapper())
	if err != nil {
		return err
	}
	webhooks := schema.GroupVersionKind{Group: bindings.Group, Version: "v1", Kind: "MutatingWebhookConfiguration"}
	all := []client.Object{named(webhooks, home.GateWebhook)}
	for _, name := range home.GatingPolicies {
		all = append(all, named(bindings, name))
	}
	for _, o := range append(all, installation) {
		name := o.GetName()
		switch err := c.Delete(ctx, o); {
		case missing(err) && name == home.GateWebhook: // most clusters gate by policies
		case missing(err):
			say("%s not found", name)
		case err != nil:
			return fmt.Errorf("deleting %s: %w", name, err)
		default:
			say("%s deleted", name)
		}
	}
	if err := UngateAll(ctx, c, out); err != nil {
		return err
	}
	// Those that the controllers have put in the webhook's place are of no release yet.
	policies := bindings.GroupVersion().WithKind("MutatingAdmissionPolicy")
	for _, name := range home.GatingPolicies {
		if err := c.Delete(ctx, named(policies, name)); err != nil && !missing(err) {
			say("deleting the policy %s, which no longer has any effect: %v", name, err)
		}
	}
	freed, held, err := removeFinalizers(ctx, c)
	sayHeld(say, held)
	switch {
	case err != nil:
		say("%v; nothing else removes the finalizers %s of PodIPs and PodIPPools, so these and their CRDs "+
			"cannot be deleted", err, v1alpha1.FinalizerInUse)
	case freed > 0:
		say("removed the finalizers of %d PodIPs and PodIPPools; the objects and their CRDs were not deleted", freed)
	}
	if err := deleteGatedWorkloads(ctx, c); err != nil {
		say("%v; they no longer have any effect; to delete them: kubectl delete configmaps -A --field-selector "+
			"metadata.name=%s", err, gate.Workloads)
	}
	return waitForAgents(ctx, c, namespace, say)
}

// policyBindings returns the kind of the bindings by which policies gate pods, in the newest version that is served; in
// v1 if none is.
func policyBindings(served meta.RESTMapper) (schema.GroupVersionKind, error) {
	kind := schema.GroupKind{Group: "admissionregistration.k8s.io", Kind: "MutatingAdmissionPolicyBinding"}
	for _, version := range home.PolicyVersions {
		switch _, err := served.RESTMapping(kind, version); {
		case err == nil:
			return kind.WithVersion(version), nil
		case !meta.IsNoMatchError(err):
			return schema.GroupVersionKind{}, fmt.Errorf("discovering the policies that gate pods: %w", err)
		}
	}
	return kind.WithVersion(home.PolicyVersions[0]), nil
}

func named(kind schema.GroupVersionKind, name string) client.Object {
	o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	o.SetGroupVersionKind(kind)
	return o
}

// missing reports whether an object, or its kind, does not exist. A 404 of an API server that does not serve the kind
// at the moment, as after its start, does not say so.
func missing(err error) bool {
	return meta.IsNoMatchError(err) ||
		apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

func waitForAgents(ctx context.Context, c client.Client, namespace string, say func(string, ...any)) error {
	said := ""
	for {
		busy, alone, held, err := remainingNodes(ctx, c, namespace)
		switch {
		case errors.Is(err, errUndefined):
			say("%v: see the agents' logs for whether they have restored their nodes", err)
			return nil
		case err == nil && len(busy) == 0:
			sayHeld(say, held)
			if len(alone) == 0 {
				say("the agents have restored their nodes")
				return nil
			}
			say("no agent is running on these nodes, which keep their promises: %s", strings.Join(alone, ", "))
			say("run on each of them, with Stayput's image: kubectl debug node/NODE --profile=sysadmin --image=IMAGE -- " +
				"/stayput-agent uninstall --root=/proc/1/root")
			say("then run: kubectl delete retainedips -A --field-selector spec.nodeName=NODE; nodes that were removed for " +
				"good need neither")
			say("the agents of the other nodes have restored them")
			return nil
		case err == nil:
			if line := "waiting for the agents on: " + strings.Join(busy, ", "); line != said {
				said = line
				say("%s", line)
			}
		case ctx.Err() == nil:
			say("%v, retrying", err)
		}
		select {
		case <-time.After(pollInterval):
			continue
		case <-ctx.Done():
		}
		if err != nil {
			return fmt.Errorf("%w: the last error was: %w", ErrNotClean, err)
		}
		return fmt.Errorf("%w: the agents of these nodes have not finished: %s; see their logs, or run stayput-agent "+
			"uninstall there",
			ErrNotClean, strings.Join(busy, ", "))
	}
}

// heldBy names an object that is deleted, but kept by finalizers, empty if it is not. None of them may be ours.
func heldBy(kind string, o client.Object) string {
	if o.GetDeletionTimestamp() == nil || len(o.GetFinalizers()) == 0 {
		return ""
	}
	return fmt.Sprintf("%s %s (%s)", kind, strings.TrimPrefix(client.ObjectKeyFromObject(o).String(), "/"),
		strings.Join(o.GetFinalizers(), ", "))
}

// mostHeld is how many objects are named that finalizers keep.
const mostHeld = 20

func sayHeld(say func(string, ...any), held []string) {
	if len(held) == 0 {
		return
	}
	more := ""
	if n := len(held) - mostHeld; n > 0 {
		held, more = held[:mostHeld], fmt.Sprintf(" and %d more", n)
	}
	say("deleted, but kept by finalizers of other programs: %s%s; until these are removed, the objects "+
		"remain, and their CRD cannot be deleted", strings.Join(held, ", "), more)
}

// remainingNodes returns the nodes that have RetainedIPs: busy ones with a running agent, and those without. What a
// running agent has deleted is done with: held names the RetainedIPs that finalizers keep.
func remainingNodes(ctx context.Context, c client.Client, namespace string) (busy, alone, held []string, err error) {
	var all v1alpha1.RetainedIPList
	if err := c.List(ctx, &all); missing(err) {
		return nil, nil, nil, errUndefined
	} else if err != nil {
		return nil, nil, nil, fmt.Errorf("listing RetainedIPs: %w", err)
	}
	running, left := map[string]bool{}, map[string]bool{}
	for i := range all.Items {
		running[all.Items[i].Spec.NodeName] = false
		if by := heldBy("RetainedIP", &all.Items[i]); by != "" {
			held = append(held, by)
		} else {
			left[all.Items[i].Spec.NodeName] = true
		}
	}
	var agents corev1.PodList
	if err := c.List(ctx, &agents, client.InNamespace(namespace), agentPods); err != nil {
		return nil, nil, nil, fmt.Errorf("listing the agents' pods: %w", err)
	}
	for i := range agents.Items {
		pod := &agents.Items[i]
		if _, ok := running[pod.Spec.NodeName]; ok && ready(pod) {
			running[pod.Spec.NodeName] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(running)) {
		switch {
		case !running[name]:
			alone = append(alone, name)
		case left[name]:
			busy = append(busy, name)
		}
	}
	return busy, alone, held, nil
}

// ready reports whether a pod is Ready. On a node that is not, it soon is not either.
func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
