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

// report writes the status of a PodIP. If that has changed since it was read or written, the pod is due again.
func (c *podCheck) report(ctx context.Context, a netip.Addr, o *v1alpha1.PodIP, phase pool.Phase, l pool.Local) (
	verdict, error) {
	since := metav1.NewTime(c.machine.now().UTC().Truncate(time.Second))
	next := &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion}}
	next.Status = v1alpha1.PodIPStatus{Phase: phase, PodUID: c.pod.uid, NodeName: c.node,
		Since: &since}
	if phase == pool.Allocated {
		next.Status.Conflict = l.Conflict
	}
	if phase != pool.Retained && l.PodCIDR.IsValid() {
		next.Status.PodCIDR = l.PodCIDR.String()
	}
	err := c.api.ApplyStatus(ctx, next)
	if err != nil {
		next = nil
	}
	c.pods.wrote(c.pod, a, next)
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return soon, nil
	case err != nil:
		return soon, err
	}
	c.log.Info("Reported PodIP", "phase", phase, "pod", c.pod.String(), "podip", o.Name)
	return settled, nil
}
