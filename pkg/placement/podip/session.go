package podip

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// session is a Book, and what belongs to it. The mutex of state guards it.
type session struct {
	book *pool.Book
	// ready says that all has been listed since the Book was begun.
	ready bool
	// invalid says of pods what of their annotations is not valid.
	invalid map[pool.UID]error
	gated   map[pool.UID]*wait
	// refused has the pods with addresses for which the scheduler has no room, and since when that is known.
	refused map[pool.UID]time.Time
	// ending has the pods with addresses of mode Calico that are being deleted.
	ending map[pool.UID]struct{}
	// tookBack is when a pool took an address back from such a pod last.
	tookBack map[string]time.Time
	// expires is status.expires, if it is there.
	expires map[netip.Addr]time.Time
	said    map[string]said
	// before has the pods as they were known when all were listed past the cache, and ended those whose end was seen
	// since; both are nil at other times.
	before map[pool.UID]*pool.Pod
	ended  map[pool.UID]bool
	// stale is closed when the Book is no longer good for anything.
	stale chan struct{}
	c     *state
}

// errStale ends a session.
var errStale = errors.New("the API server's data were restored, or all nodes have answered, or other reports count: " +
	"listing everything again")

func (s *session) setAudit(r pool.Audit) {
	s.c.mu.Lock()
	defer s.c.unlock()
	was := s.book.Stale()
	s.book.SetAudit(r)
	if s.book.Stale() && s.ready || s.book.Stale() && !was {
		s.restartLocked()
	}
}

// restartLocked ends the session: no further decision is made with it, and another session begins.
func (s *session) restartLocked() {
	s.ready = false
	select {
	case <-s.stale:
	default:
		close(s.stale)
	}
}

// setIPLocked puts in a PodIP as it was watched, or as a write returned it.
func (s *session) setIPLocked(o *stayputv1alpha1.PodIP) {
	p, err := pool.PodIPOf(o, s.c.longest)
	if err != nil {
		return // its definition does not allow such a name
	}
	was := s.book.PodIP(p.Addr)
	if was != nil && pool.Newer(was.Version, p.Version) {
		return
	}
	s.book.SetPodIP(p)
	if was == nil {
		s.noteSingleLocked(&p)
	}
	if delete(s.expires, p.Addr); o.Status.Expires != nil {
		s.expires[p.Addr] = o.Status.Expires.Time
	}
}

// setIP puts in a PodIP as a write returned it.
func (s *session) setIP(o *stayputv1alpha1.PodIP) {
	s.c.mu.Lock()
	defer s.c.unlock()
	s.setIPLocked(o)
}

// noteSingleLocked has an address outside of its pool's subnet reserved and told or, if it is about to go, no more.
func (s *session) noteSingleLocked(p *pool.PodIP) {
	if p == nil || p.Mode != pool.Calico {
		return
	}
	if of := s.book.Pool(p.Pool); of != nil && !of.Range.Subnet.Contains(p.Addr) {
		signal(s.c.toReserve)
		s.c.announce()
	}
}

func (s *session) removeIPLocked(a netip.Addr) {
	s.noteSingleLocked(s.book.PodIP(a))
	s.book.RemovePodIP(a)
	delete(s.expires, a)
	delete(s.said, stayputv1alpha1.PodIPName(a))
}

// setPod puts a pod in, if it has to do with pools. listed: past the cache.
func (s *session) setPod(pod *cluster.Pod, listed bool) {
	s.c.mu.Lock()
	defer s.c.unlock()
	s.setPodLocked(pod, listed)
}

