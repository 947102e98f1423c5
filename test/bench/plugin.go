package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/spool"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

// network is an IPAM plugin with the files of one network.
type network struct {
	plugin string
	dir    string // dataDir, and stateDir below it
	ipam   map[string]any
	conf   []byte
	netns  string
}

const networkName = "pods"

var (
	networkRange = netip.MustParsePrefix("10.88.0.0/13")
	firstAddr    = netip.MustParseAddr("10.88.0.1") // the gateway
)

func (b *bench) network(plugin, netns string, annotations map[string]string) (*network, error) {
	dir, err := os.MkdirTemp(b.dir, filepath.Base(plugin)+"-")
	if err != nil {
		return nil, err
	}
	ipam := lab.RangeIPAM(filepath.Base(plugin), networkRange.String())
	ipam["dataDir"] = filepath.Join(dir, "data")
	if filepath.Base(plugin) == "stayput" {
		state := filepath.Join(dir, "state")
		ipam["stateDir"] = state
		// As on a node with an agent: the plugin counts its commands.
		if err := errors.Join(os.Mkdir(state, 0o755), spool.Dir(state).MakeLatencies()); err != nil {
			return nil, err
		}
	}
	return (&network{plugin: plugin, dir: dir, ipam: ipam, netns: netns}).of(annotations)
}

// of returns the network as it is handed to the plugin for a pod with these annotations.
func (w network) of(annotations map[string]string) (_ *network, err error) {
	w.conf, err = json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": networkName, "type": "bridge", "bridge": "cni0", "isGateway": true,
		"capabilities":  map[string]any{lab.AnnotationsCapability: true},
		"runtimeConfig": map[string]any{lab.AnnotationsCapability: annotations},
		"ipam":          w.ipam,
	})
	return &w, err
}

// bind fills the network with n addresses as host-local does.
func (w *network) bind(n int) error {
	dir := filepath.Join(w.dir, "data", networkName)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	addr := firstAddr
	for range n {
		addr = addr.Next()
		if err := os.WriteFile(filepath.Join(dir, addr.String()), []byte(newID()+"\r\neth0"), 0o644); err != nil {
			return err
		}
	}
	if n == 0 {
		return nil
	}
	return os.WriteFile(filepath.Join(dir, "last_reserved_ip.0"), []byte(addr.String()), 0o644)
}

// bound counts the addresses that have a file.
func (w *network) bound() (int, error) {
	files, err := filepath.Glob(filepath.Join(w.dir, "data", networkName, "10.88.*"))
	return len(files), err
}

// newID returns a container ID.
func newID() string {
	var b strings.Builder
	for range 4 {
		fmt.Fprintf(&b, "%016x", rand.Uint64())
	}
	return b.String()
}

// podUID is that of each pod.
const podUID = "0f7a9f0e-5b0c-4a57-9a0c-3a4f5b6c7d8e"

// env returns containerd's environment for a plugin call.
func (w *network) env(verb, id, pod string) []string {
	return []string{
		"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=" + w.netns, "CNI_IFNAME=eth0", "CNI_PATH=/opt/cni/bin",
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + pod + ";K8S_POD_INFRA_CONTAINER_ID=" + id +
			";K8S_POD_UID=" + podUID,
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root",
	}
}

func (w *network) call(verb, id, pod string) (time.Duration, error) {
	return timed([]string{w.plugin}, w.env(verb, id, pod), w.conf)
}

// cycle times an ADD and a DEL of a new container of the pod; "" stands for a new pod.
func (w *network) cycle(pod string) (time.Duration, error) {
	id := newID()
	if pod == "" {
		pod = "pod-" + id[:12]
	}
	add, err := w.call("ADD", id, pod)
	if err != nil {
		return 0, err
	}
	del, err := w.call("DEL", id, pod)
	return add + del, err
}

// quietly runs f on a thread of its own and without garbage collections.
func quietly(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	return f()
}

// turns calls the contestants n times in turns, reversing the order each time, and returns their times.
func turns(ctx context.Context, n int, contestants ...func() (time.Duration, error)) ([][]time.Duration, error) {
	times := make([][]time.Duration, len(contestants))
	err := quietly(func() error {
		for i := range n {
			if err := ctx.Err(); err != nil {
				return err
			}
			for j := range contestants {
				if i%2 == 1 {
					j = len(contestants) - 1 - j
				}
				took, err := contestants[j]()
				if err != nil {
					return err
				}
				times[j] = append(times[j], took)
			}
			if i%50 == 49 {
				runtime.GC()
			}
		}
		return nil
	})
	return times, err
}

// newNetNS makes a network namespace and returns a path to it that is valid until done is called.
func newNetNS() (path string, done func(), err error) {
	var f *os.File
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			f, err = os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		}
	})
	wg.Wait()
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()), func() { f.Close() }, nil
}

// ordinary are the annotations of a pod without any request.
var ordinary = map[string]string{"team": "a"}

