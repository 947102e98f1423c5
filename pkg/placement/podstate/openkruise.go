package podstate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/stayput/stayput/pkg/home"
)

// openKruise watches whether OpenKruise runs in the cluster and so serves PersistentPodStates itself.
//
// Its methods are safe for concurrent use.
type openKruise struct {
	client   client.Client
	informer toolscache.SharedIndexInformer
}

// errKruiseUnknown means that the API server has not answered yet.
var errKruiseUnknown = errors.New("unknown yet whether OpenKruise is running")

// unknownPause is when to ask again for what is not known yet.
const unknownPause = time.Second

func newOpenKruise(mgr ctrl.Manager) (*openKruise, error) {
	c, err := metadata.NewForConfigAndClient(metadata.ConfigFor(mgr.GetConfig()), mgr.GetHTTPClient())
	if err != nil {
		return nil, err
	}
	k := &openKruise{client: mgr.GetClient(), informer: metadatainformer.NewFilteredMetadataInformer(c,
		admissionregistrationv1.SchemeGroupVersion.WithResource("mutatingwebhookconfigurations"), "", 0,
		toolscache.Indexers{},
		func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, home.KruiseWebhooks).String()
		},
	).Informer()}
	gauge := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stayput_controller_openkruise",
		Help: "1 if OpenKruise is running and serves PersistentPodStates, 0 if stayput does.",
	}, func() float64 {
		if runs, err := k.runs(); err == nil && runs {
			return 1
		}
		return 0
	})
	if err := metrics.Registry.Register(gauge); err != nil {
		return nil, err
	}
	loop, err := controller.NewTyped("openkruise", mgr, controller.TypedOptions[struct{}]{Reconciler: k})
	if err != nil {
		return nil, err
	}
	return k, errors.Join(mgr.Add(k), watchKruise(k, loop, func(context.Context) []struct{} { return []struct{}{{}} }))
}

// Start watches until ctx ends.
func (k *openKruise) Start(ctx context.Context) error {
	k.informer.RunWithContext(ctx)
	return nil
}

// NeedLeaderElection is false, so that a replica knows as soon as it leads.
func (k *openKruise) NeedLeaderElection() bool { return false }

// runs reports whether OpenKruise runs. An error means that it is not known.
func (k *openKruise) runs() (bool, error) {
	if !k.informer.HasSynced() {
		return false, errKruiseUnknown
	}
	return len(k.informer.GetStore().ListKeys()) > 0, nil
}

// Reconcile deletes the binding of the policy about unique targets once OpenKruise runs. Restoring it would take the
// right to create admission policies.
//
// The binding of the policy that gates recorded pods stays. Without a ConfigMap (gating.go) it does nothing, and once
// an API server has seen the last binding with its parameter kind go, it never again reads such parameters
// (kubernetes/kubernetes#130887).
func (k *openKruise) Reconcile(ctx context.Context, _ struct{}) (reconcile.Result, error) {
	runs, err := k.runs()
	switch {
	case err != nil:
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	case !runs:
		log.FromContext(ctx).Info("Serving PersistentPodStates again, OpenKruise was removed: reapply Stayput's manifests " +
			"for their admission policies")
		return reconcile.Result{}, nil
	}
	log.FromContext(ctx).Info("Leaving PersistentPodStates to OpenKruise")
	binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: home.PolicyUniqueTarget},
	}
	if err := client.IgnoreNotFound(k.client.Delete(ctx, binding)); err != nil {
		return reconcile.Result{}, fmt.Errorf("deleting the binding %s: %w", binding.GetName(), err)
	}
	return reconcile.Result{}, nil
}

// watchKruise enqueues these requests when OpenKruise comes or goes.
func watchKruise[request comparable](k *openKruise, c controller.TypedController[request],
	all func(context.Context) []request) error {
	return c.Watch(source.TypedFunc[request](func(ctx context.Context,
		queue workqueue.TypedRateLimitingInterface[request]) error {
		enqueue := func(any) {
			for _, r := range all(ctx) {
				queue.Add(r)
			}
		}
		handler := toolscache.ResourceEventHandlerFuncs{AddFunc: enqueue, DeleteFunc: enqueue}
		registration, err := k.informer.AddEventHandler(handler)
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = k.informer.RemoveEventHandler(registration) })
		return nil
	}))
}
