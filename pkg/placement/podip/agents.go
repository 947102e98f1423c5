package podip

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// agentDaemonSet is the DaemonSet of the agents, in the namespace of the installation.
const agentDaemonSet = "stayput-agent"

// findAgents reads on which nodes agents are to run, past the caches, and puts the nodes into the Book again if that
// has changed. If it cannot be read, what was known stands: without it agents are expected on every node.
func (c *follower) findAgents(ctx context.Context, s *session) {
	if c.announcer.installation.Namespace == "" {
		return
	}
	var set appsv1.DaemonSet
	name := types.NamespacedName{Namespace: c.announcer.installation.Namespace, Name: agentDaemonSet}
	var is *corev1.Pod
	switch err := c.live.Get(ctx, name, &set); {
	case err == nil:
		from := set.Spec.Template.Spec
		is = &corev1.Pod{Spec: corev1.PodSpec{NodeSelector: from.NodeSelector, Affinity: from.Affinity}}
	case !apierrors.IsNotFound(err): // without it no node is known to have no agent
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
