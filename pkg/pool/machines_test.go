package pool

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file is what goes on in a cluster besides the controllers of this package.

// workloadsAct is Kubernetes' controllers: workloads make pods, and pods of nodes that are gone are deleted.
func (w *world) workloadsAct() {
	for _, name := range slices.Sorted(maps.Keys(w.workloads)) {
		wl := w.workloads[name]
		var own []string
		for _, key := range w.pods.keys() {
			if w.pods.objs[key].Workload.Name == name {
				own = append(own, key)
			}
		}
		if wl.gone {
			for _, key := range own {
				w.deletePod(w.pods.objs[key])
			}
			continue
		}
		if wl.loose {
			live := slices.DeleteFunc(slices.Clone(own), func(k string) bool { return w.pods.objs[k].Terminal })
			if len(live) < wl.replicas {
				w.n++
				w.makePod(wl, fmt.Sprintf("%s-x%d", name, w.n))
			} else if len(live) > wl.replicas {
				w.deletePod(w.pods.objs[live[0]])
			}
			continue
		}
		for i := range wl.replicas {
			if key := fmt.Sprintf("%s-%d", name, i); !slices.Contains(own, key) {
				w.makePod(wl, key)
			}
		}
		for _, key := range own {
			var i int
			if _, err := fmt.Sscanf(key, name+"-%d", &i); err == nil && i >= wl.replicas {
				w.deletePod(w.pods.objs[key])
			}
		}
	}
	for _, key := range w.pods.keys() {
		p := w.pods.objs[key]
		if p.Node == "" && p.Ending && (w.calm || w.some(50)) {
			w.delPod(key)
		} else if host, exists := w.hosts.objs[p.Node]; p.Node != "" && (!exists || host.Off && !host.Ready) &&
			(w.calm || w.some(30)) {
			w.logf("pod %s %s is deleted: node %s is gone", p.Name, p.UID, p.Node)
			w.delPod(key)
		}
	}
	if w.calico != nil && (w.calm || w.some(50)) {
		w.collects()
	}
	for _, n := range w.nodes {
		if n.orphan && (w.calm || w.some(50)) {
			n.orphan = false
			w.said.del(n.name)
		}
		host, exists := w.hosts.objs[n.name]
		if ready := n.on && n.kubelet; exists && host.Ready != ready && (w.calm || w.some(50)) {
			if host.Ready = ready; ready {
				host.ReadySince = w.now
			}
			w.hosts.put(n.name, host)
		}
	}
}

func (w *world) makePod(wl *workload, name string) {
	w.n++
	p := Pod{
		UID: UID(fmt.Sprintf("u%d", w.n)), Version: w.version(), Namespace: "default", Name: name, Identity: wl.identity,
		Created: w.now, Gated: true, Wants: wl.wants, Keep: wl.keep, AllocateNew: wl.fresh,
		Workload: Workload{Kind: "StatefulSet", Name: wl.name}, Namespaced: map[string]string{"name": "default"},
	}
	if wl.ordinary {
		p.Gated, p.Wants = false, nil
	}
	if w.calico == nil && w.some(5) { // the policy was away
		p.Gated = false
	}
	w.pods.put(name, p)
	w.logf("pod %s %s is made", name, p.UID)
}

func (w *world) schedule() {
	for _, key := range w.pods.keys() {
		p := w.pods.objs[key]
		if p.Gated || p.Node != "" || p.Ending {
			continue
		}
		var fit []string
		for _, name := range w.hosts.keys() {
			if host := w.hosts.objs[name]; host.Ready && !host.Off {
				fit = append(fit, name)
			}
		}
		if len(fit) > 0 {
			p.Node, p.Version = pickOne(w.r, fit), w.version()
			w.pods.put(key, p)
			w.bound[p.UID] = p.Node
			w.logf("pod %s %s is bound to %s", p.Name, p.UID, p.Node)
		}
	}
}

// kubeletSyncs has kubelet see its pods.
func (w *world) kubeletSyncs(n *node) {
	if !n.on || !n.kubelet {
		return
	}
	if _, exists := w.hosts.objs[n.name]; !exists {
		w.hosts.put(n.name, Node{Name: n.name, Ready: true, ReadySince: w.now, Foreign: w.calico != nil})
		w.logf("node %s registers", n.name)
	}
	n.view = map[UID]Pod{}
	for _, key := range w.pods.keys() {
		if p := w.pods.objs[key]; p.Node == n.name {
			w.kubeletReports(n, &p)
			n.view[p.UID] = p
		}
	}
}

// kubeletActs starts and ends sandboxes by what kubelet saw.
func (w *world) kubeletActs(n *node) {
	if !n.on {
		return
	}
	for _, uid := range slices.Sorted(maps.Keys(n.view)) {
		p := n.view[uid]
		s := n.sandboxes[uid]
		switch {
		case n.busy(uid): // with the pod's start
		case p.Terminal:
			if w.calm || w.some(60) {
				w.calicoDels(n, uid)
				delete(n.sandboxes, uid)
				if p.Ending {
					w.deleteObject(n, uid)
				}
			}
		case p.Ending:
			if s != nil && !w.calm && w.some(20) {
				// Its containers are gone, but not its sandbox.
				w.deleteObject(n, uid)
				continue
			}
			if s != nil {
				w.logf("%s: sandbox of %s ends", n.name, uid)
				w.calicoDels(n, uid)
				delete(n.sandboxes, uid)
			}
			if w.calm || w.some(60) {
				w.deleteObject(n, uid)
			}
		case s != nil && s.ending:
			w.lateDels(n)
		case w.calico != nil && s != nil && p.Assigned != nil && !reflect.DeepEqual(s.has, p.Assigned):
			// The cluster has forgotten the pod, and has it here again: kubelet ends what it had to end, and starts it.
			w.logf("%s: sandbox of %s ends, for it is another's", n.name, uid)
			w.calicoDels(n, uid)
			delete(n.sandboxes, uid)
		case s == nil && (w.calm || w.some(60)):
			if w.slow {
				n.starting[uid] = p
				w.logf("%s: a sandbox is created for %s %s", n.name, p.Name, uid)
				continue
			}
			w.add(n, p)
		}
	}
	w.starts(n)
	for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
		if _, wanted := n.view[uid]; !wanted && !n.busy(uid) && (w.calm || w.some(30)) {
			w.logf("%s: sandbox of %s ends, for its pod is unknown", n.name, uid)
			w.calicoDels(n, uid)
			delete(n.sandboxes, uid)
		}
	}
}

