package pool

import "net/netip"

// Local is what an agent knows of a pod that has, or may yet have, an address of a pool on its node.
type Local struct {
	UID UID
	// Node is this one.
	Node string
	// Exists, Ending and Terminal are the pod's state by the agent's own watch of the pods of its node, which is complete.
	Exists, Ending, Terminal bool
	// Here says that the cluster has the pod on this node, Elsewhere that it has the pod without a node, or with another
	// one; Kubernetes does so after a restore from a backup that was made before the pod had its node. Both are read past
	// all caches if the pod does not exist by the watch, or if it has a PodIP whose status does not name this node yet
	// (see [Local.LookUp]); both are false if that was not read, or the cluster has no such pod.
	Here, Elsewhere bool
	// Off says that an operator has declared this node off: its Node is deleted or has the taint out-of-service. It is
	// read past all caches, after Here, if [Local.LookUpNode].
	Off bool
	// Netns says that the pod has a network namespace on this node, or that an ADD of it is under way.
	Netns bool
	// Found says that the pod has this address, and nothing says that a pool has given it to the pod. That is so of a pod
	// whose address another program gave it, and that was adopted while this agent was away: it may be given up before
	// this agent has ever heard of it.
	Found bool
	// Barred says that, by the node's book, no ADD of the pod may succeed any more.
	Barred bool
	// Conflict is the MAC address of another machine that had the address when the pod was to start, empty if none had.
	Conflict string
	// PodCIDR is how other nodes route to the pods of this one, if the address is of mode Routed, the zero Prefix if it is
	// not known, or they need not.
	PodCIDR netip.Prefix
	// IP is the PodIP as it is past all caches, nil if there is none. If a Report comes of it, without Down, it may be an
	// earlier one, since the write is bound to its version.
	IP *PodIP
}

// mine reports whether the address is the pod's.
func (l Local) mine() bool { return l.IP != nil && l.IP.PodUID == l.UID }

// named reports whether it is written down that the pod is on this node. A pod never changes its node, so that it is no
// other one's unless the API server forgets this, too.
func (l Local) named() bool { return l.mine() && l.IP.StatusUID == l.UID && l.IP.Node == l.Node }

// placed reports whether it is written down how other nodes route to the pod.
func (l Local) placed() bool { return !l.PodCIDR.IsValid() || l.named() && l.IP.PodCIDR == l.PodCIDR }

// LookUp reports whether Here and Elsewhere are to be read before NextAction is asked.
func (l Local) LookUp() bool { return !l.Exists || l.mine() && !l.named() }

// LookUpNode reports whether Off is to be read, once Here and Elsewhere are.
func (l Local) LookUpNode() bool { return l.Netns && l.mine() && l.deleted() }

// deleted reports whether the cluster has the pod no more.
func (l Local) deleted() bool { return !l.Exists && !l.Here && !l.Elsewhere }

// Action is what an agent does about a pod, in this order: each before the next.
type Action struct {
	// Down says to take its interfaces down, then to make the runtime remove its sandbox.
	Down bool
	// Bar says to note durably, under the lock of the node's book, that no ADD of the pod may succeed any more; if an ADD
	// has succeeded by then, stop here and look again.
	Bar bool
	// Report is the phase to write into the status of the PodIP, bound to its version. On a conflict, read and look again.
	Report Phase // empty for nothing
}

// NextAction says what an agent does about a pod. An agent asks for every pod with an address of a pool that it sees on
// its node or finds in the node's book: whenever something of that changes, and for all when it reaches the API server
// again. It also asks for each pod that the runtime has and the cluster has not, with each address that it has: see
// [Local.Found]. Static pods are not among these, since the cluster knows them by other UIDs.
//
//   - A pod that has its namespace is Bound, if the address is its own.
//   - A pod that has not started is Allocated, if other nodes route to it: they may do so by the time it answers.
//   - A pod that has ended here by the PodIP, and that a restored API server has again, is barred, if its bar was lost
//     with the node's files.
//   - A pod that cannot start, because another machine has the address, is Allocated, with the Conflict.
//   - A pod that neither exists nor has the address any more by the PodIP is a stranger: its interfaces go down. So do
//     those of a pod that the cluster has elsewhere, and of a pod that it has deleted while it believes this node to be
//     off: its address may be another pod's any moment. A pod of which only the address is known is left alone, unless
//     the address is a PodIP's.
//   - A pod that kubelet will not start again and that has no namespace is gone. It is barred first: kubelet may not
//     know yet that the pod was deleted.
//   - The agent reports only of a pod that surely is no other node's: the cluster has it here, or has noted already
//     that it was here. After a restore, a pod that ran here may have been given another node, and be gone since.
func NextAction(l Local) Action {
	mine := l.mine()
	speaks := mine && (l.Here || l.named())
	ends := !l.Exists || l.Ending || l.Terminal
	bar := !l.Barred
	lacks := func(p Phase) bool { return speaks && !(l.named() && l.IP.Phase == p) }
	switch {
	case l.Found && l.IP == nil:
		return Action{} // it may be no pool's
	case l.Elsewhere:
		return Action{Down: l.Netns, Bar: bar}
	case l.Netns && !l.Exists && !mine:
		return Action{Down: true, Bar: bar}
	case l.LookUpNode() && l.Off:
		return Action{Down: true, Bar: bar}
	case l.Netns && (lacks(Bound) || speaks && !l.placed()):
		return Action{Report: Bound}
	case l.Netns:
		return Action{}
	case l.named() && l.IP.Phase == Retained:
		return Action{Bar: bar}
	case l.Conflict != "" && !ends && !l.Barred:
		if !speaks || l.named() && l.IP.Conflict == l.Conflict {
			return Action{}
		}
		return Action{Report: Allocated}
	case ends && lacks(Retained):
		return Action{Bar: bar, Report: Retained}
	case ends:
		return Action{Bar: bar}
	case l.Barred && lacks(Retained): // it comes from a backup
		return Action{Report: Retained}
	case !l.Barred && speaks && !l.placed() && (!l.named() || l.IP.Phase == Allocated):
		return Action{Report: Allocated}
	}
	return Action{}
}

// Reply is what an agent does before it answers a round.
type Reply struct {
	// Bar are pods that were asked for and are not here.
	Bar []UID
	// Checked: from now on, until the node boots, an ADD may succeed only for pods that the agent has seen since: kubelet
	// may know pods that the cluster has forgotten.
	Checked bool
}

// Respond says what an agent does before it answers an audit. holds reports whether a pod has a namespace on the node,
// or an ADD of it is under way. checked is the last epoch for which the node has heeded Checked.
func Respond(r Audit, holds func(UID) bool, checked int64) Reply {
	reply := Reply{Checked: r.Epoch != checked}
	for uid := range r.Asked {
		if !holds(uid) {
			reply.Bar = append(reply.Bar, uid)
		}
	}
	return reply
}
