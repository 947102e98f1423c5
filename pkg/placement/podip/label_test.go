package podip

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/must"
)

func TestNamespacesThatThePolicyHasNotSeenAreLabelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const label = stayputv1alpha1.LabelDefaultPools
		space := func(name string, annotations, labels map[string]string) *corev1.Namespace {
			return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations, Labels: labels}}
		}
		asks := map[string]string{stayputv1alpha1.AnnotationPools: "blue"}
		spaces := []client.Object{
			space("asks", asks, map[string]string{"team": "a"}),
			space("theirs", map[string]string{"ipam.spidernet.io/default-ipv6-ippool": `["blue"]`}, nil),
			space("none", map[string]string{stayputv1alpha1.AnnotationPools: ""}, nil),
			space("plain", nil, nil),
			space("labelled", asks, map[string]string{label: "yes"})}
		a := newAPI(t, spaces...)
		c := control(t, a)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		fails := 1
		a.before = func(string) error {
			if fails--; fails >= 0 {
				return errors.New("away")
			}
			return nil
		}
		go c.follower.labels(ctx)
		c.mu.Lock()
		for _, o := range spaces { // as the watch delivers them
			c.noteUnlabelledLocked(o)
		}
		c.unlock()
		time.Sleep(2 * labelRetry)
		synctest.Wait()
		for name, want := range map[string]map[string]string{
			"asks": {"team": "a", label: ""}, "theirs": {label: ""}, "none": nil, "plain": nil, "labelled": {label: "yes"},
		} {
			var is corev1.Namespace
			must.Do(t, a.Get(ctx, types.NamespacedName{Name: name}, &is))
			if len(is.Labels) != len(want) {
				t.Errorf("%s has the labels %v", name, is.Labels)
			}
			for k, v := range want {
				if got, ok := is.Labels[k]; !ok || got != v {
					t.Errorf("%s has the labels %v", name, is.Labels)
				}
			}
		}
		cancel()
		synctest.Wait()
	})
}
