package pool

import (
	"fmt"
	"net/netip"
	"slices"
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

// Review reviews one address: it makes a PodIP again that a pod lacks, quarantines a PodIP that several pods have, and
// ends a PodIP whose reason is gone. A PodIP that stays and has lost its finalizer, as by an uninstallation, gets it
// back. wanted is asked only if that matters.
func (b *Book) Review(a netip.Addr, now time.Time, wanted func(*PodIP) Wanted) Plan {
	plan := recall{&b.facts, now}.missing()
	waits := plan.Reason != ""
	if !waits {
		plan = b.review(a, now, wanted)
	}
	b.noteSilence(a, plan, now)
	if p := b.ips[a]; p != nil && !waits && plan.Writes == nil && !p.Held && !p.Deleting {
		again := *p
		again.Held = true
		plan.Writes = []Write{UpdateIP{PodIP: again}}
	}
	return plan
}

func (b *Book) review(a netip.Addr, now time.Time, wanted func(*PodIP) Wanted) Plan {
	p := b.ips[a]
	teller := b.teller(a)
	switch {
	case p == nil && teller == nil:
		return Plan{}
	case p == nil:
		return b.remake(a, teller)
	}
	pod := b.pods[p.PodUID]
	alive := pod != nil && !pod.Ending && !pod.Over
	if again, wrong := b.corrected(p, now); wrong {
		return Plan{Reason: fmt.Sprintf("node %s reported the end of pod %s/%s, which is on node %s", p.Node, p.Namespace,
			p.PodName,
			again.Node), Writes: []Write{StatusIP{PodIP: again}}}
	}
	switch {
	case alive && p.gone() && pod.Node != "": // the pod comes from a backup
		return Plan{Reason: fmt.Sprintf("pod %s/%s ended on node %s before the API server's data were restored",
			p.Namespace, p.PodName, p.Node),
			Writes: []Write{endPod(pod)}}
	case alive && p.conflicts() && pod.Node == p.Node:
		return b.reviewConflict(p, pod, now)
	case p.Quarantine.Reason != "":
		return b.reviewQuarantined(p, now)
	case teller != nil:
		again := *p
		again.Quarantine = Quarantine{Since: now, Reason: fmt.Sprintf("pod %s/%s has it, too", teller.Namespace, teller.Name)}
		return Plan{Writes: []Write{UpdateIP{PodIP: again, If: []Check{{There: teller}}}}}
	}
	switch {
	case pod != nil && b.surplus(pod, p):
		return b.end(p, "its pod has other addresses", nil)
	case alive:
		return Plan{}
	}
	f := b.Fence(p, now)
	if f.Verdict != Yes {
		plan := Plan{Reason: f.Reason, Remedy: f.Remedy}
		if f.Ask {
			plan.Writes = []Write{b.roll.askFor(p, now)}
		}
		return plan
	}
	noted := p.gone() && !p.Since.IsZero()
	var why string
	var until time.Time
	switch pool := b.pools[p.Pool]; {
	case p.Deleting, p.Release:
		return b.end(p, "it was released", f.If)
	case pool != nil && pool.Deleting:
		return b.end(p, "its pool is being deleted", f.If)
	case b.superseded(p):
		return b.end(p, "its pod has other addresses", f.If)
	default:
		ask := Unknown
		if p.Keep.Scaled || p.Keep.Deleted {
			ask = wanted(p)
		}
		since := p.Since
		if !noted {
			since = now
		}
		var free bool
		if free, why, until = p.Keep.Ends(since, now, ask); free {
			return b.end(p, why, f.If)
		}
	}
	if !noted { // what proves it now may be gone later, and the retention begins
		again := *p
		again.Phase, again.Of, again.Since, again.Node = Retained, p.PodUID, now, b.nodeOf(p)
		again.PodCIDR = netip.Prefix{}
		return Plan{Reason: why, Writes: []Write{StatusIP{PodIP: again, If: f.If}}}
	}
	return Plan{Reason: why, Until: until}
}

// quarantinedFor is how long no pod gets an address that another machine has.
const quarantinedFor = time.Hour

// reviewConflict decides about a pod that cannot start, because another machine has its address. A pod that had the
// address before, and waits for its own, waits until that machine has it no more. Any other is ended, so that the pod
// which replaces it gets another address. The ended pod never ran, but it was told of the address. From then on the
// address is kept for no pod, and is free only past the fence, as any other. A machine that answers for too many
// addresses ends no pod, and the pods of one workload are ended ever more slowly.
func (b *Book) reviewConflict(p *PodIP, pod *Pod, now time.Time) Plan {
	why := fmt.Sprintf("another machine on the link of node %s has it, with the MAC address %s", p.Node, p.Conflict)
	kept := pod.kept(p.Addr)
	switch {
	case kept && pod.Identity == "" && !pod.Fresh:
		return Plan{Reason: why, Remedy: fmt.Sprintf("take the address from that machine: pod %s/%s keeps it, and waits",
			p.Namespace, p.PodName)}
	case pod.Workload == (Workload{}):
		return Plan{Reason: why, Remedy: fmt.Sprintf("take the address from that machine, or delete pod %s/%s and create it "+
			"again: no controller does", p.Namespace, p.PodName)}
	}
	plan := Plan{Reason: why}
	if p.Quarantine.Reason == "" {
		if too := b.spares(p.Pool, p.Conflict); too != "" {
			return Plan{Reason: why + ", " + too, Remedy: heldRemedy}
		}
		if at := b.endsAt(pod.Workload, p.Addr); now.Before(at) {
			return Plan{Reason: why + "; another pod of its workload was ended for that shortly before", Until: at}
		}
		again := *p
		again.Quarantine = Quarantine{Reason: why, MAC: p.Conflict, Since: now, Until: now.Add(quarantinedFor)}
		if !kept {
			again.Keep = Keep{}
		}
		plan.Writes = append(plan.Writes, UpdateIP{PodIP: again})
	}
	plan.Writes = append(plan.Writes,
		endPod(pod))
	return plan
}

// reviewQuarantined ends the quarantine of an address once every node has said, since it began, which pods have the
// address. If no pod has it, it is its identity's again; if one pod has it, it is that pod's.
func (b *Book) reviewQuarantined(p *PodIP, now time.Time) Plan {
	why := "it is quarantined: " + p.Quarantine.Reason
	if now.Before(p.Quarantine.Until) {
		return Plan{Reason: why, Until: p.Quarantine.Until}
	}
	about := UID(p.Addr.String())
	asked := b.roll.Asked[about]
	if since := p.Quarantine.Since; asked <= since.UnixNano() {
		if now.Before(since) { // by a clock that is ahead
			now = since
		}
		return Plan{Reason: why, Writes: []Write{b.roll.ask(about, now.Add(time.Microsecond))}}
	}
	all := everyone(Situation{Now: now, Nodes: b.nodes, Asked: asked, Agent: b.hadAgent}, why,
		func(node string) bool { return b.answers[node].Round >= asked || b.apart(p, node) })
	if all.Verdict != Yes {
		return Plan{Reason: all.Reason, Remedy: all.Remedy}
	}
	heirs := map[UID]bool{}
	for node, answer := range b.answers {
		for _, h := range answer.Held {
			if h.Addr == p.Addr && b.heeds(node, h.UID) {
				heirs[h.UID] = true
			}
		}
	}
	for uid := range b.told[p.Addr] {
		if pod := b.pods[uid]; !pod.Gated && !pod.Over {
			heirs[uid] = true
		}
	}
	if p.gone() {
		delete(heirs, p.PodUID)
	}
	again, checks := *p, all.If
	again.Quarantine = Quarantine{}
	if !heirs[p.PodUID] || len(heirs) > 1 {
		f := b.Fence(p, now)
		switch pod := b.pods[p.PodUID]; {
		case pod != nil && b.surplus(pod, p):
			f = Finding{}
		case f.Verdict != Yes && len(heirs) == 0 && pod != nil && pod.Gated: // claimed, and not told
		case pod != nil && pod.Gated && !pod.Ending && (b.teller(p.Addr) != nil || len(heirs) == 1 && b.roll.predates(pod)):
			// Its claim was made on old news.
			why = fmt.Sprintf("%s; it was claimed for pod %s/%s, which has not started", why, pod.Namespace, pod.Name)
			return Plan{Reason: why,
				Writes: []Write{endPod(pod)}}
		case pod != nil && !pod.Ending && !pod.Over && len(heirs) > 0:
			return Plan{Reason: why, Remedy: "delete all pods but one that have it"}
		case f.Verdict != Yes && f.Ask:
			return Plan{Reason: why + "; " + f.Reason, Remedy: f.Remedy, Writes: []Write{b.roll.askFor(p, now)}}
		case f.Verdict != Yes:
			return Plan{Reason: why + "; " + f.Reason, Remedy: f.Remedy}
		}
		checks = append(checks, f.If...)
		delete(heirs, p.PodUID)
	}
	switch len(heirs) {
	case 0:
	case 1:
		for uid := range heirs {
			pod := b.pods[uid]
			if pod == nil || pod.Ending || pod.Over {
				plan := Plan{Reason: why + "; its pod has ended"}
				if now.Sub(time.Unix(0, asked)) > askAfter { // the node may not have it any more
					plan.Writes = []Write{b.roll.ask(about, now)}
				}
				return plan
			}
			again.PodUID, again.Namespace, again.PodName, again.Identity = uid, pod.Namespace, pod.Name, pod.Identity
			again.Keep, again.Workload, again.Adopted = pod.Keep, pod.Workload, again.Adopted && uid == p.PodUID
			checks = append(checks, Check{There: pod})
		}
	default:
		return Plan{Reason: why, Remedy: "delete all pods but one that have it"}
	}
	return Plan{Writes: []Write{UpdateIP{PodIP: again, If: checks}}}
}

// corrected returns the PodIP with the node that its pod has by the cluster. wrong says that another node has spoken of
// the pod, which is not its own. That is not believed, but it would be once no controller knows the pod any more, and
// until then the pod's own agent may write nothing.
func (b *Book) corrected(p *PodIP, now time.Time) (again PodIP, wrong bool) {
	node, known := b.situation(p, now).known()
	if said := p.saidOn(); !known || node == "" || said == "" || said == node {
		return *p, false
	}
	again = *p
	again.Phase, again.Node, again.Since, again.Conflict, again.PodCIDR = Allocated, node, now, "", netip.Prefix{}
	return again, true
}

// nodeOf returns the node that the pod of an address had, as far as that is known. If it never had one, the address is
// where an earlier pod left it.
func (b *Book) nodeOf(p *PodIP) string {
	end := b.ends[p.PodUID]
	if end.Node == "" && (p.Of == p.PodUID || end.Final) {
		return p.Node
	}
	return end.Node
}

// endPod ends a pod that is still as it is known.
func endPod(pod *Pod) EndPod {
	return EndPod{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name, If: []Check{{There: pod}}}
}

// teller returns the oldest pod that was told to have an address which is not its own by the PodIP, nil if there is
// none. Pods that are on their way out do not count: their address may be another one's by now.
func (b *Book) teller(a netip.Addr) (oldest *Pod) {
	for uid := range b.told[a] {
		pod := b.pods[uid]
		if p := b.ips[a]; pod.Gated || pod.Ending || pod.Over || p != nil && p.PodUID == uid {
			continue
		}
		if oldest == nil || older(pod, oldest) < 0 {
			oldest = pod
		}
	}
	return oldest
}

// remake makes the PodIP of an address again that a pod was told to have.
func (b *Book) remake(a netip.Addr, pod *Pod) Plan {
	h := pod.Has[slices.IndexFunc(pod.Has, func(h Address) bool { return h.Prefix.Addr() == a })]
	return Plan{Writes: []Write{CreateIP{PodIP: pod.made(h), If: []Check{{There: pod}}}}}
}

// made is the PodIP of an address that a pod has.
func (p *Pod) made(a Address) PodIP {
	return PodIP{
		Addr: a.Prefix.Addr(), Pool: a.Pool, Mode: a.Mode, Namespace: p.Namespace, PodName: p.Name, Identity: p.Identity,
		PodUID: p.UID, Network: a.Network, Interface: a.Interface, Keep: p.Keep, Workload: p.Workload, Held: true,
	}
}

// surplus reports whether the pod of an address was ungated without being told of it. It never will be.
func (b *Book) surplus(pod *Pod, p *PodIP) bool {
	if p.Adopted {
		return false
	}
	if pod.Has == nil && (pod.Ending || pod.Over) { // it never will be told of any
		for _, node := range b.holders(pod.UID) {
			if answer := b.answers[node]; answer.has(pod.UID, p.Addr) {
				return false
			}
		}
		return p.Of == "" // what an earlier pod had is kept, or not, as that one said
	}
	return pod.Has != nil && !pod.Gated && !pod.has(p.Addr) && !p.boundOn(pod.Node)
}

// superseded reports whether a later pod of the same name has another address in the place of this one.
func (b *Book) superseded(p *PodIP) bool {
	pod := b.pods[b.named[Owner{Namespace: p.Namespace, Pod: p.PodName}]]
	if p.Identity != "" || pod == nil || pod.Gated || pod.UID == p.PodUID || pod.Created.Before(p.Created) {
		return false
	}
	return pod.Has != nil && !pod.has(p.Addr)
}

// end frees an address, in two steps if it is held: it is deleted first, so that no pod can claim it any more.
func (b *Book) end(p *PodIP, why string, checks []Check) Plan {
	if p.Deleting {
		again := *p
		again.Held = false
		return Plan{Reason: why, Writes: []Write{UpdateIP{PodIP: again, If: checks}}}
	}
	return Plan{Reason: why, Writes: []Write{DeleteIP{PodIP: *p, If: checks}}}
}

// ReviewPool takes the finalizer off a pool that is being deleted and has no PodIPs. A pool that has PodIPs and has
// lost its finalizer gets it back.
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
