package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/retainedip"
)

// observation is a sandbox that was seen to run, with what its annotations say.
type observation struct {
	sandbox Sandbox
	policy  ledger.Policy
	answers bool
	err     error // of the annotations
}

func observe(s Sandbox) observation {
	o := observation{sandbox: s}
	o.policy, o.answers, o.err = ledger.ParseAnnotations(s.Annotations)
	if o.err == nil && o.policy.Retains() {
		o.err = s.Pod.Validate() // nothing is kept for a name that no pod of Kubernetes has
	}
	return o
}

// queueLength is some minutes' worth of pods starting as fast as a node can; what does not fit is left to
// the reconciliation.
const queueLength = 1024

type queue struct {
	c chan observation
	m *metrics
}

func newQueue(m *metrics) *queue {
	q := &queue{c: make(chan observation, queueLength), m: m}
	m.observeQueue(func() float64 { return float64(len(q.c)) })
	return q
}

// put never blocks; false means that there was no room.
func (q *queue) put(o observation) bool {
	select {
	case q.c <- o:
		return true
	default:
		q.m.queueDropped.Inc()
		return false
	}
}

func (a *Agent) queueLoop(ctx context.Context) {
	beat := a.health.loop("queue")
	for {
		select {
		case <-ctx.Done():
			return
		case o := <-a.queue.c:
			beat.begin()
			a.settle(o)
			beat.end()
		}
	}
}

// markTimeout is a quarter of what the runtime grants. A disk that needs longer for two fsyncs is in
// trouble; the write goes on behind the answer.
const markTimeout = 500 * time.Millisecond

// markInTime writes the marks and returns when they are durable, or the time is up.
func (a *Agent) markInTime(o observation) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.mark(o)
	}()
	late := time.NewTimer(a.markTimeout)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		a.log.Warn("The disk is slow, the pod's policy mark is not written yet", o.sandbox.attrs()...)
	}
}

// mark leaves the pod's policy for its DEL, in every network: which ones the pod is attached to is not known
// without reading more files than the runtime should wait for.
func (a *Agent) mark(o observation) {
	s := o.sandbox
	ledgers, _ := a.networks()
	for _, l := range ledgers {
		if err := l.PutMark(o.mark()); err != nil {
			a.metrics.markErrors.Inc()
			a.log.Error("Cannot write the pod's policy mark", s.attrs("network", l.Network().Name, "err", err)...)
		}
	}
}

func (o observation) mark() ledger.Mark {
	s := o.sandbox
	m := ledger.Mark{ContainerID: s.ID, Namespace: s.Pod.Namespace, Name: s.Pod.Name, UID: s.Pod.UID, Policy: o.policy}
	if len(s.Addrs) > 0 {
		m.Addrs, m.IfName = s.Addrs, ledger.PodInterface
	}
	return m
}

// settle brings the ledger and a running sandbox into agreement.
func (a *Agent) settle(o observation) {
	s := o.sandbox
	if o.err != nil {
		a.metrics.badAnnotations.Inc()
		a.publish(ledger.Event{
			Reason: retainedip.EventInvalidAnnotation, Pod: s.Pod, ContainerID: s.ID, Netns: s.Netns,
			Message: o.err.Error() + ": nothing is retained", Time: a.wall(),
		})
	}
	ns, ok, err := a.o.Netns.Identify(s.Netns)
	if err != nil || !ok {
		// It has ended meanwhile, or cannot be looked at; its policy is in the mark.
		a.log.Debug("No network namespace", s.attrs("netns", s.Netns, "err", err)...)
		ns = ledger.Netns{}
	}
	ledgers, _ := a.networks()
	for _, at := range a.attachments(s.ID, ledgers) {
		addrs, _ := a.setPolicy(at, o, ns)
		if len(addrs) > 0 && ok {
			a.verify(at, s, addrs)
		}
	}
}

