package ledger

import (
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/stayput/stayput/pkg/disk"
)

// session is one command's hold on a network: the lock is held from begin to end. It knows how far the files can be
// believed, so that it is the book that the command's decision reads, and it carries out what was decided.
type session struct {
	*Ledger
	now    Instant
	unlock func()
	stamp  stamp
	lasts  []netip.Addr // last_reserved_ip.N as they stand
	due    bool         // no command has rebuilt in this boot, or something was wiped since
	// trusted says that the stamp agrees with the directories, so that index and claims are complete unless a file was
	// changed without the lock; scanned that they were completed under this lock, so that they are complete.
	trusted, scanned bool
	touched          bool    // the directory, a last_reserved_ip or the marker have to be stamped again
	counted          *counts // nil if not read
}

// begin takes the lock for a command that writes. At the first one of a boot it makes the directories and rebuilds.
func (l *Ledger) begin() (*session, error) {
	s, err := l.lock()
	if errors.Is(err, fs.ErrNotExist) {
		if err = disk.MkdirAll(l.fs, l.dir); err == nil {
			s, err = l.lock()
		}
	}
	if err != nil {
		return nil, err
	}
	switch {
	case s.due:
		err = s.rebuild()
	case s.trusted:
		err = s.recordInfo()
	default: // the last one may have been killed
		err = errors.Join(s.removeTemps(), s.recordInfo())
	}
	if err != nil {
		s.unlock()
		return nil, err
	}
	return s, nil
}

// beginRead takes the lock to read. It changes nothing: due and trusted tell what the next command has to do first.
func (l *Ledger) beginRead() (*session, error) {
	s, err := l.lock()
	if errors.Is(err, fs.ErrNotExist) { // without the directory there is no lock, and nothing but claims to read
		now, err := l.clock.Now()
		return &session{Ledger: l, now: now, unlock: func() {}, due: true}, err
	}
	return s, err
}