func measureAdd(ctx context.Context, b *bench) ([]table.Row, error) {
	netns, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	var rows []table.Row
	for _, c := range []struct {
		bound, n int
		target   float64
	}{{0, 500, 0.65}, {100, 500, 0.45}, {1000, 150, 0.12}, {10000, 25, 0.015}} {
		var nets []*network
		for _, plugin := range []string{b.product.Plugin, b.hostLocal} {
			w, err := b.network(plugin, netns, ordinary)
			if err != nil {
				return nil, err
			}
			if err := w.bind(c.bound); err != nil {
				return nil, err
			}
			// Once per boot stayput indexes host-local's files; that is not measured.
			for range 3 {
				if _, err := w.cycle(""); err != nil {
					return nil, err
				}
			}
			nets = append(nets, w)
		}
		n := b.times(c.n)
		times, err := turns(ctx, n,
			func() (time.Duration, error) { return nets[0].cycle("") },
			func() (time.Duration, error) { return nets[1].cycle("") })
		if err != nil {
			return nil, err
		}
		for _, w := range nets {
			if bound, err := w.bound(); err != nil || bound != c.bound {
				return nil, errors.Join(err, fmt.Errorf("%s: %d addresses are bound at the end, want %d", w.plugin, bound, c.bound))
			}
			if err := os.RemoveAll(w.dir); err != nil {
				return nil, err
			}
		}
		rows = append(rows, table.Row{
			What: fmt.Sprintf("ADD + DEL, %d bound", c.bound), Against: "host-local", Goal: table.AtMost(c.target),
			Figure: compared(times[0], times[1]),
			Detail: ms(median(times[0])) + " / " + ms(median(times[1])),
		})
	}
	return rows, nil
}

func measureFloor(ctx context.Context, b *bench) ([]table.Row, error) {
	netns, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	ours, err := b.network(b.product.Plugin, netns, ordinary)
	if err != nil {
		return nil, err
	}
	theirs, err := b.network(b.hostLocal, netns, ordinary)
	if err != nil {
		return nil, err
	}
	empty := func() (time.Duration, error) {
		var sum time.Duration
		for range 2 {
			took, err := timed([]string{b.empty}, ours.env("ADD", newID(), "pod"), ours.conf)
			if err != nil {
				return 0, err
			}
			sum += took
		}
		return sum, nil
	}
	cycle := func(w *network) func() (time.Duration, error) {
		return func() (time.Duration, error) { return w.cycle("") }
	}
	if _, err := turns(ctx, 3, cycle(ours), cycle(theirs), empty); err != nil {
		return nil, err
	}
	n := b.times(500)
	times, err := turns(ctx, n, cycle(ours), empty, cycle(theirs))
	if err != nil {
		return nil, err
	}
	return []table.Row{
		{What: "ADD + DEL, 0 bound", Against: "an empty static Go program, twice", Goal: table.AtMost(1.4),
			Figure: compared(times[0], times[1]),
			Detail: ms(median(times[0])) + " / " + ms(median(times[1]))},
		{
			What: "  host-local's", Against: "the same", Figure: compared(times[2], times[1]),
		},
	}, nil
}

// asked are the annotations of a pod whose address is retained.
var asked = map[string]string{"stayput.io/retain-ip": "10m"}

func measureRestore(ctx context.Context, b *bench) ([]table.Row, error) {
	if err := lab.Need(ctx, "strace"); err != nil {
		return nil, err
	}
	netns, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	ours, err := b.network(b.product.Plugin, netns, asked)
	if err != nil {
		return nil, err
	}
	theirs, err := b.network(b.hostLocal, netns, asked)
	if err != nil {
		return nil, err
	}
	const pod = "web-0"
	for range 3 {
		for _, w := range []*network{ours, theirs} {
			if _, err := w.cycle(pod); err != nil {
				return nil, err
			}
		}
	}
	// The fsyncs that a restore and a retaining DEL make.
	id := newID()
	add, err := ours.fsyncs(ctx, "ADD", id, pod)
	if err != nil {
		return nil, err
	}
	del, err := ours.fsyncs(ctx, "DEL", id, pod)
	if err != nil {
		return nil, err
	}
	id = newID()
	theirAdd, err := theirs.fsyncs(ctx, "ADD", id, pod)
	if err != nil {
		return nil, err
	}
	theirDel, err := theirs.fsyncs(ctx, "DEL", id, pod)
	if err != nil {
		return nil, err
	}

	alone := filepath.Join(b.dir, "alone")
	if err := os.Mkdir(alone, 0o755); err != nil {
		return nil, err
	}
	n := b.times(300)
	times, err := turns(ctx, n,
		func() (time.Duration, error) { return ours.cycle(pod) },
		func() (time.Duration, error) { return theirs.cycle(pod) },
		func() (time.Duration, error) { return syncAlone(alone, append(add, del...)) })
	if err != nil {
		return nil, err
	}
	for _, w := range []*network{ours, theirs} {
		// The address must still be retained: otherwise something else was measured.
		want := 0
		if w == ours {
			want = 1
		}
		if kept, err := w.bound(); err != nil || kept != want {
			return nil, errors.Join(err, fmt.Errorf("%s: %d addresses are retained at the end, want %d", w.plugin, kept, want))
		}
	}
	sum := make([]time.Duration, n)
	for i := range sum {
		sum[i] = times[1][i] + times[2][i]
	}
	return []table.Row{{
		What: "restore ADD + retaining DEL", Against: "host-local's ADD + DEL and the fsyncs", Goal: table.AtMost(1.1),
		Figure: compared(times[0], sum),
		Detail: fmt.Sprintf("%s / %s + %s; fsyncs: stayput ADD %d, DEL %d; host-local ADD %d, DEL %d",
			ms(median(times[0])), ms(median(times[1])), ms(median(times[2])), len(add), len(del), len(theirAdd), len(theirDel)),
	}}, nil
}

