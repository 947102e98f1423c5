// Certmanager is cert-manager's controller, cainjector and webhook: the packages of its module that do their work, started
// as its commands start them, with the flags that its chart sets. The commands themselves are modules that the module
// proxy does not have. Neither does it have all that the issuers acme, vault and venafi need. The controller elects no
// leader: it has one replica.
//
// The name of this module lets it import internal packages.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	cmwebhook "github.com/cert-manager/cert-manager/internal/webhook"
	cmscheme "github.com/cert-manager/cert-manager/pkg/client/clientset/versioned/scheme"
	"github.com/cert-manager/cert-manager/pkg/controller"
	"github.com/cert-manager/cert-manager/pkg/controller/cainjector"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/metrics"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/clusterissuers"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	"github.com/cert-manager/cert-manager/pkg/healthz"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
	logf "github.com/cert-manager/cert-manager/pkg/logs"
	"github.com/cert-manager/cert-manager/pkg/util"
	"github.com/cert-manager/cert-manager/pkg/webhook/options"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kscheme "k8s.io/client-go/kubernetes/scheme"
	apiregistration "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	logf.InitLogs()
	defer logf.FlushLogs()
	ctrl.SetLogger(logf.Log)
	commands := map[string]func(context.Context, *pflag.FlagSet, []string) error{
		"controller": runController, "cainjector": runCAInjector, "webhook": runWebhook,
	}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: certmanager controller|cainjector|webhook FLAGS")
		os.Exit(2)
	}
	name := os.Args[1]
	flags := pflag.NewFlagSet(name, pflag.ContinueOnError)
	ctx = logf.NewContext(ctx, logf.Log, name)
	if err := commands[name](ctx, flags, os.Args[2:]); err != nil && !errors.Is(err, context.Canceled) {
		logf.Log.Error(err, "error executing command")
		logf.FlushLogs()
		os.Exit(1)
	}
}

// runController is cmd/controller.
func runController(ctx context.Context, flags *pflag.FlagSet, args []string) error {
	o := controller.ContextOptions{
		KubernetesAPIQPS: 20, KubernetesAPIBurst: 50,
		IssuerOptions:    controller.IssuerOptions{ClusterIssuerAmbientCredentials: true},
		SchedulerOptions: controller.SchedulerOptions{MaxConcurrentChallenges: 60},
		CertificateOptions: controller.CertificateOptions{
			CopiedAnnotationPrefixes: []string{
				"*", "-kubectl.kubernetes.io/", "-fluxcd.io/", "-argocd.argoproj.io/",
			},
			CertificateRequestMinimumBackoffDuration: time.Hour, CertificateRequestMaximumBackoffDuration: 32 * time.Hour,
		},
	}
	flags.StringVar(&o.ClusterResourceNamespace, "cluster-resource-namespace", "kube-system", "")
	flags.BoolVar(&o.EnableOwnerRef, "enable-certificate-owner-ref", false, "")
	flags.IntVar(&o.MaxConcurrentChallenges, "max-concurrent-challenges", o.MaxConcurrentChallenges, "")
	flags.StringVar(&o.HTTP01SolverImage, "acme-http01-solver-image", "", "")
	flags.String("leader-election-namespace", "", "")
	flags.Int("v", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	factory, err := controller.NewContextFactory(ctx, o)
	if err != nil {
		return err
	}
	all, err := factory.Build()
	if err != nil {
		return err
	}
	health, err := net.Listen("tcp", ":9403")
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return healthz.NewServer(20*time.Second).Start(ctx, health) })
	for name, build := range controller.Known() {
		c, err := build(factory)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		g.Go(func() error { return c.Run(5, ctx) })
	}
	all.SharedInformerFactory.Start(ctx.Done())
	all.KubeSharedInformerFactory.Start(ctx.Done())
	all.HTTP01ResourceMetadataInformersFactory.Start(ctx.Done())
	return g.Wait()
}

// runCAInjector is cmd/cainjector.
func runCAInjector(ctx context.Context, flags *pflag.FlagSet, args []string) error {
	namespace := flags.String("leader-election-namespace", "", "")
	flags.Int("v", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		kscheme.AddToScheme, cmscheme.AddToScheme, apiextensions.AddToScheme, apiregistration.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	mgr, err := ctrl.NewManager(util.RestConfigWithUserAgent(config, "cainjector"), ctrl.Options{
		Scheme:         scheme,
		Cache:          cache.Options{ReaderFailOnMissingInformer: true},
		Client:         client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.Secret{}}}},
		LeaderElection: true, LeaderElectionNamespace: *namespace,
		LeaderElectionID: "cert-manager-cainjector-leader-election", LeaderElectionReleaseOnCancel: true,
		Metrics: metricsserver.Options{BindAddress: "0"},
	})
	if err != nil {
		return err
	}
	if err := cainjector.RegisterAllInjectors(ctx, mgr, cainjector.SetupOptions{
		EnableCertificatesDataSource: true,
		EnabledReconcilersFor: map[string]bool{
			cainjector.MutatingWebhookConfigurationName: true, cainjector.ValidatingWebhookConfigurationName: true,
			cainjector.APIServiceName: true, cainjector.CustomResourceDefinitionName: true,
		},
	}); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

// runWebhook is cmd/webhook.
func runWebhook(ctx context.Context, flags *pflag.FlagSet, args []string) error {
	config, err := options.NewWebhookConfiguration()
	if err != nil {
		return err
	}
	options.AddConfigFlags(flags, config)
	if err := flags.Parse(args); err != nil {
		return err
	}
	server, err := cmwebhook.NewCertManagerWebhookServer(logf.FromContext(ctx), *config)
	if err != nil {
		return err
	}
	return server.Run(ctx)
}
