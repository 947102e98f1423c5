package placement

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// poolsUnknown is when to look again whether a pod asks for addresses of pools, while that is not known.
const poolsUnknown = 100 * time.Millisecond

// hand leaves a gated pod to package podip, which gives it its addresses and asks [placer.homeBesides].
func (p *placer) hand(ctx context.Context, pod *corev1.Pod) {
	p.memory.asksPools(pod)
	if why := p.pools.Why(); why != "" {
		p.say(pod, corev1.EventTypeWarning, home.ReasonAddressWait, why)
	}
	p.pools.Wake(ctx, pod)
}

// disowned queues a gated pod that does not ask for addresses of pools any more.
func (p *placer) disowned(pod types.NamespacedName) {
	if queue := p.queue.Load(); queue != nil {
		(*queue).Add(reconcile.Request{NamespacedName: pod})
	}
}

// homeBesides decides where a gated pod goes whose addresses belong to it on any node: only where a PersistentPodState
// says, or to the node where its address was last if the annotation stayput.io/home asks for that.
func (p *placer) homeBesides(ctx context.Context, pod *corev1.Pod, last string) (to gate.Placement, placed func(),
	ok bool, retry time.Duration, err error) {
	nodes := cluster.NewNodes(ctx, p.client)
	s := home.Situation{Now: p.now(), Pod: pod, GivenUp: p.memory.gaveUp(pod), Since: p.memory.waitsSince(pod),
		Waited: p.memory.waited(pod), Nodes: nodes, Lost: p.memory.lostNode}
	if _, pulled := pod.Annotations[stayputv1alpha1.AnnotationHome]; pulled {
		s.Address.Node = last
	}
	if s.Record, err = p.records.Of(ctx, pod); err != nil {
		return to, nil, false, 0, err
	}
	d := home.Decide(s)
	if nodes.Err != nil {
		return to, nil, false, 0, nodes.Err
	}
	for _, note := range d.Notes {
		p.say(pod, corev1.EventTypeWarning, home.ReasonHomeIgnored, note)
	}
	if d.Outcome == home.OutcomeWait {
		p.wait(pod, d)
		return to, nil, false, d.Retry, nil
	}
	d.Nominate = "" // a write of its own, which the addresses are not bound to
	s.Address = home.Address{}
	return p.placement(pod, s.Record, d), func() { p.placed(ctx, pod, s, d) }, true, 0, nil
}
