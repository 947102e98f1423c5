// Package importer takes over addresses that another program has promised on this node.
package importer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/retention"
)

// Options locate the ledgers and the runtime.
type Options struct {
	StateDir  string
	CRISocket string
	Clock     ledger.Clock
}

// Import takes over what another program has promised. Without act it only says what it would do.
//
// It makes promises by commands of the ledger alone. The address of a pod that is there moves to the pod's sandbox, and
// is bound all the while: no clock ever runs under a pod. For a pod that is gone, the attachment that has the address,
// or an attachment that is made up, is ended under the policy.
//
// The runtime must answer: an address is left alone if it is not known whether a sandbox has it.
func Import(ctx context.Context, o Options, items []inspection.ImportItem, act bool) (*inspection.Import, error) {
	ledgers, err := ledger.Networks(ledger.Options{StateDir: o.StateDir, Clock: o.Clock})
	if err != nil {
		return nil, err
	}
	im := &importer{options: o, act: act}
	if im.sandboxes, err = cri.WithAddrs(ctx, o.CRISocket); err != nil {
		return nil, fmt.Errorf("listing sandboxes, which the import requires: %w", err)
	}
	for _, l := range ledgers {
		addrs, err := l.List()
		if err != nil {
			return nil, fmt.Errorf("network %s: %w", l.Network().Name, err)
		}
		im.books = append(im.books, book{l, addrs})
	}
	done := &inspection.Import{Items: []inspection.ImportItem{}}
	for _, item := range items {
		done.Items = append(done.Items, im.one(ctx, item))
	}
	return done, nil
}

type importer struct {
	options   Options
	act       bool
	books     []book
	sandboxes map[string]cri.Sandbox
}

// one plans a promise, and carries the plan out.
func (im *importer) one(ctx context.Context, item inspection.ImportItem) inspection.ImportItem {
	if item.Action != "" {
		return item // it was found out before that nothing can be, or has to be done
	}
	p, why := im.plan(&item)
	item.Why = why
	if p == nil {
		item.Action = cmp.Or(item.Action, inspection.ActionRefuse)
		return item
	}
	if !im.act {
		return item
	}
	if err := im.carryOut(ctx, p); err != nil {
		item.Action, item.Why = inspection.ActionRefuse, err.Error()
		return item
	}
	item.Done = true
	if addrs, err := p.book.ledger.List(); err == nil {
		p.book.addrs = addrs // for the items that follow
	}
	return item
}

// book is what one network's ledger says.
type book struct {
	ledger *ledger.Ledger
	addrs  []ledger.Address
}

// planned is what is to be done.
type planned struct {
	book   *book
	pod    ledger.Pod
	policy retention.Policy
	addrs  []netip.Addr
	// has is the attachment that has the addresses in the ledger, to be ended, nil if they are free. netns is its own.
	has   *ledger.Attachment
	netns ledger.Netns
	// sandbox is the pod's, which has the addresses, empty if none has.
	sandbox string
	ifname  string
}

// plan says what becomes of a promise. Without a plan the words say why, and item.Action may say that this is fine.
func (im *importer) plan(item *inspection.ImportItem) (p *planned, why string) {
	item.Interface = cmp.Or(item.Interface, ledger.PodInterface)
	p = &planned{pod: ledger.Pod{Namespace: item.Namespace, Name: item.Pod}, ifname: item.Interface}
	if err := p.pod.Validate(); err != nil {
		return nil, err.Error()
	}
	var err error
	p.policy, _, err = retention.Parse(map[string]string{retention.AnnotationRetainIP: item.Retention})
	if err != nil {
		return nil, err.Error()
	}
	if !p.policy.Retains() {
		return nil, "it is to be retained for no time"
	}
	if len(item.IPs) == 0 {
		return nil, "it has no address"
	}
	if p.book, why = im.bookOf(item.IPs[0]); p.book == nil {
		return nil, why
	}
	network := p.book.ledger.Network()
	item.Network = network.Name
	if why := p.findInLedger(item); why != "" {
		return nil, why
	}
	if why := fits(p, network); why != "" {
		return nil, why
	}
	if why := im.findSandbox(p); why != "" {
		return nil, why
	}
	if why := im.pooled(p); why != "" {
		return nil, why
	}
	item.IPs = p.addrs
	switch {
	case p.sandbox == "":
		item.Action = inspection.ActionRetain
		return p, "the pod is not running: the address is kept for it, " + item.Retention + " from the import"
	case p.has != nil && p.sandbox == p.has.ContainerID:
		item.Action = inspection.ActionNone
		return nil, "the pod is running and in the ledger: its annotation determines what is kept when it stops"
	}
	item.Action = inspection.ActionBind
	return p, "the pod is running: its address is promised to it"
}

