package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/test/must"
)

func TestInspectPrintsWhatTheNodeSaysAndWhatItCannotFindOut(t *testing.T) {
	state, _ := files(t)
	dir := t.TempDir()
	conf := `{"cniVersion":"1.0.0","name":"red","plugins":[{"type":"bridge","capabilities":{"io.kubernetes.cri.pod-annotations":true},"ipam":{"type":"stayput"}}]}`
	must.Do(t, os.WriteFile(filepath.Join(dir, "10-red.conflist"), []byte(conf), 0o644))
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(inspection.Status{Ready: true, NRI: "connected", CRI: "degraded: gone", API: "ok"})
	}))
	defer agent.Close()
	out, err := execute("inspect", "--state-dir", state, "--cni-conf-dir", dir, "--cni-bin-dir", dir, "--grace-period=2m",
		"--cri-socket", filepath.Join(dir, "none.sock"), "--listen", strings.TrimPrefix(agent.URL, "http://"))
	must.Do(t, err)
	var n inspection.Node
	must.Do(t, json.Unmarshal([]byte(out), &n))
	if n.Format != inspection.Format || n.StateDir != state || n.Clock.Wall.IsZero() || n.Clock.BootID == "" ||
		n.Clock.Error != "" {
		t.Errorf("printed %+v", n)
	}
	if a := n.Agent; !a.Ready || a.NRI != "connected" || a.CRI != "degraded: gone" || a.API != "ok" ||
		a.GracePeriod != 120 {
		t.Errorf("of the agent %+v", a)
	}
	if n.Runtime.Error == "" {
		t.Error("nothing is said of a runtime that does not answer")
	}
	if c := n.CNI; c.File != "10-red.conflist" || c.State != "no-plugin" || c.WithoutAnnotations ||
		c.Plugin.Error != "missing" || c.Plugin.Unseen {
		t.Errorf("of CNI %+v", c)
	}
	if len(n.Networks) != 2 || n.Networks[0].Name != "blue" || n.Networks[1].Name != "red" {
		t.Fatalf("networks %+v", n.Networks)
	}
	red := n.Networks[1]
	if set := red.RangeSets[0]; set.Size != 253 || set.Promised != 2 || set.PromiseLimit != 126 ||
		red.PromisedShare != 0.5 || red.PromisedLimit != 1024 {
		t.Errorf("of red %+v", red)
	}
	if len(red.Addresses) != 2 || red.Addresses[0].State != inspection.Retained || red.Addresses[0].Pod != "kept" ||
		*red.Addresses[0].LeftSeconds > 600 ||
		red.Addresses[0].Promise.Retention != "10m" || red.Addresses[1].State != inspection.Bound ||
		red.Addresses[1].ContainerID != "running" || red.Addresses[1].Promise == nil {
		t.Errorf("of red %+v", red.Addresses)
	}
	if len(red.Violations)+len(red.Leaks)+len(red.Doubled) > 0 {
		t.Errorf("without the runtime it suspects %+v", red)
	}
}

func TestInspectSaysThatANetworkCannotBeRead(t *testing.T) {
	state, _ := files(t)
	paths, err := filepath.Glob(filepath.Join(state, "red-*", "network"))
	must.Do(t, err)
	must.Do(t, os.WriteFile(paths[0], []byte("{"), 0o644))
	out, err := execute("inspect", "--state-dir", state, "--cni-conf-dir", filepath.Join(state, "none"), "--cri-socket",
		filepath.Join(state, "none.sock"), "--listen=")
	must.Do(t, err)
	var n inspection.Node
	must.Do(t, json.Unmarshal([]byte(out), &n))
	if !strings.Contains(n.NetworksError, paths[0]) || len(n.Networks) != 1 || n.Networks[0].Name != "blue" ||
		n.CNI.Good || n.CNI.Message == "" || n.Agent.Error == "" {
		t.Errorf("printed %+v", n)
	}
}

func TestImportNeedsASourceAndTheRuntime(t *testing.T) {
	state, _ := files(t)
	if _, err := execute("import", "calico", "--state-dir", state); err == nil ||
		!strings.Contains(err.Error(), `"calico" is not valid: expected openkruise or -`) {
		t.Errorf("of another source: %v", err)
	}
	if _, err := execute("import", "openkruise", "--state-dir", state, "--cri-socket", filepath.Join(state, "none.sock"),
		"--act"); err == nil || !strings.Contains(err.Error(), "which the import requires") {
		t.Errorf("without a runtime: %v", err)
	}
}
