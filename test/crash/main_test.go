// Package crash breaks the real, unmodified plugin at every system call and then goes on as a runtime would.
//
// # How a sweep works
//
// A [scenario] prepares the files of a node with real commands and names one more command, the victim. strace runs the
// victim once to see its file system calls, and then once for each of them: in TestKilledAt… it kills the process on
// entry to that call; in TestFailing… the call returns ENOSPC, EIO, EROFS or EMFILE, once or from then on.
// (TestOnAFull… limits a real file system instead.) strace counts calls by name, on the first thread alone, which does
// all the work of cmd/stayput: so the Nth openat is the same in every run. A kill sweep ends with the first run that is
// not killed, and fails unless every run before it was.
//
// What is left on disk is a crash state. Each [aftermath] continues from it as a runtime might: the DEL comes once,
// twice, late or never, other pods come first, the node reboots, or the next command is killed, too. States that differ
// only in times are explored once.
//
// A [world] knows everything that was acknowledged, which no crash may take back. It checks every command's answer, and
// finally the files, against the invariants of package ledger. The victim's own promise may have been made or not. At
// the end, everything is deleted and all retentions expire; what is left has leaked.
//
// A [node] is a mount namespace of the test's thread: a tmpfs for the files, network namespaces that stand for those of
// containers, and a boot ID of its own, so that writing a file is a reboot. All of it ends with the thread, even if the
// test is killed.
//
// # To add a scenario
//
// Add an element to scenarios. prepare runs commands on the world and returns the victim. owner is the pod that the
// aftermath starts again; it must get its address back if that was promised. If the victim may rightly change an older
// promise, end prepare with world.doubt for its identity.
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
	// A test waits for one process at a time, and one test waits a minute for a lock.
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(runtime.GOMAXPROCS(0)+2)); err != nil {
		fmt.Fprintln(os.Stderr, "test/crash:", err)
		return 1
	}
	return m.Run()
}
