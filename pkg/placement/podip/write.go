package podip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
)

// errExpired says that a plan took longer than [planGood].
var errExpired = errors.New("plan expired")

const owner = client.FieldOwner(stayputv1alpha1.ControllerFieldManager)

// writer carries out what is decided. It reads past the caches what a write is bound to.
type writer struct {
	*state
	client client.Client
	live   client.WithWatch // past the cache
	ipam   *calico.IPAM
}

// carryOut makes the writes of a plan, in order, until one fails. What they return goes into the Book. pod is the pod
// that PlacePod is about, to what its home gives it besides.
func (c *writer) carryOut(ctx context.Context, s *session, plan pool.Plan, at time.Time, pod *corev1.Pod,
	to gate.Placement) error {
	for i, w := range plan.Writes {
		var err error
		if c.now().Sub(at) > planGood {
			err = errExpired
		}
		if err == nil {
			err = pool.Holds(ctx, w, past{c, s})
		}
		if err == nil {
			err = c.write(ctx, s, w, plan.Reason, pod, to)
		}
		if err != nil {
			s.unreserve(plan.Writes[i:])
			if Changed(err) {
				c.refresh(ctx, s, w)
			}
			return err
		}
	}
	return nil
}

// write makes one write, for a reason.
func (c *writer) write(ctx context.Context, s *session, w pool.Write, reason string, pod *corev1.Pod,
	to gate.Placement) error {
	switch w := w.(type) {
	case pool.CreateIP:
		o := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPName(w.PodIP.Addr)},
			Spec: w.PodIP.Spec()}
		if w.PodIP.Held {
			o.Finalizers = []string{stayputv1alpha1.FinalizerInUse}
		}
		if err := c.client.Create(ctx, o, owner); err != nil {
			return fmt.Errorf("creating PodIP %s: %w", w.PodIP.Addr, err)
		}
		s.setIP(o)
	case pool.UpdateIP:
		return c.updateIP(ctx, s, w.PodIP)
	case pool.StatusIP:
		return c.patchStatus(ctx, s, w.PodIP, map[string]any{"phase": string(w.PodIP.Phase),
			"podUID": string(w.PodIP.StatusUID), "nodeName": w.PodIP.Node, "since": metav1.NewTime(w.PodIP.Since),
			"conflict": nil,
			"podCIDR":  nil})
	case pool.DeleteIP:
		uid := types.UID(w.PodIP.UID)
		err := c.client.Delete(ctx,
			&stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPName(w.PodIP.Addr)}},
			client.Preconditions{UID: &uid, ResourceVersion: &w.PodIP.Version})
		if err != nil {
			return fmt.Errorf("deleting PodIP %s: %w", w.PodIP.Addr, err)
		}
		log.FromContext(ctx).Info("Freed an address", "address", w.PodIP.Addr,
			"pod", w.PodIP.Namespace+"/"+w.PodIP.PodName, "reason", reason)
		c.refreshIP(ctx, s, w.PodIP.Addr)
	case pool.PlacePod:
		if err := c.placePod(ctx, w, pod, to); err != nil {
			return err
		}
		s.notePlaced(w)
	case pool.EndPod:
		uid := w.UID
		err := c.client.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: w.Name}},
			client.Preconditions{UID: &uid})
		if err != nil {
			return fmt.Errorf("deleting pod %s/%s: %w", w.Namespace, w.Name, err)
		}
	case pool.HoldPool:
		return c.holdPool(ctx, s, w)
	case pool.FreeAllocation:
		return c.freeAllocation(ctx, s, w)
	case pool.WriteAudit:
		r, err := c.writeAudit(ctx, w.Audit)
		if err != nil {
			return fmt.Errorf("writing the PodIPAudit: %w", err)
		}
		s.setAudit(r)
	default:
		return fmt.Errorf("unknown type of write %T", w)
	}
	return nil
}

