// Package webhook gates pods where the API server has no policies that can (see deploy/chart, gate.mechanism): a
// mutating webhook in every replica of the controller, leading or not.
//
// The API server decides which pods reach it, by the same conditions as the policies'. Only whether a workload is
// recorded is decided here, since such conditions see no other objects. While no replica answers, pods start ungated:
// at worst one does not come home, and none is held up. Once every API server has policies these take its place.
package webhook

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/httplimit"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// The paths of the webhook.
const (
	// Path is for pods that are always gated.
	Path = "/gate"
	// RecordedPath is for pods that are gated if a PersistentPodState records their workload.
	RecordedPath = "/gate-recorded"
)

// linger is how long a replica that was told to end still answers: until the API server, or kube-proxy, knows that it
// is gone.
const linger = 3 * time.Second

// Options of the webhook.
type Options struct {
	// Namespace is that of the Service and of the Secret with the certificate, both named home.GateWebhook.
	Namespace string
	// Port is where it listens.
	Port int
	// Given says that another program, not the controller, makes and renews the certificate in the Secret and the API
	// server's trust in it.
	Given    bool
	Registry prometheus.Registerer
	// Uninstalling reports whether stayput is being uninstalled: no pod is gated then.
	Uninstalling func() bool
}

// Add has a manager serve the webhook on every replica, as soon as there is a Secret for its certificate. serves
// reports whether this replica does.
func Add(mgr ctrl.Manager, o Options) (serves func() bool, err error) {
	certs := &certificates{
		reader: mgr.GetAPIReader(), writer: mgr.GetClient(), namespace: o.Namespace, given: o.Given,
		log: mgr.GetLogger().WithName("webhook"),
	}
	if err := o.Registry.Register(certs); err != nil {
		return nil, err
	}
	next := &successor{
		client: mgr.GetClient(), reader: mgr.GetAPIReader(), namespace: o.Namespace, uninstalling: o.Uninstalling,
		havePolicies: apiServers{mgr.GetAPIReader(), mgr.GetConfig()}.havePolicies,
		now:          time.Now, log: mgr.GetLogger().WithName("webhook"),
	}
	g := &gater{reader: mgr.GetAPIReader(), uninstalling: o.Uninstalling}
	room, mux := newRoom(), http.NewServeMux()
	for path, handle := range map[string]admission.HandlerFunc{Path: g.always, RecordedPath: g.ifRecorded} {
		mux.Handle(path, bounded{&admission.Webhook{Handler: handle}, room})
	}
	server := lingering{&server{":" + strconv.Itoa(o.Port), mux, certs.get}, certs}
	return certs.ready, errors.Join(mgr.Add(certs), mgr.Add(server), mgr.Add(next))
}

// server serves by TLS, also while some clients hoard connections.
type server struct {
	address     string
	handler     http.Handler
	certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
}

// Start serves until ctx is done.
func (s *server) Start(ctx context.Context) error {
	l, err := httplimit.Listen(s.address)
	if err != nil {
		return err
	}
	return s.serve(ctx, l)
}

func (s *server) serve(ctx context.Context, l net.Listener) error {
	of := httplimit.Server(s.handler)
	// An API server asks by few connections, each for several pods at a time. What a client sends waits in these buffers
	// until it is read, beyond what is charged for bodies.
	of.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 32, MaxReceiveBufferPerConnection: 64 << 10,
		MaxReceiveBufferPerStream: 64 << 10}
	config := &tls.Config{NextProtos: []string{"h2", "http/1.1"}, GetCertificate: s.certificate}
	shutdown := 10 * time.Second // more than the API server waits for an answer
	return (&manager.Server{Name: "webhook", Server: of, Listener: tls.NewListener(l, config),
		ShutdownTimeout: &shutdown}).Start(ctx)
}

// lingering is a server that goes on for a while after it was told to end, if it has been of use.
type lingering struct {
	server *server
	certs  *certificates
}

// NeedLeaderElection returns false: the API server calls any replica.
func (lingering) NeedLeaderElection() bool { return false }

// Start serves until ctx is done, and then for linger.
func (l lingering) Start(ctx context.Context) error {
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() {
		if l.certs.ready() {
			time.Sleep(linger)
		}
		stop()
	})()
	return l.server.Start(serving)
}

// gater answers the API server.
type gater struct {
	reader       client.Reader // from the API server
	uninstalling func() bool
}

// always gates a pod that can be gated.
func (g *gater) always(_ context.Context, req admission.Request) admission.Response {
	pod, err := podOf(req)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	return g.answer(pod)
}

// ifRecorded gates a pod that can be gated if its workload is among those that the controller has listed.
func (g *gater) ifRecorded(ctx context.Context, req admission.Request) admission.Response {
	pod, err := podOf(req)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return admission.Allowed("")
	}
	var list corev1.ConfigMap
	err = g.reader.Get(ctx, client.ObjectKey{Namespace: req.Namespace, Name: gate.Workloads}, &list)
	switch {
	case apierrors.IsNotFound(err):
		return admission.Allowed("")
	case err != nil:
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("reading the recorded workloads: %w", err))
	case !gate.Lists(&list, owner):
		return admission.Allowed("")
	}
	return g.answer(pod)
}

// podOf returns what matters here of the pod in a request.
func podOf(req admission.Request) (*corev1.Pod, error) {
	var pod corev1.Pod
	if err := json.Unmarshal(req.Object.Raw, &pod); err != nil {
		return nil, fmt.Errorf("reading the pod: %w", err)
	}
	return &pod, nil
}

// answer gates the pod, unless it is gated or cannot be: a gated pod with a node is invalid.
func (g *gater) answer(pod *corev1.Pod) admission.Response {
	if home.Gated(pod) || pod.Spec.NodeName != "" || g.uninstalling() {
		return admission.Allowed("")
	}
	if len(pod.Spec.SchedulingGates) > 0 {
		return admission.Patched("", jsonpatch.NewOperation("add", "/spec/schedulingGates/-", placement))
	}
	return admission.Patched("", jsonpatch.NewOperation("add", "/spec/schedulingGates",
		[]corev1.PodSchedulingGate{placement}))
}

var placement = corev1.PodSchedulingGate{Name: v1alpha1.PlacementGate}
