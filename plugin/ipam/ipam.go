// Package ipam is the CNI IPAM plugin: it translates between the CNI protocol and pkg/ledger and makes no decision of
// its own. It needs files only.
//
// The runtime starts the program for every command, so what it links is time on every pod's way: no
// containernetworking/skel (which compiles regular expressions and links package net), no gRPC, no k8s.io.
package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/pkg/spool"
)

// lockTimeout is how long a command waits for the network's lock. Then the process ends: the runtime is
// better served by an answer.
const lockTimeout = 60 * time.Second

// Plugin is one call of the plugin by a runtime.
type Plugin struct {
	Getenv         func(string) string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Exit           func(code int) // ends the process if the lock cannot be had
	Version        func() string  // of the program, for people; called only if one asks
}

// Run carries out the command in CNI_COMMAND and returns the exit code. The result or the error is on Stdout,
// as the CNI SPEC says. DEL fails only if the call itself cannot be understood: a failing DEL keeps a pod
// from being deleted, and is often never retried.
func (p *Plugin) Run() int {
	command := p.Getenv("CNI_COMMAND")
	if command == "" {
		fmt.Fprintf(p.Stderr, "CNI plugin stayput %s\nCNI protocol versions supported: %s\n",
			p.Version(), strings.Join(netconf.Versions[:], ", "))
		return 0
	}
	call := &call{Plugin: p, command: command, begin: time.Now()}
	err := call.dispatch()
	if err != nil {
		call.fail(err)
	}
	call.observe()
	if err != nil {
		return 1
	}
	if call.unheard {
		return 1
	}
	return 0
}

type call struct {
	*Plugin
	command   string
	att       ledger.Attachment
	netnsPath string
	conf      *netconf.Config
	begin     time.Time
	ending    spool.Ending // of an ADD or DEL
	unheard   bool         // the answer could not be written: the runtime must not take it for a success
}

func (c *call) fail(err *Error) {
	err.CNIVersion = newest()
	if c.conf != nil && netconf.Speaks(c.conf.CNIVersion) {
		err.CNIVersion = c.conf.CNIVersion
	}
	b, _ := json.Marshal(err) // strings and a number marshal
	c.write(b)
}

// observe counts how long the command took, after all its work. That it cannot is no error of the command.
func (c *call) observe() {
	if c.ending == 0 {
		return // it was not understood, or does not start or end a pod
	}
	if err := spool.Dir(c.conf.StateDir).Observe(c.ending, time.Since(c.begin)); err != nil {
		fmt.Fprintf(c.Stderr, "stayput: %s %s: cannot count the command: %v\n", c.command, c.att, err)
	}
}

func (c *call) write(b []byte) {
	if _, err := c.Stdout.Write(append(b, '\n')); err != nil {
		fmt.Fprintln(c.Stderr, "stayput: cannot write the result:", err)
		c.unheard = true
	}
}

