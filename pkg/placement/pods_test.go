package placement

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/test/must"
)

// podsServed is an API server with a watch for each selector.
type podsServed map[string]*watch.FakeWatcher

func (s podsServed) listWatch(selector string) toolscache.ListerWatcher {
	s[selector] = watch.NewFakeWithChanSize(10, false)
	return listed{&toolscache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			return &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}, nil
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return s[selector], nil },
	}}
}

func atVersion(v string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.ResourceVersion = v } }

func TestAPodThatMovesBetweenTheWatchesIsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		served := podsServed{}
		pods := newPodInformer(served.listWatch, 0, toolscache.Indexers{
			toolscache.NamespaceIndex: toolscache.MetaNamespaceIndexFunc})
		must.Do(t, pods.AddIndexers(toolscache.Indexers{
			"all": func(any) ([]string, error) { return []string{"x"}, nil }}))
		must.Do(t, pods.SetTransform(cluster.Keep))
		var ended []string
		registered, err := pods.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			DeleteFunc: func(o any) { ended = append(ended, o.(*cluster.Pod).ResourceVersion) }})
		must.Do(t, err)
		ctx, end := context.WithCancel(t.Context())
		defer end()
		go pods.RunWithContext(ctx)
		synctest.Wait()
		if !pods.HasSynced() || !registered.HasSynced() {
			t.Fatal("not synced")
		}
		is := func() string {
			t.Helper()
			synctest.Wait()
			all, err := pods.GetIndexer().ByIndex("all", "x")
			must.Do(t, err)
			if one := pods.GetIndexer().List(); len(one) != len(all) || len(all) > 1 {
				t.Errorf("%d pods, %d by the index", len(one), len(all))
			}
			o, exists, err := pods.GetIndexer().GetByKey("default/web-0")
			must.Do(t, err)
			if !exists {
				return ""
			}
			return o.(*cluster.Pod).ResourceVersion
		}
		labelled, named := served[selectors[0]], served[selectors[1]]
		named.Add(hometest.Pod(atVersion("5")))
		if is() != "5" {
			t.Error("not there")
		}
		labelled.Add(hometest.Pod(atVersion("6"))) // it was labelled
		if is() != "6" {
			t.Error("not the newer one, while it is in both")
		}
		named.Delete(hometest.Pod(atVersion("6")))
		if is() != "6" || len(ended) > 0 {
			t.Errorf("it has ended: %v", ended)
		}
		labelled.Delete(hometest.Pod(atVersion("9")))
		if is() != "" || !slices.Equal(ended, []string{"9"}) {
			t.Errorf("the end is not told: %v", ended)
		}
		must.Do(t, pods.RemoveEventHandler(registered))
	})
}

// Such a pod is in no cache, and would wait for ever.
func TestAGatedPodWithoutTheLabelIsLabelled(t *testing.T) {
	gated, running := hometest.Pod(), hometest.Pod(hometest.Ungated, func(p *corev1.Pod) { p.Name = "other" })
	api := fakeAPI(t, gated, running)
	l := &labeller{client: api, list: func(_ context.Context, o metav1.ListOptions, each func(*corev1.Pod) error) (
		string, error) {
		if o.FieldSelector != "spec.nodeName=" || o.LabelSelector != "!"+gate.ManagedLabel {
			t.Errorf("asked for %+v", o)
		}
		gone := gated.DeepCopy()
		gone.Name = "gone"
		for _, pod := range []*corev1.Pod{gone, gated, running} {
			must.Do(t, each(pod))
		}
		return "7", nil
	}}
	must.Do(t, l.label(t.Context()))
	var list corev1.PodList
	must.Do(t, api.List(t.Context(), &list))
	for _, pod := range list.Items {
		if _, is := pod.Labels[gate.ManagedLabel]; is != home.Gated(&pod) {
			t.Errorf("pod %s has labels %v", pod.Name, pod.Labels)
		}
	}
}
