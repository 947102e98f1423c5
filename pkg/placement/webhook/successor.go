package webhook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// The keys of the ConfigMap home.GatePolicies.
const (
	policiesKey    = "policies.yaml"
	removeAfterKey = "removeAfter"
)

const (
	// succeedEvery is the longest pause between two looks for a successor.
	succeedEvery = time.Minute
	retryAfter   = 10 * time.Second
	// looksBefore is how many looks in a row at least find that all API servers have policies before the webhook goes.
	looksBefore = 4
)

// By these annotations Helm knows what belongs to a release. Helm also owns the fields then, so that the next upgrade
// may change them.
const (
	helmRelease          = "meta.helm.sh/release-name"
	helmReleaseNamespace = "meta.helm.sh/release-namespace"
	helmFieldManager     = "helm"
)

// successor puts policies in the webhook's place once every API server has them, as after an upgrade of the cluster.
//
// The policies are in the ConfigMap home.GatePolicies; without it, and without the webhook, nothing is done. They are
// installed as soon as every API server serves their kind. The webhook stays beside them until that has been so, at
// every look, for the time that the ConfigMap says: an API server that is still the old one knows no policies, and one
// may have been down when it was its turn to answer. What is gated already is not gated again meanwhile. That something
// cannot be found out counts like an API server without policies.
type successor struct {
	client       client.Client // writes
	reader       client.Reader // from the API server
	havePolicies func(context.Context) (bool, error)
	namespace    string
	uninstalling func() bool
	now          func() time.Time
	log          logr.Logger

	since time.Time // every look since then found that all API servers have policies, zero if the last one did not
}

// NeedLeaderElection returns true: one replica is enough.
func (*successor) NeedLeaderElection() bool { return true }

// Start looks for a successor until ctx is done.
func (s *successor) Start(ctx context.Context) error {
	logged := ""
	for {
		pause, err := s.look(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			logged = ""
		case err.Error() != logged:
			logged = err.Error()
			s.log.Error(err, "Cannot replace the webhook with policies, retrying")
		}
		if err != nil {
			pause = min(pause, retryAfter)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// look takes the next step, and returns how long to wait before another one.
func (s *successor) look(ctx context.Context) (pause time.Duration, err error) {
	since := s.since
	s.since = time.Time{}
	var plan corev1.ConfigMap
	err = s.reader.Get(ctx, types.NamespacedName{Namespace: s.namespace, Name: home.GatePolicies}, &plan)
	// The right to it goes with it, and for a moment with the start of an API server.
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return lookEvery, nil
	}
	if err != nil {
		return succeedEvery, fmt.Errorf("reading the policies: %w", err)
	}
	after, policies, err := readPlan(&plan)
	if err != nil {
		return succeedEvery, fmt.Errorf("ConfigMap %s/%s: %w", s.namespace, home.GatePolicies, err)
	}
	pause = min(succeedEvery, max(after/looksBefore, time.Second))
	var hook admissionregistrationv1.MutatingWebhookConfiguration
	err = s.reader.Get(ctx, types.NamespacedName{Name: home.GateWebhook}, &hook)
	if apierrors.IsNotFound(err) { // it has its successor, or everything is being removed
		return pause, nil
	}
	if err != nil {
		return pause, fmt.Errorf("reading the configuration of the webhook: %w", err)
	}
	switch ready, err := s.havePolicies(ctx); {
	case err != nil:
		return pause, err
	case !ready || s.uninstalling():
		return pause, nil
	}
	for _, o := range policies {
		if err := s.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.ForceOwnership,
			owner(o)); err != nil {
			return pause, fmt.Errorf("installing %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	now := s.now()
	if since.IsZero() {
		s.log.Info("Installed the policies that gate pods, all API servers support them; the webhook is deleted later",
			"removeAfter", after)
		since = now
	}
	s.since = since
	if now.Sub(since) < after || s.uninstalling() {
		return pause, nil
	}
	if err := s.client.Delete(ctx, &hook, client.Preconditions{UID: &hook.UID}); client.IgnoreNotFound(err) != nil {
		return pause, fmt.Errorf("deleting the configuration of the webhook: %w", err)
	}
	s.log.Info("Deleted the configuration of the webhook: policies gate pods")
	return pause, nil
}

// readPlan returns what the ConfigMap home.GatePolicies says: how long the webhook stays beside its successor, and the
// policies, those that bindings name before these. All are the release's, like the ConfigMap.
func readPlan(plan *corev1.ConfigMap) (after time.Duration, policies []*unstructured.Unstructured, err error) {
	after, err = time.ParseDuration(plan.Data[removeAfterKey])
	if err != nil || after <= 0 {
		return 0, nil, fmt.Errorf("data[%s]: %q is not valid: expected a duration, for example 1h", removeAfterKey,
			plan.Data[removeAfterKey])
	}
	docs := yaml.NewYAMLOrJSONDecoder(strings.NewReader(plan.Data[policiesKey]), 4096)
	for {
		o := &unstructured.Unstructured{}
		err := docs.Decode(&o.Object)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, nil, fmt.Errorf("data[%s]: %w", policiesKey, err)
		}
		if len(o.Object) > 0 {
			policies = append(policies, o)
		}
	}
	if len(policies) == 0 {
		return 0, nil, fmt.Errorf("data[%s]: no policies", policiesKey)
	}
	release := map[string]string{}
	for _, key := range []string{helmRelease, helmReleaseNamespace} {
		if value, ok := plan.Annotations[key]; ok {
			release[key] = value
		}
	}
	for _, o := range policies {
		all := o.GetAnnotations()
		if all == nil {
			all = map[string]string{}
		}
		maps.Copy(all, release)
		o.SetAnnotations(all)
	}
	isBinding := func(o *unstructured.Unstructured) int {
		if strings.HasSuffix(o.GetKind(), "Binding") {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(policies, func(a, b *unstructured.Unstructured) int { return isBinding(a) - isBinding(b) })
	return after, policies, nil
}

// owner is the field manager of a policy.
func owner(o *unstructured.Unstructured) client.FieldOwner {
	if _, ok := o.GetAnnotations()[helmRelease]; ok {
		return helmFieldManager
	}
	return v1alpha1.ControllerFieldManager
}
