package cniconf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Calico's plugin runs the IPAM plugin in ipam.type, and hands it all of its configuration. For one of the name
// host-local it does two things more (cni-plugin/pkg/k8s there), which therefore Derive has to do for stayput:
//
//   - "usePodCidr" and "usePodCidrIPv6" in the place of a subnet become the podCIDRs of the Node, at every ADD;
//   - the pod gets the routes of the IPAM section instead of default routes. What has other routes is left alone.
const (
	calicoType     = "calico"
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// ErrPodCIDRs says that a configuration takes its ranges from the Node, but that the Node's are not known.
var ErrPodCIDRs = errors.New("the Node's podCIDRs are unknown")

// classifyCalico is about Calico's plugin with host-local.
func classifyCalico(p map[string]any) (Kind, string) {
	ipam, _ := p["ipam"].(map[string]any)
	for _, key := range []string{"subnet", "ranges", "routes"} {
		if other := foldedKey(ipam, key); other != "" {
			return Foreign, fmt.Sprintf("ipam: key %q: expected the spelling %q", other, key)
		}
	}
	if other, wanted := p["kubernetes"].(map[string]any); wanted && other["node_name"] != nil && wantsPodCIDRs(ipam) {
		return Foreign, "kubernetes.node_name: Calico uses the podCIDRs of that Node, which may not be this one"
	}
	routes, isList := ipam["routes"].([]any)
	if ipam["routes"] != nil && !isList {
		return Foreign, "ipam.routes: expected a list"
	}
	if i := slices.IndexFunc(routes, notDefault); i >= 0 {
		return Foreign, fmt.Sprintf("ipam.routes[%d]: Calico sets routes other than default routes only with host-local", i)
	}
	return Stock, ""
}

func notDefault(route any) bool {
	r, _ := route.(map[string]any)
	dst, err := netip.ParsePrefix(fmt.Sprint(r["dst"]))
	return err != nil || dst.Bits() != 0
}

// WantsPodCIDRs reports whether Derive needs the Node's podCIDRs.
func (c *Conf) WantsPodCIDRs() bool {
	return c != nil && c.Kind == Stock && slices.ContainsFunc(pluginsOf(c.list), func(p map[string]any) bool {
		ipam, _ := p["ipam"].(map[string]any)
		return typeOf(p) == calicoType && wantsPodCIDRs(ipam)
	})
}

func wantsPodCIDRs(ipam map[string]any) bool {
	wants := false
	_ = eachSubnet(ipam, func(s string) (string, error) {
		wants = wants || strings.EqualFold(s, usePodCIDR) || strings.EqualFold(s, usePodCIDRIPv6)
		return s, nil
	})
	return wants
}

// fillPodCIDRs puts the Node's podCIDRs into an IPAM section as Calico does.
func fillPodCIDRs(ipam map[string]any, all []netip.Prefix) error {
	return eachSubnet(ipam, func(s string) (string, error) {
		is6 := strings.EqualFold(s, usePodCIDRIPv6)
		if !is6 && !strings.EqualFold(s, usePodCIDR) {
			return s, nil
		}
		for _, p := range all {
			if p.Addr().Is6() == is6 {
				return p.String(), nil
			}
		}
		return "", fmt.Errorf("%w: the configuration has %s, but the Node has no podCIDR of that family", ErrPodCIDRs, s)
	})
}

// eachSubnet replaces the subnets where Calico looks for them, and nothing else.
func eachSubnet(ipam map[string]any, by func(string) (string, error)) error {
	replace := func(in any) error {
		m, _ := in.(map[string]any)
		s, ok := m["subnet"].(string)
		if !ok {
			return nil
		}
		is, err := by(s)
		if err == nil && is != s {
			m["subnet"] = is
		}
		return err
	}
	if err := replace(ipam); err != nil {
		return err
	}
	sets, _ := ipam["ranges"].([]any)
	for _, set := range sets {
		ranges, _ := set.([]any)
		for _, r := range ranges {
			if err := replace(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// podCIDRs returns those that a derived configuration was given.
func (c *Conf) podCIDRs() (all []netip.Prefix) {
	list, _ := c.marker()["podCIDRs"].([]any)
	for _, e := range list {
		s, _ := e.(string)
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil
		}
		all = append(all, p)
	}
	return all
}
