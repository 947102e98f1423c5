package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

const (
	network = "net"
	podUID  = "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e"
)

// pod is a pod's name and annotations. One without a name comes from no Kubernetes: nerdctl, cnitool.
type pod struct {
	name        string
	annotations map[string]string
}

func (p pod) retains() bool { return p.annotations[retention.AnnotationRetainIP] != "" }

// identity returns the owner of the pod's addresses.
func (p pod) identity() string {
	if id := p.annotations[retention.AnnotationIdentity]; id != "" {
		return "set:default/" + id
	}
	return "pod:default/" + p.name
}

func (p pod) shared() bool { return p.annotations[retention.AnnotationIdentity] != "" }

// given returns the addresses of pools that the cluster has given to the pod.
func (p pod) given() string { return p.annotations[netconf.AnnotationAddresses] }

// with returns the pod after an edit of its template.
func (p pod) with(annotations ...string) pod {
	p.annotations = maps.Clone(p.annotations)
	for i := 0; i < len(annotations); i += 2 {
		p.annotations[annotations[i]] = annotations[i+1]
	}
	return p
}

// retained is a pod whose retention outlasts the longest sweep.
func retained(name string, annotations ...string) pod {
	return pod{name, map[string]string{retention.AnnotationRetainIP: "10h"}}.with(annotations...)
}

func ordinary(name string) pod { return pod{name: name, annotations: map[string]string{"team": "a"}} }

// command is one call of the plugin.
type command struct {
	verb  string // ADD, DEL, CHECK or GC
	ctr   string
	pod   pod
	netns bool     // whether the call names the network namespace, as an ADD always does
	valid []string // of GC: the containers that remain
}

func (c command) String() string {
	switch {
	case c.verb == "GC":
		return fmt.Sprintf("GC valid=%v", c.valid)
	case c.verb == "DEL" && !c.netns:
		return fmt.Sprintf("DEL %s (%s) without netns", c.ctr, c.pod.name)
	}
	return fmt.Sprintf("%s %s (%s %v)", c.verb, c.ctr, c.pod.name, c.pod.annotations)
}

// attachment is a container that was ADDed.
type attachment struct {
	pod    pod
	addrs  []netip.Addr // nil if the ADD was never acknowledged
	ending bool         // a DEL was begun, and may have freed the addresses
	ended  bool         // DEL was acknowledged
	boot   int
}

// promise is what is known of an identity's promise.
type promise struct {
	// firm: it was acknowledged, and nothing has touched it since. Otherwise it may be there or not.
	firm bool
	sets [][]netip.Addr // one per pod of the identity
	pod  pod            // one that they are for
}

// world is what a runtime knows: everything that was acknowledged. It drives the plugin and checks its answers.
type world struct {
	t testing.TB
	n *node

	v4, v6 string // the ranges
	boot   int

	containers map[string]*attachment
	promises   map[string]*promise

	history []string
	bad     []string
	serial  int
}

// The ranges: five pods fill the network, and the second family is full before the first.
const (
	sixOfV4  = `{"subnet":"10.9.0.0/24","rangeStart":"10.9.0.2","rangeEnd":"10.9.0.7"}`
	fiveOfV4 = `{"subnet":"10.9.0.0/24","rangeStart":"10.9.0.2","rangeEnd":"10.9.0.6"}`
	otherV4  = `{"subnet":"10.10.0.0/24","rangeStart":"10.10.0.2","rangeEnd":"10.10.0.7"}`
	fiveOfV6 = `{"subnet":"fd00::/64","rangeStart":"fd00::2","rangeEnd":"fd00::6"}`
)

func newWorld(t testing.TB, n *node) *world {
	return &world{t: t, n: n, v4: sixOfV4, v6: fiveOfV6, boot: 1, containers: map[string]*attachment{},
		promises: map[string]*promise{}}
}

// clone is a world that goes its own way on the same node, from what it knows now.
func (w *world) clone() *world {
	c := *w
	c.containers, c.promises = map[string]*attachment{}, map[string]*promise{}
	for k, v := range w.containers {
		a := *v
		c.containers[k] = &a
	}
	for k, v := range w.promises {
		p := promise{v.firm, slices.Clone(v.sets), v.pod}
		c.promises[k] = &p
	}
	c.history, c.bad = slices.Clone(w.history), nil
	return &c
}

func (w *world) note(format string, args ...any) {
	w.history = append(w.history, fmt.Sprintf(format, args...))
}

