package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/bench/internal/table"
)

// child is a process ready to start: its pipes exist and its input is written.
type child struct {
	argv, env []string
	stdin     *os.File
	out       *os.File // read its output here
	outW      *os.File
	pid       int
}

func newChild(argv, env []string, input []byte) (*child, error) {
	stdin, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	// Less than a pipe holds: writing does not block without a reader.
	_, err = in.Write(input)
	in.Close()
	if err != nil {
		stdin.Close()
		return nil, err
	}
	out, outW, err := os.Pipe()
	if err != nil {
		stdin.Close()
		return nil, err
	}
	return &child{argv: argv, env: env, stdin: stdin, out: out, outW: outW}, nil
}

// start is vfork and exec: ForkExec clones with CLONE_VFORK|CLONE_VM.
func (c *child) start() (err error) {
	c.pid, err = syscall.ForkExec(c.argv[0], c.argv, &syscall.ProcAttr{
		Dir: "/", Env: c.env, Files: []uintptr{c.stdin.Fd(), c.outW.Fd(), c.outW.Fd()},
	})
	return err
}

func (c *child) wait() error {
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(c.pid, &status, 0, nil); err != syscall.EINTR {
			if err != nil {
				return err
			}
			break
		}
	}
	if status.ExitStatus() != 0 {
		c.outW.Close()
		said, _ := io.ReadAll(c.out)
		return fmt.Errorf("%s exited with %d: %s", c.argv[0], status.ExitStatus(), strings.TrimSpace(string(said)))
	}
	return nil
}

func (c *child) close() {
	for _, f := range []*os.File{c.stdin, c.out, c.outW} {
		f.Close() // a pipe; closed twice after an error
	}
}

// timed runs a program and returns its running time.
func timed(argv, env []string, input []byte) (time.Duration, error) {
	c, err := newChild(argv, env, input)
	if err != nil {
		return 0, err
	}
	defer c.close()
	begin := time.Now()
	if err := c.start(); err != nil {
		return 0, err
	}
	err = c.wait()
	return time.Since(begin), err
}

func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return (d[(len(d)-1)/2] + d[len(d)/2]) / 2
}

func ratio(a, b []time.Duration) float64 { return float64(median(a)) / float64(median(b)) }

// spread returns half the ratio's 95 % interval, by bootstrap.
func spread(a, b []time.Duration) float64 {
	sample := func(d []time.Duration) []time.Duration {
		s := make([]time.Duration, len(d))
		for i := range s {
			s[i] = d[rand.IntN(len(d))]
		}
		return s
	}
	const samples = 1000
	ratios := make([]float64, samples)
	for i := range ratios {
		ratios[i] = ratio(sample(a), sample(b))
	}
	slices.Sort(ratios)
	return (ratios[samples*975/1000] - ratios[samples*25/1000]) / 2
}

// compared returns the ratio of two contestants' medians.
func compared(a, b []time.Duration) table.Figure {
	return table.Figure{Value: ratio(a, b), Spread: spread(a, b), N: len(a)}
}

// ms formats a duration in milliseconds.
func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", d.Seconds()*1e3) }
