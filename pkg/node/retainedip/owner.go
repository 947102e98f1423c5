package retainedip

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// nodeOwner is the Node object that owns the RetainedIPs. Its UID changes if the Node is deleted and
// kubelet makes a new one.
type nodeOwner struct {
	client *rest.RESTClient
	node   string

	mu    sync.Mutex
	uid   types.UID
	asked time.Time
	err   error
	stale bool
}

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
	b, err := n.client.Get().AbsPath("/api/v1/nodes", n.node).
		SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(b, &meta)
	}
	n.asked, n.err = time.Now(), nil
	if err != nil {
		n.err = fmt.Errorf("Node %s, the owner of its RetainedIPs: %w", n.node, err)
		return "", n.err
	}
	n.uid, n.stale = meta.UID, false
	return n.uid, nil
}
