package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/net/netutil"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/stayput/stayput/cmd/internal/program"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/plugin/nri"
)

type options struct {
	listen string
	log    program.Log
	// kubeconfig is empty for the cluster that the agent runs in, if any.
	kubeconfig string
	node       node.Options
}

func (o *options) addFlags(cmd *cobra.Command) {
	n := &o.node
	p := cmd.PersistentFlags()
	p.StringVar(&n.StateDir, "state-dir", ledger.DefaultStateDir, "directory of Stayput's records")
	p.StringVar(&n.CNIConfDir, "cni-conf-dir", node.DefaultCNIConfDir, "directory of the runtime's CNI configuration")
	p.StringVar(&n.CNIBinDir, "cni-bin-dir", node.DefaultCNIBinDir, "directory of the runtime's CNI plugins")
	p.StringVar(&n.CNICacheDir, "cni-cache-dir", node.DefaultCNICacheDir, "cache directory of libcni in the runtime")
	f := cmd.Flags()
	f.StringVar(&n.NRISocket, "nri-socket", "/var/run/nri/nri.sock",
		"NRI socket of the container runtime; empty: no NRI, annotations come from CNI and CRI")
	f.StringVar(&n.CRISocket, "cri-socket", node.DefaultCRISocket, "CRI socket of the container runtime")
	f.BoolVar(&n.InstallCNI, "install-cni", false,
		"install the plugin in --cni-bin-dir and maintain "+cniconf.ConflistName+" in --cni-conf-dir")
	f.StringVar(&n.PluginBinary, "plugin-binary", node.DefaultPluginBinary, "with --install-cni: plugin binary to install")
	f.Float64Var(&n.PromisedShare, "promised-share", 0,
		"with --install-cni: share of each range that may be promised, above 0 and at most 1; 0: the plugin's default")
	f.Float64Var(&n.PromisedSharePerNamespace, "promised-share-per-namespace", 0,
		"with --install-cni: share of each range that may be promised to one namespace, above 0 and at most 1; "+
			"0: all of --promised-share")
	f.Int64Var(&n.PromisedLimit, "promised-limit", 0,
		"with --install-cni: maximum number of addresses of each range that may be promised; 0: the plugin's default")
	f.Int64Var(&n.PromisedLimitPerNamespace, "promised-limit-per-namespace", 0,
		"with --install-cni: maximum number of addresses of each range that may be promised to one namespace; "+
			"0: all of --promised-limit")
	f.DurationVar(&n.LongestRetention, "longest-retention", 0,
		"with --install-cni: maximum time that an address is retained; 0: no limit")
	f.DurationVar(&n.GracePeriod, "grace-period", node.DefaultGracePeriod,
		"how long a sandbox must be missing from the runtime before its address counts as leaked")
	f.DurationVar(&n.Interval, "reconcile-interval", node.DefaultInterval,
		"maximum time between two reconciliations, jittered")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file; empty: the cluster that the agent runs in, if any")
	f.StringVar(&n.NodeName, "node-name", "", "name of this node's Node object; empty: $NODE_NAME, else the host name")
	f.StringVar(&n.Namespace, "namespace", "",
		"namespace that stayput is installed in; empty: $POD_NAMESPACE, else that of the service account, if any")
	f.StringVar(&o.listen, "listen", "127.0.0.1:9463", "address of /healthz, /readyz and /metrics; empty disables them")
	o.log.AddFlags(f)
}

