package mailbox

import (
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

func TestTheFilesOfTheAgent(t *testing.T) {
	dir := t.TempDir()
	box := New(dir, disk.Local{})
	a, b := "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e", "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3f"
	want := func(want map[string]Pod) {
		t.Helper()
		got, err := box.Pods()
		if err != nil || !maps.Equal(got, want) {
			t.Errorf("the files tell of %v, %v, want %v", got, err, want)
		}
	}
	want(map[string]Pod{})
	must.Do(t, box.Sweep(nil))
	must.Do(t, box.PutPod(a, "[1]"))
	must.Do(t, box.PutPod(a, "[2]"))
	must.Do(t, box.PutBar(a))
	must.Do(t, box.PutBar(b))
	must.Do(t, box.PutEpoch("boot-1", 3, false))
	want(map[string]Pod{a: {Barred: true}, b: {Barred: true}})
	must.Do(t, box.PutPod(a, "[2]"))
	want(map[string]Pod{a: {"[2]", true}, b: {Barred: true}})
	must.Do(t, box.DeletePod(a))
	must.Do(t, box.DeletePod(a))
	if err := box.PutPod("../"+a, "[1]"); err == nil {
		t.Error("a file for a bad UID")
	}

	left := filepath.Join(dir, Dir, a+".tmp")
	must.Do(t, os.WriteFile(left, nil, 0o600))
	old := time.Now().Add(-BarFor - time.Minute)
	for _, name := range []string{a + ".barred", b + ".barred", a + ".tmp", "checked"} {
		must.Do(t, os.Chtimes(filepath.Join(dir, Dir, name), old, old))
	}
	must.Do(t, box.Sweep(func(uid string) bool { return uid == b }))
	want(map[string]Pod{b: {Barred: true}})
	if _, err := os.Stat(left); err == nil {
		t.Error("what a kill left is still there")
	}

	// What was noted of probes goes with the pod, or is swept.
	x, y := netip.MustParseAddr("10.6.168.105"), netip.MustParseAddr("fd00:6::105")
	noted := func(uid string, want ...netip.Addr) {
		t.Helper()
		if got, err := box.Probed(uid); err != nil || !slices.Equal(got, want) {
			t.Errorf("noted of %s is %v, %v, want %v", uid, got, err, want)
		}
	}
	for _, uid := range []string{a, b} {
		must.Do(t, box.PutProbed(uid, []netip.Addr{x}))
		must.Do(t, box.PutProbed(uid, []netip.Addr{y}))
		noted(uid, x, y)
		must.Do(t, os.Chtimes(filepath.Join(dir, Dir, uid+".probed"), old, old))
	}
	must.Do(t, os.Chtimes(filepath.Join(dir, Dir, x.String()+".used"), old, old))
	used := func(a netip.Addr, want bool) {
		t.Helper()
		if is, err := box.Used(a); err != nil || is != want {
			t.Errorf("%s was used: %t, %v, want %t", a, is, err, want)
		}
	}
	used(x, true)
	used(y, true)
	used(netip.MustParseAddr("10.6.168.106"), false)
	want(map[string]Pod{b: {Barred: true}})
	must.Do(t, box.Sweep(func(uid string) bool { return uid == b }))
	noted(a)
	noted(b, x, y)
	must.Do(t, box.DeletePod(b))
	noted(b)
	used(x, false)
	used(y, true)
	for _, name := range []string{"", "node-1", "node-1", "node-2"} {
		if name != "" {
			must.Do(t, box.PutNode(name))
		}
		if got, err := box.Node(); err != nil || got != name {
			t.Errorf("the node is %q, %v, want %q", got, err, name)
		}
	}
	if epoch, _, err := box.Epoch("boot-1"); err != nil || epoch != 3 {
		t.Errorf("the epoch is %d, %v", epoch, err)
	}
	if is, err := box.Barred(b); err != nil || !is {
		t.Errorf("barred %t, %v", is, err)
	}
	if is, err := box.Barred(a); err != nil || is {
		t.Errorf("barred %t, %v", is, err)
	}
}

// Other versions of agent and plugin read what this one writes, byte for byte.
func TestTheFilesStayAsOtherVersionsKnowThem(t *testing.T) {
	dir, uid := t.TempDir(), "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e"
	box := New(dir, disk.Local{})
	left := filepath.Join(dir, "pools", uid+".tmp")
	must.Do(t, os.MkdirAll(filepath.Dir(left), 0o755))
	must.Do(t, os.WriteFile(left, []byte("a longer text"), 0o600)) // of a version that set no sticky bit, killed

	must.Do(t, box.PutServed(Served{Guard: "guard-1", Subnets: []netip.Prefix{netip.MustParsePrefix("10.6.0.0/16")},
		Gateways: []netip.Addr{netip.MustParseAddr("10.6.0.1")}}))
	must.Do(t, box.PutEpoch("boot-1", 3, true))
	must.Do(t, box.PutPod(uid, "[1]"))
	must.Do(t, box.PutBar(uid))
	must.Do(t, box.PutNode("node-1"))
	must.Do(t, box.PutProbed(uid, []netip.Addr{netip.MustParseAddr("10.6.0.5"), netip.MustParseAddr("fd06::5")}))

	type file struct {
		text string
		mode uint32
	}
	want := map[string]file{
		"served":        {`{"v":1,"guard":"guard-1","subnets":["10.6.0.0/16"],"gateways":["10.6.0.1"]}` + "\n", 0o600},
		"checked":       {"boot-1 3 lost\n", 0o600},
		uid:             {"[1]", 0o1600},
		uid + ".barred": {"", 0o600},
		"node":          {"node-1", 0o600},
		uid + ".probed": {"10.6.0.5\nfd06::5\n", 0o600},
		"10.6.0.5.used": {"", 0o600},
		"fd06::5.used":  {"", 0o600},
	}
	got := map[string]file{}
	names, err := disk.Local{}.ReadDir(filepath.Dir(left))
	must.Do(t, err)
	for _, name := range names {
		path := filepath.Join(dir, "pools", name)
		b, err := disk.Local{}.ReadFile(path)
		must.Do(t, err)
		mode, err := disk.Local{}.Mode(path)
		must.Do(t, err)
		got[name] = file{string(b), mode}
	}
	if !maps.Equal(got, want) {
		t.Errorf("the files are %+v, want %+v", got, want)
	}
}

// What does not say for sure what the pools are says nothing.
func TestWhatTheAgentSaidOfPoolsIsReadWhollyOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	box := New(dir, disk.Local{})
	if s, err := box.Served(); err != nil || s != nil {
		t.Errorf("without a file: %+v, %v", s, err)
	}
	must.Do(t, os.Mkdir(filepath.Join(dir, Dir), 0o755))
	for text, corrupt := range map[string]bool{
		"": true, "{": true, `{"v":1,"subnets":["10.6"]}`: true, `{"subnets":7,"v":2}`: false, `{"v":2}`: false,
	} {
		must.Do(t, os.WriteFile(filepath.Join(dir, Dir, servedName), []byte(text), 0o600))
		if s, err := box.Served(); err == nil || s != nil || errors.Is(err, ErrCorrupt) != corrupt {
			t.Errorf("%q: %+v, %v", text, s, err)
		}
	}
}
