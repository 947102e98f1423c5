package ipam

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
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
