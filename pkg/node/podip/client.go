package podip

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apilist"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/pkg/wire"
)

// Pod is a pod of Kubernetes, as far as it matters here. Package k8s.io/api/core/v1 is large.
type Pod struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
		PodIP string `json:"podIP"`
	} `json:"status"`
}

// DeepCopyObject implements runtime.Object.
func (p *Pod) DeepCopyObject() runtime.Object {
	c := *p
	p.ObjectMeta.DeepCopyInto(&c.ObjectMeta)
	return &c
}

// Reset empties the pod, for Unmarshal.
func (p *Pod) Reset() { *p = Pod{} }

// Unmarshal reads a pod off the wire, without its managed fields. To decode them too, and its containers, would be most
// of what the agent decodes.
func (p *Pod) Unmarshal(message []byte) error {
	return wire.Each(message, func(f wire.Field) (err error) {
		switch f.Number {
		case 1:
			err = p.readMeta(f.Bytes)
		case 2:
			err = p.readSpec(f.Bytes)
		case 3:
			err = p.readStatus(f.Bytes)
		}
		return err
	})
}

func (p *Pod) readMeta(message []byte) error {
	const managedFields = 17
	var meta []byte
	err := wire.Each(message, func(f wire.Field) error {
		if f.Number != managedFields {
			meta = append(meta, f.Whole...)
		}
		return nil
	})
	if err == nil {
		err = p.ObjectMeta.Unmarshal(meta)
	}
	if err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	return nil
}

