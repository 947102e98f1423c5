package main

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/lab"
)

// view is one look at a node: what its network namespaces have and what its address files say.
type view struct {
	at         time.Time
	boot       string
	configured map[netip.Addr][]string // address -> paths of the namespaces of pods that have it
	book       map[netip.Addr]ledger.Address
	bad        []string // what the files say against each other
}

// look reads a node that is up. Files are read after the namespaces.
func look(n *lab.ClusterNode) (view, error) {
	v := view{at: time.Now(), book: map[netip.Addr]ledger.Address{}}
	var err error
	if v.configured, err = configured(n.Path(netnsDir)); err != nil {
		return v, err
	}
	books, err := ledgersOf(n)
	if err != nil {
		return v, err
	}
	for _, b := range books {
		all, err := b.List()
		if err != nil {
			return v, err
		}
		for _, a := range all {
			v.book[a.Addr], v.boot = a, a.Boot
		}
		bad, err := b.Check()
		if err != nil {
			return v, err
		}
		for _, e := range bad {
			v.bad = append(v.bad, e.Error())
		}
	}
	now, err := clockOf{n}.Now()
	v.boot = now.BootID
	return v, err
}

// netnsDir is where containerd mounts the namespaces of pods.
const netnsDir = "/run/netns"

// configured returns which namespaces, by their paths in the node, have which addresses. One that goes away meanwhile
// has none.
func configured(dir string) (map[netip.Addr][]string, error) {
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	found := map[netip.Addr][]string{}
	for _, f := range files {
		links, err := lab.AddressesIn(filepath.Join(dir, f.Name()))
		if err != nil {
			continue
		}
		for _, prefixes := range links {
			for _, p := range prefixes {
				found[p.Addr()] = append(found[p.Addr()], filepath.Join(netnsDir, f.Name()))
			}
		}
	}
	return found, nil
}

// ledgersOf returns the books of a node's networks, read from this machine.
func ledgersOf(n *lab.ClusterNode) ([]*ledger.Ledger, error) {
	return ledger.Networks(ledger.Options{FS: filesOf{node: n}, Clock: clockOf{n}, Netns: namespacesOf{n}})
}

// filesOf are the files of a node, for reading.
type filesOf struct {
	disk.Local // its writing methods are not called
	node       *lab.ClusterNode
}

func (f filesOf) ReadFile(path string) ([]byte, error)  { return f.Local.ReadFile(f.node.Path(path)) }
func (f filesOf) Mode(path string) (uint32, error)      { return f.Local.Mode(f.node.Path(path)) }
func (f filesOf) ReadDir(path string) ([]string, error) { return f.Local.ReadDir(f.node.Path(path)) }
func (f filesOf) ChangeTime(path string) (int64, error) { return f.Local.ChangeTime(f.node.Path(path)) }
func (f filesOf) Lock(path string) (func(), error)      { return f.Local.Lock(f.node.Path(path)) }

// clockOf is a node's clock: the machine's, and its own boot.
type clockOf struct{ node *lab.ClusterNode }

func (c clockOf) Now() (ledger.Instant, error) {
	now, err := ledger.SystemClock{}.Now()
	if err != nil {
		return now, err
	}
	id, err := os.ReadFile(c.node.Path("/proc/sys/kernel/random/boot_id"))
	now.BootID = strings.TrimSpace(string(id))
	return now, err
}

// namespacesOf identifies a node's namespaces.
type namespacesOf struct{ node *lab.ClusterNode }

func (s namespacesOf) Identify(path string) (ledger.Netns, bool, error) {
	ns, ok, err := ledger.SystemNetns{}.Identify(s.node.Path(path))
	ns.Path = path
	return ns, ok, err
}

// addresses judges what is seen of one node's addresses, one look after the other. Whatever a command that runs
// meanwhile can explain has to be seen twice.
type addresses struct {
	node     string
	report   *report
	released func(p promise) time.Time // when the release of an address was seen, zero if it never did
	// certain reports whether releases that were requested until now have been seen.
	certain func() bool

	last     view
	suspects map[string]time.Time // what was seen once, and when
	promises map[netip.Addr]promise
	lost     map[netip.Addr]promise // promises that have ended without a reason that was seen yet
}

// promise is an address that is kept for somebody.
type promise struct {
	identity, pod string
	retention     time.Duration // 0: without an end
	since         time.Time     // first seen
	seen          time.Time     // last seen
	ends          time.Time     // while it is retained and ends; else zero
	missed        time.Time     // the first look that did not see it; else zero
	instead       string        // what was seen when it was gone
}

func newAddresses(node string, r *report) *addresses {
	return &addresses{
		node: node, report: r, suspects: map[string]time.Time{}, promises: map[netip.Addr]promise{},
		lost:     map[netip.Addr]promise{},
		released: func(promise) time.Time { return time.Time{} },
		certain:  func() bool { return true },
	}
}

