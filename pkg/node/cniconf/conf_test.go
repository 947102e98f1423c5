package cniconf

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/test/must"
)

// What installers really write.
var configurations = map[string]struct {
	file, data string
	kind       Kind
	why        string // a part of it
}{
	"kubeadm with flannel": {"10-flannel.conflist", `{
  "name": "cbr0",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}`, Stock, ""},
	"k3s": {"10-flannel.conflist", `{
  "name":"cbr0",
  "cniVersion":"1.0.0",
  "plugins":[
    {"type":"flannel","delegate":{"hairpinMode":true,"forceAddress":true,"isDefaultGateway":true}},
    {"type":"portmap","capabilities":{"portMappings":true}},
    {"type":"bandwidth","capabilities":{"bandwidth":true}}
  ]
}`, Stock, ""},
	"flannel with an ipam section": {"10-flannel.conf", `{"name":"cbr0","cniVersion":"0.3.1","type":"flannel","ipam":{"type":"host-local","routes":[{"dst":"0.0.0.0/0"}]},"delegate":{"type":"ptp"}}`, Stock, ""},
	"kind": {"10-kindnet.conflist", `{
	"cniVersion": "0.3.1",
	"name": "kindnet",
	"plugins": [
	{
		"type": "ptp",
		"ipMasq": false,
		"ipam": {
			"type": "host-local",
			"dataDir": "/run/cni-ipam-state",
			"routes": [ { "dst": "0.0.0.0/0" }, { "dst": "::/0" } ],
			"ranges": [ [ { "subnet": "10.244.1.0/24" } ], [ { "subnet": "fd00:10:244:1::/64" } ] ]
		},
		"mtu": 1500
	},
	{"type": "portmap", "capabilities": {"portMappings": true}}
	]
}`, Stock, ""},
	"containerd's example bridge, GKE": {"10-containerd-net.conflist", `{
  "name": "k8s-pod-network",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "ptp", "mtu": 1460, "ipam": {"type": "host-local", "subnet": "10.8.0.0/24", "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}`, Stock, ""},
	"CRI-O's bridge, also the one of AKS with kubenet": {"100-crio-bridge.conflist", `{
  "cniVersion": "1.0.0",
  "name": "crio",
  "disableCheck": true,
  "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
    "ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.85.0.0/16"}]]}
  }]
}`, Stock, ""},
	"kube-router":      {"10-kuberouter.conflist", `{"cniVersion":"0.3.0","name":"mynet","plugins":[{"bridge":"kube-bridge","ipam":{"subnet":"10.1.0.0/24","type":"host-local"},"isDefaultGateway":true,"mtu":1480,"name":"kubernetes","type":"bridge"},{"capabilities":{"portMappings":true,"snat":true},"type":"portmap"}]}`, Stock, ""},
	"macvlan":          {"10-macvlan.conf", `{"cniVersion":"0.3.1","name":"lan","type":"macvlan","master":"eth0","mode":"bridge","ipam":{"type":"host-local","subnet":"192.168.1.0/24","rangeStart":"192.168.1.200","rangeEnd":"192.168.1.216","gateway":"192.168.1.1"}}`, Stock, ""},
	"ipvlan":           {"10-ipvlan.json", `{"cniVersion":"0.4.0","name":"lan","type":"ipvlan","master":"eth0","ipam":{"type":"host-local","subnet":"10.1.2.0/24"}}`, Stock, ""},
	"a chained Cilium": {"05-cilium.conflist", `{"cniVersion":"0.3.1","name":"flannel","plugins":[{"type":"flannel","delegate":{"isDefaultGateway":true}},{"type":"portmap","capabilities":{"portMappings":true}},{"type":"cilium-cni"}]}`, Stock, ""},
	"written by hand": {"10-pods.conflist",
		`{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","subnet":"10.1.0.0/24"}}]}`,
		ByHand, ""},

	"multus, thin": {"00-multus.conf", `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus","kubeconfig":"/etc/cni/net.d/multus.d/multus.kubeconfig","delegates":[{"cniVersion":"0.3.1","name":"cbr0","plugins":[{"type":"flannel","delegate":{"isDefaultGateway":true}}]}]}`, Multus, ""},
	"multus, thick": {"00-multus.conf",
		`{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus-shim","socketDir":"/host/run/multus/"}`, Multus,
		""},

	"Calico": {"10-calico.conflist", `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"calico","datastore_type":"kubernetes","mtu":0,"nodename":"n","ipam":{"type":"calico-ipam"},"policy":{"type":"k8s"}},{"type":"portmap","snat":true,"capabilities":{"portMappings":true}},{"type":"bandwidth","capabilities":{"bandwidth":true}}]}`,
		Foreign, "Calico manages addresses in its own IPAM"},
	"canal": {"10-canal.conflist", canal, Stock, ""},
	"Calico with a range": {"10-calico.conflist", calicoWith(`"ranges":[[{"subnet":"10.1.0.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]`),
		Stock, ""},
	"Calico with routes": {"10-calico.conflist", calicoWith(`"subnet":"usePodCidr","routes":[{"dst":"0.0.0.0/0"},{"dst":"10.0.0.0/8"}]`),
		Foreign, "ipam.routes[1]: Calico sets routes other"},
	"Calico with a route to nowhere": {"10-calico.conflist", calicoWith(`"subnet":"usePodCidr","routes":[{}]`),
		Foreign, "ipam.routes[0]"},
	"Calico with letters": {"10-calico.conflist", calicoWith(`"Subnet":"usePodCidr"`), Foreign, `"Subnet"`},
	"Calico with another Node's range": {"10-calico.conflist",
		`{"name":"x","cniVersion":"0.3.1","plugins":[{"type":"calico","kubernetes":{"node_name":"other"},"ipam":{"type":"host-local","subnet":"usePodCidr"}}]}`,
		Foreign, "kubernetes.node_name"},
	"Calico behind flannel": {"10-canal.conflist", `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{"type":"calico","include_default_routes":true}}]}`,
		Foreign, "delegate: calico: "},
	"Cilium": {"05-cilium.conflist", `{"cniVersion":"0.3.1","name":"cilium","plugins":[{"type":"cilium-cni","enable-debug":false,"log-file":"/var/run/cilium/cilium-cni.log"}]}`,
		Foreign, "cilium-agent allocates addresses itself"},
	"AWS": {"10-aws.conflist", `{"cniVersion":"0.4.0","name":"aws-cni","disableCheck":true,"plugins":[{"name":"aws-cni","type":"aws-cni","vethPrefix":"eni","mtu":"9001"},{"name":"egress-cni","type":"egress-cni","enabled":"false","ipam":{"type":"host-local","ranges":[[{"subnet":"fd00::ac:00/118"}]],"routes":[{"dst":"::/0"}]}},{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`,
		Foreign, "AWS VPC CNI"},
	"Antrea": {"10-antrea.conflist", `{"cniVersion":"0.3.0","name":"antrea","plugins":[{"type":"antrea","ipam":{"type":"host-local"}},{"type":"portmap","capabilities":{"portMappings":true}},{"type":"bandwidth","capabilities":{"bandwidth":true}}]}`,
		Foreign, "antrea-agent runs IPAM itself"},
	"Azure": {"10-azure.conflist", `{"cniVersion":"0.3.0","name":"azure","plugins":[{"type":"azure-vnet","mode":"transparent","ipsToRouteViaHost":["169.254.20.10"],"ipam":{"type":"azure-vnet-ipam"}},{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`,
		Foreign, "Azure CNI"},
	"OVN-Kubernetes": {"10-ovn-kubernetes.conf", `{"cniVersion":"0.4.0","name":"ovn-kubernetes","type":"ovn-k8s-cni-overlay","ipam":{},"dns":{},"logFile":"/var/log/ovn-kubernetes/ovn-k8s-cni-overlay.log"}`,
		Foreign, "OVN-Kubernetes allocates"},
	"Weave":          {"10-weave.conflist", `{"cniVersion":"0.3.0","name":"weave","plugins":[{"name":"weave","type":"weave-net","hairpinMode":true},{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`, Foreign, "Weave Net"},
	"DHCP":           {"10-lan.conf", `{"cniVersion":"0.4.0","name":"lan","type":"macvlan","master":"eth0","ipam":{"type":"dhcp"}}`, Foreign, "IPAM plugin dhcp"},
	"another plugin": {"10-x.conf", `{"cniVersion":"0.4.0","name":"x","type":"cnv-net","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`, Foreign, "unknown plugin cnv-net"},
	"without a version": {"10-x.conf",
		`{"name":"x","type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`, Stock, ""},
	"an old version": {"10-x.conflist",
		`{"cniVersion":"0.2.0","name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`,
		Stock, ""},
	"a later version than the plugin's": {"10-x.conflist",
		`{"cniVersion":"1.2.0","name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`,
		Foreign, `cniVersion: "1.2.0" is not supported by the plugin: expected 0.1.0 to 1.1.0`},
	"a later version to choose": {"10-x.conflist",
		`{"cniVersions":["1.0.0","1.2.0"],"name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`,
		Foreign, `cniVersions: "1.2.0" is not supported`},
	"a relative directory": {"10-x.conflist",
		`{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local","dataDir":"cni","subnet":"10.1.0.0/24"}}]}`,
		Foreign, `ipam.dataDir: "cni" is not valid: expected an absolute path`},
	"a network with a long name": {"10-x.conflist",
		`{"cniVersion":"1.0.0","name":"` + strings.Repeat("x", 201) + `","plugins":[{"type":"flannel"}]}`,
		Foreign, "name: "},
	"versions to choose": {"10-x.conflist",
		`{"cniVersion":"0.2.0","cniVersions":["1.0.0","1.1.0"],"name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`,
		Stock, ""},
	"loopback": {"99-loopback.conf", `{"cniVersion":"0.2.0","name":"lo","type":"loopback"}`, Foreign,
		"none of its plugins (loopback)"},
	"letters":         {"10-x.conf", `{"cniVersion":"0.4.0","name":"x","type":"bridge","IPAM":{"type":"host-local","subnet":"10.1.0.0/24"}}`, Foreign, `"IPAM"`},
	"a list in .conf": {"10-x.conf", `{"cniVersion":"0.4.0","name":"x","plugins":[{"type":"bridge"}]}`, Broken, "type"},
	"half written":    {"10-x.conflist", `{"cniVersion":"0.4.0","name":"x","plugins":[{"type":"bri`, Broken, "unexpected"},
	"empty":           {"10-x.conflist", ``, Broken, "EOF"},
	"no name":         {"10-x.conflist", `{"cniVersion":"0.4.0","plugins":[{"type":"bridge"}]}`, Broken, "name"},
	"no plugins":      {"10-x.conflist", `{"cniVersion":"0.4.0","name":"x"}`, Broken, "no plugins"},
}

