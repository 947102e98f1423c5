package answers

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// lookAgain is how long the sandbox of a client that was not found is not looked for.
const lookAgain = 2 * time.Second

// Vantage is from where pods are asked: a node, or an ordinary pod of it. It outlives the pod, and boots of the node.
type Vantage struct {
	Node *lab.ClusterNode
	// Client returns the pod, with an empty name if there is none; it is nil if the node itself asks.
	Client func() (namespace, name string)

	mu      sync.Mutex
	sandbox *lab.Pod // of the client
	looked  time.Time
}

func (v *Vantage) String() string {
	if v.Client == nil {
		return v.Node.Name
	}
	return "a pod of " + v.Node.Name
}

// ErrAbsent is returned by Ask if the node is off or has no client.
var ErrAbsent = errors.New("no client asks")

// Ask asks which pod answers at an address.
func (v *Vantage) Ask(ctx context.Context, a netip.Addr) (lab.Answer, error) {
	if v.Node.Pid() == 0 {
		return lab.Answer{}, ErrAbsent
	}
	if v.Client == nil {
		return v.Node.Get(ctx, a)
	}
	from := v.from(ctx)
	if from == nil {
		return lab.Answer{}, ErrAbsent
	}
	answer, err := v.Node.GetFrom(ctx, *from, a)
	if err != nil {
		v.mu.Lock()
		if time.Since(v.looked) > lookAgain {
			v.sandbox = nil // it may be another one by now
		}
		v.mu.Unlock()
	}
	return answer, err
}

// from returns the client's sandbox, nil if it has none.
func (v *Vantage) from(ctx context.Context) *lab.Pod {
	v.mu.Lock()
	defer v.mu.Unlock()
	namespace, name := v.Client()
	if v.sandbox != nil && v.sandbox.Name == name {
		return v.sandbox
	}
	if name == "" || time.Since(v.looked) < lookAgain {
		return nil
	}
	v.looked = time.Now()
	is, err := v.Node.Sandbox(ctx, namespace, name)
	if err != nil {
		v.sandbox = nil
		return nil
	}
	v.sandbox = &is
	return v.sandbox
}
