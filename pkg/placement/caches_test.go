package placement

import (
	"context"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/test/must"
)

// listed is an API server that has a list, which never changes.
type listed struct{ *toolscache.ListWatch }

func serves(list runtime.Object) listed {
	lists := func(context.Context, metav1.ListOptions) (runtime.Object, error) { return list, nil }
	watches := func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watch.NewFake(), nil }
	return listed{&toolscache.ListWatch{ListWithContextFunc: lists, WatchFuncWithContext: watches}}
}

// IsWatchListSemanticsUnSupported makes a reflector list.
func (listed) IsWatchListSemanticsUnSupported() bool { return true }

func TestRetainedIPsAreReadOncePodsAndNodesAre(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := caches{pods: func(string) toolscache.ListerWatcher {
			return serves(&corev1.PodList{Items: []corev1.Pod{*hometest.Pod()}})
		}}
		ctx, end := context.WithCancel(t.Context())
		retained := c.newInformer(serves(&stayputv1alpha1.RetainedIPList{Items: []stayputv1alpha1.RetainedIP{
			*keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)}}), &stayputv1alpha1.RetainedIP{}, 0, nil)
		pods := c.newInformer(nil, &cluster.Pod{}, 0, nil)
		must.Do(t, pods.SetTransform(cluster.Keep))
		nodes := c.newInformer(serves(&corev1.NodeList{Items: []corev1.Node{*hometest.Node("node-1", "a")}}),
			&corev1.Node{}, 0, nil)
		goes := func(i toolscache.SharedIndexInformer) { go i.RunWithContext(ctx) }
		goes(retained)
		goes(nodes)
		synctest.Wait()
		if !nodes.HasSynced() || retained.HasSynced() || len(retained.GetStore().List()) > 0 {
			t.Errorf("read before the pods: nodes %v, RetainedIPs %v", nodes.HasSynced(), retained.HasSynced())
		}
		goes(pods)
		if !c.WaitForCacheSync(ctx) || !toolscache.WaitForCacheSync(ctx.Done(), retained.HasSynced) {
			t.Error("they are never read")
		}
		end()
	})
}

func TestAPodIsBroughtHomeBeforeTheCacheHasTheRetainedIPs(t *testing.T) {
	pod := hometest.Pod()
	api := fakeAPI(t, pod, hometest.Node("node-1", "a"), keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon))
	asked := map[string]int{}
	counted := func(whom string) client.WithWatch {
		return interceptor.NewClient(api, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch,
			list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*stayputv1alpha1.RetainedIPList); ok {
				asked[whom]++
			}
			return c.List(ctx, list, options...)
		}})
	}
	p := testPlacer(counted("cache"))
	p.cached, p.live = func() bool { return false }, counted("API server")
	if is := p.looksAt(t, pod); home.Gated(is) || len(nodesOfPod(is)) != 1 || nodesOfPod(is)[0] != "node-1" {
		t.Errorf("placed by %+v", is.Spec.Affinity)
	}
	if asked["API server"] == 0 || asked["cache"] > 0 {
		t.Errorf("asked %v", asked)
	}
}
