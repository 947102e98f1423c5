package podip

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/pool"
)

// subject is a pod that has, or may have, addresses of pools on this node.
type subject struct {
	uid             string
	namespace, name string
	version         string
	annotations     map[string]string
	labels          map[string]string
	text            string       // of its addresses, which somebody vouches for
	claims          string       // what its annotation says, if that is not known to be true
	bare            []netip.Addr // addresses of which only the ledger tells, or only the pod's network namespace
	// untold: the plugin is to be told of the pod once its PodIPs say the same.
	untold bool
	// conflicts are the MAC addresses of other machines that had an address when the pod was to start. It is never changed
	// in place.
	conflicts map[netip.Addr]string
	// By the watch of the node's pods.
	exists, ending, over bool
	// bound: the cluster knows that the pod has its addresses here. gone: all that is to be done for a pod that is gone
	// was done. Both hold until something of the pod changes that matters, or all are due again; looks counts
	// that.
	bound, gone bool
	// placed: the cluster knows that other nodes are to route to the pod, which has not started. It holds as long.
	placed bool
	looks  int
	// stops: the runtime has said that it stops the sandbox, and not since that it runs another one.
	stops bool
	// ended is when it was found that the pod has ended, zero if it has not, or is about to.
	ended time.Time
	said  string // the last trouble with it
}

// alive reports whether kubelet may start the pod, or has.
func (s *subject) alive() bool { return s.exists && !s.ending && !s.over }

func (s *subject) String() string {
	if s.name == "" {
		return s.uid
	}
	return s.namespace + "/" + s.name + " (" + s.uid + ")"
}

// says notes what an annotation of the pod says. Unless it is vouched for, that is a claim: what the pod is known to
// have stands.
func (s *subject) says(text string, vouched bool) {
	if s.claims = text; vouched || text == s.text {
		s.text, s.claims = text, ""
	}
}

// given are the addresses of a subject, as the controller has written them.
func (s *subject) given() ([]pool.Address, error) {
	all, err := addressesOf(s.text)
	if err != nil {
		return nil, fmt.Errorf("annotation %s of pod %s: %w", v1alpha1.AnnotationAddresses, s, err)
	}
	return all, nil
}

// addressesOf reads a text with addresses, empty if there are none.
func addressesOf(text string) (all []pool.Address, err error) {
	if text != "" {
		err = json.Unmarshal([]byte(text), &all)
	}
	return all, err
}

// addrs are the addresses of a subject.
func (s *subject) addrs() ([]netip.Addr, error) {
	given, err := s.given()
	all := slices.Clone(s.bare)
	for _, a := range given {
		if !a.Prefix.IsValid() {
			return nil, fmt.Errorf("annotation %s of pod %s: expected an address in each", v1alpha1.AnnotationAddresses, s)
		}
		if !slices.Contains(all, a.Prefix.Addr()) {
			all = append(all, a.Prefix.Addr())
		}
	}
	return all, err
}

// podTable is what is known of the pods that have, or may have, addresses of pools on the node: by the watch of its
// pods, the runtime and the node's own books. A pod is queued once something of it changes that matters. mu is taken
// after that of the follower, and before those of listing and servedPools.
type podTable struct {
	served  *servedPools
	listing *listing
	log     *slog.Logger

	mu sync.Mutex
	// queue has the UIDs of pods that are due, nil while the cluster has no pool.
	queue    workqueue.TypedRateLimitingInterface[string]
	subjects map[string]*subject
	all      map[string]bool // the UIDs of all pods of the node, by their watch
}

// begin forgets all pods, and queues those that come.
func (t *podTable) begin(queue workqueue.TypedRateLimitingInterface[string]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue, t.subjects, t.all = queue, map[string]*subject{}, map[string]bool{}
}

// end queues none any more.
func (t *podTable) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = nil
}

func (t *podTable) enqueueLocked(s *subject) {
	if t.queue != nil {
		t.queue.Forget(s.uid)
		t.queue.Add(s.uid)
	}
}

// enqueueAll has all pods checked again, also those of which nothing was left to do.
func (t *podTable) enqueueAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.subjects {
		s.bound, s.gone, s.placed = false, false, false
		s.looks++
		t.enqueueLocked(s)
	}
}

