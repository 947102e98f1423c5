package podip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/wake"
)

// newBackoff returns the pauses between two attempts to watch, jittered because every node's agent makes them.
func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 10 * time.Second}
}

// follow calls see until ctx is done. see lists, and then watches until the watch ends; once it watches it calls
// healthy.
func (k *Keeper) follow(ctx context.Context, part string, see func(ctx context.Context, healthy func()) error) {
	backoff := newBackoff()
	for ctx.Err() == nil {
		err := see(ctx, func() {
			backoff = newBackoff()
			k.troubles.note(part, nil)
		})
		if ctx.Err() != nil {
			return
		}
		if err == nil { // all watches of all nodes may have begun at once, and end so
			wake.Pause(ctx, rand.N(100*time.Millisecond))
			continue
		}
		k.troubles.note(part, err)
		wake.Pause(ctx, backoff.Step())
	}
}

// errWatch is the error of an event, nil if it is of an object.
func errWatch(e watch.Event) error {
	if e.Type == watch.Error {
		return apierrors.FromObject(e.Object)
	}
	return nil
}

// followPods knows the pods of the node, and writes their files. It is the only one who does: a file of before a recall
// must not be written after it.
func (k *Keeper) followPods(ctx context.Context) {
	interrupted := true
	k.follow(ctx, "pods", func(ctx context.Context, healthy func()) error {
		recalled, err := k.seePods(ctx, interrupted, healthy)
		if interrupted = err != nil; recalled {
			return nil // whatever the watch was ended with
		}
		return err
	})
}

// seePods lists the pods, and watches them until the watch ends. recalled reports that this was for a recall.
func (k *Keeper) seePods(ctx context.Context, interrupted bool, healthy func()) (recalled bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, watchTimeout+time.Minute)
	defer cancel()
	defer func() { recalled = k.isRecalled(ctx) }()
	// 1. From now on the files are those of pods that are listed after this.
	begun, err := k.recheck(ctx, cancel)
	if err != nil {
		return false, err
	}

	// 2. The list, which is consistent.
	pods, version, err := k.api.Pods(ctx)
	if err != nil {
		return false, err
	}
	if err := k.replace(pods, begun, interrupted); err != nil {
		return false, err
	}

	// 3. What changes.
	w, err := k.api.WatchPods(ctx, version)
	if err != nil {
		return false, err
	}
	defer w.Stop()
	healthy()
	for e := range w.ResultChan() {
		if err := errWatch(e); err != nil {
			return false, fmt.Errorf("watching the pods of the node: %w", err)
		}
		p, ok := e.Object.(*Pod)
		if !ok {
			continue
		}
		switch e.Type {
		case watch.Added, watch.Modified:
			if err := k.see(p); err != nil {
				return false, err
			}
		case watch.Deleted:
			k.vanished(string(p.UID))
		}
	}
	return false, nil
}

// isRecalled reports whether a watch was ended for a recall.
func (k *Keeper) isRecalled(ctx context.Context) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return ctx.Err() != nil && !k.listed
}

// recheck begins the epoch that the roll asks for, if the node has not, and tells the plugin what pools there are.
// again ends what follows it, once the roll asks for the next one. It returns the epoch that has been begun.
//
// If the plugin knows of no pools, though this node has answered for them before, the state directory was wiped: with
// it the bars of pods that have ended. So until the next boot the plugin waits for the agent's word of each pod, as
// after a restore of the cluster.
func (k *Keeper) recheck(ctx context.Context, again context.CancelFunc) (begun int64, err error) {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	k.relist = again
	epoch := k.epoch
	k.mu.Unlock()
	served, err := ledger.PoolsServed(k.o.Ledgers)
	if err != nil && !errors.Is(err, ledger.ErrCorrupt) {
		return 0, err
	}
	wiped := false
	if served == nil {
		answer, err := k.api.Answer(ctx)
		if err != nil {
			return 0, err
		}
		wiped = answer != nil
	}
	checked, lost, err := ledger.Rechecked(k.o.Ledgers)
	if err != nil {
		return checked, err
	}
	lost = lost || wiped
	k.mu.Lock()
	k.lost = lost
	k.mu.Unlock()
	// An epoch below the last one is a new one, too: the clock of the leader that began the last one was ahead.
	if begun = cmp.Or(epoch, checked); begun == checked && !wiped {
		return begun, k.putServedLocked(served)
	}
	files, err := ledger.PoolPods(k.o.Ledgers) // which nothing else may tell of
	if err != nil {
		return 0, err
	}
	k.mu.Lock()
	for uid, f := range files {
		if f.Text != "" && k.subjects[uid] == nil {
			k.subjects[uid] = &subject{uid: uid, text: f.Text}
		}
	}
	k.mu.Unlock()
	if _, err := ledger.Recheck(k.o.Ledgers, begun, lost); err != nil {
		return 0, fmt.Errorf("beginning the epoch %d of the PodIPRoll: %w", begun, err)
	}
	if wiped {
		k.log.Warn("Lost the files of pools: until the next boot only pods that the agent confirms get addresses of pools",
			"stateDir", k.o.Ledgers.StateDir)
	} else {
		k.log.Info("The cluster may have forgotten pods: addresses of pools are for those alone that it has now",
			"epoch", epoch)
	}
	return begun, k.putServedLocked(served)
}

