package pool

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// UID is that of a pod.
type UID = types.UID

// OutOfService is the key of the taint by which an operator says that a node is off.
const OutOfService = "node.kubernetes.io/out-of-service"

// AgentLabel with the value NoAgent is the label by which an operator says of a Node that no agent is to run there.
const (
	AgentLabel = "stayput.io/agent"
	NoAgent    = "none"
)

// Owner is whose address it is: a pod, by its name, or all pods of a shared identity.
type Owner struct{ Namespace, Pod, Identity string }

// ownerOf returns the owner of the addresses of a pod.
func ownerOf(namespace, pod, identity string) Owner {
	if identity != "" {
		pod = ""
	}
	return Owner{namespace, pod, identity}
}

// Workload names the controller of a pod.
type Workload = v1alpha1.WorkloadReference

// Keep is how long an address is kept once its pod is gone, the zero Keep if it is not.
type Keep struct {
	// For is for how long. With WhileOwned zero means without end.
	For        time.Duration
	WhileOwned bool
	// Scaled and Deleted: whether it is released when the workload is scaled down below the pod, or deleted.
	Scaled, Deleted bool
}

// Phase of a PodIP.
type Phase = v1alpha1.PodIPPhase

// The phases. Retained is a promise: the pod will never have the address again.
const (
	Allocated = v1alpha1.PodIPAllocated
	Bound     = v1alpha1.PodIPBound
	Retained  = v1alpha1.PodIPRetained
)

// PodIP is an address and its owner.
type PodIP struct {
	Addr    netip.Addr
	UID     string // of the object
	Version string // of the object, empty if it does not exist yet
	Created time.Time

	Pool               string
	Mode               Mode
	Namespace, PodName string
	Identity           string
	PodUID             UID
	Network, Interface string
	Keep               Keep
	Workload           Workload
	Release            bool
	// AdoptedOn is the node on which PodUID had the address before, from elsewhere, so that it is its own though it has
	// not been told of it. Empty if it had not.
	AdoptedOn string
	Held      bool // by our finalizer
	Deleting  bool

	// The status, which is about the pod StatusUID.
	Phase     Phase
	StatusUID UID
	Node      string
	Since     time.Time
	// Conflict is the MAC address of another machine on the link of Node that has the address, so that the pod could not
	// start, empty if none was found.
	Conflict string
	// PodCIDR is how other nodes route to the pods of Node, the zero Prefix if it is not known, or Mode is not Routed.
	PodCIDR netip.Prefix
}

func (p *PodIP) owner() Owner { return ownerOf(p.Namespace, p.PodName, p.Identity) }

// gone reports whether it is known that the pod the address was given to no longer has it.
func (p *PodIP) gone() bool { return p.StatusUID == p.PodUID && p.Phase == Retained }

// unconfirmed reports whether the address was imported from Calico, and it is not known yet whether the pod had it once
// no other could get it.
func (p *PodIP) unconfirmed() bool { return p.Mode == Calico && p.adopted() && p.StatusUID != p.PodUID }

// adopted reports whether the pod had the address before, from elsewhere.
func (p *PodIP) adopted() bool { return p.AdoptedOn != "" }

// saidOn returns the node that has said of the pod the address was given to that it is or was there, empty if none has.
func (p *PodIP) saidOn() string {
	if p.StatusUID != p.PodUID {
		return ""
	}
	return p.Node
}

// boundOn reports whether a node says that the pod the address was given to has it there.
func (p *PodIP) boundOn(node string) bool {
	return p.Phase == Bound && node != "" && p.saidOn() == node
}

// conflicts reports whether another machine has the address, so that the pod it was given to could not start.
func (p *PodIP) conflicts() bool {
	return p.StatusUID == p.PodUID && p.Phase != Retained && p.Conflict != ""
}

// WorkloadKey names a workload, regardless of the served version of its kind.
type WorkloadKey struct{ Group, Kind, Namespace, Name string }

// WorkloadKey returns the key of the workload of an address.
func (p *PodIP) WorkloadKey() WorkloadKey {
	group, _, versioned := strings.Cut(p.Workload.APIVersion, "/")
	if !versioned {
		group = "" // the core API
	}
	return WorkloadKey{group, p.Workload.Kind, p.Namespace, p.Workload.Name}
}

