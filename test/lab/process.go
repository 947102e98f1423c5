package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// nodeNamespaces are all namespaces of a node.
const nodeNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC

// nodeEnv is the environment of a node's processes; containerd finds its shim and runc by PATH.
var nodeEnv = []string{
	"PATH=/opt/lab/containerd:/opt/lab/runc:/opt/lab/kubernetes:/opt/lab/etcd:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"HOME=/root",
}

// Process is a command that runs in a node.
type Process struct {
	// Pid is the pid as seen by this process, not by the node.
	Pid int
	// Log is the file with its standard output and error.
	Log string

	cmd  *exec.Cmd
	done chan struct{}
	err  error // from Wait; set before done is closed
}

// Start runs a command in the node and appends its output to the named log. env extends the node's environment. argv[0]
// is an absolute path of the node.
func (n *Node) Start(log string, env []string, argv ...string) (*Process, error) {
	file := n.LogFile(log)
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close() // the process has its own
	cmd := n.command(context.Background(), env, argv)
	cmd.Stdout, cmd.Stderr = f, f
	if err := n.enter(cmd.Start); err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	p := &Process{Pid: cmd.Process.Pid, Log: file, cmd: cmd, done: make(chan struct{})}
	go func() {
		// Reaped even if the caller never waits: a node does not end while one of its processes is a zombie.
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Run runs a command in the node and returns its standard output; errors include its standard error. argv[0] is an
// absolute path of the node.
func (n *Node) Run(ctx context.Context, argv ...string) ([]byte, error) {
	return n.RunInput(ctx, nil, nil, argv...)
}

// RunInput is Run with additional environment variables and standard input.
func (n *Node) RunInput(ctx context.Context, env []string, stdin []byte, argv ...string) ([]byte, error) {
	cmd := n.command(ctx, env, argv)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	err := n.enter(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s in the node: %w: %s", argv[0], err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), err
}

func (n *Node) command(ctx context.Context, env, argv []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(append([]string{}, nodeEnv...), env...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // as for pid 1
	// An orphan may hold the pipes of a killed command.
	cmd.WaitDelay = time.Second
	return cmd
}

// enter runs f, which starts a command, in all of the node's namespaces.
func (n *Node) enter(f func() error) error {
	pid := n.Pid()
	if pid == 0 {
		return errors.New("the node is off")
	}
	return inside(pid, nodeNamespaces, f)
}

// Signal sends a signal to the process.
func (p *Process) Signal(sig os.Signal) error { return p.cmd.Process.Signal(sig) }

// Kill ends the process with SIGKILL and waits until it has exited.
func (p *Process) Kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.done
	return nil
}

// Wait waits until the process has exited and returns what [exec.Cmd.Wait] does.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Done is closed when the process has exited.
func (p *Process) Done() <-chan struct{} { return p.done }

// LogFile returns the path of the named log; containerd's is "containerd".
func (n *Node) LogFile(name string) string { return filepath.Join(n.dir, "log", name+".log") }

// WriteLogs writes all logs of the node for a failed test, except containerd's messages about starting up.
func (n *Node) WriteLogs(w io.Writer) {
	logs, _ := filepath.Glob(n.LogFile("*"))
	for _, log := range logs {
		data, err := os.ReadFile(log)
		if err != nil {
			continue
		}
		fmt.Fprintf(w, "--- %s %s\n", n.options.Name, filepath.Base(log))
		for line := range strings.Lines(string(data)) {
			if !strings.Contains(line, "loading plugin") && !strings.Contains(line, "starting cri plugin") {
				fmt.Fprint(w, line)
			}
		}
	}
}
