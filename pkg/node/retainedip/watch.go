package retainedip

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apilist"
	"github.com/stayput/stayput/pkg/node/apiserver"
)

// objectStore receives what the reflector lists and watches.
type objectStore struct{ p *Publisher }

func (s objectStore) Add(obj any) error {
	s.p.keep(obj.(*v1alpha1.RetainedIP), nil)
	return nil
}

func (s objectStore) Update(obj any) error { return s.Add(obj) }

func (s objectStore) Delete(obj any) error {
	r := obj.(*v1alpha1.RetainedIP)
	if s.p.uidOf(nameOf(r)) == r.UID {
		s.p.owner.doubt() // not by us: it may have gone with its Node
	}
	s.p.forget(nameOf(r), r.UID)
	return nil
}

func (s objectStore) Replace(list []any, version string) error {
	objects := make(map[Name]*object, len(list))
	for _, obj := range list {
		key, o := objectOf(obj.(*v1alpha1.RetainedIP))
		objects[key] = o
	}
	s.p.owner.doubt()
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.objects, s.p.listedAt = objects, version
	return nil
}

func (objectStore) Resync() error { return nil }

// listWatch asks for this node's objects only. What lists and watches is client-go's Reflector: it goes on from where
// the last watch ended. A list, which package apiwatch makes after each watch, has the API server look through the
// RetainedIPs of all nodes.
type listWatch struct{ p *Publisher }

// IsWatchListSemanticsUnSupported keeps the reflector from a watch that begins with a consistent list: after an
// outage 5,000 agents would each have the API server ask etcd. An older list is corrected by the watch.
func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

func (l listWatch) selector() string {
	return fields.OneTermEqualSelector("spec.nodeName", l.p.o.Node).String()
}

func (l listWatch) List(o metav1.ListOptions) (runtime.Object, error) {
	return l.ListWithContext(context.Background(), o)
}

func (l listWatch) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return l.WatchWithContext(context.Background(), o)
}

func (l listWatch) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, apiserver.ListTimeout)
	defer cancel()
	o.FieldSelector = l.selector()
	list, err := l.list(ctx, o)
	if err != nil {
		if !tooOld(err) {
			l.p.down(fmt.Errorf("listing RetainedIPs: %w", err))
		}
		return nil, err
	}
	return list, nil
}

// list asks without a limit: an API server that has the objects in memory does not heed one, and another one would ask
// etcd.
func (l listWatch) list(ctx context.Context, o metav1.ListOptions) (*v1alpha1.RetainedIPList, error) {
	o.Limit, o.Continue = 0, ""
	// The reflector knows better than to ask again for a version that the API server has not reached.
	body, err := l.p.client.Get().Resource(retainedIPs).VersionedParams(&o, metav1.ParameterCodec).
		MaxRetries(0).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	list := &v1alpha1.RetainedIPList{}
	list.ResourceVersion, err = apilist.Read(body, func(r *v1alpha1.RetainedIP) error {
		slim(r)
		list.Items = append(list.Items, *r)
		return nil
	})
	return list, err
}

// What is kept of an object at most. No promise has more: what is longer than that differs from every one, and is
// written again.
const (
	mostInterfaces, mostAddrs    = 32, 16
	longestValue, longestAddress = 512, 64
)

// slim drops what the agent has nothing to do with, and cuts what is too long to be its own.
func slim(r *v1alpha1.RetainedIP) {
	r.ManagedFields, r.Annotations, r.Labels, r.Finalizers = nil, nil, nil, nil
	r.OwnerReferences = slices.Clone(r.OwnerReferences[:min(len(r.OwnerReferences), 2)])
	r.Spec.Workload, r.Spec.Scheduled = nil, ""
	cut := func(all []string, most int) []string {
		all = slices.Clone(all[:min(len(all), most)])
		for i := range all {
			cutTo(longestAddress, &all[i])
		}
		return all
	}
	s, status := &r.Spec, &r.Status
	cutTo(longestValue, &s.NodeName, &s.PodName, &s.Identity, &s.Retention, &s.WhenScaled, &s.WhenDeleted,
		&s.WhenMoved, (*string)(&status.Phase), &status.PodUID)
	status.IPs = cut(status.IPs, mostInterfaces*mostAddrs)
	status.Addresses = slices.Clone(status.Addresses[:min(len(status.Addresses), mostInterfaces)])
	for i := range status.Addresses {
		a := &status.Addresses[i]
		cutTo(longestValue, &a.Network, &a.Interface)
		a.IPs = cut(a.IPs, mostAddrs)
	}
}

func cutTo(longest int, all ...*string) {
	for _, s := range all {
		if len(*s) > longest {
			*s = strings.Clone((*s)[:longest])
		}
	}
}

func (l listWatch) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if err := l.sameHistory(ctx, o.ResourceVersion); err != nil {
		l.p.down(err)
		return nil, err
	}
	o.FieldSelector, o.Watch = l.selector(), true
	w, err := l.p.client.Get().Resource(retainedIPs).VersionedParams(&o, metav1.ParameterCodec).
		Timeout(time.Duration(*o.TimeoutSeconds) * time.Second).Watch(ctx)
	if err != nil {
		if !tooOld(err) {
			l.p.down(fmt.Errorf("watching RetainedIPs: %w", err))
		}
		return nil, err
	}
	l.p.nowUp()
	return w, nil
}

func tooOld(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }

// sameHistory makes sure that the API server still knows the version that a watch is to go on from. After a
// backup of etcd was restored it does not, and would keep silent until it has come that far again.
func (l listWatch) sameHistory(ctx context.Context, version string) error {
	l.p.mu.Lock()
	fresh := version == l.p.listedAt
	l.p.mu.Unlock()
	if fresh {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	// The cheapest list that shows etcd's revision: of one object, which need not exist.
	var list v1alpha1.RetainedIPList
	one := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", "none").String()}
	err := l.p.client.Get().Namespace(metav1.NamespaceDefault).Resource(retainedIPs).
		VersionedParams(&one, metav1.ParameterCodec).Do(ctx).Into(&list)
	if err != nil {
		return fmt.Errorf("getting the resourceVersion of the API server: %w", err)
	}
	if c, err := resourceversion.CompareResourceVersion(list.ResourceVersion, version); err == nil && c < 0 {
		l.p.log.Warn("resourceVersion of the API server went backwards, a backup was restored",
			"version", list.ResourceVersion, "seen", version)
		return apierrors.NewResourceExpired("the API server's resourceVersion went backwards")
	}
	return nil
}

// down notes that there is no watch.
func (p *Publisher) down(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	level := slog.LevelDebug
	if p.up || p.trouble != err.Error() {
		level = slog.LevelWarn // the same again is no news
	}
	p.log.Log(context.Background(), level, "Cannot watch RetainedIPs, retrying", "err", err)
	p.up, p.trouble = false, err.Error()
	p.metrics.up.Set(0)
}

// nowUp notes that there is one, and queues everything.
func (p *Publisher) nowUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.up {
		p.log.Info("Watching RetainedIPs", "node", p.o.Node)
	}
	p.up, p.trouble = true, ""
	p.metrics.up.Set(1)
	for k := range p.promised {
		p.queue.Forget(k)
	}
	p.queueAll()
}
