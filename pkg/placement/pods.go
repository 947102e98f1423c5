package placement

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/placement/podip"
	"github.com/stayput/stayput/pkg/pool"
)

// selectors choose the pods that the caches have: those that were gated, and those of StatefulSets, whose nodes are
// recorded though they may have been let through ungated. No pod is chosen by both. All other pods are read by name
// when it matters, so that no cache tells the end of a pod: it may have lost its label.
var selectors = [2]string{gate.ManagedLabel, appsv1.StatefulSetPodNameLabel + ",!" + gate.ManagedLabel}

// labelEvery is how often the leader looks for gated pods without the label: a pod template may have the gate, and
// people may take a label off.
const labelEvery = 30 * time.Second

// labeller labels the gated pods that the caches do not have.
type labeller struct {
	client client.Client
	list   func(context.Context, metav1.ListOptions, func(*corev1.Pod) error) (string, error)
}

// Start labels pods until ctx ends.
func (l *labeller) Start(ctx context.Context) error {
	tick := time.NewTicker(labelEvery)
	defer tick.Stop()
	for {
		if err := l.label(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Cannot label every gated pod, retrying", "every", labelEvery)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (l *labeller) label(ctx context.Context) error {
	var gated []*cluster.Pod
	_, err := l.list(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=", LabelSelector: "!" + gate.ManagedLabel},
		func(pod *corev1.Pod) error {
			if home.Gated(pod) {
				gated = append(gated, cluster.PodOf(pod))
			}
			return nil
		})
	errs := []error{err}
	for _, pod := range gated {
		if err := gate.Label(ctx, l.client, pod); !podip.Changed(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// podInformer makes one informer of two, since a watch has one selector. A pod whose labels change moves between them:
// for a moment it is in both or in none, and it may be added twice.
type podInformer struct {
	toolscache.SharedIndexInformer // the first of them
	of                             [2]toolscache.SharedIndexInformer
}

var _ toolscache.SharedIndexInformer = podInformer{}

func newPodInformer(from func(selector string) toolscache.ListerWatcher, resync time.Duration,
	indexers toolscache.Indexers) podInformer {
	i := podInformer{}
	for n, selector := range selectors {
		i.of[n] = toolscache.NewSharedIndexInformer(from(selector), &corev1.Pod{}, resync, maps.Clone(indexers))
	}
	i.SharedIndexInformer = i.of[0]
	return i
}

func (i podInformer) each(do func(toolscache.SharedIndexInformer) error) error {
	return errors.Join(do(i.of[0]), do(i.of[1]))
}

// RunWithContext runs both until ctx ends.
func (i podInformer) RunWithContext(ctx context.Context) {
	var both sync.WaitGroup
	for _, one := range i.of {
		both.Go(func() { one.RunWithContext(ctx) })
	}
	both.Wait()
}

func (i podInformer) HasSynced() bool { return i.of[0].HasSynced() && i.of[1].HasSynced() }
func (i podInformer) IsStopped() bool { return i.of[0].IsStopped() && i.of[1].IsStopped() }

func (i podInformer) HasSyncedChecker() toolscache.DoneChecker {
	return newBothDone(i.of[0].HasSyncedChecker(), i.of[1].HasSyncedChecker())
}

func (i podInformer) SetTransform(f toolscache.TransformFunc) error {
	return i.each(func(one toolscache.SharedIndexInformer) error { return one.SetTransform(f) })
}

func (i podInformer) SetWatchErrorHandlerWithContext(f toolscache.WatchErrorHandlerWithContext) error {
	return i.each(func(one toolscache.SharedIndexInformer) error { return one.SetWatchErrorHandlerWithContext(f) })
}

func (i podInformer) AddIndexers(all toolscache.Indexers) error {
	return i.each(func(one toolscache.SharedIndexInformer) error { return one.AddIndexers(all) })
}

func (i podInformer) GetStore() toolscache.Store { return i.GetIndexer() }

func (i podInformer) GetIndexer() toolscache.Indexer {
	return podIndex{i.of[0].GetIndexer(), i.of[1].GetIndexer()}
}

func (i podInformer) AddEventHandler(h toolscache.ResourceEventHandler) (
	toolscache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, toolscache.HandlerOptions{})
}

func (i podInformer) AddEventHandlerWithResyncPeriod(h toolscache.ResourceEventHandler, every time.Duration) (
	toolscache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, toolscache.HandlerOptions{ResyncPeriod: &every})
}

// AddEventHandlerWithOptions adds a handler to both. It is not told of the end of a pod that only moves, if that is
// known by then.
func (i podInformer) AddEventHandlerWithOptions(h toolscache.ResourceEventHandler, o toolscache.HandlerOptions) (
	toolscache.ResourceEventHandlerRegistration, error) {
	var both registrations
	for n, one := range i.of {
		r, err := one.AddEventHandlerWithOptions(stays{h, i.of[1-n].GetStore()}, o)
		if err != nil {
			return nil, errors.Join(err, i.RemoveEventHandler(both))
		}
		both[n] = r
	}
	return both, nil
}

func (i podInformer) RemoveEventHandler(r toolscache.ResourceEventHandlerRegistration) error {
	both, ok := r.(registrations)
	if !ok {
		return errors.New("not a handler of this informer")
	}
	var errs []error
	for n, one := range i.of {
		if both[n] != nil {
			errs = append(errs, one.RemoveEventHandler(both[n]))
		}
	}
	return errors.Join(errs...)
}

// stays is a handler that is told of the end of a pod only if the other informer does not have the pod.
type stays struct {
	toolscache.ResourceEventHandler
	other toolscache.Store
}

func (s stays) OnDelete(o any) {
	was := o
	if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
		was = gone.Obj
	}
	if pod, ok := was.(*cluster.Pod); ok {
		if there, exists, err := s.other.Get(pod); err == nil && exists && there.(*cluster.Pod).UID == pod.UID {
			return
		}
	}
	s.ResourceEventHandler.OnDelete(o)
}

// registrations are those of a handler with both informers.
type registrations [2]toolscache.ResourceEventHandlerRegistration

func (r registrations) HasSynced() bool { return r[0].HasSynced() && r[1].HasSynced() }

func (r registrations) HasSyncedChecker() toolscache.DoneChecker {
	return newBothDone(r[0].HasSyncedChecker(), r[1].HasSyncedChecker())
}

// bothDone is done once two others are.
type bothDone struct {
	name string
	done chan struct{}
}

func newBothDone(a, b toolscache.DoneChecker) bothDone {
	both := bothDone{a.Name(), make(chan struct{})}
	go func() {
		<-a.Done()
		<-b.Done()
		close(both.done)
	}()
	return both
}

func (b bothDone) Name() string          { return b.name }
func (b bothDone) Done() <-chan struct{} { return b.done }

// podIndex reads two indexers as one. It is for reading only.
type podIndex struct {
	toolscache.Indexer // the first of them
	second             toolscache.Indexer
}

func (i podIndex) GetByKey(key string) (any, bool, error) {
	a, inFirst, err := i.Indexer.GetByKey(key)
	if err != nil {
		return nil, false, err
	}
	b, inSecond, err := i.second.GetByKey(key)
	switch {
	case err != nil:
		return nil, false, err
	case inFirst && (!inSecond || !newer(b, a)):
		return a, true, nil
	}
	return b, inSecond, nil
}

func (i podIndex) Get(o any) (any, bool, error) {
	key, err := toolscache.DeletionHandlingMetaNamespaceKeyFunc(o)
	if err != nil {
		return nil, false, err
	}
	return i.GetByKey(key)
}

func (i podIndex) List() []any { return i.once(i.Indexer.List(), i.second.List()) }

func (i podIndex) ByIndex(name, value string) ([]any, error) {
	a, err := i.Indexer.ByIndex(name, value)
	if err != nil {
		return nil, err
	}
	b, err := i.second.ByIndex(name, value)
	return i.once(a, b), err
}

// once returns the pods of both, and of a pod that is in both the newer state.
func (i podIndex) once(a, b []any) (all []any) {
	for _, one := range a {
		if other, exists, err := i.second.Get(one); err != nil || !exists || !newer(other, one) {
			all = append(all, one)
		}
	}
	for _, one := range b {
		if other, exists, err := i.Indexer.Get(one); err != nil || !exists || newer(one, other) {
			all = append(all, one)
		}
	}
	return all
}

// newer reports whether a is a later state of a pod's name than b.
func newer(a, b any) bool {
	return pool.Newer(a.(*cluster.Pod).ResourceVersion, b.(*cluster.Pod).ResourceVersion)
}
