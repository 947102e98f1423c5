package podstate

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/must"
)

func TestTheWebhookIsLimitedToNamespacesWithPersistentPodStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := &admissionregistrationv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook},
			Webhooks: []admissionregistrationv1.MutatingWebhook{
				{Name: "annotated.gate.stayput.io"}, {Name: home.GateWebhookRecorded},
			},
		}
		api := fake.NewClientBuilder().Build()
		var next time.Duration
		s := &scope{client: api, live: api, namespace: "stayput-system"}
		update := func(names ...string) {
			t.Helper()
			trusted, err := s.update(t.Context(), func(context.Context) ([]string, error) { return names, nil })
			must.Do(t, err)
			next = trusted
		}
		want := func(names ...string) {
			t.Helper()
			var is admissionregistrationv1.MutatingWebhookConfiguration
			must.Do(t, api.Get(t.Context(), types.NamespacedName{Name: home.GateWebhook}, &is))
			if w := is.Webhooks[0]; w.NamespaceSelector != nil {
				t.Errorf("%s: %v", w.Name, w.NamespaceSelector)
			}
			selector, err := metav1.LabelSelectorAsSelector(is.Webhooks[1].NamespaceSelector)
			must.Do(t, err)
			var asked []string
			for _, name := range []string{"a", "b", "c", "stayput-system"} {
				if selector.Matches(labels.Set{"kubernetes.io/metadata.name": name}) {
					asked = append(asked, name)
				}
			}
			if len(asked) != len(names) || len(names) > 0 && asked[0] != names[0] {
				t.Errorf("asks about pods of %v, want %v", asked, names)
			}
		}

		update("a") // there is no webhook: policies gate pods, or Helm has not made it yet
		must.Do(t, api.Create(t.Context(), config))
		if update("a"); next > time.Minute {
			t.Errorf("looks again after %v", next)
		}
		time.Sleep(next)
		update("a")
		want("a")
		for name, want := range map[string]bool{"a": true, "b": false} {
			if covered, known := s.covers(name); !known || covered != want {
				t.Errorf("namespace %s: covered %t, known %t", name, covered, known)
			}
		}
		update("a", "b")
		want("a", "b")
		update("stayput-system", "b")
		want("b")
		update()
		want()

		// Others change it, and it is put right later.
		must.Do(t, api.Get(t.Context(), types.NamespacedName{Name: home.GateWebhook}, config))
		config.Webhooks[1].NamespaceSelector = nil
		must.Do(t, api.Update(t.Context(), config))
		time.Sleep(next)
		if _, known := s.covers("a"); known {
			t.Error("trusts what it wrote forever")
		}
		update()
		want()
	})
}
