package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/stayput/stayput/pkg/grants"
)

// This file is where the agent's grants and the ledger's locks meet: a grant is read under the lock of the ADD's
// network, and whoever revokes one takes every lock after that.

// ErrNotGranted means that the agent of the node has not granted the addresses of pools that an ADD asks for, or grants
// them no more.
var ErrNotGranted = errors.New("the agent of this node has not granted this pod its pool addresses")

// Grants returns the files by which the node's agent grants addresses of pools.
func (o Options) Grants() grants.Dir {
	o.setDefaults()
	return grants.New(o.StateDir, o.FS, func() (string, error) {
		now, err := o.Clock.Now()
		return now.BootID, err
	})
}

// admit returns an error unless the pod is granted these addresses. Under the lock: the agent takes it after it has
// revoked a grant, and then sees what was given.
func admit(r AddRequest, all grants.Dir) error {
	text, err := all.Granted(r.Pod.UID)
	switch {
	case err != nil:
		return err
	case text == "" || text != r.PoolText:
		return fmt.Errorf("%w: %s (%s)", ErrNotGranted, r.Pod, r.Pod.UID)
	}
	return nil
}

// Revoke ends the grant of a pod: no ADD of it with addresses of pools may succeed any more on this node, until it is
// granted again. It returns the addresses that the pod has: those of an ADD that succeeded before, and those of addrs
// that are bound to no known pod, which may be the pod's. It takes the lock of every network after the grant is gone,
// so that every ADD that is under way afterwards finds none. After an error nothing is known; it may be called again.
func Revoke(o Options, uid string, addrs ...netip.Addr) (found []Address, err error) {
	if err := o.Grants().Revoke(uid); err != nil {
		return nil, err
	}
	ledgers, err := Networks(o)
	if err = errors.Join(err, Described(o)); err != nil {
		return nil, err
	}
	for _, l := range ledgers {
		all, err := l.List()
		if err != nil {
			return nil, err
		}
		for _, a := range all {
			its := a.Pod.UID == uid || a.Pod.UID == "" && slices.Contains(addrs, a.Addr)
			if a.State == StateBound && its {
				found = append(found, a)
			}
		}
	}
	return found, nil
}