// bookOf returns the book of the network whose range an address is in, or why there is none.
func (im *importer) bookOf(ip netip.Addr) (of *book, why string) {
	for i := range im.books {
		b := &im.books[i]
		if !slices.ContainsFunc(b.ledger.Network().Ranges, func(s ledger.RangeSet) bool { return within(s, ip) }) {
			continue
		}
		if of != nil {
			return nil, fmt.Sprintf("%s is in the ranges of two networks, %s and %s",
				ip, of.ledger.Network().Name, b.ledger.Network().Name)
		}
		of = b
	}
	if of == nil {
		return nil, fmt.Sprintf("%s is not in the ranges of any network that stayput has served on this node; "+
			"the ranges of a network are known once a pod has started in it", ip)
	}
	return of, ""
}

// findInLedger finds what has the addresses in the ledger, and adds its addresses of other families, which a record may
// lack. It returns why they cannot be promised, or have no need to be.
func (p *planned) findInLedger(item *inspection.ImportItem) (why string) {
	for _, a := range p.book.addrs {
		if a.Key == nil || a.Key.Pod != item.Pod || a.Key.Namespace() != item.Namespace || a.Key.IfName != item.Interface {
			continue
		}
		if slices.Contains(item.IPs, a.Addr) {
			item.Action = inspection.ActionNone
			return "already promised to the pod"
		}
		return fmt.Sprintf("the pod is already promised %s", a.Addr)
	}
	for _, ip := range item.IPs {
		i := slices.IndexFunc(p.book.addrs, func(a ledger.Address) bool { return a.Addr == ip })
		if i < 0 {
			continue
		}
		switch a := p.book.addrs[i]; {
		case a.State == ledger.StateUnreadable:
			return fmt.Sprintf("the file of %s is unreadable", ip)
		case a.Key != nil:
			return fmt.Sprintf("%s is promised to %s", ip, a.Key)
		case p.has != nil && *p.has != a.Attachment:
			return fmt.Sprintf("%v are bound to two sandboxes, %s and %s",
				item.IPs, p.has.ContainerID, a.Attachment.ContainerID)
		default:
			p.has, p.netns = &a.Attachment, a.Netns
		}
	}
	if p.has == nil {
		p.addrs = item.IPs
		return ""
	}
	for _, a := range p.book.addrs {
		if a.State == ledger.StateBound && a.Attachment == *p.has {
			p.addrs = append(p.addrs, a.Addr)
		}
	}
	return ""
}

// findSandbox finds the pod's sandbox in the runtime. It returns why the addresses are, or may be, another's.
func (im *importer) findSandbox(p *planned) (why string) {
	want := p.pod
	for id, s := range im.sandboxes {
		if s.AddrsErr != nil {
			return fmt.Sprintf("cannot get the addresses of sandbox %s of pod %s from the runtime: %v", id, s.Pod, s.AddrsErr)
		}
		if !slices.ContainsFunc(s.Addrs, func(ip netip.Addr) bool { return slices.Contains(p.addrs, ip) }) {
			continue
		}
		if s.Pod.Namespace != want.Namespace || s.Pod.Name != want.Name {
			return fmt.Sprintf("pod %s has %s", s.Pod, p.addrs[0])
		}
		if p.sandbox != "" {
			return fmt.Sprintf("two sandboxes of the pod have %s", p.addrs[0])
		}
		p.sandbox, p.pod = id, s.Pod
	}
	switch {
	case p.has == nil:
		return ""
	case p.sandbox == "" && lives(p.netns):
		return fmt.Sprintf("sandbox %s, its owner in the ledger, is starting or terminating: its network namespace exists",
			p.has.ContainerID)
	case p.sandbox != p.has.ContainerID && im.sandboxes[p.has.ContainerID].Ready:
		return fmt.Sprintf("sandbox %s, its owner in the ledger, is running with another address", p.has.ContainerID)
	}
	return ""
}

