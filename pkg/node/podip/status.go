package podip

import (
	"context"
	"net/netip"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/pool"
)

// report writes the status of a PodIP, bound to the version that was read. It always makes a new one: two agents, or an
// agent and a controller, that have read the same cannot both write.
func (c *podCheck) report(ctx context.Context, a netip.Addr, phase pool.Phase) error {
	o, l := c.ips[a], c.locals[a]
	since := metav1.NewTime(c.machine.now().UTC().Truncate(time.Second))
	if was := o.Status.Since; was != nil && !since.After(was.Time) {
		since = metav1.NewTime(was.Add(time.Second))
	}
	next := &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion}}
	next.Status = v1alpha1.PodIPStatus{Phase: phase, PodUID: c.pod.uid, NodeName: c.node, Since: &since}
	if phase == pool.Bound {
		if !l.Netns {
			next.Status.Conflict = l.Conflict
		}
		if l.PodCIDR.IsValid() {
			next.Status.PodCIDR = l.PodCIDR.String()
		}
	}
	if err := c.api.ApplyStatus(ctx, next); err != nil {
		return err
	}
	c.log.Info("Reported PodIP", "phase", phase, "pod", c.pod.String(), "podip", o.Name)
	return nil
}
