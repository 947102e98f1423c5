package podip

import (
	"context"
	"net/netip"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/pool"
)

// report writes the status of a PodIP. If that has changed since it was read, the pod is due again.
func (c *podCheck) report(ctx context.Context, o *v1alpha1.PodIP, phase pool.Phase, l pool.Local) (verdict, error) {
	since := metav1.NewTime(c.machine.now().UTC().Truncate(time.Second))
	next := &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion}}
	next.Status = v1alpha1.PodIPStatus{Phase: v1alpha1.PodIPPhase(phase), PodUID: c.pod.uid, NodeName: c.node,
		Since: &since}
	if phase == pool.Allocated {
		next.Status.Conflict = l.Conflict
	}
	if phase != pool.Retained && l.PodCIDR.IsValid() {
		next.Status.PodCIDR = l.PodCIDR.String()
	}
	err := c.api.Report(ctx, next)
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return soon, nil
	case err != nil:
		return soon, err
	}
	c.log.Info("Reported PodIP", "phase", phase, "pod", c.pod.String(), "podip", o.Name)
	return settled, nil
}

// ipOf is a PodIP in the words of package pool, nil if there is none.
func ipOf(a netip.Addr, o *v1alpha1.PodIP) *pool.PodIP {
	if o == nil {
		return nil
	}
	cidr, _ := netip.ParsePrefix(o.Status.PodCIDR) // what cannot be read is written again
	return &pool.PodIP{
		Addr: a, UID: string(o.UID), Version: o.ResourceVersion, PodUID: pool.UID(o.Spec.PodUID),
		Phase: pool.Phase(o.Status.Phase), Of: pool.UID(o.Status.PodUID), Node: o.Status.NodeName,
		Conflict: o.Status.Conflict, PodCIDR: cidr,
	}
}
