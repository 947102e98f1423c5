package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node"
	"github.com/stayput/stayput/plugin/nri"
)

type options struct {
	nriSocket string
	listen    string
	logLevel  slog.Level
	logFormat string
	node      node.Options
}

func (o *options) addFlags(cmd *cobra.Command) {
	cmd.PersistentFlags().StringVar(&o.node.StateDir, "state-dir", ledger.DefaultStateDir, "directory of stayput's own records")
	f := cmd.Flags()
	f.StringVar(&o.nriSocket, "nri-socket", "/var/run/nri/nri.sock", "NRI socket of the container runtime")
	f.StringVar(&o.node.CRISocket, "cri-socket", node.DefaultCRISocket, "CRI socket of the container runtime")
	f.StringVar(&o.node.CNICacheDir, "cni-cache-dir", node.DefaultCNICacheDir, "cache directory of libcni in the runtime")
	f.StringVar(&o.node.CNIConfDir, "cni-conf-dir", node.DefaultCNIConfDir, "directory of the runtime's CNI configuration")
	f.DurationVar(&o.node.GracePeriod, "grace-period", node.DefaultGracePeriod, "how long the runtime must not have known a sandbox before its address counts as leaked")
	f.DurationVar(&o.node.Interval, "reconcile-interval", node.DefaultInterval, "longest time between two reconciliations, jittered")
	f.StringVar(&o.listen, "listen", "127.0.0.1:9463", "address of /healthz, /readyz and /metrics; empty: none")
	f.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "least level that is logged: debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "format of the log on standard error: text or json")
}

func (o *options) logger(w io.Writer) (*slog.Logger, error) {
	ho := &slog.HandlerOptions{Level: o.logLevel}
	switch o.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(w, ho)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, ho)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not valid: expected text or json", o.logFormat)
}

// softMemoryLimit and gcPercent keep the agent small rather than quick: it allocates little, in bursts. The
// usual variables override them.
const (
	softMemoryLimit = 20 << 20
	gcPercent       = 25
)

func limitMemory() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(softMemoryLimit)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// serve is the daemon.
func serve(ctx context.Context, o options, stderr io.Writer) error {
	// 1. Logs, memory, metrics.
	log, err := o.logger(stderr)
	if err != nil {
		return err
	}
	limitMemory()
	o.node.Log = log
	o.node.Registry = prometheus.NewRegistry()
	o.node.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if o.node.GracePeriod <= 0 || o.node.Interval <= 0 {
		return errors.New("--grace-period and --reconcile-interval: expected more than 0")
	}

	// 2. The agent.
	agent, err := node.New(o.node)
	if err != nil {
		return err
	}

	// 3. Its HTTP endpoints, before anything that could take time.
	server, err := listen(o.listen, agent.Handler(), log)
	if err != nil {
		return err
	}

	// 4. Its ear at the runtime.
	plugin := &nri.Plugin{Socket: o.nriSocket, Handler: hooks{agent}, Log: log}

	// 5. All of it, until a signal.
	log.Info("Running", "version", version(), "state", o.node.StateDir, "listen", o.listen)
	var wg sync.WaitGroup
	wg.Go(func() { plugin.Run(ctx) })
	wg.Go(func() { agent.Run(ctx) })
	wg.Wait()
	log.Info("Ended")

	// 6. Scrapes that are under way.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	return server.Shutdown(last)
}

// listen serves h on addr. A server without an address never answers.
func listen(addr string, h http.Handler, log *slog.Logger) (*http.Server, error) {
	server := &http.Server{
		Handler: h, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	if addr == "" {
		return server, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("The HTTP endpoints ended", "err", err)
		}
	}()
	return server, nil
}

// hooks joins the NRI plugin and the agent, which do not know each other.
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
