package uninstall_test

import (
	"fmt"
	"log/slog"
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
	must.Do(t, ledger.TellNode(o, "n1"))
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
