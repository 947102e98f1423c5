package cniconf

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/stayput/stayput/test/must"
)

// What installers really write.
var configurations = map[string]struct {
	file, data string
	kind       kind
	why        string // a part of it
}{
	"kubeadm with flannel": {"10-flannel.conflist", `{
  "name": "cbr0",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}`, stock, ""},
	"k3s": {"10-flannel.conflist", `{
  "name":"cbr0",
  "cniVersion":"1.0.0",
  "plugins":[
    {"type":"flannel","delegate":{"hairpinMode":true,"forceAddress":true,"isDefaultGateway":true}},
    {"type":"portmap","capabilities":{"portMappings":true}},
    {"type":"bandwidth","capabilities":{"bandwidth":true}}
  ]
}`, stock, ""},
	"flannel with an ipam section": {"10-flannel.conf", `{"name":"cbr0","cniVersion":"0.3.1","type":"flannel","ipam":{"type":"host-local","routes":[{"dst":"0.0.0.0/0"}]},"delegate":{"type":"ptp"}}`, stock, ""},
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
}`, stock, ""},
	"containerd's example bridge, GKE": {"10-containerd-net.conflist", `{
  "name": "k8s-pod-network",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "ptp", "mtu": 1460, "ipam": {"type": "host-local", "subnet": "10.8.0.0/24", "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}`, stock, ""},
	"CRI-O's bridge, also the one of AKS with kubenet": {"100-crio-bridge.conflist", `{
  "cniVersion": "1.0.0",
  "name": "crio",
  "disableCheck": true,
  "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
    "ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.85.0.0/16"}]]}
  }]
}`, stock, ""},
	"kube-router":      {"10-kuberouter.conflist", `{"cniVersion":"0.3.0","name":"mynet","plugins":[{"bridge":"kube-bridge","ipam":{"subnet":"10.1.0.0/24","type":"host-local"},"isDefaultGateway":true,"mtu":1480,"name":"kubernetes","type":"bridge"},{"capabilities":{"portMappings":true,"snat":true},"type":"portmap"}]}`, stock, ""},
	"macvlan":          {"10-macvlan.conf", `{"cniVersion":"0.3.1","name":"lan","type":"macvlan","master":"eth0","mode":"bridge","ipam":{"type":"host-local","subnet":"192.168.1.0/24","rangeStart":"192.168.1.200","rangeEnd":"192.168.1.216","gateway":"192.168.1.1"}}`, stock, ""},
	"ipvlan":           {"10-ipvlan.json", `{"cniVersion":"0.4.0","name":"lan","type":"ipvlan","master":"eth0","ipam":{"type":"host-local","subnet":"10.1.2.0/24"}}`, stock, ""},
	"a chained Cilium": {"05-cilium.conflist", `{"cniVersion":"0.3.1","name":"flannel","plugins":[{"type":"flannel","delegate":{"isDefaultGateway":true}},{"type":"portmap","capabilities":{"portMappings":true}},{"type":"cilium-cni"}]}`, stock, ""},
	"written by hand":  {"10-pods.conflist", `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","subnet":"10.1.0.0/24"}}]}`, byHand, ""},

	"multus, thin":  {"00-multus.conf", `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus","kubeconfig":"/etc/cni/net.d/multus.d/multus.kubeconfig","delegates":[{"cniVersion":"0.3.1","name":"cbr0","plugins":[{"type":"flannel","delegate":{"isDefaultGateway":true}}]}]}`, multus, ""},
	"multus, thick": {"00-multus.conf", `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus-shim","socketDir":"/host/run/multus/"}`, multus, ""},

	"Calico": {"10-calico.conflist", `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"calico","datastore_type":"kubernetes","mtu":0,"nodename":"n","ipam":{"type":"calico-ipam"},"policy":{"type":"k8s"}},{"type":"portmap","snat":true,"capabilities":{"portMappings":true}},{"type":"bandwidth","capabilities":{"bandwidth":true}}]}`,
		foreign, "Calico keeps addresses in its own IPAM"},
	"Calico with host-local": {"10-calico.conflist", `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"calico","ipam":{"type":"host-local","subnet":"usePodCidr"}}]}`,
		foreign, "usePodCidr"},
	"canal": {"10-canal.conflist", `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{"type":"calico","include_default_routes":true}}]}`,
		foreign, "delegate: calico: "},
	"Cilium": {"05-cilium.conflist", `{"cniVersion":"0.3.1","name":"cilium","plugins":[{"type":"cilium-cni","enable-debug":false,"log-file":"/var/run/cilium/cilium-cni.log"}]}`,
		foreign, "cilium-agent hands out addresses itself"},
	"AWS": {"10-aws.conflist", `{"cniVersion":"0.4.0","name":"aws-cni","disableCheck":true,"plugins":[{"name":"aws-cni","type":"aws-cni","vethPrefix":"eni","mtu":"9001"},{"name":"egress-cni","type":"egress-cni","enabled":"false","ipam":{"type":"host-local","ranges":[[{"subnet":"fd00::ac:00/118"}]],"routes":[{"dst":"::/0"}]}},{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`,
		foreign, "AWS VPC CNI"},
	"Antrea": {"10-antrea.conflist", `{"cniVersion":"0.3.0","name":"antrea","plugins":[{"type":"antrea","ipam":{"type":"host-local"}},{"type":"portmap","capabilities":{"portMappings":true}},{"type":"bandwidth","capabilities":{"bandwidth":true}}]}`,
		foreign, "antrea-agent runs IPAM itself"},
	"Azure": {"10-azure.conflist", `{"cniVersion":"0.3.0","name":"azure","plugins":[{"type":"azure-vnet","mode":"transparent","ipsToRouteViaHost":["169.254.20.10"],"ipam":{"type":"azure-vnet-ipam"}},{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`,
		foreign, "Azure CNI"},
	"OVN-Kubernetes": {"10-ovn-kubernetes.conf", `{"cniVersion":"0.4.0","name":"ovn-kubernetes","type":"ovn-k8s-cni-overlay","ipam":{},"dns":{},"logFile":"/var/log/ovn-kubernetes/ovn-k8s-cni-overlay.log"}`,
		foreign, "OVN-Kubernetes hands out"},
	"Weave":           {"10-weave.conflist", `{"cniVersion":"0.3.0","name":"weave","plugins":[{"name":"weave","type":"weave-net","hairpinMode":true},{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`, foreign, "Weave Net"},
	"DHCP":            {"10-lan.conf", `{"cniVersion":"0.4.0","name":"lan","type":"macvlan","master":"eth0","ipam":{"type":"dhcp"}}`, foreign, "IPAM plugin dhcp"},
	"another plugin":  {"10-x.conf", `{"cniVersion":"0.4.0","name":"x","type":"cnv-net","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`, foreign, "cnv-net is not known"},
	"loopback":        {"99-loopback.conf", `{"cniVersion":"0.2.0","name":"lo","type":"loopback"}`, foreign, "no plugin of it (loopback)"},
	"letters":         {"10-x.conf", `{"cniVersion":"0.4.0","name":"x","type":"bridge","IPAM":{"type":"host-local","subnet":"10.1.0.0/24"}}`, foreign, `"IPAM"`},
	"a list in .conf": {"10-x.conf", `{"cniVersion":"0.4.0","name":"x","plugins":[{"type":"bridge"}]}`, broken, "type"},
	"half written":    {"10-x.conflist", `{"cniVersion":"0.4.0","name":"x","plugins":[{"type":"bri`, broken, "unexpected"},
	"empty":           {"10-x.conflist", ``, broken, "EOF"},
	"no name":         {"10-x.conflist", `{"cniVersion":"0.4.0","plugins":[{"type":"bridge"}]}`, broken, "name"},
	"no plugins":      {"10-x.conflist", `{"cniVersion":"0.4.0","name":"x"}`, broken, "no plugins"},
}

func TestConfigurationsOfOthersAreKnownForWhatTheyAre(t *testing.T) {
	for name, c := range configurations {
		t.Run(name, func(t *testing.T) {
			got := confDir{}.read(confFile{name: c.file, data: []byte(c.data)})
			if got.kind != c.kind || !strings.Contains(got.why, c.why) {
				t.Errorf("kind %d, %q; want %d, %q", got.kind, got.why, c.kind, c.why)
			}
		})
	}
}

func TestWhatIsDerivedIsTheSourceWithStayputInHostLocalsPlace(t *testing.T) {
	for name, c := range configurations {
		if c.kind != stock {
			continue
		}
		t.Run(name, func(t *testing.T) {
			f := confFile{name: c.file, data: []byte(c.data)}
			data, err := derive(confDir{}.read(f), limits{}, nil)
			must.Do(t, err)
			derivedFrom(t, f, data)
		})
	}
}

// derivedFrom fails the test unless data is what libcni loads f as, but for what derive is to change.
func derivedFrom(t *testing.T, f confFile, data []byte) {
	t.Helper()
	want, err := load(f)
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
			if _, there := given[annotationsCapability]; !there {
				if capabilities[annotationsCapability] != true {
					t.Errorf("plugins[%d] does not ask for annotations", i)
				}
				delete(capabilities, annotationsCapability)
			}
			if len(capabilities) == 0 && should["capabilities"] == nil {
				delete(is, "capabilities")
				delete(should, "capabilities")
			}
			was, _ := should["ipam"].(map[string]any)
			if _, given := was["type"]; given {
				ipam["type"] = stockIPAM
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
	o := confDir{files: []confFile{{name: ConflistName, data: data}}}.own()
	if o == nil || !o.ours || o.from != f.name {
		t.Errorf("not known as derived from %s: %+v", f.name, o)
	}
}

// load loads a file as go-cni does.
func load(f confFile) (*libcni.NetworkConfigList, error) {
	if strings.HasSuffix(f.name, ".conflist") {
		return libcni.ConfListFromBytes(f.data)
	}
	c, err := libcni.ConfFromBytes(f.data) //nolint:staticcheck // runtimes still read the old format
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
	f := confFile{name: "10-x.conflist", data: []byte(`{"cniVersion":"1.0.0","name":"x","big":12345678901234567890,"plugins":[{"type":"bridge","ratio":0.10,"html":"<&>","ipam":{"type":"host-local","x":1e400}}]}`)}
	data, err := derive(confDir{}.read(f), limits{}, nil)
	must.Do(t, err)
	for _, want := range []string{`"big": 12345678901234567890`, `"ratio": 0.10`, `"html": "<&>"`, `"x": 1e400`} {
		if !strings.Contains(string(data), want) {
			t.Errorf("lost %s:\n%s", want, data)
		}
	}
}

func TestLimitsGoIntoTheIPAMSectionOnlyWhereTheyAreSet(t *testing.T) {
	f := confFile{name: "10-x.conf", data: []byte(`{"name":"x","type":"bridge","ipam":{"type":"host-local"}}`)}
	ipam := func(l limits) map[string]any {
		data, err := derive(confDir{}.read(f), l, nil)
		must.Do(t, err)
		var list struct {
			Plugins []struct{ IPAM map[string]any }
		}
		must.Do(t, json.Unmarshal(data, &list))
		return list.Plugins[0].IPAM
	}
	if got, want := ipam(limits{stateDir: "/var/lib/stayput"}), map[string]any{"type": "stayput"}; !reflect.DeepEqual(got, want) {
		t.Errorf("without limits: %v", got)
	}
	got := ipam(limits{stateDir: "/srv/stayput", promisedShare: 0.25, longestRetention: 720 * time.Hour})
	want := map[string]any{"type": "stayput", "stateDir": "/srv/stayput", "promisedShare": 0.25, "longestRetention": "720h0m0s"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("with limits: %v, want %v", got, want)
	}
}

func TestACapabilityThatWasSwitchedOffStaysOff(t *testing.T) {
	f := confFile{name: "10-x.conf", data: []byte(`{"name":"x","type":"bridge","capabilities":{"io.kubernetes.cri.pod-annotations":false,"ips":true},"ipam":{"type":"host-local"}}`)}
	data, err := derive(confDir{}.read(f), limits{}, nil)
	must.Do(t, err)
	derivedFrom(t, f, data)
	if !strings.Contains(string(data), `"io.kubernetes.cri.pod-annotations": false`) {
		t.Errorf("%s", data)
	}
}

// A service mesh chains its plugin to the file that comes first, by writing it anew in its own way, and takes it out
// again when it is removed.
func TestWhatOthersChainToTheFileStaysInIt(t *testing.T) {
	source := confFile{name: "10-flannel.conflist", data: []byte(configurations["kubeadm with flannel"].data)}
	first, err := derive(confDir{}.read(source), limits{}, nil)
	must.Do(t, err)
	list := jsonOf(t, first)
	list["plugins"] = append(list["plugins"].([]any), map[string]any{"type": "istio-cni", "log_level": "info"})
	edited, err := json.Marshal(list)
	must.Do(t, err)
	dir := confDir{files: []confFile{{name: ConflistName, data: edited}, source}}
	if p := dir.decide(limits{}, &memory{}, 1); p.write != nil || p.remove {
		t.Errorf("it is written again: %+v", p)
	}
	// The source changes: the chained one stays, one that the source itself no longer has goes.
	dir.files[1].data = []byte(strings.ReplaceAll(`{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{"mtu":1400}}]}`, "\n", ""))
	p := dir.decide(limits{}, &memory{}, 1)
	if types := typesOf(t, p.write); !slices.Equal(types, []string{"flannel", "istio-cni"}) {
		t.Errorf("plugins %v", types)
	}
	// The source gets it too: not twice.
	dir.files[1].data = []byte(`{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel"},{"type":"istio-cni"}]}`)
	if types := typesOf(t, dir.decide(limits{}, &memory{}, 1).write); !slices.Equal(types, []string{"flannel", "istio-cni"}) {
		t.Errorf("plugins %v", types)
	}
}

func typesOf(t *testing.T, data []byte) (types []string) {
	t.Helper()
	for _, p := range pluginsOf(jsonOf(t, data)) {
		types = append(types, typeOf(p))
	}
	return types
}

func TestPluginsInFilesOfTheirOwnAreNotOverlooked(t *testing.T) {
	list := confFile{name: "10-x.conflist", data: []byte(`{"cniVersion":"1.1.0","name":"x","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}`)}
	for content, want := range map[string]kind{
		`{"type":"portmap"}`:                              stock,
		`{"type":"macvlan","ipam":{"type":"host-local"}}`: foreign,
		`{"type":"mac`:                                    broken,
	} {
		d := confDir{files: []confFile{list}, folders: map[string][]confFile{"x": {{name: "5-a.conf", data: []byte(content)}}, "y": {{name: "a.conf", data: []byte("{")}}}}
		if c := d.read(list); c.kind != want {
			t.Errorf("%s: %d %s, want %d", content, c.kind, c.why, want)
		}
	}
	if c := (confDir{}).read(confFile{name: "10-x.conflist", data: []byte(`{"name":"x","cniVersion":"1.1.0"}`)}); c.kind != broken {
		t.Errorf("a list without plugins is %d", c.kind)
	}
}

// dirOf is a directory with these files, name, content, name, content.
func dirOf(nameContent ...string) confDir {
	var d confDir
	for i := 0; i < len(nameContent); i += 2 {
		d.files = append(d.files, confFile{name: nameContent[i], data: []byte(nameContent[i+1])})
	}
	slices.SortFunc(d.files, func(a, b confFile) int { return strings.Compare(a.name, b.name) })
	return d
}

const (
	bridgeConf  = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`
	bridge2Conf = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.2.0.0/24"}}]}`
	calicoConf  = `{"cniVersion":"0.3.1","name":"k8s-pod-network","plugins":[{"type":"calico","ipam":{"type":"calico-ipam"}}]}`
	loConf      = `{"cniVersion":"0.2.0","name":"lo","type":"loopback"}`
	handConf    = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","subnet":"10.1.0.0/24"}}]}`
)

// ownOf is the agent's file for a source.
func ownOf(t *testing.T, file, data string) string {
	t.Helper()
	own, err := derive(confDir{}.read(confFile{name: file, data: []byte(data)}), limits{}, nil)
	must.Do(t, err)
	return string(own)
}

func TestTheFileFollowsItsSource(t *testing.T) {
	own := ownOf(t, "10-pods.conflist", bridgeConf)
	other := ownOf(t, "05-new.conflist", bridge2Conf)
	for name, c := range map[string]struct {
		dir    confDir
		write  string
		remove bool
		says   State // of the plan
	}{
		"nothing there":                 {dirOf(), "", false, ""},
		"a source":                      {dirOf("10-pods.conflist", bridgeConf), own, false, ""},
		"all done":                      {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf), "", false, ""},
		"all done, and others behind":   {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf, "20-calico.conflist", calicoConf), "", false, ""},
		"a changed source":              {dirOf(ConflistName, own, "10-pods.conflist", bridge2Conf), ownOf(t, "10-pods.conflist", bridge2Conf), false, ""},
		"a half-written source":         {dirOf(ConflistName, own, "10-pods.conflist", bridge2Conf[:40]), "", false, StateBroken},
		"an empty source":               {dirOf(ConflistName, own, "10-pods.conflist", ""), "", false, StateBroken},
		"a half-written first source":   {dirOf("10-pods.conflist", bridgeConf[:40]), "", false, ""},
		"a source without host-local":   {dirOf(ConflistName, own, "10-pods.conflist", calicoConf), "", true, ""},
		"a source that has stayput":     {dirOf(ConflistName, own, "10-pods.conflist", handConf), "", true, ""},
		"another source before it":      {dirOf(ConflistName, own, "05-new.conflist", bridge2Conf, "10-pods.conflist", bridgeConf), other, false, ""},
		"another CNI before it":         {dirOf(ConflistName, own, "05-new.conflist", calicoConf, "10-pods.conflist", bridgeConf), "", true, ""},
		"a half-written CNI before it":  {dirOf(ConflistName, own, "05-new.conflist", calicoConf[:30], "10-pods.conflist", bridgeConf), "", false, StateBroken},
		"the source gone":               {dirOf(ConflistName, own), "", false, StateHeld},
		"the source gone, others there": {dirOf(ConflistName, own, "99-lo.conf", loConf), "", false, StateHeld},
		"one that sorts before ours":    {dirOf("00-a.conflist", bridgeConf), "", false, StateShadowed},
		"one that came before ours":     {dirOf("00-a.conflist", bridgeConf, ConflistName, own, "10-pods.conflist", bridgeConf), "", true, StateShadowed},
		"multus before ours":            {dirOf("00-multus.conf", configurations["multus, thin"].data, "10-pods.conflist", bridgeConf), own, false, ""},
		"a half-written multus":         {dirOf("00-multus.conf", "{", "10-pods.conflist", bridgeConf), own, false, ""},
		"multus after ours":             {dirOf("05-multus.conf", configurations["multus, thin"].data, "10-pods.conflist", bridgeConf), "", false, StateUnsupported},
		"multus after ours, thick":      {dirOf("05-multus.conf", configurations["multus, thick"].data, "10-pods.conflist", bridgeConf), "", false, StateUnsupported},
		"multus last":                   {dirOf("70-multus.conf", configurations["multus, thin"].data), "", false, StateUnsupported},
		"multus that came after ours":   {dirOf(ConflistName, own, "05-multus.conf", configurations["multus, thin"].data, "10-pods.conflist", bridgeConf), "", true, StateUnsupported},
		"multus in the source's place":  {dirOf(ConflistName, own, "70-multus.conf", configurations["multus, thin"].data), "", true, StateUnsupported},
		"multus with stayput by hand":   {dirOf(ConflistName, own, "70-multus.conf", `{"name":"m","type":"multus","delegates":[`+handConf+`]}`), "", true, ""},
		"a half-written multus after":   {dirOf(ConflistName, own, "05-multus.conf", "{", "10-pods.conflist", bridgeConf), "", false, StateBroken},
		"multus that nobody uses":       {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf, "70-multus.conf", configurations["multus, thin"].data), "", false, ""},
		"somebody else's of our name":   {dirOf(ConflistName, bridge2Conf, "10-pods.conflist", bridgeConf), "", false, ""},
		"a torn one of our name":        {dirOf(ConflistName, own[:50], "10-pods.conflist", bridgeConf), "", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.dir.decide(limits{}, &memory{}, time.Hour)
			if string(p.write) != c.write || p.remove != c.remove {
				t.Errorf("write %s, remove %v; want %s, %v", p.write, p.remove, c.write, c.remove)
			}
			var says State
			if p.status != nil {
				says = p.status.State
			}
			if says != c.says {
				t.Errorf("says %q, want %q", says, c.says)
			}
			if says == StateHeld && p.again <= 0 {
				t.Error("it will not look again")
			}
		})
	}
}

