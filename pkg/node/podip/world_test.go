package podip

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

var check = must.Do

const node = "n1"

// uid makes the UID of a pod.
func uid(n int) string { return fmt.Sprintf("6f1c6a5e-8f0e-4d3b-9a55-%012d", n) }

// addr is the address of the pod uid(n), which is in no range of the node.
func addr(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 6, 0, byte(n)}) }

func text(n int) string {
	return fmt.Sprintf(`[{"interface":"eth0","pool":"blue","mode":"L2","address":"%s/16"}]`, addr(n))
}

// served is what the controller says of the cluster's pools.
const served = `{"more":true}`

var errDown = errors.New("the API server is away")

// cluster is an API server.
type cluster struct {
	mu       sync.Mutex
	version  int
	err      error // of every request
	failIP   error // of those for PodIPs
	pods     map[string]*Pod
	ips      map[string]*v1alpha1.PodIP
	audit    *v1alpha1.PodIPAudit
	marks    int64
	away     bool // there is no leader that renews the mark
	report   *v1alpha1.PodIPReport
	node     types.UID
	off      bool // by the taint
	byCloud  bool // has the routes
	podsOf   map[*watch.RaceFreeFakeWatcher]bool
	auditsOf map[*watch.RaceFreeFakeWatcher]bool
	routedOf map[*watch.RaceFreeFakeWatcher]bool
	podCIDRs []netip.Prefix // of the node
	asked    []string
	stale    bool        // watches bring nothing
	mayWrite func() bool // false: the process was killed before
	wrote    func()      // it may be killed after
}

func newCluster() *cluster {
	return &cluster{version: 100, pods: map[string]*Pod{}, ips: map[string]*v1alpha1.PodIP{}, node: "node-uid",
		podsOf: map[*watch.RaceFreeFakeWatcher]bool{}, auditsOf: map[*watch.RaceFreeFakeWatcher]bool{},
		routedOf: map[*watch.RaceFreeFakeWatcher]bool{},
		mayWrite: func() bool { return true }, wrote: func() {}}
}

func (c *cluster) ask(what string) error {
	c.asked = append(c.asked, what)
	return c.err
}

func (c *cluster) next() string {
	c.version++
	return strconv.Itoa(c.version)
}

func copyOf[T any](o *T) *T {
	if o == nil {
		return nil
	}
	b, _ := json.Marshal(o)
	n := new(T)
	_ = json.Unmarshal(b, n)
	return n
}

func (c *cluster) Pods(context.Context) (all []Pod, version string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(c.pods)) {
		if p := c.pods[uid]; p.Spec.NodeName == node {
			all = append(all, *copyOf(p))
		}
	}
	return all, strconv.Itoa(c.version), c.ask("list pods")
}

func (c *cluster) watch(ctx context.Context, of map[*watch.RaceFreeFakeWatcher]bool, what string) (
	watch.Interface, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.ask(what); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w := watch.NewRaceFreeFake()
	of[w] = true
	end := time.AfterFunc(apiwatch.Timeout, w.Stop)
	context.AfterFunc(ctx, func() {
		end.Stop()
		if !w.IsStopped() { // as client-go does
			w.Error(&metav1.Status{Code: http.StatusInternalServerError, Message: "unable to decode: context canceled"})
		}
		w.Stop()
	})
	return w, nil
}

func (c *cluster) WatchPods(ctx context.Context, _ string) (watch.Interface, error) {
	return c.watch(ctx, c.podsOf, "watch pods")
}

func (c *cluster) WatchAudit(ctx context.Context, _ string) (watch.Interface, error) {
	return c.watch(ctx, c.auditsOf, "watch audit")
}

func (c *cluster) Pod(_ context.Context, namespace, name string) (*Pod, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		if p.Namespace == namespace && p.Name == name {
			return copyOf(p), c.ask("get pod")
		}
	}
	return nil, c.ask("get pod")
}

func (c *cluster) PodIP(_ context.Context, a netip.Addr) (*v1alpha1.PodIP, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return copyOf(c.ips[a.String()]), errors.Join(c.ask("get podip "+a.String()), c.failIP)
}

