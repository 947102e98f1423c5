package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/stayput/stayput/cmd/internal/program"
	"github.com/stayput/stayput/pkg/placement"
)

type options struct {
	kubeconfig string
	log        program.Log
	kinds      []string
	gates      bool
	webhook    placement.GateWebhook
	placement  placement.Options
}

func (o *options) addFlags(cmd *cobra.Command) {
	p := cmd.PersistentFlags()
	p.StringVar(&o.placement.Namespace, "namespace", "",
		"namespace that stayput is installed in; empty: $POD_NAMESPACE, else that of the service account, else "+
			""+defaultNamespace)
	p.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file; empty: the pod's service account")
	f := cmd.Flags()
	f.StringVar(&o.placement.MetricsAddress, "metrics-bind-address", ":8080", "address of /metrics; 0 disables it")
	f.StringVar(&o.placement.HealthAddress, "health-probe-bind-address", ":8081",
		"address of /healthz and /readyz; 0 disables them")
	f.BoolVar(&o.placement.LeaderElection, "leader-elect", true, "elect a leader among the replicas")
	f.StringVar(&o.placement.LeaderElectionNamespace, "leader-election-namespace", "",
		"namespace of the leader election lease; empty: the pod's own")
	f.StringSliceVar(&o.kinds, "workload-kinds", nil,
		"additional kinds that a PersistentPodState may target, as Kind.version.group; they must have a scale subresource")
	f.DurationVar(&o.placement.LongestRetention, "longest-retention", 0,
		"longest time that an address of a pool is retained; 0: no limit")
	f.BoolVar(&o.placement.NominateHomes, "nominate-homes", false,
		"nominate the home of a pod that only prefers it, so that the scheduler tries it first; "+
			"requires the right to patch pods/status")
	f.BoolVar(&o.gates, "gate-webhook", false,
		"serve the webhook that gates pods where the API server has no policies for that, once its Secret exists, "+
			"stayput-gate")
	f.IntVar(&o.webhook.Port, "gate-webhook-port", 9443, "port of the webhook that gates pods")
	f.BoolVar(&o.webhook.Given, "gate-webhook-cert-given", false,
		"the certificate in that Secret is managed externally, for example by cert-manager: do not create or renew it")
	o.log.AddFlags(f)
}

const defaultNamespace = "stayput-system"

func (o *options) namespace() (string, error) {
	namespace, err := program.InstalledIn(o.placement.Namespace)
	return cmp.Or(namespace, defaultNamespace), err
}

// client returns a client that reads from the API server, not from a cache.
func (o *options) client() (client.Client, error) {
	config, err := program.APIServer(o.kubeconfig)
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: placement.Scheme})
}

// customKinds parses Kind.version.group.
func (o *options) customKinds() ([]schema.GroupVersionKind, error) {
	var kinds []schema.GroupVersionKind
	for _, s := range o.kinds {
		kind, _ := schema.ParseKindArg(s)
		if kind == nil || strings.Contains(s, "/") {
			return nil, fmt.Errorf("--workload-kinds: %q is not valid: expected Kind.version.group, for example "+
				"Game.v1.example.com", s)
		}
		kinds = append(kinds, *kind)
	}
	return kinds, nil
}

// serve runs the controller until ctx is done.
func serve(ctx context.Context, o options, stderr io.Writer) error {
	handler, err := o.log.Handler(stderr)
	if err != nil {
		return err
	}
	log := logr.FromSlogHandler(handler)
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	config, err := program.APIServer(o.kubeconfig)
	if err != nil {
		return err
	}
	if o.placement.LongestRetention < 0 {
		return errors.New("--longest-retention: expected a duration above 0, or 0 for no limit")
	}
	if o.placement.CustomKinds, err = o.customKinds(); err != nil {
		return err
	}
	o.placement.Log = log
	o.placement.Pod = placement.Pod{UID: types.UID(os.Getenv("POD_UID")),
		NamespacedName: types.NamespacedName{Namespace: program.Namespace(), Name: os.Getenv("POD_NAME")}}
	if o.placement.Namespace, err = o.namespace(); err != nil {
		return err
	}
	if o.gates {
		o.placement.GateWebhook = &o.webhook
	}
	if err := metrics.Registry.Register(program.BuildInfo("controller")); err != nil {
		return err
	}
	log.Info("Running", "version", program.Version())
	if err := placement.Run(ctx, config, o.placement); err != nil && ctx.Err() == nil {
		return restart(ctx, log, err)
	}
	return nil
}

// restartAfter keeps a controller whose API server is away or refuses it from restarting without a pause.
const restartAfter = time.Second

// restart replaces this process by a new one, which contends for the lease again. A controller that could not renew its
// lease in time must stop all its work, which a new process is sure to have done. It does not exit, as other
// controllers do, because each restart of the container comes after a longer pause, of up to five minutes, in which
// pods stay gated.
//
// It returns nil if ctx is done, else an error.
func restart(ctx context.Context, log logr.Logger, why error) error {
	log.Error(why, "Restarting", "after", restartAfter)
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(restartAfter):
		return program.Restart()
	}
}
