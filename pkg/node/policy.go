package node

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/retention"
)

// observation is a sandbox that was observed to run, with the policy of its annotations.
type observation struct {
	sandbox Sandbox
	policy  retention.Policy
	answers bool
	err     error // of the annotations
}

func observe(s Sandbox) observation {
	o := observation{sandbox: s}
	o.policy, o.answers, o.err = retention.Parse(s.Annotations)
	if o.err == nil && o.policy.Retains() {
		o.err = s.Pod.Validate() // nothing is kept for a name that no pod of Kubernetes has
	}
	return o
}

// policies brings the ledgers and the sandboxes that run into agreement.
type policies struct {
	networks *networks
	cacheDir string // of libcni
	// hookTimeout is how long a hook waits for a promise.
	hookTimeout time.Duration
	news        *news
	metrics     *metrics
	log         *slog.Logger
}

// hookTimeout is a quarter of what the runtime grants. A disk that needs longer for a promise is in trouble; the write
// goes on behind the answer.
const hookTimeout = 500 * time.Millisecond

// promiseInTime makes the promises that ADD could not make because the runtime handed it no annotations, and returns
// when they are durable or the time is up. If ADD has decided, it only reads.
func (p *policies) promiseInTime(o observation) {
	if o.err != nil || !o.policy.Retains() {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.promise(o)
	}()
	late := time.NewTimer(p.hookTimeout)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		p.log.Warn("Disk slow, the pod's address has not been promised yet", o.sandbox.attrs()...)
	}
}

// promise sets the policy of those of the sandbox's attachments that are still undecided.
func (p *policies) promise(o observation) {
	ledgers, _ := p.networks.open()
	for _, at := range p.attachments(o.sandbox.ID, ledgers) {
		if at.ledger.Undecided(at.att) {
			p.set(at, o, p.identify(o.sandbox))
		}
	}
}

// apply brings the ledgers and a running sandbox into agreement.
func (p *policies) apply(o observation) {
	s := o.sandbox
	if o.err != nil {
		p.metrics.badAnnotations.Inc()
		p.news.publish(ledger.Event{
			Reason: retainedip.EventInvalidAnnotation, Pod: s.Pod, ContainerID: s.ID, Netns: s.Netns,
			Message: o.err.Error() + ": nothing is retained",
		})
	}
	ns := p.identify(s)
	ledgers, _ := p.networks.open()
	for _, at := range p.attachments(s.ID, ledgers) {
		addrs, _ := p.set(at, o, ns)
		if len(addrs) > 0 && ns.Path != "" {
			p.verify(at, s, addrs)
		}
	}
}

// identify returns the sandbox's network namespace; zero if it has ended meanwhile or cannot be identified.
func (p *policies) identify(s Sandbox) ledger.Netns {
	ns, ok, err := ledger.SystemNetns{}.Identify(s.Netns)
	if err != nil || !ok {
		p.log.Debug("Cannot identify the network namespace", s.attrs("netns", s.Netns, "err", err)...)
		return ledger.Netns{}
	}
	return ns
}

// set hands the pod's policy to the ledger and returns the addresses of the attachment. A pod without annotations is
// decided, too: it asks for nothing. A pod with bad annotations is left as it is. An attachment with addresses of pools
// asks the node for nothing, even if its pod does: the cluster keeps these. ok is false if the ledger could not be
// written.
func (p *policies) set(at attached, o observation, ns ledger.Netns) (addrs []netip.Addr, ok bool) {
	s := o.sandbox
	log := p.log.With(s.attrs("network", at.ledger.Network().Name, "ifname", at.att.IfName)...)
	switch pooled, err := p.pooled(at, s); {
	case err != nil:
		log.Debug("Cannot determine whether the pod's address is from a pool, promising nothing", "err", err)
		o.err = err
	case pooled:
		o.policy, o.err = retention.Policy{}, nil
	}
	var err error
	if o.err != nil {
		addrs, err = at.ledger.Find(at.att)
	} else {
		var r *ledger.Result
		if r, err = at.ledger.SetPolicy(at.att, s.Pod, o.policy, ns); err == nil {
			addrs = r.Addrs
			for _, e := range r.Events {
				e.Pod, e.ContainerID, e.Netns = s.Pod, s.ID, s.Netns
				p.news.report(e)
			}
		}
	}
	switch {
	case errors.Is(err, ledger.ErrUnknownAttachment):
		return nil, true // not of this network, or ended meanwhile
	case err != nil:
		p.metrics.policyErrors.Inc()
		log.Error("Cannot set the pod's policy", "err", err)
		return nil, false
	}
	log.Debug("Set the pod's policy", "addrs", addrs, "retains", o.policy.Retains())
	return addrs, true
}

// pooled reports whether the cluster has given the attachment addresses of pools: by the pod's annotation or, if that
// came after kubelet had seen the pod, by the grant.
func (p *policies) pooled(at attached, s Sandbox) (bool, error) {
	text, source := s.Annotations[netconf.AnnotationAddresses], "annotation "+netconf.AnnotationAddresses
	if text == "" && grants.ValidPodUID(s.Pod.UID) == nil {
		var err error
		if text, err = p.networks.ledgers.Grants().Granted(s.Pod.UID); err != nil {
			return false, err
		}
		source = p.networks.ledgers.Grants().Path(s.Pod.UID)
	}
	if text == "" {
		return false, nil
	}
	addrs, err := netconf.ParsePoolAddresses(source, text, at.ledger.Network().Name, at.att.IfName)
	return len(addrs) > 0, err
}

// attached is an attachment in the ledger of its network.
type attached struct {
	ledger *ledger.Ledger
	att    ledger.Attachment
}

// attachments finds a sandbox's interfaces by the names of libcni's cache files, which say it all:
//
//	<cni-cache-dir>/results/<network>-<containerID>-<ifname>
//	<cni-cache-dir>/multus/results/…                          of the networks behind multus
//
// If there are none (a runtime with a cache of its own) kubelet's one interface is assumed.
func (p *policies) attachments(containerID string, ledgers []*ledger.Ledger) []attached {
	var names []string
	for _, dir := range []string{"results", "multus/results"} {
		more, err := namesIn(filepath.Join(p.cacheDir, dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			p.log.Warn("Cannot read libcni's cache", "err", err)
		}
		names = append(names, more...)
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

func namesIn(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// verify holds what the ledger says against what is configured in the pod.
func (p *policies) verify(at attached, s Sandbox, addrs []netip.Addr) {
	missing, err := hostnet.Missing(s.Netns, addrs)
	if errors.Is(err, hostnet.ErrNoAddresses) {
		p.log.Debug("Cannot verify the addresses of a sandboxed runtime", s.attrs("addrs", addrs, "err", err)...)
		return
	}
	if err != nil {
		p.log.Warn("Cannot verify the pod's addresses", s.attrs("addrs", addrs, "err", err)...)
		return
	}
	if len(missing) == 0 {
		return
	}
	// The pod may have ended meanwhile.
	if still, err := at.ledger.Find(at.att); err != nil || len(still) == 0 {
		return
	}
	p.metrics.verifyFailures.Inc()
	p.news.publish(ledger.Event{
		Reason: retainedip.EventNotConfigured, Key: ledger.Key{Network: at.ledger.Network().Name, IfName: at.att.IfName},
		Pod: s.Pod, ContainerID: s.ID, Netns: s.Netns, Addrs: missing,
		Message: fmt.Sprintf("%v of network %s is not configured in the pod", missing, at.ledger.Network().Name),
	})
}