// setPolicy hands the pod's policy to the ledger and returns the addresses of the attachment. A pod without
// annotations is decided too: it asks for nothing. One with bad annotations is left as it is. ok is false where
// the ledger could not be written.
func (a *Agent) setPolicy(at attached, o observation, ns ledger.Netns) (addrs []netip.Addr, ok bool) {
	s := o.sandbox
	log := a.log.With(s.attrs("network", at.ledger.Network().Name, "ifname", at.att.IfName)...)
	var err error
	if o.err != nil {
		addrs, err = at.ledger.Find(at.att)
	} else {
		var r *ledger.Result
		if r, err = at.ledger.SetPolicy(at.att, s.Pod, o.policy, ns); err == nil {
			addrs = r.Addrs
			for _, e := range r.Events {
				e.Pod, e.ContainerID, e.Netns = s.Pod, s.ID, s.Netns
				if e.Time.IsZero() {
					e.Time = a.wall()
				}
				a.report(e)
			}
		}
	}
	switch {
	case errors.Is(err, ledger.ErrUnknownAttachment):
		return nil, true // not of this network, or ended meanwhile
	case err != nil:
		a.metrics.policyErrors.Inc()
		log.Error("Cannot set the pod's policy", "err", err)
		return nil, false
	}
	log.Debug("Policy is set", "addrs", addrs, "retains", o.policy.Retains())
	return addrs, true
}

// attached is an attachment in the ledger of its network.
type attached struct {
	ledger *ledger.Ledger
	att    ledger.Attachment
}

// attachments finds a sandbox's interfaces by the names of libcni's cache files, which say it all:
//
//	<cni-cache-dir>/results/<network>-<containerID>-<ifname>
//
// Where there are none (a runtime with a cache of its own) kubelet's one interface is assumed.
func (a *Agent) attachments(containerID string, ledgers []*ledger.Ledger) []attached {
	dir := filepath.Join(a.o.CNICacheDir, "results")
	d, err := os.Open(dir)
	var names []string
	if err == nil {
		names, err = d.Readdirnames(-1)
		d.Close()
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		a.log.Warn("Cannot read libcni's cache", "err", err)
	}
	var found []attached
	for _, name := range names {
		network, ifname, ok := strings.Cut(name, "-"+containerID+"-")
		if !ok || network == "" || ifname == "" {
			continue
		}
		for _, l := range ledgers {
			if l.Network().Name == network {
				found = append(found, attached{l, ledger.Attachment{ContainerID: containerID, IfName: ifname}})
			}
		}
	}
	if found == nil {
		for _, l := range ledgers {
			found = append(found, attached{l, ledger.Attachment{ContainerID: containerID, IfName: ledger.PodInterface}})
		}
	}
	return found
}

// wall is the time for people.
func (a *Agent) wall() time.Time {
	if now, err := a.o.Clock.Now(); err == nil {
		return now.Wall
	}
	return time.Now()
}

// verify holds what the ledger says against what is configured in the pod.
func (a *Agent) verify(at attached, s Sandbox, addrs []netip.Addr) {
	missing, err := hostnet.Missing(s.Netns, addrs)
	if err != nil {
		a.log.Warn("Cannot verify the pod's addresses", s.attrs("addrs", addrs, "err", err)...)
		return
	}
	if len(missing) == 0 {
		return
	}
	// The pod may have ended while we looked.
	if still, err := at.ledger.Find(at.att); err != nil || len(still) == 0 {
		return
	}
	a.metrics.verifyFailures.Inc()
	a.publish(ledger.Event{
		Reason: retainedip.EventNotConfigured, Key: ledger.Key{Network: at.ledger.Network().Name, IfName: at.att.IfName},
		Pod: s.Pod, ContainerID: s.ID, Netns: s.Netns, Addrs: missing,
		Message: fmt.Sprintf("%v of network %s is not configured in the pod", missing, at.ledger.Network().Name), Time: a.wall(),
	})
}