// canal is what canal installs, and what GKE has if network policies are enabled, but for its paths.
var canal = calicoWith(`"subnet":"usePodCidr"`)

func calicoWith(ipam string) string {
	return `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"calico","log_level":"info","datastore_type":"kubernetes","nodename":"node-1","mtu":0,"ipam":{"type":"host-local",` +
		ipam + `},"policy":{"type":"k8s"},"kubernetes":{"kubeconfig":"/etc/cni/net.d/calico-kubeconfig"}},{"type":"portmap","snat":true,"capabilities":{"portMappings":true}}]}`
}

func TestInstallersConfigurationsAreClassified(t *testing.T) {
	for name, c := range configurations {
		t.Run(name, func(t *testing.T) {
			got := Dir{}.Conf(File{Name: c.file, Data: []byte(c.data)})
			if got.Kind != c.kind || !strings.Contains(got.Why, c.why) {
				t.Errorf("kind %d, %q; want %d, %q", got.Kind, got.Why, c.kind, c.why)
			}
		})
	}
}

func TestDeriveReplacesHostLocalAndNothingElse(t *testing.T) {
	for name, c := range configurations {
		if c.kind != Stock {
			continue
		}
		t.Run(name, func(t *testing.T) {
			f := File{Name: c.file, Data: []byte(c.data)}
			source := Dir{}.Conf(f)
			data, err := Derive(source, Limits{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}}, nil)
			must.Do(t, err)
			if source.WantsPodCIDRs() { // as Calico itself does
				f.Data = bytes.ReplaceAll(f.Data, []byte("usePodCidr"), []byte("10.244.1.0/24"))
			}
			derivedFrom(t, f, data)
		})
	}
}

