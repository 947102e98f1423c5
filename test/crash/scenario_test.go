package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

// scenario is a state of a node and a command that is going to be broken in it.
type scenario struct {
	name string
	// owner is the pod that it is all about.
	owner pod
	// prepare makes the state and returns the victim.
	prepare func(w *world) command
}

// begin puts a scenario on a node of its own, up to the moment before the victim.
func (s scenario) begin(t *testing.T) (w *world, victim command, template []file) {
	t.Helper()
	w = newWorld(t, newNode(t))
	victim = s.prepare(w)
	if len(w.bad) > 0 {
		t.Fatalf("before the victim: %s", strings.Join(w.history, "\n"))
	}
	w.before(victim)
	w.pass(5 * time.Second)
	return w, victim, w.n.save(t)
}

var (
	web = retained("web-0")
	// db has an address retained in every scenario: no other pod may ever get it.
	db = retained("db-0")
	// pooled has addresses that the cluster has given to it, and the agent has granted, outside the ranges.
	pooled = ordinary("pooled").with(netconf.AnnotationAddresses,
		`[{"interface":"eth0","mode":"L2","address":"10.6.0.5/16"},`+
			`{"interface":"eth0","mode":"L2","address":"fd06::5/64"}]`)
)

// bystander leaves db's address retained.
func bystander(w *world) { w.del(w.add(db)) }

// serves has the agent say that the cluster has pools.
func serves(w *world) {
	must.Do(w.t, w.agent(0).Grants().PutServed(grants.Served{More: true}))
}

func addOf(p pod) command { return command{verb: "ADD", ctr: "victim", pod: p} }

// delOf is a DEL with a namespace; the container stays in the world as it is.
func delOf(w *world, ctr string) command {
	return command{verb: "DEL", ctr: ctr, pod: w.containers[ctr].pod, netns: true}
}

var scenarios = []scenario{
	{"the first ADD on a node, of a retained pod", web, func(w *world) command {
		return addOf(web)
	}},
	{"the first ADD of a retained pod", web, func(w *world) command {
		bystander(w)
		return addOf(web)
	}},
	{"an ADD of an ordinary pod", ordinary("app"), func(w *world) command {
		bystander(w)
		return addOf(ordinary("app"))
	}},
	{"a DEL that retains", web, func(w *world) command {
		bystander(w)
		return delOf(w, w.add(web))
	}},
	{"a DEL that frees", ordinary("app"), func(w *world) command {
		bystander(w)
		return delOf(w, w.add(ordinary("app")))
	}},
	{"a restore", web, func(w *world) command {
		bystander(w)
		w.del(w.add(web))
		return addOf(web)
	}},
	{"a restore after a death without DEL", web, func(w *world) command {
		bystander(w)
		w.dropNetns(w.add(web))
		return addOf(web)
	}},
	{"a restore with another retention", web, func(w *world) command {
		bystander(w)
		w.del(w.add(web))
		return addOf(web.with(retention.AnnotationRetainIP, "20h"))
	}},
	{"a restore of a pod that asks for nothing any more", ordinary("web-0"), func(w *world) command {
		bystander(w)
		w.del(w.add(web))
		w.doubt(web.identity())
		return addOf(ordinary("web-0"))
	}},
	{"an ADD with AllocateNew beside its predecessor", web.with(retention.AnnotationWhenInUse, "AllocateNew"),
		func(w *world) command {
			bystander(w)
			p := web.with(retention.AnnotationWhenInUse, "AllocateNew")
			w.add(p)
			w.doubt(p.identity())
			return addOf(p)
		}},
	{"an ADD that takes over a shared identity's address", retained("new", retention.AnnotationIdentity, "web"),
		func(w *world) command {
			bystander(w)
			w.del(w.add(retained("old", retention.AnnotationIdentity, "web")))
			return addOf(retained("new", retention.AnnotationIdentity, "web"))
		}},
	{"an ADD that takes expired addresses of a full network", web, func(w *world) command {
		w.v4 = fiveOfV4
		return overExpired(w)
	}},
	{"an ADD that takes one family's expired address of a full network", web, overExpired},
	{"a DEL of host-local's attachment with the policy in annotations", web, func(w *world) command {
		bystander(w)
		hostLocal(w, "theirs", web, "10.9.0.5", "fd00::5")
		w.doubt(web.identity())
		return delOf(w, "theirs")
	}},
	{"the first ADD after host-local", web, func(w *world) command {
		hostLocal(w, "theirs-1", ordinary("app"), "10.9.0.2", "fd00::2")
		hostLocal(w, "theirs-2", ordinary("other"), "10.9.0.4", "fd00::5")
		return addOf(web)
	}},
	{"a GC", web, func(w *world) command {
		bystander(w)
		w.dropNetns(w.add(web))
		w.dropNetns(w.add(ordinary("app")))
		return command{verb: "GC", valid: []string{w.add(ordinary("stays"))}}
	}},
	{"the first ADD of a boot", web, func(w *world) command {
		populate(w)
		w.reboot()
		return addOf(ordinary("early"))
	}},
	{"the first ADD of a boot, of a retained pod", web, func(w *world) command {
		populate(w)
		w.reboot()
		return addOf(web)
	}},
	{"the first DEL of a boot, of a dead sandbox", web, func(w *world) command {
		ctr := populate(w)
		w.reboot()
		return command{verb: "DEL", ctr: ctr, pod: web}
	}},
	{"the first ADD after the network directory was wiped", web, func(w *world) command {
		populate(w)
		must.Do(w.t, os.RemoveAll(w.n.networks()))
		return addOf(ordinary("early"))
	}},
	{"the first ADD after the state directory was wiped", web, func(w *world) command {
		populate(w)
		must.Do(w.t, os.RemoveAll(w.n.state()))
		w.doubt(web.identity())
		w.doubt("set:default/web")
		return addOf(ordinary("early"))
	}},
	{"the first ADD after the network directory was emptied but for dot files", web, func(w *world) command {
		populate(w)
		removeMatching(w, filepath.Join(w.n.networks(), network, "*"))
		return addOf(ordinary("early"))
	}},
	{"the first ADD after the claims were removed", web, func(w *world) command {
		bystander(w)
		w.del(w.add(web))
		removeMatching(w, filepath.Join(w.n.state(), "*", "claims", "*"))
		return addOf(ordinary("early"))
	}},
	{"the first ADD of a boot, without the claims", web, func(w *world) command {
		bystander(w)
		w.del(w.add(web))
		removeMatching(w, filepath.Join(w.n.state(), "*", "claims", "*"))
		w.reboot()
		return addOf(web)
	}},
	{"an ADD of a pod of a pool", pooled, func(w *world) command {
		bystander(w)
		serves(w)
		return addOf(pooled)
	}},
	{"an ADD of a pod of a pool over its dead predecessor", pooled, func(w *world) command {
		bystander(w)
		serves(w)
		w.dropNetns(w.add(pooled))
		return addOf(pooled)
	}},
	{"a DEL of a pod of a pool", pooled, func(w *world) command {
		bystander(w)
		serves(w)
		return delOf(w, w.add(pooled))
	}},
	{"an ADD of a promised pod after its range has changed", web, func(w *world) command {
		bystander(w)
		w.del(w.add(web))
		w.v4 = otherV4
		w.doubt(web.identity())
		return addOf(web)
	}},
}