func (c *cluster) PodIPsHere(context.Context) (all []v1alpha1.PodIP, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(c.ips)) {
		if ip := c.ips[name]; ip.Status.NodeName == node || ip.Spec.AdoptedOn == node {
			all = append(all, *copyOf(ip))
		}
	}
	return all, c.ask("list podips")
}

func (c *cluster) ApplyStatus(_ context.Context, ip *v1alpha1.PodIP) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mayWrite() {
		return errKilled
	}
	if err := c.ask("report " + ip.Name + " " + string(ip.Status.Phase)); err != nil {
		return err
	}
	is := c.ips[ip.Name]
	of := schema.GroupResource{Group: "stayput.io", Resource: "podips"}
	switch {
	case is == nil:
		return apierrors.NewNotFound(of, ip.Name)
	case is.UID != ip.UID || is.ResourceVersion != ip.ResourceVersion:
		return apierrors.NewConflict(of, ip.Name, errors.New("changed"))
	}
	is.Status, is.ResourceVersion = ip.Status, c.next()
	*ip = *copyOf(is)
	c.wrote()
	return nil
}

func (c *cluster) Audit(context.Context) (*v1alpha1.PodIPAudit, string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return copyOf(c.audit), strconv.Itoa(c.version), c.ask("list audit")
}

func (c *cluster) Report(context.Context) (*v1alpha1.PodIPReport, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return copyOf(c.report), c.ask("get report")
}

func (c *cluster) ApplyReport(_ context.Context, a *v1alpha1.PodIPReport) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mayWrite() {
		return errKilled
	}
	if err := c.ask("say"); err != nil {
		return err
	}
	c.report = copyOf(a)
	c.wrote()
	return nil
}

func (c *cluster) Node(context.Context) (types.UID, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node, c.ask("get node")
}

func (c *cluster) Off(context.Context) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node == "" || c.off, c.ask("get whether the node is off")
}

func (c *cluster) RoutedByCloud(context.Context) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byCloud, c.ask("get whether a cloud routes")
}

func (c *cluster) PodCIDRs(context.Context) ([]netip.Prefix, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.podCIDRs, c.ask("get podCIDRs")
}

func (c *cluster) Routed(_ context.Context, each func(*v1alpha1.PodIP)) (version string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ip := range c.ips {
		if selected(ip) {
			each(copyOf(ip))
		}
	}
	return strconv.Itoa(c.version), c.ask("list routed")
}

func (c *cluster) WatchRouted(ctx context.Context, _ string) (watch.Interface, error) {
	return c.watch(ctx, c.routedOf, "watch routed")
}

func (c *cluster) Version(context.Context) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strconv.Itoa(c.version), c.ask("get version")
}

// putRouted stores a PodIP of mode Routed of a pod on a node; an empty cidr: nobody has said where it is.
func (c *cluster) putRouted(a netip.Addr, node, cidr string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ip := &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PodIPName(a), ResourceVersion: c.next()}}
	ip.Spec.Mode, ip.Spec.PodUID = v1alpha1.ModeRouted, "u"
	ip.Status = v1alpha1.PodIPStatus{Phase: v1alpha1.PodIPBound, PodUID: "u", NodeName: node, PodCIDR: cidr}
	kind := watch.Added
	switch was := c.ips[ip.Name]; {
	case was == nil || !selected(was):
	case selected(ip):
		kind = watch.Modified
	default:
		kind = watch.Deleted
	}
	c.ips[ip.Name] = ip
	for w := range c.routedOf {
		if !w.IsStopped() && (kind == watch.Deleted || selected(ip)) {
			w.Action(kind, copyOf(ip))
		}
	}
}

// selected reports whether RoutedSelector selects a PodIP.
func selected(ip *v1alpha1.PodIP) bool {
	return RoutedSelector.Matches(fields.Set{"status.podCIDR": ip.Status.PodCIDR})
}

// tell tells the watches of pods. c.mu is held.
func (c *cluster) tell(kind watch.EventType, p *Pod) {
	for w := range c.podsOf {
		if !w.IsStopped() && !c.stale && p.Spec.NodeName == node {
			w.Action(kind, copyOf(p))
		}
	}
}

