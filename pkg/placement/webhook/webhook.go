// Package webhook gates pods where the API server has no policies that can (see deploy/chart, gate.mechanism): a
// mutating webhook in every replica of the controller, leading or not.
//
// The API server decides which pods reach it, by the same conditions as the policies'. Only whether a workload is
// recorded is decided here, since such conditions see no other objects. While no replica answers, or one answers with
// an error, pods start ungated: at worst one does not come home, and none is held up.
package webhook

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// The paths of the webhook.
const (
	// Path is for pods that are always gated.
	Path = "/gate"
	// RecordedPath is for pods that are gated if a PersistentPodState records their workload.
	RecordedPath = "/gate-recorded"
	// RestoredPath is for copies of pods, from which it takes what Stayput wrote on those.
	RestoredPath = "/restored"
)

// answerWithin is as long as the API server waits (timeoutSeconds in deploy/chart).
const answerWithin = 2 * time.Second

// Options of the webhook.
type Options struct {
	// Namespace is that of the Service and of the Secret with the certificate, both named home.GateWebhook.
	Namespace string
	// Given says that another program, not the controller, makes and renews the certificate in the Secret and the API
	// server's trust in it.
	Given    bool
	Registry prometheus.Registerer
	// Recorded reports whether a PersistentPodState records a workload, without asking the API server. An error means that
	// it is not known.
	Recorded func(ctx context.Context, namespace string, workload *metav1.OwnerReference) (bool, error)
}

// Webhook is what a server needs to be the webhook.
type Webhook struct {
	http.Handler
	TLS *tls.Config
}

// New has a manager look after the webhook's certificate, as soon as there is a Secret for it.
func New(mgr ctrl.Manager, o Options) (*Webhook, error) {
	certs := &certificates{
		reader: mgr.GetAPIReader(), writer: mgr.GetClient(), namespace: o.Namespace, given: o.Given,
		log: mgr.GetLogger().WithName("webhook"),
	}
	if err := o.Registry.Register(certs); err != nil {
		return nil, err
	}
	config := &tls.Config{NextProtos: []string{"h2", "http/1.1"}, GetCertificate: certs.get}
	return &Webhook{newHandler(o), config}, mgr.Add(certs)
}

func newHandler(o Options) http.Handler {
	mux, read := http.NewServeMux(), newReader()
	mux.Handle(Path, handler{read, o.gating(func(context.Context, *review) (bool, error) { return true, nil })})
	mux.Handle(RecordedPath, handler{read, o.gating(o.recorded)})
	mux.Handle(RestoredPath, handler{read, copied})
	return mux
}

// gating returns a patcher that labels a pod, and gates it if it can be gated, if it is wanted.
func (o *Options) gating(wanted func(context.Context, *review) (bool, error)) patcher {
	return func(ctx context.Context, of *review) ([]jsonpatch.Operation, error) {
		if is, err := wanted(ctx, of); err != nil || !is {
			return nil, err
		}
		return marked(of), nil
	}
}

// recorded reports whether the workload of a pod is recorded.
func (o *Options) recorded(ctx context.Context, of *review) (bool, error) {
	owner := of.owner()
	if owner == nil {
		return false, nil
	}
	recorded, err := o.Recorded(ctx, of.Request.Namespace, owner)
	if err != nil {
		return false, fmt.Errorf("looking up the PersistentPodStates of %s %s/%s: %w", owner.Kind, of.Request.Namespace,
			owner.Name, err)
	}
	return recorded, nil
}

// patcher returns what to change of a pod.
type patcher func(context.Context, *review) ([]jsonpatch.Operation, error)

// handler answers the API server. An error is no answer, by its status, after which the API server admits the pod as it
// is: the failurePolicy is Ignore. An answer that does not allow the pod would refuse it.
type handler struct {
	reader
	patch patcher
}

// ServeHTTP implements [http.Handler].
func (h handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), answerWithin)
	defer cancel()
	of, status, err := h.read(ctx, w, r)
	defer of.release()
	if err != nil {
		http.Error(w, err.Error(), status)
		return
	}
	patch, err := h.patch(ctx, of)
	if err == nil {
		err = answer(w, of, patch)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

var placement = corev1.PodSchedulingGate{Name: v1alpha1.PlacementGate}

// marked is the patch that labels the pod, and gates it if it can be gated.
func marked(of *review) []jsonpatch.Operation {
	pod := &of.Request.Object
	label := jsonpatch.NewOperation("add", "/metadata/labels", map[string]string{gate.ManagedLabel: gate.Managed})
	if pod.Metadata.Labels {
		label = jsonpatch.NewOperation("add", "/metadata/labels/"+strings.ReplaceAll(gate.ManagedLabel, "/", "~1"),
			gate.Managed)
	}
	switch {
	case !of.gateable():
		return []jsonpatch.Operation{label}
	case len(pod.Spec.SchedulingGates) > 0:
		return []jsonpatch.Operation{label, jsonpatch.NewOperation("add", "/spec/schedulingGates/-", placement)}
	}
	return []jsonpatch.Operation{
		label, jsonpatch.NewOperation("add", "/spec/schedulingGates", []corev1.PodSchedulingGate{placement}),
	}
}

func answer(w http.ResponseWriter, of *review, patch []jsonpatch.Operation) error {
	response := &admissionv1.AdmissionResponse{UID: of.Request.UID, Allowed: true}
	if len(patch) > 0 {
		ops, err := json.Marshal(patch)
		if err != nil {
			return err
		}
		kind := admissionv1.PatchTypeJSONPatch
		response.Patch, response.PatchType = ops, &kind
	}
	body, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: "AdmissionReview"},
		Response: response,
	})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // the API server does not wait any more
	return nil
}
