package ledger

import (
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
)

// The names in a network directory and in a state directory.
const (
	lockFile   = "lock" // host-local's
	lastPrefix = "last_reserved_ip."
	tempName   = ".stayput.tmp" // the one name every address file is renamed from
	markerName = ".stayput.boot"

	claimsDir = "claims" // <hash of key>: Claim
	indexDir  = "index"  // <hash of attachment>: entry
	setsDir   = "sets"   // <hash of identity and ifname>/<hash of key>: empty; which claims a shared identity has
	marksDir  = "marks"  // <hash of container ID>: Mark
	infoName  = "network"
	tempState = ".tmp" // what a file of the state directory is renamed from
)

// session is one command's hold on a network: the lock is held from begin to end. It is the book that the
// transition reads, and carries out what the transition returns.
type session struct {
	l       *Ledger
	now     Instant
	unlock  func()
	stamp   stamp
	lasts   []netip.Addr // last_reserved_ip.N as they stand
	trusted bool         // the stamp agrees with the directory: the index is complete
	touched bool         // the directory, a last_reserved_ip or the marker have to be stamped anew
}

// begin takes the lock and, at the first command of a boot, rebuilds.
func (l *Ledger) begin() (*session, error) {
	now, err := l.clock.Now()
	if err != nil {
		return nil, err
	}
	unlock, err := l.fs.Lock(filepath.Join(l.dir, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		if err = MkdirAll(l.fs, l.dir); err == nil {
			unlock, err = l.fs.Lock(filepath.Join(l.dir, lockFile))
		}
	}
	if err != nil {
		return nil, err
	}
	s := &session{l: l, now: now, unlock: unlock}
	if err := s.open(); err != nil {
		unlock()
		return nil, err
	}
	return s, nil
}

// end stamps the directory as we leave it and gives the lock back. A stamp that cannot be written costs the
// next command a scan, nothing else.
func (s *session) end() {
	if s.touched && s.trusted {
		if mtime, err := s.l.fs.ChangeTime(s.l.dir); err == nil {
			s.stamp = stamp{boot: s.now.BootID, mtime: mtime, last: s.lasts, config: s.stamp.config}
			s.l.fs.Overwrite(s.marker(), s.stamp.encode())
		}
	}
	s.unlock()
}

// open reads the marker and rebuilds where it must.
func (s *session) open() error {
	b, err := s.l.fs.ReadFile(s.marker())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s.rebuild(false)
	case err != nil:
		return err
	}
	if s.stamp, err = decodeStamp(b, s.marker()); err != nil {
		return err
	}
	if s.stamp.boot != s.now.BootID {
		return s.rebuild(s.stamp.boot != "")
	}
	if _, err := s.l.fs.Mode(s.state(claimsDir)); errors.Is(err, fs.ErrNotExist) {
		// The state was wiped. Without the marker a rebuild that is killed begins again.
		if err := s.remove(s.marker()); err != nil {
			return err
		}
		return s.rebuild(false)
	} else if err != nil {
		return err
	}
	mtime, err := s.l.fs.ChangeTime(s.l.dir)
	if err != nil {
		return err
	}
	s.lasts = make([]netip.Addr, max(len(s.l.net.Ranges), len(s.stamp.last)))
	same := len(s.stamp.last) >= len(s.l.net.Ranges)
	for i := range s.lasts {
		if s.lasts[i], err = s.readLast(i); err != nil {
			return err
		}
		same = same && i < len(s.stamp.last) && s.lasts[i] == s.stamp.last[i]
	}
	s.trusted = mtime == s.stamp.mtime && same
	return s.recordInfo()
}

// recordInfo keeps the network's configuration for those who have no CNI configuration: the agent.
func (s *session) recordInfo() error {
	print := s.l.net.fingerprint()
	if !s.l.configured || s.stamp.config == print {
		return nil
	}
	s.stamp.config, s.touched = print, true
	return s.replace(s.state(infoName), s.l.net.encode())
}

func (s *session) entry(att Attachment) (*entry, error) {
	e, err := s.readEntry(att.hash())
	if err != nil || e != nil && e.att == att {
		return e, err
	}
	if s.trusted {
		return nil, nil
	}
	if err := s.scan(); err != nil {
		return nil, err
	}
	e, err = s.readEntry(att.hash())
	if err != nil || e == nil || e.att != att {
		return nil, err
	}
	return e, nil
}

