package crash

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/must"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random tests; 0 takes a new one")

// chaos is a world that many goroutines share: a crowd of runtimes on one node.
type chaos struct {
	sync.Mutex // over the world, but not while a process runs
	*world
	commands int
}

// process runs a command in a process of its own, and calls disturb meanwhile.
func (c *chaos) process(cmd command, disturb func(*os.Process)) (outcome, error) {
	c.Lock()
	c.before(cmd)
	c.commands++
	env, stdin := c.call(cmd)
	c.Unlock()
	p := exec.Command(plugin)
	p.Env, p.Stdin = env, bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	p.Stdout, p.Stderr = &stdout, &stderr
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		return outcome{}, err
	}
	disturb(p.Process)
	p.Wait()
	status, _ := p.ProcessState.Sys().(syscall.WaitStatus)
	o := outcome{stdout: stdout.String(), stderr: stderr.String(), code: p.ProcessState.ExitCode(),
		killed: status.Signaled()}
	c.Lock()
	defer c.Unlock()
	c.note("%s ends", cmd)
	c.after(cmd, o)
	return o, nil
}

// life starts and ends one pod repeatedly, while its processes may die at any moment.
func (c *chaos) life(p pod, rounds int, rnd *rand.Rand) error {
	disturb := func(proc *os.Process) {
		switch rnd.IntN(4) {
		case 0, 1:
			time.Sleep(time.Duration(rnd.Int64N(int64(6 * time.Millisecond))))
			proc.Kill()
		case 2:
			time.Sleep(time.Duration(rnd.Int64N(int64(4 * time.Millisecond))))
			proc.Signal(unix.SIGSTOP)
			time.Sleep(time.Duration(rnd.Int64N(int64(8 * time.Millisecond))))
			proc.Signal(unix.SIGCONT)
		}
	}
	for range rounds {
		c.Lock()
		ctr := c.fresh(p)
		promised := len(c.due(p.identity())) > 0
		c.Unlock()
		o, err := c.process(command{verb: "ADD", ctr: ctr, pod: p}, disturb)
		if err != nil {
			return err
		}
		if !o.killed && o.code != 0 && (promised || !isFull(o)) {
			c.Lock()
			c.violates("ADD of %s (promised: %v) fails: %s", p.name, promised, o.stdout)
			c.Unlock()
		}
		if o.code == 0 {
			time.Sleep(time.Duration(rnd.Int64N(int64(3 * time.Millisecond))))
		}
		// Its address may go to another pod as soon as a DEL is under way, even one that is killed.
		c.Lock()
		c.containers[ctr].ended = true
		c.Unlock()
		withNetns := rnd.IntN(2) == 0
		if !withNetns {
			c.dropNetns(ctr)
		}
		if promised && rnd.IntN(4) == 0 {
			c.dropNetns(ctr) // no DEL ever: the next ADD takes over from the dead
			continue
		}
		for dels := 1 + rnd.IntN(2); dels > 0; {
			o, err := c.process(command{verb: "DEL", ctr: ctr, pod: p, netns: withNetns}, disturb)
			if err != nil {
				return err
			}
			if !o.killed {
				dels--
			}
		}
		c.dropNetns(ctr)
	}
	return nil
}

func TestProcessesKilledAndStoppedAtRandomUnderLoadBreakNoPromise(t *testing.T) {
	t.Parallel()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed=%d", seed)
	c := &chaos{world: newWorld(t, newNode(t))}
	// Far more pods than the five addresses suffice for.
	pods := []pod{web, db, retained("web-1"), {}}
	for i := range 36 {
		pods = append(pods, ordinary(fmt.Sprintf("app-%d", i)))
	}
	errs := make(chan error, len(pods))
	for i, p := range pods {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		go func() {
			err := c.n.enter()
			if err == nil {
				err = c.life(p, 15, rnd)
			}
			errs <- err
		}()
	}
	for range pods {
		must.Do(t, <-errs)
	}
	if len(c.bad) == 0 {
		for _, p := range pods {
			if len(c.due(p.identity())) > 0 {
				c.comeBack(p)
			}
		}
		c.audit()
		c.settle()
	}
	t.Logf("%d commands", c.commands)
	if len(c.bad) > 0 {
		t.Errorf("%s\n%s", strings.Join(c.bad, "\n"), strings.Join(c.history, "\n"))
	}
}

// waiters counts the processes that wait for the network's lock.
func (n *node) waiters(t *testing.T) int {
	t.Helper()
	var st unix.Stat_t
	must.Do(t, unix.Stat(n.addressFile("lock"), &st))
	b, err := os.ReadFile("/proc/locks")
	must.Do(t, err)
	count := 0
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "-> FLOCK") && strings.Contains(line, fmt.Sprintf(":%d ", st.Ino)) {
			count++
		}
	}
	return count
}

