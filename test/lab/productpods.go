package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Agent is a node's pod of the DaemonSet stayput-agent.
type Agent struct{ node *ClusterNode }

// agentPort is that of every agent's HTTP server, on the node's own address.
const agentPort = 9463

// noAgent labels nodes that the lab's installation keeps the agent off.
const noAgent = "lab.stayput.test/no-agent"

// Stop ends the agent and keeps the DaemonSet from creating another one.
func (a *Agent) Stop(ctx context.Context) error {
	pods, err := a.pods(ctx)
	if err != nil {
		return err
	}
	if err := a.label(ctx, `"true"`); err != nil {
		return err
	}
	return a.node.cluster.waitPodsGone(ctx, pods)
}

// Start lets the DaemonSet create an agent again and waits until it is Ready.
func (a *Agent) Start(ctx context.Context) error {
	if err := a.label(ctx, "null"); err != nil {
		return err
	}
	return a.WaitReady(ctx)
}

func (a *Agent) label(ctx context.Context, value string) error {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, noAgent, value)
	_, err := a.node.cluster.client.CoreV1().Nodes().Patch(ctx, a.node.Name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{})
	return err
}

// Restart deletes the agent's pod and waits until the next one is Ready.
func (a *Agent) Restart(ctx context.Context) error {
	c := a.node.cluster
	pods, err := a.pods(ctx)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		if err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil &&
			!apierrors.IsNotFound(err) {
			return err
		}
	}
	if err := c.waitPodsGone(ctx, pods); err != nil {
		return err
	}
	return a.WaitReady(ctx)
}

// Kill ends the agent with SIGKILL. Its kubelet restarts it.
func (a *Agent) Kill(ctx context.Context) error {
	pod, err := a.Pod(ctx)
	if err != nil {
		return err
	}
	return a.node.KillContainer(ctx, pod, agentComponent)
}

// Pod returns the agent's pod.
func (a *Agent) Pod(ctx context.Context) (*corev1.Pod, error) {
	pods, err := a.pods(ctx)
	if err != nil {
		return nil, err
	}
	if len(pods) != 1 {
		return nil, fmt.Errorf("%d pods of the agent on %s, and not one", len(pods), a.node.Name)
	}
	return &pods[0], nil
}

func (a *Agent) pods(ctx context.Context) ([]corev1.Pod, error) {
	return a.node.cluster.productPods(ctx, agentComponent, "spec.nodeName="+a.node.Name)
}

// Address returns where the agent serves HTTP.
func (a *Agent) Address() netip.AddrPort { return netip.AddrPortFrom(a.node.IP, agentPort) }

// WaitReady waits until the agent is running and reports that it is ready. It asks the agent itself, because kubelet
// probes only every few seconds.
func (a *Agent) WaitReady(ctx context.Context) error {
	ask := getFrom(a.node.Node, "http://"+a.Address().String()+"/readyz")
	return Until(ctx, "the agent of "+a.node.Name+" to be ready", func() (bool, error) {
		pod, err := a.Pod(ctx)
		if err != nil || !podRuns(pod) {
			return false, err
		}
		err = ask(ctx)
		return err == nil, err
	})
}

// Controllers are the pods of the Deployment stayput-controller.
type Controllers struct {
	cluster  *Cluster
	replicas int32 // while they are not stopped
}

// Pods returns the pods that are not being deleted, by name.
func (s *Controllers) Pods(ctx context.Context) ([]corev1.Pod, error) {
	pods, err := s.cluster.productPods(ctx, controllerComponent, "")
	return slices.DeleteFunc(pods, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }), err
}

// Stop scales the controllers to zero.
func (s *Controllers) Stop(ctx context.Context) error {
	pods, err := s.Pods(ctx)
	if err != nil {
		return err
	}
	if err := s.scale(ctx, 0); err != nil {
		return err
	}
	return s.cluster.waitPodsGone(ctx, pods)
}

// Kill kills all controllers and keeps them away. They cannot clean up, such as by releasing their lease.
func (s *Controllers) Kill(ctx context.Context) error {
	pods, err := s.Pods(ctx)
	if err != nil {
		return err
	}
	// Frozen, they do not see the SIGTERM of their deletion, and they are killed only once kubelet no longer restarts
	// them.
	for _, sig := range []string{"STOP", "KILL"} {
		for i := range pods {
			if err := s.cluster.Node(pods[i].Spec.NodeName).signalContainer(ctx, &pods[i], controllerComponent,
				sig); err != nil {
				return err
			}
		}
		if sig == "KILL" {
			break
		}
		if err := s.scale(ctx, 0); err != nil {
			return err
		}
		err := Until(ctx, "the controllers to be deleted", func() (bool, error) {
			left, err := s.Pods(ctx)
			return err == nil && len(left) == 0, err
		})
		if err != nil {
			return err
		}
	}
	return s.cluster.waitPodsGone(ctx, pods)
}

// Start scales the controllers up again after Stop or Kill and waits until they are Ready.
func (s *Controllers) Start(ctx context.Context) error {
	if err := s.scale(ctx, s.replicas); err != nil {
		return err
	}
	return s.WaitReady(ctx)
}

// Restart replaces all controllers at once.
func (s *Controllers) Restart(ctx context.Context) error {
	if err := s.Stop(ctx); err != nil {
		return err
	}
	return s.Start(ctx)
}

