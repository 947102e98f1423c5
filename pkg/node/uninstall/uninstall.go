// Package uninstall puts a node back as it was before stayput: the agent does so while stayput is being uninstalled
// from the cluster ([Uninstaller]), and a command does it on a node without an agent ([Node]).
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/installation"
)

// ErrNoLonger is returned by Run if stayput is no longer being uninstalled after the node was put back: the agent must
// be restarted.
var ErrNoLonger = errors.New("stayput is no longer being uninstalled")

const (
	// askTimeout bounds the wait at the start for what the installation says: an agent that was restarted while stayput
	// is being uninstalled must install nothing again.
	askTimeout = 3 * time.Second
	// retryAfter is the pause between two passes until one is complete; recheckAfter between those that check that
	// nothing has come back.
	retryAfter   = time.Second
	recheckAfter = 30 * time.Second
)

// Uninstaller waits until the installation says that stayput is being uninstalled, and then puts the node back. A nil
// Uninstaller waits for nothing.
type Uninstaller struct {
	// Pools is told what the installation says of the cluster's pools, empty if there are none, and whether any is of mode
	// Routed; nil if nothing uses them. It is not called while that is not known. Set it before Run.
	Pools func(pools string, routed bool)
	Options

	installation *installation.Follower
	status       atomic.Pointer[Status]
}

// Status is how far the uninstallation is.
type Status struct {
	Message string // for people; empty if none has begun
	// Done reports whether the node is as it was before stayput, or what is left is for people to do.
	Done bool
}

// New returns an Uninstaller for stayput in a namespace of the cluster of config.
func New(config *rest.Config, namespace string, o Options) (*Uninstaller, error) {
	o.setDefaults()
	follower, err := installation.New(config, namespace, o.Log)
	return &Uninstaller{Options: o, installation: follower}, err
}

// Status returns how far the uninstallation is.
func (u *Uninstaller) Status() Status {
	if u == nil {
		return Status{}
	}
	if s := u.status.Load(); s != nil {
		return *s
	}
	return Status{}
}

// Run calls work, with a context that ends when stayput is being uninstalled or ctx is done. During an uninstallation
// it puts the node back, and then idles until ctx is done. Its error is ErrNoLonger, or what kept it from putting the
// node back.
func (u *Uninstaller) Run(ctx context.Context, work func(context.Context)) error {
	if u == nil {
		work(ctx)
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	following, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { u.installation.Run(following) })
	select {
	case <-u.installation.Asked():
	case <-time.After(askTimeout):
	case <-ctx.Done():
	}
	if !u.installation.State().Uninstalling {
		var worker sync.WaitGroup
		working, end := context.WithCancel(ctx)
		defer end()
		worker.Go(func() { work(working) })
		uninstalling := u.await(ctx)
		if uninstalling {
			u.status.Store(&Status{Message: "uninstalling"}) // before work ends: hooks check it
		}
		end()
		worker.Wait()
		if !uninstalling {
			return nil
		}
	}
	return u.putBack(ctx)
}

// await returns true once stayput is being uninstalled, false if ctx is done before.
func (u *Uninstaller) await(ctx context.Context) bool {
	for {
		state := u.installation.State()
		if state.Uninstalling {
			return true
		}
		if state.Known && u.Pools != nil {
			u.Pools(state.Pools, state.Routed)
		}
		select {
		case <-ctx.Done():
			return false
		case <-u.installation.Changed():
		}
	}
}

// putBack puts the node back, and then idles until ctx is done.
func (u *Uninstaller) putBack(ctx context.Context) error {
	u.status.Store(&Status{Message: "uninstalling"})
	u.Log.Info("Uninstalling: restoring this node")
	c := &cleanup{Options: u.Options}
	logged := ""
	for {
		complete, err := c.pass(ctx)
		pause := min(retryAfter, u.Reload)
		switch {
		case complete:
			if !u.Status().Done {
				u.Log.Info("Uninstalled: stayput was removed from this node")
			}
			u.status.Store(&Status{Message: c.done(), Done: true})
			pause = recheckAfter
		case errors.Is(err, errByHand):
			u.status.Store(&Status{Message: "uninstalled, except what is configured by hand: " + err.Error(), Done: true})
			pause = recheckAfter
		case err != nil:
			u.status.Store(&Status{Message: "uninstalling: degraded: " + strings.ReplaceAll(err.Error(), "\n", "; ")})
		}
		if err != nil && err.Error() != logged {
			logged = err.Error()
			u.Log.Warn("Cannot complete the uninstallation, retrying", "err", err)
		}
		select {
		case <-ctx.Done():
			if complete {
				return nil
			}
			return fmt.Errorf("the uninstallation is not complete, run stayput-agent uninstall: %w",
				errors.Join(err, ctx.Err()))
		case <-time.After(pause):
		case <-u.installation.Changed():
			if !u.installation.State().Uninstalling {
				return ErrNoLonger
			}
		}
	}
}
