package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/retention"
)

// What the world beside the plugin does to a network, for the random histories: each deed with what it may change.

// configurations are what an administrator may write: another family, a part of the range, another range.
func configurations() []*Network {
	return []*Network{
		testNetwork("10.1.0.0/28", ""),
		testNetwork("10.1.0.0/28", "fd00::/64"),
		testNetwork("10.1.0.0/29", ""),
		testNetwork("10.1.0.0/29", "fd00::/125"),
		testNetwork("10.2.0.0/28", ""),
		testNetwork("10.2.0.0/28", "fd00::/64"),
	}
}

// tight are networks of which the addresses soon are all taken.
func tight() []*Network {
	return []*Network{
		testNetwork("10.1.0.0/29", ""),
		testNetwork("10.1.0.0/29", "fd00::/125"),
		testNetwork("10.1.0.0/28", "fd00::/64"),
	}
}

// configure changes the network under running pods. What they were promised stays theirs: while it is outside the
// ranges it is not given back, and to nobody else.
func (w *world) configure(r *rand.Rand) {
	share := w.net.PromisedShare
	switch r.IntN(3) {
	case 0:
		share = []float64{0, 0.2, 1}[r.IntN(3)]
	default:
		w.net = pickOne(r, configurations())
	}
	w.net.PromisedShare = share
	w.logf("configured: %v, share %v", w.net.Ranges, share)
}

// addAgain is a second ADD of an attachment that has addresses: an error that changes nothing, but if all of them are
// outside the ranges, the attachment gets others beside them.
func (w *world) addAgain(att Attachment) {
	l := w.live[att]
	if l == nil || !w.alive(l.netns) {
		return
	}
	r, err := w.ledger().Add(AddRequest{Attachment: att, Pod: l.pod, Netns: l.netns, Policy: l.policy})
	w.logf("ADD %s again -> %v %v", att, addrsOf(r), err)
	if !slices.ContainsFunc(l.addrs, w.gives) {
		if errors.Is(err, ErrInUse) {
			return // of another container of the pod
		}
		w.acknowledge(att, l.netns, l.pod, l.policy, r, err)
		if err == nil {
			w.live[att].addrs = slices.Concat(r.Addrs, l.addrs)
		}
		return
	}
	if !errors.Is(err, ErrDuplicate) {
		w.failf("a second ADD of %s gave %v, %v", att, addrsOf(r), err)
	}
}

// addBlindly is an ADD of a runtime whose plugin sees no network namespace, not even the pod's own. It may wait in vain
// for a predecessor that is gone. (One that sees its own pod's and no other's cannot be told from one that sees all.)
func (w *world) addBlindly(r *rand.Rand) {
	att, ns := w.newContainer(), w.newNetns()
	w.known = append(w.known, att)
	var sees NetnsProber = fakeNetns{}
	if r.IntN(2) == 0 {
		sees = sightless{}
	}
	pod, policy := Pod{Namespace: "default", Name: pickOne(r, pods)}, pickOne(r, policies)
	res, err := w.ledgerOf(sees).Add(AddRequest{Attachment: att, Pod: pod, Netns: Netns{Path: ns.Path}, Policy: policy})
	w.logf("blind ADD %s %s %s -> %v %v", att, pod, described{policy}, addrsOf(res), err)
	w.blindly = true
	w.acknowledge(att, ns, pod, policy, res, err)
	w.blindly = false
}

// release ends a promise on purpose. Its address stays the running pod's until the DEL.
func (w *world) release(r *rand.Rand) {
	key := pickOne(r, w.keys())
	if w.promises[key] == nil {
		return
	}
	p := w.promises[key]
	err := w.ledgerOf(w.agent(r)).Release(key)
	w.logf("release %s -> %v", key, err)
	if err != nil && !(errors.Is(err, ErrUnknownClaim) && (w.expired(p) || p.loose)) {
		w.failf("Release: %v", err)
	}
	delete(w.promises, key)
	delete(w.maybe, key)
	if p.holder != nil {
		l := w.live[*p.holder]
		l.key, l.policy = nil, ordinary // decided, or the agent would promise it again
	}
	for att, l := range w.live {
		// An earlier one of the pod was a holder, too, to a ledger that has lost its index or does not know its policy.
		if p := l.policy; (l.vague || p == nil) && NewKey(w.net.Name, l.pod, *cmp.Or(p, ordinary), att.IfName) == key {
			l.policy = ordinary
		}
	}
}

// uninstall leaves the network to host-local: every promise ends, and no running pod loses its address. Stayput's next
// command installs it again.
func (w *world) uninstall(sees NetnsProber) {
	freed, err := w.ledgerOf(sees).Uninstall()
	w.logf("uninstall -> %+v %v", freed, err)
	if err != nil {
		w.failf("Uninstall: %v", err)
	}
	clear(w.promises)
	clear(w.maybe)
	w.forgetTime()
	for att, l := range w.live {
		l.key, l.foreign, l.vague = nil, true, true
		for _, a := range l.addrs {
			if s, err := w.ledger().slot(a); w.alive(l.netns) && (err != nil || !s.boundTo(att)) {
				w.failf("I1: uninstall took %s from %s: %+v, %v", a, att, s, err)
			}
		}
	}
	w.raw = true
}