func TestAFileOutlivesItsSourceUntilThatIsGoneForGoodOrReplaced(t *testing.T) {
	own := ownOf(t, "10-pods.conflist", bridgeConf)
	whole := dirOf(ConflistName, own, "10-pods.conflist", bridgeConf, "99-lo.conf", loConf)
	gone := dirOf(ConflistName, own, "99-lo.conf", loConf)
	step := func(d confDir, m *memory, at time.Duration, remove bool, write bool) {
		t.Helper()
		if p := d.decide(limits{}, m, at); p.remove != remove || (p.write != nil) != write {
			t.Errorf("at %s: remove %v, write %v", at, p.remove, p.write != nil)
		}
	}
	m := &memory{}
	step(whole, m, time.Hour, false, false)
	step(gone, m, time.Hour+time.Second, false, false)
	step(gone, m, time.Hour+sourceHold, false, false)
	step(whole, m, time.Hour+sourceHold+time.Second, false, false) // it came back
	step(gone, m, 3*time.Hour, false, false)                       // the time begins anew
	step(gone, m, 3*time.Hour+sourceHold-1, false, false)
	step(gone, m, 3*time.Hour+sourceHold, true, false)

	// What appears while it is gone is what somebody wants instead.
	m = &memory{}
	step(whole, m, time.Hour, false, false)
	step(gone, m, time.Hour+1, false, false)
	step(dirOf(ConflistName, own, "10-calico.conflist", calicoConf[:20], "99-lo.conf", loConf), m, time.Hour+2, false, false)
	step(dirOf(ConflistName, own, "10-calico.conflist", calicoConf, "99-lo.conf", loConf), m, time.Hour+3, true, false)
	m = &memory{}
	step(whole, m, time.Hour, false, false)
	step(dirOf(ConflistName, own, "20-pods.conflist", bridgeConf, "99-lo.conf", loConf), m, time.Hour+1, false, true)
}

