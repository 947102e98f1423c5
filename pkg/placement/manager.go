package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/podip"
	"github.com/stayput/stayput/pkg/placement/podstate"
	"github.com/stayput/stayput/pkg/placement/webhook"
)

// Scheme has the types of all objects that the controller reads or writes.
var Scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(s))
	utilruntime.Must(stayputv1alpha1.AddToScheme(s))
	utilruntime.Must(kruisev1alpha1.AddToScheme(s))
	utilruntime.Must(spiderpoolv2beta1.AddToScheme(s))
	return s
}()

// cacheScheme has the types of all objects that are cached. The rest is only written, or read from the API server.
var cacheScheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	cluster.AddToScheme(s)
	utilruntime.Must(appsv1.AddToScheme(s))
	utilruntime.Must(stayputv1alpha1.AddToScheme(s))
	utilruntime.Must(kruisev1alpha1.AddToScheme(s))
	return s
}()

// Options of the controller.
type Options struct {
	// MetricsAddress serves /metrics, HealthAddress /healthz and /readyz; "0": not served.
	MetricsAddress, HealthAddress string
	// LeaderElection lets one replica lead. The Lease is in LeaderElectionNamespace, or in the pod's own if that is empty.
	LeaderElection          bool
	LeaderElectionNamespace string
	// Pod is the one that the controller runs in, without a name if it runs in none, or that is not known. A leader whose
	// pod is gone is succeeded at once.
	Pod Pod
	// Namespace is where stayput is installed. If it is empty, an uninstallation goes unnoticed.
	Namespace string
	// CustomKinds are further kinds of workload, with a scale subresource, that a PersistentPodState may name.
	CustomKinds []schema.GroupVersionKind
	// LongestRetention is how long an address of a pool is kept at most once its pod is gone; zero is no limit.
	LongestRetention time.Duration
	// NominateHomes has the scheduler try the home of a pod first that only prefers it. It takes the right to patch the
	// status of pods.
	NominateHomes bool
	// GateWebhook, if there is one, gates pods, where the API server has no policies for that. It needs Namespace.
	GateWebhook *GateWebhook
	Log         logr.Logger
}

// GateWebhook is where the webhook that gates pods listens, and whether its certificate comes from elsewhere: see
// package webhook.
type GateWebhook struct {
	Port  int
	Given bool
}

// The lease is as long as those of Kubernetes' own controllers: an API server that is slow for a few seconds must not
// end the leader, which has read the whole cluster. A leader that ends on a signal releases the lease, and one whose
// pod is gone is succeeded at once (see podLock), so gated pods wait this long for the next one only if its node was
// lost.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	retryPeriod   = 2 * time.Second
)

// syncTimeout is how long the controllers wait for a cache of theirs before the process ends. To begin again helps only
// against a connection that is stuck: what an overloaded API server has sent by then is lost.
const syncTimeout = 10 * time.Minute

