package node

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// addressFiles returns the addresses that are not free in the network of most tests.
func addressFiles(t *testing.T, n *lab.Node) []netip.Addr {
	t.Helper()
	files, err := os.ReadDir(n.Path(defaultDataDir + "/pods"))
	must.Do(t, err)
	var addrs []netip.Addr
	for _, f := range files {
		if ip, err := netip.ParseAddr(f.Name()); err == nil {
			addrs = append(addrs, ip)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

// The first start after a boot finds no version file in /run, and CRI-O forgets all sandboxes.
func TestAPodComesBackWithItsAddressAfterCRIOWasWipedAtBoot(t *testing.T) {
	for name, c := range map[string]struct {
		agent    bool
		shutdown bool // CRI-O had the time to stop; else crio wipe removes its whole storage, images too
		external bool // crio wipe alone removes the sandboxes, without any DEL
	}{
		"by crio wipe after a power loss":               {agent: true},
		"by crio wipe after a power loss, no agent":     {},
		"by its start after a shutdown":                 {agent: true, shutdown: true},
		"by its start after a shutdown, no agent":       {shutdown: true},
		"by crio wipe alone after a shutdown":           {agent: true, shutdown: true, external: true},
		"by crio wipe alone after a shutdown, no agent": {shutdown: true, external: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			n := install(t, lab.NodeOptions{Networks: []lab.Network{network("10.88.0.0/28")}, Idle: true})
			if c.external {
				must.Do(t, n.ConfigureCRIO("wipe.conf", "[crio]\ninternal_wipe = false\n"))
			}
			must.Do(t, n.StartContainerd(ctx))
			agent := func() {
				if c.agent {
					startAgent(t, n, "--grace-period=1s", "--reconcile-interval=500ms")
				}
			}
			agent()
			gone := runPod(t, n, web(1))
			deletePod(t, n, gone) // retained when the node goes down
			pod, ordinary := runPod(t, n, web(0)), runPod(t, n, other(1))

			if c.shutdown {
				must.Do(t, n.StopContainerd())
			}
			must.Do(t, n.PowerLoss())
			must.Do(t, n.Boot(ctx))
			if _, err := os.Stat(n.Path("/var/run/crio/version")); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("the version file of CRI-O outlived the boot: %v", err)
			}
			must.Do(t, n.WipeCRIO(ctx))
			_, err := os.Stat(n.Path("/var/lib/containers/storage/overlay-containers/" + pod.ID))
			if want := c.shutdown && !c.external; (err == nil) != want {
				t.Errorf("after crio wipe CRI-O's storage has the sandbox: %v, want %v", err == nil, want)
			}
			must.Do(t, n.StartContainerd(ctx))
			pods, err := n.Pods(ctx)
			must.Do(t, err)
			if len(pods) != 0 {
				t.Errorf("CRI-O knows sandboxes from before: %v", pods)
			}
			agent()

			between := runPod(t, n, other(2))
			distinct(t, pod, gone, between)
			spec := web(0)
			spec.UID, spec.Attempt = pod.UID, 1 // restarted in place
			again := runPod(t, n, spec)
			sameIP(t, n, again, pod)
			other := runPod(t, n, web(1))
			sameIP(t, n, other, gone)
			answers(t, n, again)
			// The late DELs of kubelet's garbage collection.
			must.Do(t, n.RemovePod(ctx, pod.ID))
			must.Do(t, n.RemovePod(ctx, ordinary.ID))
			wantState(t, n, pod.IP(), again.ID)
			want := []netip.Addr{again.IP(), between.IP(), other.IP()}
			slices.SortFunc(want, netip.Addr.Compare)
			if got := addressFiles(t, n); !slices.Equal(got, want) {
				t.Errorf("%v are not free, want %v", got, want)
			}
		})
	}
}

// The first start of another version removes all sandboxes, which may run, without a boot.
func TestAPodComesBackWithItsAddressAfterAnotherVersionOfCRIOWipedIt(t *testing.T) {
	t.Parallel()
	ctx := testContext(t)
	n := install(t, lab.NodeOptions{Networks: []lab.Network{network("10.88.0.0/28")}, Idle: true})
	const file = "/var/lib/crio/version"
	must.Do(t, n.ConfigureCRIO("version.conf", "[crio]\nversion_file_persist = \""+file+"\"\n"))
	must.Do(t, n.StartContainerd(ctx))
	startAgent(t, n)
	pod, ordinary := runPod(t, n, web(0)), runPod(t, n, other(1))
	must.Do(t, n.StopContainerd())
	must.Do(t, n.WriteFile(file, []byte(`"1.35.0"`)))
	must.Do(t, n.StartContainerd(ctx))
	pods, err := n.Pods(ctx)
	must.Do(t, err)
	if len(pods) != 0 {
		t.Errorf("CRI-O knows sandboxes from before: %v", pods)
	}
	wantState(t, n, pod.IP(), retained)
	wantState(t, n, ordinary.IP(), free)
	distinct(t, pod, runPod(t, n, other(2)))
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	answers(t, n, again)
}

// Nothing but an agent that keeps the configuration tells CRI-O's result cache of a swap.
func TestCRIOEndsAPodByTheConfigurationOfItsStart(t *testing.T) {
	const subnet = "10.88.0.0/29" // five addresses
	t.Run("from host-local", func(t *testing.T) {
		t.Parallel()
		n := startStayput(t, stock(subnet))
		startAgent(t, n)
		before := runPod(t, n, web(0))
		setNetwork(t, n, network(subnet))
		after := runPod(t, n, web(1))
		deletePod(t, n, before)
		wantState(t, n, before.IP(), free)
		deletePod(t, n, after)
		wantState(t, n, after.IP(), retained)
		distinct(t, after, runPod(t, n, other(0)), runPod(t, n, web(0)))
		sameIP(t, n, runPod(t, n, web(1)), after)
	})
	t.Run("to host-local", func(t *testing.T) {
		t.Parallel()
		n := startStayput(t, network(subnet))
		startAgent(t, n)
		pod := runPod(t, n, web(0))
		setNetwork(t, n, stock(subnet))
		deletePod(t, n, pod)
		wantState(t, n, pod.IP(), retained)
		others := []lab.Pod{pod}
		for i := range 4 {
			others = append(others, runPod(t, n, other(i)))
		}
		distinct(t, others...) // host-local does not touch the retained one
		setNetwork(t, n, network(subnet))
		sameIP(t, n, runPod(t, n, web(0)), pod)
	})
}

// CRI-O runs one CNI command of a pod's name at a time: the old pod's DEL waits for the ADD that waits for it, and
// kubelet has to ask again.
func TestCRIOStopsAPodOnceItsReplacementHasBeenRefused(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	old := runPod(t, n, web(0))
	if pod, err := replaceRunning(t, n, old); err == nil || !strings.Contains(err.Error(), inUse) {
		t.Errorf("a replacement beside the old pod: %v, error %v", pod.IPs, err)
	}
	wantState(t, n, old.IP(), retained)
	pod := runPod(t, n, web(0))
	sameIP(t, n, pod, old)
	must.Do(t, n.RemovePod(testContext(t), old.ID))
	answers(t, n, pod)
}

// The plugin outlives CRI-O, and may still get the address, for a sandbox that nobody knows.
func TestCRIOKilledDuringAnADDLosesNothing(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n, "--grace-period=500ms", "--reconcile-interval=500ms")
	pod := runPod(t, n, web(0))
	for i := range 3 {
		failed := make(chan error)
		go func() {
			_, err := n.RunPod(context.WithoutCancel(t.Context()), web(0))
			failed <- err
		}()
		untilPlugin(t, n) // it waits for its predecessor
		must.Do(t, n.KillContainerd())
		<-failed
		must.Do(t, n.StartContainerd(testContext(t)))
		connected(t, n)
		deletePod(t, n, pod)
		distinct(t, pod, untilPod(t, n, other(i)))
		again := untilPod(t, n, web(0))
		sameIP(t, n, again, pod)
		answers(t, n, again)
		pod = again
	}
}