// recall has the epoch begun, and all pods listed after that.
func (k *Keeper) recall(epoch int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.epoch == epoch {
		return
	}
	k.epoch, k.listed = epoch, false
	if k.relist != nil {
		k.relist()
	}
}

// replace records a list of all pods of the node that was made since an epoch was begun. Those that changed, or after
// an interruption all, are queued.
func (k *Keeper) replace(pods []Pod, begun int64, interrupted bool) error {
	is := map[string]bool{}
	for i := range pods {
		is[string(pods[i].UID)] = true
		if err := k.see(&pods[i]); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = is
	for uid, s := range k.subjects {
		if s.exists && !is[uid] {
			s.exists = false
			k.enqueue(s)
		}
	}
	if interrupted || !k.listed {
		k.enqueueAll()
	}
	if k.epoch <= begun {
		k.listed = true
	}
	k.listedNow.Up()
	k.rollNow.Up()
	return nil
}

// see records a pod of the node, and tells the plugin of its addresses if their origin is proven. If not, the
// PodIPs are asked for: see tend.
func (k *Keeper) see(p *Pod) error {
	uid, text := string(p.UID), p.Annotations[v1alpha1.AnnotationAddresses]
	if p.Spec.NodeName != "" && p.Spec.NodeName != k.o.Node {
		return nil // not what was asked for
	}
	k.writing.Lock()
	defer k.writing.Unlock()
	told := ""
	if text != "" && ledger.ValidPodUID(uid) == nil {
		var err error
		if told, err = ledger.Told(k.o.Ledgers, uid); err != nil {
			return err
		}
	}
	k.mu.Lock()
	k.all[uid] = true
	s := k.subjects[uid]
	if s == nil && text == "" {
		k.mu.Unlock()
		return nil
	}
	if s == nil {
		s = &subject{uid: uid}
		k.subjects[uid] = s
	}
	changed := !s.exists || s.ending != (p.DeletionTimestamp != nil) || s.over != p.over()
	was, claims := s.text, s.claims
	if text != "" {
		s.says(text, told == text || k.served.vouchesFor(text))
	}
	if !s.exists || s.text != was || s.claims != claims {
		changed, s.bound, s.placed = true, false, false
	}
	version := s.version
	s.namespace, s.name, s.version = p.Namespace, p.Name, p.ResourceVersion
	s.annotations, s.labels = maps.Clone(p.Annotations), p.Labels
	s.exists, s.ending, s.over = true, p.DeletionTimestamp != nil, p.over()
	// Its bar may be lost: then the PodIPs say whether the pod has ended here.
	tells := s.alive() && s.text == text && told != text
	s.untold, tells = tells && k.lost, tells && !k.lost
	switch {
	case changed || s.untold:
		s.gone = false
		s.looks++
		k.enqueue(s)
	case version != s.version && p.Status.PodIP != "" && !s.bound && !s.gone: // it has started
		k.enqueue(s)
	}
	k.mu.Unlock()
	if !tells || ledger.ValidPodUID(uid) != nil {
		return nil
	}
	if err := ledger.Tell(k.o.Ledgers, uid, text); err != nil {
		return fmt.Errorf("telling the plugin of pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	return nil
}

// vanished records that a pod of the node was deleted.
func (k *Keeper) vanished(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.all, uid)
	if s := k.subjects[uid]; s != nil && s.exists {
		s.exists = false
		k.enqueue(s)
	}
}

// forget drops a pod that is gone, with its file.
func (k *Keeper) forget(uid string) error {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	s := k.subjects[uid]
	gone := s != nil && !s.exists
	k.mu.Unlock()
	if !gone {
		return nil
	}
	if ledger.ValidPodUID(uid) == nil {
		if err := ledger.Untell(k.o.Ledgers, uid); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.subjects, uid)
	return nil
}

// followRoll knows the PodIPRoll.
func (k *Keeper) followRoll(ctx context.Context) {
	interrupted := true
	k.follow(ctx, "roll", func(ctx context.Context, healthy func()) (err error) {
		ctx, cancel := context.WithTimeout(ctx, watchTimeout+time.Minute)
		defer cancel()
		roll, version, err := k.api.Roll(ctx)
		if err != nil {
			interrupted = true
			return err
		}
		if interrupted { // it may have been restored, and the answer, too
			k.mu.Lock()
			k.answered = 0
			k.mu.Unlock()
		}
		defer func() { interrupted = err != nil }()
		k.setRoll(roll)
		w, err := k.api.WatchRoll(ctx, version)
		if err != nil {
			return err
		}
		defer w.Stop()
		healthy()
		for e := range w.ResultChan() {
			if err := errWatch(e); err != nil {
				return fmt.Errorf("watching the PodIPRoll: %w", err)
			}
			roll, ok := e.Object.(*v1alpha1.PodIPRoll)
			if !ok || roll.Name != v1alpha1.PodIPRollName {
				continue
			}
			switch e.Type {
			case watch.Added, watch.Modified:
				k.setRoll(roll)
			case watch.Deleted:
				k.setRoll(nil)
			}
		}
		return nil
	})
}

// setRoll records the roll. When a recall begins or is over, PodIPs may be others: every pod is queued.
func (k *Keeper) setRoll(roll *v1alpha1.PodIPRoll) {
	k.mu.Lock()
	defer k.mu.Unlock()
	was := k.roll
	k.roll = roll
	if roll != nil && was != nil && roll.Spec.Term != was.Spec.Term {
		k.enqueueAll()
	}
	k.rollNow.Up()
}
