package pool

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// This file bounds what other machines on a link can do to a pool.

// machineMost is how many addresses of a pool are quarantined because of one machine. A machine with wrong addresses
// has few of them. A machine that answers for more may answer for all, as proxy ARP does: to look for an address that
// it does not answer for would quarantine the whole pool, and end a pod for each address.
const machineMost = 5

// machinesMost is the same for all machines together: a machine that answers with another MAC address each time counts
// as many.
const machinesMost = 20

// The pause between two ends of pods of a workload because of conflicts: doubled with each of its addresses that is in
// quarantine.
const (
	endPauseFirst = 10 * time.Second
	endPauseMost  = 10 * time.Minute
)

// machine returns the MAC address of another machine that has the address, empty if none is known.
func (p *PodIP) machine() string {
	if p.conflicts() {
		return p.Conflict
	}
	return p.Quarantine.MAC
}

// disputes are the PodIPs in quarantine, and those whose address another machine has.
type disputes map[netip.Addr]*PodIP

// machines returns for how many addresses of a pool other machines answer, by their MAC addresses and in all.
func (d disputes) machines(pool string) (claims map[string]int, all int) {
	claims = map[string]int{}
	for _, p := range d {
		if p.Pool == pool && p.machine() != "" {
			claims[p.machine()]++
			all++
		}
	}
	return claims, all
}

// Quarantined returns how many addresses of a pool are in quarantine, of all pools if it is empty.
func (d disputes) Quarantined(pool string) (n uint64) {
	for _, p := range d {
		if (pool == "" || p.Pool == pool) && p.Quarantine.Reason != "" {
			n++
		}
	}
	return n
}

// heldRemedy is what ends that a pool is held.
const heldRemedy = "find that machine on the link and stop it, or exclude its addresses from the pool"

// HeldBy returns why a pool makes no new allocations, empty if it does: more than [machineMost] of its addresses are in
// quarantine, or keep a pod from starting, because of one machine; or more than [machinesMost] because of any. The
// quarantine of an address ends after an hour, unless it is found again then.
func (d disputes) HeldBy(pool string) (reason, remedy string) {
	claims, all := d.machines(pool)
	for _, mac := range slices.Sorted(maps.Keys(claims)) {
		if claims[mac] > machineMost {
			return fmt.Sprintf("a machine with the MAC address %s answers for more than %d of its addresses", mac, machineMost),
				heldRemedy
		}
	}
	if all > machinesMost {
		return fmt.Sprintf("machines with %d MAC addresses answer for more than %d of its addresses", len(claims),
			machinesMost), heldRemedy
	}
	return "", ""
}

// spares returns why no pod of a pool is ended because of a machine, empty if one may be.
func (d disputes) spares(pool, mac string) string {
	switch claims, all := d.machines(pool); {
	case claims[mac] > machineMost:
		return fmt.Sprintf("which answers for more than %d addresses of pool %s", machineMost, pool)
	case all > machinesMost:
		return fmt.Sprintf("and other machines answer for addresses of pool %s, more than %d in all", pool, machinesMost)
	}
	return ""
}

// endsAt returns when the next pod of a workload may be ended because another machine has its address a.
func (d disputes) endsAt(workload Workload, a netip.Addr) (at time.Time) {
	pause := endPauseFirst
	for _, p := range d {
		if p.Addr == a || p.Workload != workload || p.Quarantine.MAC == "" {
			continue
		}
		if !at.IsZero() {
			pause = min(2*pause, endPauseMost)
		}
		if p.Quarantine.Since.After(at) {
			at = p.Quarantine.Since
		}
	}
	if at.IsZero() {
		return at
	}
	return at.Add(pause)
}

// apart reports whether a node that cannot answer has no part in the quarantine of an address: the other machine was
// heard on another node's link, the pod was not on this one, and when the node answered last it did not have the
// address. Who gets the address next asks on the link again.
func (d *reviewing) apart(node string) bool {
	p := d.ip
	report, ok := d.reports[node]
	return ok && p.Quarantine.MAC != "" && p.Mode == L2 && !d.nodes[node].Ready && node != p.Node &&
		node != d.nodeOf() && !slices.ContainsFunc(report.Held, func(h Held) bool { return h.Addr == p.Addr })
}
