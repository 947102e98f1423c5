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

// Expire ends every claim whose retention is over, and drops what an interrupted command has left: claims that
// no address stands behind, retained records without a claim. next is when it has to be called again, zero where
// nothing runs. It looks without the lock and takes it for each claim that it ends. One claim's failure does
// not keep the others: the errors are joined.
func (l *Ledger) Expire() (expired []Expired, next time.Duration, err error) {
	claims, err := l.claims()
	if err != nil {
		return nil, 0, err
	}
	addrs, err := l.List()
	if err != nil {
		return nil, 0, err
	}
	byAddr := make(map[netip.Addr]*Address, len(addrs))
	for i := range addrs {
		byAddr[addrs[i].Addr] = &addrs[i]
	}
	var errs []error
	end := func(k Key, cmd command) {
		r, err := l.run(cmd)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", k, err))
		} else if r.Addrs != nil {
			expired = append(expired, Expired{k, r.Addrs})
		}
	}
	byKey := map[Key]*Claim{}
	for _, c := range claims {
		byKey[c.Key] = c
		running := slices.ContainsFunc(c.Addrs, func(a netip.Addr) bool {
			ad := byAddr[a]
			return ad != nil && ad.Key != nil && *ad.Key == c.Key && (ad.State == StateBound || !ad.Ends || ad.Left > 0)
		})
		if !running {
			end(c.Key, expireCommand{c})
		}
	}
	for _, ad := range addrs {
		if ad.State != StateRetained {
			continue
		}
		if c := byKey[*ad.Key]; c == nil || !slices.Contains(c.Addrs, ad.Addr) {
			end(*ad.Key, orphanCommand{ad.Addr})
		} else if ad.Ends && ad.Left > 0 && (next == 0 || ad.Left < next) {
			next = ad.Left
		}
	}
	return expired, next, errors.Join(errs...)
}

func (l *Ledger) claims() ([]*Claim, error) {
	s, err := l.begin()
	if err != nil {
		return nil, err
	}
	s.end()
	claims, err := s.allClaims()
	if err != nil {
		return nil, err
	}
	return claims.known, nil
}

// expire drops a claim whose retention is over, or behind which no address stands any more.
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
	t.out.addrs = cl.Addrs
	return t.end(cl)
}

// orphan frees a retained address without a claim.
func (t *decision) orphan(c orphanCommand) error {
	s, err := t.slot(c.addr)
	if err != nil || s.state != slotRetained {
		return err
	}
	cl, err := t.claim(s.retained.Key.hash())
	if err != nil {
		return err
	}
	if cl != nil && slices.Contains(cl.Addrs, c.addr) {
		return nil
	}
	t.out.addrs = []netip.Addr{c.addr}
	t.out.do(freeSlot{c.addr, s}, syncSlots{})
	return nil
}

// Release ends a claim on purpose. A retained address is free at once; a bound one stays its attachment's
// and becomes free at its DEL.
func (l *Ledger) Release(k Key) error {
	s, err := l.begin()
	if err != nil {
		return err
	}
	defer s.end()
	c, err := s.claim(k.hash())
	if errors.Is(err, ErrCorrupt) {
		c, err = &Claim{Version: recordVersion, Key: k}, nil
	}
	if err != nil {
		return err
	}
	if c == nil {
		return fmt.Errorf("%w: %s", ErrUnknownClaim, k)
	}
	out, err := transition(s, l.net, s.now, releaseCommand{c})
	if err != nil {
		return err
	}
	return s.apply(out.steps, false)
}

// release ends a promise on purpose. Bound addresses stay with their attachment until its DEL, which then
// frees them.
func (t *decision) release(cl *Claim) error {
	holders, err := t.holders(cl.Key.hash())
	if err != nil {
		return err
	}
	for _, e := range holders {
		next := *e
		next.claim, next.open = "", false
		t.out.do(putEntry{&next, true})
	}
	t.out.addrs = cl.Addrs
	return t.end(cl)
}

// Drop frees an address whose file says nothing. It is for the agent, after it has made sure that nobody uses
// the address; a file that says something by now is left alone.
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
	for _, c := range claims.newer {
		if slices.Contains(c.Addrs, a) {
			return newerError(s.state(claimsDir, c.Key.hash()), c.Version)
		}
	}
	return s.apply([]step{freeSlot{a, sl}}, false)
}
