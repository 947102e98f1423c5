package pool

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"
)

// Wanted is whether the workload of an address wants its pod, as far as that is known.
type Wanted int

// What is known of a workload. Unknown is never a reason to release an address.
const (
	Unknown   Wanted = iota
	Wants            // it wants the pod
	Scaled           // it is scaled down below the pod
	Abandoned        // it is deleted, and no pod of it is left that another one could adopt
)

// Ends returns when an address is free whose pod has been gone since a time: whether it is by now, and otherwise what
// it is kept for, and until when, the zero time if there is no end.
func (k Keep) Ends(since, now time.Time, wanted Wanted) (free bool, why string, until time.Time) {
	switch {
	case wanted == Scaled && k.Scaled:
		return true, "its workload is scaled down and no longer wants the pod", time.Time{}
	case wanted == Abandoned && k.Deleted:
		return true, "its workload is deleted", time.Time{}
	case k.WhileOwned && k.For == 0:
		return false, "it is kept while owned", time.Time{}
	case k.WhileOwned:
		until = since.Add(k.For)
		return !now.Before(until), fmt.Sprintf("it is kept while owned, for at most %s", k.For), until
	case k.For > 0:
		until = since.Add(k.For)
		return !now.Before(until), fmt.Sprintf("it is kept for %s", k.For), until
	}
	return true, "it has no retention", time.Time{}
}

// Review reviews one address: it makes a PodIP again that a pod lacks, ends a pod that was told of another pod's
// address, and ends a PodIP whose reason is gone. A PodIP that stays and has lost its finalizer, as by an
// uninstallation, gets it back. wanted is asked only if that matters.
func (b *Book) Review(a netip.Addr, now time.Time, wanted func(*PodIP) Wanted) Plan {
	plan := recall{&b.facts, now}.missing()
	if plan.Reason == "" {
		d := reviewing{facts: &b.facts, addr: a, ip: b.ips[a], now: now, wanted: wanted}
		if d.ip != nil {
			d.pod = b.pods[d.ip.PodUID]
			b.noteFreed(d.ip, now)
		}
		plan = d.plan()
		if p := d.ip; p != nil && plan.Writes == nil && !p.Held && !p.Deleting {
			again := *p
			again.Held = true
			plan.Writes = []Write{UpdateIP{PodIP: again}}
		}
	}
	b.noteSilence(a, plan, now)
	return plan
}

// reviewing is the decision about one address.
type reviewing struct {
	*facts
	addr   netip.Addr
	ip     *PodIP // nil if the address is unassigned
	pod    *Pod   // that the address was given to, nil if it is unknown
	now    time.Time
	wanted func(*PodIP) Wanted
}

func (d *reviewing) plan() Plan {
	p, pod, teller := d.ip, d.pod, d.teller()
	switch {
	case p == nil && teller == nil:
		return Plan{}
	case p == nil:
		return Plan{Writes: []Write{CreateIP{PodIP: teller.made(*teller.address(d.addr)), If: []Check{{There: teller}}}}}
	}
	if d.misnamed() {
		return d.correct()
	}
	switch {
	case pod.alive() && p.gone() && pod.Node != "": // the pod comes from a backup
		return Plan{Writes: []Write{endPod(pod)}, Reason: fmt.Sprintf(
			"pod %s/%s ended on node %s before the API server's data were restored", p.Namespace, p.PodName, p.Node)}
	case pod.alive() && p.conflicts() && pod.Node == p.Node:
		return Plan{Reason: fmt.Sprintf("another machine on the link of node %s has it, with the MAC address %s", p.Node,
			p.Conflict), Remedy: "find that machine on the link and stop it; or exclude the address from the pool, delete the " +
			"PodIP, then the pod"}
	case teller != nil:
		return d.endTeller(teller)
	}
	switch {
	case p.Mode != Calico && p.adopted() && p.StatusUID != p.PodUID:
		return d.nameAdopted()
	case p.unconfirmed():
		return d.confirm()
	case d.surplus():
		return d.end("its pod has other addresses", nil)
	case pod.alive() && p.Mode == Calico && pod.has(p.Addr) && pod.ReportedIP.IsValid() && pod.Noted &&
		!p.boundOn(pod.Node):
		return d.reported(Bound)
	case pod.alive() && p.Mode == Calico && pod.has(p.Addr) && !pod.Noted && p.boundOn(pod.Node):
		return d.reported(Allocated)
	case p.Mode == Calico && pod.starting():
		return d.unblock()
	case pod.alive():
		return Plan{}
	}
	return d.fenced()
}

