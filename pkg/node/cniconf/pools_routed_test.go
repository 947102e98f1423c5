package cniconf

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/netconf"
)

// An address of a routed pool is the address alone, however long its prefix is said to be. What it cannot have is an
// error that names the field.
func TestARoutedAddressHasNoLink(t *testing.T) {
	const head = `{"network":"net","interface":"eth0","pool":"blue",`
	const second = `"mode":"Routed","address":"10.50.0.5/32"},` + head
	for entry, want := range map[string]string{
		`"mode":"Routed","address":"10.50.0.5/32"`:  "10.50.0.5/32",
		`"mode":"Routed","address":"10.50.0.5/16"`:  "10.50.0.5/32",
		`"mode":"Routed","address":"fd00:50::5/64"`: "fd00:50::5/128",
		`"mode":"Routed","address":"10.50.0.5"`:     "address",
		`"mode":"routed","address":"10.50.0.5/32"`:  "mode",
		`"address":"10.50.0.5/32"`:                  "mode",

		`"mode":"Routed","address":"10.50.0.5/16","gateway":"10.50.0.1"`:            "gateway",
		`"mode":"Routed","address":"10.50.0.5/16","routes":[{"dst":"10.9.0.0/16"}]`: "routes",
		second + `"mode":"L2","address":"fd00:50::5/64"`:                            "mode",
		second + `"mode":"Routed","address":"fd00:50::5/128"`:                       "10.50.0.5/32 fd00:50::5/128",
		second + `"mode":"Routed","address":"10.50.0.6/32"`:                         "address",
	} {
		addrs, err := netconf.ParsePoolAddresses(netconf.AnnotationAddresses, "["+head+entry+"}]", "net", "eth0")
		if err != nil {
			if strings.Contains(want, "/") || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want %s", entry, err, want)
			}
			continue
		}
		var got []string
		for _, a := range addrs {
			if !a.Routed || a.Gateway.IsValid() || len(a.Routes) > 0 {
				t.Errorf("%s: %+v", entry, a)
			}
			got = append(got, a.Prefix.String())
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v; want %s", entry, got, want)
		}
	}
}

// Only where the node is the gateway of its pods can it have routes to them.
func TestRoutedAddressesNeedANodeForAGateway(t *testing.T) {
	for conf, want := range map[string]string{
		`"type":"ptp"`:                     "ptp",
		`"type":"bridge","isGateway":true`: "cni0",
		`"type":"bridge","isDefaultGateway":true,"bridge":"br1"`: "br1",
		`"type":"bridge","isGateway":true,"vlan":0`:              "cni0",
		`"type":"bridge"`:                             "isGateway: ",
		`"type":"bridge","isGateway":false`:           "isGateway: ",
		`"type":"bridge","isGateway":true,"vlan":5`:   "vlan: ",
		`"type":"bridge","isGateway":true,"bridge":5`: "bridge: ",
		`"type":"macvlan"`:                            "type: ",
		`"type":"ipvlan"`:                             "type: ",
		`"type":"sriov"`:                              "type: ",
		`"isGateway":true`:                            "type: ",
		`"type":3`:                                    "type: ",
	} {
		c, err := netconf.Parse(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"net","ipam":{"type":"stayput"},%s}`, conf))
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.MainPlugin()
		if field, bad := strings.CutSuffix(want, ": "); bad {
			if err == nil || !strings.HasPrefix(err.Error(), field) {
				t.Errorf("%s: %+v, %v; want an error of %s", conf, p, err, field)
			}
			continue
		}
		if got := map[bool]string{true: "ptp", false: p.Bridge}[p.Bridge == ""]; err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %s", conf, p, err, want)
		}
	}
}

// On a bridge that is the gateway, and on ptp, the node would take the pool's gateway for its own address.
func TestAddressesOfModeL2NeedALinkThatNodesShare(t *testing.T) {
	for conf, want := range map[string]string{
		`"type":"macvlan"`:                           "",
		`"type":"vlan"`:                              "",
		`"type":"host-device"`:                       "",
		`"type":"sriov"`:                             "",
		`"type":"ipvlan"`:                            "",
		`"type":"ipvlan","mode":"l2"`:                "",
		`"type":"ipvlan","mode":"l3"`:                "mode: ",
		`"type":"ipvlan","mode":"l3s"`:               "mode: ",
		`"type":"bridge"`:                            "",
		`"type":"bridge","isGateway":false`:          "",
		`"type":"bridge","isGateway":true`:           "isGateway: ",
		`"type":"bridge","IsGateway":true`:           "isGateway: ",
		`"type":"bridge","isDefaultGateway":true`:    "isDefaultGateway: ",
		`"type":"bridge","isGateway":true,"vlan":50`: "isGateway: ",
		`"type":"ptp"`:                               "type: ",
		`"type":"calico"`:                            "type: ",
	} {
		c, err := netconf.Parse(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"net","ipam":{"type":"stayput"},%s}`, conf))
		if err != nil {
			t.Fatal(err)
		}
		err = c.OnLink()
		if (err == nil) != (want == "") ||
			err != nil && (!strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "mode Routed")) {
			t.Errorf("%s: %v; want %q", conf, err, want)
		}
	}
}