// setPodLocked puts a pod in. A pod that was listed past the cache replaces any version that was known, which may be
// the newer one after a restore, but does not override what has happened since.
func (s *session) setPodLocked(pod *cluster.Pod, listed bool) {
	uid := pod.GetUID()
	was := s.book.Pod(uid)
	in, spiderpool := s.c.namespaces[pod.GetNamespace()], s.c.words == serving
	if was == nil && !asks(pod, in, spiderpool) && s.book.Given(uid) == nil {
		return
	}
	core := pod.Brief()
	overrules := listed && was == s.before[uid]
	if core.Spec.HostNetwork || listed && s.ended[uid] || pool.Placed(was, core.ResourceVersion) ||
		was != nil && !overrules && pool.Newer(was.Version, core.ResourceVersion) {
		return
	}
	current, err := podOf(core, in, spiderpool, s.c.workloads.Numbers(core), s.c.longest)
	if pod.TooLong() {
		err = errors.New(cluster.TooLongNote + ": the pod stays gated, without an address")
	}
	if above, ok := s.c.above.Get(ownerOf(&current)); ok {
		current.Workload = above.(pool.Workload)
	}
	if err == nil && current.Assigned != nil && !s.vouchedLocked(&current) {
		current.Assigned = nil
		err = invalid(stayputv1alpha1.AnnotationAddresses, "the controller has not written it: delete the pod and create it "+
			"again without it")
	}
	if delete(s.invalid, uid); err != nil {
		s.invalid[uid] = err
	}
	if _, says := core.Annotations[stayputv1alpha1.AnnotationAddresses]; says && current.Assigned == nil {
		return // what it has is not known: what was known of it stands
	}
	s.book.SetPod(current)
	ofCalico := func(a pool.Address) bool { return a.Mode == pool.Calico }
	if current.Ending && slices.ContainsFunc(current.Assigned, ofCalico) {
		s.ending[uid] = struct{}{}
		signal(s.c.toDate)
	}
	if err != nil { // it is given nothing, and keeps no other pod from it
		s.book.StopWaiting(uid)
	}
	s.noteGateLocked(&current, home.LastGate(core), was == nil, s.c.now())
	if current.Node != "" {
		delete(s.refused, uid)
	} else if _, refused := home.Refused(core); refused && !current.Gated && s.refused[uid].IsZero() {
		s.c.enqueueLocked(current.Key()) // see endBarren
	}
}

// vouchedLocked reports whether the addresses that a pod has by its annotation are its own by the PodIPs. Of a pod that
// is known, what is known stands.
func (s *session) vouchedLocked(is *pool.Pod) bool {
	if was := s.book.Pod(is.UID); was != nil && slices.EqualFunc(was.Assigned, is.Assigned, same) && was.Assigned != nil {
		return true
	}
	return !slices.ContainsFunc(is.Assigned, func(h pool.Address) bool {
		ip := s.book.PodIP(h.Prefix.Addr())
		return ip == nil || ip.PodUID != is.UID
	})
}

func same(x, y pool.Address) bool { return x.Prefix == y.Prefix && x.Interface == y.Interface }

// removePod takes out a pod that the cluster has no more, and had on this node, if that is known. version is that of
// its deletion, empty if its watch was interrupted.
func (s *session) removePod(uid pool.UID, node, version string) {
	s.c.mu.Lock()
	defer s.c.unlock()
	if s.ended != nil {
		s.ended[uid] = true
	}
	is := s.book.Pod(uid)
	if is == nil {
		return
	}
	if is.Node == "" && node != "" {
		again := *is
		again.Node = node
		s.book.SetPod(again)
	}
	s.book.RemovePod(uid, version, s.c.now())
	delete(s.gated, uid)
	delete(s.refused, uid)
	delete(s.ending, uid)
	delete(s.invalid, uid)
	delete(s.said, string(uid))
}

// said is what was said of an object last, and when.
type said struct {
	note string
	at   time.Time
}

// firstOf reports whether a note about an object is to be written: the last one about it was another, or was written
// long enough ago.
func (s *session) firstOf(about, note string) bool {
	s.c.mu.Lock()
	defer s.c.unlock()
	last, now := s.said[about], s.c.now()
	if last.note == note && now.Sub(last.at) < cluster.SayAgainAfter {
		return false
	}
	s.said[about] = said{note, now}
	return true
}

// unreserve gives back the addresses of writes that were not made, or may not have been made.
func (s *session) unreserve(writes []pool.Write) {
	s.c.mu.Lock()
	defer s.c.unlock()
	for _, w := range writes {
		if create, ok := w.(pool.CreateIP); ok {
			s.book.Unreserve(create.PodIP.Addr)
		}
	}
}

// notePlaced notes that a pod has been placed.
func (s *session) notePlaced(w pool.PlacePod) {
	s.c.mu.Lock()
	defer s.c.unlock()
	w.NoteIn(s.book)
}
