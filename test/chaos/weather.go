package main

import (
	"strings"
	"sync"
	"time"
)

// weather is what is broken when, as far as promises depend on it. Its methods may be called concurrently.
type weather struct {
	now func() time.Time

	mu     sync.Mutex
	spells []*spell
}

// spell is one thing that is broken for a time.
type spell struct {
	subject, what string
	from, to      time.Time // to is zero while it lasts
}

// The subjects besides the names of nodes: for a node, whatever keeps it from running pods.
const (
	theServer     = "API server"
	theController = "controller"
	theObjects    = "RetainedIPs"
)

func agentOf(node string) string { return "agent of " + node }

// begins notes that something breaks, and returns how to note its end.
func (w *weather) begins(subject, what string) (ends func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &spell{subject: subject, what: what, from: w.now()}
	w.spells = append(w.spells, s)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if s.to.IsZero() {
			s.to = w.now()
		}
	}
}

// strikes notes something that is over after d, such as the time until a killed program is at work again.
func (w *weather) strikes(subject, what string, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now()
	w.spells = append(w.spells, &spell{subject: subject, what: what, from: now, to: now.Add(d)})
}

// since returns since when something of a subject has been broken, zero if nothing is.
func (w *weather) since(subject string) (at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.spells {
		if s.subject == subject && s.to.IsZero() && (at.IsZero() || s.from.Before(at)) {
			at = s.from
		}
	}
	return at
}

// between returns what was broken of the subjects at any time from one moment to another, empty if there is nothing.
func (w *weather) between(from, to time.Time, subjects ...string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, s := range w.spells {
		if s.from.After(to) || !s.to.IsZero() && s.to.Before(from) {
			continue
		}
		for _, subject := range subjects {
			if text := s.subject + ": " + s.what; s.subject == subject && !strings.Contains(strings.Join(all, "; "), text) {
				all = append(all, text)
			}
		}
	}
	return strings.Join(all, "; ")
}

// lately is how long after its end a fault may still have effects that are no violation: clients back off, leases run
// out, kubelet and containerd catch up.
const lately = 40 * time.Second

// calm reports whether nothing of the subjects is or was lately broken.
func (w *weather) calm(subjects ...string) bool {
	now := w.now()
	return w.between(now.Add(-lately), now, subjects...) == ""
}
