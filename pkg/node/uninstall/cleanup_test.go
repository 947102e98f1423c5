package uninstall_test

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/uninstall"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

func TestTheAgentsRoutesGoAndThoseOfPodsStay(t *testing.T) {
	dir := t.TempDir()
	ns := nodetest.Netns(t, dir, "node")
	ip := func(command string) (said string) {
		t.Helper()
		nodetest.In(t, ns, func() error {
			out, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput()
			if said = string(out); err != nil {
				return fmt.Errorf("ip %s: %w: %s", command, err, out)
			}
			return nil
		})
		return said
	}
	ip("link set lo up")
	ip("route add unreachable 10.50.0.5/32 proto 85")
	ip("-6 route add fd00:50::5/128 dev lo proto 85")
	ip("route add 10.50.0.6/32 dev lo proto 84")
	o := ledger.Options{StateDir: filepath.Join(dir, "state")}
	must.Do(t, o.Grants().PutNode("n1"))
	must.Do(t, uninstall.Node(t.Context(), uninstall.Options{
		Ledgers: o, CNIConfDir: filepath.Join(dir, "net.d"), CNIBinDir: filepath.Join(dir, "bin"), Netns: ns,
		Reload: time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}))
	left := ip("route") + ip("-6 route")
	if strings.Contains(left, "10.50.0.5") || strings.Contains(left, "fd00:50::5") {
		t.Errorf("left: %s", left)
	}
	if !strings.Contains(left, "10.50.0.6") {
		t.Errorf("the route of a pod that runs is gone: %s", left)
	}
}

// Behind multus nobody must restart it for that, nor in time: the agent is gone soon.
func TestMultusDelegatesToHostLocalAgain(t *testing.T) {
	dir := t.TempDir()
	conf := filepath.Join(dir, "net.d")
	must.Do(t, os.Mkdir(conf, 0o755))
	write := func(name, data string) { must.Do(t, os.WriteFile(filepath.Join(conf, name), []byte(data), 0o600)) }
	const stock = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`
	own := strings.Replace(strings.Replace(stock, "host-local", "stayput", 1), "{", `{"stayput.io/derived":{"from":"10-pods.conflist"},`, 1)
	write("10-pods.conflist", stock)
	write("00-stayput.conflist", own)
	write("00-multus.conf", `{"name":"m","type":"multus","kubeconfig":"/k","delegates":[`+own+`]}`)
	must.Do(t, uninstall.Node(t.Context(), uninstall.Options{
		Ledgers:    ledger.Options{StateDir: filepath.Join(dir, "state")},
		CNIConfDir: conf, CNIBinDir: filepath.Join(dir, "bin"),
		Reload: time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}))
	data, err := os.ReadFile(filepath.Join(conf, "00-multus.conf"))
	if must.Do(t, err); strings.Contains(string(data), "stayput") || !strings.Contains(string(data), "10.1.0.0/24") {
		t.Errorf("multus has %s", data)
	}
}
