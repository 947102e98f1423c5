package cniconf

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stayput/stayput/test/must"
)

func TestCalicosPodCIDRsAreFilledInAsCalicoDoes(t *testing.T) {
	four, six := netip.MustParsePrefix("10.244.7.0/24"), netip.MustParsePrefix("fd00:7::/64")
	for name, c := range map[string]struct {
		ipam string
		node []netip.Prefix
		want string // the ranges that stayput is given, empty for ErrPodCIDRs
	}{
		"one subnet": {`"subnet":"usePodCidr"`, []netip.Prefix{four}, "[[10.244.7.0/24]]"},
		"in ranges":  {`"ranges":[[{"subnet":"usePodCidr"}]]`, []netip.Prefix{four}, "[[10.244.7.0/24]]"},
		"both families": {`"ranges":[[{"subnet":"usePodCidr"}],[{"subnet":"usePodCidrIPv6"}]]`, []netip.Prefix{six, four},
			"[[10.244.7.0/24] [fd00:7::/64]]"},
		"in other letters":     {`"subnet":"USEPODCIDR"`, []netip.Prefix{four, six}, "[[10.244.7.0/24]]"},
		"beside a real subnet": {`"ranges":[[{"subnet":"10.9.0.0/24"},{"subnet":"usepodcidr"}]]`, []netip.Prefix{four}, "[[10.9.0.0/24 10.244.7.0/24]]"},
		"no such family":       {`"subnet":"usePodCidrIPv6"`, []netip.Prefix{four}, ""},
		"only the other":       {`"ranges":[[{"subnet":"usePodCidr"}],[{"subnet":"usePodCidrIPv6"}]]`, []netip.Prefix{six}, ""},
		"unknown":              {`"subnet":"usePodCidr"`, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			source := Dir{}.Conf(File{Name: "10-calico.conflist", Data: []byte(calicoWith(c.ipam))})
			if !source.WantsPodCIDRs() {
				t.Fatalf("it does not ask for the Node's podCIDRs: %d, %s", source.Kind, source.Why)
			}
			data, err := Derive(source, Limits{PodCIDRs: c.node}, nil)
			if c.want == "" {
				if !errors.Is(err, ErrPodCIDRs) {
					t.Errorf("%v: %s", err, data)
				}
				return
			}
			must.Do(t, err)
			if got := rangesOf(t, data); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// rangesOf returns the ranges that stayput is given by a derived file.
func rangesOf(t *testing.T, data []byte) string {
	t.Helper()
	conf, err := Dir{}.Conf(File{Name: "00-x.conflist", Data: data}).Stayput()
	must.Do(t, err)
	n, err := conf.Network()
	must.Do(t, err)
	var all [][]netip.Prefix
	for _, set := range n.Ranges {
		var subnets []netip.Prefix
		for _, r := range set {
			subnets = append(subnets, r.Subnet)
		}
		all = append(all, subnets)
	}
	return fmt.Sprint(all)
}

// The API server may be away when the agent starts: the ranges of a node do not change by that.
func TestWithoutTheAPIServerTheFileKeepsItsPodCIDRs(t *testing.T) {
	source := Dir{}.Conf(File{Name: "10-canal.conflist", Data: []byte(canal)})
	before, err := Derive(source, Limits{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.7.0/24")}}, nil)
	must.Do(t, err)
	own := Dir{}.Conf(File{Name: "00-x.conflist", Data: before})
	again, err := Derive(source, Limits{}, own)
	must.Do(t, err)
	if !own.Same(again) {
		t.Errorf("it was\n%s\nand is\n%s", before, again)
	}
	changed := Dir{}.Conf(File{Name: "10-canal.conflist", Data: []byte(calicoWith(`"ranges":[[{"subnet":"usePodCidr"}]]`))})
	data, err := Derive(changed, Limits{PromisedShare: 0.1}, own)
	must.Do(t, err)
	if got := rangesOf(t, data); got != "[[10.244.7.0/24]]" {
		t.Errorf("after a change of the source they are %s", got)
	}

	// A Node that was deleted and made again may have others.
	data, err = Derive(source, Limits{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.8.0/24")}}, own)
	must.Do(t, err)
	if got := rangesOf(t, data); got != "[[10.244.8.0/24]]" {
		t.Errorf("of the new Node they are %s", got)
	}
}

func TestOnlyCalicoIsGivenPodCIDRs(t *testing.T) {
	for name, conf := range map[string]string{
		"another plugin": `{"cniVersion":"1.0.0","name":"x","type":"bridge","ipam":{"type":"host-local","subnet":"usePodCidr"}}`,
		"its own IPAM":   `{"cniVersion":"1.0.0","name":"x","type":"calico","ipam":{"type":"calico-ipam","subnet":"usePodCidr"}}`,
		"by hand":        `{"cniVersion":"1.0.0","name":"x","type":"calico","ipam":{"type":"stayput","subnet":"usePodCidr"}}`,
	} {
		if (Dir{}).Conf(File{Name: "10-x.conf", Data: []byte(conf)}).WantsPodCIDRs() {
			t.Errorf("%s asks for them", name)
		}
	}
}