// Pod is a pod that asks for addresses of pools, has some, or was given some.
type Pod struct {
	UID             UID
	Version         string
	Namespace, Name string
	Identity        string
	Created         time.Time
	Node            string
	Gated           bool // by our gate
	Ending          bool // to be deleted
	Terminal        bool // succeeded or failed: its node never starts it again
	Wants           []Want
	// Assigned is the annotation with its addresses, nil if there is none. A controller writes it once, as it removes the
	// gate.
	Assigned []Address
	Keep     Keep
	// ReportedIP is status.podIP, the zero Addr if there is none. Without Assigned no pool has given it.
	ReportedIP netip.Addr
	// Sandboxless says that by its kubelet the pod has no sandbox that is ready (PodReadyToStartContainers). Then
	// ReportedIP is of an earlier one: getPodIPs in pkg/kubelet/pleg/generic.go.
	Sandboxless bool
	// Noted says that Calico's plugin has written the pod's addresses into its annotations, as it does at the end of an
	// ADD, and until a DEL begins. No ADD is under way then; the next one would release the addresses itself. Once the
	// deletion of the pod has begun, it says what it said then.
	Noted bool
	// foundEnding says that it was being deleted when this controller saw it first.
	foundEnding bool
	// AllocateNew says that it takes another address rather than wait for its own (stayput.io/when-in-use: AllocateNew).
	AllocateNew bool
	Workload    Workload
	// Namespaced are the labels of its namespace.
	Namespaced map[string]string
}

// takesAny reports whether a pod takes another address rather than wait for one of its own.
func (p *Pod) takesAny() bool { return p.Identity != "" || p.AllocateNew }

// alive reports whether a pod, nil if there is none, is there to stay.
func (p *Pod) alive() bool { return p != nil && !p.Ending && !p.Terminal }

// address returns what a pod was told of an address, nil if it was not told to have that.
func (p *Pod) address(a netip.Addr) *Address {
	if i := slices.IndexFunc(p.Assigned, func(h Address) bool { return h.Prefix.Addr() == a }); i >= 0 {
		return &p.Assigned[i]
	}
	return nil
}

func (p *Pod) has(a netip.Addr) bool { return p.address(a) != nil }

// Want is an interface of a pod, and the pools that its addresses may come from: one of each family, of each family
// from the first pool that has one.
type Want struct {
	Network, Interface string
	Pools              []string
}

// Address is an address of a pod, as its annotation stayput.io/addresses tells the node.
type Address struct {
	Network   string       `json:"network,omitempty"`
	Interface string       `json:"interface"`
	Pool      string       `json:"pool"`
	Mode      Mode         `json:"mode"`
	Prefix    netip.Prefix `json:"address"` // with the length of the subnet
	Gateway   netip.Addr   `json:"gateway,omitzero"`
	Routes    []Route      `json:"routes,omitempty"`
	// Last is the node on which the address was used last, as far as is known. On any other node the address may be in use
	// by another host, and is probed before it is used.
	Last string `json:"last,omitempty"`
}

// Node of the cluster.
type Node struct {
	Name  string
	Ready bool
	// ReadySince is when that began, zero if it is not known.
	ReadySince time.Time
	// Off says that an operator has declared it off, by the taint out-of-service.
	Off bool
	// Foreign says that no agent is to run on it. Unless one did, it cannot have an address of a pool.
	Foreign bool
}

// off reports whether the word of an operator that the node is off counts. While it is Ready its kubelet speaks: the
// taint was forgotten when it came back.
func (n Node) off() bool { return n.Off && !n.Ready }

// Pool is a PodIPPool.
type Pool struct {
	Name    string
	Version string
	// Revision is another one whenever the spec is: the UID and the generation of the object.
	Revision string
	Range    Range
	// Invalid says why nothing can be had of the pool, the error of [Parse], nil if something can.
	Invalid error
	// Unready says why no pod can start with its addresses now, empty if pods can.
	Unready  string
	Disabled bool
	Deleting bool
	Held     bool // by our finalizer
	// Serves reports whether pods of a namespace with these labels get addresses, nil if all do. ForNode is the same for
	// pods on a node.
	Serves, ForNode func(labels map[string]string) bool
}

// End is the end of a pod as a controller saw it.
type End struct {
	// Node that the pod had when it was seen last.
	Node string
	// Final says that this was its last state, so that without a node it never had one. A watch that was interrupted does
	// not tell.
	Final bool
	// After is a time when the pod still existed, zero if none is known: see [Book.DatePods]. At is when its end was heard
	// of, which may be long after it.
	After, At time.Time
	// Started says that it was Noted, or had ended by its kubelet's word: no ADD of it is under way. FoundEnding says that
	// this is not known, as it was being deleted when this controller saw it first.
	Started, FoundEnding bool
	// Predates says that it was made before all nodes were asked: a restore may have made Calico forget its allocation.
	Predates bool
	// Freed are the addresses of which Calico's IPAM said that the node has freed them: see [Book.noteFreed].
	Freed []netip.Addr
}

// freed reports whether the node is known to have freed an address of the pod.
func (e End) freed(a netip.Addr) bool { return slices.Contains(e.Freed, a) }
