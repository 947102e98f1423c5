package pool

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Write is one change of the cluster. Each is bound to what it was decided on: if that has changed, the API server
// refuses it, and the decision is to be made again.
type Write interface{ conditions() []Check }

// The writes. Those with a Version are refused if the object has another one, or another UID.
type (
	// CreateIP claims an address. It never overwrites.
	CreateIP struct {
		PodIP PodIP
		If    []Check
	}
	// UpdateIP writes the spec and the finalizer of a PodIP: all that PodIP says, bound to its Version.
	UpdateIP struct {
		PodIP PodIP
		If    []Check
	}
	// StatusIP writes Phase, StatusUID, Node, Since, Conflict and PodCIDR of a PodIP, bound to its Version.
	StatusIP struct {
		PodIP PodIP
		If    []Check
	}
	// DeleteIP deletes a PodIP, which stays until its finalizer is gone.
	DeleteIP struct {
		PodIP PodIP
		If    []Check
	}
	// PlacePod writes the annotation with all addresses and removes the gate, in one patch, which also has the pod
	// scheduled to the nodes that the pools of Addresses select, and to none of Without.
	PlacePod struct {
		UID             UID
		Version         string
		Namespace, Name string
		Addresses       []Address
		Without         []string
		If              []Check
	}
	// EndPod deletes a pod that cannot run: its node has barred it.
	EndPod struct {
		UID             UID
		Namespace, Name string
		If              []Check
	}
	// HoldPool adds our finalizer to a pool, or removes it.
	HoldPool struct {
		Name, Version string
		Held          bool
		If            []Check
	}
	// FreeAllocation has Calico's IPAM free an address, bound to what it said of that.
	FreeAllocation struct {
		Addr       netip.Addr
		Allocation Allocation
		If         []Check
	}
	// WriteAudit writes what all nodes are asked; without a Version, it creates that.
	WriteAudit struct {
		Audit Audit
		If    []Check
	}
)

func (w CreateIP) conditions() []Check       { return w.If }
func (w UpdateIP) conditions() []Check       { return w.If }
func (w StatusIP) conditions() []Check       { return w.If }
func (w DeleteIP) conditions() []Check       { return w.If }
func (w PlacePod) conditions() []Check       { return w.If }
func (w EndPod) conditions() []Check         { return w.If }
func (w HoldPool) conditions() []Check       { return w.If }
func (w FreeAllocation) conditions() []Check { return w.If }
func (w WriteAudit) conditions() []Check     { return w.If }

// ErrStale is the error of a write whose conditions are not met: what it was decided on no longer holds.
var ErrStale = errors.New("decided on outdated state")

// Live reads past all caches.
type Live interface {
	// Pod returns the pod of this name, nil if there is none.
	Pod(ctx context.Context, namespace, name string) (*Pod, error)
	// Node returns a node, nil if there is none.
	Node(ctx context.Context, name string) (*Node, error)
	// PodIP returns the PodIP of an address, nil if there is none.
	PodIP(ctx context.Context, a netip.Addr) (*PodIP, error)
	// Nodes returns the names of all nodes.
	Nodes(ctx context.Context) ([]string, error)
	// Audit returns what nodes are asked; without a Version there is none.
	Audit(ctx context.Context) (Audit, error)
	// Allocation returns what Calico's IPAM says of an address.
	Allocation(ctx context.Context, a netip.Addr) (Allocation, error)
	// Seen returns the newest audit that this controller has read or written, for it may be newer than that of a plan.
	Seen() Audit
	Now() time.Time
}

// Check is a condition of a write that no version covers, because it is about other objects. It is read past the
// caches, just before the write.
type Check struct {
	// Gone is a pod that must not exist (any more), There a pod that must exist, not be ending, and have no node if it is
	// known without one.
	Gone, There *Pod
	// Away names pods of which none may be on its node, but for one that was told of other addresses than ReportedIP.
	Away *Pod
	// Starting is a pod that must be on its node, and whose sandbox has the address neither by kubelet nor by Calico's
	// plugin.
	Starting *Pod
	// Off is a node that must not exist, or must be declared off by an operator and not Ready.
	Off string
	// Among are nodes besides which there must be no other.
	Among []string
	// Others is an address that must be another pod's than There by its PodIP, the zero Addr if none must.
	Others netip.Addr
	// Free is an address that must be free by Calico's IPAM, the zero Addr if none must.
	Free netip.Addr
	// Since is the audit that was known: the API server must not have forgotten anything since, nor anything that this
	// controller has seen.
	Since *Audit
}

