package node

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/internal/nodetest"
)

// importing is what OpenKruise's host-local leaves: a pod whose container was restarted, c2, has the address that
// the file gives to the container that got it first.
func (w *world) importing() (pod Sandbox, ip netip.Addr) {
	w.t.Helper()
	first := Sandbox{ID: "c1", Pod: ledger.Pod{Namespace: "default", Name: "web-0"}}
	ip = w.add(first)
	pod = w.sandbox("c2", "web-0", nil)
	w.runs(pod)
	w.runtime.SetAddrs(pod.ID, ip.String())
	return pod, ip
}

func (w *world) imports(ip netip.Addr) inspection.ImportItem {
	w.t.Helper()
	done, err := Import(w.t.Context(), w.a.o, []inspection.ImportItem{{Namespace: "default", Pod: "web-0", IPs: []netip.Addr{ip}, Retention: "10m"}}, true)
	check(w.t, err)
	return done.Items[0]
}

// bound holds that the address is a container's, and was never anybody else's.
func (w *world) bound(ip netip.Addr, id string, promised bool) {
	w.t.Helper()
	w.clock.Pass(time.Hour) // longer than any retention
	_, _, err := w.ledger.Expire()
	check(w.t, err)
	addrs, err := w.ledger.List()
	check(w.t, err)
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
		spoil func(w *world, pod Sandbox)
		says  string
	}{
		"the runtime fails after the plan": {func(w *world, pod Sandbox) {
			w.runtime.BeforeStatus(func(_ string, verbose bool) error {
				if verbose {
					return nodetest.ErrRuntime
				}
				return nil
			})
		}, nodetest.ErrRuntime.Error()},
		"its namespace cannot be seen":                  {func(w *world, pod Sandbox) { w.runtime.SetNetns(pod.ID, "/run/netns/elsewhere") }, "cannot be seen"},
		"the sandbox has another address in the ledger": {func(w *world, pod Sandbox) { w.add(pod) }, ledger.ErrDuplicate.Error()},
		"the runtime does not say what a sandbox has": {func(w *world, pod Sandbox) {
			w.runtime.BeforeStatus(func(string, bool) error { return status.Error(codes.Unavailable, "later") })
		}, "does not say"},
		"the container that has it is about to be listed": {func(w *world, pod Sandbox) {
			w.runtime.Forget(pod.ID)
			ns, _, err := ledger.SystemNetns{}.Identify(w.netns("c1"))
			check(w.t, err)
			_, err = w.ledger.SetPolicy(ledger.Attachment{ContainerID: "c1", IfName: "eth0"}, pod.Pod, ledger.Policy{}, ns)
			check(w.t, err)
		}, "is starting"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.t = t
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
	done, err := Import(t.Context(), w.a.o, []inspection.ImportItem{{Namespace: "default", Pod: "web-1", IPs: []netip.Addr{free}, Retention: "10m"}}, true)
	check(t, err)
	if i := done.Items[0]; i.Action != inspection.ActionRetain || !i.Done {
		t.Errorf("%+v", i)
	}
	w.want(free, ledger.StateRetained)
}
