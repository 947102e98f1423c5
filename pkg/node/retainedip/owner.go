package retainedip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// nodeOwner is the Node object that owns the RetainedIPs. Its UID changes if the Node is deleted and
// kubelet makes a new one.
type nodeOwner struct {
	client *rest.RESTClient
	node   string
	log    *slog.Logger

	mu    sync.Mutex
	uid   types.UID
	asked time.Time
	err   error
	stale bool
}

// errNoNode: the Node was deleted, or kubelet has not made it yet. It is logged once, not for every object.
var errNoNode = errors.New("the object that would own the RetainedIPs does not exist")

// ownerPause is between two questions for a Node that is not there.
const ownerPause = 3 * time.Second

// doubt has the next get ask again.
func (n *nodeOwner) doubt() {
	n.mu.Lock()
	n.stale = true
	n.mu.Unlock()
}

func (n *nodeOwner) get(ctx context.Context) (types.UID, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.uid != "" && !n.stale {
		return n.uid, nil
	}
	if since := time.Since(n.asked); n.err != nil && since < ownerPause {
		return "", n.err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var meta metav1.PartialObjectMetadata
	answer := n.client.Get().AbsPath("/api/v1/nodes", n.node).
		SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Do(ctx)
	err := answer.Error() // unlike Raw's, what the API server says
	if b, _ := answer.Raw(); err == nil {
		err = json.Unmarshal(b, &meta)
	}
	was := n.err
	n.asked, n.err = time.Now(), nil
	switch {
	case apierrors.IsNotFound(err):
		if n.err = fmt.Errorf("%w: Node %s", errNoNode, n.node); !errors.Is(was, errNoNode) {
			n.log.Warn("Publishing nothing, retrying", "err", n.err)
		}
	case err != nil:
		n.err = fmt.Errorf("Node %s, the owner of its RetainedIPs: %w", n.node, err)
	}
	if n.err != nil {
		return "", n.err
	}
	n.uid, n.stale = meta.UID, false
	return n.uid, nil
}

// PodCIDRs returns those of the Node.
func (p *Publisher) PodCIDRs(ctx context.Context) ([]netip.Prefix, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer := p.client.Get().AbsPath("/api/v1/nodes", p.o.Node).Do(ctx)
	err := answer.Error() // unlike Raw's, what the API server says
	var is struct {
		Spec struct{ PodCIDRs []netip.Prefix }
	}
	if b, _ := answer.Raw(); err == nil {
		err = json.Unmarshal(b, &is)
	}
	if err != nil {
		return nil, fmt.Errorf("Node %s: %w", p.o.Node, err)
	}
	return is.Spec.PodCIDRs, nil
}
