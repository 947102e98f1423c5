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
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/pool"
)

// record is what is known of a pod that has, or may have, addresses of pools on this node.
type record struct {
	uid             string
	namespace, name string
	version         string // of the API server's object, empty if it was never seen
	annotations     map[string]string
	labels          map[string]string

	// text is the annotation with its addresses, or the grant that was made of it. Anyone may have written the annotation:
	// the PodIPs say whether it is true.
	text string
	// observed are addresses that only the ledger, the pod's network namespace or a PodIP shows.
	observed []netip.Addr
	// conflicts are the MAC addresses of other machines that had an address when the pod was to start. It is never changed
	// in place.
	conflicts map[netip.Addr]string

	// netns are those that the pod was seen to have while it ran. A pod with a user namespace of its own is known by
	// nothing else once its ledger's record and its mount are gone. It is never changed in place.
	netns []ledger.Netns

	// By the watch of the node's pods.
	exists, ending, terminal bool
	// stops says that the runtime has reported that it stops the sandbox, and not since that it runs another one.
	stops bool
	// foreign says that the pod has no right to its addresses any more, though it may have them.
	foreign bool
	// ended is when it was found that the pod has ended, zero if it has not, or is about to.
	ended time.Time

	// granted says that nothing is left to do while the pod lives, gone that nothing is left to do for a pod that is gone.
	// They hold until something of the pod changes that matters, or all are due again; changes counts that.
	granted, gone bool
	changes       int
	complaint     string // what was logged last about the pod
}

// alive reports whether kubelet may start the pod, or has.
func (r *record) alive() bool { return r.exists && !r.ending && !r.terminal }

func (r *record) String() string {
	if r.name == "" {
		return r.uid
	}
	return r.namespace + "/" + r.name + " (" + r.uid + ")"
}

// learn takes over what a sandbox of the pod tells that is not known yet.
func (r *record) learn(sandbox cri.Sandbox) {
	r.text = cmp.Or(r.text, sandbox.Annotations[v1alpha1.AnnotationAddresses])
	r.learnName(sandbox.Pod.Namespace, sandbox.Pod.Name)
	if r.annotations == nil {
		r.annotations, r.labels = sandbox.Annotations, sandbox.Labels
	}
}

func (r *record) learnName(namespace, name string) {
	if r.name == "" {
		r.namespace, r.name = namespace, name
	}
}

// given are the addresses of the pod, as the controller has written them.
func (r *record) given() ([]pool.Address, error) {
	all, err := addressesOf(r.text)
	if err != nil {
		return nil, fmt.Errorf("annotation %s of pod %s: %w", v1alpha1.AnnotationAddresses, r, err)
	}
	return all, nil
}

// addressesOf reads a text with addresses, empty if there are none. Those of mode Calico are not for agents.
func addressesOf(text string) (all []pool.Address, err error) {
	if text != "" {
		err = json.Unmarshal([]byte(text), &all)
	}
	return slices.DeleteFunc(all, func(a pool.Address) bool { return a.Mode == pool.Calico }), err
}

// sought is the pod, with these addresses, to be sought on the machine.
func (r *record) sought(addrs []netip.Addr) sought { return sought{r.uid, addrs, r.netns} }

// addrs are the addresses of the pod.
func (r *record) addrs() ([]netip.Addr, error) {
	given, err := r.given()
	all := slices.Clone(r.observed)
	for _, a := range given {
		if !a.Prefix.IsValid() {
			return nil, fmt.Errorf("annotation %s of pod %s: expected an address in each entry", v1alpha1.AnnotationAddresses, r)
		}
		if !slices.Contains(all, a.Prefix.Addr()) {
			all = append(all, a.Prefix.Addr())
		}
	}
	return all, err
}

// mostEnded is how many pods are kept in mind that have ended here. That the cluster has one of them again comes from a
// backup.
const mostEnded = 4096

// podTable is what is known of the pods that have, or may have, addresses of pools on the node: by the watch of its
// pods, the runtime and the node's own books. A pod is queued once something of it changes that matters. mu is taken
// after that of the follower, and before those of listing and servedPools.
type podTable struct {
	listing *listing
	log     *slog.Logger

	mu sync.Mutex
	// queue has the UIDs of pods that are due, nil while the cluster has no pool.
	queue   workqueue.TypedRateLimitingInterface[string]
	records map[string]*record
	all     map[string]*Pod // all pods of the node, by UID, by their watch
	// ended has the pods that have ended here, oldest first: the first ones are forgotten. It outlives begin.
	ended []string
}