// reclaim is an agent that has proved on the whole machine that an attachment is over.
func (w *world) reclaim(att Attachment) {
	l := w.live[att]
	if l == nil {
		l = w.limbo[att]
	}
	if l == nil || w.alive(l.netns) {
		return
	}
	r, err := w.ledger().Reclaim(att)
	w.logf("reclaim %s -> %v %v", att, addrsOf(r), err)
	if err != nil {
		w.failf("Reclaim: %v", err)
	}
	w.ended(att)
}

// killedAndForgotten is an ADD that is killed somewhere and whose DEL, if ever, comes late.
func (w *world) killedAndForgotten(r *rand.Rand, pod string) {
	att, ns := w.newContainer(), Netns{}
	if other, l := w.another(r); l != nil && r.IntN(2) == 0 {
		att, ns, pod = other, l.netns, l.pod.Name
	} else {
		ns = w.newNetns()
	}
	p := Pod{Namespace: "default", Name: pod}
	policy := pickOne(r, []*retention.Policy{ordinary, tenMinutes})
	key := NewKey(w.net.Name, p, *policy, att.IfName)
	// What a killed restore does to a promise is killedADD's business.
	if w.promises[key] != nil || w.predecessor(att, p, func(Attachment, *liveAttachment) bool { return true }) {
		return
	}
	if _, maybe := w.maybe[key]; maybe {
		return
	}
	at := r.IntN(25)
	w.known = append(w.known, att)
	claims, err := w.ledger().allClaims()
	if err != nil {
		w.failf("claims: %v", err)
	}
	hit := w.killAt(at, func() { w.addAs(att, ns, pod, policy) })
	w.logf("ADD %s %s killed at operation %d: %t", att, pod, at, hit)
	if !hit {
		return
	}
	for _, c := range claims.claims {
		if p := w.promises[c.Key]; p == nil || w.expired(p) {
			w.freed[c.Key] = true
		}
	}
	w.limbo[att] = &liveAttachment{pod: p, policy: policy, netns: ns}
	w.maybe[key] = *policy
	if r.IntN(2) == 0 {
		delete(w.netns, ns.Path)
	}
}

// hostLocalAdd is an ADD of host-local's beside stayput (plugins/ipam/host-local/backend/allocator/allocator.go).
func (w *world) hostLocalAdd() {
	if w.raw {
		return // what was wiped is not there for it either; Stayput's next command writes it again
	}
	att, ns := w.newContainer(), w.newNetns()
	w.known = append(w.known, att)
	var addrs []netip.Addr
	err := w.hostLocal(func(dir string) error {
		for i, set := range w.net.Ranges {
			got, err := w.hostLocalReserve(dir, i, set, att)
			if err != nil {
				return err
			}
			addrs = append(addrs, got)
		}
		return nil
	})
	if errors.Is(err, ErrFull) {
		_, err = w.hostLocalRelease(att)
		addrs = nil
	}
	w.logf("host-local ADD %s -> %v %v", att, addrs, err)
	if err != nil {
		w.failf("host-local: %v", err)
	}
	if addrs == nil {
		return
	}
	w.acknowledge(att, ns, Pod{}, ordinary, &Result{Addrs: addrs}, nil)
	l := w.live[att]
	l.policy, l.foreign, l.vague = nil, true, true
	l.pod = Pod{Namespace: "default", Name: "web-0"}
}

func (w *world) hostLocalReserve(dir string, i int, set RangeSet, att Attachment) (got netip.Addr, err error) {
	lastPath := filepath.Join(dir, fmt.Sprintf("%s%d", lastPrefix, i))
	var last netip.Addr
	if b, err := w.fs.ReadFile(lastPath); err == nil {
		last, _ = netip.ParseAddr(string(b))
	}
	set.walk(last, func(a netip.Addr) bool {
		if _, err := w.fs.Mode(filepath.Join(dir, a.String())); errors.Is(err, fs.ErrNotExist) {
			got = a
		}
		return !got.IsValid()
	})
	if !got.IsValid() {
		return got, ErrFull
	}
	if err := w.fs.WriteFile(filepath.Join(dir, got.String()), encodeBound(att), modeHostLocal); err != nil {
		return got, err
	}
	return got, w.fs.WriteFile(lastPath, []byte(got.String()), modeHostLocal)
}

