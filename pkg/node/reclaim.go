package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
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
	since time.Duration // CLOCK_BOOTTIME of the first list that lacked it
	why   string        // why it was not freed when it was due, as last logged
	book  *ledger.Ledger
	addrs []netip.Addr
	pod   ledger.Pod
	netns ledger.Netns
}

// reclaimer ends what leaked. It is the reconciler's, and keeps what is suspected between two of its runs.
type reclaimer struct {
	grace     time.Duration // how long the runtime must not have known a suspect
	netnsDirs []string
	runtime   func() int // a PID of the runtime
	news      *news
	metrics   *metrics
	log       *slog.Logger

	suspects map[suspect]*suspicion
}

// suspectAll compares the ledgers with the sandboxes that the runtime listed, and returns those suspects that
// have been unknown to it for a grace period. During its ADD a sandbox has an address file but is not listed: once is
// no evidence. next is when the next one is due, 0 if none is.
func (r *reclaimer) suspectAll(books []book, listed map[string]cri.Sandbox, now time.Duration) (
	due []suspect, next time.Duration) {
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
				if _, ok := listed[addr.Attachment.ContainerID]; ok {
					continue
				}
				k.att = addr.Attachment
			case ledger.StateUnreadable:
				k.addr = addr.Addr
			default:
				continue
			}
			s := r.suspects[k]
			if s == nil {
				s = &suspicion{since: now}
				r.suspects[k] = s
				r.log.Info("Found the address of a sandbox that the runtime does not list", "network", b.ledger.Network().Name,
					"addr", addr.Addr, "sandbox", k.att.ContainerID, "pod", addr.Pod.String(), "grace", r.grace)
			}
			if !seen[k] {
				s.addrs = nil
			}
			seen[k] = true
			s.book, s.pod, s.netns = b.ledger, addr.Pod, addr.Netns
			s.addrs = append(s.addrs, addr.Addr)
		}
	}
	for k, s := range r.suspects {
		left := s.since + r.grace - now
		switch {
		case !seen[k]:
			delete(r.suspects, k)
		case left <= 0:
			due = append(due, k)
		case next == 0 || left < next:
			next = left
		}
	}
	r.countSuspects()
	return due, next
}

func (r *reclaimer) countSuspects() {
	held := 0
	for _, s := range r.suspects {
		if s.why != "" {
			held++
		}
	}
	r.metrics.suspects.Set(float64(len(r.suspects)))
	r.metrics.held.Set(float64(held))
}

// reclaim frees those suspects whose addresses one view of the machine proves unused.
// ready are the namespaces of the sandboxes that the runtime says are running.
func (r *reclaimer) reclaim(ctx context.Context, due []suspect, ready []ledger.Netns) error {
	defer r.countSuspects()
	var q hostnet.Question
	for _, k := range due {
		q.Addrs = append(q.Addrs, r.suspects[k].addrs...)
		q.Netns = append(q.Netns, r.suspects[k].netns)
	}
	v, err := hostnet.Observe(ctx, r.netnsDirs, r.runtime(), q)
	if err == nil {
		defer v.Close()
		err = believe(v, ready)
	}
	if err != nil {
		for _, k := range due {
			r.hold(k, err.Error())
		}
		return fmt.Errorf("nothing can be reclaimed: %w", err)
	}
	known := spacesOf(v, ready)
	var errs []error
	for _, k := range due {
		s := r.suspects[k]
		leftover, why, err := judge(v, s, known)
		if err != nil {
			r.hold(k, err.Error())
			errs = append(errs, err)
			continue
		}
		if why != "" {
			r.hold(k, why)
			continue
		}
		if err := r.free(v, k, s, leftover); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(r.suspects, k)
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
		return fmt.Errorf("none of the namespaces of %d running sandboxes is visible, such as %s: "+
			"the agent's mounts are not the host's", len(ready), ready[0].Path)
	}
	return nil
}

// spacesOf returns those of the recorded namespaces that are in the view.
func spacesOf(v *hostnet.View, recorded []ledger.Netns) map[*hostnet.Space]bool {
	all := map[*hostnet.Space]bool{}
	for _, ns := range recorded {
		if s, err := v.Find(ns); err == nil && s != nil {
			all[s] = true
		}
	}
	return all
}

// judge returns why a suspect cannot be freed, or "". leftover is its namespace if that is still mounted. known are
// namespaces of running pods: if the addresses in one cannot be listed, it has those that the ledger says, which are no
// suspect's. Any other that cannot be read may have every address.
//
// A pod's namespace without a process is debris: its own runtime does not know it. Any other namespace (of nerdctl,
// podman, ip netns, cnitool) belongs to a program that we cannot ask, with or without a process.
func judge(v *hostnet.View, s *suspicion, known map[*hostnet.Space]bool) (
	leftover *hostnet.Space, why string, err error,
) {
	if s.netns.Path != "" {
		leftover, err = v.Find(s.netns)
		switch {
		case err != nil:
			return nil, "", err
		case leftover == nil:
		case s.pod.Name == "":
			return nil, fmt.Sprintf("its network namespace %s exists", s.netns.Path), nil
		case leftover.Process != 0:
			return nil, fmt.Sprintf("process %d is in its network namespace %s", leftover.Process, s.netns.Path), nil
		}
	}
	for _, addr := range s.addrs {
		for _, u := range v.Users(addr) {
			switch {
			case u == leftover:
			case u.Shows(addr):
				return nil, fmt.Sprintf("%s is configured in network namespace %s", addr, u.Path), nil
			case !known[u]:
				return nil, fmt.Sprintf("%s may be configured in another network namespace: %v", addr, u.Err), nil
			}
		}
	}
	return leftover, "", nil
}

// hold reports why a suspect stays, once for each reason.
func (r *reclaimer) hold(k suspect, why string) {
	s := r.suspects[k]
	if s.why != why {
		r.log.Warn("Kept leak suspect", suspectAttrs(k, s, "because", why)...)
	}
	s.why = why
}

func suspectAttrs(k suspect, s *suspicion, more ...any) []any {
	return append([]any{"network", s.book.Network().Name, "addrs", s.addrs, "sandbox", k.att.ContainerID,
		"ifname", k.att.IfName, "pod", s.pod.String()}, more...)
}

func (r *reclaimer) free(v *hostnet.View, k suspect, s *suspicion, leftover *hostnet.Space) error {
	if leftover != nil {
		if err := v.Remove(leftover, s.netns); err != nil {
			r.hold(k, err.Error())
			return err
		}
		r.metrics.leftovers.Inc()
		r.log.Info("Removed a leftover network namespace", suspectAttrs(k, s, "netns", s.netns.Path)...)
	}
	network := s.book.Network().Name
	if k.addr.IsValid() {
		if err := s.book.Drop(k.addr); err != nil {
			return fmt.Errorf("dropping %s of network %s: %w", k.addr, network, err)
		}
	} else if _, err := s.book.Reclaim(k.att); err != nil {
		return fmt.Errorf("reclaiming %s of network %s: %w", k.att, network, err)
	}
	r.metrics.reclaimed.WithLabelValues(network).Add(float64(len(s.addrs)))
	r.news.publish(ledger.Event{
		Reason: retainedip.EventReclaimed, Key: ledger.Key{Network: network}, Pod: s.pod, ContainerID: k.att.ContainerID,
		Netns: s.netns.Path, Addrs: s.addrs,
		Message: fmt.Sprintf("%v of network %s leaked and was reclaimed: the runtime has not listed its sandbox for %s",
			s.addrs, network, r.grace),
	})
	return nil
}