// fenced is what becomes of an address whose pod has ended: nothing before the fence is passed.
func (d *reviewing) fenced() Plan {
	p := d.ip
	f := d.Fence(p, d.now)
	if f.Verdict != Yes {
		return d.awaited(f)
	}
	switch {
	case p.Deleting, p.Release:
		return d.end("it was released", f.If)
	case d.superseded():
		return d.end("its pod has other addresses", f.If)
	}
	wanted, since, noted := Unknown, p.Since, p.gone() && !p.Since.IsZero()
	if p.Keep.Scaled || p.Keep.Deleted {
		wanted = d.wanted(p)
	}
	if !noted {
		since = d.now
	}
	free, why, until := p.Keep.Ends(since, d.now, wanted)
	switch {
	case free:
		return d.end(why, f.If)
	case noted:
		return Plan{Reason: why, Until: until}
	}
	if end := d.ends[p.PodUID]; end.freed(p.Addr) && d.now.Sub(end.At) < takeoverWithin {
		return Plan{Reason: why, Until: end.At.Add(takeoverWithin)}
	}
	again := *p // what proves it now may be gone later, and the retention begins
	again.Phase, again.StatusUID, again.Since, again.Node = Retained, p.PodUID, d.now, d.nodeOf()
	again.PodCIDR = netip.Prefix{}
	return Plan{Reason: why, Writes: []Write{StatusIP{PodIP: again, If: f.If}}}
}

// reported writes of an address of mode Calico what agents report of others: that its pod has it, or that its sandbox
// is being made again, so that an ADD may be under way.
func (d *reviewing) reported(phase Phase) Plan {
	again := *d.ip
	again.Phase, again.StatusUID, again.Node, again.Since = phase, d.pod.UID, d.pod.Node, d.now
	return Plan{Writes: []Write{StatusIP{PodIP: again}}}
}

// unblock frees the allocation of a pod that cannot start because of it. If the API server goes away after Calico's
// plugin has allocated the address and before it has noted that on the pod, no DEL may ever come: containerd forgets a
// sandbox whose ADD has failed though its DEL has failed, too. Each later ADD finds the address taken, and Calico's
// garbage collection frees none of a pod that exists. The address stays the pod's, and reserved.
func (d *reviewing) unblock() Plan {
	p, pod, a := d.ip, d.pod, d.allocations[d.addr]
	first, ended := pod.Created.Add(startsWithin), a.Since.Add(addGivenUp)
	switch {
	case d.now.Before(first):
		return Plan{Until: first}
	case a.Handle == "" || !a.isOf(p) || a.Node != pod.Node || !d.nodes[pod.Node].settled(d.now):
		return Plan{Until: d.now.Add(startsWithin)}
	case d.now.Before(ended):
		return Plan{Until: ended}
	case !d.situation(p, d.now).contacted(pod.Node, ended): // it may be what keeps the ADD from its end
		return Plan{Contact: []string{pod.Node}, Until: d.now.Add(contactEvery)}
	}
	known := d.audit
	return Plan{Writes: []Write{FreeAllocation{Addr: d.addr, Allocation: a, If: []Check{{Since: &known,
		Starting: &Pod{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Node: pod.Node}}}}}}
}