// put stores a pod.
func (c *cluster) put(p *Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.ResourceVersion = c.next()
	kind := watch.Added
	if c.pods[string(p.UID)] != nil {
		kind = watch.Modified
	}
	c.pods[string(p.UID)] = copyOf(p)
	c.tell(kind, p)
}

func (c *cluster) remove(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[uid]
	delete(c.pods, uid)
	c.next()
	c.tell(watch.Deleted, p)
}

// lead renews the mark until ctx is done.
func (c *cluster) lead(ctx context.Context) {
	for wake.Pause(ctx, pool.MarkEvery) {
		c.mu.Lock()
		r, away := copyOf(c.audit), c.away || c.err != nil
		c.mu.Unlock()
		if r != nil && !away {
			c.putAudit(r)
		}
	}
}

// micro returns the time of an epoch in microseconds.
func micro(epoch int64) *metav1.MicroTime {
	t := v1alpha1.EpochTime(1000 * epoch)
	return &t
}

// audit is one of an epoch, in microseconds.
func audit(epoch int64, phase v1alpha1.PodIPAuditPhase) *v1alpha1.PodIPAudit {
	r := &v1alpha1.PodIPAudit{}
	r.Spec = v1alpha1.PodIPAuditSpec{Epoch: micro(epoch), Term: micro(epoch), Phase: phase}
	if phase == v1alpha1.PodIPAuditSettled {
		r.Spec.Term = micro(epoch + 1)
	}
	return r
}

// putAudit stores an audit with a new mark.
func (c *cluster) putAudit(r *v1alpha1.PodIPAudit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.Name, r.ResourceVersion = v1alpha1.PodIPAuditName, c.next()
	c.marks++
	r.Spec.Mark, r.Spec.Marks = metav1.NewMicroTime(time.Now()), c.marks
	c.audit = copyOf(r)
	for w := range c.auditsOf {
		if !w.IsStopped() {
			w.Modify(copyOf(r))
		}
	}
}

// endWatches ends every watch as an API server does that goes down.
func (c *cluster) endWatches() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range []map[*watch.RaceFreeFakeWatcher]bool{c.podsOf, c.auditsOf, c.routedOf} {
		for w := range of {
			if !w.IsStopped() {
				w.Error(&metav1.Status{Code: http.StatusInternalServerError, Message: "going down"})
			}
			delete(of, w)
		}
	}
}

func (c *cluster) fail(err error) {
	c.mu.Lock()
	c.err = err
	c.mu.Unlock()
	if err != nil {
		c.endWatches()
	}
}

func (c *cluster) count(what string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.asked {
		if strings.HasPrefix(a, what) {
			n++
		}
	}
	return n
}

// containers is a container runtime.
type containers struct {
	mu        sync.Mutex
	err       error
	sandboxes map[string]cri.Sandbox
	netns     map[string]string
	vanished  map[string]error // by sandbox: why its namespace is not known
	stopped   []string
}

func (r *containers) Sandboxes(context.Context) (map[string]cri.Sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.sandboxes), r.err
}

func (r *containers) Netns(_ context.Context, id string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.netns[id], cmp.Or(r.vanished[id], r.err)
}

func (r *containers) Stop(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = append(r.stopped, id)
	return r.err
}

func (r *containers) PID() int { return os.Getpid() }

func (r *containers) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

// clock is that of the bubble.
type clock struct{ boot string }

func (c *clock) Now() (ledger.Instant, error) {
	return ledger.Instant{Wall: time.Now(), Boot: time.Since(time.Time{}), BootID: c.boot}, nil
}

var errKilled = errors.New("killed")

// killable is a file system whose writes a kill comes between.
type killable struct {
	disk.Local
	w *world
}

func (d killable) step(f func() error) error {
	if !d.w.lives() {
		return errKilled
	}
	err := f()
	d.w.step()
	return err
}

func (d killable) WriteFile(path string, data []byte, mode uint32) error {
	return d.step(func() error { return d.Local.WriteFile(path, data, mode) })
}

func (d killable) Rename(from, to string) error {
	return d.step(func() error { return d.Local.Rename(from, to) })
}

func (d killable) Remove(path string) error {
	return d.step(func() error { return d.Local.Remove(path) })
}