// deleteObject is kubelet that deletes the object of a pod that has ended.
func (w *world) deleteObject(n *node, uid UID) {
	if !n.kubelet {
		return
	}
	for _, key := range w.pods.keys() {
		if p := w.pods.objs[key]; p.UID == uid && p.Ending {
			w.logf("%s: kubelet deletes pod %s %s", n.name, p.Name, uid)
			w.delPod(key)
		}
	}
	delete(n.view, uid)
}

// busy reports whether kubelet waits for a pod's sandbox to start.
func (n *node) busy(uid UID) bool {
	_, created := n.starting[uid]
	for _, add := range n.adds {
		created = created || add.pod.UID == uid
	}
	for _, add := range n.notes {
		created = created || add.pod.UID == uid
	}
	return created || n.sandboxes[uid] != nil && n.sandboxes[uid].pending
}

// starts goes on with sandboxes that are being started: each first gets its addresses by the node's book, by what
// kubelet knew of the pod when it was created, and later has them. One that gets none is removed, and kubelet makes
// another.
func (w *world) starts(n *node) {
	if !w.slow {
		return
	}
	for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
		if s := n.sandboxes[uid]; s.pending && (w.calm || w.some(15)) {
			w.logf("%s: sandbox of %s answers", n.name, uid)
			s.pending, s.up = false, true
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(n.starting)) {
		if p := n.starting[uid]; w.calm || w.some(50) {
			delete(n.starting, uid)
			if w.add(n, p); n.sandboxes[uid] != nil {
				n.sandboxes[uid].up, n.sandboxes[uid].pending = false, true
			} else if p.Assigned != nil {
				w.refused++
			}
		}
	}
}

// add is a sandbox's start: the plugin's ADD.
func (w *world) add(n *node, p Pod) {
	if w.calico != nil {
		w.calicoAdds(n, p)
		return
	}
	if p.Assigned == nil || !reflect.DeepEqual(n.grants[p.UID], p.Assigned) && !broken(grantsCount) {
		return // code 11: no grant
	}
	for uid, s := range n.sandboxes {
		if uid != p.UID && !s.unbooked && slices.ContainsFunc(s.has, func(a Address) bool { return p.has(a.Prefix.Addr()) }) {
			return // its predecessor still has it: code 11
		}
	}
	for _, a := range p.Assigned {
		if w.foreign[a.Prefix.Addr()] && a.Last != n.name {
			w.logf("%s: another machine has %s: %s does not start", n.name, a.Prefix.Addr(), p.UID)
			n.found[p.UID], n.owners[p.UID] = a.Prefix.Addr(), p
			return
		}
	}
	delete(n.found, p.UID)
	n.sandboxes[p.UID] = &sandbox{uid: p.UID, has: p.Assigned, up: true}
	n.owners[p.UID] = p
	w.logf("%s: sandbox of %s %s starts with %v", n.name, p.Name, p.UID, p.Assigned[0].Prefix.Addr())
}

