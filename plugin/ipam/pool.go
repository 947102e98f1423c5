package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
)

// pooled is what an ADD gets of pools.
type pooled struct {
	addrs []netconf.PoolAddress // none if it is an ordinary ADD
	text  string                // that says so
	left  time.Duration         // of ledger.Patience
}

// pools finds out which addresses of pools the cluster has given to the attachment: by the pod's annotation, else by
// the file that the agent has written for the pod, for which it waits. It allocates nothing itself, ever.
func (c *call) pools(args podArgs, requested []netip.Addr) (pooled, *Error) {
	said, err := c.conf.Pools()
	switch {
	case err != nil:
		return pooled{}, configError(err)
	case !said.Asked && !said.Network:
		asked, cerr := c.askedSpiderpool(said)
		if !asked {
			return pooled{}, cerr
		}
	}
	switch {
	case args.noPod != nil:
		return pooled{}, errorf(codeInvalidEnv, "%v", args.noPod)
	case args.pod.Name == "":
		return pooled{}, errorf(codeInvalidEnv, "CNI_ARGS: no K8S_POD_NAME: expected a pod, because the addresses "+
			"come from pools")
	case said.Static || isStatic(args.pod.UID):
		return pooled{}, errorf(codeInvalidConfig, "pod %s is a static pod, which kubelet starts without the API server: "+
			"it cannot have a pool address. Create it through the API server, or request no pool", args.pod)
	}
	if err := mailbox.ValidPodUID(args.pod.UID); err != nil {
		return pooled{}, errorf(codeInvalidEnv, "CNI_ARGS: %v", err)
	}
	p := pooled{left: ledger.Patience}
	source, cerr := "", (*Error)(nil)
	for {
		if source, cerr = c.believe(&p, said, args.pod); cerr == nil || cerr.Code != codeTryAgain || p.left <= 0 {
			break
		}
		time.Sleep(ledger.Pause)
		p.left -= ledger.Pause
	}
	if cerr != nil {
		return p, cerr
	}
	if len(p.addrs) == 0 && said.Network {
		return p, errorf(codeInvalidConfig, "%s: no address for interface %s: expected one, because the addresses of "+
			"network %s come from pools", source, c.att.IfName, c.conf.Name)
	}
	for _, a := range requested {
		if len(p.addrs) > 0 && !slices.Contains(p.has(), a) {
			return p, errorf(codeInvalidConfig, "the runtime requested %s, but %s has %v: expected no other address",
				a, source, p.has())
		}
	}
	return p, nil
}

// askedSpiderpool reports whether the pod asks for addresses of pools by Spiderpool's annotations, and they count here.
func (c *call) askedSpiderpool(said netconf.Pools) (bool, *Error) {
	if !said.AskedSpiderpool {
		return false, nil
	}
	served, err := c.mailbox().Served()
	if err != nil {
		return false, errorf(codeTryAgain, "reading what the agent of this node reported about the cluster's pools: %v", err)
	}
	return served != nil && served.Spiderpool, nil
}

