package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/hoard"
	"github.com/stayput/stayput/test/must"
)

// a node's files with the networks red and blue; each has a retained and a bound address.
func files(t *testing.T) (state string, ledgers map[string]*ledger.Ledger) {
	t.Helper()
	dir := t.TempDir()
	state = filepath.Join(dir, "state")
	ledgers = map[string]*ledger.Ledger{}
	for name, subnet := range map[string]string{"red": "192.0.2.0/24", "blue": "198.51.100.0/24"} {
		r, err := ledger.NewRange(netip.MustParsePrefix(subnet), netip.Addr{}, netip.Addr{}, netip.Addr{})
		must.Do(t, err)
		n := &ledger.Network{Name: name, DataDir: filepath.Join(dir, "networks"), Ranges: []ledger.RangeSet{{r}}}
		l := ledger.New(n, ledger.Options{StateDir: state})
		ledgers[name] = l
		policy, _, err := retention.Parse(map[string]string{retention.AnnotationRetainIP: "10m"})
		must.Do(t, err)
		for _, pod := range []string{"kept", "running"} {
			att := ledger.Attachment{ContainerID: pod, IfName: "eth0"}
			_, err := l.Add(ledger.AddRequest{
				Attachment: att, Pod: ledger.Pod{Namespace: "default", Name: pod}, Policy: &policy,
			})
			must.Do(t, err)
		}
		_, err = l.Del(ledger.DelRequest{Attachment: ledger.Attachment{ContainerID: "kept", IfName: "eth0"}})
		must.Do(t, err)
	}
	return state, ledgers
}

func execute(args ...string) (stdout string, err error) {
	var out bytes.Buffer
	cmd := command()
	cmd.SetOut(&out)
	cmd.SetErr(&bytes.Buffer{})
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(context.Background())
	return out.String(), err
}

func TestUninstallFreesWhatIsRetainedInEveryNetworkAndSaysSo(t *testing.T) {
	state, ledgers := files(t)
	none := t.TempDir()
	out, err := execute("uninstall", "--state-dir", state, "--cni-conf-dir", none, "--cni-bin-dir", none)
	must.Do(t, err)
	if _, err := os.Stat(state); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is still a state directory: %v", err)
	}
	for _, line := range []string{
		"msg=Freed network=red addr=192.0.2.2",
		`msg="Left bound address, it becomes free when its pod ends" network=red addr=192.0.2.3`,
		"msg=Freed network=blue addr=198.51.100.2",
		`msg="Left bound address, it becomes free when its pod ends" network=blue addr=198.51.100.3`,
	} {
		if !strings.Contains(out, line+"\n") {
			t.Errorf("does not say %q:\n%s", line, out)
		}
	}
	for name, l := range ledgers {
		addrs, err := l.List()
		must.Do(t, err)
		if len(addrs) != 1 || addrs[0].State != ledger.StateBound {
			t.Errorf("network %s has %+v", name, addrs)
		}
	}
	if out, err := execute("uninstall", "--state-dir", filepath.Join(state, "none"), "--cni-conf-dir", none,
		"--cni-bin-dir", none); err != nil || out != "" {
		t.Errorf("where nothing is installed: %q, %v", out, err)
	}
}

func TestUninstallGoesOnAfterANetworkThatItCannotRead(t *testing.T) {
	state, ledgers := files(t)
	paths, err := filepath.Glob(filepath.Join(state, "red-*", "network"))
	must.Do(t, err)
	must.Do(t, os.WriteFile(paths[0], []byte("{"), 0o644))
	none := t.TempDir()
	out, err := execute("uninstall", "--state-dir", state, "--cni-conf-dir", none, "--cni-bin-dir", none)
	if err == nil || !strings.Contains(err.Error(), paths[0]) {
		t.Errorf("error %v does not name %s", err, paths[0])
	}
	if !strings.Contains(out, "msg=Freed network=blue addr=198.51.100.2\n") {
		t.Errorf("printed %q", out)
	}
	addrs, err := ledgers["red"].List()
	must.Do(t, err)
	if len(addrs) != 2 {
		t.Errorf("the network that could not be read has %+v", addrs)
	}
}

func TestFlagsThatMakeNoSenseAreRefused(t *testing.T) {
	for _, flag := range []string{"--grace-period=0s", "--reconcile-interval=-1s", "--log-level=loud", "--log-format=xml",
		"--listen=nowhere:x", "--kubeconfig=/nonexistent", "--promised-share=1.5", "--promised-share=NaN",
		"--promised-share-per-namespace=-1", "--promised-limit=-1", "--promised-limit-per-namespace=4294967296",
		"--longest-retention=-1h"} {
		_, err := execute(flag, "--state-dir", t.TempDir())
		name, _, _ := strings.Cut(flag, "=")
		if err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(name, "--")) {
			t.Errorf("%s: error %v", flag, err)
		}
	}
}

func TestTheDaemonRunsWithoutARuntimeAndEndsWhenItIsTold(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := command()
	log := &lines{wait: "NRI disconnected", then: cancel}
	cmd.SetErr(log)
	cmd.SetArgs([]string{
		"--state-dir", filepath.Join(dir, "state"), "--cni-cache-dir", dir, "--cni-conf-dir", dir, "--listen", "127.0.0.1:0",
		"--nri-socket", filepath.Join(dir, "nri.sock"), "--cri-socket", filepath.Join(dir, "cri.sock"),
	})
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	select {
	case err := <-done:
		must.Do(t, err)
	case <-time.After(time.Minute): // bounds a test that hangs
		t.Fatal("it does not end")
	}
}

func TestAClientCannotHoardTheAgentsConnections(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	must.Do(t, free.Close())
	address := free.Addr().String()
	server, err := listen(address, http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, server.Close()) })
	hoard.Connections(t, address, connections)
}

// lines calls then once a line of the log contains wait.
type lines struct {
	wait string
	then func()
}

func (l *lines) Write(b []byte) (int, error) {
	if strings.Contains(string(b), l.wait) {
		l.then()
	}
	return len(b), nil
}