func (p *Pod) readSpec(message []byte) error {
	err := wire.Each(message, func(f wire.Field) error {
		if f.Number == 10 {
			p.Spec.NodeName = string(f.Bytes)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	return nil
}

func (p *Pod) readStatus(message []byte) error {
	err := wire.Each(message, func(f wire.Field) error {
		switch f.Number {
		case 1:
			p.Status.Phase = string(f.Bytes)
		case 6:
			p.Status.PodIP = string(f.Bytes)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	return nil
}

// terminal reports whether the pod has ended for good: no node starts it again.
func (p *Pod) terminal() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }

// slim drops what does not matter here, and may be large: the agent keeps the pods of its node.
func (p *Pod) slim() {
	p.ManagedFields, p.OwnerReferences, p.Finalizers = nil, nil, nil
	maps.DeleteFunc(p.Annotations, func(key, _ string) bool {
		return key != v1alpha1.AnnotationReservedIPDuration && !strings.HasPrefix(key, v1alpha1.SchemeGroupVersion.Group+"/")
	})
	maps.DeleteFunc(p.Labels, func(key, _ string) bool { return !strings.HasPrefix(key, statefulSetLabels) })
}

// api is what the API server is asked. What it returns is as it is past all caches; nil is what surely does not exist.
type api interface {
	// Pods lists the pods of the node.
	Pods(ctx context.Context) (pods []Pod, version string, err error)
	WatchPods(ctx context.Context, version string) (watch.Interface, error)
	// Pod returns a pod of any node.
	Pod(ctx context.Context, namespace, name string) (*Pod, error)
	PodIP(ctx context.Context, addr netip.Addr) (*v1alpha1.PodIP, error)
	// PodIPsHere lists the PodIPs whose status, or whose spec.adoptedOn, names this node.
	PodIPsHere(ctx context.Context) ([]v1alpha1.PodIP, error)
	// ApplyStatus applies the status of a PodIP, bound to its UID and version.
	ApplyStatus(ctx context.Context, ip *v1alpha1.PodIP) error
	Audit(ctx context.Context) (audit *v1alpha1.PodIPAudit, version string, err error)
	WatchAudit(ctx context.Context, version string) (watch.Interface, error)
	// Report returns the report of this node.
	Report(ctx context.Context) (*v1alpha1.PodIPReport, error)
	// ApplyReport applies the report of this node.
	ApplyReport(ctx context.Context, report *v1alpha1.PodIPReport) error
	// Node returns the UID of this node, empty if it does not exist.
	Node(ctx context.Context) (types.UID, error)
	// Routed calls each for all PodIPs that RoutedSelector selects, of all nodes. After an error they were not all. Of a
	// PodIP it and WatchRouted tell only what [router.placeOf] asks for.
	Routed(ctx context.Context, each func(*v1alpha1.PodIP)) (version string, err error)
	WatchRouted(ctx context.Context, version string) (watch.Interface, error)
	// Version returns the version of the API server.
	Version(ctx context.Context) (string, error)
	// RoutedByCloud reports whether a cloud's router has the routes to the pods of this node.
	RoutedByCloud(ctx context.Context) (bool, error)
	// PodCIDRs returns those of this node, none if it has none. A Node that does not exist is an error.
	PodCIDRs(ctx context.Context) ([]netip.Prefix, error)
	// Off reports whether an operator has declared this node off.
	Off(ctx context.Context) (bool, error)
}

// server is the API server.
type server struct {
	client *apiserver.Client
	node   string
}

// AddToScheme makes a client know pods as they are known here.
func AddToScheme(scheme *runtime.Scheme) {
	core := schema.GroupVersion{Version: "v1"}
	scheme.AddKnownTypeWithName(core.WithKind("Pod"), &Pod{})
	metav1.AddToGroupVersion(scheme, core)
}

const pods = "/api/v1/pods"

// asProtobuf is how pods are asked for, but for lists, as kubelet and the controller do: the API server encodes an
// event once for all that watch in one encoding. A list is read as JSON, one pod after the other: see package apilist.
const asProtobuf = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON

func (s *server) mine() string { return fields.OneTermEqualSelector("spec.nodeName", s.node).String() }

func (s *server) Pods(ctx context.Context) ([]Pod, string, error) {
	ctx, cancel := context.WithTimeout(ctx, apiserver.ListTimeout)
	defer cancel()
	body, err := listed(s.client.Get().AbsPath(pods), s.mine()).Stream(ctx)
	if err != nil {
		return nil, "", fmt.Errorf("listing the pods of the node: %w", err)
	}
	defer body.Close()
	var all []Pod
	version, err := apilist.Read(body, func(p *Pod) error {
		p.slim()
		all = append(all, *p)
		return nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing the pods of the node: %w", err)
	}
	return all, version, nil
}

func (s *server) WatchPods(ctx context.Context, version string) (watch.Interface, error) {
	w, err := s.watch(ctx, s.client.Get().AbsPath(pods).SetHeader("Accept", asProtobuf), s.mine(), version)
	if err != nil {
		return nil, fmt.Errorf("watching the pods of the node: %w", err)
	}
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
		if p, ok := e.Object.(*Pod); ok {
			p.slim()
		}
		return e, true
	}), nil
}

// list asks for a consistent list: one of the API server's cache may be older than what the node knows.
func (s *server) list(ctx context.Context, r *rest.Request, selector string, into runtime.Object) error {
	ctx, cancel := context.WithTimeout(ctx, apiserver.ListTimeout)
	defer cancel()
	return listed(r, selector).Do(ctx).Into(into)
}

// listed is a request for such a list.
func listed(r *rest.Request, selector string) *rest.Request {
	o := metav1.ListOptions{FieldSelector: selector}
	return r.VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0)
}

func (s *server) watch(ctx context.Context, r *rest.Request, selector, version string) (watch.Interface, error) {
	return watched(r, selector, version).Watch(ctx)
}

// watched is a request to watch.
func watched(r *rest.Request, selector, version string) *rest.Request {
	seconds := int64(apiwatch.Timeout / time.Second)
	o := metav1.ListOptions{Watch: true, FieldSelector: selector, ResourceVersion: version, AllowWatchBookmarks: true,
		TimeoutSeconds: &seconds}
	return r.VersionedParams(&o, metav1.ParameterCodec).Timeout(apiwatch.Timeout).MaxRetries(0)
}

func (s *server) Pod(ctx context.Context, namespace, name string) (*Pod, error) {
	p := &Pod{}
	there, err := s.get(ctx, s.client.Get().AbsPath("/api/v1/namespaces", namespace, "pods", name).
		SetHeader("Accept", asProtobuf), "pods", p)
	if err != nil {
		return nil, fmt.Errorf("reading pod %s/%s: %w", namespace, name, err)
	}
	if !there {
		return nil, nil
	}
	return p, nil
}

// get reports whether there is an object. An API server that does not serve its kind answers 404, too: that is an
// error.
func (s *server) get(ctx context.Context, r *rest.Request, resource string, into runtime.Object) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	err := r.Do(ctx).Into(into)
	if apiserver.Missing(err) == resource {
		return false, nil
	}
	return err == nil, err
}

func (s *server) PodIP(ctx context.Context, addr netip.Addr) (*v1alpha1.PodIP, error) {
	ip := &v1alpha1.PodIP{}
	there, err := s.get(ctx, s.client.Get().Resource("podips").Name(v1alpha1.PodIPName(addr)), "podips", ip)
	if err != nil {
		return nil, fmt.Errorf("reading PodIP %s: %w", addr, err)
	}
	if !there {
		return nil, nil
	}
	return ip, nil
}

func (s *server) PodIPsHere(ctx context.Context) (all []v1alpha1.PodIP, err error) {
	for _, field := range []string{"status.nodeName", "spec.adoptedOn"} {
		list := &v1alpha1.PodIPList{}
		selector := fields.OneTermEqualSelector(field, s.node).String()
		if err := s.list(ctx, s.client.Get().Resource("podips"), selector, list); err != nil {
			return nil, fmt.Errorf("listing the PodIPs that name the node: %w", err)
		}
		all = append(all, list.Items...)
	}
	return all, nil
}

func (s *server) ApplyStatus(ctx context.Context, ip *v1alpha1.PodIP) error {
	var since *metav1.Time
	if ip.Status.Since != nil {
		since = &metav1.Time{Time: ip.Status.Since.UTC().Truncate(time.Second)}
	}
	status := map[string]any{"phase": ip.Status.Phase, "podUID": ip.Status.PodUID, "nodeName": ip.Status.NodeName,
		"since": since}
	if ip.Status.Conflict != "" {
		status["conflict"] = ip.Status.Conflict
	}
	if ip.Status.PodCIDR != "" {
		status["podCIDR"] = ip.Status.PodCIDR
	}
	err := s.apply(ctx, s.client.Patch(types.ApplyPatchType).Resource("podips").Name(ip.Name).SubResource("status"),
		map[string]any{
			"apiVersion": v1alpha1.SchemeGroupVersion.String(), "kind": "PodIP",
			"metadata": map[string]any{"name": ip.Name, "uid": ip.UID, "resourceVersion": ip.ResourceVersion},
			"status":   status,
		})
	if err != nil {
		return fmt.Errorf("writing the status of PodIP %s: %w", ip.Name, err)
	}
	return nil
}

func (s *server) apply(ctx context.Context, r *rest.Request, object map[string]any) error {
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	force := true
	return r.VersionedParams(&metav1.PatchOptions{FieldManager: v1alpha1.AgentFieldManager, Force: &force},
		metav1.ParameterCodec).Body(body).Do(ctx).Error()
}

func auditSelector() string {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, v1alpha1.PodIPAuditName).String()
}

func (s *server) Audit(ctx context.Context) (*v1alpha1.PodIPAudit, string, error) {
	list := &v1alpha1.PodIPAuditList{}
	if err := s.list(ctx, s.client.Get().Resource("podipaudits"), auditSelector(), list); err != nil {
		return nil, "", fmt.Errorf("reading the PodIPAudit: %w", err)
	}
	for i := range list.Items {
		if list.Items[i].Name == v1alpha1.PodIPAuditName {
			return &list.Items[i], list.ResourceVersion, nil
		}
	}
	return nil, list.ResourceVersion, nil
}

func (s *server) WatchAudit(ctx context.Context, version string) (watch.Interface, error) {
	w, err := s.watch(ctx, s.client.Get().Resource("podipaudits"), auditSelector(), version)
	if err != nil {
		return nil, fmt.Errorf("watching the PodIPAudit: %w", err)
	}
	return w, nil
}

func (s *server) Report(ctx context.Context) (*v1alpha1.PodIPReport, error) {
	a := &v1alpha1.PodIPReport{}
	there, err := s.get(ctx, s.client.Get().Resource("podipreports").Name(s.node), "podipreports", a)
	if err != nil {
		return nil, fmt.Errorf("reading the PodIPReport of the node: %w", err)
	}
	if !there {
		return nil, nil
	}
	return a, nil
}

func (s *server) ApplyReport(ctx context.Context, a *v1alpha1.PodIPReport) error {
	err := s.apply(ctx, s.client.Patch(types.ApplyPatchType).Resource("podipreports").Name(s.node), map[string]any{
		"apiVersion": v1alpha1.SchemeGroupVersion.String(), "kind": "PodIPReport",
		"metadata": map[string]any{"name": s.node, "ownerReferences": a.OwnerReferences},
		"spec":     a.Spec,
	})
	if err != nil {
		return fmt.Errorf("writing the PodIPReport of the node: %w", err)
	}
	return nil
}

func (s *server) Node(ctx context.Context) (types.UID, error) { return s.client.NodeUID(ctx) }

// RoutedSelector selects the PodIPs that have a podCIDR: those of mode Routed that nodes may have to route. When the
// podCIDR is removed, a watch delivers a deletion. What is written then is no event for the agents of all nodes until a
// node sets one again.
var RoutedSelector = fields.OneTermNotEqualSelector("status.podCIDR", "")

func (s *server) Routed(ctx context.Context, each func(*v1alpha1.PodIP)) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, apiserver.ListTimeout)
	defer cancel()
	body, err := listed(s.client.Get().Resource("podips"), RoutedSelector.String()).Stream(ctx)
	if err != nil {
		return "", fmt.Errorf("listing PodIPs: %w", err)
	}
	defer body.Close()
	version, err := apilist.Read(body, func(o *watchedPodIP) error {
		ip, err := o.podIP()
		if err == nil {
			each(ip)
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("listing PodIPs: %w", err)
	}
	return version, nil
}

func (s *server) WatchRouted(ctx context.Context, version string) (watch.Interface, error) {
	body, err := watched(s.client.Get().Resource("podips"), RoutedSelector.String(), version).Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("watching PodIPs: %w", err)
	}
	return newPodIPWatch(body), nil
}

