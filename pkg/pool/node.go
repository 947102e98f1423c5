package pool

import (
	"net/netip"
	"time"
)

// Local is what an agent knows of a pod on its node, and of one of its addresses.
type Local struct {
	UID UID
	// Node is this one.
	Node string
	// Exists, Ending and Terminal are the pod's state by the agent's own watch of the pods of its node, which is complete.
	Exists, Ending, Terminal bool
	// Ended says that this agent has ended the pod before. That the cluster has it again comes from a backup: it does not
	// start a second time.
	Ended bool
	// Here says that the cluster has the pod on this node, Elsewhere that it has the pod without a node, or with another
	// one; Kubernetes does so after a restore from a backup that was made before the pod had its node. Both are read past
	// all caches if [Local.LookUp] says so, else false.
	Here, Elsewhere bool
	// Off says that an operator has declared this node off, or that its Node does not exist. It is read past all caches if
	// [Local.LookUpNode] says so.
	Off bool
	// Doubt is what the PodIPAudit says of the API server's data: see [Doubt].
	Doubt Doubt
	// Granted says that there is a grant for the pod, finished or not.
	Granted bool
	// Netns says that the pod has a network namespace on this node, or that an ADD of it is under way.
	Netns bool
	// Found says that the pod has this address, and nothing says that a pool has given it to the pod. That is so of a pod
	// whose address another program gave it.
	Found bool
	// Conflict is the MAC address of another machine that had the address when the pod was to start, empty if none had.
	Conflict string
	// PodCIDR is how other nodes route to the pods of this one, if the address is of mode Routed, the zero Prefix if it is
	// not known, or they need not.
	PodCIDR netip.Prefix
	// IP is the PodIP as it is past all caches, nil if there is none.
	IP *PodIP
}

// ends reports whether kubelet does not start the pod again.
func (l Local) ends() bool { return !l.Exists || l.Ending || l.Terminal || l.Ended }

// current reports whether the status of the PodIP says what is so: where other nodes find the pod, and what keeps it
// from starting.
func (l Local) current() bool {
	conflict := l.Conflict
	if l.Netns {
		conflict = ""
	}
	return Names(l.IP, l.UID, l.Node) && l.IP.Conflict == conflict &&
		(!l.PodCIDR.IsValid() || l.IP.PodCIDR == l.PodCIDR)
}

// LookUp reports whether Here and Elsewhere are to be read before [NextAction] is asked: the watch may lag, and the pod
// may not be what the PodIP says.
func (l Local) LookUp() bool {
	return (l.Granted || l.Netns) && !Names(l.IP, l.UID, l.Node) || !l.Exists && l.Netns
}

// LookUpNode reports whether Off is to be read, once Here and Elsewhere are: before a grant, and if the cluster has the
// pod no more while it is here.
func (l Local) LookUpNode() bool {
	return l.deleted() && l.Netns ||
		!l.ends() && l.Doubt == Sure && MayName(l.IP, l.UID, l.Node) && !(l.Granted && l.current())
}

// deleted reports whether the cluster has the pod no more.
func (l Local) deleted() bool { return !l.Exists && !l.Here && !l.Elsewhere }

// Action is what an agent does about an address of a pod, in this order: each before the next.
type Action struct {
	// Revoke says to remove the grant of the pod and every unfinished one, under the locks of the node's ledgers. If an
	// ADD has succeeded by then, stop here and look again. The PodIP that the action came of must have been read before.
	Revoke bool
	// Down says to take the pod's interfaces down, then to make the runtime remove its sandbox.
	Down bool
	// Grant says to begin a grant, to make the Report, and to finish the grant. A grant that was revoked meanwhile cannot
	// be finished.
	Grant bool
	// Report is the phase to write into the status of the PodIP, bound to its version: on a conflict, read and look again.
	// Retained is written only if nothing on the node has the address once the grant is revoked.
	Report Phase // empty for nothing
}

// NextAction says what an agent does about an address of a pod. An agent asks for every pod with an address of a pool
// that it finds on its node, by its watch, its grants, its ledgers or its runtime: whenever something of that changes,
// and for all when it reaches the API server again.
//
//   - A pod that kubelet will not start again, and that is not here any more, loses its grant, and the address is
//     Retained if the PodIP names this node.
//   - A pod that this agent has ended before is said to be ended, so that a controller ends it.
//   - While the data are doubted, nothing else is done. Until this node has reported, nothing is granted.
//   - A pod that the cluster has elsewhere loses its grant and its interfaces. So does a pod whose address is another
//     pod's or another node's, or was ended here, by the PodIP; and one that the cluster has deleted while it believes
//     this node to be off. That there is no PodIP means nothing for a pod that is there: a controller makes it again.
//   - A pod that is to start here is granted its address, once the PodIP names this node.
func NextAction(l Local) Action {
	down := Action{Revoke: l.Granted, Down: l.Netns}
	foreign := l.IP != nil && !MayName(l.IP, l.UID, l.Node)
	switch {
	case l.Found && l.IP == nil:
		return Action{} // it may be no pool's
	case l.ends() && !l.Netns:
		a := Action{Revoke: l.Granted}
		if MayName(l.IP, l.UID, l.Node) && (l.IP.namedNode() == l.Node || l.Ended && l.Exists) {
			a = Action{Revoke: true, Report: Retained}
		}
		return a
	case l.Doubt == Doubted:
		return Action{}
	case l.Elsewhere, foreign, l.IP == nil && l.deleted(), l.deleted() && l.Off:
		return down
	case l.ends(), l.IP == nil, l.Off, l.Doubt != Sure, l.Granted && l.current():
		return Action{}
	case !l.Granted:
		return Action{Grant: true, Report: Bound}
	case !Names(l.IP, l.UID, l.Node): // a grant without its write
		return Action{Revoke: true, Grant: true, Report: Bound}
	}
	return Action{Report: Bound}
}

// ReadFor is how long a PodIP that an agent has read is good for a write: no restore of a backup takes less, after
// which the same version may come back.
const ReadFor = 5 * time.Second

// Doubt is what an agent may do by the PodIPAudit.
type Doubt int

// The doubts.
const (
	Sure    Doubt = iota // it may grant, and take back
	Unasked              // it may take back, but has not reported for the epoch, and grants nothing before
	Doubted              // the API server's data may have been restored: it does neither
)

// DoubtOf returns what an agent may do by the PodIPAudit as it has it, nil if there is none. seen is the newest one
// that it has seen, reported the epoch for which this node has reported.
func DoubtOf(r *Audit, seen Audit, reported int64, now time.Time) Doubt {
	switch {
	case r == nil, r.Recalling, now.Sub(r.Mark) > MarkLost, r.Epoch <= seen.Epoch && r.older(seen):
		return Doubted
	case reported != r.Epoch:
		return Unasked
	}
	return Sure
}

// Newest returns the audit of two that counts for what an agent has seen: of a later epoch, or marked more often.
func Newest(x, y Audit) Audit {
	if y.Epoch > x.Epoch || y.Epoch == x.Epoch && y.Marks >= x.Marks {
		return y
	}
	return x
}
