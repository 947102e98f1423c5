package inspect

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
)

func TestAnInspectionSaysHowTheRuntimeIsConfigured(t *testing.T) {
	entry := func(capabilities string) string {
		return `{"cniVersion":"1.0.0","name":"cbr0","plugins":[{"type":"bridge",` + capabilities +
			`"ipam":{"type":"stayput","ranges":[[{"subnet":"10.1.0.0/24"}]]}}]}`
	}
	for content, want := range map[string]inspection.CNI{
		entry(`"capabilities":{"io.kubernetes.cri.pod-annotations":true},`): {State: "no-plugin"},
		entry(""): {State: "no-plugin"},
		`{"cniVersion":"1.0.0","name":"cbr0","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`: {State: "stock"},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "10-net.conflist"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if c := cniOf(Options{CNIConfDir: dir, CNIBinDir: dir}); c.State != want.State || c.Good || c.Message == "" ||
			c.File != "10-net.conflist" || c.Plugin.Error != "missing" {
			t.Errorf("%s: %+v", content, c)
		}
	}
}

// Of its file that outlives its source, and of one that another program fights over, the disk says that all is well.
func TestAnInspectionSaysWhatOnlyTheRunningAgentKnows(t *testing.T) {
	active := inspection.CNI{State: "active", Good: true}
	shadowed := inspection.CNI{State: "shadowed"}
	for name, c := range map[string]struct {
		onDisk inspection.CNI
		said   inspection.Status
		want   inspection.CNI
	}{
		"all is well": {active, inspection.Status{CNIState: "active", CNIMessage: "fine"}, active},
		"without its source": {active, inspection.Status{CNIState: "held", CNIMessage: "gone"},
			inspection.CNI{State: "held", Message: "gone", Good: true}},
		"in a fight": {active, inspection.Status{CNIState: "conflict", CNIMessage: "9 times"},
			inspection.CNI{State: "conflict", Message: "9 times"}},
		"in other directories": {shadowed, inspection.Status{CNIState: "no-plugin", CNIMessage: "there"},
			inspection.CNI{State: "no-plugin", Message: "there"}},
		"the disk knows better":  {shadowed, inspection.Status{CNIState: "held", CNIMessage: "gone"}, shadowed},
		"the agent says nothing": {active, inspection.Status{}, active},
	} {
		if agentKnows(&c.onDisk, c.said); c.onDisk != c.want {
			t.Errorf("%s: %+v", name, c.onDisk)
		}
	}
}

func TestAnInspectionAsksTheAgentHowItIs(t *testing.T) {
	for name, c := range map[string]struct {
		code int
		body string
		want inspection.Agent
	}{
		"ready": {200,
			`{"ready":true,"nri":"connected","cri":"ok","cni":"active: x","cniState":"active"}`, inspection.Agent{
				Ready: true, NRI: "connected", CRI: "ok", CNI: "active: x",
			}},
		"not ready": {503, `{"ready":false,"message":"too early"}`, inspection.Agent{Error: "too early"}},
		"another program": {200, "ok\n", inspection.Agent{Error: "URL" + inspection.StatusPath +
			": invalid character 'o' looking for beginning of value"}},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.String() != inspection.StatusPath {
				t.Errorf("asked for %s", r.URL)
			}
			w.WriteHeader(c.code)
			fmt.Fprint(w, c.body)
		}))
		got, _ := askAgent(t.Context(), strings.TrimPrefix(s.URL, "http://"))
		if got.Error = strings.ReplaceAll(got.Error, s.URL, "URL"); got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
		s.Close()
	}
}

func TestWhatTheLedgerAndTheRuntimeSayOfAnAddressIsCompared(t *testing.T) {
	ip := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	pod := func(name string, ips ...string) cri.Sandbox {
		s := cri.Sandbox{Pod: ledger.Pod{Namespace: "default", Name: name}, Ready: true}
		for _, i := range ips {
			s.Addrs = append(s.Addrs, ip(i))
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
	found := compare([]inspection.Network{n}, map[string]cri.Sandbox{
		"a": pod("a", "10.1.0.2"), "b": pod("b", "10.1.0.4"), "c": pod("c", "10.1.0.5"), "d": pod("d", "10.1.0.6"),
		"elsewhere": pod("e", "10.9.0.1"), "host": pod("f"),
	})
	var leaks []inspection.Suspicion
	var said []string
	for _, f := range found {
		if f.doubled {
			said = append(said, f.IP.String()+" "+f.Why)
		} else {
			leaks = append(leaks, f.Suspicion)
		}
	}
	if len(leaks) != 1 || leaks[0].IP != ip("10.1.0.3") || !strings.Contains(leaks[0].Why, "sandbox gone") {
		t.Errorf("leaks %+v", leaks)
	}
	want := "10.1.0.4 pod default/b has it, but the ledger records it as bound to sandbox d\n" +
		"10.1.0.5 pod default/c has it, but the ledger records it as retained\n" +
		"10.1.0.6 pod default/d has it, but the ledger records it as free"
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
