package grants

import (
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

const (
	uidA = "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e"
	uidB = "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3f"
)

// inBoot returns the files in a directory as a boot sees them.
func inBoot(dir, boot string) Dir {
	return New(dir, disk.Local{}, func() (string, error) { return boot, nil })
}

func begin(t *testing.T, d Dir, uid, text string) Pending {
	t.Helper()
	p, err := d.Begin(uid, text)
	must.Do(t, err)
	return p
}

func wantGrants(t *testing.T, d Dir, want map[string]string) {
	t.Helper()
	got, err := d.All()
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("granted is %q, %v, want %q", got, err, want)
	}
	for uid, text := range want {
		if got, err := d.Granted(uid); err != nil || got != text {
			t.Errorf("pod %s is granted %q, %v, want %q", uid, got, err, text)
		}
	}
}

// What was only begun is no grant, and what was revoked can be finished by nobody, however slow.
func TestAGrantThatWasRevokedCannotBeFinished(t *testing.T) {
	d := inBoot(t.TempDir(), "boot-1")
	wantGrants(t, d, map[string]string{})
	must.Do(t, d.EndPending())
	must.Do(t, d.Revoke(uidA))

	slow := begin(t, d, uidA, "[1]")
	wantGrants(t, d, map[string]string{uidA: ""})
	must.Do(t, begin(t, d, uidA, "[2]").Finish())
	wantGrants(t, d, map[string]string{uidA: "[2]"})
	other := begin(t, d, uidB, "[3]")
	must.Do(t, d.Revoke(uidA))
	wantGrants(t, d, map[string]string{uidB: ""})
	again := begin(t, d, uidA, "[4]") // has a name of its own: the slow one finds none under it
	if err := slow.Finish(); !errors.Is(err, ErrRevoked) {
		t.Errorf("Finish of a revoked grant: %v", err)
	}
	wantGrants(t, d, map[string]string{uidA: "", uidB: ""})
	must.Do(t, other.Finish())
	must.Do(t, d.EndPending())
	if err := again.Finish(); !errors.Is(err, ErrRevoked) {
		t.Errorf("Finish after an epoch: %v", err)
	}
	wantGrants(t, d, map[string]string{uidB: "[3]"})
	begin(t, d, uidA, "[5]").Cancel()
	wantGrants(t, d, map[string]string{uidB: "[3]"})

	for what, err := range map[string]error{
		"Begin":  func() error { _, err := d.Begin("../"+uidA, "[1]"); return err }(),
		"Revoke": d.Revoke("../" + uidA),
	} {
		if err == nil || !strings.Contains(err.Error(), "K8S_POD_UID") {
			t.Errorf("%s with a bad UID: %v", what, err)
		}
	}
}

// renaming finishes a pending grant between any two steps of a revocation.
type renaming struct {
	disk.FS
	at   int
	then func()
}

func (r *renaming) Remove(path string) error {
	if r.at--; r.at == 0 {
		r.then()
	}
	return r.FS.Remove(path)
}

func TestAGrantThatIsFinishedDuringARevocationIsRevoked(t *testing.T) {
	for at := 1; at <= 3; at++ {
		dir := t.TempDir()
		d := inBoot(dir, "boot-1")
		must.Do(t, begin(t, d, uidA, "[1]").Finish())
		pending := begin(t, d, uidA, "[2]")
		revoking := d
		revoking.fs = &renaming{disk.Local{}, at, func() { _ = pending.Finish() }}
		must.Do(t, revoking.Revoke(uidA))
		wantGrants(t, d, map[string]string{})
	}
}

func TestAGrantEndsWithItsBoot(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, begin(t, inBoot(dir, "boot-1"), uidA, "[1]").Finish())
	next := inBoot(dir, "boot-2")
	wantGrants(t, next, map[string]string{})
	must.Do(t, begin(t, next, uidB, "[2]").Finish())
	must.Do(t, next.Sweep())
	wantGrants(t, next, map[string]string{uidB: "[2]"})
	wantGrants(t, inBoot(dir, "boot-1"), map[string]string{})
	broken := New(dir, disk.Local{}, func() (string, error) { return "", os.ErrPermission })
	for what, err := range map[string]error{
		"Granted": func() error { _, err := broken.Granted(uidA); return err }(),
		"All":     func() error { _, err := broken.All(); return err }(),
		"Revoke":  broken.Revoke(uidA),
		"Sweep":   broken.Sweep(),
	} {
		if !errors.Is(err, os.ErrPermission) {
			t.Errorf("%s in an unknown boot: %v", what, err)
		}
	}
}

