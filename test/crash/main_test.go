// Package crash breaks the real, unmodified plugin at every system call and then goes on as a runtime would.
//
// # How a sweep works
//
// A [scenario] prepares the files of a node with real commands and names one more command, the victim. strace runs the
// victim once to see its file system calls, and then once for every single one of them: in TestKilledAt… the process is
// killed on the entry of that call, in TestFailing… the call answers ENOSPC, EIO, EROFS or EMFILE, that once or from
// then on. (TestOnAFull… limits a real file system instead.) strace counts the calls of each name by themselves, and
// those of the first thread alone, on which cmd/stayput does all its work: so the Nth openat is the same one in every
// run. A kill sweep goes up to the first run that was not killed, and fails unless each N before it was.
//
// What is left on disk is a crash state. The [aftermath] continues from it in all the ways in which a runtime
// may: the DEL comes once, twice, late or never, other pods come first, the node reboots, the next command
// is killed too. A state that two kill points have in common, but for the times in it, is continued from once.
//
// All the while a [world] knows what was acknowledged, which no crash may take back: it checks the answer of
// every command, and the files at the end, against the invariants of package ledger. Of the victim it knows
// nothing: its own promise may have been made or not. At last everything is ended and all retentions run
// out, and whatever still lies there leaked.
//
// A [node] is a mount namespace of the test's thread: a tmpfs for the files, network namespaces to stand for the
// containers', and a boot ID of its own, which makes a reboot a matter of writing a file. All of it goes
// when the thread does, also if the test is killed.
//
// # To add a scenario
//
// Add an element to scenarios. prepare runs commands on the world and returns the victim. owner is the pod that
// the aftermath starts again and that must have its address back if it had been promised one. If the victim
// may rightly change an older promise, end prepare with world.doubt for its identity.
package crash

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/stayput/stayput/test/lab"
)

// plugin is the binary under test.
var plugin string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "test/crash: mounts and network namespaces need root: run it as root")
		return 1
	}
	if _, err := exec.LookPath("strace"); err != nil {
		if err := lab.Need(context.Background(), "strace"); err != nil {
			fmt.Fprintln(os.Stderr, "test/crash:", err)
			return 1
		}
	}
	dir, err := os.MkdirTemp("", "stayput-crash-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/crash:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	plugin = filepath.Join(dir, "stayput")
	build := exec.Command("go", "build", "-o", plugin, "-trimpath", "-ldflags", "-s -w",
		"github.com/stayput/stayput/cmd/stayput")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "test/crash: go build: %v\n%s", err, out)
		return 1
	}
	// A test waits for one process at a time, and one of them for a minute for a lock.
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(runtime.GOMAXPROCS(0)+2)); err != nil {
		fmt.Fprintln(os.Stderr, "test/crash:", err)
		return 1
	}
	return m.Run()
}