// world is a node in temporary directories, in a cluster: real ledgers and network namespaces.
type world struct {
	t       *testing.T
	dir     string
	c       *cluster
	r       *containers
	clock   *clock
	ledgers ledger.Options // without kills
	net     *ledger.Network
	o       Options
	k       *Keeper
	routes  *routes
	cidr    netip.Prefix // by which other nodes route to pods of mode Routed
	end     func()
	foreign bool // the network is not the plugin's

	mu     sync.Mutex
	left   int // writes until the agent is killed; negative: it is not
	killed bool
	kill   context.CancelFunc
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "podip-")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	w := &world{t: t, dir: dir, c: newCluster(), clock: &clock{"boot-1"}, left: -1,
		r: &containers{sandboxes: map[string]cri.Sandbox{}, netns: map[string]string{}}}
	for _, d := range []string{"netns", "state"} {
		check(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	w.ledgers = ledger.Options{StateDir: filepath.Join(dir, "state"), Clock: w.clock}
	r, err := ledger.NewRange(netip.MustParsePrefix("192.0.2.0/24"), netip.Addr{}, netip.Addr{}, netip.Addr{})
	check(t, err)
	w.net = &ledger.Network{Name: "pods", DataDir: filepath.Join(dir, "networks"), Ranges: []ledger.RangeSet{{r}}}
	w.c.mayWrite, w.c.wrote = w.lives, w.step
	w.c.putAudit(audit(1, v1alpha1.PodIPAuditSettled))
	go w.c.lead(t.Context())
	return w
}

// lives reports whether the agent has not been killed.
func (w *world) lives() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.killed
}

// step is one write of the agent.
func (w *world) step() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.left < 0 {
		return
	}
	if w.left--; w.left < 0 {
		w.killed = true
		w.kill()
	}
}

// starts runs an agent, which is killed after so many writes; negative: never.
func (w *world) starts(writes int) {
	w.t.Helper()
	o := w.ledgers
	o.FS = killable{w: w}
	w.o = Options{Node: node, Ledgers: o, NetnsDirs: []string{filepath.Join(w.dir, "netns")}, Runtime: w.r,
		Log: slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
		Serves: func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return !w.foreign
		}}
	w.k = newKeeper(w.o, w.c)
	w.k.router.podCIDR = func(is4 bool) netip.Prefix {
		if !is4 {
			return netip.Prefix{}
		}
		w.k.router.mu.Lock() // as ownPodCIDR does
		defer w.k.router.mu.Unlock()
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.cidr
	}
	w.routes = &routes{}
	w.k.router.table = w.routes
	ctx, cancel := context.WithCancel(context.Background())
	w.mu.Lock()
	w.left, w.killed, w.kill = writes, false, cancel
	w.mu.Unlock()
	w.k.SetPools(served)
	done := make(chan struct{})
	go func() { defer close(done); w.k.Run(ctx) }()
	w.end = func() { cancel(); <-done }
}

// pass lets time pass.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// makes a pod with an address, bound to the node.
func (w *world) pod(n int) *Pod {
	p := &Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-" + strconv.Itoa(n), UID: types.UID(uid(n)),
		Annotations: map[string]string{v1alpha1.AnnotationAddresses: text(n)}}}
	p.Spec.NodeName = node
	return p
}

// given makes a pod with an address, and its PodIP.
func (w *world) given(n int) *Pod {
	p := w.pod(n)
	w.putIP(addr(n), uid(n), p.Name)
	w.c.put(p)
	return p
}

// putIP makes a PodIP, or gives it to another pod.
func (w *world) putIP(a netip.Addr, uid, name string) {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	is := w.c.ips[a.String()]
	if is == nil {
		is = &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: a.String(), UID: types.UID("ip-" + a.String())}}
		w.c.ips[a.String()] = is
	}
	is.ResourceVersion = w.c.next()
	is.Spec = v1alpha1.PodIPSpec{
		Pool: "blue", Mode: "L2", Namespace: "default", PodName: name, PodUID: uid, Interface: "eth0"}
}

func (w *world) status(n int) v1alpha1.PodIPStatus {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if is := w.c.ips[addr(n).String()]; is != nil {
		return is.Status
	}
	return v1alpha1.PodIPStatus{}
}

