package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
)

// pooled is what an ADD gets of pools.
type pooled struct {
	addrs []netconf.PoolAddress // none if it is an ordinary ADD
	text  string                // that says so
	left  time.Duration         // of ledger.Patience
}

// pools finds out which addresses of pools the attachment gets: those that the agent has granted to the pod, for which
// it waits. That a pod has some is said by its annotations, which nobody believes otherwise. It allocates nothing
// itself, ever.
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
	if err := grants.ValidPodUID(args.pod.UID); err != nil {
		return pooled{}, errorf(codeInvalidEnv, "CNI_ARGS: %v", err)
	}
	p := pooled{left: ledger.Patience}
	none := func(source string) *Error {
		return errorf(codeInvalidConfig, "%s: no address for interface %s: expected one, because the addresses of network "+
			"%s come from pools", source, c.att.IfName, c.conf.Name)
	}
	if p.text = said.Text; p.text != "" {
		const source = "annotation " + netconf.AnnotationAddresses
		switch cerr := c.parse(&p, source); {
		case cerr != nil:
			return p, cerr
		case len(p.addrs) == 0 && said.Network:
			return p, none(source)
		case len(p.addrs) == 0:
			return p, nil
		}
	}
	source, cerr := c.grants().Path(args.pod.UID), (*Error)(nil)
	for {
		if cerr = c.granted(&p, source, args.pod); cerr == nil || cerr.Code != codeTryAgain || p.left <= 0 {
			break
		}
		time.Sleep(ledger.Pause)
		p.left -= ledger.Pause
	}
	if cerr != nil {
		return p, cerr
	}
	if len(p.addrs) == 0 && (said.Network || said.Text != "") {
		return p, none(source)
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
	served, cerr := c.served()
	if cerr != nil {
		return false, cerr
	}
	return served != nil && served.Spiderpool, nil
}

func (c *call) served() (*grants.Served, *Error) {
	served, err := c.grants().Served()
	if err != nil {
		return nil, errorf(codeTryAgain, "reading what the agent of this node reported about the cluster's pools: %v", err)
	}
	return served, nil
}

// parse reads the addresses of the attachment in the text, which is from source.
func (c *call) parse(p *pooled, source string) *Error {
	var err error
	if p.addrs, err = netconf.ParsePoolAddresses(source, p.text, c.conf.Name, c.att.IfName); err != nil {
		return configError(err)
	}
	return nil
}

// granted reads what the pod is granted. An error that another try may mend has codeTryAgain.
func (c *call) granted(p *pooled, source string, pod ledger.Pod) *Error {
	text, err := c.grants().Granted(pod.UID)
	if err != nil {
		return errorf(codeTryAgain, "%v", err)
	}
	served, cerr := c.served()
	switch {
	case cerr != nil:
		return cerr
	case text == "" && (served == nil || served.None):
		return errorf(codeTryAgain, "pod %s is granted no address of its pools: the agent of this node has reported no "+
			"pools in the cluster. Create the pools, with pools.enabled, and check that the agent is running, or remove what "+
			"requests them: annotation stayput.io/pools, or ipam.pools", pod)
	case text == "":
		return errorf(codeTryAgain, "pod %s is granted no address of its pools yet: the agent of this node grants it, once "+
			"the PodIP names the node. See the events of the pod, and check that the agent is running", pod)
	}
	p.text = text
	if cerr := c.parse(p, source); cerr != nil {
		return cerr
	}
	for _, a := range p.has() {
		switch {
		case served == nil || served.None: // the agent has granted it while there were pools
		case !served.InPool(a):
			return errorf(codeTryAgain, "%s: %s is not in the subnet of any pool: %v", source, a, served.Subnets)
		case slices.Contains(served.Gateways, a):
			return errorf(codeInvalidConfig, "%s: %s is the gateway of a pool: expected another address for a pod", source, a)
		}
	}
	return nil
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

func (c *call) grants() grants.Dir { return c.options().Grants() }

// probe makes sure that no other machine on the link has the addresses that the ledger has just given to the
// attachment. None is configured yet. It asks only for those that are new, or were last used on another node. If a
// machine has one, or it cannot be found out, nothing stays with the attachment.
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
		err = a.grants().PutUsed(due)
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
	node, err := a.grants().Node()
	if err != nil {
		return nil, err
	}
	for _, p := range a.pool.addrs {
		used := p.Last != "" && p.Last == node
		if used { // it may have been another machine that had the node's name
			if used, err = a.grants().Used(p.Prefix.Addr()); err != nil {
				return nil, err
			}
		}
		if !used {
			due = append(due, p.Prefix.Addr())
		}
	}
	return due, nil
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