// Version makes the cheapest list that shows etcd's revision: of one object, which need not exist.
func (s *server) Version(ctx context.Context) (string, error) {
	none := fields.OneTermEqualSelector(metav1.ObjectNameField, "none").String()
	list := &v1alpha1.PodIPAuditList{}
	if err := s.list(ctx, s.client.Get().Resource("podipaudits"), none, list); err != nil {
		return "", fmt.Errorf("getting the resourceVersion of the API server: %w", err)
	}
	return list.ResourceVersion, nil
}

func (s *server) Off(ctx context.Context) (bool, error) {
	n, err := s.client.Node(ctx)
	if err != nil || n == nil {
		return err == nil, err
	}
	return slices.ContainsFunc(n.Spec.Taints, func(t struct{ Key string }) bool { return t.Key == pool.OutOfService }), nil
}

// The condition of a Node that its router has the routes to it, set by the route controllers of
// k8s.io/cloud-provider/controllers/route, and by those of GKE.
const (
	networkUnavailable = "NetworkUnavailable"
	routeCreated       = "RouteCreated"
)

func (s *server) RoutedByCloud(ctx context.Context) (bool, error) {
	n, err := s.client.Node(ctx)
	if err != nil || n == nil {
		return false, err
	}
	for _, c := range n.Status.Conditions {
		if c.Type == networkUnavailable {
			return c.Status == "False" && c.Reason == routeCreated, nil
		}
	}
	return false, nil
}

func (s *server) PodCIDRs(ctx context.Context) ([]netip.Prefix, error) { return s.client.PodCIDRs(ctx) }