// wantPhase wants that the node has said this of a pod, and nothing if phase is empty.
func (w *world) wantPhase(n int, phase v1alpha1.PodIPPhase) {
	w.t.Helper()
	is := w.status(n)
	if is.Phase != phase || phase != "" && (is.PodUID != uid(n) || is.NodeName != node) {
		w.t.Errorf("the status of %s is %+v, want %q of %s on %s", addr(n), is, phase, uid(n), node)
	}
}

func ends(p *Pod) *Pod {
	now := metav1.Now()
	p.DeletionTimestamp = &now
	return p
}

// add is the plugin's ADD.
func (w *world) add(n int) error {
	w.t.Helper()
	_, err := w.tryAdd(n, filepath.Join(w.dir, "netns", "cni-"+strconv.Itoa(n)))
	return err
}

func (w *world) tryAdd(n int, path string) (*ledger.Result, error) {
	ns, _, err := ledger.SystemNetns{}.Identify(path)
	check(w.t, err)
	return ledger.New(w.net, w.ledgers).Add(ledger.AddRequest{
		Attachment: ledger.Attachment{ContainerID: "c" + strconv.Itoa(n), IfName: "eth0"},
		Pod:        ledger.Pod{Namespace: "default", Name: "web-" + strconv.Itoa(n), UID: uid(n)}, Netns: ns,
		Pool: []netip.Addr{addr(n)}, PoolText: text(n),
	})
}

// netns makes a network namespace.
func (w *world) netns(n int) string {
	return nodetest.Netns(w.t, filepath.Join(w.dir, "netns"), "cni-"+strconv.Itoa(n))
}

// runs starts the sandbox of a pod: its namespace, its ADD, and that the runtime lists it.
func (w *world) runs(n int) {
	w.t.Helper()
	path := w.netns(n)
	for range ledger.Patience / ledger.Pause {
		if w.file(n) == "" {
			w.pass(ledger.Pause)
		}
	}
	check(w.t, w.add(n))
	nodetest.Configure(w.t, path, addr(n))
	w.lists(n, true)
}

func (w *world) lists(n int, ready bool) {
	id := "c" + strconv.Itoa(n)
	w.r.mu.Lock()
	w.r.netns[id] = filepath.Join(w.dir, "netns", "cni-"+strconv.Itoa(n))
	w.r.sandboxes[id] = cri.Sandbox{ID: id, Ready: ready,
		Pod:         ledger.Pod{Namespace: "default", Name: "web-" + strconv.Itoa(n), UID: uid(n)},
		Annotations: map[string]string{v1alpha1.AnnotationAddresses: text(n)}}
	w.r.mu.Unlock()
	w.k.Look(w.name(n), map[string]string{v1alpha1.AnnotationAddresses: text(n)}, false)
}

func (w *world) name(n int) ledger.Pod {
	return ledger.Pod{Namespace: "default", Name: "web-" + strconv.Itoa(n), UID: uid(n)}
}

func (w *world) del(n int) {
	w.t.Helper()
	_, err := ledger.New(w.net, w.ledgers).Del(ledger.DelRequest{
		Attachment: ledger.Attachment{ContainerID: "c" + strconv.Itoa(n), IfName: "eth0"}})
	check(w.t, err)
}

func (w *world) unmount(n int) {
	w.t.Helper()
	nodetest.Unmount(w.t, filepath.Join(w.dir, "netns", "cni-"+strconv.Itoa(n)))
}

// ends stops the sandbox of a pod: DEL, its namespace, and what the runtime lists.
func (w *world) stops(n int) {
	w.t.Helper()
	w.del(n)
	w.unmount(n)
	w.r.mu.Lock()
	delete(w.r.sandboxes, "c"+strconv.Itoa(n))
	w.r.mu.Unlock()
	w.k.Look(w.name(n), nil, true)
}

// file is what a pod is granted.
func (w *world) file(n int) string {
	w.t.Helper()
	text, err := w.ledgers.Grants().Granted(uid(n))
	check(w.t, err)
	return text
}

func (w *world) wantGranted(n int, want bool) {
	w.t.Helper()
	if got := w.file(n); (got != "") != want || want && got != text(n) {
		w.t.Errorf("pod %d is granted %q, want that it is: %t", n, got, want)
	}
}
