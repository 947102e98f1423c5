package ipam

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/pkg/spool"
)

// addition is an ADD in the making.
type addition struct {
	*call
	net       *ledger.Network
	args      podArgs
	requested []netip.Addr
	policy    *retention.Policy
	ns        ledger.Netns
	pool      pooled
	way       *routed // nil if the addresses are not routed
	res       *result
}

func (c *call) add() *Error {
	c.ending = spool.AddFailed
	a := &addition{call: c}
	// 1. Read the call. Nothing is changed before all of it is understood.
	if err := a.read(); err != nil {
		return err
	}
	// 2. Find out which addresses of pools the cluster has given to the pod, and how they get there.
	if err := a.plan(); err != nil {
		return err
	}
	// 3. Have the ledger give addresses: these, or its own.
	r, err := a.allocate()
	if err != nil {
		return err
	}
	// 4. Make those of pools usable. If that fails they are no longer the pod's.
	if err := a.deliver(); err != nil {
		return err
	}
	// 5. Have the node look for the pod, not for its predecessor.
	if a.way == nil && (r.Restored || len(a.pool.addrs) > 0) {
		a.forget(r.Addrs)
	}
	// 6. Count, answer, report.
	a.finish(r)
	return nil
}

// forget deletes the node's neighbour entries of addresses that another interface had: without the agent, kubelet's
// probes would fail until they expire. An error costs the pod no more than that.
func (a *addition) forget(addrs []netip.Addr) {
	bridge, err := a.conf.Bridge()
	if err == nil {
		err = link.Forget(bridge, addrs)
	}
	if err != nil {
		fmt.Fprintf(a.Stderr, "stayput: ADD %s: %v\n", a.att, err)
	}
}

// read reads configuration, CNI_ARGS, CNI_NETNS and resolv.conf.
func (a *addition) read() *Error {
	var err error
	if a.net, err = a.conf.Network(); err != nil {
		return configError(err)
	}
	if err := fits(a.conf.CNIVersion, a.net.Ranges); err != nil {
		return configError(err)
	}
	if a.args, err = parseArgs(a.Getenv("CNI_ARGS")); err != nil {
		return errorf(codeInvalidEnv, "%v", err)
	}
	if a.requested, err = a.conf.Requested(a.args.ip); err != nil {
		return configError(err)
	}
	if a.policy, err = a.conf.Policy(); err != nil {
		return configError(err)
	}
	if a.args.noPod != nil && a.policy != nil && a.policy.Retains() {
		return errorf(codeInvalidEnv, "%v", a.args.noPod)
	}
	a.res = &result{version: a.conf.CNIVersion}
	if a.res.routes, err = a.conf.Routes(); err != nil {
		return configError(err)
	}
	if a.res.dns, err = resolvConf(a.conf); err != nil {
		var failed *fs.PathError
		if errors.As(err, &failed) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return errorf(codeTryAgain, "%v", err)
		}
		return configError(err)
	}
	var cerr *Error
	a.ns, cerr = a.netns()
	return cerr
}

// plan sets what the pod gets of pools, and the way to it. It may wait for the agent, and changes nothing.
func (a *addition) plan() (err *Error) {
	if a.pool, err = a.pools(a.args, a.requested); err != nil {
		return err
	}
	if err := a.refuse(a.pool.has(), a.net); err != nil {
		return err
	}
	a.way, err = a.route(a.pool.addrs, a.net, a.res.routes)
	return err
}

// allocate has the ledger give the addresses. It waits for a predecessor.
func (a *addition) allocate() (*ledger.Result, *Error) {
	req := ledger.AddRequest{
		Attachment: a.att, Pod: a.args.pod, Netns: a.ns, Policy: a.policy, Requested: a.requested,
		Pool: a.pool.has(), PoolText: a.pool.text,
	}
	r, err := a.ledger().Add(req)
	switch {
	case errors.Is(err, ledger.ErrInUse):
		a.ending = spool.AddInUse
		return nil, addError(err)
	case err != nil:
		return nil, addError(err)
	}
	return r, nil
}

// ledger returns the ledger of the network. With addresses of pools its ADD waits for as long as is left.
func (a *addition) ledger() *ledger.Ledger {
	options := a.options()
	if len(a.pool.addrs) > 0 {
		options.Patience = max(a.pool.left, ledger.Pause)
		options.Freeing = a.disconnect(a.net)
	}
	return ledger.New(a.net, options)
}

// deliver makes the way to routed addresses. Of others of pools it asks first who else has them: routed ones are on no
// link that machines share. After an error the ledger has none of them.
func (a *addition) deliver() *Error {
	switch {
	case a.way != nil:
		if err := a.connect(a.way); err != nil {
			a.undo()
			return errorf(codeTryAgain, "connecting pod %s to its node: %v", a.args.pod, err)
		}
	case len(a.pool.addrs) > 0:
		return a.probe()
	}
	return nil
}

// finish answers the runtime, then tells the agent.
func (a *addition) finish(r *ledger.Result) {
	switch {
	case r.Restored:
		a.ending = spool.AddRestored
	case r.Promised:
		a.ending = spool.AddPromised
	default:
		a.ending = spool.AddOrdinary
	}
	events := r.Events
	switch {
	case a.way != nil:
		a.res.addRouted(a.way)
	case len(a.pool.addrs) > 0:
		a.res.addPooled(a.pool.addrs)
	default:
		for i, addr := range r.Addrs {
			a.res.add(a.net.Ranges[i], addr)
		}
	}
	if len(a.pool.addrs) > 0 {
		events = append(events, a.event(ledger.EventPooled, a.pool.has()...))
	}
	a.write(a.res.encode())
	a.report(events)
}

// netns identifies CNI_NETNS. The plugin's own namespace is refused before anything is allocated, unless
// the runtime insists (CNI_NETNS_OVERRIDE), as every plugin does.
func (c *call) netns() (ledger.Netns, *Error) {
	var probe ledger.SystemNetns
	ns, ok, err := probe.Identify(c.netnsPath)
	if err != nil || !ok {
		return ledger.Netns{Path: c.netnsPath}, nil
	}
	if o := c.Getenv("CNI_NETNS_OVERRIDE"); o != "1" && !strings.EqualFold(o, "true") {
		var own unix.Stat_t
		if unix.Stat("/proc/self/ns/net", &own) == nil && own.Dev == ns.Dev && own.Ino == ns.Ino {
			return ns, errorf(codeInvalidNetns,
				"CNI_NETNS: %s is the plugin's own network namespace: expected the container's", c.netnsPath)
		}
	}
	return ns, nil
}

// addError maps the ledger's errors to CNI's codes: an error that another try can mend is 11.
func addError(err error) *Error {
	switch {
	case errors.Is(err, ledger.ErrDuplicate), errors.Is(err, ledger.ErrNotAvailable),
		errors.Is(err, ledger.ErrNewer), errors.Is(err, ledger.ErrUnknownAttachment):
		return errorf(codeInternal, "%v", err)
	case errors.Is(err, ledger.ErrNetnsGone):
		return errorf(codeInvalidNetns, "%v", err)
	}
	return errorf(codeTryAgain, "%v", err)
}