// agentActs is one round of an agent; half of the time by an old view.
func (w *world) agentActs(n *node) {
	if !n.on || !n.agent {
		return
	}
	current := w.calm || w.some(50)
	if w.calico != nil {
		w.felixActs(n)
		w.believes(n, true)
		return
	}
	if current {
		w.agentSees(n)
	}
	if w.calm || w.some(70) {
		n.audit = w.audit
	}
	if audit := n.audit; audit.Version != "" && w.said.objs[n.name].Epoch < audit.Epoch && (w.calm || w.some(60)) {
		if _, exists := w.hosts.objs[n.name]; exists {
			w.report(n, audit)
		}
	}
	of := map[UID]bool{}
	for uid := range n.sees {
		of[uid] = true
	}
	for uid := range n.grants {
		of[uid] = true
	}
	for uid := range n.sandboxes { // by the runtime
		of[uid] = true
	}
	named := map[UID][]Address{} // by the PodIPs
	for _, key := range w.ips.keys() {
		if ip := w.ips.objs[key]; Names(&ip, ip.PodUID, n.name) && ip.Mode != Calico && (w.calm || w.some(20)) {
			of[ip.PodUID] = true
			named[ip.PodUID] = append(named[ip.PodUID], Address{Prefix: netip.PrefixFrom(ip.Addr, ip.Addr.BitLen())})
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(of)) {
		if !n.known[uid] {
			w.agentSees(n) // it never saw the pod: that there is none is read past its watch
			n.known[uid] = true
		}
		pod, exists := n.sees[uid]
		has, found := pod.Assigned, false
		if has == nil {
			has = n.grants[uid]
		}
		if s := n.sandboxes[uid]; has == nil && s != nil {
			has, found = s.has, n.owners[uid].Assigned == nil
		}
		if has == nil && !exists {
			has = named[uid]
		}
		if pod.Assigned != nil && n.grants[uid] != nil && !reflect.DeepEqual(n.grants[uid], pod.Assigned) {
			delete(n.grants, uid) // it was adopted, and is told now
		}
		w.tend(n, uid, has, pod, exists, found)
	}
	w.believes(n, current && w.doubt(n) != Doubted)
}

// believes notes what a node that is wrongly said to be off, or has lost its files, has heard of the cluster: current
// is whether it has seen the present.
func (w *world) believes(n *node, current bool) {
	host, exists := w.hosts.objs[n.name]
	// Ready it is said to be for a while after kubelet was cut off.
	back := exists && (!host.Off || host.Ready && n.kubelet)
	n.lied = n.lied && !(current && back && !w.startsGone(n))
	if current && n.lied {
		for uid := range n.sandboxes {
			n.heard[uid] = n.heard[uid] || !w.hasPod(uid) && !n.sandboxes[uid].pending
		}
	}
}

// startsGone reports whether a sandbox is about to answer whose pod was deleted. Its agent takes it down after that.
func (w *world) startsGone(n *node) bool {
	for uid, s := range n.sandboxes {
		if s.pending && !w.hasPod(uid) {
			return true
		}
	}
	return false
}

func (w *world) hasPod(uid UID) bool {
	for _, p := range w.pods.objs {
		if p.UID == uid {
			return true
		}
	}
	return false
}

func (w *world) agentSees(n *node) {
	n.sees = map[UID]Pod{}
	for _, key := range w.pods.keys() {
		if p := w.pods.objs[key]; p.Node == n.name {
			n.sees[p.UID] = p
			n.known[p.UID] = true
		}
	}
}

// local is what an agent knows of a pod and an address.
func (w *world) local(n *node, uid UID, a netip.Addr, pod Pod, exists, found bool) Local {
	local := Local{UID: uid, Node: n.name, Exists: exists, Found: found, Ending: pod.Ending, Terminal: pod.Terminal,
		Ended: n.ended[uid], Granted: n.grants[uid] != nil, Netns: n.sandboxes[uid] != nil,
		Doubt: w.doubt(n)}
	if ip, ok := w.ips.objs[a.String()]; ok {
		local.IP = &ip
	}
	if n.found[uid] == a {
		local.Conflict = "02:00:00:00:00:01"
	}
	if local.LookUp() {
		for _, p := range w.pods.objs {
			local.Here = local.Here || p.UID == uid && p.Node == n.name
			local.Elsewhere = local.Elsewhere || p.UID == uid && p.Node != n.name
		}
	}
	if local.LookUpNode() {
		host, exists := w.hosts.objs[n.name]
		local.Off = !exists || host.Off
	}
	if local.IP != nil && local.IP.Mode == Routed && (w.calm || w.some(90)) {
		local.PodCIDR = n.routes(a)
	}
	return local
}

func (w *world) doubt(n *node) Doubt {
	doubt := DoubtOf(&n.audit, n.newest, w.said.objs[n.name].Epoch, w.now)
	n.newest = Newest(n.newest, n.audit)
	return doubt
}

// tend is an agent that does what is to be done about a pod and its addresses. No node is named unless all addresses
// may be granted, and the grant comes once it is named for all.
func (w *world) tend(n *node, uid UID, has []Address, pod Pod, exists, found bool) {
	locals, actions := make([]Local, len(has)), make([]Action, len(has))
	all := len(has) > 0
	for i, h := range has {
		locals[i] = w.local(n, uid, h.Prefix.Addr(), pod, exists, found)
		actions[i] = NextAction(locals[i])
		all = all && (actions[i].Grant || locals[i].Granted && actions[i] == (Action{}))
	}
	for i, action := range actions {
		if action.Grant && !all {
			continue
		}
		if action.Revoke && n.grants[uid] != nil {
			w.logf("%s: the grant of %s is revoked", n.name, uid)
			delete(n.grants, uid)
		}
		w.takeDown(n, uid, action.Down)
		if action.Report == "" {
			continue
		}
		ip := *locals[i].IP
		ip.Phase, ip.StatusUID, ip.Node, ip.Since, ip.Conflict = action.Report, uid, n.name, w.now, locals[i].Conflict
		if ip.PodCIDR = locals[i].PodCIDR; action.Report == Retained {
			ip.PodCIDR, n.ended[uid] = netip.Prefix{}, true
		}
		if w.send(n.name, agentStatus{StatusIP{PodIP: ip}, n.name}) != nil {
			return
		}
	}
	if all && n.grants[uid] == nil {
		w.logf("%s: %s is granted %v", n.name, uid, has[0].Prefix.Addr())
		n.grants[uid] = has
	}
}

// takeDown is an agent that takes interfaces down, and a runtime that has removed such a sandbox.
func (w *world) takeDown(n *node, uid UID, down bool) {
	s := n.sandboxes[uid]
	if s == nil || s.pending {
		return
	}
	if down {
		w.logf("%s: interfaces of %s go down", n.name, uid)
		s.up = false
	}
	if !s.up && (w.calm || w.some(50)) {
		delete(n.sandboxes, uid)
	}
}

// runtimeRestarts ends what containerd has begun, or not.
func (w *world) runtimeRestarts(n *node) {
	w.logf("%s: the runtime restarts", n.name)
	clear(n.starting)
	for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
		if n.sandboxes[uid].pending && w.some(50) {
			delete(n.sandboxes, uid)
		}
	}
}

// deleteStarting deletes pods by force whose sandboxes are being started.
func (w *world) deleteStarting() {
	for _, n := range w.nodes {
		for _, key := range w.pods.keys() {
			if p := w.pods.objs[key]; p.Node == n.name && n.busy(p.UID) {
				w.logf("pod %s %s is deleted by force while it starts", p.Name, p.UID)
				w.delPod(key)
			}
		}
	}
	for range 4 {
		w.goOn()
	}
}

// lie is what an agent that lies writes: whatever its policy lets it. Of PodIPs of which no other node has spoken since
// they were given to their pod it writes any status in its own name, and in its report what it likes.
func (w *world) lie() {
	n := w.liar
	if key := pickOne(w.r, w.ips.keys()); key != "" && w.some(60) {
		ip := w.ips.objs[key]
		ip.Phase = pickOne(w.r, []Phase{Bound, Bound, Retained, Retained, Allocated})
		ip.StatusUID, ip.Node, ip.Since = ip.PodUID,
			n.name, w.now
		if ip.Conflict, ip.PodCIDR = "", (netip.Prefix{}); ip.Phase == Allocated {
			ip.Conflict = "02:00:00:00:00:02"
		} else if ip.Phase == Bound && ip.Mode == Routed {
			ip.PodCIDR = n.routes(ip.Addr)
		}
		if w.apply(n.name+" lies", agentStatus{StatusIP{PodIP: ip}, n.name}) == nil {
			w.lies++
		}
		return
	}
	if _, exists := w.hosts.objs[n.name]; !exists {
		return
	}
	report := Report{Node: n.name, Epoch: w.audit.Epoch}
	for _, key := range w.ips.keys() {
		if ip := w.ips.objs[key]; w.some(20) {
			report.Held = append(report.Held, Held{Addr: ip.Addr, UID: ip.PodUID, Namespace: ip.Namespace, PodName: ip.PodName,
				Pool: ip.Pool, Mode: ip.Mode, Network: ip.Network, Interface: ip.Interface, Keep: ip.Keep, Running: w.some(50)})
		}
	}
	for _, key := range w.pods.keys() {
		if p := w.pods.objs[key]; w.some(20) {
			a := netip.AddrFrom4([4]byte{10, byte(6 + w.r.IntN(2)), 0, byte(1 + w.r.IntN(4))})
			report.Held = append(report.Held, Held{Addr: a, UID: p.UID, Namespace: p.Namespace, PodName: p.Name, Pool: "a4",
				Mode: w.mode(), Network: "net", Interface: "eth0", Running: w.some(50)})
		}
	}
	w.logf("%s lies: it answers round %d, has %v", n.name, report.Epoch%1e12, report.Held)
	w.said.put(n.name, report)
	w.lies++
}

