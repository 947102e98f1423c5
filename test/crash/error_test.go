package crash

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/must"
)

// faults are the errors of a disk or a busy machine. Every call of a sweep gets one that it can return.
var faults = []struct {
	errno string
	calls []string // nil: all of them
}{
	{"EIO", nil},
	{"ENOSPC", []string{"open", "openat", "write", "pwrite64", "mkdir", "mkdirat", "rename", "renameat", "renameat2",
		"fsync", "close"}},
	{"EROFS", []string{"open", "openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat",
		"rmdir", "chmod", "fchmod", "fchmodat", "utimensat"}},
	{"EMFILE", []string{"open", "openat"}},
}

// faultsOf returns the errors that a call can return.
func faultsOf(call string) (errnos []string) {
	for _, f := range faults {
		if f.calls == nil || slices.Contains(f.calls, call) {
			errnos = append(errnos, f.errno)
		}
	}
	return errnos
}

func TestFailingAtAnySystemCallCommandsFailCleanlyAndBreakNoPromise(t *testing.T) {
	for number, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w, victim, template := s.begin(t)
			found := newComplaints(t)
			defer found.print()
			points, start, o := w.trace(victim)
			if o.code != 0 {
				t.Fatalf("%s fails undisturbed: %s", victim, o.stdout)
			}
			e := &explorer{scenario: s, victim: victim, found: found, seen: map[string]bool{}, brief: true}
			fail := func(how string, traced []string, flags ...string) {
				v := w.clone()
				v.rewind(template)
				o := v.strace(victim, traced, flags...)
				hit := v.injected()
				if len(hit) == 0 {
					t.Fatalf("%s was not hit", how)
				}
				v.failed(victim, o, hit)
				if len(hit) == 1 && victim.verb == "ADD" && o.code != 0 {
					v.undone(victim)
				}
				e.from(v, how)
			}
			runs := 0
			for i, p := range points[start:] {
				if p.standardStream() {
					continue // a pipe to the runtime, which knows none of these errors
				}
				errnos := faultsOf(p.name)
				once := errnos[(i+number)%len(errnos)]
				fail(once+" once at "+p.String(), []string{p.name}, "-e",
					fmt.Sprintf("inject=%s:error=%s:when=%d", p.name, once, p.nth))
				runs++

				if len(errnos) == 1 {
					continue // it only reads, and what lasts meets the next one as well
				}
				lasting := errnos[(i/2+number)%len(errnos)]
				var traced, flags []string
				for _, name := range names(points) {
					// Not write, which would keep the answer from the runtime as well: the disks of the next test do that.
					if name != "write" && slices.Contains(faultsOf(name), lasting) {
						next := 1
						for _, q := range points[:start+i] {
							if q.name == name {
								next = q.nth + 1
							}
						}
						traced = append(traced, name)
						flags = append(flags, "-e", fmt.Sprintf("inject=%s:error=%s:when=%d+", name, lasting, next))
					}
				}
				fail(lasting+" from "+p.String()+" on", traced, flags...)
				runs++
			}
			t.Logf("%d faults, %d different states", runs, len(e.seen))
		})
	}
}

func (p point) standardStream() bool {
	return strings.HasPrefix(p.args, "0<") || strings.HasPrefix(p.args, "1<") || strings.HasPrefix(p.args, "2<")
}

// failed records how a command with failed calls ended.
func (w *world) failed(c command, o outcome, hit []point) {
	w.after(c, o)
	if c.verb == "DEL" {
		w.dropNetns(c.ctr)
		return
	}
	if o.code == 0 {
		for _, p := range hit {
			if c.verb == "ADD" && p.name == "fsync" && strings.Contains(p.args, "/claims") {
				w.violates("I4: ADD is acknowledged although %s failed", p)
			}
		}
		return
	}
	var e struct{ Code int }
	if err := json.Unmarshal([]byte(o.stdout), &e); err != nil {
		w.violates("%s exits %d and answers no CNI error: %q", c.verb, o.code, o.stdout)
	} else if e.Code != 11 {
		w.violates("%s fails with code %d, want 11, try again later: %s", c.verb, e.Code, o.stdout)
	}
}

// undone demands that a failed ADD has left nothing bound, if the disk let it clean up.
func (w *world) undone(c command) {
	w.t.Helper()
	for _, f := range w.n.save(w.t) {
		if strings.HasPrefix(f.path, "/networks/net/") && strings.HasPrefix(f.data, c.ctr+"\r\n") && !temporary(f) {
			w.violates("%s still says %q after the ADD failed", f.path, f.data)
		}
	}
}

func TestOnAFullOrReadOnlyDiskCommandsFailCleanlyAndBreakNoPromise(t *testing.T) {
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w, victim, template := s.begin(t)
			found := newComplaints(t)
			defer found.print()
			e := &explorer{scenario: s, victim: victim, found: found, seen: map[string]bool{}, brief: true}
			// try runs the victim on a disk with a limit, and reports whether it did its work.
			try := func(how string, flags uintptr, limit func(used unix.Statfs_t) string) bool {
				must.Do(t, unix.Mount("tmpfs", w.n.disk, "tmpfs", 0, "size=1g,nr_inodes=1m"))
				defer func() { must.Do(t, unix.Unmount(w.n.disk, unix.MNT_DETACH)) }()
				v := w.clone()
				v.rewind(template)
				var used unix.Statfs_t
				must.Do(t, unix.Statfs(v.n.disk, &used))
				v.n.remount(t, flags, limit(used))
				env, stdin := v.call(victim)
				o, err := v.n.exec(env, stdin, plugin)
				must.Do(t, err)
				v.n.remount(t, 0, "size=1g,nr_inodes=1m")
				v.failed(victim, o, nil)
				e.from(v, how)
				return o.code == 0 && !strings.Contains(o.stderr, "stay as they are")
			}
			try("on a read-only disk", unix.MS_RDONLY, func(unix.Statfs_t) string { return "" })
			for free := uint64(0); !try(fmt.Sprintf("with %d inodes left", free), 0, func(used unix.Statfs_t) string {
				return fmt.Sprintf("nr_inodes=%d", used.Files-used.Ffree+free)
			}); free++ {
			}
			for free := uint64(0); !try(fmt.Sprintf("with %d pages left", free), 0, func(used unix.Statfs_t) string {
				return fmt.Sprintf("size=%d", max(1, used.Blocks-used.Bfree+free)*uint64(used.Bsize)) // 0 is no limit
			}); free++ {
			}
			t.Logf("%d different states", len(e.seen))
		})
	}
}

// remount changes the limits of the disk. A process of another test that is just being started may still have our
// open files: then the kernel says busy.
func (n *node) remount(t *testing.T, flags uintptr, limit string) {
	t.Helper()
	for {
		err := unix.Mount("", n.disk, "", unix.MS_REMOUNT|flags, limit)
		if err != unix.EBUSY {
			must.Do(t, err)
			return
		}
	}
}
