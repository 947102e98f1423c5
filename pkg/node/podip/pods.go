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
	"github.com/stayput/stayput/pkg/mailbox"
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

	text     string       // the annotation with its addresses, empty if nothing vouches for one
	claimed  string       // what its annotation says, empty if that is known to be true
	observed []netip.Addr // addresses that only the ledger, or only the pod's network namespace, shows
	// unconfirmed says that the plugin is to be told of the pod once its PodIPs say the same.
	unconfirmed bool
	// conflicts are the MAC addresses of other machines that had an address when the pod was to start. It is never changed
	// in place.
	conflicts map[netip.Addr]string

	// written has the PodIPs as they were once this agent had written their status; by now they may be others. It is never
	// changed in place.
	written map[netip.Addr]*v1alpha1.PodIP

	// netns are those that the pod was seen to have when it was bound. A pod with a user namespace of its own is known by
	// nothing else once its ledger's record and its mount are gone. It is never changed in place.
	netns []ledger.Netns

	// By the watch of the node's pods.
	exists, ending, terminal bool
	// stops says that the runtime has reported that it stops the sandbox, and not since that it runs another one.
	stops bool
	// ended is when it was found that the pod has ended, zero if it has not, or is about to.
	ended time.Time

	// bound says that the cluster knows that the pod has its addresses here; placed, that the cluster knows that other
	// nodes are to route to the pod, which has not started. gone says that all that is to be done for a pod that is gone
	// was done. They hold until something of the pod changes that matters, or all are due again; changes counts that.
	bound, placed, gone bool
	changes             int
	complaint           string // what was logged last about the pod
}

// alive reports whether kubelet may start the pod, or has.
func (r *record) alive() bool { return r.exists && !r.ending && !r.terminal }

func (r *record) String() string {
	if r.name == "" {
		return r.uid
	}
	return r.namespace + "/" + r.name + " (" + r.uid + ")"
}

// setText notes what an annotation of the pod says. Unless it is vouched for, that is a claim: what the pod is known to
// have stands.
func (r *record) setText(text string, vouched bool) {
	if r.claimed = text; vouched || text == r.text {
		r.text, r.claimed = text, ""
	}
}