// updateIP writes the spec of a PodIP in one patch and, if our finalizer goes or comes, reads it before: the other
// finalizers stay.
func (c *writer) updateIP(ctx context.Context, s *session, p pool.PodIP) error {
	name := stayputv1alpha1.PodIPName(p.Addr)
	c.mu.Lock()
	is := s.book.PodIP(p.Addr)
	held := is != nil && is.Held
	c.unlock()
	o := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if held != p.Held {
		if err := c.live.Get(ctx, types.NamespacedName{Name: name}, o); err != nil {
			return fmt.Errorf("reading PodIP %s: %w", p.Addr, err)
		}
		if string(o.UID) != p.UID || o.ResourceVersion != p.Version {
			return conflict("podips", name)
		}
		if o.Spec = p.Spec(); p.Held {
			controllerutil.AddFinalizer(o, stayputv1alpha1.FinalizerInUse)
		} else {
			controllerutil.RemoveFinalizer(o, stayputv1alpha1.FinalizerInUse)
		}
		if err := c.client.Update(ctx, o, owner); err != nil {
			return fmt.Errorf("updating PodIP %s: %w", p.Addr, err)
		}
		if o.DeletionTimestamp != nil && len(o.Finalizers) == 0 {
			return nil // it is gone
		}
		s.setIP(o)
		return nil
	}
	// A merge patch would keep the optional fields that are empty now.
	replace := func(path string, value any) map[string]any {
		return map[string]any{"op": "replace", "path": path, "value": value}
	}
	patch, err := json.Marshal([]any{replace("/metadata/uid", p.UID), replace("/metadata/resourceVersion", p.Version),
		replace("/spec", p.Spec())})
	if err != nil {
		return err
	}
	if err := c.client.Patch(ctx, o, client.RawPatch(types.JSONPatchType, patch), owner); err != nil {
		return fmt.Errorf("updating PodIP %s: %w", p.Addr, err)
	}
	s.setIP(o)
	return nil
}

// patchStatus writes fields of the status of a PodIP, bound to its version.
func (c *writer) patchStatus(ctx context.Context, s *session, p pool.PodIP, fields map[string]any) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": p.UID, "resourceVersion": p.Version}, "status": fields,
	})
	if err != nil {
		return err
	}
	o := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPName(p.Addr)}}
	if err := c.client.Status().Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner); err != nil {
		return fmt.Errorf("patching the status of PodIP %s: %w", p.Addr, err)
	}
	s.setIP(o)
	return nil
}

// placePod writes a pod's addresses and removes its gate, in one patch.
func (c *writer) placePod(ctx context.Context, w pool.PlacePod, pod *corev1.Pod, to gate.Placement) error {
	if pod == nil || pod.UID != w.UID || pod.ResourceVersion != w.Version {
		return conflict("pods", w.Name)
	}
	text, err := json.Marshal(w.Addresses)
	if err != nil {
		return err
	}
	annotations := map[string]string{}
	maps.Copy(annotations, to.Annotations)
	annotations[stayputv1alpha1.AnnotationAddresses] = string(text)
	if err := asksCalico(annotations, w.Addresses); err != nil {
		return err
	}
	to.Annotations = annotations
	to.Affinity.Required = slices.Clone(to.Affinity.Required)
	to.Affinity.Without = slices.Concat(to.Affinity.Without, w.Without)
	c.mu.Lock()
	for _, a := range w.Addresses {
		if o := c.pools[a.Pool]; o != nil {
			var required []corev1.NodeSelectorRequirement
			required, err = nodesOf(o)
			to.Affinity.Required = append(to.Affinity.Required, required...)
		}
	}
	c.unlock()
	if err != nil {
		return err
	}
	if err := gate.Place(ctx, c.client, pod, to); err != nil {
		return fmt.Errorf("placing pod %s/%s: %w", w.Namespace, w.Name, err)
	}
	return nil
}

func (c *writer) holdPool(ctx context.Context, s *session, w pool.HoldPool) error {
	var o client.Object = &stayputv1alpha1.PodIPPool{}
	c.mu.Lock()
	if is := c.pools[w.Name]; is != nil && isSpider(is) {
		o = &spiderpoolv2beta1.SpiderIPPool{}
	}
	c.unlock()
	if err := c.live.Get(ctx, types.NamespacedName{Name: w.Name}, o); err != nil {
		return fmt.Errorf("reading pool %s: %w", w.Name, err)
	}
	if o.GetResourceVersion() != w.Version {
		c.mu.Lock()
		c.putPoolLocked(o)
		c.unlock()
		return conflict("podippools", w.Name)
	}
	return c.setFinalizer(ctx, o, w.Held)
}

// setFinalizer puts our finalizer on a pool, or takes it off.
func (c *writer) setFinalizer(ctx context.Context, o client.Object, on bool) error {
	if on {
		controllerutil.AddFinalizer(o, stayputv1alpha1.FinalizerInUse)
	} else {
		controllerutil.RemoveFinalizer(o, stayputv1alpha1.FinalizerInUse)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": o.GetUID(), "resourceVersion": o.GetResourceVersion(), "finalizers": o.GetFinalizers(),
	}})
	if err != nil {
		return err
	}
	if err := c.client.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner); err != nil {
		return fmt.Errorf("patching pool %s: %w", o.GetName(), err)
	}
	if o.GetDeletionTimestamp() != nil && len(o.GetFinalizers()) == 0 {
		return nil // it is gone
	}
	c.mu.Lock()
	defer c.unlock()
	c.putPoolLocked(o)
	return nil
}

