package cniconf

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
)

// A service mesh chains its plugin to the file that comes first, by writing it again in its own way, and takes it out
// again when it is removed.
func TestChainedPluginsStay(t *testing.T) {
	const source = "10-flannel.conflist"
	var list map[string]any
	must.Do(t, json.Unmarshal([]byte(ownOf(t, source, flannelConf)), &list))
	list["plugins"] = append(list["plugins"].([]any), map[string]any{"type": "istio-cni", "log_level": "info"})
	edited, err := json.Marshal(list)
	must.Do(t, err)
	dir := dirOf(ConflistName, string(edited), source, flannelConf)
	if p := dir.decide(Limits{}, &memory{}, at(1)); p.write != nil || p.remove {
		t.Errorf("it is written again: %+v", p)
	}
	// The source changes: the chained one stays, one that the source itself no longer has goes.
	dir = dirOf(ConflistName, string(edited), source,
		`{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{"mtu":1400}}]}`)
	p := dir.decide(Limits{}, &memory{}, at(1))
	if types := typesOf(t, p.write); !slices.Equal(types, []string{"flannel", "istio-cni"}) {
		t.Errorf("plugins %v", types)
	}
	// The source gets it too: not twice.
	dir = dirOf(ConflistName, string(edited), source,
		`{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel"},{"type":"istio-cni"}]}`)
	if types := typesOf(t, dir.decide(Limits{}, &memory{}, at(1)).write); !slices.Equal(types,
		[]string{"flannel", "istio-cni"}) {
		t.Errorf("plugins %v", types)
	}
}

// at is an instant of one boot.
func at(boot time.Duration) ledger.Instant { return ledger.Instant{Boot: boot, BootID: "boot"} }

func typesOf(t *testing.T, data []byte) (types []string) {
	t.Helper()
	var list struct{ Plugins []struct{ Type string } }
	must.Do(t, json.Unmarshal(data, &list))
	for _, p := range list.Plugins {
		types = append(types, p.Type)
	}
	return types
}

