// Package apiwatch follows objects of the API server: it lists, watches until that ends, and lists again, or goes on
// watching.
//
// client-go's Reflector is not that. It resumes a watch where the last one ended, and a watch from a version that the
// API server has lost, after etcd was restored from a backup, is silent. It may begin with a list of the API server's
// cache, which lacks what was just written. It has all of a list in memory. And it cannot be told to list again. Size
// is no reason: the agent links it for RetainedIPs, with 10 packages that nothing else needs of 568.
package apiwatch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
)

// Timeout bounds a watch.
const Timeout = 10 * time.Minute

// longest bounds a list, and a watch that the API server does not end.
const longest = Timeout + time.Minute

// Loop lists and watches. Its functions are called one at a time.
type Loop struct {
	What string // is watched, for people
	// List makes a consistent list, takes it over, and returns its version.
	List func(ctx context.Context, c Cycle) (version string, err error)
	// Watch watches from a version on, for Timeout at most.
	Watch func(ctx context.Context, version string) (watch.Interface, error)
	// Event takes over what a watch brings of an object. An error ends the watch.
	Event func(watch.Event) error
	// Note is called with each error, and with nil once it watches.
	Note func(error)
	// Version returns the version of the API server, past all caches. It is for many objects: for up to an hour a watch
	// that has ended without an error is resumed where it ended, and one that was refused because the API server has too
	// many requests is tried again. A list follows earlier only after another error, or if the version went back: while
	// etcd is restored from a backup, no API server answers. A nil Version has a list follow each watch, which tells what
	// the watch missed.
	Version func(ctx context.Context) (string, error)
}

// listEvery is after how long a list is due though no watch has failed: a restore that nothing of it noticed is made up
// for then.
const listEvery = time.Hour

// Cycle is a list and the watches that follow it.
type Cycle struct {
	// Interrupted reports whether the last cycle ended early, or there was none.
	Interrupted bool
	// Again ends this cycle, which is no error, and begins the next one. It may be called from any goroutine, also after
	// the cycle has ended.
	Again func()
	// Doubt is Again once the first watch after the list has ended or was refused, with [Loop.Version]. It is for when
	// objects may have been restored from a backup, which ends watches: the first one has missed nothing while it lasts.
	Doubt func()
}

// errAgain is what a cycle ends with that was to.
var errAgain = errors.New("listed again")

// newBackoff returns the pauses between requests that fail, jittered because every node's agent makes them.
func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 10 * time.Second}
}

// shortest is how long a watch lasts that may be followed at once by what follows it. A load balancer without an API
// server behind it, or one that shuts down, ends them at once without an error.
const shortest = time.Second

// errShort is what a cycle ends with whose watch did not last.
var errShort = errors.New("watch ended at once")

// Run follows the objects until ctx is done.
func (l *Loop) Run(ctx context.Context) {
	backoff, interrupted := newBackoff(), true
	for ctx.Err() == nil {
		err := l.cycle(ctx, interrupted, func() { backoff = newBackoff() })
		if ctx.Err() != nil {
			return
		}
		short := errors.Is(err, errShort)
		interrupted = err != nil && !short
		pause := rand.N(100 * time.Millisecond) // all watches of all nodes may have begun at once, and end so
		switch {
		case errors.Is(err, errAgain):
		case short:
			pause = backoff.Step()
		case err != nil:
			l.Note(err)
			pause = backoff.Step()
		}
		sleep(ctx, pause)
	}
}

// cycle lists, and watches until a list is due. Once a watch has lasted it calls healthy.
func (l *Loop) cycle(ctx context.Context, interrupted bool, healthy func()) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() {
		if errors.Is(context.Cause(ctx), errAgain) { // also if it has ended with another error
			err = errAgain
		}
	}()
	listed := time.Now()
	var goneOn atomic.Bool
	again := func() { cancel(errAgain) }
	listing, stop := context.WithTimeout(ctx, longest)
	version, err := l.List(listing, Cycle{Interrupted: interrupted, Again: again, Doubt: func() {
		if goneOn.Load() {
			again()
		}
	}})
	stop()
	refusals := newBackoff()
	for err == nil && time.Since(listed) < listEvery {
		begun, opened := time.Now(), false
		next, failed := l.watch(ctx, version, func() { opened = true })
		goneOn.Store(true)
		short := time.Since(begun) < shortest
		if opened && !short {
			refusals = newBackoff()
			healthy()
		}
		switch refused := apierrors.IsTooManyRequests(failed); {
		case failed != nil && (!refused || l.Version == nil):
			return failed
		case l.Version == nil && short:
			return errShort
		case l.Version == nil:
			return nil
		case refused:
			// A list would keep the API server busy: if the agents of all nodes list at once, it refuses the watches of those
			// that have done so.
			l.Note(failed)
			sleep(ctx, refusals.Step())
		default:
			if version = next; short {
				sleep(ctx, refusals.Step())
			}
		}
		var now string
		if now, err = l.versionNow(ctx, &refusals); err == nil {
			if order, unknown := resourceversion.CompareResourceVersion(now, version); unknown != nil || order < 0 {
				return nil
			}
		}
	}
	return err
}

// versionNow returns the version of the API server. It asks until it is not refused any more.
func (l *Loop) versionNow(ctx context.Context, refusals *wait.Backoff) (string, error) {
	for {
		now, err := l.Version(ctx)
		if !apierrors.IsTooManyRequests(err) || ctx.Err() != nil {
			return now, err
		}
		l.Note(err)
		sleep(ctx, refusals.Step())
	}
}

// sleep waits for d, or until ctx is done.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// watch watches from a version on until that ends, and returns the version up to which all is known. It calls opened
// once the API server serves the watch.
func (l *Loop) watch(ctx context.Context, version string, opened func()) (string, error) {
	ctx, stop := context.WithTimeout(ctx, longest)
	defer stop()
	w, err := l.Watch(ctx, version)
	if err != nil {
		return "", err
	}
	defer w.Stop()
	opened()
	l.Note(nil)
	for e := range w.ResultChan() {
		switch e.Type {
		case watch.Bookmark:
		case watch.Error:
			return "", fmt.Errorf("watching %s: %w", l.What, apierrors.FromObject(e.Object))
		default:
			if err := l.Event(e); err != nil {
				return "", err
			}
		}
		if o, err := meta.Accessor(e.Object); err == nil {
			version = o.GetResourceVersion()
		}
	}
	return version, ctx.Err()
}
