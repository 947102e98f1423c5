package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/retainedip"
)

// suspect names what may have leaked: an attachment that the runtime does not know, or an address whose file
// says nothing.
type suspect struct {
	dir  string // of the network's address files
	att  ledger.Attachment
	addr netip.Addr // of an unreadable file only
}

// suspicion is what is known of a suspect.
type suspicion struct {
	since time.Duration // CLOCK_BOOTTIME of the first successful look that did not find it
	why   string        // why it was not freed when it was due, as last logged
	book  *ledger.Ledger
	addrs []netip.Addr
	pod   ledger.Pod
	netns ledger.Netns
}

// suspectAll compares the ledgers with the sandboxes that the runtime listed, and returns those suspects that
// have been unknown to it for a grace period. The list lacks a sandbox during its ADD, and an address file is
// there before its sandbox is: once is no evidence. next is when the next one is due, 0 if none is.
func (a *Agent) suspectAll(books []book, listed map[string]bool, now time.Duration) (due []suspect, next time.Duration) {
	seen := map[suspect]bool{}
	for _, b := range books {
		dir := directory(b.ledger)
		for _, addr := range b.addrs {
			if addr.Newer != nil {
				continue // it would be refused
			}
			k := suspect{dir: dir}
			switch addr.State {
			case ledger.StateBound:
				if listed[addr.Attachment.ContainerID] {
					continue
				}
				k.att = addr.Attachment
			case ledger.StateUnreadable:
				k.addr = addr.Addr
			default:
				continue
			}
			s := a.suspects[k]
			if s == nil {
				s = &suspicion{since: now}
				a.suspects[k] = s
				a.log.Info("The runtime does not know who has this address", "network", b.ledger.Network().Name,
					"addr", addr.Addr, "sandbox", k.att.ContainerID, "pod", addr.Pod.String(), "grace", a.o.GracePeriod)
			}
			if !seen[k] {
				s.addrs = nil
			}
			seen[k] = true
			s.book, s.pod, s.netns = b.ledger, addr.Pod, addr.Netns
			s.addrs = append(s.addrs, addr.Addr)
		}
	}
	for k, s := range a.suspects {
		left := s.since + a.o.GracePeriod - now
		switch {
		case !seen[k]:
			delete(a.suspects, k)
		case left <= 0:
			due = append(due, k)
		case next == 0 || left < next:
			next = left
		}
	}
	a.countSuspects()
	return due, next
}

func (a *Agent) countSuspects() {
	held := 0
	for _, s := range a.suspects {
		if s.why != "" {
			held++
		}
	}
	a.metrics.suspects.Set(float64(len(a.suspects)))
	a.metrics.held.Set(float64(held))
}

// reclaim frees those suspects of whom one look at the machine proves that nobody uses their addresses.
// ready are the namespaces of the sandboxes that the runtime says are running.
func (a *Agent) reclaim(ctx context.Context, due []suspect, ready []ledger.Netns) error {
	defer a.countSuspects()
	v, err := hostnet.Observe(ctx, a.o.Netns, a.o.NetnsDirs, a.cri.PID())
	if err == nil {
		defer v.Close()
		err = believe(v, ready)
	}
	if err != nil {
		for _, k := range due {
			a.hold(k, err.Error())
		}
		return fmt.Errorf("nothing can be reclaimed: %w", err)
	}
	var errs []error
	for _, k := range due {
		s := a.suspects[k]
		leftover, why, err := judge(v, s)
		if err != nil {
			a.hold(k, err.Error())
			errs = append(errs, err)
			continue
		}
		if why != "" {
			a.hold(k, why)
			continue
		}
		if err := a.free(v, k, s, leftover); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(a.suspects, k)
	}
	return errors.Join(errs...)
}

// believe returns why our view of the mounts cannot be trusted: a namespace of a running sandbox must be in it, or
// every sandbox would seem to be gone. If none is running the runtime's own view, which was taken too, is all there is.
func believe(v *hostnet.View, ready []ledger.Netns) error {
	for _, ns := range ready {
		if seen, err := v.Sees(ns); err != nil || seen {
			return err
		}
	}
	if len(ready) > 0 {
		return fmt.Errorf("none of the namespaces of %d running sandboxes is visible, such as %s: the agent's mounts are not the host's", len(ready), ready[0].Path)
	}
	return nil
}

// judge returns why a suspect cannot be freed, or "". leftover is its namespace if that is still mounted.
//
// A pod's namespace without a process is debris: its runtime is the one that does not know it. Any other
// (of nerdctl, podman, ip netns, cnitool) belongs to a program that we cannot ask, with or without a process.
func judge(v *hostnet.View, s *suspicion) (leftover *hostnet.Space, why string, err error) {
	if s.netns.Path != "" {
		leftover, err = v.Find(s.netns)
		switch {
		case err != nil:
			return nil, "", err
		case leftover == nil:
		case s.pod.Name == "":
			return nil, fmt.Sprintf("its network namespace %s is there", s.netns.Path), nil
		case leftover.Process != 0:
			return nil, fmt.Sprintf("process %d is in its network namespace %s", leftover.Process, s.netns.Path), nil
		}
	}
	for _, addr := range s.addrs {
		if u := v.User(addr, leftover); u != nil {
			return nil, fmt.Sprintf("%s is configured in network namespace %s", addr, u.Path), nil
		}
	}
	return leftover, "", nil
}

// hold reports why a suspect stays, once for each reason.
func (a *Agent) hold(k suspect, why string) {
	s := a.suspects[k]
	if s.why != why {
		a.log.Warn("Not reclaimed", a.suspectAttrs(k, s, "because", why)...)
	}
	s.why = why
}

func (a *Agent) suspectAttrs(k suspect, s *suspicion, more ...any) []any {
	return append([]any{"network", s.book.Network().Name, "addrs", s.addrs, "sandbox", k.att.ContainerID,
		"ifname", k.att.IfName, "pod", s.pod.String()}, more...)
}

func (a *Agent) free(v *hostnet.View, k suspect, s *suspicion, leftover *hostnet.Space) error {
	if leftover != nil {
		if err := v.Remove(leftover, s.netns); err != nil {
			a.hold(k, err.Error())
			return err
		}
		a.metrics.leftovers.Inc()
		a.log.Info("Removed a leftover network namespace", a.suspectAttrs(k, s, "netns", s.netns.Path)...)
	}
	network := s.book.Network().Name
	if k.addr.IsValid() {
		if err := s.book.Drop(k.addr); err != nil {
			return fmt.Errorf("dropping %s of network %s: %w", k.addr, network, err)
		}
	} else if _, err := s.book.Reclaim(k.att); err != nil {
		return fmt.Errorf("reclaiming %s of network %s: %w", k.att, network, err)
	}
	a.metrics.reclaimed.WithLabelValues(network).Add(float64(len(s.addrs)))
	a.publish(ledger.Event{
		Reason: retainedip.EventReclaimed, Key: ledger.Key{Network: network}, Pod: s.pod, ContainerID: k.att.ContainerID, Netns: s.netns.Path, Addrs: s.addrs, Time: a.wall(),
		Message: fmt.Sprintf("%v of network %s leaked: the runtime has not known its sandbox for %s", s.addrs, network, a.o.GracePeriod),
	})
	a.bookNow.up()
	return nil
}