// judge takes note of a look, and judges it.
func (a *addresses) judge(v view) {
	if v.boot != a.last.boot {
		clear(a.suspects)
	}
	seen := map[string]bool{}
	// twice reports whether something is seen for the second time in a row.
	twice := func(what string) bool {
		seen[what] = true
		_, before := a.suspects[what]
		if !before {
			a.suspects[what] = v.at
		}
		return before
	}
	for ip, paths := range v.configured {
		if len(paths) > 1 && twice(fmt.Sprint("doubled ", ip, paths)) {
			a.violation(fmt.Sprint("doubled ", ip, paths), "%s is configured in %d namespaces: %s", ip, len(paths),
				strings.Join(paths, ", "))
		}
		for _, path := range paths {
			is, taken := v.book[ip]
			if taken && is.State == ledger.StateBound && (is.Netns.Path == "" || filepath.Base(is.Netns.Path) ==
				filepath.Base(path)) {
				continue
			}
			if what := fmt.Sprint("unbooked ", ip, path); twice(what) {
				a.violation(what, "%s is configured in %s, and its file says: %s", ip, path, says(is, taken))
			}
		}
	}
	for _, bad := range v.bad {
		if what := "files: " + bad; twice(what) && v.at.Sub(a.suspects[what]) > settled {
			a.violation(what, "the address files disagree: %s", bad)
		}
	}
	for what := range a.suspects {
		if !seen[what] {
			delete(a.suspects, what)
		}
	}
	a.keep(v)
	a.last = v
}

func (a *addresses) violation(subject, format string, args ...any) {
	a.report.violation(a.node+" "+subject, a.node+": "+format, args...)
}

// says writes what the file of an address says.
func says(is ledger.Address, taken bool) string {
	if !taken {
		return "free"
	}
	s := string(is.State)
	if is.Attachment.ContainerID != "" {
		s += " to " + is.Attachment.String()
	}
	if is.Pod.Name != "" {
		s += " of " + is.Pod.String()
	}
	if is.Netns.Path != "" {
		s += " in " + is.Netns.Path
	}
	if is.Key != nil {
		s += ", promised to " + is.Key.String()
	}
	return s
}

// keep follows the promises: an address that is kept for somebody must stay so until its time is over or it is
// released.
func (a *addresses) keep(v view) {
	held := map[string]netip.Addr{} // by identity and pod
	for ip, is := range v.book {
		if is.Key != nil {
			held[is.Key.Identity+" "+is.Key.Pod] = ip
		}
	}
	for ip, p := range a.promises {
		is, taken := v.book[ip]
		if taken && is.Key != nil && is.Key.Identity == p.identity {
			continue
		}
		// A picture that a running command tears is whole again by the next look.
		if p.missed.IsZero() {
			p.missed = v.at
			a.promises[ip] = p
			continue
		}
		delete(a.promises, ip)
		p.instead = says(is, taken)
		if _, moved := held[p.identity+" "+p.pod]; !moved {
			a.lost[ip] = p
		}
	}
	for ip, p := range a.lost {
		over := p.ends
		if over.IsZero() && p.retention > 0 {
			over = p.seen.Add(p.retention)
		}
		switch released := a.released(p); {
		case !over.IsZero() && p.missed.After(over.Add(-time.Second)), released.After(p.since):
			delete(a.lost, ip)
		case a.certain():
			delete(a.lost, ip)
			a.violation(fmt.Sprint("lost ", ip, p.identity, p.seen), "%s was kept for %s (pod %s) and is given away early: %s; "+
				"seen kept until %s, it ends %s", ip, p.identity, p.pod, p.instead, clock(p.seen), ending(p))
		}
	}
	for ip, is := range v.book {
		if is.Key == nil || !is.Policy.Retains() {
			continue
		}
		p, known := a.promises[ip]
		if !known || p.identity != is.Key.Identity {
			if known {
				continue // to be judged at the next look
			}
			p = promise{identity: is.Key.Identity, since: v.at}
		}
		p.pod, p.retention, p.seen, p.ends, p.missed = is.Key.Pod, is.Policy.Duration(), v.at, time.Time{}, time.Time{}
		if is.State == ledger.StateRetained && is.Ends {
			p.ends = v.at.Add(is.Left)
		}
		a.promises[ip] = p
	}
}

func ending(p promise) string {
	switch {
	case !p.ends.IsZero():
		return "at " + clock(p.ends)
	case p.retention > 0:
		return p.retention.String() + " after its pod"
	}
	return "with its workload"
}

// sandbox is what the container runtime says.
type sandbox struct {
	ready bool
	uid   string // of its pod
}

// unexplained returns the addresses that nothing explains in a cluster at rest: neither a sandbox that runs for a pod
// that exists, nor a promise to a pod that is wanted and that no other address keeps.
func unexplained(v view, sandboxes map[string]sandbox, exists func(uid string) bool, wants func(k ledger.Key) bool) (
	all []string) {
	keys := map[ledger.Key]netip.Addr{}
	for _, ip := range slices.SortedFunc(maps.Keys(v.book), netip.Addr.Compare) {
		is := v.book[ip]
		why := ""
		switch s, listed := sandboxes[is.Attachment.ContainerID]; {
		case is.State == ledger.StateBound && !listed:
			why = "the runtime does not list the sandbox"
		case is.State == ledger.StateBound && !s.ready:
			why = "the sandbox does not run"
		case is.State == ledger.StateBound && !exists(s.uid):
			why = "the pod is gone"
		case is.State == ledger.StateBound:
		case is.State != ledger.StateRetained || is.Key == nil:
			why = "it is nobody's"
		case is.Ends && is.Left <= 0:
			why = "its retention is over"
		case !wants(*is.Key):
			why = "no workload wants the pod"
		}
		if is.Key != nil {
			if other, doubled := keys[*is.Key]; doubled && why == "" {
				why = fmt.Sprintf("%s is kept for the same pod", other)
			}
			keys[*is.Key] = ip
		}
		if why != "" {
			all = append(all, fmt.Sprintf("%s (%s): %s", ip, says(is, true), why))
		}
	}
	return all
}