// guardChanged checks what pods claim by the guard that there is now.
func (t *podTable) guardChanged() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.subjects {
		if s.claims != "" {
			s.says(s.claims, t.served.vouchesFor(s.claims))
			s.untold = t.listing.isLost() && s.claims == ""
			t.enqueueLocked(s)
		}
	}
}

// look queues a pod: its sandbox has started or, if stops is true, stops or has gone.
func (t *podTable) look(pod ledger.Pod, annotations map[string]string, stops bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queue == nil {
		return
	}
	s := t.subjects[pod.UID]
	if s == nil {
		text := annotations[v1alpha1.AnnotationAddresses]
		if text == "" {
			return
		}
		s = &subject{uid: pod.UID, namespace: pod.Namespace, name: pod.Name, annotations: annotations}
		s.says(text, t.served.vouchesFor(text))
		t.subjects[pod.UID] = s
	}
	s.stops = stops
	t.enqueueLocked(s)
}

// conflict notes that another machine on the link has addresses of a pod.
func (t *podTable) conflict(uid, mac string, addrs []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.subjects[uid]
	if s == nil {
		return
	}
	s.conflicts = maps.Clone(s.conflicts)
	if s.conflicts == nil {
		s.conflicts = map[netip.Addr]string{}
	}
	for _, a := range addrs {
		s.conflicts[a] = mac
	}
	t.enqueueLocked(s)
}

// started forgets the conflicts of a pod that has started since.
func (t *podTable) started(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.subjects[uid]; s != nil {
		s.conflicts = nil
	}
}

// put records a pod as the API server has it. told is what the plugin has been told of its addresses. put reports
// whether the plugin is to be told now.
func (t *podTable) put(p *Pod, told string) (tells bool) {
	uid, text := string(p.UID), p.Annotations[v1alpha1.AnnotationAddresses]
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all[uid] = true
	s := t.subjects[uid]
	if s == nil && text == "" {
		return false
	}
	if s == nil {
		s = &subject{uid: uid}
		t.subjects[uid] = s
	}
	changed := !s.exists || s.ending != (p.DeletionTimestamp != nil) || s.over != p.over()
	was, claims := s.text, s.claims
	if text != "" {
		s.says(text, told == text || t.served.vouchesFor(text))
	}
	if !s.exists || s.text != was || s.claims != claims {
		changed, s.bound, s.placed = true, false, false
	}
	version := s.version
	s.namespace, s.name, s.version = p.Namespace, p.Name, p.ResourceVersion
	s.annotations, s.labels = maps.Clone(p.Annotations), p.Labels
	s.exists, s.ending, s.over = true, p.DeletionTimestamp != nil, p.over()
	// Its bar may be lost: then the PodIPs say whether the pod has ended here.
	tells = s.alive() && s.text == text && told != text
	lost := t.listing.isLost()
	s.untold, tells = tells && lost, tells && !lost
	switch {
	case changed || s.untold:
		s.gone = false
		s.looks++
		t.enqueueLocked(s)
	case version != s.version && p.Status.PodIP != "" && !s.bound && !s.gone: // it has started
		t.enqueueLocked(s)
	}
	return tells
}

// vanished records that a pod of the node was deleted.
func (t *podTable) vanished(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.all, uid)
	t.vanishedLocked(uid)
}

func (t *podTable) vanishedLocked(uid string) {
	if s := t.subjects[uid]; s != nil && s.exists {
		s.exists = false
		t.enqueueLocked(s)
	}
}

// replaceAll records the UIDs of all pods of the node, each of which was put.
func (t *podTable) replaceAll(all map[string]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = all
	for uid := range t.subjects {
		if !all[uid] {
			t.vanishedLocked(uid)
		}
	}
}

// due returns what is known of a pod now, false if it is not to be checked yet.
func (t *podTable) due(uid string) (subject, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.subjects[uid]
	if s == nil || !t.listing.isComplete() {
		return subject{}, false // all are queued with the list
	}
	switch {
	case s.exists && !s.over:
		s.ended = time.Time{}
	case s.ended.IsZero():
		s.ended = time.Now()
	}
	return *s, true
}

// get returns what is known of a pod, false if nothing is.
func (t *podTable) get(uid string) (subject, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.subjects[uid]; s != nil {
		return *s, true
	}
	return subject{uid: uid}, false
}

