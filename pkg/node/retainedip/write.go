package retainedip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/apiserver"
)

// tryLater is not a failure.
type tryLater struct{ after time.Duration }

func (t tryLater) Error() string { return "too early, retrying after " + t.after.String() }

// apply writes what is promised over the object that it was compared with, nil if there was none.
func (p *Publisher) apply(ctx context.Context, key Name, o *object, want *promised, owner types.UID) error {
	if err := p.mayWrite(key); err != nil {
		return err
	}
	body, err := json.Marshal(want.apply(key, o, owner))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	force := true
	var now v1alpha1.RetainedIP
	err = p.client.Patch(types.ApplyPatchType).Namespace(key.Namespace).Resource(retainedIPs).Name(key.Name).
		VersionedParams(&metav1.PatchOptions{FieldManager: v1alpha1.AgentFieldManager, Force: &force}, metav1.ParameterCodec).
		Body(body).Do(ctx).Into(&now)
	if o == nil && (apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsConflict(err)) {
		err = p.unsquat(ctx, key, err)
	}
	if err := p.wrote(ctx, "apply", key, o, err); err != nil {
		if namespaceNotFound(err) {
			p.namespaceGone(key, want)
		}
		return fmt.Errorf("applying RetainedIP %s: %w", key, err)
	}
	p.mu.Lock()
	delete(p.homeless, key)
	p.mu.Unlock()
	p.keep(&now, want)
	p.log.Debug("Applied RetainedIP", "pod", key.Namespace+"/"+want.spec.PodName, "addrs", want.status.IPs,
		"phase", want.status.Phase, "expires", want.status.Expires)
	return nil
}

// errSquatted is about a name of this node's that another node's object has: the agent watches only its own node's, and
// a RetainedIP never changes its node.
var errSquatted = errors.New("the name is taken by another node's object")

// unsquat finds out whether a new object is refused because the name is taken, and deletes what has it. It returns err,
// or what is wrong with the name.
func (p *Publisher) unsquat(ctx context.Context, key Name, err error) error {
	var is v1alpha1.RetainedIP
	if p.client.Get().Namespace(key.Namespace).Resource(retainedIPs).Name(key.Name).Do(ctx).Into(&is) != nil ||
		is.Spec.NodeName == p.o.Node {
		return err
	}
	said := fmt.Errorf("%w: spec.nodeName is %q, expected %q; delete it: %w", errSquatted, is.Spec.NodeName, p.o.Node, err)
	if key.Name == v1alpha1.RetainedIPName(is.Spec.PodName, is.Spec.NodeName) {
		return said // it has the name by right
	}
	if p.deleteOne(ctx, &is) != nil {
		return said
	}
	p.log.Warn("Deleted another node's RetainedIP with a name reserved for this node", "object", key.String(),
		"node", is.Spec.NodeName)
	return tryLater{0}
}

// delete deletes the object that was compared with what is promised.
func (p *Publisher) delete(ctx context.Context, key Name, o *object) error {
	if err := p.mayWrite(key); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	err := p.remove(ctx, key, metav1.Preconditions{UID: &o.uid, ResourceVersion: &o.version})
	if objectNotFound(err) {
		err = nil
	}
	if err := p.wrote(ctx, "delete", key, o, err); err != nil {
		return fmt.Errorf("deleting RetainedIP %s: %w", key, err)
	}
	p.forget(key, o.uid)
	p.log.Debug("Deleted RetainedIP", "pod", key.Namespace+"/"+o.spec.PodName, "addrs", o.status.IPs)
	return nil
}

// remove deletes an object if it is still the one meant.
func (p *Publisher) remove(ctx context.Context, key Name, only metav1.Preconditions) error {
	body, err := json.Marshal(metav1.DeleteOptions{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"}, Preconditions: &only,
	})
	if err != nil {
		return err
	}
	return p.client.Delete().Namespace(key.Namespace).Resource(retainedIPs).Name(key.Name).Body(body).Do(ctx).Error()
}

func namespaceNotFound(err error) bool { return apiserver.Missing(err) == "namespaces" }

func objectNotFound(err error) bool { return apiserver.Missing(err) == retainedIPs }

// inNoNamespace reports whether the namespace of an object does not exist or is terminating.
func inNoNamespace(err error) bool {
	return namespaceNotFound(err) || apierrors.HasStatusCause(err, namespaceTerminating)
}

// namespaceTerminating is a constant of k8s.io/api/core/v1, which is large.
const namespaceTerminating metav1.CauseType = "NamespaceTerminating"

// mayWrite is the pace of one object.
func (p *Publisher) mayWrite(key Name) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.pace[key]
	if l == nil {
		l = rate.NewLimiter(rate.Every(paceEvery), paceBurst)
		p.pace[key] = l
	}
	if !l.Allow() {
		return tryLater{paceEvery}
	}
	return nil
}

// wrote counts a write. If it was refused because the object has changed, the new one is fetched.
func (p *Publisher) wrote(ctx context.Context, verb string, key Name, o *object, err error) error {
	p.metrics.writes.WithLabelValues(verb, resultOf(err)).Inc()
	changed := apierrors.IsConflict(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) ||
		apierrors.IsBadRequest(err)
	if o == nil || !changed {
		return err
	}
	var now v1alpha1.RetainedIP
	getErr := p.client.Get().Namespace(key.Namespace).Resource(retainedIPs).Name(key.Name).Do(ctx).Into(&now)
	switch {
	case getErr == nil && now.ResourceVersion != o.version:
		k, fresh := objectOf(&now)
		p.mu.Lock()
		p.objects[k] = fresh
		p.mu.Unlock()
		return tryLater{0}
	case objectNotFound(getErr):
		p.forget(key, o.uid)
		return tryLater{0}
	}
	return err
}

// resultOf is the label for how a write ended.
func resultOf(err error) string {
	var s apierrors.APIStatus
	switch {
	case err == nil:
		return "ok"
	case !errors.As(err, &s):
		return "unreachable"
	}
	switch s.Status().Code {
	case http.StatusConflict:
		return "conflict"
	case http.StatusUnauthorized, http.StatusForbidden:
		return "forbidden"
	case http.StatusNotFound:
		return "not_found"
	case http.StatusUnprocessableEntity, http.StatusBadRequest:
		return "invalid"
	}
	return "error"
}
