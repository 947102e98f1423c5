package pool

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Key names what is to be decided about again.
type Key struct {
	Kind KeyKind
	// Namespace is that of a pod. Name is the name of the pod or the pool, or the address.
	Namespace, Name string
}

// KeyKind says what a Key names, and by which method of a [Book] is decided about it.
type KeyKind string

// The kinds of keys.
const (
	KeyPod     KeyKind = "pod"     // [Book.Place]
	KeyAddress KeyKind = "address" // [Book.Review]
	KeyPool    KeyKind = "pool"    // [Book.ReviewPool]
	KeyRecall  KeyKind = "recall"  // [Book.Recall]
)

// RecallKey is the only key of its kind.
var RecallKey = Key{Kind: KeyRecall}

// KeyOfAddress returns the key of an address.
func KeyOfAddress(a netip.Addr) Key { return Key{Kind: KeyAddress, Name: a.String()} }

// KeyOfPool returns the key of a pool.
func KeyOfPool(name string) Key { return Key{Kind: KeyPool, Name: name} }

// Key returns the key of a pod.
func (p *Pod) Key() Key { return Key{Kind: KeyPod, Namespace: p.Namespace, Name: p.Name} }

// wakes knows what waits for what, and what has been woken since it was drained: all keys for which a decision may be
// another one than before.
type wakes struct {
	woken []Key // in order
	in    map[Key]struct{}
	// waits are the pods that wait, with the addresses that they wait for. on is the same by address. sharing are those of
	// shared identities, which take whichever address of theirs is free first.
	waits   map[UID][]netip.Addr
	on      index[netip.Addr, UID]
	sharing index[Owner, UID]
	// silent are the addresses that wait for what nodes say.
	silent map[netip.Addr]silence
}

// silence is since when an address waits for what nodes say of a pod that is deleted.
type silence struct {
	of       UID
	since    time.Time
	operator bool // only an operator can end it
}

func newWakes() wakes {
	return wakes{in: map[Key]struct{}{}, waits: map[UID][]netip.Addr{}, on: index[netip.Addr, UID]{},
		sharing: index[Owner, UID]{}, silent: map[netip.Addr]silence{}}
}

func (w *wakes) wake(keys ...Key) {
	for _, k := range keys {
		if _, woken := w.in[k]; !woken {
			w.in[k] = struct{}{}
			w.woken = append(w.woken, k)
		}
	}
}

// noteWait notes what a pod waits for, if it does.
func (b *Book) noteWait(uid UID, plan Plan) {
	w, pod := &b.wakes, b.pods[uid]
	for _, a := range w.waits[uid] {
		w.on.remove(a, uid)
	}
	delete(w.waits, uid)
	if pod == nil {
		return
	}
	w.sharing.remove(ownerOf(pod.Namespace, pod.Name, pod.Identity), uid)
	if plan.Reason == "" {
		return
	}
	w.waits[uid] = plan.Addrs
	for _, a := range plan.Addrs {
		w.on.add(a, uid)
	}
	if pod.Identity != "" {
		w.sharing.add(ownerOf(pod.Namespace, pod.Name, pod.Identity), uid)
	}
}

// noteSilence notes whether an address waits for what nodes say.
func (b *Book) noteSilence(a netip.Addr, plan Plan, now time.Time) {
	was := b.wakes.silent[a]
	if delete(b.wakes.silent, a); b.Settled(a) {
		return
	}
	s := silence{operator: plan.Remedy != ""}
	if b.unproven(a) {
		s.of, s.since = b.ips[a].PodUID, now
		if was.of == s.of {
			s.since = was.since
		}
	}
	b.wakes.silent[a] = s
}

// Unproven calls visit for each address whose pod is deleted and may still have it, with the time since when that is
// known, and whether only an operator can end it.
func (b *Book) Unproven(visit func(since time.Time, operator bool)) {
	for a, s := range b.wakes.silent {
		if b.unproven(a) {
			visit(s.since, s.operator)
		}
	}
}

// Woken returns what is to be decided about because something has changed since the last call. Of the pods that wait
// for an address that becomes free it has only as many as there are addresses, the oldest first.
func (b *Book) Woken(now time.Time) []Key {
	for pool := range b.lines.stirred {
		for _, uid := range b.next(pool, now) {
			b.wakePod(uid)
		}
	}
	clear(b.lines.stirred)
	all := b.wakes.woken
	b.wakes.woken = nil
	clear(b.wakes.in)
	return all
}