// violates records that the plugin broke its word.
func (w *world) violates(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	w.note("*** %s", s)
	w.bad = append(w.bad, s)
}

// call is the environment and the stdin of a command.
func (w *world) call(c command) (env []string, stdin []byte) {
	conf := map[string]any{
		"cniVersion": "1.1.0", "name": network, "type": "bridge",
		"ipam": map[string]any{
			"type": "stayput", "dataDir": w.n.networks(), "stateDir": w.n.state(), "promisedShare": 1,
			"resolvConf": w.n.resolvConf(),
			"ranges":     []any{[]any{json.RawMessage(w.v4)}, []any{json.RawMessage(w.v6)}},
		},
	}
	if c.pod.name != "" {
		conf["runtimeConfig"] = map[string]any{"io.kubernetes.cri.pod-annotations": c.pod.annotations}
	}
	env = []string{"CNI_COMMAND=" + c.verb, "CNI_PATH=/opt/cni/bin"}
	if c.verb == "GC" {
		valid := []map[string]string{}
		for _, ctr := range c.valid {
			valid = append(valid, map[string]string{"containerID": ctr, "ifname": "eth0"})
		}
		conf["cni.dev/valid-attachments"] = valid
	} else {
		env = append(env, "CNI_CONTAINERID="+c.ctr, "CNI_IFNAME=eth0")
		if c.pod.name != "" {
			env = append(env, "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;"+
				"K8S_POD_NAME="+c.pod.name+";K8S_POD_UID="+podUID+";K8S_POD_INFRA_CONTAINER_ID="+c.ctr)
		}
	}
	if c.verb == "ADD" || c.verb == "CHECK" || c.netns {
		env = append(env, "CNI_NETNS="+w.n.netns(c.ctr))
	}
	stdin, err := json.Marshal(conf)
	must.Do(w.t, err)
	return env, stdin
}

// before prepares a command as a runtime does, and an agent that grants what the pod is given, and records it.
func (w *world) before(c command) {
	w.note("%s", c)
	if a := w.containers[c.ctr]; a != nil && c.verb == "DEL" {
		a.ending = true
	}
	if c.verb != "ADD" {
		return
	}
	if w.containers[c.ctr] != nil {
		w.t.Fatalf("container %s twice", c.ctr)
	}
	w.containers[c.ctr] = &attachment{pod: c.pod, boot: w.boot}
	must.Do(w.t, os.MkdirAll(filepath.Dir(w.n.netns(c.ctr)), 0o755))
	must.Do(w.t, os.Symlink(w.n.namespace(len(w.containers)%netnsPool), w.n.netns(c.ctr)))
	if text := c.pod.given(); text != "" {
		pending, err := w.agent(0).Grants().Begin(podUID, text)
		must.Do(w.t, err)
		must.Do(w.t, pending.Finish())
	}
}

// run runs a command that nothing disturbs.
func (w *world) run(c command) outcome {
	w.before(c)
	env, stdin := w.call(c)
	o, err := w.n.exec(env, stdin, plugin)
	must.Do(w.t, err)
	w.after(c, o)
	return o
}

// after records how a command ended.
func (w *world) after(c command, o outcome) {
	if s := strings.TrimSpace(o.stdout + o.stderr); s != "" {
		w.note("   -> %d %s", o.code, s)
	}
	switch {
	case o.killed:
		w.note("   -> killed")
		w.interrupted(c)
	case c.verb == "ADD" && o.code == 0:
		addrs, err := addresses(o.stdout)
		if err != nil {
			w.violates("ADD exits 0 and answers %q: %v", o.stdout, err)
			w.interrupted(c)
			return
		}
		w.added(c, addrs)
	case c.verb == "ADD":
		w.interrupted(c)
	case c.verb == "DEL":
		if o.code != 0 {
			w.violates("DEL fails: exit code %d: %s", o.code, o.stdout)
		}
		if a := w.containers[c.ctr]; a != nil {
			a.ended = true
		}
	case c.verb == "GC" && o.code == 0:
		for ctr, a := range w.containers {
			a.ended = a.ended || !slices.Contains(c.valid, ctr)
		}
	}
}

// interrupted records a command that was not acknowledged. A killed ADD may have made its pod's first promise.
func (w *world) interrupted(c command) {
	id := c.pod.identity()
	if c.verb == "ADD" && c.pod.retains() && w.promises[id] == nil {
		w.promises[id] = &promise{}
	}
}

// doubt says that an identity's promise may be there or not, whatever was acknowledged before.
func (w *world) doubt(id string) { w.promises[id] = &promise{} }

