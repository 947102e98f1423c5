package podip

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// feed puts the objects of one kind into the Book as they are listed and watched, and keeps none of them. Its functions
// are called with the mutex of state held.
type feed struct {
	set func(client.Object)
	// remove is called with the last state of an object and the version of its deletion.
	remove func(o client.Object, version string)
	// all names what there is, and end ends what a list of this version does not have.
	all    func() []string
	end    func(name, version string)
	listed func() // called after a list, unless it is nil
	// strip makes an object small as soon as it is read: a list of all is in memory at once. If nil, it stays as it is.
	strip  func(client.Object)
	synced chan struct{}
	c      *state
}

var _ toolscache.TransformingStore = (*feed)(nil)

// Transformer implements [toolscache.TransformingStore].
func (f *feed) Transformer() toolscache.TransformFunc {
	if f.strip == nil {
		return nil
	}
	return func(o any) (any, error) {
		if object, ok := o.(client.Object); ok {
			f.strip(object)
		}
		return o, nil
	}
}

func (f *feed) Add(o any) error {
	f.c.mu.Lock()
	defer f.c.unlock()
	f.put(o.(client.Object))
	return nil
}

func (f *feed) put(o client.Object) {
	if f.strip != nil {
		f.strip(o)
	}
	f.set(o)
}

func (f *feed) Update(o any) error { return f.Add(o) }

func (f *feed) Delete(o any) error {
	f.c.mu.Lock()
	defer f.c.unlock()
	f.remove(o.(client.Object), o.(client.Object).GetResourceVersion())
	return nil
}

// Replace is called with a whole list.
func (f *feed) Replace(list []any, version string) error {
	f.c.mu.Lock()
	defer f.c.unlock()
	is := map[string]bool{}
	for _, o := range list {
		is[o.(client.Object).GetName()] = true
		f.put(o.(client.Object))
	}
	for _, name := range f.all() {
		if !is[name] {
			f.end(name, version)
		}
	}
	if f.listed != nil {
		f.listed()
	}
	if f.synced != nil {
		select {
		case <-f.synced:
		default:
			close(f.synced)
		}
	}
	return nil
}

func (f *feed) Resync() error { return nil }

// reflect lists and watches a kind until ctx ends.
func (c *follower) reflect(ctx context.Context, object client.Object, list client.ObjectList, f *feed) {
	lw := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			page := list.DeepCopyObject().(client.ObjectList)
			return page, c.live.List(ctx, page, &client.ListOptions{Raw: &o, Limit: o.Limit, Continue: o.Continue})
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.live.Watch(ctx, list.DeepCopyObject().(client.ObjectList), &client.ListOptions{Raw: &o})
		},
	}
	toolscache.NewReflector(toolscache.ToListWatcherWithWatchListSemantics(lw, c.live), object, f, 0).RunWithContext(ctx)
}

func metadata(kind string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: kind}}
}

func metadataList(kind string) *metav1.PartialObjectMetadataList {
	return &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: kind + "List"}}
}

// addresses feeds PodIPs.
func (c *follower) addresses(s *session) *feed {
	var once cluster.Interner
	return &feed{c: c.state,
		strip: func(o client.Object) { stripIP(o.(*stayputv1alpha1.PodIP), &once) },
		set:   func(o client.Object) { s.setIPLocked(o.(*stayputv1alpha1.PodIP)) },
		remove: func(o client.Object, version string) {
			a, err := stayputv1alpha1.ParsePodIPName(o.GetName())
			if is := s.book.PodIP(a); err == nil && is != nil &&
				(is.UID == string(o.GetUID()) || !pool.Newer(is.Version, version)) {
				s.removeIPLocked(a)
			}
		},
		all: func() (names []string) {
			for _, a := range s.book.Addresses() {
				if s.book.PodIP(a) != nil {
					names = append(names, stayputv1alpha1.PodIPName(a))
				}
			}
			return names
		},
		end: func(name, version string) {
			a, err := stayputv1alpha1.ParsePodIPName(name)
			if is := s.book.PodIP(a); err == nil && is != nil && !pool.Newer(is.Version, version) {
				s.removeIPLocked(a)
			}
		},
	}
}

