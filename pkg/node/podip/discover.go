package podip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/wake"
)

const (
	// discoverEvery is between two looks at the node's own books, sweepEvery between two sweeps of old bars.
	discoverEvery, discoverRetry = 5 * time.Minute, 5 * time.Second
	sweepEvery                   = 12 * time.Hour
)

// discovers looks for pods in the node's own books, and among those that run, that the cluster may have no more.
func (k *Keeper) discovers(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-k.listedNow:
		}
		listed := k.isListed() // until then not all that the books have can be told from ordinary pods
		err := k.discover(ctx)
		k.troubles.note("books", err)
		wait := discoverEvery
		if err != nil || !listed {
			wait = discoverRetry
		}
		timer.Reset(wait)
	}
}

// addrsOfDeleted returns the addresses of pools that such pods have, by UID. What one of them has may be unknown, as of
// a sandbox that has just gone: the error says so, and the others count.
func (k *Keeper) addrsOfDeleted(ctx context.Context, pods []cri.Sandbox) (map[string][]netip.Addr, error) {
	if len(pods) == 0 {
		return nil, nil
	}
	s, err := k.machine.see(ctx, true)
	if err != nil {
		return nil, err
	}
	all := map[string][]netip.Addr{}
	var errs []error
	for _, sandbox := range pods {
		if _, there := s.sandboxes[sandbox.ID]; !there {
			continue
		}
		addrs, err := k.addrsInside(ctx, s, sandbox)
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s, which the cluster has no more: %w", sandbox.Pod, err))
		} else if addrs != nil {
			all[sandbox.Pod.UID] = append(all[sandbox.Pod.UID], addrs...)
		}
	}
	return all, errors.Join(errs...)
}

// addrsInside returns the addresses of pools that a sandbox has. Of a pod that another program has started, and that
// was taken over, neither its sandbox nor a ledger tells one: its network namespace does, and the PodIP.
func (k *Keeper) addrsInside(ctx context.Context, s *sight, sandbox cri.Sandbox) (addrs []netip.Addr, err error) {
	path, err := k.o.Runtime.Netns(ctx, sandbox.ID)
	if err != nil || path == "" { // "": the host's
		return nil, err
	}
	space, err := s.view.Find(ledger.Netns{Path: path})
	if err != nil || space == nil {
		return nil, err
	}
	for _, a := range space.Addrs() {
		ordinary := slices.ContainsFunc(s.bound, func(b bound) bool {
			return b.Attachment.ContainerID == sandbox.ID && b.Addr == a && !b.foreign
		})
		if ordinary || !a.IsGlobalUnicast() {
			continue
		}
		o, err := k.api.PodIP(ctx, a)
		if err != nil {
			return nil, err
		}
		if o != nil {
			addrs = append(addrs, a)
		}
	}
	if addrs == nil {
		return nil, space.Err
	}
	return addrs, nil
}

func (k *Keeper) discover(ctx context.Context) error {
	files, err := ledger.PoolPods(k.o.Ledgers)
	if err != nil {
		return err
	}
	s, err := k.machine.see(ctx, false)
	if err != nil {
		return err
	}
	deleted, blind := k.addrsOfDeleted(ctx, k.deletedPods(s))
	k.mu.Lock()
	defer k.mu.Unlock()
	know := func(uid string) *subject {
		if k.subjects[uid] == nil {
			k.subjects[uid] = &subject{uid: uid}
			k.enqueue(k.subjects[uid])
		}
		return k.subjects[uid]
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
		if text == "" && k.subjects[sandbox.Pod.UID] == nil {
			continue
		}
		of := know(sandbox.Pod.UID)
		if of.text == "" && text != "" {
			of.says(text, k.served.vouchesFor(text))
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
		if uid == "" || k.subjects[uid] == nil && (!b.foreign || !k.listed || k.all[uid]) {
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
	return blind
}

// sweeps removes old bars.
func (k *Keeper) sweeps(ctx context.Context) {
	for wait := time.Duration(0); wake.Pause(ctx, wait); wait = sweepEvery {
		for !k.isListed() {
			if !wake.Pause(ctx, time.Second) {
				return
			}
		}
		k.troubles.note("bars", ledger.SweepBars(k.o.Ledgers, func(uid string) bool {
			k.mu.Lock()
			defer k.mu.Unlock()
			return k.subjects[uid] != nil
		}))
	}
}
