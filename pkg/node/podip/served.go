package podip

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

// SetPools says what pools the cluster has, as the installation says it, empty if it has none.
func (k *Keeper) SetPools(text string) {
	var served *v1alpha1.ServedPools
	if text != "" {
		var err error
		if served, err = v1alpha1.ParseServedPools(text); err != nil { // there are some
			k.log.Warn("Cannot read which pools there are", "err", err)
			served = &v1alpha1.ServedPools{More: true}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.heard || !reflect.DeepEqual(k.served, served) {
		k.served, k.heard = served, true
		k.changed.Up()
	}
}

// guardsLocked reports whether a text names the guard that there is, in each entry: only the controller can have
// written it.
func (k *Keeper) guardsLocked(text string) bool {
	if k.served == nil || k.served.Guard == "" {
		return false
	}
	var all []struct{ Guard string }
	return json.Unmarshal([]byte(text), &all) == nil && len(all) > 0 &&
		!slices.ContainsFunc(all, func(a struct{ Guard string }) bool { return a.Guard != k.served.Guard })
}

// withdraw tells the plugin that the cluster has no pools, if it has been told of any.
func (k *Keeper) withdraw() error {
	was, err := ledger.PoolsServed(k.o.Ledgers)
	if err == nil && (was == nil || was.None) {
		return nil
	}
	return ledger.Serve(k.o.Ledgers, ledger.Served{None: true})
}

// tellServed tells the plugin what pools there are, if that has changed. If it knows nothing any more, recheck tells
// it.
func (k *Keeper) tellServed() error {
	k.writing.Lock()
	defer k.writing.Unlock()
	was, err := ledger.PoolsServed(k.o.Ledgers)
	if was == nil && (err == nil || errors.Is(err, ledger.ErrCorrupt)) {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.listed = false; k.relist != nil {
			k.relist()
		}
		return nil
	}
	if err != nil {
		return err
	}
	return k.putServedLocked(was)
}

// putServedLocked notes what pools there are, unless it is noted. The lock is k.writing.
func (k *Keeper) putServedLocked(was *ledger.Served) error {
	k.mu.Lock()
	served := k.served
	k.mu.Unlock()
	if served == nil {
		return nil
	}
	is := ledger.Served{Version: 1, Guard: served.Guard, Subnets: served.Subnets, Gateways: served.Gateways,
		More: served.More}
	if was != nil && reflect.DeepEqual(*was, is) {
		return nil
	}
	return ledger.Serve(k.o.Ledgers, is)
}

// servedAgain is how often the agent checks that what the plugin was told is still there.
const servedAgain = 10 * time.Second
