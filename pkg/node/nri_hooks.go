package node

import (
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/pkg/node/uninstall"
	"github.com/stayput/stayput/pkg/node/wake"
)

// Sandbox is a pod sandbox as the runtime describes it.
type Sandbox struct {
	ID          string // the containerID of CNI
	Pod         ledger.Pod
	Annotations map[string]string
	Netns       string // path; empty for a pod on the host's network and for a pod that has ended
}

func (s Sandbox) attrs(more ...any) []any {
	return append([]any{"pod", s.Pod.String(), "sandbox", s.ID}, more...)
}

// hooks is what the runtime calls. It disconnects a plugin that needs more than 2 s, and makes all events of the node
// wait meanwhile: a hook makes one promise at most, and leaves the rest to the queue.
type hooks struct {
	policies    *policies
	queue       *queue
	pools       *podip.Keeper
	uninstaller *uninstall.Uninstaller
	reconcile   wake.Signal
	book        wake.Signal
	metrics     *metrics
}

// uninstalling reports whether the node is being put back: from then on the hooks do nothing.
func (h *hooks) uninstalling() bool { return h.uninstaller.Status().Message != "" }

// timed measures a hook until its result is called.
func (h *hooks) timed(hook string) (done func()) {
	start := time.Now()
	return func() { h.metrics.hookDuration.WithLabelValues(hook).Observe(time.Since(start).Seconds()) }
}

// RunPodSandbox is the hook of a sandbox that has just got its addresses. What it asks for is promised before it
// returns: should everything fall over right after, the pod still comes back with its address.
func (a *Agent) RunPodSandbox(s Sandbox) {
	h := a.hooks
	defer h.timed("RunPodSandbox")()
	if s.Netns == "" || h.uninstalling() {
		return // on the host's network: CNI had nothing to do with it
	}
	h.ran(s)
}

// ran is what follows the start of a sandbox.
func (h *hooks) ran(s Sandbox) {
	o := observe(s)
	h.policies.promiseInTime(o)
	h.queue.put(o)
	h.pools.Look(s.Pod, s.Annotations, false)
}

// StopPodSandbox is the hook of a sandbox that is about to lose its addresses. It changes no policy.
func (a *Agent) StopPodSandbox(s Sandbox) {
	defer a.hooks.timed("StopPodSandbox")()
	a.hooks.book.Up()
	a.hooks.pools.Look(s.Pod, s.Annotations, true)
}

// RemovePodSandbox is the hook of a sandbox that has gone.
func (a *Agent) RemovePodSandbox(s Sandbox) {
	defer a.hooks.timed("RemovePodSandbox")()
	a.hooks.book.Up()
	a.hooks.pools.Look(s.Pod, s.Annotations, true)
}

// Synchronize is the hook of a new connection: it catches up with all that happened while there was none. There is no
// time for promises: the queue makes them.
func (a *Agent) Synchronize(all []Sandbox) {
	h := a.hooks
	defer h.timed("Synchronize")()
	if h.uninstalling() {
		return
	}
	for _, s := range all {
		if s.Netns != "" {
			h.queue.put(observe(s))
		}
	}
	h.reconcile.Up()
}

// Connected is the hook of an NRI connection that was made or lost.
func (a *Agent) Connected(up bool) {
	a.nriUp.Store(up)
	if up {
		a.metrics.nriConnected.Set(1)
		a.metrics.nriConnections.Inc()
		a.reconnected.Up()
	} else {
		a.metrics.nriConnected.Set(0)
		a.unseen.now.Up()
	}
}
