package inspection

import "net/netip"

// Release is what `stayput-agent release` prints: the addresses that a node retains for pods of one namespace.
type Release struct {
	Items []ReleaseItem `json:"items"`
}

// ReleaseItem is one of them. Done says that it was released.
type ReleaseItem struct {
	Namespace string     `json:"namespace"`
	Pod       string     `json:"pod"`
	IP        netip.Addr `json:"ip"`
	Network   string     `json:"network"`
	Done      bool       `json:"done,omitempty"`
}
