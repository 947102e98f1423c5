package podip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/node/wake"
)

// listing is whether all pods of the node are known, since the epoch that the PodIPAudit asks for was begun. Its
// methods may be called with any lock held.
type listing struct {
	mu       sync.Mutex
	complete bool
	epoch    int64  // that the audit asks for, 0 if it is not known
	again    func() // ends what follows the last list, nil if there was none
	// lost is true if bars of this boot may be lost: the plugin is told of a pod only once its PodIPs say the same.
	lost bool
}

// reset is for a Keeper that begins.
func (l *listing) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complete, l.epoch, l.again = false, 0, nil
}

// begin notes that a list begins, and how it ends early. It returns the epoch that the audit asks for, 0 if it is not
// known.
func (l *listing) begin(again func()) (epoch int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.again = again
	return l.epoch
}

// end notes that all pods were listed since an epoch was begun. It reports whether they were known before.
func (l *listing) end(begun int64) (before bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = l.complete
	if l.epoch <= begun {
		l.complete = true
	}
	return before
}

// recall has an epoch begun, and all pods listed after that.
func (l *listing) recall(epoch int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.epoch != epoch {
		l.epoch = epoch
		l.repeatLocked()
	}
}

// repeat makes the watch list all pods.
func (l *listing) repeat() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.repeatLocked()
}

func (l *listing) repeatLocked() {
	if l.complete = false; l.again != nil {
		l.again()
	}
}

func (l *listing) isComplete() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.complete
}

func (l *listing) isLost() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}

func (l *listing) setLost(lost bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = lost
}

// follower knows the pods of the node, and tells the plugin of them and of the cluster's pools. Nothing else writes
// these files: a file of before a recall must not be written after it. mu is held while they are written, and taken
// before all other locks.
type follower struct {
	node     string
	api      api
	ledgers  ledger.Options
	log      *slog.Logger
	served   *servedPools
	pods     *podTable
	listing  *listing
	troubles *troubles
	listed   []wake.Signal // raised by each list

	mu sync.Mutex
}

// run follows the pods of the node until ctx is done.
func (f *follower) run(ctx context.Context) {
	f.troubles.follow(ctx, "pods", apiwatch.Loop{
		What: "the pods of the node", List: f.list, Watch: f.api.WatchPods, Event: f.event,
	})
}

// list lists the pods of the node. From now on the files are those of pods that are listed after this.
func (f *follower) list(ctx context.Context, c apiwatch.Cycle) (version string, err error) {
	begun, err := f.beginEpoch(ctx, c.Again)
	if err != nil {
		return "", err
	}
	pods, version, err := f.api.Pods(ctx)
	if err != nil {
		return "", err
	}
	return version, f.replace(pods, begun, c.Interrupted)
}

// event takes over what has happened to a pod of the node.
func (f *follower) event(e watch.Event) error {
	p, ok := e.Object.(*Pod)
	switch {
	case !ok:
	case e.Type == watch.Deleted:
		f.pods.vanished(string(p.UID))
	default:
		return f.put(p)
	}
	return nil
}

// beginEpoch begins the epoch that the audit asks for, if the node has not, and tells the plugin what pools there are.
// again ends what follows it, once the audit asks for the next one. It returns the epoch that has been begun.
//
// If the plugin knows of no pools, though this node has answered for them before, the state directory was wiped: with
// it the bars of pods that have ended. So until the next boot the plugin waits for the agent's word of each pod, as
// after a restore of the cluster.
func (f *follower) beginEpoch(ctx context.Context, again func()) (begun int64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	epoch := f.listing.begin(again)
	served, err := f.ledgers.Mailbox().Served()
	if err != nil && !errors.Is(err, mailbox.ErrCorrupt) {
		return 0, err
	}
	wiped := false
	if served == nil {
		report, err := f.api.Report(ctx)
		if err != nil {
			return 0, err
		}
		wiped = report != nil
	}
	checked, lost, err := ledger.Epoch(f.ledgers)
	if err != nil {
		return checked, err
	}
	lost = lost || wiped
	f.listing.setLost(lost)
	// An epoch below the last one is a new one, too: the clock of the leader that began the last one was ahead.
	if begun = cmp.Or(epoch, checked); begun == checked && !wiped {
		return begun, f.putServedLocked(served)
	}
	files, err := f.ledgers.Mailbox().Pods() // which nothing else may tell of
	if err != nil {
		return 0, err
	}
	f.pods.keepFiles(files)
	if err := ledger.BeginEpoch(f.ledgers, begun, lost); err != nil {
		return 0, fmt.Errorf("beginning epoch %d of the PodIPAudit: %w", begun, err)
	}
	if wiped {
		f.log.Warn("Lost the files of pools: until the next boot only pods that the agent confirms get pool addresses",
			"stateDir", f.ledgers.StateDir)
	} else {
		f.log.Info("Began epoch: the cluster may have lost pods, only those that exist now get pool addresses",
			"epoch", epoch)
	}
	return begun, f.putServedLocked(served)
}

