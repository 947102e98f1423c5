package pool

// This file is the rule by which a sandbox may use an address: whoever may use it is named in its PodIP before it can,
// and only that node, or an operator, ends that. The functions are pure; the fence, the agents and the exhaustive
// search of search_test.go use these very ones.
//
//	spec.podUID                              the pod that the address is given to. A controller writes it, bound to the
//	                                         version that it has read, before it ungates the pod
//	status.podUID, nodeName, phase Bound     the one node that may use the address, and for which pod. That node's agent
//	                                         writes it before it grants, bound to the version that it has read
//	a grant, a file of the node              the plugin's permission. It comes after that write and is gone with a boot
//	status.phase Retained                    that node has ended it for good: the pod is over, the grant is revoked, and
//	                                         nothing on the node has the address
//
// Writes of one object are ordered by its version. So of a controller that gives the address to the next pod and an
// agent that names its node, both by what they have read, one fails. A cache that lags makes a write fail, or a pod
// wait. It never makes two sandboxes.

// MayName reports whether the agent of a node may name it in the PodIP for a pod that is bound to it: the address is
// the pod's, and neither has another node been named for the pod nor has this one ended it. Each grant needs a write of
// its own, also if the node is named already: it is what a controller's write collides with.
func MayName(p *PodIP, uid UID, node string) bool {
	switch {
	case p == nil || p.PodUID != uid:
		return false
	case p.StatusUID != uid:
		return p.AdoptedOn == "" || p.AdoptedOn == node
	}
	return p.Phase != Retained && p.Node == node
}

// Names reports whether the PodIP names a node as the one that may use the address, for a pod.
func Names(p *PodIP, uid UID, node string) bool {
	return p != nil && p.PodUID == uid && p.StatusUID == uid && p.Phase != Retained && p.Node == node
}

// Passage is why an address may be given to another pod, once the pod that it was given to is over.
type Passage int

// The passages. Off needs that the declaration is read past the cache, after the PodIP was read.
const (
	Closed Passage = iota // it may not: the node that is named may use it
	Unused                // no node was named for the pod. None can be any more, since that write would be on this version
	Ended                 // the node has ended it
	Off                   // an operator has declared the node off
)

// MayPass returns why an address may be given to another pod. off reports whether an operator has declared a node off;
// it is called at most once.
func MayPass(p *PodIP, over bool, off func(node string) bool) Passage {
	switch {
	case !over:
		return Closed
	case p.StatusUID == p.PodUID && p.Phase == Retained:
		return Ended
	case p.namedNode() == "":
		return Unused
	case off(p.namedNode()):
		return Off
	}
	return Closed
}

// namedNode returns the node that may use the address for the pod that it is given to, empty if none is named: by the
// status or, of a pod that had the address before it was adopted, by the spec.
func (p *PodIP) namedNode() string {
	if p.StatusUID == p.PodUID {
		return p.Node
	}
	return p.AdoptedOn
}