// holder is the entry of an attachment that an address file names. Where there is none the index is
// incomplete, whatever the stamp says.
func (s *session) holder(att Attachment) (*entry, error) {
	e, err := s.entry(att)
	if err == nil && e == nil {
		s.trusted = false
		e, err = s.entry(att)
	}
	return e, err
}

func (s *session) holders(claim string) ([]*entry, error) {
	if !s.trusted {
		if err := s.scan(); err != nil {
			return nil, err
		}
	}
	entries, _, err := s.allEntries()
	return slices.DeleteFunc(entries, func(e *entry) bool { return e.claim != claim }), err
}

func (s *session) last(i int) netip.Addr { return s.lasts[i] }

func (s *session) liveness(ns Netns, boot string) Liveness {
	return liveness(s.l.netns, ns, boot, s.now)
}

// scan completes the index from the address files.
func (s *session) scan() error { return s.reconcile(false, false) }

// rebuild brings everything into agreement and writes the marker last.
func (s *session) rebuild(newBoot bool) error {
	for _, dir := range []string{claimsDir, indexDir, setsDir, marksDir} {
		if err := MkdirAll(s.l.fs, s.state(dir)); err != nil {
			return err
		}
	}
	if err := syncPathTo(s.l.fs, s.state(claimsDir)); err != nil {
		return err
	}
	if err := syncPathTo(s.l.fs, s.state(marksDir)); err != nil {
		return err
	}
	// A file system without a journal may have kept both names of a rename: writing to the old one would
	// write into the new one.
	for _, tmp := range []string{filepath.Join(s.l.dir, tempName), s.state(tempState)} {
		if err := s.remove(tmp); err != nil {
			return err
		}
	}
	s.lasts = make([]netip.Addr, len(s.l.net.Ranges))
	for i := range s.lasts {
		var err error
		if s.lasts[i], err = s.readLast(i); err != nil {
			return err
		}
	}
	s.stamp = stamp{}
	if err := s.recordInfo(); err != nil {
		return err
	}
	return s.reconcile(newBoot, true)
}

func (s *session) reconcile(newBoot, full bool) error {
	p := &picture{}
	var err error
	if p.slots, err = s.allSlots(); err != nil {
		return err
	}
	claims, err := s.allClaims()
	if err != nil {
		return err
	}
	p.claims, p.newerClaims, p.corrupt = claims.known, claims.newer, claims.corrupt
	if p.entries, p.newerEntries, err = s.allEntries(); err != nil {
		return err
	}
	if full {
		if p.marks, p.newerMarks, err = s.allMarks(); err != nil {
			return err
		}
	}
	steps := rebuild(p, s.l.net, s.now, newBoot, s.liveness)
	if !full {
		// A scan is for the index alone.
		steps = slices.DeleteFunc(steps, func(st step) bool {
			switch st.(type) {
			case putEntry, dropEntry:
				return false
			}
			return true
		})
	}
	if err := s.apply(steps, false); err != nil {
		return err
	}
	s.trusted, s.touched = true, true
	if !full {
		return nil
	}
	if err := s.indexSets(p.claims); err != nil {
		return err
	}
	// Durable, so that a power loss in this boot leaves a marker that names it.
	st := stamp{boot: s.now.BootID, mtime: -1, config: s.stamp.config}
	tmp := filepath.Join(s.l.dir, tempName)
	if err := s.l.fs.WriteFile(tmp, st.encode(), modeState); err != nil {
		return err
	}
	if err := s.l.fs.SyncFile(tmp); err != nil {
		return err
	}
	if err := s.l.fs.Rename(tmp, s.marker()); err != nil {
		return err
	}
	return s.l.fs.SyncDir(s.l.dir)
}

// indexSets makes the directory of shared identities say which claims there are.
func (s *session) indexSets(claims []*Claim) error {
	for _, c := range claims {
		if c.Key.shared() {
			if err := s.addToSet(c.Key); err != nil {
				return err
			}
		}
	}
	return nil
}