func TestWhatWasUsedHereIsForgottenAfterAWhile(t *testing.T) {
	dir := t.TempDir()
	d := inBoot(dir, "boot-1")
	x, y := netip.MustParseAddr("10.6.168.105"), netip.MustParseAddr("fd00:6::105")
	used := func(a netip.Addr, want bool) {
		t.Helper()
		if is, err := d.Used(a); err != nil || is != want {
			t.Errorf("%s was used: %t, %v, want %t", a, is, err, want)
		}
	}
	used(x, false)
	must.Do(t, d.Sweep())
	must.Do(t, d.PutUsed([]netip.Addr{x, y}))
	left := filepath.Join(dir, Name, "node.tmp")
	must.Do(t, os.WriteFile(left, nil, 0o600))
	old := time.Now().Add(-UsedFor - time.Minute)
	for _, path := range []string{left, filepath.Join(dir, Name, x.String()+".used")} {
		must.Do(t, os.Chtimes(path, old, old))
	}
	used(x, true)
	must.Do(t, d.Sweep())
	used(x, false)
	used(y, true)
	if _, err := os.Stat(left); err == nil {
		t.Error("what a kill left is still there")
	}
}

func TestTheFilesAreAsTheyAreDrawn(t *testing.T) {
	dir := t.TempDir()
	d := inBoot(dir, "boot-1")
	must.Do(t, d.PutServed(Served{Subnets: []netip.Prefix{netip.MustParsePrefix("10.6.0.0/16")},
		Gateways: []netip.Addr{netip.MustParseAddr("10.6.0.1")}}))
	must.Do(t, begin(t, d, uidA, "[1]").Finish())
	for _, name := range []string{"node-1", "node-1", "node-2"} {
		must.Do(t, d.PutNode(name))
		if got, err := d.Node(); err != nil || got != name {
			t.Errorf("the node is %q, %v, want %q", got, err, name)
		}
	}
	must.Do(t, d.PutUsed([]netip.Addr{netip.MustParseAddr("fd06::5")}))
	want := map[string]string{
		"served":                `{"v":1,"subnets":["10.6.0.0/16"],"gateways":["10.6.0.1"]}` + "\n",
		"grants-boot-1/" + uidA: "[1]",
		"node":                  "node-2",
		"fd06::5.used":          "",
	}
	for name, text := range want {
		path := filepath.Join(dir, "pools", name)
		b, err := os.ReadFile(path)
		must.Do(t, err)
		if mode, err := (disk.Local{}).Mode(path); err != nil || mode != 0o600 || string(b) != text {
			t.Errorf("%s: mode %o, %v, %q; want %q", name, mode, err, b, text)
		}
	}
	names, err := disk.Local{}.ReadDir(filepath.Join(dir, "pools"))
	must.Do(t, err)
	if slices.Sort(names); !slices.Equal(names, []string{"fd06::5.used", "grants-boot-1", "node", "served"}) {
		t.Errorf("the files are %v", names)
	}
}

// What does not say for sure what the pools are says nothing.
func TestWhatTheAgentSaidOfPoolsIsReadWhollyOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	d := inBoot(dir, "boot-1")
	if s, err := d.Served(); err != nil || s != nil {
		t.Errorf("without a file: %+v, %v", s, err)
	}
	must.Do(t, os.Mkdir(filepath.Join(dir, Name), 0o755))
	for text, corrupt := range map[string]bool{
		"": true, "{": true, `{"v":1,"subnets":["10.6"]}`: true, `{"subnets":7,"v":2}`: false, `{"v":2}`: false,
	} {
		must.Do(t, os.WriteFile(filepath.Join(dir, Name, servedName), []byte(text), 0o600))
		if s, err := d.Served(); err == nil || s != nil || errors.Is(err, ErrCorrupt) != corrupt {
			t.Errorf("%q: %+v, %v", text, s, err)
		}
	}
}
