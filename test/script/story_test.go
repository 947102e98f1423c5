package script

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
)

// story is a node as a story sees it: its disks, networks, clock and ADDed attachments.
type story struct {
	work, data, state string
	networks          []*network
	attachments       []*attachment // in the order of their first ADD
	last              outcome       // last run of the plugin
	background        map[string]*running
	lock              *os.File
	events            []ledger.Event
	seen              string // by snapshot
	excused           []*regexp.Regexp
	leaking           []*regexp.Regexp

	// The boot: a file to mount over boot_id, empty for the machine's own, and the shift of CLOCK_BOOTTIME.
	bootFile, bootID string
	boottime         time.Duration
}

type network struct {
	name string
	conf map[string]any
}

// attachment is an attachment named by the story: C, C/IF, C@NET or C/IF@NET.
type attachment struct {
	name, container, ifname string
	network                 *network
	pod                     ledger.Pod
	hasPod                  bool // the runtime passes K8S_ args
	annotations             map[string]string
	addrs                   []netip.Addr
	result                  json.RawMessage
	netns                   ledger.Netns
	bound                   bool // ADDed, not DELed, and no reboot since
	owed                    bool // ADDed and not DELed
	by                      string
}

type storyKey struct{}

func storyOf(ts *testscript.TestScript) *story { return ts.Value(storyKey{}).(*story) }

func newStory(env *testscript.Env) error {
	s := &story{work: env.WorkDir, background: map[string]*running{}}
	s.data, s.state = filepath.Join(s.work, "data"), filepath.Join(s.work, "state")
	env.Setenv("STAYPUT", stayput)
	env.Setenv("DATA", s.data)
	env.Setenv("STATE", s.state)
	env.Setenv("NEWLINE", "\n")
	env.Setenv("DIGITS300", strings.Repeat("9", 300))
	env.Setenv("LONG", strings.Repeat("a", 5000))
	env.Values[storyKey{}] = s
	env.Defer(func() { s.end(env.T()) })
	return nil
}

// end is every story's epilogue: background processes are stopped, the invariants hold, and once every sandbox is DELed
// no address is bound.
func (s *story) end(t testscript.T) {
	tb := t.(testing.TB)
	for _, r := range s.background {
		r.cmd.Process.Kill()
		r.cmd.Wait()
	}
	s.unlock()
	defer s.unmountAll(tb)
	if tb.Failed() {
		return
	}
	s.checkInvariants(tb, "at the end of the story")
	for _, a := range s.attachments {
		if a.owed {
			if o := s.del(a, nil); o.code != 0 {
				tb.Errorf("DEL %s at the end of the story: %s", a.name, o)
			}
		}
	}
	s.checkInvariants(tb, "after the DEL of every sandbox")
	for _, b := range s.filesWith(func(b []byte) bool { return !bytes.HasPrefix(b, []byte("{")) }) {
		if !slices.ContainsFunc(s.leaking, func(r *regexp.Regexp) bool { return r.MatchString(b) }) {
			tb.Errorf("this address is still bound after the DEL of every sandbox: %q", b)
		}
	}
}

func (s *story) checkInvariants(tb testing.TB, when string) {
	ledgers, err := s.ledgers()
	if err != nil {
		tb.Errorf("%s: %v", when, err)
	}
	for _, l := range ledgers {
		bad, err := l.Check()
		if err != nil {
			tb.Errorf("%s: %v", when, err)
		}
		for _, b := range bad {
			if !slices.ContainsFunc(s.excused, func(r *regexp.Regexp) bool { return r.MatchString(b.Error()) }) {
				tb.Errorf("%s: network %s: %s", when, l.Network().Name, b)
			}
		}
	}
}

func (s *story) options() ledger.Options { return ledger.Options{StateDir: s.state, Clock: clock{s}} }

// ledgers opens the ledgers of all networks: as recorded by the plugin, otherwise as far as the story knows them.
func (s *story) ledgers() ([]*ledger.Ledger, error) {
	ledgers, err := ledger.Networks(s.options())
	if errors.Is(err, ledger.ErrCorrupt) {
		err = nil
	}
	for _, n := range s.networks {
		if _, err := os.Stat(filepath.Join(s.data, n.name)); err != nil {
			continue
		}
		if !slices.ContainsFunc(ledgers, func(l *ledger.Ledger) bool { return l.Network().Name == n.name }) {
			ledgers = append(ledgers, s.partial(n))
		}
	}
	return ledgers, err
}

func (s *story) partial(n *network) *ledger.Ledger {
	return ledger.Partial(&ledger.Network{Name: n.name, DataDir: s.data}, s.options())
}