// confirm decides about an address that was imported from Calico with the pod that had it. Before it was reserved, that
// pod may have ended, and any other one may have got it, which need not be known here. So unless the pod is there and
// has it by what Calico's IPAM has said since, the address is Calico's as it was: it needs no fence to go back.
func (d *reviewing) confirm() Plan {
	p, pod := d.ip, d.pod
	a := d.allocations[d.addr]
	switch {
	case p.Deleting, p.Release:
		return d.end("it was released", nil)
	case pod == nil:
		return d.end("its pod ended before the import was complete", d.situation(p, d.now).podGone())
	case !a.Reserved || d.now.Sub(a.At) > observedGood:
		return Plan{Reason: "it is being imported: it is not known yet that no other pod can get it"}
	case !a.isOf(p) || a.Node != pod.Node:
		return d.end("by Calico's IPAM its pod does not have it", nil)
	}
	return d.reported(Bound)
}

// awaited is what to do about an address whose pod may still have it, by what the fence says.
func (d *reviewing) awaited(f Finding) Plan {
	plan := Plan{Reason: f.Reason, Remedy: f.Remedy, Until: f.Until, Contact: f.Contact}
	if f.Frees {
		plan.Writes = []Write{FreeAllocation{Addr: d.addr, Allocation: d.allocations[d.addr], If: f.If}}
	}
	return plan
}

// misnamed reports whether the status names another node for the pod than the one that it has by the cluster: an agent
// has lied, or the pod comes from a backup.
func (d *reviewing) misnamed() bool {
	p := d.ip
	node, known := d.situation(p, d.now).known()
	said := p.saidOn()
	return known && node != "" && said != "" && said != node
}

// correct writes back a status that another node than the pod's has written. The pod is bound once, so that this is a
// lie. A pod from before the epoch may have been bound to two nodes, if a restore has made the cluster forget the first
// one, which the PodIP still names: such a pod cannot start, and is ended.
func (d *reviewing) correct() Plan {
	p, pod := d.ip, d.pod
	end := d.ends[p.PodUID]
	if p.Mode != Calico && (pod != nil && d.audit.predates(pod) || pod == nil && end.Predates) {
		plan := Plan{Reason: fmt.Sprintf("pod %s/%s had it on node %s before the API server's data were restored",
			p.Namespace, p.PodName, p.Node)}
		if pod.alive() {
			plan.Writes = []Write{endPod(pod)}
			return plan
		}
		return d.fenced()
	}
	again := *p
	again.Phase, again.StatusUID, again.Node, again.Since, again.Conflict = Allocated, "", "", d.now, ""
	if again.PodCIDR = (netip.Prefix{}); p.Mode == Calico {
		again.StatusUID = p.PodUID
		again.Node, _ = d.situation(p, d.now).known()
	}
	return Plan{Writes: []Write{StatusIP{PodIP: again}}, Reason: fmt.Sprintf(
		"node %s named itself for pod %s/%s, which is on another node", p.Node, p.Namespace, p.PodName)}
}

// nameAdopted names the node on which a pod has an address that was adopted: its agent ends that.
func (d *reviewing) nameAdopted() Plan {
	again := *d.ip
	node, _ := d.situation(d.ip, d.now).known()
	again.Phase, again.StatusUID, again.Node, again.Since = Bound, again.PodUID, cmp.Or(node, again.AdoptedOn), d.now
	return Plan{Writes: []Write{StatusIP{PodIP: again}}}
}

// endTeller ends a pod that was told of an address which is another pod's by the PodIP: it cannot start.
func (d *reviewing) endTeller(teller *Pod) Plan {
	plan := Plan{Reason: fmt.Sprintf("pod %s/%s was assigned it, too, and cannot start", teller.Namespace, teller.Name)}
	if teller.ReportedIP == d.addr {
		plan.Reason = fmt.Sprintf("pod %s/%s has it, too", teller.Namespace, teller.Name)
		plan.Remedy = "delete all pods but one that have it"
		return plan
	}
	end := endPod(teller)
	known := d.audit // and the claim for it may be newer than what is known
	end.If = []Check{{There: teller, Others: d.addr}, {Since: &known}}
	plan.Writes = []Write{end}
	return plan
}

