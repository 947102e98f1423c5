package node

import (
	"net/netip"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// serves reports whether pods that start now have their eth0 from the plugin. With multus that is not known.
func (a *Agent) serves() bool {
	s := a.keeper.Status().State
	return s.Good() && s != cniconf.StateMultus
}

// bridge returns the name of the bridge that pods of a network are on, empty if they are on none, as far as the node's
// configuration says.
func (a *Agent) bridge(network string) string {
	dir, _ := cniconf.ReadDir(a.o.CNIConfDir) // without it there is no network
	for _, f := range dir.Files {
		if c := dir.Conf(f); c.Network == network {
			if b := c.Bridge(); b != "" {
				return b
			}
		}
	}
	return ""
}

// cannotServe says why pods of the node cannot have addresses of pools of a mode, as far as the configuration says that
// the runtime uses. Without one, or if it cannot be read, no pod starts anyway.
func (a *Agent) cannotServe(mode v1alpha1.PodIPPoolMode) string {
	dir, _ := cniconf.ReadDir(a.o.CNIConfDir)
	if len(dir.Files) == 0 {
		return ""
	}
	conf := dir.Conf(dir.Files[0])
	if mode == v1alpha1.ModeRouted {
		return conf.CannotRoute()
	}
	return conf.CannotServeL2()
}

// subnets returns the first ranges of the node's pods in its configuration, one of each family.
func (a *Agent) subnets() (all []netip.Prefix) {
	dir, _ := cniconf.ReadDir(a.o.CNIConfDir)
	for _, f := range dir.Files {
		c, err := dir.Conf(f).Stayput()
		if err != nil || c == nil {
			continue
		}
		n, err := c.Network()
		if err != nil || len(n.Ranges) == 0 {
			continue // flannel's plugin has them from its own file
		}
		has := map[bool]bool{}
		for _, set := range n.Ranges {
			if p := set[0].Subnet; !has[p.Addr().Is4()] {
				has[p.Addr().Is4()] = true
				all = append(all, p)
			}
		}
		return all
	}
	return nil
}