// Run runs the controller until ctx ends. It returns an error if it cannot start or has lost its lease: then another
// replica leads, and this process must end.
func Run(ctx context.Context, config *rest.Config, o Options) error {
	config = rest.CopyConfig(config)
	// The API server's priority and fairness limits us; a limit of our own would only delay gated pods.
	config.QPS, config.Burst = -1, -1
	config.DisableCompression = true // which costs the API server more than its network
	var cached caches
	lease, renew, retry := leaseDuration, renewDeadline, retryPeriod
	options := ctrl.Options{
		Scheme:                        Scheme,
		Logger:                        o.Log,
		Metrics:                       server.Options{BindAddress: "0"}, // see http.go
		HealthProbeBindAddress:        "0",
		LeaderElection:                o.LeaderElection,
		LeaderElectionID:              home.LeaseName,
		LeaderElectionNamespace:       o.LeaderElectionNamespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &lease,
		RenewDeadline:                 &renew,
		RetryPeriod:                   &retry,
		Controller:                    ctrlconfig.Controller{CacheSyncTimeout: syncTimeout},
		NewCache:                      cached.open,
		Cache: cache.Options{
			Scheme:           cacheScheme,
			DefaultTransform: stripRest, // also of what the API server may not serve, which must not stand below
			ByObject: map[client.Object]cache.ByObject{
				&cluster.Pod{}:                {Transform: cluster.Keep},
				&corev1.Node{}:                {Transform: stripNode},
				&appsv1.StatefulSet{}:         {Transform: stripStatefulSet},
				&stayputv1alpha1.RetainedIP{}: {Transform: retainedIPStripper()},
			},
		},
	}
	if o.LeaderElection && o.Pod.Name != "" {
		lock, err := newPodLock(config, cmp.Or(o.LeaderElectionNamespace, o.Pod.Namespace), o.Pod)
		if err != nil {
			return fmt.Errorf("setting up the leader election: %w", err)
		}
		options.LeaderElectionResourceLockInterface = lock
	}
	var mgr ctrl.Manager
	if err := persist(ctx, o.Log, time.Second, func() (err error) {
		mgr, err = ctrl.NewManager(config, options)
		return err
	}); err != nil {
		return fmt.Errorf("setting up: %w", err)
	}
	if err := addTo(ctx, mgr, cached.filled, o); err != nil {
		return fmt.Errorf("setting up: %w", err)
	}
	return mgr.Start(ctx)
}

// persist calls f, which asks the API server, again and again until it succeeds or ctx ends. An outage is logged once a
// minute, not as often as that.
func persist(ctx context.Context, log logr.Logger, every time.Duration, f func() error) error {
	var logged time.Time
	for {
		err := f()
		if err == nil {
			return nil
		}
		if time.Since(logged) > time.Minute {
			logged = time.Now()
			log.Error(err, "Cannot discover the kinds that the API server serves, retrying", "every", every)
		}
		select {
		case <-ctx.Done():
		case <-time.After(every):
		}
		if ctx.Err() != nil {
			return err
		}
	}
}

