package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/streaming/pkg/httpstream" // whose errors client-go returns
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
)

// Agents run stayput-agent on a node and return what it prints.
type Agents interface {
	Run(ctx context.Context, node string, stdin []byte, args ...string) ([]byte, error)
}

// inspect asks the agent of a node what the node keeps.
func inspect(ctx context.Context, a Agents, node string) (*inspection.Node, error) {
	n, err := ask[inspection.Node](ctx, a, node, nil, "inspect")
	if err == nil && n.Format < 1 {
		err = fmt.Errorf("node %s: output of stayput-agent inspect: missing format: expected 1 or more", node)
	}
	if err != nil {
		return nil, err
	}
	return &n, nil
}

// ask runs stayput-agent on a node and returns what it prints, which is JSON.
func ask[T any](ctx context.Context, a Agents, node string, stdin []byte, args ...string) (answer T, err error) {
	out, err := a.Run(ctx, node, stdin, args...)
	if err != nil {
		return answer, err
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return answer, fmt.Errorf("node %s: output of stayput-agent %s: %w", node, args[0], err)
	}
	return answer, nil
}

const (
	// nodesAtOnce is how many nodes are asked at the same time.
	nodesAtOnce = 16
	// nodePatience is how long each of them has to answer.
	nodePatience = 30 * time.Second
)

// askAll calls ask for every node, even once ctx has ended, several at a time. It shows how far it is.
func askAll(ctx context.Context, nodes []string, line *progress, ask func(ctx context.Context, i int)) {
	var mu sync.Mutex
	asked := 0
	workqueue.ParallelizeUntil(context.WithoutCancel(ctx), nodesAtOnce, len(nodes), func(i int) {
		ctx, cancel := context.WithTimeout(ctx, nodePatience)
		defer cancel()
		ask(ctx, i)
		mu.Lock()
		defer mu.Unlock()
		asked++
		line.say("asked %d of %d nodes ...", asked, len(nodes))
	})
}

const (
	labelName, labelComponent = "app.kubernetes.io/name", "app.kubernetes.io/component"
	agentContainer            = "agent"
)

// agentPodsOf reaches the Agents by their pods, which the DaemonSet has in a namespace.
type agentPodsOf struct {
	client    client.Client
	config    *rest.Config
	namespace string
}

// ErrNoAgent says that no agent runs on the node.
var ErrNoAgent = errors.New("no Stayput agent is running on the node")

// on returns the running pod of the agent on a node.
func (a *agentPodsOf) on(ctx context.Context, node string) (*corev1.Pod, error) {
	pods, err := agentPods(ctx, a.client, a.namespace, node)
	if err != nil {
		return nil, err
	}
	for i := range pods {
		if running(&pods[i]) {
			return &pods[i], nil
		}
	}
	err = fmt.Errorf("%w: %s", ErrNoAgent, node)
	if len(pods) > 0 {
		return nil, fmt.Errorf("%w: its pod %s/%s is %s", err, pods[0].Namespace, pods[0].Name, podState(&pods[0]))
	}
	return nil, fmt.Errorf("%w: no pod with %s=agent on it in namespace %s (see --stayput-namespace)",
		err, labelComponent, a.namespace)
}

// agentPods returns the agents' pods of one node, or of all if it is empty. Those that are being deleted come last.
func agentPods(ctx context.Context, k client.Client, namespace, node string) ([]corev1.Pod, error) {
	var list corev1.PodList
	o := []client.ListOption{
		client.InNamespace(namespace), client.MatchingLabels{labelName: "stayput", labelComponent: "agent"},
	}
	if node != "" {
		o = append(o, client.MatchingFields{"spec.nodeName": node})
	}
	if err := k.List(ctx, &list, o...); err != nil {
		return nil, fmt.Errorf("looking for agents: %w", rightTo("list pods in namespace "+namespace, err))
	}
	ending := func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }
	stay := slices.DeleteFunc(slices.Clone(list.Items), ending)
	return append(stay, slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return !ending(p) })...), nil
}

func running(p *corev1.Pod) bool { return container(p) != nil && container(p).State.Running != nil }

func container(p *corev1.Pod) *corev1.ContainerStatus {
	for i := range p.Status.ContainerStatuses {
		if p.Status.ContainerStatuses[i].Name == agentContainer {
			return &p.Status.ContainerStatuses[i]
		}
	}
	return nil
}