func (c *call) dispatch() *Error {
	if c.command == "VERSION" {
		c.write(fmt.Appendf(nil, `{"cniVersion":%q,"supportedVersions":["%s"]}`,
			newest(), strings.Join(netconf.Versions[:], `","`)))
		return nil
	}
	var run func() *Error
	switch c.command {
	case "ADD":
		run = c.add
	case "DEL":
		run = c.del
	case "CHECK":
		run = c.check
	case "GC":
		run = c.gc
	case "STATUS":
		run = c.status
	default:
		return errorf(codeInvalidEnv, "CNI_COMMAND: %.64q is unknown: expected ADD, DEL, CHECK, GC, STATUS or VERSION",
			c.command)
	}
	if err := c.environment(); err != nil {
		return err
	}
	stdin, err := io.ReadAll(c.Stdin)
	if err != nil {
		return errorf(codeDecoding, "stdin: %v", err)
	}
	conf, err := netconf.Parse(stdin)
	c.conf = conf
	switch {
	case errors.Is(err, netconf.ErrSyntax):
		return errorf(codeDecoding, "%v", err)
	case err != nil:
		return configError(err)
	}
	needs := map[string]string{"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}[c.command]
	switch {
	case c.command == "DEL": // it has no result, and must work however the configuration has changed since the ADD
	case !netconf.Speaks(conf.CNIVersion):
		return &Error{Code: codeIncompatibleVersion, Msg: "incompatible CNI versions",
			Details: fmt.Sprintf("cniVersion: the configuration has %.64q, stayput supports %q",
				conf.CNIVersion, netconf.Versions)}
	case needs != "" && !atLeast(conf.CNIVersion, needs):
		return errorf(codeIncompatibleVersion, "cniVersion: %s does not allow %s: expected %s or newer",
			conf.CNIVersion, c.command, needs)
	}
	return run()
}

// environment checks the variables that the command must have (CNI SPEC, "Parameters").
func (c *call) environment() *Error {
	c.att = ledger.Attachment{ContainerID: c.Getenv("CNI_CONTAINERID"), IfName: c.Getenv("CNI_IFNAME")}
	c.netnsPath = c.Getenv("CNI_NETNS")
	var missing []string
	need := func(name, value string) {
		if value == "" {
			missing = append(missing, name)
		}
	}
	perAttachment := c.command == "ADD" || c.command == "DEL" || c.command == "CHECK"
	if perAttachment {
		need("CNI_CONTAINERID", c.att.ContainerID)
		need("CNI_IFNAME", c.att.IfName)
		if c.command != "DEL" {
			need("CNI_NETNS", c.netnsPath)
		}
	}
	need("CNI_PATH", c.Getenv("CNI_PATH"))
	if len(missing) > 0 {
		return errorf(codeInvalidEnv, "required env variables %v missing", missing)
	}
	if perAttachment && !netconf.ValidName(c.att.ContainerID) {
		return errorf(codeInvalidEnv, "CNI_CONTAINERID: %.64q is not valid: expected letters, digits, _ . and -",
			c.att.ContainerID)
	}
	if perAttachment && !ledger.ValidIfName(c.att.IfName) {
		return errorf(codeInvalidEnv, "CNI_IFNAME: %.64q is not valid: expected an interface name of at most 15 characters "+
			"without / : and white space", c.att.IfName)
	}
	if c.command == "ADD" && len(c.att.ContainerID) > 512 {
		return errorf(codeInvalidEnv, "CNI_CONTAINERID: %d bytes exceed the limit: expected at most 512",
			len(c.att.ContainerID))
	}
	return nil
}

func (c *call) options() ledger.Options {
	return ledger.Options{
		StateDir: c.conf.StateDir,
		FS: disk.Local{LockTimeout: lockTimeout, OnLockTimeout: func() {
			if c.command == "DEL" {
				fmt.Fprintf(c.Stderr, "stayput: DEL %s: the lock of network %s is still held after %s: nothing was changed\n",
					c.att, c.conf.Name, lockTimeout)
				c.observe()
				c.Exit(0)
				return
			}
			c.fail(errorf(codeTryAgain, "the lock of network %s is still held after %s", c.conf.Name, lockTimeout))
			c.observe()
			c.Exit(1)
		}},
	}
}

// report leaves events for the agent. That it cannot is no error of the command.
func (c *call) report(events []ledger.Event) {
	if len(events) == 0 {
		return
	}
	if err := spool.Dir(c.conf.StateDir).Report(events); err != nil {
		fmt.Fprintf(c.Stderr, "stayput: %s %s: cannot report the event: %v\n", c.command, c.att, err)
	}
}

// del never fails from here on: an error leaves the promise as it is, and the next ADD of the owner or the agent
// finishes.
func (c *call) del() *Error {
	c.ending = spool.DelFailed
	args, err := parseArgs(c.Getenv("CNI_ARGS"))
	if err != nil {
		args = podArgs{}
	}
	policy, err := c.conf.Policy()
	if err != nil {
		policy = nil
	}
	if c.leaves() {
		policy = &retention.Policy{}
	}
	req := ledger.DelRequest{Attachment: c.att, Pod: args.pod, Policy: policy}
	if ns, ok, err := (ledger.SystemNetns{}).Identify(c.netnsPath); err == nil && ok {
		req.Netns = ns
	}
	ending := spool.DelFreed
	for _, l := range c.ledgers() {
		r, err := l.Del(req)
		if err != nil {
			fmt.Fprintf(c.Stderr, "stayput: DEL %s: %v: the addresses were left unchanged\n", c.att, err)
			return nil
		}
		c.report(r.Events)
		if len(r.Addrs) > 0 {
			ending = spool.DelRetained
		}
	}
	c.ending = ending
	return nil
}

// ledgers returns the ledger of a DEL's network: as much of the configuration as can be understood must do. Where it
// says neither ranges nor a directory, only the ledgers know where the network's addresses are: thick multus hands on
// of a list no more than the plugins' types (k8snetworkplumbingwg/multus-cni#1449).
func (c *call) ledgers() (found []*ledger.Ledger) {
	freeing := func(n *ledger.Network) ledger.Options {
		options := c.options()
		options.Freeing = c.disconnect(n)
		return options
	}
	if n, err := c.conf.Network(); err == nil {
		return []*ledger.Ledger{ledger.New(n, freeing(n))}
	}
	if c.conf.DataDir == "" {
		served, _ := ledger.Networks(c.options()) // those that can be read
		for _, l := range served {
			if n := l.Network(); n.Name == c.conf.Name {
				found = append(found, ledger.Partial(n, freeing(n)))
			}
		}
	}
	if found == nil {
		n := c.conf.Bare()
		found = append(found, ledger.Partial(n, freeing(n)))
	}
	return found
}

func (c *call) check() *Error {
	n, err := c.conf.Network()
	if err != nil {
		return configError(err)
	}
	addrs, err := ledger.New(n, c.options()).Find(c.att)
	if err != nil {
		return addError(err)
	}
	prev, ok, err := c.conf.PrevAddrs()
	if err != nil {
		return configError(err)
	}
	if !ok {
		return nil
	}
	if cerr := c.connected(addrs); cerr != nil {
		return cerr
	}
	ours := func(a netip.Addr) bool { return inRanges(n, a) }
	pooled := !slices.ContainsFunc(addrs, ours) // or of other ranges, from before the configuration changed
	for _, a := range addrs {
		if (ours(a) || pooled) && !slices.Contains(prev, a) {
			return errorf(codeInternal, "%s has %s, which is not in prevResult (%v)", c.att, a, prev)
		}
	}
	// Other plugins of the chain may have added addresses of their own.
	for _, a := range prev {
		if ours(a) && !slices.Contains(addrs, a) {
			return errorf(codeInternal, "prevResult has %s, which is not recorded for %s (%v)", a, c.att, addrs)
		}
	}
	return nil
}

func (c *call) gc() *Error {
	valid, ok, err := c.conf.ValidAttachments()
	if err != nil {
		return configError(err)
	}
	if !ok {
		return nil
	}
	n, err := c.conf.Network()
	if err != nil {
		return configError(err)
	}
	options := c.options()
	options.Freeing = c.disconnect(n)
	if err := ledger.New(n, options).Collect(valid); err != nil {
		return addError(err)
	}
	return nil
}

func (c *call) status() *Error {
	n, err := c.conf.Network()
	if err != nil {
		return configError(err)
	}
	if err := ledger.New(n, c.options()).Status(); err != nil {
		return errorf(codeUnavailable, "%v", err)
	}
	return nil
}
