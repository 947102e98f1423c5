package placement

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/uninstall"
)

// ErrNotClean is an uninstallation that did not see the end of everything in time.
var ErrNotClean = errors.New("not everything of stayput is cleaned up")

// errUndefined is a cluster that does not know RetainedIPs any more, by which the agents' work is seen.
var errUndefined = errors.New("RetainedIP is not defined")

// askEvery is how often Uninstall looks whether the agents are done.
const askEvery = time.Second

// agentPods selects the agents' pods.
var agentPods = client.MatchingLabels{"app.kubernetes.io/name": "stayput", "app.kubernetes.io/component": "agent"}

// Uninstall begins the uninstallation and returns when nothing waits for stayput any more, so that the rest of its
// objects can be deleted in any order:
//
//  1. the gate bindings are deleted, so that no further pod is gated,
//  2. the installation's ConfigMap: the agents and controllers that run begin to clean up,
//  3. every gated pod is let go,
//  4. the RetainedIPs of the nodes where an agent runs are gone, which is when the agent has put its node back.
//
// Nodes without a running agent are named: nobody there can do it. Where RetainedIPs are not defined any more it does
// not wait for the agents. After timeout it is ErrNotClean. It may be run again. c must read from the API server.
func Uninstall(ctx context.Context, c client.Client, namespace string, timeout time.Duration, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	for _, o := range []client.Object{
		&admissionregistrationv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: gateAnnotatedBinding}},
		&admissionregistrationv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: gateRecordedBinding}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: uninstall.Name}},
	} {
		name := o.GetName()
		switch err := c.Delete(ctx, o); {
		case absent(err), meta.IsNoMatchError(err):
			say("%s is not there", name)
		case err != nil:
			return fmt.Errorf("deleting %s: %w", name, err)
		default:
			say("%s deleted", name)
		}
	}
	if err := UngateAll(ctx, c, out); err != nil {
		return fmt.Errorf("letting the gated pods go: %w", err)
	}
	say("no pod is gated")
	if err := removeGatedWorkloads(ctx, c); err != nil {
		say("%v; they do nothing any more, but stay: kubectl delete configmaps -A --field-selector metadata.name=%s", err, gatedWorkloads)
	}
	return agentsDone(ctx, c, namespace, say)
}

// agentsDone waits for the agents.
func agentsDone(ctx context.Context, c client.Client, namespace string, say func(string, ...any)) error {
	said := ""
	for {
		busy, alone, err := remaining(ctx, c, namespace)
		switch {
		case errors.Is(err, errUndefined):
			say("%v any more: only the agents' logs say when they have put their nodes back as they were", err)
			return nil
		case err == nil && len(busy) == 0:
			if len(alone) > 0 {
				say("no agent runs on these nodes, whose promises stay: %s", strings.Join(alone, ", "))
				say("run there, with stayput's image: kubectl debug node/NODE --profile=sysadmin --image=IMAGE -- /stayput-agent uninstall --root=/proc/1/root")
				say("and then: kubectl delete retainedips -A --field-selector spec.nodeName=NODE; of a node that is gone for good nothing is to be done")
				say("the agents of the other nodes have put them back as they were")
			} else {
				say("the agents have put their nodes back as they were")
			}
			return nil
		case err == nil:
			if line := "waiting for the agents on: " + strings.Join(busy, ", "); line != said {
				said = line
				say("%s", line)
			}
		case ctx.Err() == nil:
			say("%v, trying again", err)
		}
		select {
		case <-time.After(askEvery):
			continue
		case <-ctx.Done():
		}
		if err != nil {
			return fmt.Errorf("%w: the last error was: %w", ErrNotClean, err)
		}
		return fmt.Errorf("%w: the agents of these nodes have not finished: %s; their logs say why, and stayput-agent uninstall does it by hand", ErrNotClean, strings.Join(busy, ", "))
	}
}

// remaining names the nodes that have RetainedIPs, by whether an agent runs there.
func remaining(ctx context.Context, c client.Client, namespace string) (busy, alone []string, err error) {
	var all stayputv1alpha1.RetainedIPList
	if err := c.List(ctx, &all); meta.IsNoMatchError(err) || absent(err) {
		return nil, nil, errUndefined
	} else if err != nil {
		return nil, nil, fmt.Errorf("listing RetainedIPs: %w", err)
	}
	nodes := map[string]bool{} // whether an agent runs there
	for i := range all.Items {
		nodes[all.Items[i].Spec.NodeName] = false
	}
	var agents corev1.PodList
	if err := c.List(ctx, &agents, client.InNamespace(namespace), agentPods); err != nil {
		return nil, nil, fmt.Errorf("listing the agents' pods: %w", err)
	}
	for i := range agents.Items {
		pod := &agents.Items[i]
		if _, ok := nodes[pod.Spec.NodeName]; ok && runs(pod) {
			nodes[pod.Spec.NodeName] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		if nodes[name] {
			busy = append(busy, name)
		} else {
			alone = append(alone, name)
		}
	}
	return busy, alone, nil
}

// runs says whether a pod is Ready, which it is not for long on a node that is not.
func runs(pod *corev1.Pod) bool {
	for _, cond := range pod.Status.Conditions {
		if cond.Type == corev1.PodReady {
			return cond.Status == corev1.ConditionTrue
		}
	}
	return false
}
