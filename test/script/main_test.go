package script

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// The programs under test.
var stayput, hostLocal string

var (
	plugin   = flag.String("plugin", "", "absolute path of a built plugin to test, instead of this repository's")
	emulator = flag.String("emulator", "", "program that runs it, if it is of another architecture")
)

// insideEnv marks a process that already has its own mount namespace.
const insideEnv = "STAYPUT_STORIES_INSIDE"

// TestMain runs the stories in their own mount namespace: the network namespaces, small disks and boot IDs that they
// mount are invisible to other processes and end with this one.
func TestMain(m *testing.M) {
	var code int
	var err error
	if os.Getenv(insideEnv) == "" {
		code, err = runInside()
	} else {
		code, err = run(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/script:", err)
		code = 1
	}
	os.Exit(code)
}

func runInside() (int, error) {
	if os.Geteuid() != 0 {
		return 0, errors.New("the stories make network and mount namespaces: run them as root")
	}
	runtime.LockOSThread() // Pdeathsig watches the thread
	signal.Ignore(os.Interrupt)
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

func run(m *testing.M) (int, error) {
	bin, err := os.MkdirTemp("", "stayput-stories-bin-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(bin)
	flag.Parse()
	if err := build(context.Background(), bin); err != nil {
		return 0, err
	}
	explicit := false
	flag.Visit(func(f *flag.Flag) { explicit = explicit || f.Name == "test.parallel" })
	if !explicit {
		// Some stories only wait, for a predecessor or a lock.
		if err := flag.Set("test.parallel", "8"); err != nil {
			return 0, err
		}
	}
	return m.Run(), nil
}

// build builds this repository's plugin, unless another one is to be tested, and the stock host-local pinned by
// test/lab/build/cni.
func build(ctx context.Context, bin string) error {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return fmt.Errorf("go env: %w", err)
	}
	root := filepath.Dir(strings.TrimSpace(string(out)))
	stayput, hostLocal = filepath.Join(bin, "stayput"), filepath.Join(bin, "host-local")
	programs := []struct{ dir, pkg string }{{
		filepath.Join(root, "test", "lab", "build", "cni"), "github.com/containernetworking/plugins/plugins/ipam/host-local",
	}}
	if *plugin == "" {
		programs = append(programs, struct{ dir, pkg string }{root, "./cmd/stayput"})
	} else if err := wrap(*plugin, stayput); err != nil {
		return err
	}
	for _, p := range programs {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", bin+"/",
			p.pkg)
		cmd.Dir = p.dir
		cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w\n%s", p.pkg, err, out)
		}
	}
	return nil
}

// wrap makes a program that becomes the given one, run by the emulator if there is one.
func wrap(program, name string) error {
	if *emulator != "" {
		path, err := exec.LookPath(*emulator) // the stories' plugin has no PATH
		if err != nil {
			return err
		}
		program = path + " " + program
	}
	return os.WriteFile(name, []byte("#!/bin/sh\nexec "+program+" \"$@\"\n"), 0o755)
}

// TestStories runs every story once.
func TestStories(t *testing.T) {
	goOnToTheirEnd(t, "testdata")
	testscript.Run(t, testscript.Params{
		Dir:                "testdata/stories",
		Setup:              func(env *testscript.Env) error { return newStory(env) },
		Cmds:               words,
		RequireUniqueNames: true,
	})
}

// TestDamagedRecords runs the stories about damage for every record and every kind of damage.
func TestDamagedRecords(t *testing.T) {
	for _, record := range records {
		for _, how := range damages {
			t.Run(record+"/"+how, func(t *testing.T) {
				t.Parallel()
				testscript.Run(t, testscript.Params{
					Dir: "testdata/damaged",
					Setup: func(env *testscript.Env) error {
						env.Setenv("RECORD", record)
						env.Setenv("HOW", how)
						return newStory(env)
					},
					Cmds: words,
					Condition: func(cond string) (bool, error) {
						list, ok := exceptions[cond]
						if !ok {
							return false, fmt.Errorf("unknown condition %q", cond)
						}
						return !slices.Contains(list, record+"/"+how) && !slices.Contains(list, record), nil
					},
				})
			})
		}
	}
}

// exceptions lists, by condition, the damages for which it does not hold, as RECORD or RECORD/HOW.
var exceptions = map[string][]string{
	// kept: the pod gets the same address. Not if no record identifies it as its own: a running pod's address file names
	// another sandbox.
	"kept":               nil,
	"kept-while-running": {"address/half", "address/last-byte"},
	// their-own: the file of a running pod's address names its sandbox and interface.
	"their-own": {"address/last-byte"},
	// clean: the agent has nothing to clean up.
	"clean":             {"address"},
	"clean-over-reboot": {"address/half", "address/last-byte"},
}

// goOnToTheirEnd rejects testscript commands with which an unfinished story could pass.
func goOnToTheirEnd(t *testing.T, dir string) {
	files, err := filepath.Glob(filepath.Join(dir, "*", "*.txtar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if w := strings.Fields(line + " #")[0]; w == "stop" || w == "skip" || w == "kill" {
				t.Errorf("%s: %q ends a story early: sandboxes end with remove or vanish", f, w)
			}
		}
	}
}