// believe reads what the attachment gets: from the annotation, if it names the guard under which only the controller
// can have written it, or if the agent has confirmed it; else from the agent's file. source says which. The agent must
// have said that the cluster has pools: without pools, nothing may guard the annotation, or no controller may serve
// them any more. An error that another try may mend has codeTryAgain.
func (c *call) believe(p *pooled, said netconf.Pools, pod ledger.Pod) (source string, cerr *Error) {
	p.text, p.addrs = said.Text, nil
	source = "annotation " + netconf.AnnotationAddresses
	read := func() (cerr *Error) {
		var err error
		if p.addrs, err = netconf.ParsePoolAddresses(source, p.text, c.conf.Name, c.att.IfName); err != nil {
			cerr = configError(err)
		}
		return cerr
	}
	if p.text != "" {
		if cerr := read(); cerr != nil || len(p.addrs) == 0 {
			return source, cerr // nothing for this interface, which needs no confirmation
		}
	}
	served, err := c.mailbox().Served()
	switch {
	case err != nil:
		return source, errorf(codeTryAgain, "reading what the agent of this node reported about the cluster's pools: %v", err)
	case p.text != "" && (served == nil || served.None):
		return source, errorf(codeTryAgain, "%s: pod %s has pool addresses %v, but the agent of this node has reported no "+
			"pools in the cluster: expected no such annotation, which only Stayput's controller may write", source, pod, p.has())
	case p.text == "" || !p.names(served.Guard):
		told, err := c.mailbox().Pod(pod.UID)
		switch {
		case err != nil:
			return source, errorf(codeTryAgain, "%v", err)
		case p.text == "" && (served == nil || served.None):
			return source, errorf(codeTryAgain, "pod %s has no addresses of its pools: the agent of this node has reported no "+
				"pools in the cluster. Create the pools, with pools.enabled, and check that the agent is running, or remove "+
				"what requests them: annotation stayput.io/pools, or ipam.pools", pod)
		case p.text == "" && told == "":
			return source, errorf(codeTryAgain, "pod %s has no addresses of its pools yet: see the events of the pod, and "+
				"check that the agent of this node is running", pod)
		case p.text == "":
			p.text = told
			source, _ = c.mailbox().PodPath(pod.UID)
			if cerr := read(); cerr != nil {
				return source, cerr
			}
		case told != p.text:
			return source, errorf(codeTryAgain, "%s: the assignment of %v to pod %s has not been confirmed: the agent of "+
				"this node confirms it once it finds the PodIP; check that it is running", source, p.has(),
				pod)
		}
	}
	for _, a := range p.has() {
		if !served.InPool(a) {
			return source, errorf(codeTryAgain, "%s: %s is not in the subnet of any pool: %v", source, a, served.Subnets)
		}
		if slices.Contains(served.Gateways, a) {
			return source, errorf(codeInvalidConfig, "%s: %s is the gateway of a pool: expected another address for a pod",
				source, a)
		}
	}
	return source, nil
}

// names reports whether all addresses name the guard that there is.
func (p *pooled) names(guard string) bool {
	return guard != "" && !slices.ContainsFunc(p.addrs, func(a netconf.PoolAddress) bool { return a.Guard != guard })
}

// refuse returns an error if an address cannot be a pod's, even if the cluster says so: the node has it, or gives it,
// or its pods' gateway is there.
func (c *call) refuse(addrs []netip.Addr, n *ledger.Network) *Error {
	if len(addrs) == 0 {
		return nil
	}
	ledgers, err := ledger.Networks(c.options())
	if err != nil {
		return errorf(codeTryAgain, "reading the networks of this node: %v", err)
	}
	all := []*ledger.Network{n}
	for _, l := range ledgers {
		if o := l.Network(); o.Name != n.Name || o.DataDir != n.DataDir { // of n the description may be an earlier one
			all = append(all, o)
		}
	}
	for _, a := range addrs {
		switch is, err := link.Local(a); {
		case err != nil:
			return errorf(codeTryAgain, "%v", err)
		case is:
			return errorf(codeInvalidConfig, "%s is an address of this node: expected another one for a pod", a)
		}
		for _, o := range all {
			for _, set := range o.Ranges {
				for _, r := range set {
					switch {
					case a == r.Gateway:
						return errorf(codeInvalidConfig, "%s is the gateway of this node's pods in network %s: expected another "+
							"address for a pod", a, o.Name)
					case r.Contains(a):
						return errorf(codeInvalidConfig, "ipam.ranges of network %s: pool address %s is also in a range of the "+
							"node (%s): expected ranges that do not contain pool addresses", o.Name, a, r)
					}
				}
			}
		}
	}
	return nil
}

func (p *pooled) has() (addrs []netip.Addr) {
	for _, a := range p.addrs {
		addrs = append(addrs, a.Prefix.Addr())
	}
	return addrs
}

func (c *call) mailbox() mailbox.Box { return c.options().Mailbox() }