// dirOf is a directory with these files, name, content, name, content.
func dirOf(nameContent ...string) confDir {
	var d Dir
	for i := 0; i < len(nameContent); i += 2 {
		d.Files = append(d.Files, File{Name: nameContent[i], Data: []byte(nameContent[i+1])})
	}
	slices.SortFunc(d.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return newConfDir(d, "")
}

const (
	bridgeConf  = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`
	bridge2Conf = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.2.0.0/24"}}]}`
	calicoConf  = `{"cniVersion":"0.3.1","name":"k8s-pod-network","plugins":[{"type":"calico","ipam":{"type":"calico-ipam"}}]}`
	loConf      = `{"cniVersion":"0.2.0","name":"lo","type":"loopback"}`
	handConf    = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","subnet":"10.1.0.0/24"}}]}`
)

// What kubeadm with flannel writes, and multus, thin and thick.
const (
	flannelConf = `{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{"hairpinMode":true,"isDefaultGateway":true}},{"type":"portmap","capabilities":{"portMappings":true}}]}`
	multusConf  = `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus","kubeconfig":"/etc/cni/net.d/multus.d/multus.kubeconfig","delegates":[{"cniVersion":"0.3.1","name":"cbr0","plugins":[{"type":"flannel","delegate":{"isDefaultGateway":true}}]}]}`
	shimConf    = `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus-shim","socketDir":"/host/run/multus/"}`
)

// ownOf is the agent's file for a source.
func ownOf(t *testing.T, file, data string) string {
	t.Helper()
	own, err := Derive(Dir{}.Conf(File{Name: file, Data: []byte(data)}), Limits{}, nil)
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
		"nothing there": {dirOf(), "", false, ""},
		"a source":      {dirOf("10-pods.conflist", bridgeConf), own, false, ""},
		"all done":      {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf), "", false, ""},
		"all done, and others behind": {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf, "20-calico.conflist",
			calicoConf), "", false, ""},
		"a changed source": {dirOf(ConflistName, own, "10-pods.conflist", bridge2Conf),
			ownOf(t, "10-pods.conflist", bridge2Conf), false, ""},
		"a half-written source": {dirOf(ConflistName, own, "10-pods.conflist", bridge2Conf[:40]), "", false,
			StateBroken},
		"an empty source":             {dirOf(ConflistName, own, "10-pods.conflist", ""), "", false, StateBroken},
		"a half-written first source": {dirOf("10-pods.conflist", bridgeConf[:40]), "", false, ""},
		"a source without host-local": {dirOf(ConflistName, own, "10-pods.conflist", calicoConf), "", true, ""},
		"a source that has stayput":   {dirOf(ConflistName, own, "10-pods.conflist", handConf), "", true, ""},
		"another source before it": {dirOf(ConflistName, own, "05-new.conflist", bridge2Conf, "10-pods.conflist",
			bridgeConf), other, false, ""},
		"another CNI before it": {dirOf(ConflistName, own, "05-new.conflist", calicoConf, "10-pods.conflist",
			bridgeConf), "", true, ""},
		"a half-written CNI before it": {dirOf(ConflistName, own, "05-new.conflist", calicoConf[:30], "10-pods.conflist",
			bridgeConf), "", false, StateBroken},
		"the source gone":               {dirOf(ConflistName, own), "", false, StateHeld},
		"the source gone, others there": {dirOf(ConflistName, own, "99-lo.conf", loConf), "", false, StateHeld},
		"one that sorts before ours":    {dirOf("00-a.conflist", bridgeConf), "", false, StateShadowed},
		"one that came before ours": {dirOf("00-a.conflist", bridgeConf, ConflistName, own, "10-pods.conflist",
			bridgeConf), "", true, StateShadowed},
		"multus before ours": {dirOf("00-multus.conf", multusConf, "10-pods.conflist", bridgeConf), own, false,
			""},
		"a half-written multus": {dirOf("00-multus.conf", "{", "10-pods.conflist", bridgeConf), own, false, ""},
		"multus after ours": {dirOf("05-multus.conf", multusConf, "10-pods.conflist", bridgeConf), "", false,
			StateUnsupported},
		"multus after ours, thick": {dirOf("05-multus.conf", shimConf, "10-pods.conflist", bridgeConf), "", false,
			StateUnsupported},
		"multus last": {dirOf("70-multus.conf", multusConf), "", false, StateUnsupported},
		"multus that came after ours": {dirOf(ConflistName, own, "05-multus.conf", multusConf, "10-pods.conflist",
			bridgeConf), "", true, StateUnsupported},
		"multus in the source's place": {dirOf(ConflistName, own, "70-multus.conf", multusConf), "", true, StateUnsupported},
		"multus with stayput by hand": {dirOf(ConflistName, own, "70-multus.conf",
			`{"name":"m","type":"multus","delegates":[`+handConf+`]}`), "", true, ""},
		"a half-written multus after": {dirOf(ConflistName, own, "05-multus.conf", "{", "10-pods.conflist", bridgeConf), "",
			false, StateBroken},
		"multus that nobody uses": {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf, "70-multus.conf",
			multusConf), "", false, ""},
		"somebody else's of our name": {dirOf(ConflistName, bridge2Conf, "10-pods.conflist", bridgeConf), "", false, ""},
		"a torn one of our name":      {dirOf(ConflistName, own[:50], "10-pods.conflist", bridgeConf), "", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.dir.decide(Limits{}, &memory{}, at(time.Hour))
			if string(p.write) != c.write || p.remove != c.remove {
				t.Errorf("write %s, remove %v; want %s, %v", p.write, p.remove, c.write, c.remove)
			}
			var says State
			if p.status.State != "" {
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

func TestAFileOutlivesItsSourceForAWhile(t *testing.T) {
	own := ownOf(t, "10-pods.conflist", bridgeConf)
	whole := dirOf(ConflistName, own, "10-pods.conflist", bridgeConf, "99-lo.conf", loConf)
	gone := dirOf(ConflistName, own, "99-lo.conf", loConf)
	step := func(d confDir, m *memory, when time.Duration, remove bool, write bool) {
		t.Helper()
		if p := d.decide(Limits{}, m, at(when)); p.remove != remove || (p.write != nil) != write {
			t.Errorf("at %s: remove %v, write %v", when, p.remove, p.write != nil)
		}
	}
	m := &memory{}
	step(whole, m, time.Hour, false, false)
	step(gone, m, time.Hour+time.Second, false, false)
	step(gone, m, time.Hour+lasting, false, false)
	step(gone, m, time.Hour+lasting+time.Second, false, true)      // noted, for an agent that is started again
	step(whole, m, time.Hour+sourceHold+time.Second, false, false) // it came back
	step(gone, m, 3*time.Hour, false, false)                       // the time begins again
	step(gone, m, 3*time.Hour+sourceHold-1, false, true)
	step(gone, m, 3*time.Hour+sourceHold, true, false)

	// What appears while it is gone is what somebody wants instead.
	m = &memory{}
	step(whole, m, time.Hour, false, false)
	step(gone, m, time.Hour+1, false, false)
	step(dirOf(ConflistName, own, "10-calico.conflist", calicoConf[:20], "99-lo.conf", loConf), m, time.Hour+2, false,
		false)
	step(dirOf(ConflistName, own, "10-calico.conflist", calicoConf, "99-lo.conf", loConf), m, time.Hour+3, true, false)
	m = &memory{}
	step(whole, m, time.Hour, false, false)
	step(dirOf(ConflistName, own, "20-pods.conflist", bridgeConf, "99-lo.conf", loConf), m, time.Hour+1, false, true)
}

// Agents that are started again and again, as by updates of their DaemonSet, are no reason to keep it for longer.
func TestAFileOutlivesItsSourceNoLongerForARestartedAgent(t *testing.T) {
	own := ownOf(t, "10-pods.conflist", bridgeConf)
	step := func(when time.Duration, boot string) (p plan) {
		p = dirOf(ConflistName, own, "20-calico.conflist", calicoConf).decide(Limits{}, &memory{},
			ledger.Instant{Boot: when, BootID: boot})
		if p.write != nil {
			own = string(p.write)
		}
		return p
	}
	m := &memory{}
	gone := dirOf(ConflistName, own, "20-calico.conflist", calicoConf)
	gone.decide(Limits{}, m, at(time.Hour))
	p := gone.decide(Limits{}, m, at(time.Hour+lasting))
	if p.write == nil || p.again != sourceHold-lasting {
		t.Fatalf("it is not noted: %+v", p)
	}
	own = string(p.write)
	if p := gone.decide(Limits{}, m, at(time.Hour+lasting)); p.write == nil {
		t.Errorf("of the file as it was it is not noted: %+v", p)
	}
	for when := time.Hour + lasting; when < time.Hour+sourceHold; when += time.Minute {
		if p := step(when, "boot"); p.remove || p.write != nil || p.status.State != StateHeld {
			t.Errorf("at %s: %+v", when, p)
		}
	}
	if p := step(time.Hour+sourceHold, "boot"); !p.remove {
		t.Errorf("after %s: %+v", sourceHold, p)
	}
	// What has come meanwhile is what somebody wants instead, however often the agent is started again.
	if p := dirOf(ConflistName, own, "10-new.conflist", calicoConf).decide(Limits{}, &memory{},
		at(time.Hour+time.Minute)); !p.remove {
		t.Errorf("with another configuration: %+v", p)
	}
	// In the next boot an installer has its time again.
	for _, when := range []time.Duration{time.Second, 2 * time.Hour} {
		if p := step(when, "next"); p.remove || p.status.State != StateHeld {
			t.Errorf("after a boot: %+v", p)
		}
	}
	// It comes back: the note goes.
	p = dirOf(ConflistName, own, "10-pods.conflist", bridgeConf).decide(Limits{}, &memory{}, at(time.Hour+time.Minute))
	if string(p.write) != ownOf(t, "10-pods.conflist", bridgeConf) {
		t.Errorf("it is now %s", p.write)
	}
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
		"nothing": {dirOf(), StateNone, "", "", "no network"},
		"ours": {dirOf(ConflistName, own, "10-pods.conflist", bridgeConf), StateActive, ConflistName,
			"pods", "10-pods.conflist"},
		"stock": {dirOf("10-pods.conflist", bridgeConf), StateStock, "10-pods.conflist", "pods",
			"host-local"},
		"by hand":                 {dirOf("10-pods.conflist", handConf), StateByHand, "10-pods.conflist", "pods", "stayput"},
		"by hand, under our name": {dirOf(ConflistName, handConf), StateByHand, ConflistName, "pods", "stayput"},
		"somebody's with our name": {dirOf(ConflistName, bridgeConf), StateConflict, ConflistName, "pods",
			"rename or remove"},
		"Calico": {dirOf("10-calico.conflist", calicoConf), StateUnsupported, "10-calico.conflist",
			"k8s-pod-network", "Calico"},
		"half written": {dirOf("10-calico.conflist", "{"), StateBroken, "10-calico.conflist", "", "EOF"},
		"shadowed": {dirOf("00-a.conflist", bridgeConf, ConflistName, own), StateShadowed, "00-a.conflist",
			"pods", "rename"},
		"multus with our copy": {dirOf("00-multus.conf", multusOf(own), ConflistName, own), StateActive, "00-multus.conf",
			"pods", "delegates"},
		"multus with an old copy": {dirOf("00-multus.conf", multusOf(bridgeConf), ConflistName, own), StateShadowed,
			"00-multus.conf", "pods", "restart its pod"},
		"multus without ours": {dirOf("00-multus.conf", multusOf(bridgeConf), "10-pods.conflist", bridgeConf),
			StateStock, "00-multus.conf", "pods", "host-local"},
		"multus with one plugin": {dirOf("00-multus.conf", multusOf(`{"name":"p","type":"ptp","ipam":{"type":"stayput"}}`)),
			StateActive, "00-multus.conf", "p", "delegates"},
		"multus with Calico": {dirOf("00-multus.conf", multusOf(calicoConf), ConflistName, own), StateUnsupported,
			"00-multus.conf", "k8s-pod-network", "Calico"},
		"multus with a name": {dirOf("00-multus.conf", `{"name":"m","type":"multus","clusterNetwork":"pods"}`,
			ConflistName, own), StateMultus, "00-multus.conf", "m", "cluster network pods"},
		"multus' daemon with ours": {dirOf("00-multus.conf", daemonOf(ConflistName), ConflistName, own, "10-pods.conflist",
			bridgeConf), StateActive, "00-multus.conf", "pods", "which uses stayput"},
		"it from before": {dirOf("00-multus.conf", daemonOf("10-pods.conflist"), ConflistName, own,
			"10-pods.conflist", bridgeConf), StateShadowed, "00-multus.conf", "pods", "restart its pod"},
		"it without ours": {dirOf("00-multus.conf", daemonOf("10-pods.conflist"), "10-pods.conflist", bridgeConf),
			StateStock, "00-multus.conf", "pods", "host-local"},
		"it after ours went": {dirOf("00-multus.conf", daemonOf(ConflistName), "10-pods.conflist", bridgeConf),
			StateBroken, "00-multus.conf", "multus-cni-network", "no pod can start"},
		"it with Calico": {dirOf("00-multus.conf", daemonOf("10-calico.conflist"), "10-calico.conflist",
			calicoConf), StateUnsupported, "00-multus.conf", "k8s-pod-network", "Calico"},
		"it with half a file": {dirOf("00-multus.conf", daemonOf("10-x.conflist"), "10-x.conflist", "{"), StateBroken,
			"00-multus.conf", "", "EOF"},
		"multus after ours": {dirOf(ConflistName, own, "05-multus.conf", multusOf(bridgeConf), "10-pods.conflist",
			bridgeConf), StateUnsupported, ConflistName, "pods", "05-multus.conf"},
		"multus alone, by hand": {dirOf("70-multus.conf", multusOf(handConf)), StateActive, "70-multus.conf", "pods",
			"delegates"},
		"multus, thick": {dirOf("00-multus.conf", shimConf, ConflistName, own), StateMultus, "00-multus.conf",
			"multus-cni-network", "restart its pod"},
	} {
		t.Run(name, func(t *testing.T) {
			s := c.dir.status()
			if s.State != c.state || s.File != c.file || s.Network != c.network || !strings.Contains(s.Message, c.says) {
				t.Errorf("%+v, want %+v", s, c)
			}
		})
	}
}
