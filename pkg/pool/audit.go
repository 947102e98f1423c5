package pool

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Audit is how a controller and the agents notice that the API server was restored from a backup, and the one thing
// that all nodes are asked then. There is one in the cluster.
//
// The leading controller sets Mark again every [MarkEvery], and counts that in Marks. A mark that is older than another
// mark which this process has seen, or older than [MarkLost], means that the cluster may have forgotten which pod has
// which address. So does a mark of the future: a clock was wrong, and how old the mark is cannot be told. Then an epoch
// begins: every node reports which addresses it has, and until all have, or are off, no address is given, taken or
// freed.
type Audit struct {
	Version string // empty if it does not exist
	// Epoch is the last one. It is a time, see [epochAt], so that it is new after a restore, too. While Recalling, reports
	// for it are awaited.
	Epoch     int64
	Recalling bool
	// Term changes when an epoch begins and when it is over. A Book is good for one term.
	Term int64
	Mark time.Time
	// Marks is how often the mark was set.
	Marks int64
}

// tick is the distance of an epoch to the next one: the API server keeps them to a microsecond.
const tick = int64(time.Microsecond)

// epochAt returns the epoch of a time: nanoseconds since 1970, of whole microseconds.
func epochAt(t time.Time) int64 { return t.Truncate(time.Duration(tick)).UnixNano() }

// lost reports whether the API server may have forgotten something: by the clock, or since this audit is older than an
// audit that was seen before.
func (r Audit) lost(seen Audit, now time.Time) bool {
	return r.Version == "" || now.Sub(r.Mark) > MarkLost || r.Mark.Sub(now) > MarkEvery || r.older(seen)
}

// older reports whether the audit is from before an audit that was seen. A mark of the future is taken back in another
// term.
func (r Audit) older(seen Audit) bool {
	return r.Marks < seen.Marks || r.Term == seen.Term && r.Mark.Before(seen.Mark)
}

// MarkEvery is how often a leader sets the mark, MarkLost how old one may be that was not forgotten. No restore of a
// backup takes less.
const (
	MarkEvery = 30 * time.Second
	MarkLost  = 2 * time.Minute
)

// Skew is the most by which the clocks of controllers and API servers may differ, as far as anything rests on that.
const Skew = time.Minute

// Report of a node for an epoch.
type Report struct {
	Node  string
	Epoch int64
	// Held are the addresses of pools that pods on the node have, or have a grant for.
	Held []Held
	// CannotServe says why pods of the node cannot have addresses of pools of a mode on their own interface. A mode is
	// missing if they can, as far as is known.
	CannotServe map[string]v1alpha1.PodIPReportCause
}

// has reports whether the pod has the address.
func (a *Report) has(uid UID, addr netip.Addr) bool {
	return slices.ContainsFunc(a.Held, func(h Held) bool { return h.UID == uid && h.Addr == addr })
}

// Held is an address that a pod has on a node, by the node's own books.
type Held struct {
	Addr               netip.Addr
	UID                UID
	Namespace, PodName string
	Identity           string
	Pool               string
	Mode               Mode
	Network, Interface string
	Keep               Keep
	// Running says that the pod has a network namespace there. Without it, the pod has a grant alone.
	Running bool
}

// Lead returns the audit as the leading controller is to write it: at once, before it lists PodIPs for its [Book], and
// then every [MarkEvery]. live is the audit as it is past all caches, seen the audit that this process saw or wrote
// last. The write is bound to the version of live.
func Lead(live, seen Audit, now time.Time) Audit {
	next := live
	lost := live.lost(seen, now)
	if lost {
		// No pod that a backup has was created much later, even if this clock is behind.
		next.Epoch = max(epochAt(now), epochAt(live.Mark), live.Epoch+tick, seen.Epoch+tick)
		next.Term, next.Recalling = max(next.Epoch, live.Term+tick, seen.Term+tick), true
	}
	if next.Mark.Before(now) || lost {
		next.Mark = now
	}
	next.Marks = max(live.Marks, seen.Marks) + 1
	return next
}

// Lead is the same for a controller that has a Book. If the Book is stale afterwards, it must be made again.
func (b *Book) Lead(live Audit, now time.Time) Write {
	next := Lead(live, b.audit, now)
	if next.Term != b.audit.Term || live.older(b.audit) {
		b.stale = true
	}
	return WriteAudit{Audit: next}
}

// SetAudit is called with the audit as it is past all caches, and after each write of it.
func (b *Book) SetAudit(r Audit) {
	if r.Term != b.audit.Term || r.older(b.audit) {
		b.stale = true
		return
	}
	b.audit = r
}

// predates reports whether a pod may have been made before the epoch.
func (r Audit) predates(pod *Pod) bool {
	return pod.Created.Before(time.Unix(0, r.Epoch).Add(Skew))
}

// recall is the question to all nodes, before anything is given, which addresses they have.
type recall struct {
	*facts
	now time.Time
}