func TestAStoppedLockHolderIsWaitedForAndItsDeathFreesTheLock(t *testing.T) {
	for _, end := range []unix.Signal{unix.SIGCONT, unix.SIGKILL} {
		t.Run(unix.SignalName(end), func(t *testing.T) {
			t.Parallel()
			c := &chaos{world: newWorld(t, newNode(t))}
			bystander(c.world)
			c.del(c.add(web))

			// Stopped in the middle of a restore, whose only fsync is under the lock.
			victim := addOf(web)
			c.before(victim)
			env, stdin := c.call(victim)
			holder := exec.Command("strace", "-qq", "-o", c.traceLog(), "-e", "trace=fsync", "-e",
				"inject=fsync:signal=STOP:when=1", plugin)
			holder.Env, holder.Stdin = append(env, "PATH="+os.Getenv("PATH")), bytes.NewReader(stdin)
			holder.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			var stdout bytes.Buffer
			holder.Stdout = &stdout
			must.Do(t, holder.Start())
			pid := stoppedChild(t, c.traceLog(), holder.Process.Pid)

			crowd := []pod{ordinary("app-1"), ordinary("app-2"), {}, db}
			errs := make(chan error, len(crowd))
			for i, p := range crowd {
				cmd := command{verb: "ADD", ctr: fmt.Sprintf("crowd-%d", i), pod: p}
				go func() {
					err := c.n.enter()
					if err == nil {
						_, err = c.process(cmd, func(*os.Process) {})
					}
					errs <- err
				}()
			}
			for c.n.waiters(t) < len(crowd) {
				if err := t.Context().Err(); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Millisecond)
			}
			must.Do(t, unix.Kill(pid, end))
			holder.Wait()
			o := outcome{stdout: stdout.String(), code: holder.ProcessState.ExitCode(), killed: end == unix.SIGKILL}
			c.Lock()
			c.after(victim, o)
			c.Unlock()
			if end == unix.SIGCONT && o.code != 0 {
				t.Errorf("ADD fails with code %d after it was stopped: %s", o.code, o.stdout)
			}
			answered := 0
			for range crowd {
				must.Do(t, <-errs)
			}
			for i := range crowd {
				if c.alive(fmt.Sprintf("crowd-%d", i)) {
					answered++
				}
			}
			if answered != len(crowd) {
				t.Errorf("%d of %d waiting ADDs succeed", answered, len(crowd))
			}
			if end == unix.SIGKILL {
				c.del(victim.ctr)
				c.comeBack(web)
			}
			c.audit()
			c.settle()
			if len(c.bad) > 0 {
				t.Errorf("%s\n%s", strings.Join(c.bad, "\n"), strings.Join(c.history, "\n"))
			}
		})
	}
}

// stoppedChild waits until strace has seen its child stop, and returns the child.
func stoppedChild(t *testing.T, log string, strace int) int {
	t.Helper()
	for t.Context().Err() == nil {
		b, err := os.ReadFile(log)
		if err == nil && strings.Contains(string(b), "--- stopped by SIGSTOP ---") {
			children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", strace, strace))
			must.Do(t, err)
			var child int
			_, err = fmt.Sscan(string(children), &child)
			must.Do(t, err)
			return child
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the lock holder was never stopped")
	return 0
}

func TestALockThatIsNeverGivenBackFailsADDToBeTriedAgainAndLeavesDELSuccessful(t *testing.T) {
	t.Parallel()
	c := &chaos{world: newWorld(t, newNode(t))}
	bystander(c.world)
	ctr := c.add(web)
	add := addOf(ordinary("app"))
	c.before(add)
	before := fingerprint(c.n.save(t))

	fd, err := unix.Open(c.n.addressFile("lock"), unix.O_RDWR|unix.O_CLOEXEC, 0)
	must.Do(t, err)
	defer unix.Close(fd)
	must.Do(t, unix.Flock(fd, unix.LOCK_EX))
	results := map[string]outcome{}
	var wg sync.WaitGroup
	for _, cmd := range []command{add, delOf(c.world, ctr)} {
		env, stdin := c.call(cmd)
		wg.Go(func() {
			err := c.n.enter()
			var o outcome
			if err == nil {
				o, err = c.n.exec(env, stdin, plugin)
			}
			c.Lock()
			defer c.Unlock()
			if results[cmd.verb] = o; err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait() // the plugin gives up after 60 s
	if o := results["ADD"]; o.code == 0 || !strings.Contains(o.stdout, `"code":11`) {
		t.Errorf("ADD exits with %d and answers %q, want an error with code 11", o.code, o.stdout)
	}
	if o := results["DEL"]; o.code != 0 || o.stdout != "" {
		t.Errorf("DEL exits with %d and answers %q, want success", o.code, o.stdout)
	}
	if after := fingerprint(c.n.save(t)); after != before {
		t.Errorf("without the lock the disk changed from\n%s\nto\n%s", before, after)
	}
}
