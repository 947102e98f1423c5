package retainedip

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/apiserver"
)

// DeleteAll deletes the node's RetainedIPs. Lost rights or a deleted definition are no error: an uninstallation may
// remove rights, objects and definition at the same time.
func (p *Publisher) DeleteAll(ctx context.Context) error {
	inTime, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	list, err := listWatch{p}.ListWithContext(inTime, metav1.ListOptions{})
	if err != nil {
		if pointless(err) {
			p.log.Warn("No longer allowed to delete this node's RetainedIPs; if any are left: "+
				"kubectl delete retainedips -A --field-selector spec.nodeName="+p.o.Node, "err", err)
			return nil
		}
		return fmt.Errorf("listing RetainedIPs: %w", err)
	}
	var errs []error
	items := list.(*v1alpha1.RetainedIPList).Items
	for i := range items {
		r := &items[i]
		if err := p.deleteOne(ctx, r); err != nil && !pointless(err) {
			errs = append(errs, fmt.Errorf("deleting RetainedIP %s/%s: %w", r.Namespace, r.Name, err))
		}
	}
	if len(errs) == 0 && len(items) > 0 {
		p.log.Info("Deleted this node's RetainedIPs", "number", len(items))
	}
	return errors.Join(errs...)
}

func (p *Publisher) deleteOne(ctx context.Context, r *v1alpha1.RetainedIP) error {
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	err := p.remove(ctx, nameOf(r), metav1.Preconditions{UID: &r.UID})
	p.metrics.writes.WithLabelValues("delete", resultOf(err)).Inc()
	return err
}

// pointless reports whether another try would bring nothing: no right, or no such thing.
func pointless(err error) bool {
	var s apierrors.APIStatus
	if !errors.As(err, &s) {
		return false
	}
	switch s.Status().Code {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		return true
	}
	return false
}