// serve runs the agent until ctx is done.
func serve(ctx context.Context, o options, stderr io.Writer) error {
	// 1. Logs, metrics.
	handler, err := o.log.Handler(stderr)
	if err != nil {
		return err
	}
	log := slog.New(handler)
	o.node.Log = log
	o.node.Registry = prometheus.NewRegistry()
	o.node.Registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		program.BuildInfo("agent"))
	klog.SetSlogLogger(log)         // client-go's
	utilruntime.ErrorHandlers = nil // client-go's errors, which the agent reports itself
	if o.node.GracePeriod <= 0 || o.node.Interval <= 0 {
		return errors.New("--grace-period and --reconcile-interval: expected more than 0")
	}
	if !(o.node.PromisedShare >= 0 && o.node.PromisedShare <= 1) {
		return errors.New("--promised-share: expected a number above 0 and at most 1, or 0 for the plugin's default")
	}
	if !(o.node.PromisedSharePerNamespace >= 0 && o.node.PromisedSharePerNamespace <= 1) {
		return errors.New("--promised-share-per-namespace: expected a number above 0 and at most 1, or 0 for no such limit")
	}
	if !(o.node.PromisedLimit >= 0 && o.node.PromisedLimit <= math.MaxInt32) {
		return errors.New("--promised-limit: expected a number above 0, or 0 for the plugin's default")
	}
	if !(o.node.PromisedLimitPerNamespace >= 0 && o.node.PromisedLimitPerNamespace <= math.MaxInt32) {
		return errors.New("--promised-limit-per-namespace: expected a number above 0, or 0 for no such limit")
	}
	if o.node.LongestRetention < 0 {
		return errors.New("--longest-retention: expected a duration above 0, or 0 for no limit")
	}

	// 2. The agent, and the API server if there is one.
	if o.node.API, err = o.apiServer(); err != nil {
		return err
	}
	if o.node.NodeName, err = o.nodeName(); err != nil {
		return err
	}
	namespace, err := program.InstalledIn(o.node.Namespace)
	if err != nil {
		return err
	}
	if o.node.API != nil {
		o.node.Namespace = namespace
	}
	agent, err := node.New(o.node)
	if err != nil {
		return err
	}

	// 3. Its HTTP endpoints, before anything that could take time.
	server, err := listen(o.listen, agent.Handler(), log)
	if err != nil {
		return err
	}

	// 4. Its NRI connection, if it is to have one.
	plugin := &nri.Plugin{Socket: o.node.NRISocket, Handler: hooks{agent}, Log: log}

	// 5. Everything, until a signal.
	log.Info("Running", "version", program.Version(), "state", o.node.StateDir, "listen", o.listen)
	var wg sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if o.node.NRISocket != "" {
		wg.Go(func() { plugin.Run(ctx) })
	}
	var why error
	wg.Go(func() {
		defer stop()
		why = agent.Run(ctx)
	})
	wg.Wait()
	log.Info("Ended", "err", why)

	// 6. Scrapes under way.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err = server.Shutdown(last); errors.Is(err, context.DeadlineExceeded) {
		err = server.Close() // a client that asks for nothing
	}
	return errors.Join(why, err)
}

// apiServer returns nil if there is no API server.
func (o *options) apiServer() (*rest.Config, error) {
	if o.kubeconfig == "" && os.Getenv("KUBERNETES_SERVICE_HOST") == "" {
		return nil, nil
	}
	config, err := program.APIServer(o.kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = "stayput-agent/" + program.Version()
	return config, nil
}

func (o *options) nodeName() (string, error) {
	if o.node.NodeName != "" {
		return o.node.NodeName, nil
	}
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("--node-name: %w", err)
	}
	return strings.ToLower(name), nil // as kubelet does
}

// connections is how many the server has at most, each of some 20 KiB. Further ones wait until one of them is closed.
const connections = 128

// listen serves h on addr; with an empty addr the server never answers.
func listen(addr string, h http.Handler, log *slog.Logger) (*http.Server, error) {
	server := &http.Server{
		Handler: h, MaxHeaderBytes: 8 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ReadTimeout: 3 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 10 * time.Second,
	}
	if addr == "" {
		return server, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	go func() {
		if err := server.Serve(netutil.LimitListener(l, connections)); !errors.Is(err, http.ErrServerClosed) {
			log.Error("HTTP server failed", "err", err)
		}
	}()
	return server, nil
}

// hooks connects the NRI plugin and the agent, which do not know each other.
type hooks struct{ agent *node.Agent }

func (h hooks) RunPodSandbox(s nri.Sandbox)    { h.agent.RunPodSandbox(node.Sandbox(s)) }
func (h hooks) StopPodSandbox(s nri.Sandbox)   { h.agent.StopPodSandbox(node.Sandbox(s)) }
func (h hooks) RemovePodSandbox(s nri.Sandbox) { h.agent.RemovePodSandbox(node.Sandbox(s)) }
func (h hooks) Connected(up bool)              { h.agent.Connected(up) }

func (h hooks) Synchronize(all []nri.Sandbox) {
	sandboxes := make([]node.Sandbox, len(all))
	for i, s := range all {
		sandboxes[i] = node.Sandbox(s)
	}
	h.agent.Synchronize(sandboxes)
}