// addTo registers all loops with a manager. filled waits until the caches have everything.
func addTo(ctx context.Context, mgr ctrl.Manager, filled func(context.Context) bool, o Options) error {
	// 1. Indexes, so that no event costs more because there are more objects.
	if err := errors.Join(indexRetainedIPs(ctx, cluster.Indexes(mgr.GetCache())),
		cluster.IndexNodes(ctx, mgr.GetFieldIndexer()), indexUndecided(ctx, mgr.GetFieldIndexer())); err != nil {
		return err
	}

	// 2. Whether stayput is being uninstalled.
	memory := newMemory(time.Now)
	leads := func() bool {
		select {
		case <-mgr.Elected():
			return true
		default:
			return false
		}
	}
	uninstalling, err := followInstallation(mgr, o.Namespace)
	if err != nil {
		return err
	}

	// 3. Workloads, and PersistentPodStates for them.
	workloads, err := cluster.NewWorkloads(mgr, o.CustomKinds)
	if err != nil {
		return err
	}
	records, err := podstate.Add(ctx, mgr, workloads, leads, uninstalling)
	if err != nil {
		return err
	}

	// 4. What gates pods, where that is not for policies to do.
	if o.GateWebhook != nil {
		hook, err := webhook.New(mgr, webhook.Options{Namespace: o.Namespace, Given: o.GateWebhook.Given,
			Registry: metrics.Registry, Recorded: records.Target})
		if err != nil {
			return err
		}
		if err := addServer(mgr, "webhook", ":"+strconv.Itoa(o.GateWebhook.Port), hook, hook.TLS); err != nil {
			return err
		}
	}

	// 5. What every replica follows.
	if err := follow(ctx, mgr.GetCache(), memory, records != nil); err != nil {
		return err
	}

	// 6. Placement, with addresses of pools or without, and release.
	retained, err := mgr.GetCache().GetInformer(ctx, &stayputv1alpha1.RetainedIP{}, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	pools := podip.Options{Workloads: workloads, Uninstalling: uninstalling, LongestRetention: o.LongestRetention,
		Registry: metrics.Registry}
	if o.Namespace != "" {
		pools.Installation = types.NamespacedName{Namespace: o.Namespace, Name: installation.ConfigMap}
	}
	addresses, err := podip.Add(mgr, pools)
	if err != nil {
		return err
	}
	place := &placer{
		client: mgr.GetClient(), cache: mgr.GetCache(), live: mgr.GetAPIReader(), cached: retained.HasSynced,
		records: records, memory: memory, now: time.Now, pools: addresses, lag: newLag(),
		uninstalling: uninstalling, nominates: o.NominateHomes,
		events:  cluster.Recorder(mgr.GetEventRecorder(stayputv1alpha1.ControllerFieldManager)),
		metrics: newPlacementMetrics(metrics.Registry, memory, leads),
	}
	free := &releaser{
		client: mgr.GetClient(), cache: mgr.GetCache(), reader: mgr.GetAPIReader(), workloads: workloads,
		owners: newOwners(), memory: memory, now: time.Now,
		events: cluster.Recorder(mgr.GetEventRecorder(stayputv1alpha1.ControllerFieldManager)),
	}
	pods, err := cluster.NewPods(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return err
	}
	label := &labeller{client: mgr.GetClient(), list: pods.Each}
	if err := errors.Join(place.setUp(mgr), free.setUp(mgr), mgr.Add(label)); err != nil {
		return err
	}

	// 7. The end of the process, once what the caches have is from before a restore.
	if err := mgr.Add(restoreWatch{mgr.GetAPIReader(), o.Log}); err != nil {
		return err
	}

	// 8. Metrics and health.
	synced := func(r *http.Request) error {
		if !filled(r.Context()) {
			return errors.New("caches have not synced yet")
		}
		return nil
	}
	return errors.Join(addServer(mgr, "metrics", o.MetricsAddress, metricsHandler(metrics.Registry), nil),
		addServer(mgr, "health", o.HealthAddress, healthHandler(synced), nil))
}

// errNoLonger ends a process after an uninstallation that was withdrawn: others have changed what it knows to be so.
var errNoLonger = errors.New("stayput is no longer being uninstalled")

// followInstallation has every replica follow whether stayput is being uninstalled from a namespace, if one is given,
// and returns what reports it.
func followInstallation(mgr ctrl.Manager, namespace string) (uninstalling func() bool, err error) {
	if namespace == "" {
		return func() bool { return false }, nil
	}
	log := mgr.GetLogger().WithName("installation")
	f, err := installation.New(mgr.GetConfig(), namespace, slog.New(logr.ToSlogHandler(log)))
	if err != nil {
		return nil, err
	}
	uninstalling = func() bool { return f.State().Uninstalling }
	return uninstalling, mgr.Add(everyReplica(func(ctx context.Context) error {
		following, stop := context.WithCancel(ctx)
		defer stop()
		go f.Run(following)
		for begun := false; ; {
			select {
			case <-ctx.Done():
				return nil
			case <-f.Changed():
			}
			switch is := uninstalling(); {
			case begun && !is:
				return errNoLonger
			case is && !begun:
				log.Info("Uninstalling: no pod waits for its placement anymore")
				begun = true
			}
		}
	}))
}

// everyReplica is run by every replica, whether it leads or not.
type everyReplica func(context.Context) error

func (f everyReplica) Start(ctx context.Context) error { return f(ctx) }

// NeedLeaderElection returns false.
func (everyReplica) NeedLeaderElection() bool { return false }

// follow has every replica follow pods and RetainedIPs, so that the next leader knows what they did, and fill the other
// caches, so that it can lead at once.
func follow(ctx context.Context, c cache.Cache, m *memory, records bool) error {
	handlers := map[client.Object]toolscache.ResourceEventHandler{
		&cluster.Pod{}: m.handler(), &stayputv1alpha1.RetainedIP{}: m.releases(),
		&corev1.Node{}: nil, &appsv1.StatefulSet{}: nil,
	}
	if records {
		handlers[&kruisev1alpha1.PersistentPodState{}] = nil
	}
	for object, handler := range handlers {
		informer, err := c.GetInformer(ctx, object)
		if err != nil {
			return err
		}
		if handler == nil {
			continue
		}
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}
	return nil
}