// WakeAll wakes everything, the pods by their age.
func (b *Book) WakeAll() {
	b.wakes.wake(RecallKey)
	for _, a := range b.Addresses() {
		b.wakes.wake(KeyOfAddress(a))
	}
	for _, p := range slices.SortedFunc(maps.Values(b.pods), older) {
		b.wakes.wake(p.Key())
	}
	b.wakePools()
}

// WakeWaiting wakes what waits for something that no change announces, such as time that passes. It is called from time
// to time.
func (b *Book) WakeWaiting() {
	for uid := range b.wakes.waits {
		if _, inLine := b.lines.in[uid]; !inLine {
			b.wakePod(uid)
		}
	}
	for a := range b.wakes.silent {
		b.wakes.wake(KeyOfAddress(a))
	}
	for name := range b.pools {
		b.lines.stir(name)
	}
	b.wakes.wake(RecallKey)
	b.wakePools()
}

func (b *Book) wakePod(uid UID) {
	if p := b.pods[uid]; p != nil {
		b.wakes.wake(p.Key())
	}
}

// wakePlaces wakes every pod that waits.
func (b *Book) wakePlaces() {
	for uid := range b.wakes.waits {
		b.wakePod(uid)
	}
}

func (b *Book) wakePools() {
	for name := range b.pools {
		b.wakes.wake(KeyOfPool(name))
	}
}

// wakeAddress wakes an address, and the pods that wait for it.
func (b *Book) wakeAddress(a netip.Addr) {
	b.wakes.wake(KeyOfAddress(a))
	for uid := range b.wakes.on[a] {
		b.wakePod(uid)
	}
	p := b.ips[a]
	if p == nil || p.Identity == "" {
		return
	}
	if pod := b.pods[p.PodUID]; pod == nil || pod.Ending || pod.Over {
		for uid := range b.wakes.sharing[p.owner()] {
			b.wakePod(uid)
		}
	}
}

// wakeMoved wakes what a PodIP bears upon that has changed, or is gone.
func (b *Book) wakeMoved(p *PodIP) {
	b.wakeAddress(p.Addr)
	b.wakes.wake(KeyOfPool(p.Pool), Key{Kind: KeyPod, Namespace: p.Namespace, Name: p.PodName})
}

// wakeDisputed wakes what waits because machines answer for too many addresses of a pool: they have one less.
func (b *Book) wakeDisputed(pool string) {
	for a, p := range b.disputes {
		if p.Pool == pool {
			b.wakes.wake(KeyOfAddress(a))
		}
	}
}

// wakeBorne wakes the addresses that a pod bears upon.
func (b *Book) wakeBorne(p *Pod) {
	for _, a := range b.About(p) {
		b.wakeAddress(a)
	}
}

// wakeSilent wakes all that waits for what nodes say.
func (b *Book) wakeSilent() {
	b.wakes.wake(RecallKey)
	for a := range b.wakes.silent {
		b.wakeAddress(a)
	}
	for _, uids := range b.wakes.on {
		for uid := range uids {
			b.wakePod(uid)
		}
	}
}

// SetNamespace puts the labels of a namespace in, for its pods that wait.
func (b *Book) SetNamespace(name string, labels map[string]string) {
	for uid := range b.wakes.waits {
		if p := b.pods[uid]; p.Namespace == name {
			again := *p
			again.Namespaced = labels
			b.pods[uid] = &again
			b.wakePod(uid)
		}
	}
}

// changedSince reports whether there may be something to do for a pod that was not to be done for what it was, nil if
// it is new.
func (p *Pod) changedSince(was *Pod) bool {
	return was == nil || was.Gated != p.Gated || was.Node != p.Node || was.Ending != p.Ending || was.Over != p.Over ||
		len(was.Has) != len(p.Has) || p.Gated && was.Version != p.Version
}

// isUnbound reports whether a pod was placed and has no node yet.
func (p *Pod) isUnbound() bool {
	return p.Has != nil && !p.Gated && p.Node == "" && !p.Ending && !p.Over
}