// learn takes over what a sandbox of the pod tells that is not known yet.
func (r *record) learn(sandbox cri.Sandbox, served *servedPools) {
	if text := sandbox.Annotations[v1alpha1.AnnotationAddresses]; r.text == "" && text != "" {
		r.setText(text, served.vouchesFor(text))
	}
	if r.name == "" {
		r.namespace, r.name = sandbox.Pod.Namespace, sandbox.Pod.Name
	}
	if r.annotations == nil {
		r.annotations, r.labels = sandbox.Annotations, sandbox.Labels
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

// podTable is what is known of the pods that have, or may have, addresses of pools on the node: by the watch of its
// pods, the runtime and the node's own books. A pod is queued once something of it changes that matters. mu is taken
// after that of the follower, and before those of listing and servedPools.
type podTable struct {
	served  *servedPools
	listing *listing
	log     *slog.Logger

	mu sync.Mutex
	// queue has the UIDs of pods that are due, nil while the cluster has no pool.
	queue   workqueue.TypedRateLimitingInterface[string]
	records map[string]*record
	all     map[string]bool // the UIDs of all pods of the node, by their watch
}

// begin forgets all pods, and queues those that come.
func (t *podTable) begin(queue workqueue.TypedRateLimitingInterface[string]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue, t.records, t.all = queue, map[string]*record{}, map[string]bool{}
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
		r.bound, r.gone, r.placed, r.written = false, false, false, nil
		r.changes++
		t.enqueueLocked(r)
	}
}

// guardChanged checks what pods claim by the guard that there is now.
func (t *podTable) guardChanged() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.records {
		if r.claimed != "" {
			r.setText(r.claimed, t.served.vouchesFor(r.claimed))
			r.unconfirmed = t.listing.isLost() && r.claimed == ""
			t.enqueueLocked(r)
		}
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
		r = &record{uid: pod.UID, namespace: pod.Namespace, name: pod.Name, annotations: annotations}
		r.setText(text, t.served.vouchesFor(text))
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

// wrote notes the API server's answer to a write of a PodIP's status, nil if it failed. If the pod has changed since it
// was due, or all are due again, the answer is not noted.
func (t *podTable) wrote(r record, a netip.Addr, ip *v1alpha1.PodIP) {
	t.mu.Lock()
	defer t.mu.Unlock()
	is := t.records[r.uid]
	if is == nil {
		return
	}
	is.written = maps.Clone(is.written)
	if ip == nil || is.changes != r.changes {
		delete(is.written, a)
		return
	}
	if is.written == nil {
		is.written = map[netip.Addr]*v1alpha1.PodIP{}
	}
	ip.ManagedFields = nil
	is.written[a] = ip
}

// started forgets the conflicts of a pod that has started since.
func (t *podTable) started(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.records[uid]; r != nil {
		r.conflicts = nil
	}
}

// put records a pod as the API server has it. told is what the plugin has been told of its addresses. put reports
// whether the plugin is to be told now.
func (t *podTable) put(p *Pod, told string) (tells bool) {
	uid, text := string(p.UID), p.Annotations[v1alpha1.AnnotationAddresses]
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all[uid] = true
	r := t.records[uid]
	if r == nil && text == "" {
		return false
	}
	if r == nil {
		r = &record{uid: uid}
		t.records[uid] = r
	}
	ending, terminal := p.DeletionTimestamp != nil, p.terminal()
	goesOn := r.ending != ending || r.terminal != terminal
	// How a pod has ended does not matter.
	changed := !r.exists || r.alive() == (ending || terminal)
	was, claims := r.text, r.claimed
	if text != "" {
		r.setText(text, told == text || t.served.vouchesFor(text))
	}
	if !r.exists || r.text != was || r.claimed != claims {
		changed, r.bound, r.placed = true, false, false
	}
	version := r.version
	r.namespace, r.name, r.version = p.Namespace, p.Name, p.ResourceVersion
	r.annotations, r.labels = maps.Clone(p.Annotations), p.Labels
	r.exists, r.ending, r.terminal = true, ending, terminal
	// Its bar may be lost: then the PodIPs say whether the pod has ended here. Nothing tells of the loss if the Node was
	// deleted, too. So they are asked for any pod of the first list: a pod that comes later has had no bar that was lost,
	// unless a restore brings it back, and then all are listed again.
	tells = r.alive() && r.text == text && told != text
	doubted := r.unconfirmed || t.listing.isLost() || !t.listing.isComplete()
	r.unconfirmed, tells = tells && doubted, tells && !doubted
	switch {
	case changed || r.unconfirmed:
		r.gone = false
		r.changes++
		t.enqueueLocked(r)
	case goesOn, version != r.version && p.Status.PodIP != "" && !r.bound && !r.gone: // its end goes on, or it has started
		t.enqueueLocked(r)
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
	if r := t.records[uid]; r != nil && r.exists {
		r.exists = false
		t.enqueueLocked(r)
	}
}

// replaceAll records the UIDs of all pods of the node. Each of them must have been put.
func (t *podTable) replaceAll(all map[string]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = all
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
	known = map[string]bool{}
	for uid := range t.records {
		known[uid] = true
	}
	return known, maps.Clone(t.all)
}

// settle records what was done about a pod that was due: whether it is bound, placed or gone. If it has changed since,
// it is due again, and that counts for nothing.
func (t *podTable) settle(r record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	is := t.records[r.uid]
	if is == nil || is.changes != r.changes {
		return
	}
	if is.gone = is.gone || r.gone; is.text == r.text {
		is.bound, is.placed = is.bound || r.bound, r.placed
		is.netns = r.netns
	}
}

// mayConfirm reports whether the PodIPs of a pod still confirm what it claims, and whether the plugin may be told then.
func (t *podTable) mayConfirm(uid, text string) (confirmed, tells bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.records[uid]
	if r == nil || !t.listing.isComplete() || cmp.Or(r.claimed, r.text) != text {
		return false, false
	}
	return true, r.alive()
}

// confirm records that the addresses of a pod are its own, and whether the plugin was told so.
func (t *podTable) confirm(uid, text string, told bool) record {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.records[uid]
	r.setText(text, true)
	r.unconfirmed = r.unconfirmed && !told
	r.changes++
	return *r
}

// remove forgets a pod.
func (t *podTable) remove(uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.records, uid)
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

// keepFiles learns of the pods in files that are about to be removed: nothing else may tell of them.
func (t *podTable) keepFiles(files map[string]mailbox.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for uid, f := range files {
		if f.Text != "" && t.records[uid] == nil {
			t.records[uid] = &record{uid: uid, text: f.Text}
		}
	}
}

// learn takes over what the node itself knows of pods: by a look at the machine, the files for the plugin, and the
// addresses of pods that the API server no longer has.
func (t *podTable) learn(s *sight, files map[string]mailbox.Pod, deleted map[string][]netip.Addr) {
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
	for uid, addrs := range deleted {
		know(uid).observed = addrs
	}
	for uid, f := range files {
		if f.Text == "" {
			continue
		}
		if r := know(uid); r.text == "" {
			r.text = f.Text
		}
	}
	for _, sandbox := range s.sandboxes {
		if sandbox.Annotations[v1alpha1.AnnotationAddresses] != "" || t.records[sandbox.Pod.UID] != nil {
			know(sandbox.Pod.UID).learn(sandbox, t.served)
		}
	}
	for _, b := range s.bound {
		uid, pod := b.uid(s), b.Pod
		if uid == "" || t.records[uid] == nil && (!b.foreign || !listed || t.all[uid]) {
			continue // the cluster says that it has none of a pool, or nothing does that it has one
		}
		if pod.Name == "" {
			pod = s.sandboxes[b.Attachment.ContainerID].Pod
		}
		r := know(uid)
		if r.text == "" && b.foreign && !slices.Contains(r.observed, b.Addr) {
			r.observed = append(r.observed, b.Addr)
		}
		if r.name == "" {
			r.namespace, r.name = pod.Namespace, pod.Name
		}
	}
}