// clock is the node's clock, for calls from this process.
type clock struct{ s *story }

func (c clock) Now() (ledger.Instant, error) {
	now, err := ledger.SystemClock{}.Now()
	now.Boot += c.s.boottime
	if c.s.bootID != "" {
		now.BootID = c.s.bootID
	}
	return now, err
}

// The plugin's processes.

type outcome struct {
	stdout, stderr string
	code           int
}

func (o outcome) String() string {
	return fmt.Sprintf("exit status %d\n%s%s", o.code, o.stdout, o.stderr)
}

type running struct {
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer
	att            *attachment // of an ADD
}

// start starts a plugin on the story's node, with its boot ID and CLOCK_BOOTTIME.
func (s *story) start(program string, env []string, stdin []byte) (*running, error) {
	args := []string{program}
	if s.boottime != 0 {
		shift := fmt.Sprintf("%d", int64(s.boottime/time.Second))
		args = append([]string{"unshare", "--fork", "--time", "--boottime", shift}, args...)
	}
	if s.bootFile != "" {
		mount := `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`
		args = append([]string{"unshare", "--mount", "sh", "-c", mount, s.bootFile}, args...)
	}
	r := &running{cmd: exec.Command(args[0], args[1:]...)}
	r.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = bytes.NewReader(stdin), &r.stdout, &r.stderr
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return r, r.cmd.Start()
}

func (r *running) wait() outcome {
	err := r.cmd.Wait()
	o := outcome{r.stdout.String(), r.stderr.String(), r.cmd.ProcessState.ExitCode()}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		o.code, o.stderr = -1, o.stderr+err.Error()
	}
	return o
}

func (s *story) run(program string, env []string, stdin []byte) outcome {
	r, err := s.start(program, env, stdin)
	if err != nil {
		return outcome{code: -1, stderr: err.Error()}
	}
	return r.wait()
}

func programOf(by string) string {
	if by == "host-local" {
		return hostLocal
	}
	return stayput
}

func (a *attachment) env(command, netns string) []string {
	env := []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + a.container, "CNI_IFNAME=" + a.ifname,
		"CNI_NETNS=" + netns, "CNI_PATH=" + filepath.Dir(stayput),
	}
	if a.hasPod {
		env = append(env, "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE="+a.pod.Namespace+";K8S_POD_NAME="+a.pod.Name+
			";K8S_POD_INFRA_CONTAINER_ID="+a.container+";K8S_POD_UID="+a.pod.UID)
	}
	return env
}

// stdin returns the network's configuration as the main plugin passes it on.
func (s *story) stdin(a *attachment, by string, more map[string]any) []byte {
	conf := maps.Clone(a.network.conf)
	conf["name"] = a.network.name
	if conf["cniVersion"] == nil {
		conf["cniVersion"] = "1.1.0"
	}
	if conf["type"] == nil {
		conf["type"] = "bridge"
	}
	ipam := map[string]any{}
	if m, ok := conf["ipam"].(map[string]any); ok {
		ipam = maps.Clone(m)
	}
	ipam["type"], ipam["dataDir"], ipam["stateDir"] = by, s.data, s.state
	if by == "" {
		ipam["type"] = "stayput"
	}
	conf["ipam"] = ipam
	rc := map[string]any{}
	if m, ok := conf["runtimeConfig"].(map[string]any); ok {
		rc = maps.Clone(m)
	}
	if a.annotations != nil {
		rc["io.kubernetes.cri.pod-annotations"] = a.annotations
	}
	conf["runtimeConfig"] = rc
	maps.Copy(conf, more)
	b, err := json.Marshal(conf)
	if err != nil {
		panic(err)
	}
	return b
}

func (s *story) startAdd(a *attachment, more map[string]any) (*running, error) {
	path, err := s.sandbox(a.container)
	if err != nil {
		return nil, err
	}
	a.netns, _, _ = ledger.SystemNetns{}.Identify(path)
	r, err := s.start(programOf(a.by), a.env("ADD", path), s.stdin(a, a.by, more))
	if r != nil {
		r.att = a
	}
	return r, err
}