// podState returns the state that kubectl get shows for a pod.
func podState(p *corev1.Pod) string {
	if s := container(p); s != nil {
		if s.State.Waiting != nil && s.State.Waiting.Reason != "" {
			return s.State.Waiting.Reason
		}
		if s.State.Terminated != nil && s.State.Terminated.Reason != "" {
			return s.State.Terminated.Reason
		}
	}
	return cmp.Or(p.Status.Reason, string(p.Status.Phase), "not started yet")
}

// Run runs the program in the agent's container, with the flags of the daemon.
func (a *agentPodsOf) Run(ctx context.Context, node string, stdin []byte, args ...string) ([]byte, error) {
	pod, err := a.on(ctx, node)
	if err != nil {
		return nil, err
	}
	out, err := a.exec(ctx, pod, stdin, slices.Concat([]string{"/stayput-agent"}, args, daemonFlags(pod)))
	if err != nil {
		return nil, fmt.Errorf("node %s: stayput-agent %s in pod %s/%s: %w", node, args[0], pod.Namespace, pod.Name,
			rightTo("create pods/exec in namespace "+pod.Namespace, err))
	}
	return out, nil
}

// daemonFlags returns the flags of the agent, so that stayput-agent inspect looks at the same directories and asks the
// same address. Of the environment, which kubelet expands, it knows the node's address; other flags that refer to it
// are left out, and inspect needs none.
func daemonFlags(pod *corev1.Pod) (flags []string) {
	for _, c := range pod.Spec.Containers {
		if c.Name != agentContainer {
			continue
		}
		args := c.Args
		if len(c.Command) > 1 {
			args = slices.Concat(c.Command[1:], args)
		}
		for _, arg := range args {
			for _, v := range c.Env {
				if v.ValueFrom != nil && v.ValueFrom.FieldRef != nil && v.ValueFrom.FieldRef.FieldPath == "status.hostIP" {
					arg = strings.ReplaceAll(arg, "$("+v.Name+")", pod.Status.HostIP)
				}
			}
			if !strings.Contains(arg, "$(") {
				flags = append(flags, arg)
			}
		}
	}
	return flags
}

// exec runs a command in the agent's container. Its standard error becomes part of the error.
func (a *agentPodsOf) exec(ctx context.Context, pod *corev1.Pod, stdin []byte, command []string) ([]byte, error) {
	config := rest.CopyConfig(a.config)
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	core, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}
	url := core.Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: agentContainer, Command: command, Stdin: stdin != nil, Stdout: true, Stderr: true,
		}, runtime.NewParameterCodec(scheme)).URL()
	spdy, err := remotecommand.NewSPDYExecutor(config, "POST", url)
	if err != nil {
		return nil, err
	}
	socket, err := remotecommand.NewWebSocketExecutor(config, "GET", url.String())
	if err != nil {
		return nil, err
	}
	var refused error
	executor, err := remotecommand.NewFallbackExecutor(socket, spdy, func(err error) bool {
		var failure *httpstream.UpgradeFailureError
		if errors.As(err, &failure) && apierrors.IsForbidden(failure.Cause) {
			refused = failure.Cause
		}
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err) // as kubectl has it
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stdout, stderr := answer{left: longestAnswer, tooLong: cancel}, answer{left: longestError, tooLong: cancel}
	streams := remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr}
	if stdin != nil {
		streams.Stdin = bytes.NewReader(stdin)
	}
	err = executor.StreamWithContext(ctx, streams)
	switch said := strings.TrimSpace(stderr.text.String()); {
	case errors.Is(context.Cause(ctx), errLongAnswer):
		return nil, errLongAnswer
	case err == nil:
		return stdout.text.Bytes(), nil
	case refused != nil && strings.HasPrefix(err.Error(), "unable to upgrade connection"):
		return nil, refused // the fallback was refused too, but its error does not say so by its type
	case said != "":
		return nil, fmt.Errorf("%w: %s", err, said)
	default:
		return nil, err
	}
}

// Bounds of what is read of a node's answer, in bytes: a node is trusted less than the person who asks it.
const (
	longestAnswer = 64 << 20
	longestError  = 16 << 10
)

// errLongAnswer says that a node answered with more than that.
var errLongAnswer = errors.New("the answer is too long")

// answer is a stream of a node's answer. Once more is written to it than it has left, it calls tooLong.
type answer struct {
	text    bytes.Buffer
	left    int
	tooLong context.CancelCauseFunc
}

func (a *answer) Write(p []byte) (int, error) {
	if a.left -= len(p); a.left < 0 {
		a.tooLong(errLongAnswer)
		return 0, errLongAnswer
	}
	return a.text.Write(p)
}
