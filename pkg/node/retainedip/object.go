package retainedip

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

// This file says how claims look as RetainedIPs; publisher.go makes it so.

// Name names a RetainedIP.
type Name struct{ Namespace, Name string }

func nameOf(r *v1alpha1.RetainedIP) Name { return Name{r.Namespace, r.Name} }

func (n Name) String() string { return n.Namespace + "/" + n.Name }

// object is a RetainedIP as the API server has it, as far as the agent has to do with it.
type object struct {
	uid      types.UID
	version  string
	owner    types.UID // of the Node that owns it; empty unless it is the only owner
	deleting bool
	release  bool
	spec     v1alpha1.RetainedIPSpec // without release, workload and scheduled, which are not the agent's
	status   v1alpha1.RetainedIPStatus
	// answer is what was applied if this object was the answer to it. A definition of another version may lack fields.
	answer *promised
}

func objectOf(r *v1alpha1.RetainedIP) (Name, *object) {
	slim(r)
	o := &object{
		uid: r.UID, version: r.ResourceVersion, deleting: r.DeletionTimestamp != nil,
		release: r.Spec.Release != "", spec: r.Spec, status: r.Status,
	}
	o.spec.Release, o.spec.Workload, o.spec.Scheduled = "", nil, ""
	if len(r.OwnerReferences) == 1 && r.OwnerReferences[0].Kind == "Node" {
		o.owner = r.OwnerReferences[0].UID
	}
	return nameOf(r), o
}

// promised is the RetainedIP that a node's claims ask for: all those of one pod.
type promised struct {
	spec   v1alpha1.RetainedIPSpec
	status v1alpha1.RetainedIPStatus
	claims []ledger.Key
}

func (p *promised) same(q *promised) bool {
	return p.spec == q.spec && sameStatus(p.status, q.status) && slices.Equal(p.claims, q.claims)
}

// promisedBy makes the objects of all claims of a node.
func promisedBy(claims []Claim, node string) map[Name]*promised {
	all := map[Name]*promised{}
	for _, of := range byPod(claims) {
		p := &promised{spec: specOf(of[0], node), status: statusOf(of)}
		for _, c := range of {
			p.claims = append(p.claims, c.Key)
		}
		key := of[0].Key
		all[Name{key.Namespace(), v1alpha1.RetainedIPName(key.Pod, node)}] = p
	}
	return all
}

// byPod groups claims by namespace and pod name. Within a group those that are bound come first, then the
// interface that a pod is known by: the first one's policy counts.
func byPod(claims []Claim) [][]Claim {
	claims = slices.Clone(claims)
	rank := func(c Claim) int {
		r := 0
		if c.Phase != PhaseBound {
			r += 2
		}
		if c.Key.IfName != ledger.PodInterface {
			r++
		}
		return r
	}
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(
			strings.Compare(a.Key.Namespace(), b.Key.Namespace()), strings.Compare(a.Key.Pod, b.Key.Pod),
			rank(a)-rank(b), strings.Compare(a.Key.Network, b.Key.Network),
			strings.Compare(a.Key.IfName, b.Key.IfName), strings.Compare(a.Key.Identity, b.Key.Identity))
	})
	var groups [][]Claim
	for from := 0; from < len(claims); {
		to := from + 1
		for to < len(claims) && claims[to].Key.Pod == claims[from].Key.Pod &&
			claims[to].Key.Namespace() == claims[from].Key.Namespace() {
			to++
		}
		groups = append(groups, claims[from:to])
		from = to
	}
	return groups
}

func specOf(c Claim, node string) v1alpha1.RetainedIPSpec {
	s := v1alpha1.RetainedIPSpec{
		NodeName: node, PodName: c.Key.Pod, Identity: c.Policy.Identity, Retention: c.Policy.RetainIP(),
		WhenScaled: c.Policy.WhenScaled, WhenDeleted: c.Policy.WhenDeleted, WhenMoved: c.Policy.WhenMoved,
	}
	// Policies of claims that were put together from what a damaged disk still said lack these.
	byDefault := v1alpha1.PolicyRetain
	if c.Policy.WhileOwned {
		byDefault = v1alpha1.PolicyRelease
	}
	s.WhenScaled, s.WhenDeleted = cmp.Or(s.WhenScaled, byDefault), cmp.Or(s.WhenDeleted, byDefault)
	s.WhenMoved = cmp.Or(s.WhenMoved, byDefault)
	return s
}