// probe makes sure that no other machine on the link has the addresses that the ledger has just given to the
// attachment. None is configured yet. It asks only for those that are new, or were last used on another node, and once
// in the life of a pod on a node. If a machine has one, or it cannot be found out, nothing stays with the attachment.
//
// It asks without the ledger's lock, which others wait for: the addresses are the attachment's meanwhile.
func (a *addition) probe() *Error {
	due, err := a.unprobed()
	if err == nil && (len(due) == 0 || a.ns.Ino == 0) {
		return nil
	}
	var found []link.Conflict
	asked := false
	if err == nil {
		found, asked, err = link.Probe(a.ns.Path, a.att.IfName, due)
	}
	if asked && err == nil && len(found) == 0 {
		err = a.mailbox().PutProbed(a.args.pod.UID, due)
	}
	switch {
	case err != nil:
		a.undo()
		return errorf(codeTryAgain, "probing whether another machine on the link has an address of pod %s: %v",
			a.args.pod, err)
	case len(found) == 0:
		return nil
	}
	a.undo()
	var said []string
	for _, f := range found {
		e := a.event(ledger.EventConflict, f.Addr)
		e.MAC = f.MAC.String()
		e.Message = fmt.Sprintf("%s is in use on the link of interface %s by another machine, with MAC address %s",
			f.Addr, a.att.IfName, e.MAC)
		said = append(said, e.Message)
		a.report([]ledger.Event{e})
	}
	return errorf(codeTryAgain, "pod %s cannot start: %s", a.args.pod, strings.Join(said, "; "))
}

// undo frees what the ledger has just given to the attachment.
func (a *addition) undo() {
	r := ledger.DelRequest{Attachment: a.att, Pod: a.args.pod, Netns: a.ns, Policy: &retention.Policy{}}
	if _, err := a.ledger().Del(r); err != nil {
		fmt.Fprintf(a.Stderr, "stayput: ADD %s: %v: the runtime's DEL frees the addresses\n", a.att, err)
	}
}

// unprobed returns the addresses that are to be probed for before the pod has them.
func (a *addition) unprobed() (due []netip.Addr, err error) {
	node, err := a.mailbox().Node()
	if err != nil {
		return nil, err
	}
	for _, p := range a.pool.addrs {
		used := p.Last != "" && p.Last == node
		if used { // it may have been another machine that had the node's name
			if used, err = a.mailbox().Used(p.Prefix.Addr()); err != nil {
				return nil, err
			}
		}
		if !used {
			due = append(due, p.Prefix.Addr())
		}
	}
	if due == nil {
		return nil, nil
	}
	probed, err := a.mailbox().Probed(a.args.pod.UID)
	return slices.DeleteFunc(due, func(addr netip.Addr) bool { return slices.Contains(probed, addr) }), err
}

// event is one about addresses of the attachment.
func (a *addition) event(reason ledger.EventReason, addrs ...netip.Addr) ledger.Event {
	return ledger.Event{
		Reason: reason, Key: ledger.NewKey(a.conf.Name, a.args.pod, retention.Policy{}, a.att.IfName),
		Pod: a.args.pod, ContainerID: a.att.ContainerID, Netns: a.netnsPath, Addrs: addrs, Time: time.Now().UTC(),
	}
}

// isStatic reports whether kubelet has made up a UID, as it does for pods that come from files and URLs: an MD5 in hex.
func isStatic(uid string) bool {
	return len(uid) == 32 && !slices.ContainsFunc([]byte(uid), func(c byte) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'f')
	})
}

// leaves reports whether the attachment may have addresses of pools, for which the node keeps no promise, even if the
// annotations ask for one.
func (c *call) leaves() bool {
	said, err := c.conf.Pools()
	if err != nil || said.Network {
		return said.Network
	}
	if said.Text == "" {
		return false
	}
	addrs, err := netconf.ParsePoolAddresses(netconf.AnnotationAddresses, said.Text, c.conf.Name, c.att.IfName)
	return err != nil || len(addrs) > 0
}
