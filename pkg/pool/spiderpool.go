package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// This file reads the words of Spiderpool, by which pods ask for addresses of pools as by stayput.io/pools
// (spidernet-io/spiderpool, docs/reference/annotation.md, pkg/types/k8s.go and pkg/ipam/pool_selections.go).

// The annotations of Spiderpool that say something of pools.
const (
	spiderIPPool    = "ipam.spidernet.io/ippool"
	spiderIPPools   = "ipam.spidernet.io/ippools"
	spiderSubnet    = "ipam.spidernet.io/subnet"
	spiderSubnets   = "ipam.spidernet.io/subnets"
	spiderRoutes    = "ipam.spidernet.io/routes"
	spiderDefaultV4 = "ipam.spidernet.io/default-ipv4-ippool"
	spiderDefaultV6 = "ipam.spidernet.io/default-ipv6-ippool"
)

// spiderWords are the annotations of pods, defaults those of namespaces. The first that is set counts.
var (
	spiderWords = []string{spiderSubnets, spiderSubnet, spiderIPPools, spiderIPPool}
	defaults    = []string{spiderDefaultV4, spiderDefaultV6}
)

// askWord is our own annotation.
const askWord = "stayput.io/pools"

// AsksItself reports whether a pod asks for addresses of pools by its own annotations, and whether these decide that
// regardless of its namespace. Spiderpool's words count if spiderpool is set. An empty word of Spiderpool's is as if it
// were not there; ours, if empty, asks for none.
func AsksItself(annotations map[string]string, spiderpool bool) (asks, decides bool) {
	if ours, ok := annotations[askWord]; ok {
		return ours != "", true
	}
	asks = spiderpool && word(annotations, spiderWords) != ""
	return asks, asks
}

// AsksByDefault reports whether the annotations of a namespace ask for its pods.
func AsksByDefault(annotations map[string]string, spiderpool bool) bool {
	if ours, ok := annotations[askWord]; ok {
		return ours != ""
	}
	return spiderpool && word(annotations, defaults) != ""
}

// InSpiderpoolsWords reports whether a pod asks by its own annotations as Spiderpool's pods do, and not in our words.
func InSpiderpoolsWords(annotations map[string]string) bool {
	_, ours := annotations[askWord]
	return !ours && word(annotations, spiderWords) != ""
}

// OfNamespace returns those annotations of a namespace that ask for its pods, whether or not Spiderpool's count.
func OfNamespace(annotations map[string]string) map[string]string {
	var all map[string]string
	for _, key := range append([]string{askWord}, defaults...) {
		if value, ok := annotations[key]; ok {
			if all == nil {
				all = map[string]string{}
			}
			all[key] = value
		}
	}
	return all
}

// word returns which of the keys comes first that is there and not empty.
func word(annotations map[string]string, keys []string) string {
	i := slices.IndexFunc(keys, func(key string) bool { return annotations[key] != "" })
	if i < 0 {
		return ""
	}
	return keys[i]
}