func addresses(stdout string) ([]netip.Addr, error) {
	var r struct {
		IPs []struct{ Address, Gateway string }
		DNS struct{ Nameservers []string }
	}
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, ip := range r.IPs {
		p, err := netip.ParsePrefix(ip.Address)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, p.Addr())
	}
	if len(addrs) != 2 || !addrs[0].Is4() || !addrs[1].Is6() {
		return nil, fmt.Errorf("I6: addresses %v, want one of each family", addrs)
	}
	if len(r.DNS.Nameservers) == 0 {
		return nil, errors.New("no dns")
	}
	return addrs, nil
}

// alive reports whether the container runs: it was acknowledged, not ended, and its namespace is there.
func (w *world) alive(ctr string) bool {
	a := w.containers[ctr]
	if a.addrs == nil || a.ended || a.boot != w.boot {
		return false
	}
	_, err := os.Stat(w.n.netns(ctr))
	return err == nil
}

func overlap(a, b []netip.Addr) bool {
	return slices.ContainsFunc(a, func(x netip.Addr) bool { return slices.Contains(b, x) })
}

// added records an acknowledged ADD.
func (w *world) added(c command, addrs []netip.Addr) {
	id := c.pod.identity()
	for ctr, a := range w.containers {
		if ctr != c.ctr && w.alive(ctr) && overlap(a.addrs, addrs) {
			w.violates("I1: %s (%s) gets %v, while %s (%s) runs with %v", c.ctr, c.pod.name, addrs, ctr, a.pod.name, a.addrs)
		}
	}
	for other, p := range w.promises {
		for _, set := range p.sets {
			if p.firm && other != id && overlap(set, addrs) {
				w.violates("I2: %s (%s) gets %v, while %v is promised to %s", c.ctr, c.pod.name, addrs, set, other)
			}
		}
	}
	p := w.promises[id]
	if free := w.due(id); p != nil && p.firm && len(free) > 0 &&
		!slices.ContainsFunc(free, func(s []netip.Addr) bool { return slices.Equal(s, addrs) }) {
		w.violates("I4: %s (%s) gets %v, while %v is promised to it", c.ctr, c.pod.name, addrs, free)
	}
	w.containers[c.ctr].addrs = addrs
	switch {
	case !c.pod.retains():
		delete(w.promises, id)
	case p == nil || !p.firm || !c.pod.shared():
		w.promises[id] = &promise{firm: true, sets: [][]netip.Addr{addrs}, pod: c.pod}
	case !slices.ContainsFunc(p.sets, func(s []netip.Addr) bool { return slices.Equal(s, addrs) }):
		p.sets = append(p.sets, addrs)
	}
}

// due returns the promised addresses of an identity that no pod uses, but for those outside today's ranges.
func (w *world) due(id string) [][]netip.Addr {
	p := w.promises[id]
	if p == nil || !p.firm {
		return nil
	}
	var free [][]netip.Addr
	for _, set := range p.sets {
		used := !w.inRange(set)
		for ctr, a := range w.containers {
			used = used || w.alive(ctr) && overlap(a.addrs, set)
		}
		if !used {
			free = append(free, set)
		}
	}
	return free
}

func (w *world) inRange(set []netip.Addr) bool {
	for i, r := range []string{w.v4, w.v6} {
		var conf struct{ RangeStart, RangeEnd string }
		must.Do(w.t, json.Unmarshal([]byte(r), &conf))
		if a := set[i]; a.Less(netip.MustParseAddr(conf.RangeStart)) || netip.MustParseAddr(conf.RangeEnd).Less(a) {
			return false
		}
	}
	return true
}

// knows is what the runtime knows, for comparison.
func (w *world) knows() string {
	var b strings.Builder
	for _, ctr := range slices.Sorted(maps.Keys(w.containers)) {
		a := w.containers[ctr]
		fmt.Fprintln(&b, ctr, a.addrs, a.ended)
	}
	for _, id := range slices.Sorted(maps.Keys(w.promises)) {
		fmt.Fprintln(&b, id, w.promises[id].firm, w.promises[id].sets)
	}
	return b.String()
}

// What runtimes do, in words.

func (w *world) fresh(p pod) string {
	w.serial++
	name := p.name
	if name == "" {
		name = "cnitool"
	}
	return fmt.Sprintf("%s-x%d", name, w.serial)
}

