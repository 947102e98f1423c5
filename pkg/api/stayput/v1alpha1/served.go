package v1alpha1

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// ServedPools is what agents have to know of the cluster's pools: the value of [AnnotationPools] on the ConfigMap
// stayput-installation, as JSON.
//
// +kubebuilder:object:generate=false
type ServedPools struct {
	// Subnets are those of all pools, unless More, and Gateways what pods of pools have for gateways.
	Subnets  []netip.Prefix `json:"subnets,omitempty"`
	Gateways []netip.Addr   `json:"gateways,omitempty"`
	More     bool           `json:"more,omitempty"`
	// Spiderpool says that pods ask for addresses of the pools by Spiderpool's annotations, too.
	Spiderpool bool `json:"spiderpool,omitempty"`
}

// MostServed is how many subnets, and how many gateways, a [ServedPools] has at most: an annotation is small.
const MostServed = 1000

// Text is the value of the annotation.
func (s *ServedPools) Text() string {
	is := *s
	is.Subnets = slices.Compact(slices.SortedFunc(slices.Values(s.Subnets), netip.Prefix.Compare))
	is.Gateways = slices.Compact(slices.SortedFunc(slices.Values(s.Gateways), netip.Addr.Compare))
	if len(is.Subnets) > MostServed {
		is.Subnets, is.More = nil, true
	}
	if len(is.Gateways) > MostServed {
		is.Gateways = nil
	}
	b, err := json.Marshal(is)
	if err != nil {
		panic(err) // texts and lists of addresses marshal
	}
	return string(b)
}

// ParseServedPools reads the value of the annotation. "true" is that of a controller that says no more.
func ParseServedPools(text string) (*ServedPools, error) {
	if text == "true" {
		return &ServedPools{More: true}, nil
	}
	s := &ServedPools{}
	if err := json.Unmarshal([]byte(text), s); err != nil {
		return nil, fmt.Errorf("annotation %s: %.64q is not valid: "+
			"expected the pools, as the controller writes them: %w", AnnotationPools, text, err)
	}
	return s, nil
}
