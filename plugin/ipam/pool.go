package ipam

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/netconf"
)

// patience is how long an ADD waits in all, for the agent's file and for a predecessor; pause is between two looks.
const (
	patience = 3 * time.Second
	pause    = 50 * time.Millisecond
)

// pooled is what an ADD gets of pools.
type pooled struct {
	addrs []netconf.PoolAddress // none: it is an ordinary ADD
	text  string                // that says so
	left  time.Duration         // of the patience
}

// pools finds out which addresses of pools the cluster has given to the attachment: by the pod's annotation, else by
// the file that the agent has written for the pod, for which it waits. It allocates nothing itself, ever.
func (c *call) pools(args podArgs, requested []netip.Addr) (pooled, *Error) {
	said, err := c.conf.Pools()
	switch {
	case err != nil:
		return pooled{}, configError(err)
	case !said.Asked && !said.Network:
		return pooled{}, nil
	case args.noPod != nil:
		return pooled{}, errorf(codeInvalidEnv, "%v", args.noPod)
	case args.pod.Name == "":
		return pooled{}, errorf(codeInvalidEnv, "CNI_ARGS: no K8S_POD_NAME: expected a pod, since the addresses "+
			"come from pools")
	case said.Static || isStatic(args.pod.UID):
		return pooled{}, errorf(codeInvalidConfig, "pod %s is a static pod, which kubelet starts without the API server: "+
			"it can have no address of a pool. Make it a pod of the API server, or ask for none", args.pod)
	}
	p := pooled{text: said.Text, left: patience}
	source := "annotation " + netconf.AnnotationAddresses
	path, err := ledger.PoolFile(c.conf.StateDir, args.pod.UID)
	if err != nil {
		return p, errorf(codeInvalidEnv, "CNI_ARGS: %v", err)
	}
	if p.text == "" {
		source = path
		cerr := p.await(path, args.pod)
		if cerr != nil {
			return p, cerr
		}
	}
	if p.addrs, err = netconf.ParsePoolAddresses(source, p.text, c.conf.Name, c.att.IfName); err != nil {
		return p, configError(err)
	}
	if len(p.addrs) == 0 && said.Network {
		return p, errorf(codeInvalidConfig, "%s: no address for interface %s: expected one, since the addresses of "+
			"network %s come from pools", source, c.att.IfName, c.conf.Name)
	}
	for _, a := range requested {
		if len(p.addrs) > 0 && !slices.Contains(p.has(), a) {
			return p, errorf(codeInvalidConfig, "%s is requested by the runtime, but %s gives %v: expected no other address",
				a, source, p.has())
		}
	}
	return p, nil
}

// await reads the agent's file.
func (p *pooled) await(path string, pod ledger.Pod) *Error {
	for {
		b, err := ledger.Disk{}.ReadFile(path)
		switch {
		case err == nil && len(b) > 0:
			p.text = string(b)
			return nil
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return errorf(codeTryAgain, "%v", err)
		case p.left <= 0:
			return errorf(codeTryAgain, "pod %s has no addresses of its pools yet: see the events of the pod, and whether the "+
				"agent of this node runs", pod)
		}
		time.Sleep(pause)
		p.left -= pause
	}
}

func (p *pooled) has() (addrs []netip.Addr) {
	for _, a := range p.addrs {
		addrs = append(addrs, a.Prefix.Addr())
	}
	return addrs
}

// probe makes sure that nobody else on the link has the addresses that the ledger has just given to the attachment.
// None is configured yet. It asks only for those that are new, or were last used on another node, and once in the life
// of a pod on a node. If somebody has one, or it cannot be found out, nothing stays with the attachment.
//
// It asks without the ledger's lock, which others wait for: the addresses are the attachment's meanwhile.
func (c *call) probe(addrs []netconf.PoolAddress, pod ledger.Pod, ns ledger.Netns, l *ledger.Ledger) *Error {
	due, err := c.unprobed(addrs, pod)
	if err == nil && (len(due) == 0 || ns.Ino == 0) {
		return nil
	}
	var found []link.Conflict
	asked := false
	if err == nil {
		found, asked, err = link.Probe(ns.Path, c.att.IfName, due)
	}
	if asked && err == nil && len(found) == 0 {
		err = ledger.NoteProbed(c.options(), pod.UID, due)
	}
	switch {
	case err != nil:
		c.undo(pod, ns, l)
		return errorf(codeTryAgain, "finding out whether another machine on the link has an address of pod %s: %v", pod, err)
	case len(found) == 0:
		return nil
	}
	c.undo(pod, ns, l)
	var said []string
	for _, f := range found {
		e := c.event(ledger.EventConflict, pod, f.Addr)
		e.MAC = f.MAC.String()
		e.Message = fmt.Sprintf("%s is in use on the link of interface %s by another machine, which has the MAC address %s",
			f.Addr, c.att.IfName, e.MAC)
		said = append(said, e.Message)
		c.report([]ledger.Event{e})
	}
	return errorf(codeTryAgain, "pod %s cannot start: %s", pod, strings.Join(said, "; "))
}

// undo frees what the ledger has just given to the attachment.
func (c *call) undo(pod ledger.Pod, ns ledger.Netns, l *ledger.Ledger) {
	if _, err := l.Del(ledger.DelRequest{Attachment: c.att, Pod: pod, Netns: ns, Policy: &ledger.Policy{}}); err != nil {
		fmt.Fprintf(c.Stderr, "stayput: ADD %s: %v: the runtime's DEL frees the addresses\n", c.att, err)
	}
}

// unprobed returns the addresses that are to be probed for before the pod has them.
func (c *call) unprobed(addrs []netconf.PoolAddress, pod ledger.Pod) (due []netip.Addr, err error) {
	node, err := ledger.NodeName(c.options())
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if a.Last == "" || a.Last != node {
			due = append(due, a.Prefix.Addr())
		}
	}
	if due == nil {
		return nil, nil
	}
	probed, err := ledger.Probed(c.options(), pod.UID)
	return slices.DeleteFunc(due, func(a netip.Addr) bool { return slices.Contains(probed, a) }), err
}

// event is one about addresses of the attachment.
func (c *call) event(reason ledger.EventReason, pod ledger.Pod, addrs ...netip.Addr) ledger.Event {
	return ledger.Event{
		Reason: reason, Key: ledger.NewKey(c.conf.Name, pod, ledger.Policy{}, c.att.IfName), Pod: pod,
		ContainerID: c.att.ContainerID, Netns: c.netnsPath, Addrs: addrs, Time: time.Now().UTC(),
	}
}

// isStatic reports whether kubelet has made up a UID, as it does for pods that come from files and URLs: an MD5 in hex.
func isStatic(uid string) bool {
	return len(uid) == 32 && !slices.ContainsFunc([]byte(uid), func(c byte) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'f')
	})
}

// leaves reports whether the attachment may have addresses of pools, for which the node keeps no promise, whatever the
// annotations say of it.
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