// KillOne ends the i-th controller of Pods with SIGKILL. Its kubelet restarts it in the same pod.
func (s *Controllers) KillOne(ctx context.Context, i int) error {
	pods, err := s.Pods(ctx)
	if err != nil {
		return err
	}
	return s.cluster.Node(pods[i].Spec.NodeName).KillContainer(ctx, &pods[i], controllerComponent)
}

// WaitReady waits until the Deployment has all its controllers, of its current template, running and reporting that
// they are ready.
func (s *Controllers) WaitReady(ctx context.Context) error {
	return Until(ctx, "the controllers to be Ready", func() (bool, error) {
		d, err := s.cluster.client.AppsV1().Deployments(SystemNamespace).Get(ctx, controllerWorkload, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		want := *d.Spec.Replicas
		current := d.Status.ObservedGeneration == d.Generation && d.Status.UpdatedReplicas == want &&
			d.Status.Replicas == want
		pods, err := s.Pods(ctx)
		if err != nil || !current || len(pods) != int(want) {
			return false, err
		}
		for i := range pods {
			if !podRuns(&pods[i]) {
				return false, nil
			}
			if err := getFrom(s.cluster.Control, "http://"+net.JoinHostPort(pods[i].Status.PodIP, "8081")+"/readyz")(
				ctx); err != nil {
				return false, err
			}
		}
		return true, nil
	})
}

func (s *Controllers) scale(ctx context.Context, replicas int32) error {
	patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas)
	_, err := s.cluster.client.AppsV1().Deployments(SystemNamespace).Patch(ctx, controllerWorkload, types.MergePatchType,
		[]byte(patch), metav1.PatchOptions{})
	return err
}

// productPods returns the pods of a component, by name.
func (c *Cluster) productPods(ctx context.Context, component, fields string) ([]corev1.Pod, error) {
	list, err := c.client.CoreV1().Pods(SystemNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=stayput,app.kubernetes.io/component=" + component, FieldSelector: fields,
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// waitPodsGone waits until pods being deleted no longer exist: none of their processes runs then.
func (c *Cluster) waitPodsGone(ctx context.Context, pods []corev1.Pod) error {
	for _, pod := range pods {
		err := Until(ctx, pod.Name+" to be gone", func() (bool, error) {
			now, err := c.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return err == nil && now.UID != pod.UID, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// WaitAgents waits until the DaemonSet has a ready agent of its current template on every node that it wants one on.
func (c *Cluster) WaitAgents(ctx context.Context) error {
	err := Until(ctx, "the agents to run", func() (bool, error) {
		d, err := c.client.AppsV1().DaemonSets(SystemNamespace).Get(ctx, agentWorkload, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		s := d.Status
		return s.ObservedGeneration == d.Generation && s.DesiredNumberScheduled > 0 &&
			s.UpdatedNumberScheduled == s.DesiredNumberScheduled, nil
	})
	if err != nil {
		return err
	}
	pods, err := c.productPods(ctx, agentComponent, "")
	if err != nil {
		return err
	}
	return together(len(pods), func(i int) error {
		n := c.Node(pods[i].Spec.NodeName)
		if n == nil {
			return nil // the node was removed, and its pods will be
		}
		return (&Agent{n}).WaitReady(ctx)
	})
}

func podRuns(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && len(pod.Status.ContainerStatuses) > 0 &&
		!slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
			return s.State.Running == nil
		})
}

// KillContainer ends a container of a pod on the node with SIGKILL, and waits until the API server shows that it has
// ended or been restarted.
func (n *ClusterNode) KillContainer(ctx context.Context, pod *corev1.Pod, container string) error {
	id, _, err := n.Container(ctx, pod, container)
	if err != nil {
		return err
	}
	if err := n.signalContainer(ctx, pod, container, "KILL"); err != nil {
		return err
	}
	return Until(ctx, "the end of "+pod.Name+" to be seen", func() (bool, error) {
		now, err := n.cluster.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return apierrors.IsNotFound(err), err
		}
		return now.UID != pod.UID || !slices.ContainsFunc(now.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
			return s.State.Running != nil && strings.HasSuffix(s.ContainerID, "://"+id)
		}), nil
	})
}

func (n *ClusterNode) signalContainer(ctx context.Context, pod *corev1.Pod, container, sig string) error {
	_, pid, err := n.Container(ctx, pod, container)
	if err != nil {
		return err
	}
	_, err = n.Run(ctx, "/bin/sh", "-c", "kill -"+sig+" "+strconv.Itoa(pid))
	return err
}

// Container returns a pod's running container: its ID, and its pid as seen by the node.
func (n *ClusterNode) Container(
	ctx context.Context, pod *corev1.Pod, container string,
) (id string, pid int, err error) {
	list, err := n.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
		LabelSelector: map[string]string{
			"io.kubernetes.pod.uid": string(pod.UID), "io.kubernetes.container.name": container,
		},
	}})
	if err != nil {
		return "", 0, err
	}
	if len(list.Containers) != 1 {
		return "", 0, fmt.Errorf("%d containers %s of %s/%s run on %s", len(list.Containers), container, pod.Namespace,
			pod.Name, n.Name)
	}
	id = list.Containers[0].Id
	status, err := n.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return "", 0, err
	}
	var info struct{ Pid int }
	if err := json.Unmarshal([]byte(status.Info["info"]), &info); err != nil {
		return "", 0, fmt.Errorf("reading containerd's status of %s: %w", id, err)
	}
	if info.Pid == 0 {
		return "", 0, errors.New("containerd does not say which process " + id + " is")
	}
	return id, info.Pid, nil
}