// report is what an agent says to an epoch.
func (w *world) report(n *node, audit Audit) {
	w.agentSees(n)
	report := Report{Node: n.name, Epoch: audit.Epoch}
	held := func(uid UID, all []Address, running bool) {
		p := n.owners[uid]
		for _, a := range all {
			report.Held = append(report.Held, Held{Addr: a.Prefix.Addr(), UID: uid, Namespace: "default",
				PodName: p.Name, Identity: p.Identity, Pool: a.Pool, Mode: a.Mode, Network: a.Network,
				Interface: a.Interface, Keep: p.Keep, Running: running})
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(n.grants)) {
		if n.sandboxes[uid] == nil {
			held(uid, n.grants[uid], false)
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
		if s := n.sandboxes[uid]; s.up || s.pending {
			held(uid, s.has, true)
		}
	}
	w.logf("%s: reports for epoch %d, has %d", n.name, audit.Epoch%1e12, len(report.Held))
	if w.calm || w.some(80) {
		w.said.put(n.name, report)
		n.orphan = false
	}
}

// goOn is everybody at work, in some order, some not just now.
func (w *world) goOn() {
	var all []func()
	for range 2 {
		for _, c := range w.controllers {
			all = append(all, func() { w.turn(c) })
		}
	}
	for _, n := range w.nodes {
		all = append(all, func() { w.kubeletSyncs(n) }, func() { w.kubeletActs(n) }, func() { w.agentActs(n) })
	}
	all = append(all, w.workloadsAct, w.schedule)
	if w.calico != nil {
		for _, n := range w.nodes {
			all = append(all, func() { w.renews(n) }, func() { w.lateDels(n) }, func() { w.calicoGoesOn(n) },
				func() { w.calicoNotes(n) })
		}
	}
	w.r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, f := range all {
		if w.some(70) {
			f()
			w.oracle()
		}
	}
}

// adopt is an import: of a pod that another program has started, with an address that nobody has.
func (w *world) adopt() {
	n := pickOne(w.r, w.nodes)
	if host, ok := w.hosts.objs[n.name]; !ok || host.Off || n.lied || !n.on || !n.kubelet {
		return
	}
	i := w.r.IntN(4)
	name, a := fmt.Sprintf("old-%d", i), netip.AddrFrom4([4]byte{10, 6, 0, byte(1 + w.r.IntN(8))}) // also out of range
	_, taken := w.ips.objs[a.String()]
	if _, there := w.pods.objs[name]; there || taken {
		return
	}
	for _, p := range w.pods.objs {
		taken = taken || p.has(a)
	}
	for _, other := range w.nodes {
		for _, s := range other.sandboxes {
			taken = taken || slices.ContainsFunc(s.has, func(h Address) bool { return h.Prefix.Addr() == a })
		}
	}
	if taken {
		return
	}
	wl := w.workloads["old"]
	wl.replicas, wl.gone, wl.scaled = max(wl.replicas, i+1), false, w.now
	w.n++
	p := Pod{
		UID: UID(fmt.Sprintf("u%d", w.n)), Version: w.version(), Namespace: "default", Name: name, Created: w.now,
		Node: n.name, Wants: wl.wants, ReportedIP: a, Keep: wl.keep, Workload: Workload{Kind: "StatefulSet", Name: wl.name},
		Namespaced: map[string]string{"name": "default"},
	}
	h := Address{Network: "net", Interface: "eth0", Pool: "a4", Mode: L2, Prefix: netip.PrefixFrom(a, 16)}
	n.sandboxes[p.UID], n.view[p.UID], n.owners[p.UID] = &sandbox{uid: p.UID, has: []Address{h}, up: true}, p, p
	ip := p.made(h)
	ip.AdoptedOn, ip.Version, ip.Created = n.name, w.version(), w.now
	ip.UID = "ip-" + ip.Version
	w.ips.put(a.String(), ip)
	w.pods.put(name, p)
	w.adopted++
	w.placed[placement{a, p.UID}] = true
	w.logf("pod %s %s, which runs on %s with %s, is adopted", name, p.UID, n.name, a)
}

// What can befall a cluster, each as often as its weight says.
type deed = struct {
	weight int
	do     func(*world)
}

var deeds = []deed{
	{60, func(w *world) { w.goOn() }},
	{6, func(w *world) { // a write that was given up arrives
		if len(w.inflight) > 0 {
			i := w.r.IntN(len(w.inflight))
			f := w.inflight[i]
			w.inflight = slices.Delete(w.inflight, i, i+1)
			f()
		}
	}},
	{8, func(w *world) { // a pod is deleted, in one way or another
		key := pickOne(w.r, w.pods.keys())
		p, ok := w.pods.objs[key]
		switch {
		case !ok:
		case w.some(40):
			w.logf("pod %s %s is deleted by force", p.Name, p.UID)
			w.delPod(key)
		default:
			w.logf("pod %s %s is deleted", p.Name, p.UID)
			w.deletePod(p)
		}
	}},
	{2, func(w *world) { // a sandbox crashes
		n := pickOne(w.r, w.nodes)
		if uid := pickOne(w.r, slices.Sorted(maps.Keys(n.sandboxes))); uid != "" {
			w.logf("%s: sandbox of %s crashes", n.name, uid)
			if w.calico != nil && n.kubelet && w.some(50) && w.calicoDelBegins(uid) {
				n.sandboxes[uid].ending = true
				n.dels = append(n.dels, n.sandboxes[uid].handle)
				return
			}
			if w.calico != nil && w.some(50) {
				w.calicoDels(n, uid)
			}
			delete(n.sandboxes, uid)
		}
	}},
	{2, func(w *world) { // a pod succeeds
		n := pickOne(w.r, w.nodes)
		uid := pickOne(w.r, slices.Sorted(maps.Keys(n.sandboxes)))
		for _, key := range w.pods.keys() {
			p := w.pods.objs[key]
			if p.UID == uid && p.Node == n.name && w.workloads[p.Workload.Name].loose && n.on && n.kubelet {
				p.Terminal, p.Version = true, w.version()
				w.pods.put(key, p)
				w.logf("pod %s %s succeeds", p.Name, uid)
			}
		}
	}},
	{2, func(w *world) {
		if c := pickOne(w.r, w.controllers); w.unnoticed == 0 || w.audit.Term != w.unnoticed {
			w.logf("controller restarts")
			c.book = nil
		}
	}},
	{2, func(w *world) { // a watch is interrupted
		if c := pickOne(w.r, w.controllers); c.book != nil {
			w.relist(c, w.r.IntN(5))
		}
	}},
	{4, func(w *world) { // a watch brings nothing for a while
		pickOne(w.r, w.controllers).stuck[pickOne(w.r, []int{0, 1, 2, 2, 3, 3, 3, 4})] = true
	}},
	{5, func(w *world) { w.cut(pickOne(w.r, w.nodes)) }},
	{4, func(w *world) { w.mend(pickOne(w.r, w.nodes)) }},
	{3, func(w *world) { w.declare(pickOne(w.r, w.nodes)) }},
	{5, func(w *world) { w.scale() }},
	{3, func(w *world) { w.meddle() }},
	{1, func(w *world) { w.takeBack(pickOne(w.r, w.nodes)) }},
	{2, func(w *world) { w.backUp() }},
	{1, func(w *world) { w.restore() }},
	{1, func(w *world) { // a backup is not old, and a node that it does not know all of is out of reach
		w.backup = nil
		w.backUp()
		for range 6 {
			w.goOn()
		}
		w.cut(pickOne(w.r, w.nodes))
		w.restore()
		for range 6 {
			w.goOn()
		}
	}},
}

// foreigners are what else can befall a cluster whose link has other machines on it, too: one of them takes an address
// of a pool, that of a pod or a free one, or lets it go.
var foreigners = deeds[:0:0]

func init() {
	foreigners = append(slices.Clone(deeds), []struct {
		weight int
		do     func(*world)
	}{
		{20, func(w *world) {
			a := netip.AddrFrom4([4]byte{10, byte(6 + w.r.IntN(2)), 0, byte(1 + w.r.IntN(4))})
			w.logf("another machine takes %s", a)
			w.foreign[a] = true
			w.goOn()
		}},
		{2, func(w *world) { w.foreignersGo() }},
		{4, func(w *world) { // time passes
			w.logf("an hour passes")
			for range 10 {
				w.now = w.now.Add(6 * time.Minute)
				w.goOn()
			}
		}},
	}...)
}

func (w *world) foreignersGo() {
	if w.foreign != nil {
		w.logf("the other machines go")
		clear(w.foreign)
	}
}

// cut takes something from a node.
func (w *world) cut(n *node) {
	switch w.r.IntN(5) {
	case 0:
		w.logf("%s: kubelet is cut off", n.name)
		n.kubelet = false
	case 1:
		w.logf("%s: the agent is cut off", n.name)
		n.agent = false
	case 2:
		w.logf("%s: cut off from the API server", n.name)
		n.kubelet, n.agent = false, false
	case 3:
		w.logf("%s: cut off from everybody", n.name)
		n.kubelet, n.agent, n.data = false, false, false
	case 4:
		w.logf("%s: powered off", n.name)
		w.powerOff(n)
	}
	w.forgotten(n)
}

// wipe empties the state directory of a node, whatever runs there.
func (w *world) wipe(n *node) {
	w.logf("%s: the state directory is emptied", n.name)
	n.dels = nil
	clear(n.grants)
	w.wiped += len(n.sandboxes)
	for _, s := range n.sandboxes {
		s.unbooked = true
	}
	if w.some(50) {
		w.agentRestarts(n)
	}
}

// wipeAfterEnds empties the state directory of a node whose kubelet does not know that pods were deleted.
func (w *world) wipeAfterEnds(n *node) {
	w.logf("%s: kubelet is cut off", n.name)
	n.kubelet, n.agent = false, true
	w.forgotten(n)
	for _, key := range w.pods.keys() {
		if p := w.pods.objs[key]; p.Node == n.name && w.some(60) {
			w.logf("pod %s %s is deleted by force, and its sandbox crashes", p.Name, p.UID)
			w.delPod(key)
			delete(n.sandboxes, p.UID)
		}
	}
	for range 2 {
		w.agentActs(n)
	}
	w.wipe(n)
	for range 4 {
		w.goOn()
	}
}

func (w *world) agentRestarts(n *node) {
	w.logf("%s: the agent restarts", n.name)
	n.sees, n.known, n.ended = map[UID]Pod{}, map[UID]bool{}, map[UID]bool{}
	n.newest = Audit{}
}

// reinstall is another machine, or another disk, under the name of a node.
func (w *world) reinstall(n *node) {
	w.logf("%s: is reinstalled", n.name)
	w.powerOff(n)
	w.wipe(n)
	w.agentRestarts(n)
	clear(n.owners)
	if _, exists := w.hosts.objs[n.name]; exists && w.some(50) {
		w.logf("%s: the Node is deleted", n.name)
		w.hosts.del(n.name)
		_, n.orphan = w.said.objs[n.name]
	}
	for range w.r.IntN(6) {
		w.goOn()
	}
	w.mend(n)
}

// forgotten is a taint that was left on a node when that came back. It says that the node is off again as soon as that
// is not Ready: the operator was told to remove it, and is wrong.
func (w *world) forgotten(n *node) {
	if host := w.hosts.objs[n.name]; host.Off && n.on && !n.kubelet {
		n.lied, n.heard = true, map[UID]bool{}
	}
}

func (w *world) powerOff(n *node) {
	n.on = false
	clear(n.grants)
	n.adds, n.notes = nil, nil
	for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
		if handle := n.sandboxes[uid].handle; handle != "" {
			n.dels = append(n.dels, handle)
		}
	}
	clear(n.starting)
	clear(n.sandboxes)
	clear(n.view)
}

// mend brings a node back, and the operator takes back what was said of it. Of a node that was not off, at first only
// the agent reaches the API server, which still says so.
func (w *world) mend(n *node) {
	if n.lied && !n.agent && !w.calm {
		w.logf("%s: the agent comes back", n.name)
		n.agent = true
		return
	}
	if !n.on {
		n.on = true
		w.agentRestarts(n)
	}
	w.logf("%s: comes back", n.name)
	n.kubelet, n.agent, n.data = true, true, true
	if host, ok := w.hosts.objs[n.name]; ok && host.Off {
		if !w.calm && !w.adopts && w.rev%5 == 0 {
			w.logf("%s: the taint is forgotten", n.name)
			n.lied, n.heard = true, map[UID]bool{} // until it is Ready
			return
		}
		host.Off = false
		w.hosts.put(n.name, host)
	}
}

// declare is an operator who says that a node is off: mostly it is.
func (w *world) declare(n *node) {
	if n.on && !n.data && w.some(50) {
		n.lied, n.heard = true, map[UID]bool{} // off it is not, but nobody hears it
	} else {
		w.powerOff(n)
	}
	host, ok := w.hosts.objs[n.name]
	switch {
	case !ok:
	case w.some(50):
		w.logf("%s: the Node is deleted", n.name)
		w.hosts.del(n.name)
		w.said.del(n.name)
	default:
		w.logf("%s: the Node is out of service", n.name)
		host.Off = true
		w.hosts.put(n.name, host)
	}
}

// takeBack is a node that was off and is in service again, of which the controllers have not heard when it is cut off.
func (w *world) takeBack(n *node) {
	w.declare(n)
	w.goOn()
	w.goOn()
	stick := func(kinds ...int) {
		for _, c := range w.controllers {
			for _, kind := range kinds {
				c.stuck[kind] = true
			}
		}
	}
	stick(3)
	n.agent = true
	w.mend(n)
	n.agent = w.some(50)
	for range 4 {
		w.kubeletSyncs(n)
		w.goOn()
	}
	unseen := w.some(50)
	if unseen {
		stick(2)
	}
	for range 3 {
		w.goOn()
	}
	w.logf("%s: cut off from the API server", n.name)
	n.kubelet, n.agent = false, false
	w.forgotten(n)
	for _, key := range w.pods.keys() {
		if p := w.pods.objs[key]; p.Node == n.name && w.some(60) {
			w.logf("pod %s %s is deleted by force", p.Name, p.UID)
			w.delPod(key)
		}
	}
	for _, c := range w.controllers {
		if unseen && c.book != nil {
			w.relist(c, 2)
		}
	}
	for range 3 {
		w.goOn()
	}
}

// routes is how other nodes route to this one.
func (n *node) routes(a netip.Addr) netip.Prefix {
	k := n.name[1] - '0'
	if a.Is4() {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, k, 0}), 24)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0x44, 7: k}), 64)
}

