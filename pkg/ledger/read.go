package ledger

import (
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

func (s *session) marker() string { return filepath.Join(s.l.dir, markerName) }

func (s *session) slotPath(a netip.Addr) string { return filepath.Join(s.l.dir, a.String()) }

func (s *session) lastPath(i int) string { return filepath.Join(s.l.dir, lastPrefix+strconv.Itoa(i)) }

func (s *session) state(elem ...string) string {
	return filepath.Join(append([]string{s.l.state}, elem...)...)
}

func (s *session) readLast(i int) (netip.Addr, error) {
	b, err := s.l.fs.ReadFile(s.lastPath(i))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return netip.Addr{}, err
	}
	a, _ := netip.ParseAddr(string(b)) // host-local ignores what it cannot parse, too
	return a.Unmap(), nil
}

// The book.

func (s *session) slot(a netip.Addr) (slot, error) {
	b, err := s.l.fs.ReadFile(s.slotPath(a))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return slot{}, nil
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ELOOP):
		return slot{state: slotGarbage}, nil
	case err != nil:
		return slot{}, err
	}
	return decodeSlot(b), nil
}

func (s *session) ours(a netip.Addr) (bool, error) {
	mode, err := s.l.fs.Mode(s.slotPath(a))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return mode == modeOurs, err
}

func (s *session) claim(hash string) (*Claim, error) {
	path := s.state(claimsDir, hash)
	b, err := s.l.fs.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	return decodeClaim(b, path)
}

// readEntry returns nil for an entry that does not parse: the index is a cache, and the scan will find
// what the address files say.
func (s *session) readEntry(hash string) (*entry, error) {
	path := s.state(indexDir, hash)
	b, err := s.l.fs.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	e, err := decodeEntry(b, path)
	if errors.Is(err, ErrNewer) {
		return nil, err
	} else if err != nil {
		s.trusted = false
		return nil, nil
	}
	return e, nil
}

func (s *session) mark(containerID string) (*Mark, error) {
	path := s.state(marksDir, hashOf(containerID))
	b, err := s.l.fs.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	// One that does not parse is none: the agent makes the claim within moments of the mark.
	m, err := decodeMark(b, path)
	if errors.Is(err, ErrCorrupt) {
		return nil, nil
	}
	return m, err
}

func (s *session) setClaims(k Key) ([]*Claim, error) {
	names, err := s.l.fs.ReadDir(s.state(setsDir, k.setHash()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var claims []*Claim
	for _, hash := range names {
		c, err := s.claim(hash)
		if err != nil && !errors.Is(err, ErrCorrupt) {
			return nil, err
		}
		if c != nil {
			claims = append(claims, c)
		}
	}
	return claims, nil
}

func (s *session) retainedFor(k Key) (*Retained, error) {
	slots, err := s.allSlots()
	if err != nil {
		return nil, err
	}
	for a, sl := range slots {
		switch {
		case sl.state == slotRetained && sl.retained.Key == k:
			return sl.retained, nil
		case sl.state == slotNewer && sl.retained.Key == k:
			return nil, newerError(s.slotPath(a), sl.retained.Version)
		}
	}
	return nil, nil
}

func (s *session) countClaims() (int, error) {
	names, err := s.l.fs.ReadDir(s.state(claimsDir))
	return len(names), err
}

// countPromised counts the claims that lie in set and are neither expired nor without an address behind them.
func (s *session) countPromised(set RangeSet, now Instant) (int, error) {
	claims, err := s.allClaims()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, c := range append(claims.known, claims.newer...) {
		for _, a := range c.Addrs {
			if !set.allocatable(a) {
				continue
			}
			sl, err := s.slot(a)
			if err != nil {
				return 0, err
			}
			if sl.state == slotBound || sl.state == slotGarbage || sl.state == slotNewer || sl.state == slotRetained && !sl.retained.expired(now) {
				n++
			}
		}
	}
	return n, nil
}

// Everything at once: for scans.

func (s *session) allSlots() (map[netip.Addr]slot, error) {
	names, err := s.l.fs.ReadDir(s.l.dir)
	if err != nil {
		return nil, err
	}
	slots := make(map[netip.Addr]slot, len(names))
	for _, name := range names {
		a, err := netip.ParseAddr(name)
		if err != nil || a.String() != name {
			continue
		}
		sl, err := s.slot(a)
		if err != nil {
			return nil, err
		}
		if sl.ours, err = s.ours(a); err != nil {
			return nil, err
		}
		if sl.state != slotFree {
			slots[a] = sl
		}
	}
	return slots, nil
}

// claimFiles is what the claims of a network say.
type claimFiles struct {
	known   []*Claim
	newer   []*Claim        // of a newer version: only version, key and addresses are known
	corrupt map[string]bool // hashes of those that do not parse
}

// allClaims fails where a newer claim does not even say whose it is.
func (s *session) allClaims() (*claimFiles, error) {
	claims := &claimFiles{corrupt: map[string]bool{}}
	names, err := s.l.fs.ReadDir(s.state(claimsDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, hash := range names {
		c, err := s.claim(hash)
		switch {
		case errors.Is(err, ErrCorrupt):
			claims.corrupt[hash] = true
		case errors.Is(err, ErrNewer) && c != nil:
			claims.newer = append(claims.newer, c)
		case err != nil:
			return nil, err
		case c != nil:
			claims.known = append(claims.known, c)
		}
	}
	slices.SortFunc(claims.known, func(a, b *Claim) int { return slices.Compare([]byte(a.Key.String()), []byte(b.Key.String())) })
	return claims, nil
}

// allEntries removes what does not parse. Of newer entries the names are returned, which are the hashes of the
// attachments.
func (s *session) allEntries() (entries []*entry, newer map[string]bool, err error) {
	names, err := s.l.fs.ReadDir(s.state(indexDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	} else if err != nil {
		return nil, nil, err
	}
	slices.Sort(names)
	newer = map[string]bool{}
	for _, hash := range names {
		path := s.state(indexDir, hash)
		b, err := s.l.fs.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, nil, err
		}
		e, err := decodeEntry(b, path)
		if errors.Is(err, ErrNewer) {
			newer[hash] = true
			continue
		}
		if err != nil || e.att.hash() != hash {
			s.l.fs.Remove(path)
			continue
		}
		entries = append(entries, e)
	}
	return entries, newer, nil
}

// allMarks returns the marks by container ID, and the names of newer ones, which are the hashes of those.
func (s *session) allMarks() (marks map[string]*Mark, newer map[string]bool, err error) {
	names, err := s.l.fs.ReadDir(s.state(marksDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	} else if err != nil {
		return nil, nil, err
	}
	marks, newer = map[string]*Mark{}, map[string]bool{}
	for _, hash := range names {
		path := s.state(marksDir, hash)
		b, err := s.l.fs.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, err
		}
		m, err := decodeMark(b, path)
		switch {
		case err == nil:
			marks[m.ContainerID] = m
		case errors.Is(err, ErrNewer):
			newer[hash] = true
		}
	}
	return marks, newer, nil
}
