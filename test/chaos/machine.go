package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// part is what can be down of a machine.
type part string

const (
	power      part = "power"
	containerd part = "containerd"
	kubelet    part = "kubelet"
	flanneld   part = "flanneld"
	kubeProxy  part = "kube-proxy"
	felix      part = "Felix"
	uplink     part = "the way to the control plane"
)

// machine is a node of which several faults at once want something down: it is up again once none does.
type machine struct {
	*lab.ClusterNode
	weather *weather

	mu   sync.Mutex // held while something is started or stopped
	down map[part]int
}

// healing bounds the start of a program on a busy machine.
const healing = 5 * time.Minute

// take takes something down by kill, unless it is down already, and returns how to have it up again. what says how it
// went down.
func (m *machine) take(p part, what string, kill func() error) (heal func(context.Context) error, err error) {
	ends := m.weather.begins(m.Name, what)
	agentEnds := m.weather.begins(agentOf(m.Name), what)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down[p]++
	if m.runsLocked(p) {
		err = kill()
	}
	return func(ctx context.Context) error {
		defer ends()
		defer m.weather.strikes(agentOf(m.Name), what, lately) // it begins again
		defer agentEnds()
		m.mu.Lock()
		defer m.mu.Unlock()
		m.down[p]--
		return m.settleLocked(ctx)
	}, err
}

func (m *machine) runsLocked(p part) bool {
	switch {
	case m.Pid() == 0:
		return false
	case p == containerd:
		return m.Containerd() != nil
	case p == kubelet:
		return m.Kubelet.Process() != nil
	case p == flanneld:
		return m.Flanneld.Process() != nil
	case p == kubeProxy:
		return m.Proxy.Process() != nil
	case p == felix:
		return m.Felix.Process() != nil
	case p == uplink:
		return !m.IsCutOff()
	}
	return true
}

// settleLocked starts what is down though no fault wants it to be, and the other way round.
func (m *machine) settleLocked(ctx context.Context) error {
	if m.down[power] > 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, healing)
	defer cancel()
	if m.Pid() == 0 {
		// Starts the programs as well. Flanneld and kube-proxy, which come last, end if there is no API server.
		if err := m.Boot(ctx); err != nil && (m.Flanneld == nil || m.Kubelet.Process() == nil) {
			return fmt.Errorf("booting %s: %w", m.Name, err)
		}
	}
	type program struct {
		part  part
		start func(context.Context) error
		kill  func() error
	}
	programs := []program{
		{containerd, m.StartContainerd, m.KillContainerd},
		{kubelet, m.untilItStays(m.Kubelet.Start), m.Kubelet.Kill},
	}
	if m.Flanneld != nil {
		programs = append(programs, program{flanneld, keptUp(m.Flanneld), m.Flanneld.Kill},
			program{kubeProxy, keptUp(m.Proxy), m.Proxy.Kill})
	}
	if m.Felix != nil {
		programs = append(programs, program{felix, launched(m.Felix), m.Felix.Kill},
			program{uplink, m.cut(false), func() error { return m.cut(true)(ctx) }})
	}
	for _, s := range programs {
		switch runs := m.runsLocked(s.part); {
		case m.down[s.part] > 0 && runs:
			if err := s.kill(); err != nil {
				return fmt.Errorf("killing %s on %s: %w", s.part, m.Name, err)
			}
		case m.down[s.part] == 0 && !runs && (s.part != kubelet || m.runsLocked(containerd)): // else with containerd
			if err := s.start(ctx); err != nil {
				return fmt.Errorf("starting %s on %s: %w", s.part, m.Name, err)
			}
		}
	}
	return nil
}

// restartKubelet starts kubelet again, which registers its node again, unless it is down anyway.
func (m *machine) restartKubelet(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.runsLocked(kubelet) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, healing)
	defer cancel()
	return m.untilItStays(m.Kubelet.Restart)(ctx)
}

// untilItStays starts kubelet as an init system does, again and again: it ends at once while containerd does not
// answer.
func (m *machine) untilItStays(start func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		for {
			err := start(ctx)
			if err == nil || !m.runsLocked(containerd) {
				return err
			}
			if sleep(ctx, time.Second); ctx.Err() != nil {
				return err
			}
		}
	}
}

// keptUp starts a service that is started again whenever it ends, unless that has happened.
func keptUp(s *lab.Service) func(context.Context) error {
	return func(ctx context.Context) error {
		for s.Process() == nil {
			if err := s.Start(ctx); err != nil && !sleep(ctx, time.Second) {
				return err
			}
		}
		return nil
	}
}

// launched starts a service that is started again whenever it ends, and does not wait until it is ready: Felix is not
// while its node is cut off.
func launched(s *lab.Service) func(context.Context) error {
	return func(ctx context.Context) error {
		for s.Process() == nil && ctx.Err() == nil {
			short, cancel := context.WithTimeout(ctx, time.Second)
			_ = s.Start(short)
			cancel()
		}
		return ctx.Err()
	}
}

// cut keeps the machine from the control plane, or ends that.
func (m *machine) cut(off bool) func(context.Context) error {
	return func(ctx context.Context) error { return m.CutOff(ctx, off) }
}

// up reports whether containers of the machine can be reached.
func (m *machine) up() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runsLocked(power) && m.runsLocked(containerd)
}