func (w *world) scale() {
	wl := w.workloads[pickOne(w.r, slices.Sorted(maps.Keys(w.workloads)))]
	wl.scaled = w.now
	switch {
	case w.some(20):
		wl.gone = !wl.gone
	case wl.name == "db" && w.some(30):
		wl.wants = []Want{{"net", "eth0", []string{"b4", "c6"}}}
	default:
		wl.replicas = w.r.IntN(4)
	}
	w.logf("workload %s: %d pods, deleted %t", wl.name, wl.replicas, wl.gone)
}

// meddle is a user who changes pools and PodIPs.
func (w *world) meddle() {
	if w.some(60) {
		key := pickOne(w.r, w.ips.keys())
		is, ok := w.ips.objs[key]
		switch {
		case !ok:
		case w.some(50):
			w.logf("PodIP %s is deleted by a user", key)
			w.deleteIP(is)
		default:
			w.logf("PodIP %s is released by a user", key)
			is.Release, is.Version = true, w.version()
			w.ips.put(key, is)
		}
		return
	}
	name := pickOne(w.r, []string{"a4", "b4", "c6"})
	is, ok := w.pools.objs[name]
	if !ok {
		w.logf("pool %s is made again", name)
		spec := map[string]Spec{
			"a4": {Mode: w.mode(), Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.2-10.6.0.5"}},
			"b4": {Mode: w.mode(), Subnet: "10.7.0.0/16", Addresses: []string{"10.7.0.1-10.7.0.3"}},
			"c6": {Mode: w.mode(), Subnet: "fd00::/64"},
		}
		w.pools.put(name, modelPool{Version: w.version(), Spec: spec[name]})
		return
	}
	switch w.r.IntN(5) {
	case 0:
		is.Disabled = !is.Disabled
	case 1:
		is.Spec.ExcludedAddresses = []string{
			map[string]string{"a4": "10.6.0.1-10.6.0.2", "b4": "10.7.0.2", "c6": "fd00::1"}[name]}
	case 2:
		is.Spec.ExcludedAddresses = nil
	case 3:
		is.Only = pickOne(w.r, []string{"", "", "default", "other"})
	case 4:
		if !is.Held {
			w.pools.del(name)
			w.logf("pool %s is deleted", name)
			return
		}
		is.Deleting = true
	}
	is.Version = w.version()
	w.pools.put(name, is)
	w.logf("pool %s is changed: %+v", name, is)
}

func (w *world) backUp() {
	if w.adopts { // after a restore it is the operator's to adopt again
		return
	}
	if w.backup != nil && w.some(60) {
		return
	}
	w.logf("a backup is made")
	b := w.api
	b.ips.objs, b.pods.objs, b.pools.objs = maps.Clone(b.ips.objs), maps.Clone(b.pods.objs), maps.Clone(b.pools.objs)
	b.hosts.objs, b.said.objs = maps.Clone(b.hosts.objs), maps.Clone(b.said.objs)
	b.blocks = maps.Clone(b.blocks)
	w.backup, w.backupAt = &b, w.now
}

// restoreHastily restores a backup that is seconds old, within seconds, and often once more. The controllers that run
// have set the mark since the backup, and none restarts before the restore was noticed: else it would not be.
func (w *world) restoreHastily() {
	w.backup = nil
	w.backUp()
	w.scale()
	w.scale()
	for range 2 + w.r.IntN(6) {
		w.now = w.now.Add(time.Second)
		w.goOn()
	}
	for range 2 {
		for _, c := range w.controllers {
			if c.book != nil && !c.book.Stale() && w.apply(c.name, c.book.Lead(w.audit, w.Now())) == nil {
				c.book.SetAudit(w.audit)
			}
		}
	}
	for range 1 + w.r.IntN(2) {
		w.restoreWithin(time.Second)
		for range w.r.IntN(4) {
			w.goOn()
		}
	}
}

// restoreWithin restores within that time, if that will be noticed by what the controllers have seen.
func (w *world) restoreWithin(d time.Duration) {
	for _, c := range w.controllers {
		if c.book == nil || !w.backup.audit.older(c.book.audit) {
			w.restore()
			return
		}
	}
	w.hasty++
	w.unnoticed = w.backup.audit.Term
	w.restoreAfter(d)
}

// restore brings the API server back from the backup. That takes a while, and what is under way is over.
func (w *world) restore() { w.restoreAfter(MarkLost + 1) }

func (w *world) restoreAfter(d time.Duration) {
	w.restored = true
	if w.backup == nil {
		return
	}
	w.now = w.now.Add(d)
	if w.clocks { // in a backup of that age, the mark of one leader may look fresh to another one
		w.now = w.now.Add(Skew)
		w.setClocks()
	}
	w.logf("the API server is restored from the backup of %s", w.backupAt.Format("15:04:05"))
	w.inflight = nil
	clear(w.told)
	for _, p := range w.backup.pods.objs {
		if p.Assigned != nil {
			w.told[p.UID] = true
		}
	}
	for _, p := range w.backup.ips.objs {
		w.told[p.PodUID] = true
	}
	w.lost = map[UID]bool{}
	exists := map[UID]bool{}
	for _, p := range w.backup.pods.objs {
		exists[p.UID] = p.Assigned != nil
	}
	for _, n := range w.nodes {
		if host, known := w.backup.hosts.objs[n.name]; !known || host.Off {
			// It joined, or is in service, since the backup, by which it is off.
			n.lied, n.heard = n.on, map[UID]bool{}
		}
		for uid := range n.sandboxes {
			w.lost[uid] = !exists[uid]
		}
		for uid := range n.view {
			w.lost[uid] = !exists[uid]
		}
	}
	w.ips.back(w.backup.ips)
	w.pods.back(w.backup.pods)
	w.pools.back(w.backup.pools)
	w.hosts.back(w.backup.hosts)
	w.said.back(w.backup.said)
	w.blocks = maps.Clone(w.backup.blocks)
	w.audit = w.backup.audit
	w.restores++
	w.rev += 1000 // etcdutl snapshot restore --bump-revision
}

// mostSkew is how far the clock of a controller is ahead or behind, if it is not plainly wrong.
const mostSkew = Skew / 4

// setClocks has the clocks of controllers agree, as far as they ever do.
func (w *world) setClocks() {
	for _, c := range w.controllers {
		c.clock = time.Duration(w.r.Int64N(int64(2*mostSkew))) - mostSkew
	}
}

// jump has the clock of a controller be wrong. One that is behind by about as much as a backup is old takes its mark
// for fresh, if it has just begun: that is excused, by none being behind so little but right after it was set.
func (w *world) jump() {
	c := pickOne(w.r, w.controllers)
	switch w.r.IntN(3) {
	case 0:
		w.setClocks()
	case 1:
		c.clock = 10*time.Minute + time.Duration(w.r.Int64N(int64(time.Hour)))
		w.ahead = max(w.ahead, c.clock)
	case 2:
		c.clock = -time.Hour - time.Duration(w.r.Int64N(int64(time.Hour)))
	}
	w.logf("the clock of %s is ahead by %s", c.name, c.clock)
}

// settle heals everything, and demands that nothing is left without a reason.
func (w *world) settle() {
	w.logf("--- everything is healed")
	w.calm = true
	w.foreignersGo()
	for _, n := range w.nodes {
		w.mend(n)
	}
	if w.liar != nil { // nothing that it said is left but in PodIPs
		w.said.del(w.liar.name)
		for uid := range w.liar.sandboxes {
			w.unseen[uid] = true
		}
		w.liar, w.lied = nil, w.liar.name
	}
	for _, c := range w.controllers {
		c.clock = 0
	}
	for _, f := range w.inflight {
		f()
	}
	w.inflight = nil
	w.rest(400)
	// What was noted by a clock that was ahead, such as when nodes were asked, counts once that time has come.
	if w.ahead > 0 && w.bad == "" {
		w.now = w.now.Add(w.ahead)
		w.rest(400)
	}
	if w.bad == "" {
		w.explained()
	}
}

// rest has everything go its way until nothing changes any more.
func (w *world) rest(most int) {
	var was string
	enough := 4
	if w.calico != nil { // what waits for time
		enough = int((addGivenUp + 4*time.Minute) / 40e9)
	}
	for quiet, round := 0, 0; quiet < enough; round++ {
		w.now = w.now.Add(40e9)
		for _, n := range w.nodes {
			w.kubeletSyncs(n)
		}
		w.workloadsAct()
		w.schedule()
		for _, n := range w.nodes {
			w.kubeletActs(n)
			w.agentActs(n)
			if w.calico != nil {
				w.calicoGoesOn(n)
				w.calicoNotes(n)
				w.renews(n)
			}
			w.oracle()
		}
		for _, c := range w.controllers {
			w.sweep(c)
			w.oracle()
		}
		if w.bad != "" {
			return
		}
		if is := w.fingerprint(); is == was {
			quiet++
		} else {
			quiet, was = 0, is
		}
		if round > most {
			w.failf("it does not come to rest")
			return
		}
	}
}

// sweep is a controller that reviews every address, and places the pods that were woken: a pod that could go on and is
// not among them waits at the end (see explained).
func (w *world) sweep(c *controller) {
	w.skew = c.clock
	defer func() { w.skew = 0 }()
	if c.book == nil || c.book.Stale() {
		w.turn(c)
		return
	}
	finish := func() {
		for len(c.jobs) > 0 {
			w.work(c, 0)
		}
	}
	finish()
	for kind := range 5 {
		w.watch(c, kind, 10_000)
	}
	do := func(plan Plan, pod string) {
		w.contacts(c, plan.Contact)
		if plan.Writes != nil {
			c.jobs = append(c.jobs, &job{"", pod, plan.Writes, w.now})
			finish()
			for kind := range 5 {
				w.watch(c, kind, 10_000)
			}
		}
	}
	do(Plan{Writes: []Write{c.book.Lead(w.audit, w.Now())}}, "")
	do(c.book.Recall(w.Now()), "")
	w.scan(c)
	w.reserves(c)
	for _, a := range c.book.Addresses() {
		w.observe(c, a)
		do(c.book.Review(a, w.Now(), w.wanted), "")
	}
	for range 10 { // a pod that waits for something else now lets those behind it go on
		w.drain(c)
		due := c.due
		c.due = map[string]bool{}
		for _, uid := range slices.Sorted(maps.Keys(c.book.pods)) {
			if p := c.book.pods[uid]; p != nil && due[p.Name] {
				do(c.book.Place(uid, w.Now()), p.Name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.book.pools)) {
		do(c.book.ReviewPool(name), "")
	}
}

// fingerprint is what there is, without times and versions.
func (w *world) fingerprint() string {
	var s strings.Builder
	say := func(words ...string) {
		for _, word := range words {
			s.WriteString(word)
			s.WriteByte(' ')
		}
	}
	for _, key := range w.ips.keys() {
		p := w.ips.objs[key]
		say(key, string(p.PodUID), string(p.Phase), string(p.StatusUID), strconv.FormatBool(p.Deleting),
			strconv.FormatBool(p.Release), p.Node, p.Conflict)
	}
	for _, key := range w.pods.keys() {
		p := w.pods.objs[key]
		say(string(p.UID), p.Node, strconv.FormatBool(p.Gated), strconv.FormatBool(p.Ending))
	}
	for _, n := range w.nodes {
		say(n.name)
		for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
			say(string(uid))
		}
	}
	say(w.pools.keys()...)
	say(strconv.FormatBool(w.audit.Recalling), strconv.FormatInt(w.audit.Epoch, 10))
	return s.String()
}

// explained demands that every PodIP has a reason, and every pod that waits. Pods that have the same address by what a
// backup said are for the operator, who is told to delete all but one. Such pods need not run.
func (w *world) explained() {
	pods := map[UID]Pod{}
	for _, p := range w.pods.objs {
		pods[p.UID] = p
	}
	if w.audit.Recalling {
		w.failf("nodes are still asked")
	}
	for _, key := range w.ips.keys() {
		p := w.ips.objs[key]
		pod, exists := pods[p.PodUID]
		switch {
		case exists && !pod.Terminal && pod.has(p.Addr):
		case exists && !pod.Terminal && (pod.Gated || pod.Assigned == nil): // it waits, see below
		case exists && !pod.Terminal && w.restores > 0 && p.boundOn(pod.Node):
			// It runs with what it was told before a restore. Once it ends, the address is free.
		case exists && pod.Node == w.lied && p.boundOn(w.lied): // the agent has lied that the pod has this one, too
		case w.calico != nil && exists: // a pod that has ended has its address until it is deleted, too
		case w.homonym(p): // Calico keeps the allocation for a pod of the name that has no address, as there is none
		case exists && !pod.Terminal || p.Deleting || p.Release || !p.gone():
			w.failf("PodIP %s has no reason: %+v; %+v", key, p, w.controllers[0].book.Review(p.Addr, w.now, w.wanted))
		case p.Keep.For > 0 && w.now.Before(p.Since.Add(p.Keep.For)):
		case p.Keep.WhileOwned && w.wanted(&p) <= Wants:
		default:
			w.failf("PodIP %s has no reason any more: %+v", key, p)
		}
	}
	for _, key := range w.pods.keys() {
		p := w.pods.objs[key]
		if p.Terminal {
			continue
		}
		if !p.Gated && p.Assigned != nil {
			n := w.nodes[slices.IndexFunc(w.nodes, func(n *node) bool { return n.name == p.Node })]
			if s := n.sandboxes[p.UID]; (s == nil || !s.up) && p.Node != w.lied && !w.hidden(n, p) && !w.blocked(p) {
				w.failf("pod %s %s does not run", key, p.UID)
			}
			for _, a := range p.Assigned {
				ip := w.ips.objs[a.Prefix.Addr().String()]
				if ip.PodUID != p.UID && p.Node != w.lied {
					w.failf("pod %s %s has %s, which is not its own", key, p.UID, a.Prefix.Addr())
				}
				if ip.Mode == Routed && (ip.StatusUID != p.UID || ip.PodCIDR != n.routes(ip.Addr)) {
					w.failf("pod %s %s is on %s, and nodes route by %+v", key, p.UID, n.name, ip)
				}
			}
			continue
		}
		if !p.Gated && p.Wants == nil { // it asks for none
			continue
		}
		plan := w.controllers[0].book.Place(p.UID, w.now)
		if w.known > 0 && len(plan.Addrs) > 0 {
			continue
		}
		if w.unseen[p.UID] && p.Node == w.lied && len(plan.Addrs) > 0 { // its own agent hid what it runs with
			continue
		}
		if plan.Writes != nil || plan.Reason == "" || !w.mustWait(p) {
			w.failf("pod %s %s waits without need: %q, %+v", key, p.UID, plan.Reason, plan.Writes)
		}
	}
}

// hidden reports whether a pod does not start because a pod of the node whose agent lied has one of its addresses: when
// all nodes were asked, that agent said that it had another one.
func (w *world) hidden(n *node, p Pod) bool {
	for _, s := range n.sandboxes {
		if w.unseen[s.uid] && slices.ContainsFunc(s.has, func(a Address) bool { return p.has(a.Prefix.Addr()) }) {
			return true
		}
	}
	return false
}

// mustWait reports whether there is really no address for a pod: of one family all pools refuse it or are full.
func (w *world) mustWait(p Pod) bool {
	for _, want := range p.Wants {
		open := map[bool]bool{} // by family: some pool has one
		for _, name := range want.Pools {
			is, ok := w.pools.objs[name]
			if !ok {
				return true
			}
			r, err := Parse(is.Spec)
			if err != nil {
				return true
			}
			v4 := r.Subnet.Addr().Is4()
			free := r.Set.Count()
			for _, ip := range w.ips.objs {
				if r.Set.Contains(ip.Addr) {
					free--
				}
			}
			for a := range w.blocks { // of pods without a PodIP
				if _, ours := w.ips.objs[a.String()]; !ours && r.Set.Contains(a) {
					free--
				}
			}
			open[v4] = open[v4] || free > 0 && !is.Disabled && !is.Deleting && (is.Only == "" || is.Only == "default")
		}
		for _, one := range open {
			if !one {
				return true
			}
		}
	}
	return false
}

var _ Live = live{}