// pooled returns that an address is one of a pool, or "". The cluster keeps these, and no node promises them.
func (im *importer) pooled(p *planned) (why string) {
	ids := []string{p.sandbox}
	if p.has != nil {
		ids = append(ids, p.has.ContainerID)
	}
	for _, id := range ids {
		text := im.sandboxes[id].Annotations[netconf.AnnotationAddresses]
		if text == "" {
			continue
		}
		addrs, err := netconf.ParsePoolAddresses(netconf.AnnotationAddresses, text, p.book.ledger.Network().Name, p.ifname)
		if err != nil || len(addrs) > 0 {
			return fmt.Sprintf("%v come from pools, which the cluster manages: see the PodIPs", p.addrs)
		}
	}
	return ""
}

// lives says of a recorded network namespace whether it may still be there. The runtime lists no sandbox that it is
// about to create.
func lives(ns ledger.Netns) bool {
	if ns.Path == "" {
		return false
	}
	there, err := hostnet.Exists(ns)
	return there || err != nil
}

// fits returns why addresses are not what a pod of the network would get, or "".
func fits(p *planned, n *ledger.Network) string {
	if len(p.addrs) != len(n.Ranges) {
		return fmt.Sprintf("a pod of network %s has %d addresses, one of each range set, but %d were given",
			n.Name, len(n.Ranges), len(p.addrs))
	}
	for i, use := range n.Use(p.book.addrs) {
		if !slices.ContainsFunc(p.addrs, func(a netip.Addr) bool { return within(use.RangeSet, a) }) {
			return fmt.Sprintf("none of %v is in range set %d of network %s", p.addrs, i, n.Name)
		}
		if int64(use.Promised) >= use.Promisable {
			return fmt.Sprintf("%d of at most %d addresses of network %s are already promised",
				use.Promised, use.Promisable, n.Name)
		}
	}
	return ""
}

func within(s ledger.RangeSet, a netip.Addr) bool {
	return slices.ContainsFunc(s, func(r ledger.Range) bool { return r.Contains(a) && r.Gateway != a })
}

// errNotKept means that the ledger did not make the promise that was asked for.
var errNotKept = errors.New("the ledger did not keep the address")

// carryOut makes the promise. What was planned from may have changed: the ledger looks again under its lock. For a
// pod that runs all that can fail without the ledger comes first.
func (im *importer) carryOut(ctx context.Context, p *planned) error {
	l := p.book.ledger
	req := ledger.AddRequest{
		Attachment: ledger.Attachment{ContainerID: p.sandbox, IfName: p.ifname},
		Pod:        p.pod, Policy: &p.policy, Requested: p.addrs,
	}
	var r *ledger.Result
	var err error
	switch {
	case p.sandbox != "":
		if req.Netns, err = im.netns(ctx, p.sandbox); err != nil {
			return err
		}
		if p.has != nil {
			r, err = l.Move(*p.has, req)
		} else {
			r, err = l.Add(req)
		}
	case p.has != nil:
		r, err = l.Del(ledger.DelRequest{Attachment: *p.has, Pod: p.pod, Policy: &p.policy, Seen: true})
	default:
		req.Attachment.ContainerID = "import-" + strings.ReplaceAll(p.pod.Namespace+"-"+p.pod.Name, ".", "-")
		if r, err = l.Add(req); err == nil {
			_, err = l.Del(ledger.DelRequest{Attachment: req.Attachment})
		}
	}
	if err != nil {
		return err
	}
	for _, e := range r.Events {
		if e.Reason == ledger.EventRefused || e.Reason == ledger.EventNamespaceRefused {
			return fmt.Errorf("%w: %s", errNotKept, e.Message)
		}
	}
	if len(r.Addrs) != len(p.addrs) {
		return fmt.Errorf("%w: requested %v, kept %v", errNotKept, p.addrs, r.Addrs)
	}
	return nil
}

