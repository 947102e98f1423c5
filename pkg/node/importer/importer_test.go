package importer

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

// world is a ledger and a runtime.
type world struct {
	t       *testing.T
	dir     string
	clock   *nodetest.Clock
	runtime *nodetest.Runtime
	ledger  *ledger.Ledger
}

type sandbox struct {
	ID    string
	Pod   ledger.Pod
	Netns string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "import-") // short: a socket's path has 108 bytes
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, os.RemoveAll(dir)) })
	w := &world{t: t, dir: dir, clock: nodetest.NewClock()}
	w.runtime = nodetest.StartRuntime(t, filepath.Join(w.dir, "cri.sock"))
	r, err := ledger.NewRange(netip.MustParsePrefix("192.0.2.0/24"), netip.Addr{}, netip.Addr{}, netip.Addr{})
	must.Do(t, err)
	n := &ledger.Network{Name: "pods", DataDir: filepath.Join(w.dir, "networks"), Ranges: []ledger.RangeSet{{r}}}
	o := w.options()
	w.ledger = ledger.New(n, ledger.Options{StateDir: o.StateDir, Clock: o.Clock})
	return w
}

func (w *world) options() Options {
	return Options{StateDir: filepath.Join(w.dir, "state"), CRISocket: filepath.Join(w.dir, "cri.sock"), Clock: w.clock}
}

func (w *world) netns(name string) string { return nodetest.Netns(w.t, w.dir, name) }

func (w *world) sandbox(id, pod string) sandbox {
	return sandbox{ID: id, Pod: ledger.Pod{Namespace: "default", Name: pod, UID: "uid-" + id}, Netns: w.netns(id)}
}

func (w *world) add(s sandbox) netip.Addr {
	w.t.Helper()
	ns, _, err := ledger.SystemNetns{}.Identify(s.Netns)
	must.Do(w.t, err)
	r, err := w.ledger.Add(ledger.AddRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: "eth0"}, Pod: s.Pod,
		Netns: ns})
	must.Do(w.t, err)
	return r.Addrs[0]
}

func (w *world) del(s sandbox) {
	w.t.Helper()
	_, err := w.ledger.Del(ledger.DelRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: "eth0"}, Pod: s.Pod})
	must.Do(w.t, err)
}

func (w *world) want(ip netip.Addr, state ledger.State) {
	w.t.Helper()
	addrs, err := w.ledger.List()
	must.Do(w.t, err)
	i := slices.IndexFunc(addrs, func(a ledger.Address) bool { return a.Addr == ip })
	if i < 0 || addrs[i].State != state {
		w.t.Errorf("%s is not %s: %v", ip, state, addrs)
	}
}

// importing is what OpenKruise's host-local leaves: a pod whose container was restarted, c2, has the address that
// the file gives to the container that got it first.
func (w *world) importing() (pod sandbox, ip netip.Addr) {
	w.t.Helper()
	first := sandbox{ID: "c1", Pod: ledger.Pod{Namespace: "default", Name: "web-0"}}
	ip = w.add(first)
	pod = w.sandbox("c2", "web-0")
	w.runtime.Run(pod.ID, pod.Pod, nil, pod.Netns)
	w.runtime.SetAddrs(pod.ID, ip.String())
	return pod, ip
}

func (w *world) imports(ip netip.Addr) inspection.ImportItem {
	w.t.Helper()
	done, err := Import(w.t.Context(), w.options(), []inspection.ImportItem{{Namespace: "default", Pod: "web-0",
		IPs: []netip.Addr{ip}, Retention: "10m"}}, true)
	must.Do(w.t, err)
	return done.Items[0]
}

func TestAnAddressOfAPoolIsTheClusters(t *testing.T) {
	w := newWorld(t)
	pod, ip := w.importing()
	w.runtime.Forget(pod.ID)
	w.runtime.Run(pod.ID, pod.Pod, map[string]string{"stayput.io/addresses": `[{"interface":"eth0","pool":"blue",` +
		`"mode":"L2","address":"` + ip.String() + `/24"}]`}, pod.Netns)
	if item := w.imports(ip); item.Done || item.Action != inspection.ActionRefuse || !strings.Contains(item.Why, "pools") {
		t.Errorf("imported %+v", item)
	}
	w.bound(ip, "c1", false)
}

// bound holds that the address is a container's, and was never anybody else's.
func (w *world) bound(ip netip.Addr, id string, promised bool) {
	w.t.Helper()
	w.clock.Pass(time.Hour) // longer than any retention
	_, _, err := w.ledger.Expire()
	must.Do(w.t, err)
	addrs, err := w.ledger.List()
	must.Do(w.t, err)
	for _, a := range addrs {
		if a.Addr == ip {
			if a.State != ledger.StateBound || a.Attachment.ContainerID != id || (a.Key != nil) != promised {
				w.t.Errorf("%s is %s to %s, promised: %v", ip, a.State, a.Attachment.ContainerID, a.Key)
			}
			return
		}
	}
	w.t.Errorf("%s was given away under a pod that runs", ip)
}

