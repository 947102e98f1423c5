package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Expired is a claim that Expire ended.
type Expired struct {
	Key   Key
	Addrs []netip.Addr
}

// Expire ends every claim whose retention is over, or that no longer has an address behind it. next is when it has to
// be called again, zero if nothing runs. It prepares, reads as List does, and takes the lock for each claim that it
// ends. The failure of one does not keep the others: the errors are joined.
func (l *Ledger) Expire() (expired []Expired, next time.Duration, err error) {
	if err := l.Prepare(); err != nil {
		return nil, 0, err
	}
	p, now, err := l.sweep()
	if err != nil {
		return nil, 0, err
	}
	addrs := p.addresses(l, now)
	byAddr := make(map[netip.Addr]*Address, len(addrs))
	for i := range addrs {
		byAddr[addrs[i].Addr] = &addrs[i]
	}
	var errs []error
	end := func(k Key, f func(*decision) error) {
		r, err := l.run(f)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", k, err))
		} else if r.Addrs != nil {
			expired = append(expired, Expired{k, r.Addrs})
		}
	}
	for _, c := range p.claims {
		running := slices.ContainsFunc(c.Addrs, func(a netip.Addr) bool {
			ad := byAddr[a]
			return ad != nil && ad.Key != nil && *ad.Key == c.Key && (ad.State == StateBound || !ad.Ends || ad.Left > 0)
		})
		if !running {
			end(c.Key, func(t *decision) error { return t.expire(c) })
		}
	}
	for _, ad := range addrs {
		if ad.State == StateRetained && ad.Ends && ad.Left > 0 && (next == 0 || ad.Left < next) {
			next = ad.Left
		}
	}
	if p.ahead { // of files that their stamp calls complete: without a scan the DEL would find nothing
		errs = append(errs, l.prepare(true))
	}
	return expired, next, errors.Join(errs...)
}

// expire drops a claim whose retention is over, or that no longer has an address behind it.
func (t *decision) expire(cl *Claim) error {
	hash := cl.Key.hash()
	for _, a := range cl.Addrs {
		s, err := t.slot(a)
		if err != nil {
			return err
		}
		switch s.state {
		case slotRetained:
			if k := s.retained.Key.hash(); (k == hash || k == cl.From) && !s.retained.expired(t.now) {
				return nil
			}
		case slotBound:
			if e, err := t.holder(s.att); err != nil || e == nil || e.claim == hash {
				return err
			}
		case slotGarbage, slotNewer:
			return nil
		}
	}
	return t.end(cl)
}

// end drops a promise for good.
func (t *decision) end(cl *Claim) error {
	t.out.addrs = cl.Addrs
	err := t.dropPromise(cl, nil)
	t.out.do(syncSlots{})
	return err
}

// Release ends a claim on purpose. A retained address is free at once; a bound one stays its attachment's and becomes
// free at its DEL. It takes the lock. Errors: ErrUnknownClaim, ErrNewer, or the disk's.
func (l *Ledger) Release(k Key) error {
	_, err := l.run(func(t *decision) error { return t.release(k) })
	return err
}

func (t *decision) release(k Key) error {
	hash := k.hash()
	cl, err := t.claim(hash)
	if errors.Is(err, ErrCorrupt) {
		cl, err = &Claim{Version: recordVersion, Key: k}, nil
	}
	if err == nil && cl == nil {
		err = fmt.Errorf("%w: %s", ErrUnknownClaim, k)
	}
	if err != nil {
		return err
	}
	holders, err := t.holders(hash)
	if err != nil {
		return err
	}
	for _, e := range holders {
		next := *e
		next.claim, next.open = "", false
		t.out.do(putEntry{&next, e})
	}
	return t.end(cl)
}

// Drop frees an address whose file says nothing; if it is promised, it is retained from now on. It is for a caller that
// has made sure that nothing uses the address; a file that says something by now is left alone. It takes the lock.
// ErrNewer means that a newer version has promised the address; any other error is the disk's.
func (l *Ledger) Drop(a netip.Addr) error {
	s, err := l.begin()
	if err != nil {
		return err
	}
	defer s.end()
	sl, err := s.slot(a)
	if err != nil || sl.state != slotGarbage {
		return err
	}
	claims, err := s.allClaims()
	if err != nil {
		return err
	}
	for _, c := range claims.newerClaims {
		if slices.Contains(c.Addrs, a) {
			return newerError(s.inState(claimsDir, c.Key.hash()), c.Version)
		}
	}
	steps := []step{freeSlot{a, sl}}
	for _, c := range claims.claims {
		if !slices.Contains(c.Addrs, a) {
			continue
		}
		steps = []step{putSlot{a, retainedOf(c, s.now, Netns{}).encode(), sl}}
		if c.Policy.Retention > 0 {
			steps = append(steps, noteEnd{c.Policy.Duration()})
		}
	}
	if err := s.apply(steps, false); err != nil {
		return err
	}
	return s.scan() // an entry that names the address must go before the address is another's
}