// reports feeds what nodes report.
func (c *follower) reports(s *session) *feed {
	names := map[string]bool{}
	return &feed{c: c.state,
		set: func(o client.Object) {
			s.book.SetReport(pool.ReportOf(o.(*stayputv1alpha1.PodIPReport), c.longest))
			names[o.GetName()] = true
		},
		remove: func(o client.Object, _ string) {
			delete(names, o.GetName())
			s.book.RemoveReport(o.GetName())
		},
		all: func() []string { return slices.Collect(maps.Keys(names)) },
		end: func(name, _ string) {
			delete(names, name)
			s.book.RemoveReport(name)
		},
	}
}

// ofNamespaces feeds the labels of namespaces, and the pools that their pods get addresses of by default.
func (c *follower) ofNamespaces(s *session) *feed {
	known := map[string]namespace{}
	f := &feed{c: c.state,
		set: func(o client.Object) {
			is := namespace{o.GetLabels(), pool.OfNamespace(o.GetAnnotations())}
			was, ok := known[o.GetName()]
			known[o.GetName()] = is
			if c.namespaces != nil && ok && maps.Equal(was.asks, is.asks) && maps.Equal(was.labels, is.labels) {
				return
			}
			c.setNamespaceLocked(s, o.GetName(), is)
		},
		remove: func(o client.Object, _ string) { delete(known, o.GetName()) },
		all:    func() []string { return slices.Collect(maps.Keys(known)) },
		end:    func(name, _ string) { delete(known, name) },
	}
	return f
}

// nodes feeds nodes.
func (c *follower) nodes(s *session) toolscache.ResourceEventHandler {
	set := func(o any) {
		if node, ok := o.(*corev1.Node); ok {
			c.mu.Lock()
			defer c.unlock()
			s.book.SetNode(nodeOf(node, c.agents))
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    set,
		UpdateFunc: func(_, is any) { set(is) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if node, ok := o.(*corev1.Node); ok {
				c.mu.Lock()
				defer c.unlock()
				s.book.RemoveNode(node.Name)
			}
		},
	}
}

// podEvents feeds the pods that ask for addresses of pools, or have some, until ctx ends.
func (c *follower) podEvents(ctx context.Context, s *session) toolscache.ResourceEventHandler {
	set := func(o any) {
		if pod, ok := o.(*cluster.Pod); ok {
			s.setPod(pod, false)
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: set,
		UpdateFunc: func(o, is any) {
			was, okWas := o.(*cluster.Pod)
			pod, okIs := is.(*cluster.Pod)
			if okWas && okIs && was.GetUID() != pod.GetUID() { // it was deleted, and made again, while there was no watch
				s.removePod(was.GetUID(), was.Node(), "")
			}
			set(is)
		},
		DeleteFunc: func(o any) {
			version := ""
			if gone, missed := o.(toolscache.DeletedFinalStateUnknown); missed {
				o = gone.Obj
			} else if pod, ok := o.(*cluster.Pod); ok {
				version = pod.ResourceVersion
			}
			if pod, ok := o.(*cluster.Pod); ok && c.ended(ctx, s, pod) {
				s.removePod(pod.UID, pod.Node(), version)
			}
		},
	}
}

// spiderIPPools feeds SpiderIPPools.
func (c *follower) spiderIPPools() *feed {
	return &feed{c: c.state,
		set:    func(o client.Object) { c.setSpiderIPPoolLocked(o.(*spiderpoolv2beta1.SpiderIPPool)) },
		remove: func(o client.Object, _ string) { c.removeSpiderIPPoolLocked(o.GetName()) },
		all:    func() []string { return slices.Collect(maps.Keys(c.spider)) },
		end:    func(name, _ string) { c.removeSpiderIPPoolLocked(name) },
	}
}
