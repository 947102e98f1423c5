// Package uninstall prepares a cluster for the deletion of Stayput's objects: the hook of helm uninstall and kubectl
// stayput uninstall do so ([Run]). It needs no controller, so it also clears what a deletion without it has left.
package uninstall

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/installation"
)

// ErrNotComplete is returned by Run if something was left to do at its timeout.
var ErrNotComplete = errors.New("uninstallation is not complete")

const (
	pollInterval = time.Second
	// settled is how long after the permission to gate was deleted no API server can gate a pod any more: a pod that is
	// gated then has the gate in its template.
	settled = 10 * time.Second
)

// agentPods selects the agents' pods.
var agentPods = client.MatchingLabels{"app.kubernetes.io/name": "stayput", "app.kubernetes.io/component": "agent"}

// Run uninstalls Stayput as far as the rest of its objects can then be deleted in any order. It may be run again, also
// after they were deleted.
//
//  1. It deletes the permission without which no pod is gated.
//  2. It annotates the installation's ConfigMap, which tells agents to put their nodes back, and controllers that they
//     keep no pod waiting and hold no object.
//  3. Until nothing is left, it ungates pods, deletes the ConfigMaps that say which recorded pods are gated, takes our
//     finalizers off PodIPs and pools, which stay, and waits for the agents. One that has put its node back is not
//     Ready.
//
// It names the nodes that still have RetainedIPs then: no agent ran there, and they stay as they are. After timeout it
// returns ErrNotComplete. c must read from the API server, not from a cache. say is called with each line for people.
func Run(ctx context.Context, c client.Client, namespace string, timeout time.Duration, say func(line string)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	r := &removal{Client: c, namespace: namespace, line: say}
	if err := r.begin(ctx); err != nil {
		return err
	}
	said := ""
	for start, calm := time.Now(), 0; ; {
		gated, left, err := r.pass(ctx)
		if calm++; gated > 0 || err != nil {
			calm = 0
		}
		if err == nil && left == "" && (calm > 1 || time.Since(start) > settled) {
			return r.sayRest(ctx, gated)
		}
		if err != nil && ctx.Err() == nil {
			left = "another try: " + err.Error()
		}
		if left != "" && left != said {
			said = left
			r.say("waiting for %s", left)
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			r.say("run it again; to keep Stayput instead, remove the annotation %s from the ConfigMap %s/%s and install "+
				"Stayput once more", installation.AnnotationUninstall, namespace, installation.ConfigMap)
			return fmt.Errorf("%w after %v: waited for %s", ErrNotComplete, timeout, cmp.Or(said, "gated pods"))
		}
	}
}

type removal struct {
	client.Client
	namespace string
	line      func(string)
}

func (r *removal) say(format string, args ...any) { r.line(fmt.Sprintf(format, args...)) }

// begin has no further pod gated, and tells agents and controllers.
func (r *removal) begin(ctx context.Context) error {
	permission := &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRoleBinding"},
		ObjectMeta: metav1.ObjectMeta{Name: home.GatePermission},
	}
	switch err := r.Delete(ctx, permission); {
	case err == nil:
		r.say("pods are no longer gated")
	case !missing(err):
		return fmt.Errorf("deleting ClusterRoleBinding %s: %w", home.GatePermission, err)
	}
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: installation.ConfigMap}}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, installation.AnnotationUninstall)
	switch err := r.Patch(ctx, cm, client.RawPatch(types.MergePatchType, patch)); {
	case err == nil:
		r.say("agents and controllers were told to uninstall: ConfigMap %s/%s is annotated", r.namespace,
			installation.ConfigMap)
	case missing(err):
		r.say("ConfigMap %s/%s not found: agents cannot be told", r.namespace, installation.ConfigMap)
	default:
		return fmt.Errorf("annotating ConfigMap %s/%s: %w", r.namespace, installation.ConfigMap, err)
	}
	return nil
}

// pass does all that can be done now, and returns how many pods were gated and what it has to wait for.
func (r *removal) pass(ctx context.Context) (gated int, left string, err error) {
	gated, err = Ungate(ctx, r.Client, r.line)
	held, heldErr := r.removeFinalizers(ctx)
	busy, busyErr := r.busyNodes(ctx)
	switch err := errors.Join(err, heldErr, busyErr, r.deleteGatedWorkloads(ctx)); {
	case err != nil:
		return gated, "", err
	case len(busy) > 0:
		left = "the agents on: " + strings.Join(busy, ", ")
	case held > 0:
		left = "PodIPs and pools without a finalizer of Stayput's"
	}
	return gated, left, nil
}

// busyNodes returns the nodes whose agent is Ready: it has not put the node back. The pod of a node that is off is not
// Ready after a while.
func (r *removal) busyNodes(ctx context.Context) (busy []string, err error) {
	var agents corev1.PodList
	if err := r.List(ctx, &agents, client.InNamespace(r.namespace), agentPods); err != nil {
		return nil, fmt.Errorf("listing the agents' pods: %w", err)
	}
	for i := range agents.Items {
		pod := &agents.Items[i]
		if slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			busy = append(busy, pod.Spec.NodeName)
		}
	}
	slices.Sort(busy)
	return busy, nil
}

// sayRest says what nothing but people will clear.
func (r *removal) sayRest(ctx context.Context, gated int) error {
	if gated > 0 {
		r.say("pods are still created with the gate %s, which nothing adds anymore: remove it from their pod templates, "+
			"nothing else will", v1alpha1.PlacementGate)
	}
	var all v1alpha1.RetainedIPList
	if err := r.List(ctx, &all); missing(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("listing RetainedIPs: %w", err)
	}
	nodes := map[string]bool{}
	for i := range all.Items {
		if all.Items[i].DeletionTimestamp == nil { // else it is another program's finalizer that keeps it
			nodes[all.Items[i].Spec.NodeName] = true
		}
	}
	if len(nodes) == 0 {
		r.say("Stayput's objects can be deleted")
		return nil
	}
	r.say("no agent is running on these nodes, which keep their promises: %s",
		strings.Join(slices.Sorted(maps.Keys(nodes)), ", "))
	r.say("run on each of them, with Stayput's image: kubectl debug node/NODE --profile=sysadmin --image=IMAGE -- " +
		"/stayput-agent uninstall --root=/proc/1/root")
	r.say("then run: kubectl delete retainedips -A --field-selector spec.nodeName=NODE; nodes that were removed for " +
		"good need neither")
	r.say("Stayput's other objects can be deleted")
	return nil
}

// missing reports whether an object, or its kind, does not exist. A 404 of an API server that does not serve the kind
// at the moment, as after its start, does not say so.
func missing(err error) bool {
	return meta.IsNoMatchError(err) ||
		apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}
