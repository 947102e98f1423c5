package pool

import (
	"iter"
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

// waiting knows what waits for what, and what has been woken since it was drained: all keys for which a decision may be
// another one than before.
type waiting struct {
	facts
	lines   lines
	woken   []Key // in order
	pending map[Key]struct{}
	// waits are the pods that wait, with the addresses that they wait for. on is the same by address. takers are those
	// that take any address, which may be one of their own once that is free.
	waits  map[UID][]netip.Addr
	on     index[netip.Addr, UID]
	takers index[Owner, UID]
	// silent are the addresses that wait for what nodes say.
	silent map[netip.Addr]silence
}

// silence is since when an address waits for what nodes say of a pod that is deleted.
type silence struct {
	pod      UID
	since    time.Time
	operator bool // only an operator can end it
}

func (w *waiting) wake(keys ...Key) {
	for _, k := range keys {
		if _, woken := w.pending[k]; !woken {
			w.pending[k] = struct{}{}
			w.woken = append(w.woken, k)
		}
	}
}

// noteWait notes what a pod waits for, if it does.
func (w *waiting) noteWait(uid UID, plan Plan) {
	pod := w.pods[uid]
	for _, a := range w.waits[uid] {
		w.on.remove(a, uid)
	}
	delete(w.waits, uid)
	if pod == nil {
		return
	}
	w.takers.remove(ownerOf(pod.Namespace, pod.Name, pod.Identity), uid)
	if plan.Reason == "" {
		return
	}
	w.waits[uid] = plan.Addrs
	for _, a := range plan.Addrs {
		w.on.add(a, uid)
	}
	if pod.takesAny() {
		w.takers.add(ownerOf(pod.Namespace, pod.Name, pod.Identity), uid)
	}
}

// noteSilence notes whether an address waits for what nodes say.
func (w *waiting) noteSilence(a netip.Addr, plan Plan, now time.Time) {
	old := w.silent[a]
	if delete(w.silent, a); w.Settled(a) {
		return
	}
	s := silence{operator: plan.Remedy != ""}
	if w.unproven(a) {
		s.pod, s.since = w.ips[a].PodUID, now
		if old.pod == s.pod {
			s.since = old.since
		}
	}
	w.silent[a] = s
}

// Unproven calls visit for each address whose pod is deleted and may still have it, with the time since when that is
// known, and whether only an operator can end it.
func (w *waiting) Unproven(visit func(since time.Time, operator bool)) {
	for a, s := range w.silent {
		if w.unproven(a) {
			visit(s.since, s.operator)
		}
	}
}

// Woken returns what is to be decided about because something has changed since the last call. Of the pods that wait
// for an address that becomes free it has only as many as there are addresses, the oldest first.
func (w *waiting) Woken(now time.Time) []Key {
	for pool := range w.lines.stirred {
		w.wakePods(slices.Values(w.next(pool, now)))
	}
	clear(w.lines.stirred)
	all := w.woken
	if len(all) > 0 {
		w.woken, w.pending = nil, map[Key]struct{}{} // to clear one takes time by the most that it ever had
	}
	return all
}

// WakeAll wakes everything, the pods by their age.
func (w *waiting) WakeAll() {
	w.wake(RecallKey)
	for _, a := range w.Addresses() {
		w.wake(KeyOfAddress(a))
	}
	for _, p := range slices.SortedFunc(maps.Values(w.pods), older) {
		w.wake(p.Key())
	}
	w.wakePools()
}

// WakeWaiting wakes what waits for something that no change announces, such as time that passes. It is called from time
// to time.
func (w *waiting) WakeWaiting() {
	for uid := range w.waits {
		p := w.pods[uid]
		if _, inLine := w.lines.pools[uid]; !inLine || p.takesAny() {
			w.wake(p.Key())
		}
	}
	for a := range w.silent {
		w.wake(KeyOfAddress(a))
	}
	for name := range w.pools {
		w.lines.stir(name)
	}
	w.wake(RecallKey)
	w.wakePools()
}

func (w *waiting) wakePods(uids iter.Seq[UID]) {
	for uid := range uids {
		if p := w.pods[uid]; p != nil {
			w.wake(p.Key())
		}
	}
}

// wakePlaces wakes every pod that waits.
func (w *waiting) wakePlaces() { w.wakePods(maps.Keys(w.waits)) }

func (w *waiting) wakePools() {
	for name := range w.pools {
		w.wake(KeyOfPool(name))
	}
}

// wakeChanged wakes what a pool bears upon that has changed or is gone: pods, and pools that it overlaps.
func (w *waiting) wakeChanged() {
	w.wakePlaces()
	w.wakePools()
}

// wakeAddress wakes an address, and the pods that wait for it.
func (w *waiting) wakeAddress(a netip.Addr) {
	w.wake(KeyOfAddress(a))
	w.wakePods(maps.Keys(w.on[a]))
	if p := w.ips[a]; p != nil && !w.pods[p.PodUID].alive() {
		w.wakePods(maps.Keys(w.takers[p.owner()]))
	}
}

// wakeMoved wakes what a PodIP bears upon that has changed, or is gone.
func (w *waiting) wakeMoved(p *PodIP) {
	w.wakeAddress(p.Addr)
	w.wake(KeyOfPool(p.Pool), Key{Kind: KeyPod, Namespace: p.Namespace, Name: p.PodName})
}

// wakeBorne wakes the addresses that a pod bears upon.
func (w *waiting) wakeBorne(p *Pod) {
	for _, a := range w.About(p) {
		w.wakeAddress(a)
	}
}

// wakeSilent wakes all that waits for what nodes say.
func (w *waiting) wakeSilent() {
	w.wake(RecallKey)
	for a := range w.silent {
		w.wake(KeyOfAddress(a))
	}
	for _, uids := range w.on {
		w.wakePods(maps.Keys(uids))
	}
	for _, uids := range w.takers {
		w.wakePods(maps.Keys(uids))
	}
}

// changedSince reports whether there may be something to do for a pod that was not to be done for what it was, nil if
// it is new.
func (p *Pod) changedSince(old *Pod) bool {
	return old == nil || old.Gated != p.Gated || old.Node != p.Node || old.Ending != p.Ending ||
		old.Terminal != p.Terminal || len(old.Assigned) != len(p.Assigned) || p.Gated && old.Version != p.Version ||
		(old.ReportedIP != p.ReportedIP || old.Sandboxless != p.Sandboxless || old.Noted != p.Noted) &&
			slices.ContainsFunc(p.Assigned, func(a Address) bool { return a.Mode == Calico })
}

// isUnbound reports whether a pod was placed and has no node yet.
func (p *Pod) isUnbound() bool {
	return p.Assigned != nil && !p.Gated && p.Node == "" && p.alive()
}
