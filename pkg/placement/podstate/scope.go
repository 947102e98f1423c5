package podstate

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// scope limits the webhook for recorded pods to the namespaces that have PersistentPodStates: a call makes the create
// of a pod two to three times as expensive. The chart sets no namespaceSelector, so the controller owns that field.
// Until the controller has written it, or if it may not, the API server calls the webhook for the pods of all
// namespaces.
type scope struct {
	client    client.Client
	live      client.Reader
	namespace string // the installation's, about whose pods nothing is asked

	mu         sync.Mutex
	names      []string  // the namespaces that the webhook was limited to last
	validUntil time.Time // names are trusted until then
}

// covers reports whether the webhook is called for the pods of a namespace. It is not known before update was called,
// and once what that wrote is not trusted any more.
func (s *scope) covers(namespace string) (covered, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.names, namespace), time.Now().Before(s.validUntil)
}

// absentFor is how long it is trusted that there is no webhook: Helm makes it after the controllers.
const absentFor = 30 * time.Second

// update limits the webhook to the namespaces that list returns, and returns how long that is trusted. They are listed
// once no other call writes: an older list is never written after a newer one.
func (s *scope) update(ctx context.Context, list func(context.Context) ([]string, error)) (
	trusted time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names, err := list(ctx)
	if err != nil {
		return 0, err
	}
	if trusted = time.Until(s.validUntil); slices.Equal(names, s.names) && trusted > 0 {
		return trusted, nil
	}
	trusted = gateEvery
	s.validUntil = time.Time{} // a write that fails may have happened
	var config admissionregistrationv1.MutatingWebhookConfiguration
	err = s.live.Get(ctx, types.NamespacedName{Name: home.GateWebhook}, &config)
	switch {
	case apierrors.IsForbidden(err):
	case cluster.Absent(err):
		trusted = absentFor
	case err != nil:
		return 0, fmt.Errorf("reading the configuration of the webhook: %w", err)
	default:
		if err := s.write(ctx, &config, names); err != nil {
			return 0, fmt.Errorf("limiting the webhook to namespaces with PersistentPodStates: %w", err)
		}
	}
	s.names, s.validUntil = names, time.Now().Add(trusted)
	return trusted, nil
}

func (s *scope) write(ctx context.Context, config *admissionregistrationv1.MutatingWebhookConfiguration,
	names []string) error {
	want := s.selector(names)
	at := slices.IndexFunc(config.Webhooks, func(w admissionregistrationv1.MutatingWebhook) bool {
		return w.Name == home.GateWebhookRecorded
	})
	if at < 0 || equality.Semantic.DeepEqual(config.Webhooks[at].NamespaceSelector, want) {
		return nil
	}
	path := fmt.Sprintf("/webhooks/%d", at)
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": path + "/name", "value": home.GateWebhookRecorded},
		{"op": "add", "path": path + "/namespaceSelector", "value": want},
	})
	if err != nil {
		return err
	}
	of := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook}}
	return s.client.Patch(ctx, of, client.RawPatch(types.JSONPatchType, patch),
		client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
}

// selector selects these namespaces, without the installation's. A selector names at least one: with none it
// contradicts itself.
func (s *scope) selector(names []string) *metav1.LabelSelector {
	if len(names) == 0 {
		names = []string{s.namespace}
	}
	return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
		{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: []string{s.namespace}},
		{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpIn, Values: names},
	}}
}

// namespaces returns those that have PersistentPodStates which stayput serves, sorted.
func (g *gating) namespaces(ctx context.Context) ([]string, error) {
	runs, err := g.kruise.runs()
	if err != nil || runs {
		return nil, err
	}
	var all kruisev1alpha1.PersistentPodStateList
	if err := g.client.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing PersistentPodStates: %w", err)
	}
	var names []string
	for i := range all.Items {
		names = append(names, all.Items[i].Namespace)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
