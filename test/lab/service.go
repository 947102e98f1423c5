package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
)

// Service is a program of a cluster's machine that can be stopped and restarted, such as kubelet. Its methods may be
// called concurrently.
type Service struct {
	node  *Node
	name  string // and its log's
	env   []string
	argv  []string
	ready func(context.Context) error // one try, nil if ready once it runs
	// keep restarts it when it exits by itself, as kubelet does with a static pod: the scheduler exits on a state that it
	// cannot believe, such as a pod replaced while the API server was away (cache.UpdatePod), and Felix, with 129, if its
	// configuration changes.
	keep bool

	mu sync.Mutex
	p  *Process
}

// stopPatience is how long a service may take to exit. kube-apiserver would wait for its clients.
const stopPatience = 500 * time.Millisecond

// Start starts the service and waits until it is ready. Starting a running service is an error.
func (s *Service) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil && !ended(s.p) {
		return fmt.Errorf("%s is already running", s.name)
	}
	p, err := s.launch()
	if err != nil {
		return err
	}
	if s.ready == nil {
		return nil
	}
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-p.Done():
			if !s.keep {
				return fmt.Errorf("%s ended: %w, see %s", s.name, p.Wait(), p.Log)
			}
			time.Sleep(keepAfter)
			if p, err = s.launch(); err != nil {
				return err
			}
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %w, see %s", s.name, ctx.Err(), err, p.Log)
		}
	}
}

// launch starts the program; the lock is held.
func (s *Service) launch() (*Process, error) {
	p, err := s.node.Start(s.name, s.env, s.argv...)
	if err != nil {
		return nil, err
	}
	s.p = p
	if s.keep {
		go s.keepUp(p)
	}
	return p, nil
}

// keepAfter is how long a service with keep stays down.
const keepAfter = time.Second

// keepUp restarts the service once p has exited, unless it was stopped.
func (s *Service) keepUp(p *Process) {
	<-p.Done()
	time.Sleep(keepAfter)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == p {
		_, _ = s.launch() // an error: the machine is off
	}
}

// Stop stops the service with SIGTERM, then with SIGKILL after half a second.
func (s *Service) Stop() error { return s.end(syscall.SIGTERM) }

// Kill ends the service with SIGKILL.
func (s *Service) Kill() error { return s.end(syscall.SIGKILL) }

func (s *Service) end(sig os.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil {
		return nil
	}
	if err := s.p.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-s.p.Done():
	case <-time.After(stopPatience):
		if err := s.p.Kill(); err != nil {
			return err
		}
	}
	s.p = nil
	return nil
}

// Restart stops the service if it is running, and starts it.
func (s *Service) Restart(ctx context.Context) error {
	if err := s.Stop(); err != nil {
		return err
	}
	return s.Start(ctx)
}

// restartAs restarts the service as another command, with the arguments that change makes of the present ones.
func (s *Service) restartAs(ctx context.Context, change func(argv []string) []string) error {
	if err := s.Stop(); err != nil {
		return err
	}
	s.mu.Lock()
	s.argv = change(s.argv)
	s.mu.Unlock()
	return s.Start(ctx)
}

// Process returns the running process; nil if there is none.
func (s *Service) Process() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil || ended(s.p) {
		return nil
	}
	return s.p
}

// wanted reports whether the service was started and not stopped since.
func (s *Service) wanted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.p != nil
}

func ended(p *Process) bool {
	select {
	case <-p.Done():
		return true
	default:
		return false
	}
}