// added records an ADD's result and checks that no address gets a second owner.
func (s *story) added(a *attachment, o outcome) error {
	if o.code != 0 {
		return fmt.Errorf("ADD %s failed: %s", a.name, o)
	}
	var res struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal([]byte(o.stdout), &res); err != nil {
		return fmt.Errorf("ADD %s: the result does not parse: %v: %s", a.name, err, o)
	}
	a.addrs = nil
	for _, ip := range res.IPs {
		a.addrs = append(a.addrs, ip.Address.Addr())
	}
	if len(a.addrs) == 0 {
		return fmt.Errorf("ADD %s: no address: %s", a.name, o)
	}
	for _, other := range s.attachments {
		if other == a || !other.bound || other.network != a.network {
			continue
		}
		for _, x := range a.addrs {
			samePod := other.pod.Name != "" && other.pod.Name == a.pod.Name && other.pod.Namespace == a.pod.Namespace
			if slices.Contains(other.addrs, x) && (other.alive() || !samePod) {
				return fmt.Errorf("ADD %s: %s belongs to %s", a.name, x, other.name)
			}
		}
	}
	a.result, a.bound, a.owed = json.RawMessage(o.stdout), true, true
	return nil
}

// del is the runtime's DEL, with the sandbox's namespace while it exists.
func (s *story) del(a *attachment, more map[string]any) outcome {
	netns := s.netns(a.container)
	if !s.alive(a.container) {
		netns = ""
	}
	if more == nil && a.result != nil {
		more = map[string]any{"prevResult": a.result}
	}
	o := s.run(programOf(a.by), a.env("DEL", netns), s.stdin(a, a.by, more))
	if o.code == 0 {
		a.bound, a.owed = false, false
	}
	return o
}

// Sandboxes, one network namespace each.

func (s *story) netns(container string) string { return filepath.Join(s.work, "netns", container) }

func (s *story) alive(container string) bool {
	_, ok, _ := ledger.SystemNetns{}.Identify(s.netns(container))
	return ok
}

// alive reports whether the attachment's own namespace exists, not another one under its path.
func (a *attachment) alive() bool {
	now, ok, _ := ledger.SystemNetns{}.Identify(a.netns.Path)
	return ok && now == a.netns
}

func (s *story) sandbox(container string) (string, error) {
	path := s.netns(container)
	if s.alive(container) {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return "", err
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends, the namespace stays on its mount
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	return path, <-done
}

// shareSandbox gives a container a namespace shared with others: making many is slow, and one is enough for stories
// about other things.
func (s *story) shareSandbox(container string) error {
	of, err := s.sandbox("shared")
	if err != nil || s.alive(container) {
		return err
	}
	path := s.netns(container)
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return err
	}
	return unix.Mount(of, path, "", unix.MS_BIND, "")
}

func (s *story) removeSandbox(container string) error {
	path := s.netns(container)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.ENOENT && err != unix.EINVAL {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (s *story) unmountAll(tb testing.TB) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		tb.Error(err)
	}
	var paths []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], s.work+"/") {
			paths = append(paths, f[4])
		}
	}
	slices.Reverse(paths)
	for _, p := range paths {
		if err := unix.Unmount(p, unix.MNT_DETACH); err != nil {
			tb.Errorf("unmounting %s: %v", p, err)
		}
	}
}

// reboot ends every sandbox and begins another boot, with CLOCK_BOOTTIME near zero.
func (s *story) reboot() error {
	for _, a := range s.attachments {
		a.bound = false
		if err := s.removeSandbox(a.container); err != nil {
			return err
		}
	}
	var id [16]byte
	rand.Read(id[:])
	h := hex.EncodeToString(id[:])
	s.bootID = h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
	s.bootFile = filepath.Join(s.work, "boot_id")
	if err := os.WriteFile(s.bootFile, []byte(s.bootID+"\n"), 0o444); err != nil {
		return err
	}
	now, err := ledger.SystemClock{}.Now()
	s.boottime = (time.Minute - now.Boot).Truncate(time.Second)
	return err
}

// The lock, as held by another process.

func (s *story) lockPath(n *network) string { return filepath.Join(s.data, n.name, "lock") }

func (s *story) takeLock(n *network) error {
	if err := os.MkdirAll(filepath.Dir(s.lockPath(n)), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(s.lockPath(n), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	s.lock = f
	return unix.Flock(int(f.Fd()), unix.LOCK_EX)
}

func (s *story) unlock() {
	if s.lock != nil {
		s.lock.Close()
		s.lock = nil
	}
}

// blocked waits until n processes are blocked on the lock.
func (s *story) blocked(ctx context.Context, n int) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(s.lock.Fd()), &st); err != nil {
		return err
	}
	inode := fmt.Sprintf(":%d", st.Ino)
	for {
		b, err := os.ReadFile("/proc/locks")
		if err != nil {
			return err
		}
		waiting := 0
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 6 && f[1] == "->" && strings.HasSuffix(f[6], inode) {
				waiting++
			}
		}
		if waiting >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d processes are blocked on the lock, expected %d", waiting, n)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// The files on disk, read by the documented format, independently of the ledger.

func hashOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:])
}

