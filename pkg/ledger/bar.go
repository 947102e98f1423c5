package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/stayput/stayput/pkg/mailbox"
)

// This file is where the agent's mailbox and the ledger's locks meet: what the agent says of a pod is read under the
// lock of the ADD's network, and what it says of the end is followed by taking every lock.

// The errors of an ADD that asks for addresses of pools, besides those of the others.
var (
	// ErrBarred means that the agent has told the cluster that the pod is gone.
	ErrBarred = errors.New("this pod has ended on this node")
	// ErrUnseen means that the agent has yet to see the pod as the runtime knows it, in a cluster that was restored from a
	// backup.
	ErrUnseen = errors.New("the agent of this node has not confirmed this pod since the cluster was restored")
)

// Mailbox returns what the node's agent and plugin tell each other of pods of pools.
func (o Options) Mailbox() mailbox.Box {
	o.setDefaults()
	return mailbox.New(o.StateDir, o.FS)
}

// admit returns an error if the agent's files forbid that the pod gets these addresses. Under the lock: the agent takes
// it after it has written such a file, and then sees what was given.
func admit(r AddRequest, said mailbox.Box, bootID string) error {
	barred, err := said.Barred(r.Pod.UID)
	switch {
	case err != nil:
		return err
	case barred:
		return fmt.Errorf("%w: %s (%s)", ErrBarred, r.Pod, r.Pod.UID)
	}
	confirmed, err := said.Confirms(r.Pod.UID, r.PoolText, bootID)
	switch {
	case err != nil:
		return err
	case !confirmed:
		return fmt.Errorf("%w: %s (%s)", ErrUnseen, r.Pod, r.Pod.UID)
	}
	return nil
}

// Bar notes durably that no ADD of a pod with addresses of pools may succeed any more on this node, and then returns
// the addresses that the pod has: those of an ADD that succeeded before, and those of addrs that are bound to no known
// pod, which may be the pod's. It takes the lock of every network after the bar is there, so that every ADD that is
// under way afterwards has seen it. After an error nothing is known; it may be called again.
func Bar(o Options, uid string, addrs ...netip.Addr) ([]Address, error) {
	if err := o.Mailbox().PutBar(uid); err != nil {
		return nil, err
	}
	return bound(o, func(a Address) bool {
		return a.Pod.UID == uid || a.Pod.UID == "" && slices.Contains(addrs, a.Addr)
	})
}

// BeginEpoch begins an epoch: until the next boot an ADD may get addresses of pools only if the agent has written the
// pod's file since. It forgets the files of all pods, and returns once every ADD has ended that may not know of it.
// lost notes that bars of this boot may be lost. After an error it has to be called again.
func BeginEpoch(o Options, epoch int64, lost bool) error {
	o.setDefaults()
	now, err := o.Clock.Now()
	if err != nil {
		return err
	}
	if err := o.Mailbox().PutEpoch(now.BootID, epoch, lost); err != nil {
		return err
	}
	_, err = bound(o, func(Address) bool { return false }) // for its locks
	return err
}

// Epoch returns the epoch that BeginEpoch has begun in this boot, and what it was told of bars. The epoch is 0 if it
// was not called.
func Epoch(o Options) (epoch int64, lost bool, err error) {
	o.setDefaults()
	now, err := o.Clock.Now()
	if err != nil {
		return 0, false, err
	}
	return o.Mailbox().Epoch(now.BootID)
}

// bound returns the bound addresses of all networks that match, as they are once every ADD has ended that is under way.
func bound(o Options, match func(Address) bool) (found []Address, err error) {
	ledgers, err := Networks(o)
	if err = errors.Join(err, Described(o)); err != nil {
		return nil, err
	}
	for _, l := range ledgers {
		addrs, err := l.List()
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			if a.State == StateBound && match(a) {
				found = append(found, a)
			}
		}
	}
	return found, nil
}