// uids returns the UIDs of the pods that are known, and of all pods that the API server has on the node.
func (t *podTable) uids() (known, all map[string]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	known = map[string]bool{}
	for uid := range t.subjects {
		known[uid] = true
	}
	return known, maps.Clone(t.all)
}

// settle records what was done about a pod that was due: whether it is bound, placed or gone. If it has changed since,
// it is due again, and that counts for nothing.
func (t *podTable) settle(s subject) {
	t.mu.Lock()
	defer t.mu.Unlock()
	is := t.subjects[s.uid]
	if is == nil || is.looks != s.looks {
		return
	}
	if is.gone = is.gone || s.gone; is.text == s.text {
		is.bound, is.placed = is.bound || s.bound, s.placed
	}
}

// mayConfirm reports whether the PodIPs of a pod still confirm what it claims, and whether the plugin may be told then.
func (t *podTable) mayConfirm(uid, text string) (confirmed, tells bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.subjects[uid]
	if s == nil || !t.listing.isComplete() || cmp.Or(s.claims, s.text) != text {
		return false, false
	}
	return true, s.alive()
}

// confirm records that the addresses of a pod are its own, and whether the plugin was told so.
func (t *podTable) confirm(uid, text string, told bool) subject {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.subjects[uid]
	s.says(text, true)
	s.untold = s.untold && !told
	s.looks++
	return *s
}

// remove forgets a pod.
func (t *podTable) remove(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.subjects, uid)
}

// complain logs what is wrong with a pod, once.
func (t *podTable) complain(uid string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.subjects[uid]; s != nil && s.said != err.Error() {
		s.said = err.Error()
		t.log.Warn("A pod has no address of a pool", "err", err)
	}
}

// unproven returns how many pods have ended, without the proof that they are gone, and since when at the longest. works
// is false while the cluster has no pool.
func (t *podTable) unproven() (n int, oldest time.Duration, works bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.subjects {
		if !s.ended.IsZero() && !s.gone {
			n++
			oldest = max(oldest, time.Since(s.ended))
		}
	}
	return n, oldest, t.queue != nil
}

// keepFiles learns of the pods in files that are about to be removed: nothing else may tell of them.
func (t *podTable) keepFiles(files map[string]ledger.PoolPod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for uid, f := range files {
		if f.Text != "" && t.subjects[uid] == nil {
			t.subjects[uid] = &subject{uid: uid, text: f.Text}
		}
	}
}

// learn takes over what the node itself knows of pods: by a look at the machine, the files for the plugin, and the
// addresses of pods that the API server has no more.
func (t *podTable) learn(s *sight, files map[string]ledger.PoolPod, deleted map[string][]netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	listed := t.listing.isComplete()
	know := func(uid string) *subject {
		if t.subjects[uid] == nil {
			t.subjects[uid] = &subject{uid: uid}
			t.enqueueLocked(t.subjects[uid])
		}
		return t.subjects[uid]
	}
	for uid, addrs := range deleted {
		know(uid).bare = addrs
	}
	for uid, f := range files {
		if f.Text == "" {
			continue
		}
		if of := know(uid); of.text == "" {
			of.text = f.Text
		}
	}
	for _, sandbox := range s.sandboxes {
		text := sandbox.Annotations[v1alpha1.AnnotationAddresses]
		if text == "" && t.subjects[sandbox.Pod.UID] == nil {
			continue
		}
		of := know(sandbox.Pod.UID)
		if of.text == "" && text != "" {
			of.says(text, t.served.vouchesFor(text))
		}
		if of.name == "" {
			of.namespace, of.name = sandbox.Pod.Namespace, sandbox.Pod.Name
		}
		if of.annotations == nil {
			of.annotations, of.labels = sandbox.Annotations, sandbox.Labels
		}
	}
	for _, b := range s.bound {
		uid, pod := b.uid(s), b.Pod
		if uid == "" || t.subjects[uid] == nil && (!b.foreign || !listed || t.all[uid]) {
			continue // the cluster says that it has none of a pool, or nothing does that it has one
		}
		if pod.Name == "" {
			pod = s.sandboxes[b.Attachment.ContainerID].Pod
		}
		of := know(uid)
		if of.text == "" && b.foreign && !slices.Contains(of.bare, b.Addr) {
			of.bare = append(of.bare, b.Addr)
		}
		if of.name == "" {
			of.namespace, of.name = pod.Namespace, pod.Name
		}
	}
}
