package pool

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Audit is what all nodes are asked. There is one in the cluster.
//
// It is also how a controller notices that the API server was restored from a backup. The leading controller sets Mark
// again every [MarkEvery], and counts that in Marks. A mark that is older than another mark which this process has
// seen, or older than [MarkLost], means that the cluster may have forgotten which pod has which address. So does a mark
// of the future: a clock was wrong, and how old the mark is cannot be told. Then all nodes are asked, and until they
// have answered no address is given, taken or freed.
type Audit struct {
	Version string // empty if it does not exist
	// Round is that of the last question. It is a time, see [roundAt], so that it is new after a restore, too.
	Round int64
	// Asked are pods of which nothing is known, and the round in which they were asked for first. A node that answers this
	// round or a later one without naming such a pod will never have it. Asked also has the addresses in quarantine, to
	// find out which pods have them.
	Asked map[UID]int64
	// Epoch is the last round that all nodes had to answer before anything was given. While Recalling they still have to.
	Epoch     int64
	Recalling bool
	// Term changes when a recall begins and when it is over. A Book is good for one term.
	Term int64
	Mark time.Time
	// Marks is how often the mark was set.
	Marks int64
}

// tick is the distance of a round to the next one: the API server keeps them to a microsecond.
const tick = int64(time.Microsecond)

// roundAt returns the round of a time: nanoseconds since 1970, of whole microseconds.
func roundAt(t time.Time) int64 { return t.Truncate(time.Duration(tick)).UnixNano() }

// lost reports whether the API server may have forgotten something: by the clock, or since this audit is older than a
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

// Report of a node to a round.
type Report struct {
	Node  string
	Round int64
	// Held are the addresses of pools that pods on the node have.
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
}

// holds reports whether a node has the pod of a PodIP.
func (a Report) holds(p *PodIP) bool {
	return slices.ContainsFunc(a.Held, func(h Held) bool { return h.UID == p.PodUID })
}

// Lead returns the audit as the leading controller is to write it: at once, before it lists PodIPs for its [Book], and
// then every [MarkEvery]. live is the audit as it is past all caches, seen the audit that this process saw or wrote
// last. The write is bound to the version of live.
func Lead(live, seen Audit, now time.Time) Audit {
	next := live
	lost := live.lost(seen, now)
	if lost {
		// No pod that a backup has was created much later, even if this clock is behind.
		next.Round = max(roundAt(now), roundAt(live.Mark), live.Round+tick, seen.Round+tick)
		next.Epoch, next.Term, next.Recalling = next.Round, next.Round, true
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
	next.Asked = maps.Clone(next.Asked)
	for uid := range next.Asked {
		a, err := netip.ParseAddr(string(uid)) // see allOf
		if p := b.ips[a]; len(b.given[uid]) == 0 && (err != nil || p == nil || p.Quarantine.Reason == "") {
			delete(next.Asked, uid)
		}
	}
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

// ask begins a round, and notes what it is about.
func (r Audit) ask(about UID, now time.Time) WriteAudit {
	r.Round = max(roundAt(now), r.Round+tick)
	if r.Asked = maps.Clone(r.Asked); r.Asked == nil {
		r.Asked = map[UID]int64{}
	}
	r.Asked[about] = r.Round
	return WriteAudit{Audit: r}
}

// askFor asks all nodes for the pod of an address, which has ended: they bar it.
func (r Audit) askFor(p *PodIP, now time.Time) Write {
	w := r.ask(p.PodUID, now)
	w.If = Situation{IP: p}.over()
	return w
}

// predates reports whether a pod may have been made before all nodes were asked.
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
	const why = "the API server's data may have been restored from a backup, or no controller ran for a while, so that " +
		"every node is asked first which addresses it has"
	if f := d.answered(why); f.Verdict != Yes {
		return Plan{Reason: f.Reason, Remedy: f.Remedy, Contact: f.Contact, Until: f.Until}
	}
	return Plan{Reason: why}
}

// answered reports whether each node has answered.
func (d recall) answered(why string) Finding {
	reached := d.reached(why)
	if reached.Verdict != Yes {
		return reached
	}
	f := everyone(Situation{Now: d.now, Nodes: d.nodes, Asked: d.audit.Epoch, Agent: d.hadAgent}, why,
		func(node string) bool { return d.reports[node].Round >= d.audit.Epoch })
	f.If = append(f.If, reached.If...)
	return f
}

// Recall goes on with a recall: once all nodes have answered, it makes the PodIPs again that are missing, and
// quarantines addresses that a node says are another pod's. Then it is over, and the Book stale.
func (b *Book) Recall(now time.Time) Plan { return recall{&b.facts, now}.plan() }

func (d recall) plan() Plan {
	if d.stale || !d.audit.Recalling {
		return Plan{}
	}
	plan, all := d.missing(), d.answered("")
	if all.Verdict != Yes {
		return plan
	}
	for _, name := range slices.Sorted(maps.Keys(d.reports)) { // also of nodes that joined after the backup
		if d.reports[name].Round < d.audit.Epoch {
			continue
		}
		for _, h := range d.reports[name].Held {
			switch p := d.ips[h.Addr]; {
			case p == nil:
				plan.Writes = append(plan.Writes, CreateIP{PodIP: d.lacking(h)})
			case p.PodUID != h.UID && p.Quarantine.Reason == "":
				again := *p
				again.Quarantine = Quarantine{Since: d.now,
					Reason: fmt.Sprintf("pod %s/%s has it on node %s", h.Namespace, h.PodName, name)}
				plan.Writes = append(plan.Writes, UpdateIP{PodIP: again})
			}
		}
	}
	if plan.Writes == nil {
		next := d.audit
		next.Recalling, next.Term = false, max(roundAt(d.now), next.Term+tick)
		plan.Writes = []Write{WriteAudit{Audit: next, If: all.If}}
	}
	return plan
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
