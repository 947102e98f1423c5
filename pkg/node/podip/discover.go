package podip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/wake"
)

const (
	// discoverEvery is between two looks at the node's own books, sweepEvery between two sweeps of old files.
	discoverEvery, discoverRetry = 5 * time.Minute, 5 * time.Second
	sweepEvery                   = 12 * time.Hour
)

// discoverer looks for pods that no watch brings: in the node's own books, among those that run, and in PodIPs that
// name this node. It has no lock: it has no state.
type discoverer struct {
	node     string
	api      api
	grants   grants.Dir
	pods     *podTable
	listing  *listing
	machine  *machine
	troubles *troubles
	now      wake.Signal // all pods of the node were listed
}

// run looks every few minutes, until ctx is done.
func (d *discoverer) run(ctx context.Context) {
	d.now.Loop(ctx, 0, func(bool) (time.Duration, bool) {
		listed := d.listing.isComplete() // until then not all that the books have can be told from ordinary pods
		err := d.discover(ctx)
		d.troubles.note("books", err)
		if err != nil || !listed {
			return discoverRetry, true
		}
		return discoverEvery, true
	})
}

// deletedPods returns the sandboxes of pods that the cluster seems no longer to have and that the agent does not know.
func (d *discoverer) deletedPods(s *sight) (deleted []cri.Sandbox) {
	if !d.listing.isComplete() {
		return nil
	}
	known, all := d.pods.uids()
	for _, sandbox := range s.sandboxes {
		uid := sandbox.Pod.UID
		if !all[uid] && !known[uid] && grants.ValidPodUID(uid) == nil &&
			sandbox.Annotations[v1alpha1.AnnotationAddresses] == "" {
			deleted = append(deleted, sandbox)
		}
	}
	return deleted
}

// addrsOfDeleted returns the addresses of pools that such pods have, by UID. What one of them has may be unknown, as of
// a sandbox that has just gone: the error says so, and the others count.
func (d *discoverer) addrsOfDeleted(ctx context.Context, pods []cri.Sandbox) (map[string][]netip.Addr, error) {
	if len(pods) == 0 {
		return nil, nil
	}
	s, err := d.machine.see(ctx, &hostnet.Question{})
	if err != nil {
		return nil, err
	}
	all := map[string][]netip.Addr{}
	var errs []error
	for _, sandbox := range pods {
		if _, there := s.sandboxes[sandbox.ID]; !there {
			continue
		}
		addrs, err := d.addrsInside(ctx, s, sandbox)
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s, which no longer exists in the cluster: %w", sandbox.Pod, err))
		} else if addrs != nil {
			all[sandbox.Pod.UID] = append(all[sandbox.Pod.UID], addrs...)
		}
	}
	return all, errors.Join(errs...)
}

// addrsInside returns the addresses of pools that a sandbox has. Of a pod that another program has started, and that
// was taken over, neither its sandbox nor a ledger tells one: its network namespace does, and the PodIP.
func (d *discoverer) addrsInside(ctx context.Context, s *sight, sandbox cri.Sandbox) (addrs []netip.Addr, err error) {
	path, err := d.machine.runtime.Netns(ctx, sandbox.ID)
	if err != nil || path == "" { // "": the host's
		return nil, err
	}
	space, err := s.view.Find(ledger.Netns{Path: path})
	if err != nil || space == nil {
		return nil, err
	}
	shown, incomplete := space.Addrs()
	for _, a := range shown {
		ordinary := slices.ContainsFunc(s.bound, func(b bound) bool {
			return b.Attachment.ContainerID == sandbox.ID && b.Addr == a && !b.foreign
		})
		if ordinary || !a.IsGlobalUnicast() {
			continue
		}
		o, err := d.api.PodIP(ctx, a)
		if err != nil {
			return nil, err
		}
		if o != nil {
			addrs = append(addrs, a)
		}
	}
	if addrs == nil {
		return nil, incomplete
	}
	return addrs, nil
}

func (d *discoverer) discover(ctx context.Context) error {
	granted, err := d.grants.All()
	if err != nil {
		return err
	}
	s, err := d.machine.see(ctx, nil)
	if err != nil {
		return err
	}
	deleted, blind := d.addrsOfDeleted(ctx, d.deletedPods(s))
	ips, err := d.namedHere(ctx)
	d.pods.learn(s, granted, deleted, ips)
	return errors.Join(blind, err)
}

// namedHere returns the PodIPs that name this node: after a boot, or if the agent was away when their pods ended,
// nothing else tells of them.
func (d *discoverer) namedHere(ctx context.Context) (all []named, err error) {
	if !d.listing.isComplete() {
		return nil, nil
	}
	ips, err := d.api.PodIPsHere(ctx)
	if err != nil {
		return nil, err
	}
	for i := range ips {
		o := &ips[i]
		a, err := v1alpha1.ParsePodIPName(o.Name)
		here := o.Spec.AdoptedOn == d.node
		if o.Status.PodUID == o.Spec.PodUID {
			here = o.Status.NodeName == d.node && o.Status.Phase != v1alpha1.PodIPRetained
		}
		if err == nil && here && o.Spec.Mode != v1alpha1.ModeCalico {
			all = append(all, named{a, o.Spec.PodUID, o.Spec.Namespace, o.Spec.PodName})
		}
	}
	return all, nil
}

// sweeps removes old files.
func (d *discoverer) sweeps(ctx context.Context) {
	for wait := time.Duration(0); wake.Pause(ctx, wait); wait = sweepEvery {
		d.troubles.note("files", d.grants.Sweep())
	}
}