// audit reads the audit past the cache; without a Version there is none.
func (c *writer) audit(ctx context.Context) (pool.Audit, error) {
	o := &stayputv1alpha1.PodIPAudit{}
	err := c.live.Get(ctx, types.NamespacedName{Name: stayputv1alpha1.PodIPAuditName}, o)
	if apierrors.IsNotFound(err) {
		return pool.Audit{}, nil
	}
	if err != nil {
		return pool.Audit{}, fmt.Errorf("reading the PodIPAudit: %w", err)
	}
	return pool.AuditOf(o), nil
}

// writeAudit returns the audit as it is written.
func (c *writer) writeAudit(ctx context.Context, r pool.Audit) (pool.Audit, error) {
	o := r.Object()
	var err error
	if r.Version == "" {
		err = c.client.Create(ctx, o, owner)
	} else {
		err = c.client.Update(ctx, o, owner)
	}
	return pool.AuditOf(o), err
}

// refresh reads what a write was about, if it has changed: the caches may be behind for a while.
func (c *writer) refresh(ctx context.Context, s *session, w pool.Write) {
	var about pool.PodIP
	switch w := w.(type) {
	case pool.CreateIP:
		if about = w.PodIP; about.Mode == pool.Calico { // another pod may have it: it is read until that is over
			defer signal(c.toReserve)
		}
	case pool.UpdateIP:
		about = w.PodIP
	case pool.StatusIP:
		about = w.PodIP
	case pool.DeleteIP:
		about = w.PodIP
	default:
		if r, err := c.audit(ctx); err == nil {
			s.setAudit(r)
		}
		return
	}
	if about.Mode == pool.Calico { // another pod may have it
		_ = c.observeAnyAllocation(ctx, s, about.Addr) // it is decided again anyway
		c.mu.Lock()
		c.enqueueLocked(pool.KeyOfAddress(about.Addr))
		c.unlock()
	}
	c.refreshIP(ctx, s, about.Addr)
}

func (c *writer) refreshIP(ctx context.Context, s *session, a netip.Addr) {
	o := &stayputv1alpha1.PodIP{}
	c.mu.Lock()
	was := s.book.PodIP(a)
	c.unlock()
	err := c.live.Get(ctx, types.NamespacedName{Name: stayputv1alpha1.PodIPName(a)}, o)
	c.mu.Lock()
	defer c.unlock()
	switch is := s.book.PodIP(a); {
	case err == nil:
		s.setIPLocked(o)
	case apierrors.IsNotFound(err) && is != nil && is == was: // nothing came meanwhile
		s.removeIPLocked(a)
	}
}

func conflict(resource, name string) error {
	of := schema.GroupResource{Group: stayputv1alpha1.SchemeGroupVersion.Group, Resource: resource}
	return apierrors.NewConflict(of, strings.TrimSpace(name), pool.ErrStale)
}

// past reads past the caches.
type past struct {
	c *writer
	s *session
}

func (p past) Seen() pool.Audit {
	p.c.mu.Lock()
	defer p.c.unlock()
	return p.s.book.Audit()
}

func (p past) Pod(ctx context.Context, of, name string) (*pool.Pod, error) {
	o := &corev1.Pod{}
	err := p.c.live.Get(ctx, types.NamespacedName{Namespace: of, Name: name}, o)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	is, _ := podOf(o, namespace{}, false, false, p.c.longest) // only what it is, not what it asks for
	return &is, nil
}

func (p past) Node(ctx context.Context, name string) (*pool.Node, error) {
	o := &corev1.Node{}
	err := p.c.live.Get(ctx, types.NamespacedName{Name: name}, o)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	is := nodeOf(o, nil)
	return &is, nil
}

func (p past) Nodes(ctx context.Context) (names []string, err error) {
	list := &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
	if err := p.c.live.List(ctx, list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names, nil
}

func (p past) PodIP(ctx context.Context, a netip.Addr) (*pool.PodIP, error) {
	o := &stayputv1alpha1.PodIP{}
	if err := p.c.live.Get(ctx, types.NamespacedName{Name: stayputv1alpha1.PodIPName(a)}, o); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	is, err := pool.PodIPOf(o, p.c.longest)
	return &is, err
}

func (p past) Allocation(ctx context.Context, a netip.Addr) (pool.Allocation, error) {
	return p.c.ipam.Observe(ctx, a)
}

func (p past) Audit(ctx context.Context) (pool.Audit, error) { return p.c.audit(ctx) }

func (p past) Now() time.Time { return p.c.now() }