// netns is the network namespace of a sandbox that runs.
func (im *importer) netns(ctx context.Context, id string) (ledger.Netns, error) {
	c, err := cri.New(im.options.CRISocket)
	if err != nil {
		return ledger.Netns{}, err
	}
	defer c.Close()
	path, err := c.Netns(ctx, id)
	if err != nil {
		return ledger.Netns{}, err
	}
	ns, ok, err := ledger.SystemNetns{}.Identify(path)
	if err == nil && !ok {
		err = fmt.Errorf("the network namespace of sandbox %s, %s, is not visible to the agent", id, path)
	}
	return ns, err
}

// ReservedIPs reads what OpenKruise's host-local has reserved (openkruise/samples,
// containernetworking/plugins/plugins/ipam/host-local/reserved.go): below its data directory
//
//	reserved/<namespace>/<pod>  {"containerId":"…","ifName":"eth0","IPConf":{"address":"10.244.1.5/24",…},
//	                             "duration":10,"releaseTime":"…"}
//
// with the minutes as duration, and without a releaseTime while the pod runs. The address file beside it stays
// bound to the container that got the address first. What is over, or does not parse, is among the items with its
// reason.
func ReservedIPs(dataDir string, now time.Time) ([]inspection.ImportItem, error) {
	root := filepath.Join(dataDir, "reserved")
	namespaces, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var items []inspection.ImportItem
	for _, ns := range namespaces {
		if !ns.IsDir() {
			continue
		}
		pods, err := os.ReadDir(filepath.Join(root, ns.Name()))
		if err != nil {
			return nil, err
		}
		for _, pod := range pods {
			b, err := os.ReadFile(filepath.Join(root, ns.Name(), pod.Name()))
			if err != nil {
				return nil, err
			}
			items = append(items, reservedIP(b, ns.Name(), pod.Name(), now))
		}
	}
	return items, nil
}

func reservedIP(b []byte, namespace, pod string, now time.Time) inspection.ImportItem {
	item := inspection.ImportItem{Namespace: namespace, Pod: pod, IPs: []netip.Addr{}}
	var r struct {
		IfName      string
		IPConf      struct{ Address string }
		Duration    int64
		ReleaseTime *time.Time
	}
	refuse := func(format string, args ...any) inspection.ImportItem {
		item.Action, item.Why = inspection.ActionRefuse, fmt.Sprintf(format, args...)
		return item
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return refuse("its reservation cannot be parsed: %v", err)
	}
	item.Interface = r.IfName
	ip, err := netip.ParsePrefix(r.IPConf.Address)
	if err != nil {
		return refuse("its reservation has the address %.64q: expected an address such as 10.244.1.5/24", r.IPConf.Address)
	}
	item.IPs = []netip.Addr{ip.Addr().Unmap()}
	policy, _, err := retention.Parse(map[string]string{
		retention.AnnotationReservedIPDuration: strconv.FormatInt(r.Duration, 10),
	})
	if err != nil {
		return refuse("its reservation is for %d minutes: expected more than 0", r.Duration)
	}
	kept := policy.Duration()
	item.Retention = policy.RetainIP()
	if r.ReleaseTime != nil && !now.Before(r.ReleaseTime.Add(kept)) {
		item.Action, item.Why = inspection.ActionNone, "it expired at "+r.ReleaseTime.Add(kept).UTC().Format(time.RFC3339)
	}
	return item
}