// derivedFrom fails the test unless data is what libcni loads f as, but for what derive is to change.
func derivedFrom(t *testing.T, f File, data []byte) {
	t.Helper()
	want, err := libcniLoad(f)
	must.Do(t, err)
	got, err := libcni.ConfListFromBytes(data)
	if err != nil {
		t.Fatalf("does not load: %v\n%s", err, data)
	}
	if got.Name != want.Name || got.CNIVersion != want.CNIVersion || got.DisableCheck != want.DisableCheck ||
		got.DisableGC != want.DisableGC || got.LoadOnlyInlinedPlugins != want.LoadOnlyInlinedPlugins {
		t.Errorf("the list is %+v, want %+v", got, want)
	}
	if len(got.Plugins) != len(want.Plugins) {
		t.Fatalf("%d plugins, want %d", len(got.Plugins), len(want.Plugins))
	}
	changed := false
	for i := range want.Plugins {
		is, should := jsonOf(t, got.Plugins[i].Bytes), jsonOf(t, want.Plugins[i].Bytes)
		ipam, _ := is["ipam"].(map[string]any)
		if ipam["type"] == "stayput" {
			changed = true
			capabilities := is["capabilities"].(map[string]any)
			given, _ := should["capabilities"].(map[string]any)
			if _, there := given[netconf.AnnotationsCapability]; !there {
				if capabilities[netconf.AnnotationsCapability] != true {
					t.Errorf("plugins[%d] does not ask for annotations", i)
				}
				delete(capabilities, netconf.AnnotationsCapability)
			}
			if len(capabilities) == 0 && should["capabilities"] == nil {
				delete(is, "capabilities")
				delete(should, "capabilities")
			}
			was, _ := should["ipam"].(map[string]any)
			if _, given := was["type"]; given {
				ipam["type"] = netconf.HostLocal
			} else {
				delete(ipam, "type") // flannel's default
			}
			if len(ipam) == 0 && should["ipam"] == nil {
				delete(is, "ipam")
				delete(should, "ipam")
			}
		}
		if len(is) == 0 || !reflect.DeepEqual(is, should) {
			t.Errorf("plugins[%d] is %v, want %v", i, is, should)
		}
	}
	if !changed {
		t.Errorf("nothing is given to stayput:\n%s", data)
	}
	if from, ok := (Dir{}).Conf(File{Name: "00-x.conflist", Data: data}).DerivedFrom(); !ok || from != f.Name {
		t.Errorf("not known as derived from %s: %s", f.Name, from)
	}
}