// Asks returns what a pod asks for, by its annotations and those of its namespace. An error names the annotation, and
// what was expected or is not supported.
func Asks(pod, namespace map[string]string, spiderpool bool) (wants []Want, err error) {
	asks, decides := AsksItself(pod, spiderpool)
	from := pod
	if !decides {
		asks, from = AsksByDefault(namespace, spiderpool), namespace
	}
	if !asks {
		return nil, nil
	}
	key := askWord
	if value, ours := from[askWord]; ours {
		wants, err = ParseWants(value)
	} else {
		if pod[spiderRoutes] != "" {
			return nil, fmt.Errorf("annotation %s is not supported: expected the routes in the pool", spiderRoutes)
		}
		if !decides {
			return spiderDefaults(namespace)
		}
		key = word(pod, spiderWords)
		switch value := pod[key]; key {
		case spiderIPPool:
			wants, err = parseIPPool(value)
		case spiderIPPools:
			wants, err = parseIPPools(value)
		default:
			err = errors.New("is not supported: expected " + spiderIPPool + ", with names of pools")
			return nil, fmt.Errorf("annotation %s %w", key, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("annotation %s: %w", key, err)
	}
	return wants, nil
}

// interfacePools is what Spiderpool's annotations say of an interface.
type interfacePools struct {
	Interface    string   `json:"interface"`
	IPv4         []string `json:"ipv4"`
	IPv6         []string `json:"ipv6"`
	CleanGateway bool     `json:"cleangateway"`
}

const (
	exampleIPPool  = `{"ipv4": ["blue-v4"], "ipv6": ["blue-v6"]}`
	exampleIPPools = `[{"interface": "eth0", "ipv4": ["blue-v4"]}, {"interface": "net1", "ipv4": ["green-v4"]}]`
)

// parseIPPool reads ipam.spidernet.io/ippool.
func parseIPPool(value string) ([]Want, error) {
	var is interfacePools
	if err := decode(value, &is); err != nil {
		return nil, fmt.Errorf("%q is not valid: expected an object such as %s: %w", value, exampleIPPool, err)
	}
	w, err := is.want(DefaultInterface)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", value, err)
	}
	return []Want{w}, nil
}

// parseIPPools reads ipam.spidernet.io/ippools. Without its name, which interface is meant depends on the network: it
// can be left out of the only one.
func parseIPPools(value string) ([]Want, error) {
	var list []interfacePools
	err := decode(value, &list)
	if err == nil && len(list) == 0 {
		err = errors.New("it has no interface")
	}
	if err != nil {
		return nil, fmt.Errorf("%q is not valid: expected a list such as %s: %w", value, exampleIPPools, err)
	}
	only := ""
	if len(list) == 1 {
		only = DefaultInterface
	}
	var wants []Want
	for i, is := range list {
		w, err := is.want(only)
		if err == nil && slices.ContainsFunc(wants, func(o Want) bool { return o.Interface == w.Interface }) {
			err = fmt.Errorf("expected each interface once, but %s is listed twice", w.Interface)
		}
		if err != nil {
			return nil, fmt.Errorf("%q: [%d]: %w", value, i, err)
		}
		wants = append(wants, w)
	}
	return wants, nil
}

// spiderDefaults reads the defaults of a namespace.
func spiderDefaults(namespace map[string]string) ([]Want, error) {
	var is interfacePools
	for key, pools := range map[string]*[]string{spiderDefaultV4: &is.IPv4, spiderDefaultV6: &is.IPv6} {
		if value := namespace[key]; value != "" {
			err := decode(value, pools)
			if err == nil {
				_, err = (&interfacePools{IPv4: *pools}).want(DefaultInterface)
			}
			if err != nil {
				return nil, fmt.Errorf(`annotation %s of the namespace: %q is not valid: expected a list such as ["blue"]: %w`, key,
					value, err)
			}
		}
	}
	w, err := is.want(DefaultInterface)
	if err != nil {
		return nil, fmt.Errorf("annotations %s and %s of the namespace: %w", spiderDefaultV4, spiderDefaultV6, err)
	}
	return []Want{w}, nil
}

// decode reads JSON, and nothing that is not known.
func decode(text string, into any) error {
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected text after it")
	}
	return nil
}

// want returns the same in our words. iface is the interface if none is named.
func (is *interfacePools) want(iface string) (Want, error) {
	w := Want{Interface: is.Interface, Pools: slices.Concat(is.IPv4, is.IPv6)}
	if w.Interface == "" {
		w.Interface = iface
	}
	switch {
	case w.Interface == "":
		return Want{}, errors.New("expected an interface in each, such as eth0")
	case !isInterface(w.Interface):
		return Want{}, fmt.Errorf("interface: %q is not valid: expected the name of an interface, such as eth0", w.Interface)
	case is.CleanGateway:
		return Want{}, errors.New("cleangateway is not supported: expected a pool without a gateway")
	case len(w.Pools) == 0:
		return Want{}, errors.New("expected names of pools in ipv4 or ipv6")
	}
	for i, name := range w.Pools {
		switch {
		case strings.ContainsAny(name, "*?["):
			return Want{}, fmt.Errorf("wildcards such as %q are not supported: expected names of pools", name)
		case !isName(name, 253):
			return Want{}, fmt.Errorf("%q is not valid: expected the name of a pool", name)
		case slices.Contains(w.Pools[:i], name):
			return Want{}, fmt.Errorf("expected each pool once for an interface, but %s is listed twice", name)
		}
	}
	return w, nil
}