func (s *story) stateOf(n *network) string {
	return filepath.Join(s.state, n.name+"-"+hashOf(s.data)[:8])
}

func (s *story) addressFile(n *network, addr string) string {
	return filepath.Join(s.data, n.name, addr)
}

// filesWith returns the address files of all networks whose content satisfies f.
func (s *story) filesWith(f func([]byte) bool) []string {
	var out []string
	paths, _ := filepath.Glob(filepath.Join(s.data, "*", "*"))
	for _, p := range paths {
		if _, err := netip.ParseAddr(filepath.Base(p)); err != nil {
			continue
		}
		if b, err := os.ReadFile(p); err == nil && f(b) {
			out = append(out, filepath.Base(p)+": "+string(b))
		}
	}
	return out
}

// listing returns everything below the data and state directories: names, permissions and contents.
func (s *story) listing() (string, error) {
	var b strings.Builder
	for _, root := range []string{s.data, s.state} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			rel, _ := filepath.Rel(s.work, path)
			fmt.Fprintf(&b, "%s %s", info.Mode(), rel)
			if info.Mode().IsRegular() {
				content, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				fmt.Fprintf(&b, " %q", content)
			}
			b.WriteByte('\n')
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

// The records, and how they can be damaged.

var (
	records = []string{"address", "claim", "index", "marker", "last", "network", "counts"}
	damages = []string{"empty", "half", "last-byte", "zeros", "binary", "text", "brace", "version"}
)

func (s *story) recordPath(record string, a *attachment) (string, error) {
	switch record {
	case "address":
		return s.addressFile(a.network, a.addrs[0].String()), nil
	case "claim":
		identity := "pod:" + a.pod.Namespace + "/" + a.pod.Name
		if set := a.annotations[retention.AnnotationIdentity]; set != "" {
			identity = "set:" + a.pod.Namespace + "/" + set
		}
		return filepath.Join(s.stateOf(a.network), "claims", hashOf(a.network.name, identity, a.pod.Name, a.ifname)), nil
	case "index":
		return filepath.Join(s.stateOf(a.network), "index", hashOf(a.container, a.ifname)), nil
	case "counts":
		return filepath.Join(s.stateOf(a.network), "counts"), nil
	case "marker":
		return filepath.Join(s.data, a.network.name, ".stayput.boot"), nil
	case "last":
		return filepath.Join(s.data, a.network.name, "last_reserved_ip.0"), nil
	case "network":
		return filepath.Join(s.stateOf(a.network), "network"), nil
	}
	return "", fmt.Errorf("unknown record %q: expected one of %q", record, records)
}

func damage(path, how string) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // a missing record can still turn up damaged
	}
	if err != nil {
		return err
	}
	switch how {
	case "empty":
		b = nil
	case "half":
		b = b[:len(b)/2]
	case "last-byte":
		b = b[:max(0, len(bytes.TrimRight(b, " \n"))-1)]
	case "zeros":
		b = make([]byte, max(1, len(b)))
	case "binary":
		b = []byte("\xff\xfe\x00\x01\r\n\x80garbage\x00")
	case "text":
		b = []byte("what is this")
	case "brace":
		b = []byte("{}\n")
	case "version":
		b = bytes.Replace(bytes.Replace(b, []byte(`"v":1`), []byte(`"v":0`), 1), []byte("v1 "), []byte("v0 "), 1)
	case "newer": // not a damage
		b = bytes.Replace(bytes.Replace(b, []byte(`"v":1`), []byte(`"v":2`), 1), []byte("v1 "), []byte("v2 "), 1)
		if filepath.Base(path) == ".stayput.boot" {
			b = append([]byte("v2 "), b...)
		}
	case "older": // the newer version is back
		b = bytes.Replace(bytes.Replace(b, []byte(`"v":2`), []byte(`"v":1`), 1), []byte("v2 "), []byte("v1 "), 1)
		if filepath.Base(path) == ".stayput.boot" {
			b = bytes.TrimPrefix(b, []byte("v1 "))
		}
	default:
		return fmt.Errorf("unknown damage %q: expected one of %q", how, damages)
	}
	info, err := os.Stat(path)
	perm := fs.FileMode(0o644)
	if err == nil {
		perm = info.Mode().Perm()
	}
	return os.WriteFile(path, b, perm)
}