// hostLocalDel is a DEL that host-local carries out, also of what stayput has bound: a promise behind that is nobody's
// business any more, since anybody may have the address from now on.
func (w *world) hostLocalDel(att Attachment) {
	if w.raw || att.ContainerID == "" {
		return
	}
	claims, err := w.ledger().allClaims()
	if err != nil {
		w.failf("claims: %v", err)
	}
	freed, err := w.hostLocalRelease(att)
	w.logf("host-local DEL %s -> %v %v", att, freed, err)
	if err != nil {
		w.failf("host-local: %v", err)
	}
	delete(w.live, att)
	delete(w.limbo, att)
	left := false
	for _, c := range claims.claims {
		if !slices.ContainsFunc(freed, func(a netip.Addr) bool { return slices.Contains(c.Addrs, a) }) {
			continue
		}
		if p := w.promises[c.Key]; p != nil && p.holder != nil && *p.holder != att && w.alive(w.live[*p.holder].netns) {
			w.failf("I1: %s had addresses of %s, which are %s's", att, c.Key, *p.holder)
		}
		w.freed[c.Key], left = true, true
		w.forget(c.Key)
	}
	if left {
		// The agent starts with a sweep when the network is Stayput's again. Without that a claim is left on an address that
		// another one may get, and after a power loss or a wipe either may have it.
		w.expire()
	}
}

// hostLocalRelease returns what it freed.
func (w *world) hostLocalRelease(att Attachment) (freed []netip.Addr, err error) {
	err = w.hostLocal(func(dir string) error {
		names, err := w.fs.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			b, err := w.fs.ReadFile(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			if strings.TrimSpace(string(b)) == att.ContainerID+"\r\n"+att.IfName {
				if err := w.fs.Remove(filepath.Join(dir, name)); err != nil {
					return err
				}
				if a, err := netip.ParseAddr(name); err == nil { // else of a killed command, on its way to become one
					freed = append(freed, a)
				}
			}
		}
		return nil
	})
	return freed, err
}

func (w *world) hostLocal(f func(dir string) error) error {
	dir := filepath.Join(w.net.DataDir, w.net.Name)
	if err := disk.MkdirAll(w.fs, dir); err != nil {
		return err
	}
	unlock, err := w.fs.Lock(filepath.Join(dir, lockFile))
	if err != nil {
		return err
	}
	defer unlock()
	return f(dir)
}

// wipeSome removes files of Stayput's as people do who free disk space, and demands what docs/files.md promises
// (Deleting files). It is never done twice without a command in between that mends it: what tells of what was wiped
// must be there.
func (w *world) wipeSome(r *rand.Rand) {
	if w.raw {
		return
	}
	l := w.ledger()
	if _, err := w.fs.Mode(l.inState(indexDir)); err != nil {
		return // nothing has been served yet
	}
	w.fragile = false
	what := ""
	switch r.IntN(6) {
	case 0:
		what = "the network directory"
		w.remove(l.dir)
		w.lostNetworkDir()
		w.forgetTime()
	case 1:
		what = "all but dot files in the network directory"
		w.wipe(l.dir, glob)
		w.lostNetworkDir()
	case 2:
		what = "the files of the index"
		w.wipe(l.inState(indexDir), all)
		w.lostIndex()
	case 3:
		what = "the index"
		w.remove(l.inState(indexDir))
		w.lostIndex()
	case 4:
		what = "the state"
		w.remove(l.state)
		w.lostClaims()
		w.lostIndex()
	case 5:
		what = "the claims"
		w.wipe(l.inState(claimsDir), all)
		w.lostClaims()
	}
	w.raw = true
	w.logf("wiped: %s", what)
}

func (w *world) remove(path string) {
	if err := disk.RemoveAll(w.fs, path); err != nil {
		w.failf("wiping %s: %v", path, err)
	}
}

// lostNetworkDir: promises and what the index knows come back; retentions begin again. An attachment that the index
// need not know (host-local's, or one older than an uninstallation, until the agent has handed in its policy) is lost
// with its address file, while its pod may go on to use the address: nothing on the disk tells of it any more.
func (w *world) lostNetworkDir() {
	for k, p := range w.promises {
		if w.expired(p) {
			w.forget(k)
			continue
		}
		p.loose = true
		p.unsure = p.unsure || p.holder == nil
	}
	for att, l := range w.live {
		if l.foreign {
			delete(w.live, att)
			l.vague = true
			w.limbo[att] = l // its address file may be there all the same
		}
	}
}

// lostIndex: the address files say who has what, but not in which namespace.
func (w *world) lostIndex() {
	for _, l := range w.live {
		l.vague = true
	}
	for _, l := range w.limbo {
		l.vague = true
	}
}

// lostClaims: a retained record is a promise of its own, a bound address is not. The record is not durable until the
// next command has made a claim of it.
func (w *world) lostClaims() {
	w.fragile = true
	for k, p := range w.promises {
		if p.holder != nil || p.unsure { // a killed restore may have left it bound
			w.forget(k)
		}
	}
}