// missing says what is missing until addresses may be given, without a Reason if nothing is.
func (d recall) missing() Plan {
	switch {
	case d.stale:
		return Plan{Reason: "the API server's data were restored"}
	case !d.audit.Recalling:
		return Plan{}
	}
	const why = "pools were switched on, no controller ran for a while, or the API server's data were restored from a " +
		"backup, so that every node is asked first which addresses it has"
	if f := d.answered(why); f.Verdict != Yes {
		return Plan{Reason: f.Reason, Remedy: f.Remedy, Contact: f.Contact, Until: f.Until}
	}
	return Plan{Reason: why}
}

// answered reports whether each node has reported.
func (d recall) answered(why string) Finding {
	reached := d.reached(why)
	if reached.Verdict != Yes {
		return reached
	}
	f := everyone(d.nodes, why, muteFor{d.now.Sub(time.Unix(0, d.audit.Epoch)), d.hadAgent},
		func(node string) bool { return d.reports[node].Epoch >= d.audit.Epoch })
	f.If = append(f.If, reached.If...)
	return f
}

// Recall goes on with an epoch: once all nodes have reported, it makes the PodIPs say what the reports say. Then the
// epoch is over, and the Book stale.
func (b *Book) Recall(now time.Time) Plan { return recall{&b.facts, now}.plan() }

func (d recall) plan() Plan {
	if d.stale || !d.audit.Recalling {
		return Plan{}
	}
	plan, all := d.missing(), d.answered("")
	if all.Verdict != Yes {
		return plan
	}
	holders := d.reported()
	for _, a := range slices.SortedFunc(maps.Keys(holders), netip.Addr.Compare) {
		h := holders[a]
		is := d.lacking(h.Held)
		p := d.ips[a]
		switch {
		case p == nil:
			plan.Writes = append(plan.Writes, CreateIP{PodIP: is})
		case p.PodUID != h.UID:
			again := *p
			again.PodUID, again.Namespace, again.PodName, again.Identity = is.PodUID, is.Namespace, is.PodName, is.Identity
			again.Keep, again.Workload, again.AdoptedOn = is.Keep, is.Workload, ""
			plan.Writes = append(plan.Writes, UpdateIP{PodIP: again})
		case !Names(p, h.UID, h.node):
			again := *p
			again.Phase, again.StatusUID, again.Node, again.Since = Bound, h.UID, h.node, d.now
			again.Conflict, again.PodCIDR = "", netip.Prefix{}
			plan.Writes = append(plan.Writes, StatusIP{PodIP: again})
		}
	}
	if plan.Writes == nil {
		next := d.audit
		next.Recalling, next.Term = false, max(epochAt(d.now), next.Term+tick)
		plan.Writes = []Write{WriteAudit{Audit: next, If: all.If}}
	}
	return plan
}

// holder is who has an address by the reports.
type holder struct {
	Held
	node string
}

// reported returns who has each address by the reports for the epoch, also by those of nodes that joined after the
// backup. If it is more than one, as a node that was declared off has come back, or an agent lies, it is the one whom
// the PodIP names if that runs, else another that runs. The agents of all others take the address back.
func (d recall) reported() map[netip.Addr]holder {
	all := map[netip.Addr]holder{}
	for _, node := range slices.Sorted(maps.Keys(d.reports)) {
		if d.reports[node].Epoch < d.audit.Epoch {
			continue
		}
		for _, held := range d.reports[node].Held {
			h := holder{held, node}
			if !d.trusts(node, h.UID) {
				continue
			}
			if other, taken := all[h.Addr]; !taken || d.weight(h) > d.weight(other) {
				all[h.Addr] = h
			}
		}
	}
	return all
}

// weight orders those who have an address by reports.
func (d recall) weight(h holder) (weight int) {
	p, pod := d.ips[h.Addr], d.pods[h.UID]
	if h.Running {
		weight += 8
	}
	if Names(p, h.UID, h.node) {
		weight += 4
	}
	if p != nil && p.PodUID == h.UID {
		weight += 2
	}
	if pod != nil && cmp.Or(pod.Node, h.node) == h.node {
		weight++
	}
	return weight
}

// lacking is the PodIP of an address that a pod has on a node: as the pod says it, if the cluster has the pod. A node
// does not know of what workload a pod is: only the pod's name tells what an address kept while owned is kept for.
func (d recall) lacking(h Held) PodIP {
	pod := d.pods[h.UID]
	if pod == nil {
		pod = &Pod{UID: h.UID, Namespace: h.Namespace, Name: h.PodName, Identity: h.Identity, Keep: h.Keep}
	}
	has := Address{Network: h.Network, Interface: h.Interface, Pool: h.Pool, Mode: h.Mode,
		Prefix: netip.PrefixFrom(h.Addr, h.Addr.BitLen())}
	if told := pod.address(h.Addr); told != nil {
		has = *told
	}
	return pod.made(has)
}