// statusOf merges the claims of one pod. It is bound if one of them is, and expires with the last.
func statusOf(claims []Claim) v1alpha1.RetainedIPStatus {
	s := v1alpha1.RetainedIPStatus{Phase: v1alpha1.PhaseRetained}
	var bound, since, expires time.Time
	endless := false
	for _, c := range claims {
		ips := words(c.Addrs)
		s.IPs = append(s.IPs, ips...)
		if i := slices.IndexFunc(s.Addresses, func(a v1alpha1.NetworkAddresses) bool {
			return a.Network == c.Key.Network && a.Interface == c.Key.IfName
		}); i >= 0 {
			s.Addresses[i].IPs = append(s.Addresses[i].IPs, ips...) // of two identities
		} else {
			s.Addresses = append(s.Addresses,
				v1alpha1.NetworkAddresses{Network: c.Key.Network, Interface: c.Key.IfName, IPs: ips})
		}
		if c.Bound.After(bound) {
			bound = c.Bound
		}
		if c.Phase == PhaseBound {
			s.Phase = v1alpha1.PhaseBound
			s.PodUID = cmp.Or(s.PodUID, c.Pod.UID)
			continue
		}
		if c.Since.After(since) {
			since = c.Since
		}
		if c.Expires.After(expires) {
			expires = c.Expires
		}
		endless = endless || c.Expires.IsZero()
	}
	if s.Phase == v1alpha1.PhaseBound {
		since = bound
	} else if !endless {
		s.Expires = shown(expires)
	}
	s.LastBoundTime, s.Since = shown(bound), shown(since)
	return s
}

// shown is a time as the API has it, nil if it is not known.
func shown(t time.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	return &metav1.Time{Time: t.UTC().Truncate(time.Second)}
}

func words(addrs []netip.Addr) []string {
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = a.String()
	}
	return all
}

// after returns the status that follows another: with what the ledger does not know, and without changes that only
// the clocks made.
func after(was, is v1alpha1.RetainedIPStatus) v1alpha1.RetainedIPStatus {
	if is.Phase == v1alpha1.PhaseRetained && is.PodUID == "" {
		is.PodUID = was.PodUID
	}
	if is.LastBoundTime == nil { // a power loss took it
		is.LastBoundTime = was.LastBoundTime
	}
	if is.Phase != was.Phase {
		return is
	}
	if is.Since == nil {
		is.Since = was.Since
	}
	if a, b := was.Expires, is.Expires; a != nil && b != nil && a.Sub(b.Time).Abs() < clockSkew {
		is.Expires = a
	}
	return is
}

// clockSkew is how much two computations of one expiry may differ: both clocks drift.
const clockSkew = 2 * time.Second

func sameStatus(a, b v1alpha1.RetainedIPStatus) bool {
	order := func(s v1alpha1.RetainedIPStatus) []v1alpha1.NetworkAddresses { // of a list that is a map
		return slices.SortedFunc(slices.Values(s.Addresses), func(a, b v1alpha1.NetworkAddresses) int {
			return cmp.Or(strings.Compare(a.Network, b.Network), strings.Compare(a.Interface, b.Interface))
		})
	}
	return a.Phase == b.Phase && slices.Equal(a.IPs, b.IPs) && a.PodUID == b.PodUID && a.Since.Equal(b.Since) &&
		a.LastBoundTime.Equal(b.LastBoundTime) && a.Expires.Equal(b.Expires) &&
		slices.EqualFunc(order(a), order(b), func(a, b v1alpha1.NetworkAddresses) bool {
			return a.Network == b.Network && a.Interface == b.Interface && slices.Equal(a.IPs, b.IPs)
		})
}

// request is what spec.release on an object comes to.
type request int

const (
	// requestHolds means that the user or controller that set it saw what is promised now.
	requestHolds request = iota
	// requestIsOver means that the pod has come back since, or has other addresses; what is promised now is another
	// promise.
	requestIsOver
	// requestIsUnclear means that it is not known which pod has the addresses.
	requestIsUnclear
)

// releaseOf compares what an object shows with what is promised. The object shows what was promised when the
// release was set, since an apply that would change it names the version that it changes.
func (p *promised) releaseOf(o *object) request {
	common := func(ip string) bool { return slices.Contains(p.status.IPs, ip) }
	switch {
	case !slices.ContainsFunc(o.status.IPs, common):
		return requestIsOver
	case p.status.Phase == v1alpha1.PhaseRetained:
		return requestHolds
	case o.status.Phase != v1alpha1.PhaseBound:
		return requestIsOver
	case p.status.PodUID == "":
		return requestIsUnclear
	case p.status.PodUID != o.status.PodUID:
		return requestIsOver
	}
	return requestHolds
}

// apply is the object that is sent for what is promised. Over was, the object as it is known, it takes only if
// that has not changed since.
func (p *promised) apply(key Name, was *object, owner types.UID) *v1alpha1.RetainedIP {
	r := &v1alpha1.RetainedIP{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "RetainedIP"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: key.Namespace, Name: key.Name,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: p.spec.NodeName, UID: owner}},
		},
		Spec: p.spec, Status: p.status,
	}
	if was != nil {
		r.UID, r.ResourceVersion = was.uid, was.version
		r.Status = after(was.status, p.status)
	}
	return r
}

// shows reports whether an apply over the object would change nothing.
func (o *object) shows(p *promised, owner types.UID) bool {
	if o.answer != nil && o.answer.same(p) && o.owner == owner {
		return true
	}
	return o.owner == owner && o.spec == p.spec && sameStatus(o.status, after(o.status, p.status))
}
