package placement

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
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

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// kruiseWebhooks is there where OpenKruise's controller runs, which then sees to PersistentPodStates itself.
const kruiseWebhooks = "kruise-mutating-webhook-configuration"

// uniqueTargetBinding is of the admission policy that allows one PersistentPodState for a workload, see
// deploy/chart. The binding of the policy that gates recorded pods stays: without a ConfigMap (gated.go) it does
// nothing, and an API server to which the last binding with a parameter kind of its own goes and comes again never
// reads such parameters any more (kubernetes/kubernetes#130887).
const uniqueTargetBinding = "stayput-unique-target"

// kruise follows whether OpenKruise runs in the cluster, and so whether PersistentPodStates are ours.
//
// Its methods may be called by any goroutine.
type kruise struct {
	client   client.Client
	informer toolscache.SharedIndexInformer
}

// errKruiseUnknown is at the start, before the API server has answered.
var errKruiseUnknown = errors.New("not known yet whether OpenKruise runs")

// unknownPause is when to ask again what is not known yet.
const unknownPause = time.Second

func newKruise(mgr ctrl.Manager) (*kruise, error) {
	c, err := metadata.NewForConfigAndClient(metadata.ConfigFor(mgr.GetConfig()), mgr.GetHTTPClient())
	if err != nil {
		return nil, err
	}
	k := &kruise{client: mgr.GetClient(), informer: metadatainformer.NewFilteredMetadataInformer(c,
		admissionregistrationv1.SchemeGroupVersion.WithResource("mutatingwebhookconfigurations"), "", 0, toolscache.Indexers{},
		func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, kruiseWebhooks).String()
		},
	).Informer()}
	gauge := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stayput_controller_openkruise",
		Help: "1 where OpenKruise runs, so that PersistentPodStates are left to it; 0 where they are ours.",
	}, func() float64 {
		if on, err := k.on(); on || err != nil {
			return 0
		}
		return 1
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

// Start follows OpenKruise until ctx ends.
func (k *kruise) Start(ctx context.Context) error {
	k.informer.RunWithContext(ctx)
	return nil
}

// NeedLeaderElection is false so that a replica that begins to lead knows at once.
func (k *kruise) NeedLeaderElection() bool { return false }

// on says whether PersistentPodStates are ours.
func (k *kruise) on() (bool, error) {
	if !k.informer.HasSynced() {
		return false, errKruiseUnknown
	}
	return len(k.informer.GetStore().ListKeys()) == 0, nil
}

// Reconcile takes the binding away where OpenKruise runs. It does not come back by itself: that would take
// the right to make admission policies.
func (k *kruise) Reconcile(ctx context.Context, _ struct{}) (reconcile.Result, error) {
	on, err := k.on()
	switch {
	case err != nil:
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	case on:
		log.FromContext(ctx).Info("OpenKruise does not run any more: PersistentPodStates are ours again. Apply stayput's manifests again for their admission policies")
		return reconcile.Result{}, nil
	}
	log.FromContext(ctx).Info("OpenKruise runs: PersistentPodStates are left to it")
	binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: uniqueTargetBinding}}
	if err := client.IgnoreNotFound(k.client.Delete(ctx, binding)); err != nil {
		return reconcile.Result{}, fmt.Errorf("deleting the binding %s: %w", binding.GetName(), err)
	}
	return reconcile.Result{}, nil
}

// watchKruise has a controller look at all these requests when OpenKruise comes or goes.
func watchKruise[request comparable](k *kruise, c controller.TypedController[request], all func(context.Context) []request) error {
	return c.Watch(source.TypedFunc[request](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[request]) error {
		enqueue := func(any) {
			for _, r := range all(ctx) {
				queue.Add(r)
			}
		}
		registration, err := k.informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{AddFunc: enqueue, DeleteFunc: enqueue})
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = k.informer.RemoveEventHandler(registration) })
		return nil
	}))
}

// persistentPodStates is the part of the controller that serves PersistentPodStates.
type persistentPodStates struct {
	records recorder
	targets *targets
	// readable says that they can be read.
	readable bool
}

// addPersistentPodStates registers the loops for PersistentPodStates with a manager: generating, recording, whose
// pods are gated, and stepping aside for OpenKruise.
func addPersistentPodStates(ctx context.Context, mgr ctrl.Manager, custom []schema.GroupVersionKind, uninstalling func() bool) (*persistentPodStates, error) {
	if ok, err := readable(ctx, mgr.GetAPIReader()); err != nil {
		return nil, err
	} else if !ok {
		return doWithout(mgr, custom)
	}
	if err := errors.Join(indexPods(ctx, mgr.GetFieldIndexer()), indexStates(ctx, mgr.GetFieldIndexer())); err != nil {
		return nil, err
	}
	k, err := newKruise(mgr)
	if err != nil {
		return nil, err
	}
	t, err := newTargets(mgr, custom)
	if err != nil {
		return nil, err
	}
	to := mgr.GetEventRecorder(stayputv1alpha1.ControllerFieldManager)
	generate := &generating{client: mgr.GetClient(), live: mgr.GetAPIReader(), targets: t, kruise: k, events: to}
	record := &recording{client: mgr.GetClient(), targets: t, kruise: k, events: to, now: time.Now}
	gate := &gating{client: mgr.GetClient(), live: mgr.GetAPIReader(), kruise: k, uninstalling: uninstalling}
	return &persistentPodStates{&records{client: mgr.GetClient(), targets: t, kruise: k}, t, true},
		errors.Join(generate.setUp(mgr), record.setUp(mgr), gate.setUp(mgr))
}

// everyState are requests for all PersistentPodStates.
func everyState[request comparable](ctx context.Context, from client.Reader, of func(*kruisev1alpha1.PersistentPodState) request) []request {
	var list kruisev1alpha1.PersistentPodStateList
	if err := from.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Listing PersistentPodStates")
	}
	all := make([]request, len(list.Items))
	for i := range list.Items {
		all[i] = of(&list.Items[i])
	}
	return all
}
