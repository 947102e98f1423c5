package podip

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// agentDaemonSet is the DaemonSet of the agents, in the namespace of the installation.
const agentDaemonSet = "stayput-agent"

// noAgents is the pod of agents that run nowhere: an installation without them says so.
var noAgents = &corev1.Pod{Spec: corev1.PodSpec{Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
	RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{}, // without terms it matches no node
}}}}

// findAgents reads on which nodes agents are to run, past the caches, and puts the nodes into the Book again if that
// has changed. If it cannot be read, what was known stands: without it agents are expected on every node.
func (c *follower) findAgents(ctx context.Context, s *session) {
	if c.announcer.installation.Namespace == "" {
		return
	}
	is, err := c.readAgents(ctx)
	if err != nil {
		if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Cannot read on which nodes agents are to run")
		}
		return
	}
	c.mu.Lock()
	changed := !equality.Semantic.DeepEqual(c.agents, is)
	c.agents = is
	c.unlock()
	if !changed {
		return
	}
	if err := c.setNodes(ctx, s); err != nil {
		log.FromContext(ctx).Error(err, "Cannot list nodes")
		c.mu.Lock()
		defer c.unlock()
		c.agents = nil // the next look lists them
	}
}

// readAgents returns a pod as the template of the agents' DaemonSet, nil if that is not there, though agents are wanted.
func (c *follower) readAgents(ctx context.Context) (*corev1.Pod, error) {
	var set appsv1.DaemonSet
	installation := c.announcer.installation
	err := c.live.Get(ctx, types.NamespacedName{Namespace: installation.Namespace, Name: agentDaemonSet}, &set)
	if err == nil {
		of := set.Spec.Template.Spec
		return &corev1.Pod{Spec: corev1.PodSpec{NodeSelector: of.NodeSelector, Affinity: of.Affinity}}, nil
	}
	if !apierrors.IsNotFound(err) {
		return nil, err
	}
	var is corev1.ConfigMap // without a DaemonSet alone no node is known to have no agent
	if err := c.live.Get(ctx, installation, &is); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	if is.Data["agents"] == "false" {
		return noAgents, nil
	}
	return nil, nil
}

// setNodes puts all nodes into the Book again.
func (c *follower) setNodes(ctx context.Context, s *session) error {
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	c.mu.Lock()
	defer c.unlock()
	for i := range nodes.Items {
		if name := nodes.Items[i].Name; s.book.Node(name) { // what its watch has removed is gone
			s.book.SetNode(nodeOf(&nodes.Items[i], c.agents))
		}
	}
	return nil
}