// libcniLoad loads a file as go-cni does.
func libcniLoad(f File) (*libcni.NetworkConfigList, error) {
	if strings.HasSuffix(f.Name, ".conflist") {
		return libcni.ConfListFromBytes(f.Data)
	}
	c, err := libcni.ConfFromBytes(f.Data) //nolint:staticcheck // runtimes still read the old format
	if err != nil {
		return nil, err
	}
	return libcni.ConfListFromConf(c) //nolint:staticcheck // runtimes still read the old format
}

func jsonOf(t *testing.T, data []byte) map[string]any {
	t.Helper()
	m, err := decode(data)
	must.Do(t, err)
	return m
}

func TestNumbersAndUnknownKeysAreKeptExactly(t *testing.T) {
	f := File{Name: "10-x.conflist", Data: []byte(`{"cniVersion":"1.0.0","name":"x","big":12345678901234567890,"plugins":[{"type":"bridge","ratio":0.10,"html":"<&>","ipam":{"type":"host-local","x":1e300}}]}`)}
	data, err := Derive(Dir{}.Conf(f), Limits{}, nil)
	must.Do(t, err)
	for _, want := range []string{`"big": 12345678901234567890`, `"ratio": 0.10`, `"html": "<&>"`, `"x": 1e300`} {
		if !strings.Contains(string(data), want) {
			t.Errorf("lost %s:\n%s", want, data)
		}
	}
}

func TestLimitsGoIntoTheIPAMSectionIfTheyAreSet(t *testing.T) {
	f := File{Name: "10-x.conf", Data: []byte(`{"name":"x","type":"bridge","ipam":{"type":"host-local"}}`)}
	ipam := func(l Limits) map[string]any {
		data, err := Derive(Dir{}.Conf(f), l, nil)
		must.Do(t, err)
		var list struct {
			Plugins []struct{ IPAM map[string]any }
		}
		must.Do(t, json.Unmarshal(data, &list))
		return list.Plugins[0].IPAM
	}
	if got, want := ipam(Limits{StateDir: "/var/lib/stayput"}),
		map[string]any{"type": "stayput"}; !reflect.DeepEqual(got, want) {
		t.Errorf("without limits: %v", got)
	}
	got := ipam(Limits{StateDir: "/srv/stayput", PromisedShare: 0.25, PromisedSharePerNamespace: 0.125,
		PromisedLimit: 500, PromisedLimitPerNamespace: 100, LongestRetention: 720 * time.Hour})
	want := map[string]any{
		"type": "stayput", "stateDir": "/srv/stayput", "promisedShare": 0.25, "promisedSharePerNamespace": 0.125,
		"promisedLimit": 500.0, "promisedLimitPerNamespace": 100.0, "longestRetention": "720h0m0s",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("with limits: %v, want %v", got, want)
	}
}

