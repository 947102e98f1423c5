// Package inspection is what `stayput-agent inspect` prints: one node as its files, its runtime and its agent
// have it, for kubectl stayput and for people. It is JSON; fields are added, and never change their meaning
// within a Format.
package inspection

import (
	"net/netip"
	"slices"
	"time"
)

// Format is of this package. A reader that meets a larger one knows less than the node says.
const Format = 1

// Node is a node at one moment. What could not be observed is an Error in its place: unknown is never shown as empty.
type Node struct {
	Format int `json:"format"`
	// Version is of the program that looked, which is the agent's; Build is the version of the module that it was
	// built from, which is what can be told of other programs on disk.
	Version  string    `json:"version"`
	Build    string    `json:"build,omitempty"`
	StateDir string    `json:"stateDir"`
	Clock    Clock     `json:"clock"`
	Agent    Agent     `json:"agent"`
	Runtime  Runtime   `json:"runtime"`
	CNI      CNI       `json:"cni"`
	Networks []Network `json:"networks"`
	// NetworksError says which networks' descriptions cannot be read, NetworksNewer that a newer version wrote one.
	NetworksError string `json:"networksError,omitempty"`
	NetworksNewer bool   `json:"networksNewer,omitempty"`
}

// Clock is the node's.
type Clock struct {
	Wall   time.Time `json:"wall"`
	BootID string    `json:"bootID,omitempty"`
	Error  string    `json:"error,omitempty"`
}

// Agent is the daemon, as it answers on its own endpoint.
type Agent struct {
	Ready bool `json:"ready"`
	// NRI, CRI and API are what it says of its connections: "ok" or "connected", else what is wrong. Empty is
	// not said; of API, that it has none.
	NRI string `json:"nri,omitempty"`
	CRI string `json:"cri,omitempty"`
	API string `json:"api,omitempty"`
	// Annotations is what it says of how those of pods come, as in Status.
	Annotations string `json:"annotations,omitempty"`
	// CNI is what it says of the runtime's configuration, as in /readyz.
	CNI   string `json:"cni,omitempty"`
	Error string `json:"error,omitempty"`
	// GracePeriod is how long a suspected leak is kept, in seconds.
	GracePeriod int64 `json:"gracePeriodSeconds"`
}

// StatusPath is the daemon's path for its Status as JSON. Without the query it serves the same as text.
const StatusPath = "/readyz?format=json"

// Status is what the daemon says of itself. Each part is "ok", "connected" or a description, and begins with
// "degraded: " if the part does not work; empty is not said.
type Status struct {
	Ready bool `json:"ready"`
	// Message says why it is not ready, or how far the uninstallation of the node is.
	Message string `json:"message,omitempty"`

	NRI string `json:"nri,omitempty"`
	CRI string `json:"cri,omitempty"`
	// Annotations is AnnotationsListed if those of pods come neither through CNI nor NRI.
	Annotations string `json:"annotations,omitempty"`

	CNI    string `json:"cni,omitempty"`
	Ledger string `json:"ledger,omitempty"`
	API    string `json:"api,omitempty"`

	// CNIState and CNIMessage are State and Message of CNI as the daemon knows them.
	CNIState   string `json:"cniState,omitempty"`
	CNIMessage string `json:"cniMessage,omitempty"`
}

// NRIOff is reported of NRI where the agent is not to use it.
const NRIOff = "off"

// AnnotationsListed is reported of the pods' annotations where they come only from the runtime's list of sandboxes.
const AnnotationsListed = "from the runtime's list alone"

// Runtime is the container runtime.
type Runtime struct {
	Sandboxes int    `json:"sandboxes"`
	Ready     int    `json:"ready"`
	Error     string `json:"error,omitempty"`
}

// CNI is how the runtime is configured, and the plugin that it would run.
type CNI struct {
	// State is active, by-hand, stock, none, unsupported, broken, held, multus, shadowed, conflict, no-plugin or
	// error; Message is what that means here. Good: addresses are kept, as far as is known.
	State   string `json:"state"`
	Message string `json:"message"`
	Good    bool   `json:"good"`
	Dir     string `json:"dir"`
	// File is the file that the runtime uses, Network the network that pods are in, Source what the agent's file is
	// derived from, if there is one.
	File    string `json:"file,omitempty"`
	Network string `json:"network,omitempty"`
	Source  string `json:"source,omitempty"`
	// WithoutAnnotations: a file written by hand does not pass on the pods' annotations.
	WithoutAnnotations bool `json:"withoutAnnotations,omitempty"`
	// Installs: the agent installs the plugin and keeps the configuration.
	Installs bool `json:"installs"`
	// Plugin is the binary that the runtime runs, Image the one that the agent brought with it.
	Plugin Binary `json:"plugin"`
	Image  Binary `json:"image"`
}

