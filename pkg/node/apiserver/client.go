// Package apiserver is the API server as the agent of one node asks it: its one client, and what it knows of the Node.
// Nothing else of the agent reads Nodes.
//
// Every answer is as it is past all caches. An object is reported as missing only if the API server says so of this
// very kind: an error is ignorance, and so is a 404 by a server that does not know the kind.
//
// The agent runs on every node and knows few kinds: it links neither client-go's typed clients nor k8s.io/api/core.
package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

const (
	// CallTimeout is for one request. The API server itself gives up after 60 s; nothing waits for it.
	CallTimeout = 10 * time.Second
	// ListTimeout is for one list. It exceeds the API server's own limit of 60 s, so that no agent begins a slow list
	// again that the API server still serves.
	ListTimeout = 70 * time.Second
	// qps and burst let a node whose pods all end at once tell so within seconds.
	qps, burst = 70, 400
)

// Client asks the API server for an agent. Its requests are of Stayput's kinds, or of the path that they name.
type Client struct {
	*rest.RESTClient
	node string
}

// New returns the client of a node. It decodes Stayput's kinds, and those that known adds.
func New(config *rest.Config, node string, known ...func(*runtime.Scheme)) (*Client, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	for _, add := range known {
		add(scheme)
	}
	c := rest.CopyConfig(config)
	c.APIPath, c.GroupVersion = "/apis", &v1alpha1.SchemeGroupVersion
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.ContentType = runtime.ContentTypeJSON
	c.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(qps, burst)
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("API client for %s: %w", c.Host, err)
	}
	return &Client{client, node}, nil
}

// Missing returns the resource that the API server says does not exist, empty if err says no such thing.
func Missing(err error) string {
	var s apierrors.APIStatus
	if !errors.As(err, &s) || !apierrors.IsNotFound(err) || s.Status().Details == nil ||
		apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		return ""
	}
	return s.Status().Details.Kind
}

// Node is a Node as far as it matters to its agent.
type Node struct {
	Spec struct {
		PodCIDRs []netip.Prefix
		Taints   []struct{ Key string }
	}
	Status struct {
		Conditions []struct{ Type, Status, Reason string }
	}
}

// Node returns this Node, nil if it does not exist.
func (c *Client) Node(ctx context.Context) (*Node, error) {
	n := &Node{}
	there, err := c.readNode(ctx, runtime.ContentTypeJSON, n)
	if !there {
		return nil, err
	}
	return n, nil
}

// PodCIDRs returns those of this Node, none if it has none. A Node that does not exist is an error.
func (c *Client) PodCIDRs(ctx context.Context) ([]netip.Prefix, error) {
	n, err := c.Node(ctx)
	if err == nil && n == nil {
		err = fmt.Errorf("Node %s does not exist", c.node)
	}
	if err != nil {
		return nil, err
	}
	return n.Spec.PodCIDRs, nil
}

// NodeUID returns the UID of this Node, empty if it does not exist. That costs less than the Node.
func (c *Client) NodeUID(ctx context.Context) (types.UID, error) {
	var meta metav1.PartialObjectMetadata
	_, err := c.readNode(ctx, "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", &meta)
	return meta.UID, err
}

// readNode reads this Node in a media type, and reports whether it exists.
func (c *Client) readNode(ctx context.Context, mediaType string, into any) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	answer := c.Get().AbsPath("/api/v1/nodes", c.node).SetHeader("Accept", mediaType).Do(ctx)
	err := answer.Error() // unlike Raw's, what the API server says
	if Missing(err) == "nodes" {
		return false, nil
	}
	if b, _ := answer.Raw(); err == nil {
		err = json.Unmarshal(b, into)
	}
	if err != nil {
		return false, fmt.Errorf("reading Node %s: %w", c.node, err)
	}
	return true, nil
}