// synced is the kind of file that was fsynced.
type synced int

const (
	file synced = iota
	directory
)

// fsyncs runs the plugin under strace and returns its fsyncs.
func (w *network) fsyncs(ctx context.Context, verb, id, pod string) ([]synced, error) {
	log := filepath.Join(w.dir, "strace")
	cmd := exec.CommandContext(ctx, "strace", "-f", "-qq", "-y", "-e", "signal=none", "-e",
		"trace=fsync,fdatasync,syncfs,sync", "-o", log, w.plugin)
	cmd.Env, cmd.Stdin = w.env(verb, id, pod), bytes.NewReader(w.conf)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s %s under strace: %w: %s", w.plugin, verb, err, out)
	}
	f, err := os.Open(log)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var found []synced
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// 123 fsync(3</path/of/it>) = 0
		_, path, ok := strings.Cut(lines.Text(), "<")
		if !ok {
			continue
		}
		path, _, _ = strings.Cut(path, ">")
		kind := file // a temporary one, already gone
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			kind = directory
		}
		found = append(found, kind)
	}
	return found, nil
}

// syncAlone makes those fsyncs, each on something changed as the plugin changes it, and returns their total time
// without the changes.
func syncAlone(dir string, kinds []synced) (sum time.Duration, err error) {
	name := filepath.Join(dir, "record")
	for _, kind := range kinds {
		f, err := os.Create(name + ".tmp")
		if err != nil {
			return 0, err
		}
		if _, err := f.Write(make([]byte, 300)); err != nil {
			return 0, errors.Join(err, f.Close())
		}
		target := f
		if kind == directory {
			if err := os.Rename(name+".tmp", name); err != nil {
				return 0, errors.Join(err, f.Close())
			}
			f.Close()
			if target, err = os.Open(dir); err != nil {
				return 0, err
			}
		}
		begin := time.Now()
		err = target.Sync()
		sum += time.Since(begin)
		if err := errors.Join(err, target.Close()); err != nil {
			return 0, err
		}
		if kind == file {
			if err := os.Rename(name+".tmp", name); err != nil {
				return 0, err
			}
		}
	}
	return sum, nil
}

// atOnce is the number of pods that start at the same time.
const atOnce = 64

func measureParallel(ctx context.Context, b *bench) ([]table.Row, error) {
	netns, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	ours, err := b.network(b.product.Plugin, netns, ordinary)
	if err != nil {
		return nil, err
	}
	theirs, err := b.network(b.hostLocal, netns, ordinary)
	if err != nil {
		return nil, err
	}
	round := func(w *network) func() (time.Duration, error) {
		return func() (time.Duration, error) { return w.burst() }
	}
	if _, err := turns(ctx, 1, round(ours), round(theirs)); err != nil {
		return nil, err
	}
	n := b.times(30)
	times, err := turns(ctx, n, round(ours), round(theirs))
	if err != nil {
		return nil, err
	}
	return []table.Row{{
		What: fmt.Sprintf("%d ADDs at once, until the last", atOnce), Against: "host-local", Goal: table.AtMost(1.0),
		Figure: compared(times[0], times[1]),
		Detail: ms(median(times[0])) + " / " + ms(median(times[1])),
	}}, nil
}

// burst starts the ADDs of many pods at once and returns the time until the last has ended. The DELs are not included.
func (w *network) burst() (time.Duration, error) {
	ids := make([]string, atOnce)
	children := make([]*child, atOnce)
	for i := range ids {
		ids[i] = newID()
		c, err := newChild([]string{w.plugin}, w.env("ADD", ids[i], "pod-"+ids[i][:12]), w.conf)
		if err != nil {
			return 0, err
		}
		defer c.close()
		children[i] = c
	}
	errs := make([]error, atOnce)
	begin := time.Now()
	for i, c := range children {
		errs[i] = c.start()
	}
	for i, c := range children {
		if errs[i] == nil {
			errs[i] = c.wait()
		}
	}
	took := time.Since(begin)
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	if bound, err := w.bound(); err != nil || bound != atOnce {
		return 0, errors.Join(err, fmt.Errorf("%s: %d addresses are bound after %d ADDs", w.plugin, bound, atOnce))
	}
	for _, id := range ids {
		if _, err := w.call("DEL", id, "pod-"+id[:12]); err != nil {
			return 0, err
		}
	}
	return took, nil
}
