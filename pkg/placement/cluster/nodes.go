package cluster

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const nodesByLabel = "label"

// NodeLabel writes one of these labels as the index of nodes has it.
func NodeLabel(key string, of map[string]string) string { return key + "=" + of[key] }

// NodeLabels returns all labels of a node as [NodeLabel] writes them.
func NodeLabels(node client.Object) (all []string) {
	for key := range node.GetLabels() {
		all = append(all, NodeLabel(key, node.GetLabels()))
	}
	return all
}

// IndexNodes makes the cache find nodes by label.
func IndexNodes(ctx context.Context, indexer client.FieldIndexer) error {
	return indexer.IndexField(ctx, &corev1.Node{}, nodesByLabel, NodeLabels)
}

// Nodes are the nodes in the cache, which is complete before anything is decided.
type Nodes struct {
	ctx    context.Context
	client client.Reader
	// Err is the first error: then nothing may be decided on what was returned.
	Err error
}

// NewNodes returns the nodes for one decision.
func NewNodes(ctx context.Context, cache client.Reader) *Nodes {
	return &Nodes{ctx: ctx, client: cache}
}

// Node returns the node of that name, nil if there is none.
func (n *Nodes) Node(name string) *corev1.Node {
	if name == "" {
		return nil
	}
	var node corev1.Node
	if err := n.client.Get(n.ctx, types.NamespacedName{Name: name}, &node); err != nil {
		n.fail(client.IgnoreNotFound(err))
		return nil
	}
	return &node
}

// Labelled returns all nodes with these labels.
func (n *Nodes) Labelled(want map[string]string) []*corev1.Node {
	var list corev1.NodeList
	for key := range want { // any one of them goes by the index
		n.fail(n.client.List(n.ctx, &list, client.MatchingFields{nodesByLabel: NodeLabel(key, want)},
			client.MatchingLabels(want), client.UnsafeDisableDeepCopy))
		break
	}
	all := make([]*corev1.Node, len(list.Items))
	for i := range list.Items {
		all[i] = &list.Items[i]
	}
	return all
}

func (n *Nodes) fail(err error) {
	if n.Err == nil {
		n.Err = err
	}
}