// replace records a list of all pods of the node that was made since an epoch was begun. Those that changed, or after
// an interruption all, are queued.
func (f *follower) replace(pods []Pod, begun int64, interrupted bool) error {
	all := map[string]bool{}
	for i := range pods {
		all[string(pods[i].UID)] = true
		if err := f.put(&pods[i]); err != nil {
			return err
		}
	}
	// The table is whole before the list counts: who finds it complete relies on that.
	f.pods.replaceAll(all)
	if before := f.listing.end(begun); interrupted || !before {
		f.pods.enqueueAll()
	}
	for _, s := range f.listed {
		s.Up()
	}
	return nil
}

// put records a pod of the node, and tells the plugin of its addresses if their origin is proven. If not, the
// PodIPs are asked for: see [checker.confirm].
func (f *follower) put(p *Pod) error {
	uid, text := string(p.UID), p.Annotations[v1alpha1.AnnotationAddresses]
	if p.Spec.NodeName != "" && p.Spec.NodeName != f.node {
		return nil // not what was asked for
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	told := ""
	if text != "" && mailbox.ValidPodUID(uid) == nil {
		var err error
		if told, err = f.ledgers.Mailbox().Pod(uid); err != nil {
			return err
		}
	}
	tells := f.pods.put(p, told)
	if !tells || mailbox.ValidPodUID(uid) != nil {
		return nil
	}
	if err := f.ledgers.Mailbox().PutPod(uid, text); err != nil {
		return fmt.Errorf("publishing pod %s/%s to the plugin: %w", p.Namespace, p.Name, err)
	}
	return nil
}

// confirm records that the addresses of a pod are its own, and tells the plugin so if it may start with them. It
// returns false if what is known of the pod has changed.
func (f *follower) confirm(s *record, text string, ended bool) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	confirmed, tells := f.pods.mayConfirm(s.uid, text)
	if !confirmed {
		return false, nil
	}
	if tells = tells && !ended && mailbox.ValidPodUID(s.uid) == nil; tells {
		if err := f.ledgers.Mailbox().PutPod(s.uid, text); err != nil {
			return false, fmt.Errorf("publishing pod %s to the plugin: %w", s, err)
		}
	}
	*s = f.pods.confirm(s.uid, text, tells)
	return true, nil
}

// forget drops a pod that the API server no longer has, with its file.
func (f *follower) forget(uid string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s, known := f.pods.get(uid); !known || s.exists {
		return nil
	}
	if mailbox.ValidPodUID(uid) == nil {
		if err := f.ledgers.Mailbox().DeletePod(uid); err != nil {
			return err
		}
	}
	f.pods.remove(uid)
	return nil
}

// withdraw tells the plugin that the cluster has no pools, if it has been told of any.
func (f *follower) withdraw() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	was, err := f.ledgers.Mailbox().Served()
	if err == nil && (was == nil || was.None) {
		return nil
	}
	return f.ledgers.Mailbox().PutServed(mailbox.Served{None: true})
}

// tellServed tells the plugin what pools there are, if that has changed. If the plugin no longer knows anything,
// beginEpoch tells it.
func (f *follower) tellServed() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	was, err := f.ledgers.Mailbox().Served()
	if was == nil && (err == nil || errors.Is(err, mailbox.ErrCorrupt)) {
		f.listing.repeat()
		return nil
	}
	if err != nil {
		return err
	}
	return f.putServedLocked(was)
}

// putServedLocked notes what pools there are, unless it is noted.
func (f *follower) putServedLocked(was *mailbox.Served) error {
	pools, _ := f.served.get()
	if pools == nil {
		return nil
	}
	now := mailbox.Served{Version: 1, Guard: pools.Guard, Subnets: pools.Subnets, Gateways: pools.Gateways,
		More: pools.More, Spiderpool: pools.Spiderpool}
	if was != nil && reflect.DeepEqual(*was, now) {
		return nil
	}
	return f.ledgers.Mailbox().PutServed(now)
}
