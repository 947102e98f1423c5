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

// Service is a program of a machine of a cluster that can be stopped and started again, such as kubelet. Its
// methods may be used by several goroutines.
type Service struct {
	node  *Node
	name  string // of its log
	env   []string
	argv  []string
	ready func(context.Context) error // one try; nil: it is ready when it runs
	// keep has it start again when it ends by itself, as kubelet does with a static pod: the scheduler ends where it
	// cannot believe what it sees, such as a pod that was replaced while the API server was away (cache.UpdatePod).
	keep bool

	mu sync.Mutex
	p  *Process
}

// stopPatience is how long a service may take to end by itself. kube-apiserver would wait for its clients.
const stopPatience = 500 * time.Millisecond

// Start starts the service and waits until it is ready. It is an error if it runs already.
func (s *Service) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p != nil && !ended(s.p) {
		return fmt.Errorf("%s runs already", s.name)
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
			return fmt.Errorf("%s ended: %w, see %s", s.name, p.Wait(), p.Log)
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %w, see %s", s.name, ctx.Err(), err, p.Log)
		}
	}
}

// launch starts the program, with the lock held.
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

// keepAfter is how long a service that is kept up stays away.
const keepAfter = time.Second

// keepUp starts the service again once p has ended, unless somebody has stopped it.
func (s *Service) keepUp(p *Process) {
	<-p.Done()
	time.Sleep(keepAfter)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == p {
		_, _ = s.launch() // an error: the machine is off
	}
}

// Stop ends the service with SIGTERM, and with SIGKILL if it takes longer than half a second.
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

// Restart stops the service, if it runs, and starts it.
func (s *Service) Restart(ctx context.Context) error {
	if err := s.Stop(); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Process is the running process; nil if there is none.
func (s *Service) Process() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.p == nil || ended(s.p) {
		return nil
	}
	return s.p
}

func ended(p *Process) bool {
	select {
	case <-p.Done():
		return true
	default:
		return false
	}
}
