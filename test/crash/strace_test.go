package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/must"
)

// calls are the system calls that touch files. The Go runtime's own (futex, nanosleep, mmap, …) come and go
// from run to run and leave nothing behind. The question mark allows for architectures without the call.
var calls = []string{
	"?open", "openat", "read", "write", "pwrite64", "ftruncate", "close", "?stat", "?newfstatat", "fstat", "?statfs",
	"getdents64",
	"?chmod", "fchmod", "?fchmodat", "?mkdir", "mkdirat", "?rename", "?renameat", "?renameat2", "?unlink", "unlinkat",
	"?rmdir", "fsync", "fdatasync",
	"?link", "linkat", "?symlink", "symlinkat", "utimensat", "flock",
}

// strace runs the command under strace, with some calls traced; flags say what is done to it. Only the first
// thread is traced. Not with --seccomp-bpf: strace 6.1 then never delivers the signals it injects.
func (w *world) strace(c command, traced []string, flags ...string) outcome {
	w.t.Helper()
	env, stdin := w.call(c)
	argv := append([]string{"strace", "-qq", "-y", "-e", "signal=none", "-e", "trace=" + strings.Join(traced, ","), "-o",
		w.traceLog()}, flags...)
	o, err := w.n.exec(append(env, "PATH="+os.Getenv("PATH")), stdin, append(argv, plugin)...)
	must.Do(w.t, err)
	return o
}

func (w *world) traceLog() string { return filepath.Join(w.n.root, "strace.log") }

// point is one system call of a run: the nth with that name.
type point struct {
	name string
	nth  int
	args string
}

func (p point) String() string { return fmt.Sprintf("%s number %d (%.160s)", p.name, p.nth, p.args) }

var callLine = regexp.MustCompile(`^([a-z0-9_]+)\((.*)$`)

// trace runs the command undisturbed and returns its calls. start is the first one after the configuration was
// read: the ones before it are the Go runtime's.
func (w *world) trace(c command) (points []point, start int, o outcome) {
	w.t.Helper()
	o = w.strace(c, calls)
	points = w.readLog()
	for i, p := range points {
		if p.name == "read" && strings.HasPrefix(p.args, "0<") {
			start = i + 1
		}
	}
	if start == 0 || start == len(points) {
		w.t.Fatalf("the trace of %s shows no work: %v", c, points)
	}
	return points, start, o
}

// readLog is what strace wrote of the last run.
func (w *world) readLog() (points []point) {
	w.t.Helper()
	b, err := os.ReadFile(w.traceLog())
	must.Do(w.t, err)
	count := map[string]int{}
	for line := range strings.Lines(string(b)) {
		if m := callLine.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			count[m[1]]++
			points = append(points, point{m[1], count[m[1]], m[2]})
		}
	}
	return points
}

// injected are the calls of the last run that were made to fail.
func (w *world) injected() []point {
	w.t.Helper()
	return slices.DeleteFunc(w.readLog(), func(p point) bool { return !strings.HasSuffix(p.args, "(INJECTED)") })
}

func names(points []point) []string {
	var out []string
	for _, p := range points {
		if !slices.Contains(out, p.name) {
			out = append(out, p.name)
		}
	}
	return out
}

// complaints collects violations and prints each kind once.
type complaints struct {
	t     testing.TB
	count map[string]int
	first map[string]string
}

func newComplaints(t testing.TB) *complaints {
	return &complaints{t, map[string]int{}, map[string]string{}}
}

var digits = regexp.MustCompile(`[0-9a-f]{32,}|[0-9]+`)

// take takes the violations of a world that went one way.
func (c *complaints) take(w *world, how string) {
	for _, s := range w.bad {
		kind := digits.ReplaceAllString(s, "#")
		if c.count[kind]++; c.count[kind] == 1 {
			c.first[kind] = fmt.Sprintf("%s\n  first seen: %s\n    %s", s, how, strings.Join(w.history, "\n    "))
		}
	}
}

func (c *complaints) print() {
	c.t.Helper()
	for kind, text := range c.first {
		c.t.Errorf("%d times: %s", c.count[kind], text)
	}
}
