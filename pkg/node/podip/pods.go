package podip

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
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

// Look queues a pod: its sandbox has started or, if stops is true, stops or has gone.
func (k *Keeper) Look(pod ledger.Pod, annotations map[string]string, stops bool) {
	if k == nil || ledger.ValidPodUID(pod.UID) != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.queue == nil {
		return
	}
	s := k.subjects[pod.UID]
	if s == nil {
		text := annotations[v1alpha1.AnnotationAddresses]
		if text == "" {
			return
		}
		s = &subject{uid: pod.UID, namespace: pod.Namespace, name: pod.Name, annotations: annotations}
		s.says(text, k.served.vouchesFor(text))
		k.subjects[pod.UID] = s
	}
	s.stops = stops
	k.enqueue(s)
}

// Conflict notes that a pod could not start, because another machine on the link has an address of it. If the pod is
// not known yet, the next ADD says so again.
func (k *Keeper) Conflict(e ledger.Event) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.subjects[e.Pod.UID]
	if s == nil || e.MAC == "" {
		return
	}
	s.conflicts = maps.Clone(s.conflicts)
	if s.conflicts == nil {
		s.conflicts = map[netip.Addr]string{}
	}
	for _, a := range e.Addrs {
		s.conflicts[a] = e.MAC
	}
	k.enqueue(s)
}

// started forgets the conflicts of a pod that has started since.
func (k *Keeper) started(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.subjects[uid]; s != nil {
		s.conflicts = nil
	}
}

// enqueue queues a subject at once. k.mu is held.
func (k *Keeper) enqueue(s *subject) {
	if k.queue != nil {
		k.queue.Forget(s.uid)
		k.queue.Add(s.uid)
	}
}

// enqueueAll queues every subject. k.mu is held.
func (k *Keeper) enqueueAll() {
	for _, s := range k.subjects {
		s.bound, s.gone, s.placed = false, false, false
		s.looks++
		k.enqueue(s)
	}
}

// deletedPods returns the sandboxes of pods that the cluster seems to have no more and that the agent does not know.
func (k *Keeper) deletedPods(s *sight) (all []cri.Sandbox) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, sandbox := range s.sandboxes {
		uid := sandbox.Pod.UID
		if k.listed && !k.all[uid] && k.subjects[uid] == nil && ledger.ValidPodUID(uid) == nil &&
			sandbox.Annotations[v1alpha1.AnnotationAddresses] == "" {
			all = append(all, sandbox)
		}
	}
	return all
}

func (k *Keeper) isListed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.listed
}