func TestAnImportPromisesAPodThatRunsTheAddressThatItHas(t *testing.T) {
	w := newWorld(t)
	pod, ip := w.importing()
	if i := w.imports(ip); i.Action != inspection.ActionBind || !i.Done {
		t.Errorf("%+v", i)
	}
	w.bound(ip, pod.ID, true)
	w.del(pod)
	w.want(ip, ledger.StateRetained)
}

func TestAnImportThatFailsLeavesTheAddressOfAPodThatRunsBound(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(w *world, pod sandbox)
		says  string
	}{
		"the runtime fails after the plan": {func(w *world, pod sandbox) {
			w.runtime.BeforeStatus(func(_ string, verbose bool) error {
				if verbose {
					return nodetest.ErrRuntime
				}
				return nil
			})
		}, nodetest.ErrRuntime.Error()},
		"its namespace cannot be seen": {func(w *world, pod sandbox) {
			w.runtime.SetNetns(pod.ID, "/run/netns/elsewhere")
		}, "is not visible"},
		"the sandbox has another address in the ledger": {func(w *world, pod sandbox) { w.add(pod) },
			ledger.ErrDuplicate.Error()},
		"the runtime does not say what a sandbox has": {func(w *world, pod sandbox) {
			w.runtime.BeforeStatus(func(string, bool) error { return status.Error(codes.Unavailable, "later") })
		}, "from the runtime"},
		"the container that has it is about to be listed": {func(w *world, pod sandbox) {
			w.runtime.Forget(pod.ID)
			ns, _, err := ledger.SystemNetns{}.Identify(w.netns("c1"))
			must.Do(w.t, err)
			_, err = w.ledger.SetPolicy(ledger.Attachment{ContainerID: "c1", IfName: "eth0"}, pod.Pod, retention.Policy{}, ns)
			must.Do(w.t, err)
		}, "is starting"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			pod, ip := w.importing()
			c.spoil(w, pod)
			if i := w.imports(ip); i.Action != inspection.ActionRefuse || i.Done || !strings.Contains(i.Why, c.says) {
				t.Errorf("%+v", i)
			}
			w.bound(ip, "c1", false)
		})
	}
}

func TestAnImportKeepsTheAddressOfAPodThatIsGone(t *testing.T) {
	w := newWorld(t)
	_, ip := w.importing()
	w.runtime.Forget("c2")
	free := ip.Next()
	if i := w.imports(ip); i.Action != inspection.ActionRetain || !i.Done {
		t.Errorf("%+v", i)
	}
	w.want(ip, ledger.StateRetained)
	done, err := Import(t.Context(), w.options(), []inspection.ImportItem{{Namespace: "default", Pod: "web-1",
		IPs: []netip.Addr{free}, Retention: "10m"}}, true)
	must.Do(t, err)
	if i := done.Items[0]; i.Action != inspection.ActionRetain || !i.Done {
		t.Errorf("%+v", i)
	}
	w.want(free, ledger.StateRetained)
}

func TestReservationsOfOpenKruisesHostLocalAreRead(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	for content, want := range map[string]inspection.ImportItem{
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24","gateway":"10.244.1.1"},"duration":10}`:                         {Interface: "eth0", Retention: "10m"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24"},"duration":90,"releaseTime":"2026-01-02T11:00:00.123456789Z"}`: {Interface: "eth0", Retention: "1h30m"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24"},"duration":10,"releaseTime":"2026-01-02T11:50:00Z"}`:           {Interface: "eth0", Retention: "10m", Action: inspection.ActionNone, Why: "it expired at 2026-01-02T12:00:00Z"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24"},"duration":0}`:                                                 {Interface: "eth0", Action: inspection.ActionRefuse, Why: "its reservation is for 0 minutes: expected more than 0"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5"},"duration":10}`:                                                   {Interface: "eth0", Action: inspection.ActionRefuse, Why: `its reservation has the address "10.244.1.5": expected an address such as 10.244.1.5/24`},
		`{"containerId":`: {Action: inspection.ActionRefuse,
			Why: "its reservation cannot be parsed: unexpected end of JSON input"},
	} {
		got := reservedIP([]byte(content), "default", "web-0", now)
		if got.Namespace != "default" || got.Pod != "web-0" || got.Interface != want.Interface ||
			got.Retention != want.Retention || got.Action != want.Action || got.Why != want.Why {
			t.Errorf("%s is %+v", content, got)
		}
		if want.Action != inspection.ActionRefuse && (len(got.IPs) != 1 || got.IPs[0].String() != "10.244.1.5") {
			t.Errorf("%s has %v", content, got.IPs)
		}
	}
	dir := t.TempDir()
	if items, err := ReservedIPs(dir, now); err != nil || len(items) != 0 {
		t.Errorf("where there is nothing: %v, %v", items, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "reserved", "default"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "reserved", "default", "web-0"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if items, err := ReservedIPs(dir, now); err != nil || len(items) != 1 || items[0].Action != inspection.ActionRefuse {
		t.Errorf("a broken one: %v, %v", items, err)
	}
}