// begin forgets all pods, and queues those that come.
func (t *podTable) begin(queue workqueue.TypedRateLimitingInterface[string]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue, t.records, t.all = queue, map[string]*record{}, map[string]*Pod{}
}

// end stops the queueing of pods.
func (t *podTable) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = nil
}

func (t *podTable) enqueueLocked(r *record) {
	if t.queue != nil {
		t.queue.Forget(r.uid)
		t.queue.Add(r.uid)
	}
}

// enqueueAll queues all pods to be checked again, also those for which nothing was left to do. After a restore, what
// was written may be lost, and its version that of something else.
func (t *podTable) enqueueAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.records {
		r.granted, r.gone = false, false
		r.changes++
		t.enqueueLocked(r)
	}
}

// look queues a pod: its sandbox has started or, if stops is true, stops or has gone. The end of a sandbox tells
// nothing of a pod that is not known: all that there was to do may be done.
func (t *podTable) look(pod ledger.Pod, annotations map[string]string, stops bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queue == nil {
		return
	}
	r := t.records[pod.UID]
	if r == nil {
		text := annotations[v1alpha1.AnnotationAddresses]
		if stops || text == "" {
			return
		}
		r = &record{uid: pod.UID, namespace: pod.Namespace, name: pod.Name, annotations: annotations, text: text}
		t.records[pod.UID] = r
	}
	r.stops = stops
	t.enqueueLocked(r)
}

// conflict notes that another machine on the link has addresses of a pod.
func (t *podTable) conflict(uid, mac string, addrs []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.records[uid]
	if r == nil {
		return
	}
	r.conflicts = maps.Clone(r.conflicts)
	if r.conflicts == nil {
		r.conflicts = map[netip.Addr]string{}
	}
	for _, a := range addrs {
		r.conflicts[a] = mac
	}
	t.enqueueLocked(r)
}

// started forgets the conflicts of a pod that has started since.
func (t *podTable) started(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[uid]; r != nil {
		r.conflicts = nil
	}
}

// put records a pod as the API server has it.
func (t *podTable) put(p *Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all[string(p.UID)] = p
	if t.records[string(p.UID)] != nil || p.Annotations[v1alpha1.AnnotationAddresses] != "" {
		t.putLocked(p)
	}
}

func (t *podTable) putLocked(p *Pod) {
	uid, text := string(p.UID), p.Annotations[v1alpha1.AnnotationAddresses]
	r := t.records[uid]
	if r == nil {
		r = &record{uid: uid}
		t.records[uid] = r
	}
	ending, terminal := p.DeletionTimestamp != nil, p.terminal()
	goesOn := r.ending != ending || r.terminal != terminal
	// How a pod has ended does not matter.
	renewed := !r.exists || text != "" && r.text != text
	changed := renewed || r.alive() == (ending || terminal)
	started := r.version != p.ResourceVersion && p.Status.PodIP != "" && r.netns == nil && !r.gone
	if text != "" {
		r.text = text
	}
	r.namespace, r.name, r.version = p.Namespace, p.Name, p.ResourceVersion
	r.annotations, r.labels = maps.Clone(p.Annotations), p.Labels
	r.exists, r.ending, r.terminal = true, ending, terminal
	if changed {
		r.gone, r.granted = false, r.granted && !renewed
		r.changes++
	}
	if changed || goesOn || started {
		t.enqueueLocked(r)
	}
}

// vanished records that a pod of the node was deleted.
func (t *podTable) vanished(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.all, uid)
	t.vanishedLocked(uid)
}

func (t *podTable) vanishedLocked(uid string) {
	if r := t.records[uid]; r != nil && r.exists {
		r.exists = false
		t.enqueueLocked(r)
	}
}

// replaceAll records the UIDs of all pods of the node. Each of them must have been put.
func (t *podTable) replaceAll(all map[string]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.all, func(uid string, _ *Pod) bool { return !all[uid] })
	for uid := range t.records {
		if !all[uid] {
			t.vanishedLocked(uid)
		}
	}
}

// due returns what is known of a pod now, false if it is not to be checked yet.
func (t *podTable) due(uid string) (record, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.records[uid]
	if r == nil || !t.listing.isComplete() {
		return record{}, false // all are queued with the list
	}
	switch {
	case r.exists && !r.terminal:
		r.ended = time.Time{}
	case r.ended.IsZero():
		r.ended = time.Now()
	}
	return *r, true
}

// get returns what is known of a pod, false if nothing is.
func (t *podTable) get(uid string) (record, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[uid]; r != nil {
		return *r, true
	}
	return record{uid: uid}, false
}

