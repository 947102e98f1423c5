package retainedip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/node/apiserver"
)

// nodeOwner is the Node object that owns the RetainedIPs. Its UID changes if the Node is deleted and
// kubelet makes a new one.
type nodeOwner struct {
	client *apiserver.Client
	node   string
	log    *slog.Logger

	mu    sync.Mutex
	uid   types.UID
	asked time.Time
	err   error
	stale bool
}

// errNoNode means that the Node was deleted, or that kubelet has not made it yet. It is logged once, not for every
// object.
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
	uid, err := n.client.NodeUID(ctx)
	was := n.err
	n.asked, n.err = time.Now(), nil
	switch {
	case err == nil && uid == "":
		if n.err = fmt.Errorf("%w: Node %s", errNoNode, n.node); !errors.Is(was, errNoNode) {
			n.log.Warn("Cannot publish RetainedIPs, retrying", "err", n.err)
		}
	case err != nil:
		n.err = fmt.Errorf("the owner of the RetainedIPs: %w", err)
	}
	if n.err != nil {
		return "", n.err
	}
	n.uid, n.stale = uid, false
	return n.uid, nil
}