func TestACapabilityThatWasSwitchedOffStaysOff(t *testing.T) {
	f := File{Name: "10-x.conf", Data: []byte(`{"name":"x","type":"bridge","capabilities":{"io.kubernetes.cri.pod-annotations":false,"ips":true},"ipam":{"type":"host-local"}}`)}
	data, err := Derive(Dir{}.Conf(f), Limits{}, nil)
	must.Do(t, err)
	derivedFrom(t, f, data)
	if !strings.Contains(string(data), `"io.kubernetes.cri.pod-annotations": false`) {
		t.Errorf("%s", data)
	}
}

func TestPluginsInFilesOfTheirOwnAreNotOverlooked(t *testing.T) {
	list := File{Name: "10-x.conflist",
		Data: []byte(`{"cniVersion":"1.1.0","name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}`)}
	for content, want := range map[string]Kind{
		`{"type":"portmap"}`:                              Stock,
		`{"type":"macvlan","ipam":{"type":"host-local"}}`: Foreign,
		`{"type":"mac`:                                    Broken,
	} {
		d := Dir{Files: []File{list}, Folders: map[string][]File{
			"x": {{Name: "5-a.conf", Data: []byte(content)}}, "y": {{Name: "a.conf", Data: []byte("{")}},
		}}
		if c := d.Conf(list); c.Kind != want {
			t.Errorf("%s: %d %s, want %d", content, c.Kind, c.Why, want)
		}
	}
	if c := (Dir{}).Conf(File{Name: "10-x.conflist",
		Data: []byte(`{"name":"x","cniVersion":"1.1.0"}`)}); c.Kind != Broken {
		t.Errorf("a list without plugins is %d", c.Kind)
	}
}

func FuzzWhatIsDerivedLoadsAndKeepsAllOfItsSource(f *testing.F) {
	for _, c := range configurations {
		f.Add(c.data, !strings.HasSuffix(c.file, ".conflist"))
	}
	f.Fuzz(func(t *testing.T, data string, single bool) {
		file := File{Name: "10-x.conflist", Data: []byte(data)}
		if single {
			file.Name = "10-x.conf"
		}
		c := Dir{}.Conf(file)
		if c.Kind == Broken {
			return
		}
		if _, err := libcniLoad(file); err != nil {
			t.Fatalf("the runtime cannot load what we can: %v", err)
		}
		if c.Kind != Stock || c.WantsPodCIDRs() {
			return
		}
		derived, err := Derive(c, Limits{}, nil)
		must.Do(t, err)
		derivedFrom(t, file, derived)
	})
}