// uids returns the UIDs of the pods that are known, and of all pods that the API server has on the node.
func (t *podTable) uids() (known, all map[string]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	known, all = map[string]bool{}, map[string]bool{}
	for uid := range t.records {
		known[uid] = true
	}
	for uid := range t.all {
		all[uid] = true
	}
	return known, all
}

// settle records what was done about a pod that was due. If it has changed since, it is due again, and that counts for
// nothing.
func (t *podTable) settle(r record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if is := t.records[r.uid]; is != nil && is.changes == r.changes {
		is.granted, is.gone, is.netns = r.granted, is.gone || r.gone, r.netns
	}
}

// setForeign notes that a pod has no right to its addresses any more.
func (t *podTable) setForeign(uid string, foreign bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[uid]; r != nil {
		r.foreign = foreign
	}
}

func (t *podTable) isForeign(uid string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.records[uid]
	return r != nil && r.foreign
}

// noteEnded notes that a pod has ended here for good.
func (t *podTable) noteEnded(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.ended, uid) {
		t.ended = append(t.ended[max(0, len(t.ended)+1-mostEnded):], uid)
	}
}

// hasEnded reports whether a pod has ended here, as far as that is kept in mind.
func (t *podTable) hasEnded(uid string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Contains(t.ended, uid)
}

// remove forgets a pod that the API server no longer has.
func (t *podTable) remove(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[uid]; r != nil && !r.exists {
		delete(t.records, uid)
	}
}

// complain logs what is wrong with a pod, once.
func (t *podTable) complain(uid string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[uid]; r != nil && r.complaint != err.Error() {
		r.complaint = err.Error()
		t.log.Warn("Pod has no pool address", "err", err)
	}
}

// unproven returns how many pods have ended, without the proof that they are gone, and since when at the longest. works
// is false while the cluster has no pool.
func (t *podTable) unproven() (n int, oldest time.Duration, works bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.records {
		if !r.ended.IsZero() && !r.gone {
			n++
			oldest = max(oldest, time.Since(r.ended))
		}
	}
	return n, oldest, t.queue != nil
}

// named is a PodIP that names this node.
type named struct {
	addr            netip.Addr
	uid             string
	namespace, name string
}

// learn takes over what else tells of pods: a look at the machine, the grants, the addresses of pods that the API
// server no longer has, and the PodIPs that name this node.
func (t *podTable) learn(s *sight, grants map[string]string, deleted map[string][]netip.Addr, ips []named) {
	t.mu.Lock()
	defer t.mu.Unlock()
	listed := t.listing.isComplete()
	know := func(uid string) *record {
		if t.records[uid] == nil {
			t.records[uid] = &record{uid: uid}
			t.enqueueLocked(t.records[uid])
		}
		return t.records[uid]
	}
	observe := func(r *record, a netip.Addr) {
		if r.text == "" && !slices.Contains(r.observed, a) {
			r.observed = append(slices.Clone(r.observed), a)
			r.changes++
			t.enqueueLocked(r)
		}
	}
	for uid, addrs := range deleted {
		know(uid).observed = addrs
	}
	for uid, text := range grants {
		r := know(uid)
		r.text = cmp.Or(r.text, text)
	}
	for uid, r := range t.records {
		if r.granted && grants[uid] == "" { // somebody has deleted it
			t.enqueueLocked(r)
		}
	}
	for _, ip := range ips {
		r := know(ip.uid)
		r.learnName(ip.namespace, ip.name)
		if p := t.all[ip.uid]; p != nil && r.version == "" { // without the annotation the watch has passed it by
			t.putLocked(p)
		}
		observe(r, ip.addr)
	}
	for _, sandbox := range s.sandboxes {
		if sandbox.Annotations[v1alpha1.AnnotationAddresses] != "" || t.records[sandbox.Pod.UID] != nil {
			know(sandbox.Pod.UID).learn(sandbox)
		}
	}
	for _, b := range s.bound {
		uid, pod := b.uid(s), b.Pod
		if uid == "" || t.records[uid] == nil && (!b.foreign || !listed || t.all[uid] != nil) {
			continue // the cluster says that it has none of a pool, or nothing does that it has one
		}
		if pod.Name == "" {
			pod = s.sandboxes[b.Attachment.ContainerID].Pod
		}
		r := know(uid)
		if b.foreign {
			observe(r, b.Addr)
		}
		r.learnName(pod.Namespace, pod.Name)
	}
}