// Holds returns nil if all conditions of a write are met, [ErrStale] if one is not.
func Holds(ctx context.Context, w Write, live Live) error {
	for _, c := range w.conditions() {
		if err := c.holds(ctx, live); err != nil {
			return err
		}
	}
	return nil
}

func (c Check) holds(ctx context.Context, live Live) error {
	for _, check := range []struct {
		want  *Pod
		unmet func(is *Pod) bool
		why   string
	}{
		{c.Gone, func(is *Pod) bool { return is != nil && is.UID == c.Gone.UID }, "exists"},
		{c.There, func(is *Pod) bool {
			return !is.alive() || is.UID != c.There.UID || c.There.Node == "" && is.Node != ""
		}, "has ended, or has a node"},
		{c.Away, func(is *Pod) bool {
			return is != nil && is.Node == c.Away.Node && (is.Assigned == nil || is.has(c.Away.ReportedIP))
		}, "may have the address"},
		{c.Starting, func(is *Pod) bool {
			return !is.starting() || is.UID != c.Starting.UID || is.Node != c.Starting.Node
		}, "has started or ended"},
	} {
		if check.want == nil {
			continue
		}
		is, err := live.Pod(ctx, check.want.Namespace, check.want.Name)
		if err != nil {
			return err
		}
		if check.unmet(is) {
			return fmt.Errorf("pod %s/%s %s: %w", check.want.Namespace, check.want.Name, check.why, ErrStale)
		}
	}
	if c.Off != "" {
		is, err := live.Node(ctx, c.Off)
		if err != nil {
			return err
		}
		if is != nil && !is.off() {
			return fmt.Errorf("node %s exists, and has no taint %s or is Ready: %w", c.Off, OutOfService, ErrStale)
		}
	}
	if c.Among != nil {
		are, err := live.Nodes(ctx)
		if err != nil {
			return err
		}
		among := map[string]bool{}
		for _, node := range c.Among {
			among[node] = true
		}
		for _, node := range are {
			if !among[node] {
				return fmt.Errorf("node %s is new: %w", node, ErrStale)
			}
		}
	}
	if c.Others.IsValid() {
		is, err := live.PodIP(ctx, c.Others)
		if err != nil {
			return err
		}
		if is == nil || is.PodUID == c.There.UID {
			return fmt.Errorf("%s is no other pod's: %w", c.Others, ErrStale)
		}
	}
	if c.Free.IsValid() {
		is, err := live.Allocation(ctx, c.Free)
		if err != nil {
			return err
		}
		if is.Handle != "" {
			return fmt.Errorf("by Calico's IPAM %s has %s: %w", is, c.Free, ErrStale)
		}
	}
	if c.Since != nil {
		is, err := live.Audit(ctx)
		if err != nil {
			return err
		}
		if is.lost(*c.Since, live.Now()) || is.older(live.Seen()) || is.Term != c.Since.Term || is.Recalling {
			return fmt.Errorf("the API server's data were restored: %w", ErrStale)
		}
	}
	return nil
}

// NoteIn puts into a Book that the write was made, before a watch says so: a look at the pod in between would place it
// again. It returns the pod, nil if the Book has another version of it, or none.
func (w PlacePod) NoteIn(b *Book) *Pod {
	known := b.pods[w.UID]
	if known == nil || known.Version != w.Version {
		return nil
	}
	is := *known
	is.Gated, is.Assigned = false, w.Addresses
	b.SetPod(is)
	return &is
}

// Placed reports whether a pod in a Book is the one of a version, and was placed since: see [PlacePod.NoteIn].
func Placed(is *Pod, version string) bool {
	return is != nil && is.Version == version && is.Assigned != nil && !is.Gated
}

// Plan is what to do now for a pod, an address, a pool or the audit.
type Plan struct {
	// Writes to make, in this order; the first that fails ends the plan.
	Writes []Write
	// Reason says why the pod waits, or why the address is neither used nor free. Empty: it does not.
	Reason string
	// Remedy is what an operator has to do about it, empty if it ends without intervention.
	Remedy string
	// Until is when the reason ends, if that is known.
	Until time.Time
	// Addrs are those of other PodIPs that the reason is about.
	Addrs []netip.Addr
	// Contact are nodes whose Leases, read now and once they were renewed, may end the reason.
	Contact []string
}
