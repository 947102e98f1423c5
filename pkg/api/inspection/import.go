package inspection

import "net/netip"

// Import is what `stayput-agent import` reads and prints: addresses that another program has promised, and what
// becomes of each.
type Import struct {
	Items []ImportItem `json:"items"`
	// Pools are those that the addresses are of, if they are taken over into pools.
	Pools []ImportPool `json:"pools,omitempty"`
}

// ImportPool is a pool of another program.
type ImportPool struct {
	Name   string `json:"name"`
	Subnet string `json:"subnet"`
	Action Action `json:"action"`
	Why    string `json:"why,omitempty"`
	Done   bool   `json:"done,omitempty"`
}

// Action is what becomes of a promise of another program.
type Action string

// The actions.
const (
	// ActionRetain: the address is kept for a pod that is not there now.
	ActionRetain Action = "Retain"
	// ActionBind: the address is promised to the pod that has it, which keeps running.
	ActionBind Action = "Bind"
	// ActionAdopt: the address is of a pool, and of the pod that runs with it.
	ActionAdopt Action = "Adopt"
	// ActionCreate: the pool is made.
	ActionCreate Action = "Create"
	// ActionNone: nothing has to be done; Why says why.
	ActionNone Action = "None"
	// ActionRefuse: it cannot be taken over; Why says why.
	ActionRefuse Action = "Refuse"
)

// ImportItem is the promise of the addresses of one interface of a pod.
type ImportItem struct {
	Namespace string       `json:"namespace"`
	Pod       string       `json:"pod"`
	Interface string       `json:"interface"`
	Pool      string       `json:"pool,omitempty"`
	IPs       []netip.Addr `json:"ips"`
	// Retention is a value of the annotation stayput.io/retain-ip.
	Retention string `json:"retention"`

	// Node, Network, Action, Why and Done are the answer. Done says that the action was carried out.
	Node    string `json:"node,omitempty"`
	Network string `json:"network,omitempty"`
	Action  Action `json:"action,omitempty"`
	Why     string `json:"why,omitempty"`
	Done    bool   `json:"done,omitempty"`
}