// add ADDs a pod that must get addresses, and returns its container.
func (w *world) add(p pod) string {
	ctr := w.fresh(p)
	if o := w.run(command{verb: "ADD", ctr: ctr, pod: p}); o.code != 0 {
		w.violates("ADD of %s fails with code %d: %s", p.name, o.code, o.stdout)
	}
	return ctr
}

// comeBack starts a pod again. If it was promised addresses that no pod uses, it must get them; else it
// may find the network full.
func (w *world) comeBack(p pod) string {
	ctr := w.fresh(p)
	promised := len(w.due(p.identity())) > 0
	o := w.run(command{verb: "ADD", ctr: ctr, pod: p})
	if o.code == 0 {
		return ctr
	}
	if promised {
		w.violates("I4: ADD of %s, which was promised %v, fails: %s", p.name, w.due(p.identity()), o.stdout)
	} else if !isFull(o) {
		w.violates("ADD of %s fails: %s", p.name, o.stdout)
	}
	w.del(ctr)
	return ""
}

func isFull(o outcome) bool { return strings.Contains(o.stdout, ledger.ErrFull.Error()) }

// fill starts pods without a promise until the network is full.
func (w *world) fill() {
	for i := range 20 {
		p := ordinary(fmt.Sprintf("other-%d", i))
		if i%2 == 1 {
			p = pod{}
		}
		ctr := w.fresh(p)
		o := w.run(command{verb: "ADD", ctr: ctr, pod: p})
		if o.code != 0 {
			if !isFull(o) || !strings.Contains(o.stdout, `"code":11`) {
				w.violates("ADD of %s fails: %s", p.name, o.stdout)
			}
			w.del(ctr)
			return
		}
	}
	w.violates("the network does not become full")
}

// del is a DEL with a netns path, after which the runtime removes the namespace.
func (w *world) del(ctr string) {
	w.run(command{verb: "DEL", ctr: ctr, pod: w.containers[ctr].pod, netns: true})
	w.dropNetns(ctr)
}

// delDead is a DEL for a sandbox whose namespace is gone.
func (w *world) delDead(ctr string) {
	w.dropNetns(ctr)
	w.run(command{verb: "DEL", ctr: ctr, pod: w.containers[ctr].pod})
}

func (w *world) dropNetns(ctr string) {
	if err := os.Remove(w.n.netns(ctr)); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
}

// reboot takes every namespace away and starts the next boot.
func (w *world) reboot() {
	w.boot++
	w.note("reboot")
	must.Do(w.t, os.RemoveAll(filepath.Join(w.n.disk, "run")))
	w.n.reboot(w.t, w.boot)
}

var anchors = regexp.MustCompile(`"boottime":[0-9]+`)

// pass lets time pass for what is retained: a record of the last three seconds makes a command look at the
// namespace that it comes from, and two runs of a sweep would differ.
func (w *world) pass(d time.Duration) {
	files := w.n.save(w.t)
	for i, f := range files {
		if strings.HasPrefix(f.path, "/networks/net/") && strings.HasPrefix(f.data, "{") {
			files[i].data = anchors.ReplaceAllStringFunc(f.data, func(s string) string {
				var at int64
				_, err := fmt.Sscanf(s, `"boottime":%d`, &at)
				must.Do(w.t, err)
				return fmt.Sprintf(`"boottime":%d`, at-int64(d))
			})
		}
	}
	w.n.restore(w.t, files)
}

// The agent's view.

// clock is the node's, ahead by some time.
type clock struct {
	boot  int
	ahead time.Duration
}

func (c clock) Now() (ledger.Instant, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return ledger.Instant{Wall: time.Now().Add(c.ahead), Boot: time.Duration(ts.Nano()) + c.ahead, BootID: bootID(c.boot)},
		err
}

// agent is how the agent opens the networks.
func (w *world) agent(ahead time.Duration) ledger.Options {
	return ledger.Options{StateDir: w.n.state(), Clock: clock{w.boot, ahead}}
}

// revoke ends the grant of the pod of a pool as the agent does, which must learn of every address that the pod has.
func (w *world) revoke() {
	w.t.Helper()
	w.note("revoke")
	found, err := ledger.Revoke(w.agent(0), podUID)
	must.Do(w.t, err)
	for ctr, a := range w.containers {
		for _, addr := range a.addrs {
			if w.alive(ctr) && !a.ending && a.pod.given() != "" &&
				!slices.ContainsFunc(found, func(f ledger.Address) bool { return f.Addr == addr }) {
				w.violates("the grant of %s (%s) is revoked, and %s not found, with which it runs", ctr, a.pod.name, addr)
			}
		}
	}
}

