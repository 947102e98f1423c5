package crash

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/spool"
	"github.com/stayput/stayput/test/must"
)

// counted are scenarios of every way in which a command is counted that does its work.
func counted() []scenario {
	return slices.DeleteFunc(slices.Clone(scenarios), func(s scenario) bool {
		return !slices.Contains([]string{"an ADD of an ordinary pod", "the first ADD of a retained pod", "a restore",
			"a DEL that retains", "a DEL that frees"}, s.name)
	})
}

// Counting comes last: whatever happens to it happens to a command whose work is done and whose answer is out.
func TestACommandIsTheSameWhateverHappensToTheCountOfIt(t *testing.T) {
	for _, s := range counted() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newNode(t))
			victim := s.prepare(w)
			dir := spool.Dir(w.n.state())
			must.Do(t, dir.MakeLatencies())
			w.before(victim)
			w.pass(5 * time.Second)
			template := w.n.save(t)
			file := dir.LatencyFile()

			// What it does to the file, and what is the case without any trouble.
			undisturbed := w.strace(victim, calls, "-P", file)
			points := w.readLog()
			if undisturbed.code != 0 || len(points) < 3 ||
				!slices.ContainsFunc(points, func(p point) bool { return p.name == "write" }) {
				t.Fatalf("it does not count: %d %s %v", undisturbed.code, undisturbed.stderr, points)
			}
			if n := total(t, dir); n != 1 {
				t.Fatalf("%d commands are counted, want 1", n)
			}
			want := fingerprint(uncounted(w.n.save(t)))

			same := func(how string, o outcome, code int) {
				t.Helper()
				if o.stdout != undisturbed.stdout || !o.killed && o.code != code {
					t.Errorf("%s: code %d, %q, want %q", how, o.code, o.stdout, undisturbed.stdout)
				}
				if got := fingerprint(uncounted(w.n.save(t))); got != want {
					t.Errorf("%s: the disk is\n%s\nwant\n%s", how, got, want)
				}
			}
			for _, p := range points {
				for _, errno := range []string{"EIO", "ENOMEM", "EACCES", "EMFILE", "ENOENT"} {
					how := errno + " at " + p.String()
					v := w.clone()
					v.rewind(template)
					o := v.strace(victim, []string{p.name}, "-P", file, "-e",
						fmt.Sprintf("inject=%s:error=%s:when=%d", p.name, errno, p.nth))
					if len(v.injected()) != 1 {
						t.Fatalf("%s was not hit", how)
					}
					same(how, o, 0)
				}
				v := w.clone()
				v.rewind(template)
				o := v.strace(victim, []string{p.name}, "-P", file, "-e",
					fmt.Sprintf("inject=%s:signal=KILL:when=%d", p.name, p.nth))
				if !o.killed {
					t.Fatalf("the kill at %s was not hit", p)
				}
				same("killed at "+p.String(), o, 0)
			}

			run := func(how string, spoil func()) {
				v := w.clone()
				v.rewind(template)
				spoil()
				env, stdin := v.call(victim)
				o, err := v.n.exec(env, stdin, plugin)
				must.Do(t, err)
				must.Do(t, os.RemoveAll(file))
				if o.stdout != undisturbed.stdout || o.code != 0 {
					t.Errorf("%s: code %d, %q, want %q", how, o.code, o.stdout, undisturbed.stdout)
				}
				if got := fingerprint(uncounted(v.n.save(t))); got != want {
					t.Errorf("%s: the disk is\n%s\nwant\n%s", how, got, want)
				}
			}
			run("without the file", func() { must.Do(t, os.Remove(file)) })
			run("with a file without permissions", func() { must.Do(t, os.Chmod(file, 0)) })
			run("with another program's file", func() { must.Do(t, os.WriteFile(file, make([]byte, 1<<20), 0o644)) })
			run("with a directory", func() { must.Do(t, os.Remove(file)); must.Do(t, os.Mkdir(file, 0o755)) })
			run("with a link to nowhere", func() { must.Do(t, os.Remove(file)); must.Do(t, os.Symlink("/dev/zero", file)) })
			run("with a pipe", func() { must.Do(t, os.Remove(file)); must.Do(t, unix.Mkfifo(file, 0o644)) })
		})
	}
}

// uncounted is a disk without the file of latencies.
func uncounted(files []file) []file {
	return slices.DeleteFunc(files, func(f file) bool { return strings.HasPrefix(f.path, "/state/latency") })
}

// total is how many commands are counted.
func total(t *testing.T, dir spool.Dir) int {
	t.Helper()
	all, err := dir.TakeLatencies()
	must.Do(t, err)
	return len(all)
}