// populate gives the node one of each: it returns the container of web, which runs.
func populate(w *world) string {
	bystander(w)
	w.add(ordinary("app"))
	old := retained("old", retention.AnnotationIdentity, "web")
	w.del(w.add(old))
	return w.add(web)
}

// removeMatching removes what a shell's rm -rf does, which leaves what begins with a dot.
func removeMatching(w *world, pattern string) {
	paths, err := filepath.Glob(pattern)
	must.Do(w.t, err)
	for _, path := range paths {
		if !strings.HasPrefix(filepath.Base(path), ".") {
			must.Do(w.t, os.RemoveAll(path))
		}
	}
}

// overExpired fills the network, with one retention over.
func overExpired(w *world) command {
	bystander(w)
	gone := retained("gone", retention.AnnotationRetainIP, "1ms")
	ctr := w.add(gone)
	for range 3 {
		w.add(ordinary("app"))
	}
	w.del(ctr)
	w.doubt(gone.identity())
	return addOf(web)
}

// hostLocal makes what stock host-local leaves of an ADD.
func hostLocal(w *world, ctr string, p pod, addrs ...string) {
	w.before(command{verb: "ADD", ctr: ctr, pod: p})
	dir := filepath.Join(w.n.networks(), network)
	must.Do(w.t, os.MkdirAll(dir, 0o755))
	parsed, err := addresses(`{"ips":[{"address":"` + strings.Join(addrs,
		`/24"},{"address":"`) + `/64"}],"dns":{"nameservers":["x"]}}`)
	must.Do(w.t, err)
	for i, a := range addrs {
		must.Do(w.t, os.WriteFile(w.n.addressFile(a), []byte(ctr+"\r\neth0"), 0o600))
		must.Do(w.t, os.WriteFile(filepath.Join(dir, "last_reserved_ip."+string(rune('0'+i))), []byte(a), 0o600))
	}
	w.containers[ctr].addrs = parsed
}