// nodeOf returns the node that the pod of an address had, as far as that is known. If it never had one, the address is
// where an earlier pod left it.
func (d *reviewing) nodeOf() string {
	p, end := d.ip, d.ends[d.ip.PodUID]
	if p.StatusUID == p.PodUID || end.Node == "" || p.Mode != Calico {
		return cmp.Or(p.namedNode(), p.Node)
	}
	return end.Node
}

// endPod ends a pod that is still as it is known.
func endPod(pod *Pod) EndPod {
	return EndPod{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name, If: []Check{{There: pod}}}
}

// teller returns the oldest pod that was told to have an address which is not its own by the PodIP, nil if there is
// none. Pods that are on their way out do not count: their address may be another one's by now.
func (d *reviewing) teller() (oldest *Pod) {
	for uid := range d.told[d.addr] {
		pod := d.pods[uid]
		if pod.Gated || !pod.alive() || pod == d.pod {
			continue
		}
		if oldest == nil || older(pod, oldest) < 0 {
			oldest = pod
		}
	}
	return oldest
}

// made is the PodIP of an address that a pod has.
func (p *Pod) made(a Address) PodIP {
	return PodIP{
		Addr: a.Prefix.Addr(), Pool: a.Pool, Mode: a.Mode, Namespace: p.Namespace, PodName: p.Name, Identity: p.Identity,
		PodUID: p.UID, Network: a.Network, Interface: a.Interface, Keep: p.Keep, Workload: p.Workload, Held: true,
	}
}

// surplus reports whether the pod of an address was ungated without being told of it. It never will be.
func (d *reviewing) surplus() bool {
	p, pod := d.ip, d.pod
	if pod == nil || p.adopted() {
		return false
	}
	if pod.Assigned == nil && !pod.alive() { // it never will be told of any
		for _, node := range d.holders(pod.UID) {
			if report := d.reports[node]; report.has(pod.UID, p.Addr) {
				return false
			}
		}
		return p.StatusUID == "" // what an earlier pod had is kept, or not, as that one said
	}
	return pod.Assigned != nil && !pod.Gated && !pod.has(p.Addr) && !p.boundOn(pod.Node)
}

// superseded reports whether a later pod of the same name has another address in the place of this one.
func (d *reviewing) superseded() bool {
	p := d.ip
	pod := d.pods[d.named[Owner{Namespace: p.Namespace, Pod: p.PodName}]]
	if p.Identity != "" || pod == nil || pod.Gated || pod.UID == p.PodUID || pod.Created.Before(p.Created) {
		return false
	}
	return pod.Assigned != nil && !pod.has(p.Addr)
}

// end frees an address, in two steps if it is held: it is deleted first, so that no pod can claim it any more.
func (d *reviewing) end(why string, checks []Check) Plan {
	p := d.ip
	if p.Deleting {
		again := *p
		again.Held = false
		return Plan{Reason: why, Writes: []Write{UpdateIP{PodIP: again, If: checks}}}
	}
	return Plan{Reason: why, Writes: []Write{DeleteIP{PodIP: *p, If: checks}}}
}

// ReviewPool takes the finalizer off a pool that is being deleted and has no PodIPs. Until then its pods keep their
// addresses, also when they are created again: a deletion cannot be taken back. A pool that has PodIPs and has lost its
// finalizer gets it back.
func (b *Book) ReviewPool(name string) Plan {
	s := b.pools[name]
	switch {
	case s != nil && !s.Deleting && !s.Held && len(s.in)+len(s.out) > 0:
		return Plan{Writes: []Write{HoldPool{Name: name, Version: s.Version, Held: true}}}
	case s == nil || !s.Deleting || !s.Held:
		return Plan{}
	case len(s.in)+len(s.out) > 0:
		return Plan{Reason: fmt.Sprintf("%d addresses of it are in use or kept", len(s.in)+len(s.out))}
	}
	return Plan{Writes: []Write{HoldPool{Name: name, Version: s.Version}}}
}