// lock takes the lock and finds out how the last command left the network.
func (l *Ledger) lock() (*session, error) {
	unlock, err := l.fs.Lock(filepath.Join(l.dir, lockFile))
	if err != nil {
		return nil, err
	}
	s := &session{Ledger: l, unlock: unlock}
	if s.now, err = l.clock.Now(); err == nil { // not earlier than the command before
		err = s.open()
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return s, nil
}

func (s *session) open() error {
	b, err := s.fs.ReadFile(s.marker())
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !disk.Unreadable(err) {
		return err
	}
	if s.stamp, err = decodeStamp(b, s.marker()); err != nil {
		return err
	}
	s.now.time = s.stamp.read.timeAt(s.now)
	if s.stamp.boot != s.now.BootID || s.stamp.mtime == underWay || s.now.time.IsZero() {
		s.due = true
		return nil
	}
	state, err := s.stampState()
	if errors.Is(err, fs.ErrNotExist) {
		s.due = true
		return nil
	} else if err != nil {
		return err
	}
	mtime, err := s.fs.ChangeTime(s.dir)
	if err != nil {
		return err
	}
	s.lasts = make([]netip.Addr, max(len(s.net.Ranges), len(s.stamp.last)))
	same := len(s.stamp.last) >= len(s.net.Ranges)
	for i := range s.lasts {
		var there bool
		if s.lasts[i], there, err = s.readLast(i); err != nil {
			return err
		}
		known := i < len(s.stamp.last)
		if known && s.stamp.last[i].IsValid() && !s.lasts[i].IsValid() {
			if !there {
				s.due = true // as if the marker were missing: who removed this file removed others, too
				return nil
			}
			s.lasts[i] = s.stamp.last[i] // a kill tore it: it must go on to be missed
		}
		if !known || s.lasts[i] != s.stamp.last[i] {
			same = false
		}
	}
	s.trusted = mtime == s.stamp.mtime && same && slices.Equal(state, s.stamp.state)
	return nil
}

// end stamps the directory as this command leaves it and gives the lock back. A stamp that cannot be written costs
// the next command a scan, nothing else. A reading of a clock that was set is durable: the next boot is compared with
// it.
func (s *session) end() {
	defer s.unlock()
	outdated, set := s.stamp.read.outdated(s.now)
	if !s.trusted || !s.touched && !outdated || s.writeCounts(s.counted) != nil {
		return
	}
	if s.touched {
		mtime, err1 := s.fs.ChangeTime(s.dir)
		state, err2 := s.stampState()
		if err1 != nil || err2 != nil {
			return
		}
		s.stamp = s.stamped(mtime, state)
	}
	s.stamp.read = s.now.reading()
	if s.fs.Overwrite(s.marker(), s.stamp.encode()) == nil && set {
		_ = s.fs.SyncFile(s.marker())
	}
}

// stamped returns the stamp of this boot, for directories that were changed then.
func (s *session) stamped(mtime int64, state []int64) stamp {
	return stamp{
		boot: s.now.BootID, read: s.now.reading(), mtime: mtime, last: s.lasts, config: s.stamp.config, state: state,
	}
}

// recordInfo keeps the network's configuration for the agent, which has no CNI configuration.
func (s *session) recordInfo() error {
	print := s.net.fingerprint()
	if !s.configured || s.stamp.config == print {
		return nil
	}
	if err := s.remove(s.inState(countsName)); err != nil { // they were of other ranges
		return err
	}
	s.stamp.config, s.touched = print, true
	return s.replace(s.inState(infoName), s.net.encode())
}

// decide makes a decision. If that needs an attachment that the index does not know, though an address file may name
// it, the index is completed and the decision made once more.
func (s *session) decide(f func(*decision) error) (*outcome, error) {
	out, err := decide(s, s.net, s.now, f)
	if errors.Is(err, errIncomplete) {
		if err := s.scan(); err != nil {
			return nil, err
		}
		out, err = decide(s, s.net, s.now, f)
	}
	return out, err
}

// The part of the book that is not in files alone.

func (s *session) claim(hash string) (*Claim, error) {
	c, err := s.files.claim(hash)
	if (errors.Is(err, ErrCorrupt) || err == nil && c == nil && !s.trusted) && !s.scanned {
		return nil, errIncomplete
	}
	return c, err
}

func (s *session) entry(att Attachment) (*entry, error) {
	e, err := s.files.entry(att)
	corrupt := errors.Is(err, ErrCorrupt)
	switch {
	case (corrupt || err == nil && e == nil && !s.trusted) && !s.scanned:
		return nil, errIncomplete
	case corrupt:
		return nil, nil
	}
	return e, err
}

func (s *session) holder(att Attachment) (*entry, error) {
	e, err := s.entry(att)
	if err == nil && e == nil && !s.scanned {
		err = errIncomplete
	}
	return e, err
}

func (s *session) holders(claim string) ([]*entry, error) {
	index, err := s.allEntries()
	if err == nil && (!s.trusted || len(index.corruptEntries) > 0) && !s.scanned {
		err = errIncomplete
	}
	return slices.DeleteFunc(index.entries, func(e *entry) bool { return e.claim != claim }), err
}

func (s *session) last(i int) netip.Addr {
	if i >= len(s.lasts) {
		return netip.Addr{}
	}
	return s.lasts[i]
}

func (s *session) liveness(ns Netns, boot string) Liveness {
	return liveness(s.netns, ns, boot, s.now)
}

// picture reads everything. If a rebuild is due, the picture is what it will make of the files.
func (s *session) picture() (*picture, error) {
	p, err := s.files.picture()
	if err == nil && s.due {
		s.now = s.now.dated(p)
		p.apply(rebuild(p, s.net, s.now, s.stamp.ofAnotherBoot(s.now), s.liveness))
	}
	return p, err
}

// scan completes the index and the claims from the address files, and removes what does not parse from the index.
func (s *session) scan() error {
	p, err := s.files.picture()
	if err != nil {
		return err
	}
	return s.agree(p, scan(p, s.net, s.now, s.liveness))
}

// agree carries out the steps of a scan or a rebuild. First it makes durable which claims and address files there are:
// a claim that was wiped, or that a killed command removed, must not come back with a power loss once others have been
// told that it is gone, nor must the retained records that it is made from.
func (s *session) agree(p *picture, steps []step) error {
	for _, dir := range []string{s.inState(claimsDir), s.dir} {
		if err := s.fs.SyncDir(dir); err != nil {
			return err
		}
	}
	for _, name := range p.corruptEntries {
		if err := s.remove(s.inState(indexDir, name)); err != nil && !disk.Unreadable(err) {
			return err
		}
	}
	if err := s.apply(steps, false); err != nil {
		return err
	}
	for _, c := range p.claims {
		if c.Key.shared() {
			if err := s.addToSet(c.Key); err != nil {
				return err
			}
		}
	}
	s.counted = p.countAfter(steps, s.net, s.now)
	s.trusted, s.scanned, s.touched = true, true, true
	return nil
}

// rebuild brings everything into agreement and writes the marker last.
func (s *session) rebuild() error {
	if err := s.markUnderWay(s.stamp, s.now); err != nil {
		return err
	}
	for _, dir := range []string{claimsDir, indexDir, setsDir} {
		if err := disk.MkdirAll(s.fs, s.inState(dir)); err != nil {
			return err
		}
	}
	// Also of the network directory: after a wipe a power loss would bring the old one back, marker and all.
	for _, dir := range []string{s.inState(claimsDir), s.dir} {
		if err := disk.SyncPathTo(s.fs, dir); err != nil {
			return err
		}
	}
	if err := s.removeTemps(); err != nil {
		return err
	}
	if err := s.rebuildLasts(); err != nil {
		return err
	}
	newBoot := s.stamp.ofAnotherBoot(s.now)
	s.stamp = stamp{}
	if err := s.recordInfo(); err != nil {
		return err
	}
	p, err := s.files.picture()
	if err != nil {
		return err
	}
	s.now = s.now.dated(p)
	if err := s.agree(p, rebuild(p, s.net, s.now, newBoot, s.liveness)); err != nil {
		return err
	}
	return s.writeMarker(s.stamped(-1, nil))
}

// rebuildLasts makes a last_reserved_ip.N for every range set, which from now on must be there for as long as the
// address files are: as the last stamp knew it, or so that allocation begins at the beginning.
func (s *session) rebuildLasts() error {
	s.lasts = make([]netip.Addr, max(len(s.net.Ranges), len(s.stamp.last)))
	for i := range s.lasts {
		a, _, err := s.readLast(i)
		if err != nil {
			return err
		}
		if s.lasts[i] = a; a.IsValid() {
			continue // but not if a power loss tore it: what the marker does not know cannot be missed
		}
		var was netip.Addr
		if i < len(s.stamp.last) {
			was = s.stamp.last[i]
		}
		if !was.IsValid() && i < len(s.net.Ranges) {
			set := s.net.Ranges[i]
			was = set[len(set)-1].End
		}
		if was.IsValid() {
			if err := s.writeLast(i, was); err != nil {
				return err
			}
		}
	}
	return nil
}