func TestWhatStayputIsGivenByAFile(t *testing.T) {
	for name, c := range map[string]struct {
		file, data string
		dataDir    string
		ranges     int  // 0: none that are valid
		with       bool // the pods' annotations
	}{
		"a list": {"a.conflist", `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","capabilities":{"io.kubernetes.cri.pod-annotations":true},` +
			`"ipam":{"type":"stayput","dataDir":"/d","ranges":[[{"subnet":"192.0.2.0/24"}],[{"subnet":"fd00::/64"}]],"promisedShare":0.25}},{"type":"portmap"}]}`, "/d", 2, true},
		"one plugin": {"a.conf", `{"cniVersion":"0.4.0","name":"pods","type":"ptp","ipam":{"type":"stayput","subnet":"192.0.2.0/24","promisedShare":0.25}}`, "", 1, false},
		"flannel":    {"a.conflist", `{"cniVersion":"0.3.1","name":"pods","plugins":[{"type":"flannel","ipam":{"type":"stayput"}}]}`, "", 0, false},
	} {
		conf := Dir{}.Conf(File{Name: c.file, Data: []byte(c.data)})
		got, err := conf.Stayput()
		if err != nil || got == nil || got.Name != "pods" || got.CNIVersion == "" || got.DataDir != c.dataDir {
			t.Fatalf("%s: %+v, %v", name, got, err)
		}
		n, err := got.Network()
		if (err == nil) != (c.ranges > 0) || c.ranges > 0 && (len(n.Ranges) != c.ranges || n.PromisedShare != 0.25) {
			t.Errorf("%s: %+v, %v", name, n, err)
		}
		if conf.WithoutAnnotations() == c.with {
			t.Errorf("%s: without annotations %v", name, !c.with)
		}
		if all := conf.Networks(); all[0].Name != "pods" || all[0].DataDir != c.dataDir {
			t.Errorf("%s: networks %+v", name, all[0])
		}
	}
	for name, data := range map[string]string{
		"another IPAM": `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}`,
		"none":         `{"cniVersion":"1.0.0","name":"lo","plugins":[{"type":"loopback"}]}`,
		"no JSON":      `{`,
		"a bad name":   `{"cniVersion":"1.0.0","name":"../pods","plugins":[{"type":"bridge","ipam":{"type":"stayput"}}]}`,
	} {
		conf := Dir{}.Conf(File{Name: "a.conflist", Data: []byte(data)})
		got, err := conf.Stayput()
		if got != nil || (err != nil) != (name == "a bad name") || conf.WithoutAnnotations() != (name == "a bad name") {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if name == "a bad name" && conf.Networks() != nil {
			t.Errorf("%s: networks %v", name, conf.Networks())
		}
	}
}

func TestWhichNetworksCannotHaveAddressesOfModeL2(t *testing.T) {
	for name, want := range map[string]string{
		"kubeadm with flannel": "isGateway: ", "k3s": "isGateway: ", "kind": "type: ", "kube-router": "isDefaultGateway: ",
		"a chained Cilium": "isGateway: ", "flannel with an ipam section": "type: ",
		"containerd's example bridge, GKE": "type: ", "macvlan": "", "ipvlan": "",
	} {
		c := configurations[name]
		got := Dir{}.Conf(File{Name: c.file, Data: []byte(c.data)}).CannotServeL2()
		if (got == "") != (want == "") || want != "" && !strings.HasPrefix(got, c.file+": "+want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for data, want := range map[string]string{
		`{"type":"bridge","ipam":{"type":"stayput"}}`:                                                  "",
		`{"type":"flannel","ipam":{"type":"stayput"}}`:                                                 "isGateway: ",
		`{"type":"flannel","delegate":{"isGateway":false},"ipam":{"type":"stayput"}}`:                  "",
		`{"type":"cilium-cni"}`:                                                                        "cilium",
		`{"type":"multus","delegates":[{"type":"bridge","isGateway":true,"ipam":{"type":"stayput"}}]}`: "",
	} {
		got := Dir{}.Conf(File{Name: "a.conflist", Data: []byte(`{"cniVersion":"1.0.0","name":"pods","plugins":[` + data + `]}`)}).CannotServeL2()
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", data, got, want)
		}
	}
}

func TestWhichNetworksCannotHaveRoutedAddresses(t *testing.T) {
	for name, want := range map[string]string{
		"kubeadm with flannel": "", "k3s": "", "kind": "", "kube-router": "", "a chained Cilium": "",
		"flannel with an ipam section": "", "containerd's example bridge, GKE": "",
		"macvlan": "type: ", "ipvlan": "type: ",
	} {
		c := configurations[name]
		got := Dir{}.Conf(File{Name: c.file, Data: []byte(c.data)}).CannotRoute()
		if (got == "") != (want == "") || want != "" && !strings.HasPrefix(got, c.file+": "+want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for data, want := range map[string]string{
		`{"type":"bridge","vlan":0,"isGateway":true,"ipam":{"type":"stayput"}}`:        "",
		`{"type":"bridge","isDefaultGateway":true,"ipam":{"type":"stayput"}}`:          "",
		`{"type":"bridge","ipam":{"type":"stayput"}}`:                                  "isGateway: ",
		`{"type":"bridge","isGateway":true,"vlan":7,"ipam":{"type":"stayput"}}`:        "vlan: ",
		`{"type":"flannel","delegate":{"isGateway":false},"ipam":{"type":"stayput"}}`:  "isGateway: ",
		`{"type":"flannel","delegate":{"type":"ipvlan"},"ipam":{"type":"host-local"}}`: "type: ",
		`{"type":"calico","ipam":{"type":"stayput","ranges":[]}}`:                      "type: ",
		`{"type":"bridge","isGateway":true,"ipam":{"type":"whereabouts"}}`:             "plugins[0]: bridge uses the IPAM plugin whereabouts",
		`{"type":"cilium-cni"}`: "cilium",
		`{"type":"multus","delegates":[{"type":"macvlan","ipam":{"type":"stayput"}}]}`: "",
		`{"type":""}`: "",
	} {
		got := Dir{}.Conf(File{Name: "a.conflist", Data: []byte(`{"cniVersion":"1.0.0","name":"pods","plugins":[` + data + `]}`)}).CannotRoute()
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", data, got, want)
		}
	}
}