// ledger opens the network as the agent does.
func (w *world) ledger(ahead time.Duration) *ledger.Ledger {
	w.t.Helper()
	o := w.agent(ahead)
	ls, err := ledger.Networks(o)
	must.Do(w.t, err)
	if len(ls) != 1 {
		w.violates("the agent sees %d networks, want 1", len(ls))
		return ledger.Partial(&ledger.Network{Name: network, DataDir: w.n.networks()}, o)
	}
	return ls[0]
}

func (w *world) clean(when string, l *ledger.Ledger) {
	w.t.Helper()
	bad, err := l.Check()
	must.Do(w.t, err)
	for _, s := range bad {
		w.violates("Check %s: %s", when, s)
	}
}

// audit checks the files against what was acknowledged.
func (w *world) audit() {
	w.t.Helper()
	addrs, err := w.ledger(0).List()
	must.Do(w.t, err)
	has := map[netip.Addr]ledger.Address{}
	for _, a := range addrs {
		has[a.Addr] = a
	}
	for ctr, a := range w.containers {
		for _, addr := range a.addrs {
			if s := has[addr]; w.alive(ctr) && (s.State != ledger.StateBound || s.Attachment.ContainerID != ctr) {
				w.violates("I3: %s (%s) runs with %s, which the ledger calls %s %v %v", ctr, a.pod.name, addr, s.State,
					s.Attachment, s.Key)
			}
		}
	}
	for id, p := range w.promises {
		for _, set := range p.sets {
			for _, addr := range set {
				if s := has[addr]; p.firm && w.inRange(set) && (s.Key == nil || s.Key.Identity != id) {
					w.violates("I4: %s is promised to %s, but the ledger calls it %s %v %v", addr, id, s.State, s.Attachment, s.Key)
				}
			}
		}
	}
	for _, a := range addrs {
		switch {
		case a.State == ledger.StateUnreadable:
			w.violates("I5: %s is unreadable", a.Addr)
		case a.State == ledger.StateBound:
			// One that is over may still be bound: killed before its DEL, for the agent to reclaim.
			if c := w.containers[a.Attachment.ContainerID]; c == nil || c.addrs != nil && !slices.Contains(c.addrs, a.Addr) {
				w.violates("I5: %s is bound to %s, which has never got it", a.Addr, a.Attachment)
			}
		case w.promises[a.Key.Identity] == nil:
			w.violates("I5: %s is retained for %s, which has no promise", a.Addr, a.Key)
		}
	}
}

// settle ends everything, as DELs, the agent's reclaim and the time do, and demands that nothing is left.
func (w *world) settle() {
	w.t.Helper()
	w.note("everything is ended")
	w.run(command{verb: "GC"})
	for ctr := range w.containers {
		w.dropNetns(ctr)
	}
	l := w.ledger(0)
	addrs, err := l.List()
	must.Do(w.t, err)
	for _, a := range addrs {
		if a.State == ledger.StateBound {
			w.violates("I5: %s is bound to %s after a GC of everything", a.Addr, a.Attachment)
			_, err := l.Reclaim(a.Attachment)
			must.Do(w.t, err)
		}
	}
	_, _, err = l.Expire()
	must.Do(w.t, err)
	w.clean("after the end of all attachments", l)
	w.audit()

	l = w.ledger(10000 * time.Hour)
	_, _, err = l.Expire()
	must.Do(w.t, err)
	w.clean("after all retentions", l)
	w.revoke()
	must.Do(w.t, w.agent(0).Grants().Sweep())
	for _, f := range w.n.save(w.t) {
		if !f.mode.IsDir() && !leftover.MatchString(f.path) {
			w.violates("I5: %s is left when everything is over: %.200q", f.path, f.data)
		}
		if f.mode.IsDir() && strings.Contains(f.path, "/sets/") {
			w.violates("I5: %s is left when everything is over", f.path)
		}
	}
}

// leftover are the files that may remain when every address is free: each has one name that is used again.
var leftover = regexp.MustCompile(`^/(networks/net/(lock|last_reserved_ip\.[0-9]+|\.stayput\.boot|\.stayput\.tmp)` +
	`|state/net-[0-9a-f]{8}/(network|counts|\.tmp|network\.tmp|claims/claim\.tmp)|state/pools/served` +
	`|state/spool/\.?[0-9]+-[0-9]+-[0-9]+)$`)