// Binary is a program on disk.
type Binary struct {
	Path    string `json:"path"`
	Version string `json:"version,omitempty"`
	SHA256  string `json:"sha256,omitempty"`
	// Error is empty if the file exists and can be run.
	Error string `json:"error,omitempty"`
	// Unseen: not even its directory exists, as in a container that does not mount it.
	Unseen bool `json:"unseen,omitempty"`
}

// Network is one CNI network that the plugin has served.
type Network struct {
	Name    string `json:"name"`
	DataDir string `json:"dataDir"`
	// LongestRetention is a Go duration, empty if there is no limit.
	LongestRetention string     `json:"longestRetention,omitempty"`
	PromisedShare    float64    `json:"promisedShare"`
	PromisedLimit    int64      `json:"promisedLimit"`
	RangeSets        []RangeSet `json:"rangeSets"`
	// Addresses are those that are not free, sorted.
	Addresses []Address `json:"addresses"`
	// Violations are what the files say against each other, Newer the records that a newer version of stayput wrote.
	Violations []string `json:"violations,omitempty"`
	Newer      []string `json:"newer,omitempty"`
	// Leaks are bound addresses whose sandbox the runtime does not list, seen twice.
	Leaks []Suspicion `json:"leaks,omitempty"`
	// Doubled are addresses that a sandbox of the runtime has and the ledger has as another's or as free, seen twice.
	Doubled []Suspicion `json:"doubled,omitempty"`
	// ErrorNewer says of Error that a newer version wrote what cannot be read.
	Error      string `json:"error,omitempty"`
	ErrorNewer bool   `json:"errorNewer,omitempty"`
}

// RangeSet is the ranges of which a pod gets one address.
type RangeSet struct {
	Ranges []Range `json:"ranges"`
	// Size is how many addresses it can give, Promised how many are promised, bound and retained together, and
	// PromiseLimit how many may be.
	Size         int64 `json:"size"`
	Promised     int64 `json:"promised"`
	PromiseLimit int64 `json:"promiseLimit"`
}

// Contains reports whether a is in one of the ranges.
func (s RangeSet) Contains(a netip.Addr) bool {
	return slices.ContainsFunc(s.Ranges, func(r Range) bool { return r.Contains(a) })
}

// Range is a stretch of a subnet; Start and End belong to it. Gateway is never given to a pod.
type Range struct {
	Subnet  netip.Prefix `json:"subnet"`
	Start   netip.Addr   `json:"start"`
	End     netip.Addr   `json:"end"`
	Gateway netip.Addr   `json:"gateway"`
}

// Contains reports whether a is in the range.
func (r Range) Contains(a netip.Addr) bool {
	return a.BitLen() == r.Start.BitLen() && !a.Less(r.Start) && !r.End.Less(a)
}

// State is what an address is.
type State string

// The states; an address that is not listed is free.
const (
	Bound      State = "Bound"
	Retained   State = "Retained"
	Newer      State = "Newer"      // retained by a newer version of stayput than the agent's
	Unreadable State = "Unreadable" // its file is damaged: taken, the owner is unknown
)

// Address is an address that is not free.
type Address struct {
	IP    netip.Addr `json:"ip"`
	State State      `json:"state"`
	// ContainerID and Interface are of a bound address.
	ContainerID string `json:"containerID,omitempty"`
	Interface   string `json:"interface,omitempty"`
	// Namespace, Pod and UID are of the pod that has it or had it last, as far as they are known.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"`
	// Promise is nil if the address becomes free with its pod.
	Promise *Promise `json:"promise,omitempty"`
	// Since and LeftSeconds are of a retained address; LeftSeconds is nil if it never expires.
	Since       *time.Time `json:"since,omitempty"`
	LeftSeconds *int64     `json:"leftSeconds,omitempty"`
}

// Promise is what becomes of an address when its pod ends.
type Promise struct {
	// Identity is pod:NAMESPACE/NAME or set:NAMESPACE/NAME.
	Identity string `json:"identity"`
	// Retention is a Go duration, or while-owned.
	Retention   string `json:"retention"`
	WhenScaled  string `json:"whenScaled,omitempty"`
	WhenDeleted string `json:"whenDeleted,omitempty"`
	WhenMoved   string `json:"whenMoved,omitempty"`
}

// Suspicion is what does not look right about an address.
type Suspicion struct {
	IP  netip.Addr `json:"ip"`
	Why string     `json:"why"`
}
