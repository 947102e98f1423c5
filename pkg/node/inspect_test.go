package node

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

func TestAnInspectionSaysHowTheRuntimeIsConfigured(t *testing.T) {
	entry := func(capabilities string) string {
		return `{"cniVersion":"1.0.0","name":"cbr0","plugins":[{"type":"bridge",` + capabilities + `"ipam":{"type":"stayput","ranges":[[{"subnet":"10.1.0.0/24"}]]}}]}`
	}
	for content, want := range map[string]inspection.CNI{
		entry(`"capabilities":{"io.kubernetes.cri.pod-annotations":true},`): {State: "no-plugin"},
		entry(""): {State: "no-plugin"},
		`{"cniVersion":"1.0.0","name":"cbr0","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`: {State: "stock"},
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "10-net.conflist")
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if c := cniOf(Options{CNIConfDir: dir, CNIBinDir: dir}); c.State != want.State || c.Good || c.Message == "" || c.File != "10-net.conflist" || c.Plugin.Error != "missing" {
			t.Errorf("%s: %+v", content, c)
		}
		if got := withoutAnnotations(file); got != (content == entry("")) {
			t.Errorf("%s is without annotations: %v", content, got)
		}
	}
}

// Of its file that outlives its source, and of one that somebody fights over, the disk says that all is well.
func TestAnInspectionSaysWhatOnlyTheRunningAgentKnows(t *testing.T) {
	onDisk := inspection.CNI{State: string(cniconf.StateActive), Good: true}
	is := onDisk
	if agentKnows(&is, "active: derived"); is != onDisk {
		t.Errorf("where all is well: %+v", is)
	}
	if agentKnows(&is, "held: the source is gone"); is.State != string(cniconf.StateHeld) || is.Message != "the source is gone" || !is.Good {
		t.Errorf("without its source: %+v", is)
	}
	is = onDisk
	if agentKnows(&is, "degraded: conflict: it was written 9 times"); is.State != string(cniconf.StateConflict) || is.Message != "it was written 9 times" || is.Good {
		t.Errorf("in a fight: %+v", is)
	}
	shadowed := inspection.CNI{State: string(cniconf.StateShadowed)}
	if agentKnows(&shadowed, "degraded: conflict: it was written 9 times"); shadowed.State != string(cniconf.StateShadowed) {
		t.Errorf("what the disk shows is hidden: %+v", shadowed)
	}
	is = onDisk
	if agentKnows(&is, ""); is != onDisk {
		t.Errorf("of an agent that does not answer: %+v", is)
	}
}

func TestWhatTheLedgerAndTheRuntimeSayOfAnAddressIsCompared(t *testing.T) {
	ip := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	pod := func(name string, ips ...string) sandboxIPs {
		s := sandboxIPs{listed: listed{Sandbox: Sandbox{Pod: ledger.Pod{Namespace: "default", Name: name}}, ready: true}}
		for _, i := range ips {
			s.ips = append(s.ips, ip(i))
		}
		return s
	}
	n := inspection.Network{
		RangeSets: []inspection.RangeSet{{Ranges: []inspection.Range{{Start: ip("10.1.0.1"), End: ip("10.1.0.20")}}}},
		Addresses: []inspection.Address{
			{IP: ip("10.1.0.2"), State: inspection.Bound, ContainerID: "a"},
			{IP: ip("10.1.0.3"), State: inspection.Bound, ContainerID: "gone"},
			{IP: ip("10.1.0.4"), State: inspection.Bound, ContainerID: "d"},
			{IP: ip("10.1.0.5"), State: inspection.Retained},
		},
	}
	leaks, doubled := compare(&n, map[string]sandboxIPs{
		"a": pod("a", "10.1.0.2"), "b": pod("b", "10.1.0.4"), "c": pod("c", "10.1.0.5"), "d": pod("d", "10.1.0.6"),
		"elsewhere": pod("e", "10.9.0.1"), "host": pod("f"),
	})
	if len(leaks) != 1 || leaks[0].IP != ip("10.1.0.3") || !strings.Contains(leaks[0].Why, "sandbox gone") {
		t.Errorf("leaks %+v", leaks)
	}
	var said []string
	for _, d := range doubled {
		said = append(said, d.IP.String()+" "+d.Why)
	}
	want := "10.1.0.4 pod default/b has it, but the ledger says that it is bound to sandbox d\n" +
		"10.1.0.5 pod default/c has it, but the ledger says that it is retained\n" +
		"10.1.0.6 pod default/d has it, but the ledger says that it is free"
	if strings.Join(said, "\n") != want {
		t.Errorf("doubled %s", strings.Join(said, "\n"))
	}
}

func TestAProgramIsDescribedByWhatIsInIt(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if b := binaryAt(self); b.Error != "" || len(b.SHA256) != 64 {
		t.Errorf("of this test: %+v", b)
	}
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("no program"), 0o644); err != nil {
		t.Fatal(err)
	}
	if b := binaryAt(plain); b.Error != "not executable" {
		t.Errorf("of a plain file: %+v", b)
	}
	if b := binaryAt(filepath.Join(dir, "none")); b.Error != "missing" || b.Unseen {
		t.Errorf("of a missing file: %+v", b)
	}
	if b := binaryAt(filepath.Join(dir, "none", "none")); !b.Unseen {
		t.Errorf("of a missing directory: %+v", b)
	}
}

func TestReservationsOfOpenKruisesHostLocalAreRead(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	for content, want := range map[string]inspection.ImportItem{
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24","gateway":"10.244.1.1"},"duration":10}`:                         {Interface: "eth0", Retention: "10m"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24"},"duration":90,"releaseTime":"2026-01-02T11:00:00.123456789Z"}`: {Interface: "eth0", Retention: "1h30m"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24"},"duration":10,"releaseTime":"2026-01-02T11:50:00Z"}`:           {Interface: "eth0", Retention: "10m", Action: inspection.ActionNone, Why: "its time was over at 2026-01-02T12:00:00Z"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5/24"},"duration":0}`:                                                 {Interface: "eth0", Action: inspection.ActionRefuse, Why: "its reservation is for 0 minutes: expected more than 0"},
		`{"containerId":"c","ifName":"eth0","IPConf":{"address":"10.244.1.5"},"duration":10}`:                                                   {Interface: "eth0", Action: inspection.ActionRefuse, Why: `its reservation has the address "10.244.1.5": expected one such as 10.244.1.5/24`},
		`{"containerId":`: {Action: inspection.ActionRefuse, Why: "its reservation does not parse: unexpected end of JSON input"},
	} {
		got := reservedIP([]byte(content), "default", "web-0", now)
		if got.Namespace != "default" || got.Pod != "web-0" || got.Interface != want.Interface || got.Retention != want.Retention || got.Action != want.Action || got.Why != want.Why {
			t.Errorf("%s is %+v", content, got)
		}
		if want.Action != inspection.ActionRefuse && (len(got.IPs) != 1 || got.IPs[0].String() != "10.244.1.5") {
			t.Errorf("%s has %v", content, got.IPs)
		}
	}
	dir := t.TempDir()
	if items, err := ReservedIPs(dir, now); err != nil || len(items) != 0 {
		t.Errorf("where there is nothing: %v, %v", items, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "reserved", "default"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "reserved", "default", "web-0"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if items, err := ReservedIPs(dir, now); err != nil || len(items) != 1 || items[0].Action != inspection.ActionRefuse {
		t.Errorf("a broken one: %v, %v", items, err)
	}
}