func TestTheStatusSaysWhatTheRuntimeUses(t *testing.T) {
	own := ownOf(t, "10-pods.conflist", bridgeConf)
	multusOf := func(delegate string) string {
		return `{"cniVersion":"0.3.1","name":"m","type":"multus","delegates":[` + delegate + `]}`
	}
	// What multus' daemon writes: its shim, and the path of the file as its container has it.
	daemonOf := func(file string) string {
		return `{"capabilities":{"portMappings":true},"cniVersion":"0.3.1","name":"multus-cni-network","clusterNetwork":"/host/etc/cni/net.d/` + file + `","type":"multus-shim"}`
	}
	for name, c := range map[string]struct {
		dir     confDir
		state   State
		file    string
		network string
		says    string
	}{
		"nothing":                  {dirOf(), StateNone, "", "", "no network"},
		"ours":                     {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf), StateActive, ConflistName, "pods", "10-pods.conflist"},
		"stock":                    {dirOf("10-pods.conflist", bridgeConf), StateStock, "10-pods.conflist", "pods", "host-local"},
		"by hand":                  {dirOf("10-pods.conflist", handConf), StateByHand, "10-pods.conflist", "pods", "stayput"},
		"by hand, under our name":  {dirOf(ConflistName, handConf), StateByHand, ConflistName, "pods", "stayput"},
		"somebody's with our name": {dirOf(ConflistName, bridgeConf), StateConflict, ConflistName, "pods", "rename or remove"},
		"Calico":                   {dirOf("10-calico.conflist", calicoConf), StateUnsupported, "10-calico.conflist", "k8s-pod-network", "Calico"},
		"half written":             {dirOf("10-calico.conflist", "{"), StateBroken, "10-calico.conflist", "", "EOF"},
		"shadowed":                 {dirOf("00-a.conflist", bridgeConf, ConflistName, own), StateShadowed, "00-a.conflist", "pods", "rename"},
		"multus with our copy":     {dirOf("00-multus.conf", multusOf(own), ConflistName, own), StateActive, "00-multus.conf", "pods", "hands on"},
		"multus with an old copy":  {dirOf("00-multus.conf", multusOf(bridgeConf), ConflistName, own), StateShadowed, "00-multus.conf", "pods", "restart its pod"},
		"multus without ours":      {dirOf("00-multus.conf", multusOf(bridgeConf), "10-pods.conflist", bridgeConf), StateStock, "00-multus.conf", "pods", "host-local"},
		"multus with one plugin":   {dirOf("00-multus.conf", multusOf(`{"name":"p","type":"ptp","ipam":{"type":"stayput"}}`)), StateActive, "00-multus.conf", "p", "hands on"},
		"multus with Calico":       {dirOf("00-multus.conf", multusOf(calicoConf), ConflistName, own), StateUnsupported, "00-multus.conf", "k8s-pod-network", "Calico"},
		"multus with a name":       {dirOf("00-multus.conf", `{"name":"m","type":"multus","clusterNetwork":"pods"}`, ConflistName, own), StateMultus, "00-multus.conf", "m", "cluster network pods"},
		"multus' daemon with ours": {dirOf("00-multus.conf", daemonOf(ConflistName), ConflistName, own, "10-pods.conflist", bridgeConf), StateActive, "00-multus.conf", "pods", "which has stayput"},
		"it from before":           {dirOf("00-multus.conf", daemonOf("10-pods.conflist"), ConflistName, own, "10-pods.conflist", bridgeConf), StateShadowed, "00-multus.conf", "pods", "restart its pod"},
		"it without ours":          {dirOf("00-multus.conf", daemonOf("10-pods.conflist"), "10-pods.conflist", bridgeConf), StateStock, "00-multus.conf", "pods", "host-local"},
		"it after ours went":       {dirOf("00-multus.conf", daemonOf(ConflistName), "10-pods.conflist", bridgeConf), StateBroken, "00-multus.conf", "multus-cni-network", "no pod can start"},
		"it with Calico":           {dirOf("00-multus.conf", daemonOf("10-calico.conflist"), "10-calico.conflist", calicoConf), StateUnsupported, "00-multus.conf", "k8s-pod-network", "Calico"},
		"it with half a file":      {dirOf("00-multus.conf", daemonOf("10-x.conflist"), "10-x.conflist", "{"), StateBroken, "00-multus.conf", "", "EOF"},
		"multus after ours":        {dirOf(ConflistName, own, "05-multus.conf", multusOf(bridgeConf), "10-pods.conflist", bridgeConf), StateUnsupported, ConflistName, "pods", "05-multus.conf"},
		"multus alone, by hand":    {dirOf("70-multus.conf", multusOf(handConf)), StateActive, "70-multus.conf", "pods", "hands on"},
		"multus, thick":            {dirOf("00-multus.conf", configurations["multus, thick"].data, ConflistName, own), StateMultus, "00-multus.conf", "multus-cni-network", "restart its pod"},
	} {
		t.Run(name, func(t *testing.T) {
			s := c.dir.status()
			if s.State != c.state || s.File != c.file || s.Network != c.network || !strings.Contains(s.Message, c.says) {
				t.Errorf("%+v, want %+v", s, c)
			}
		})
	}
}

func FuzzWhatIsDerivedLoadsAndKeepsAllOfItsSource(f *testing.F) {
	for _, c := range configurations {
		f.Add(c.data, !strings.HasSuffix(c.file, ".conflist"))
	}
	f.Fuzz(func(t *testing.T, data string, single bool) {
		file := confFile{name: "10-x.conflist", data: []byte(data)}
		if single {
			file.name = "10-x.conf"
		}
		c := confDir{}.read(file)
		if c.kind == broken {
			return
		}
		if _, err := load(file); err != nil {
			t.Fatalf("the runtime cannot load what we can: %v", err)
		}
		if c.kind != stock {
			return
		}
		derived, err := derive(c, limits{}, nil)
		must.Do(t, err)
		derivedFrom(t, file, derived)
	})
}
