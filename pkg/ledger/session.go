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

func (s *session) marker() string               { return filepath.Join(s.l.dir, markerName) }
func (s *session) slotPath(a netip.Addr) string { return filepath.Join(s.l.dir, a.String()) }
func (s *session) lastPath(i int) string        { return filepath.Join(s.l.dir, lastPrefix+strconv.Itoa(i)) }
func (s *session) state(elem ...string) string {
	return filepath.Join(append([]string{s.l.state}, elem...)...)
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

func (s *session) readLast(i int) (netip.Addr, error) {
	b, err := s.l.fs.ReadFile(s.lastPath(i))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return netip.Addr{}, err
	}
	a, _ := netip.ParseAddr(string(b)) // host-local ignores what it cannot parse, too
	return a.Unmap(), nil
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

// replace writes a file of the state directory that is whole at every moment, but not durable.
func (s *session) replace(path string, data []byte) error {
	tmp := s.state(tempState)
	if err := s.l.fs.WriteFile(tmp, data, modeState); err != nil {
		return err
	}
	return s.l.fs.Rename(tmp, path)
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

func (s *session) holders(claim string) ([]*entry, error) {
	if !s.trusted {
		if err := s.scan(); err != nil {
			return nil, err
		}
	}
	entries, _, err := s.allEntries()
	return slices.DeleteFunc(entries, func(e *entry) bool { return e.claim != claim }), err
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

func (s *session) last(i int) netip.Addr { return s.lasts[i] }

func (s *session) liveness(ns Netns, boot string) Liveness {
	return liveness(s.l.netns, ns, boot, s.now)
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

// apply carries out steps in their order. With undo a failure takes back what was done before it, from the
// end, up to the first step that the disk does not let it take back: what is left is a prefix of the order, which
// is what a kill leaves.
func (s *session) apply(steps []step, undo bool) error {
	for i, st := range steps {
		if err := s.do(st); err != nil {
			for j := i; undo && j >= 0; j-- {
				if s.undo(steps[j]) != nil {
					break
				}
			}
			return err
		}
	}
	return nil
}

func (s *session) do(st step) error {
	s.touched = true
	switch st := st.(type) {
	case putEntry:
		path := s.state(indexDir, st.entry.att.hash())
		if st.again {
			return s.replace(path, st.entry.encode())
		}
		return s.l.fs.WriteFile(path, st.entry.encode(), modeState)
	case dropEntry:
		return s.remove(s.state(indexDir, st.was.att.hash()))
	case putSlot:
		if st.was.state != slotFree {
			return s.replaceSlot(st.addr, st.data)
		}
		return s.writeSlot(st.addr, st.data)
	case freeSlot:
		return s.remove(s.slotPath(st.addr))
	case adoptSlot:
		return s.l.fs.Chmod(s.slotPath(st.addr), modeOurs)
	case syncSlots:
		return s.l.fs.SyncDir(s.l.dir)
	case setLast:
		return s.writeLast(st.rangeSet, st.addr)
	case putClaim:
		if st.claim.Key.shared() {
			if err := s.addToSet(st.claim.Key); err != nil {
				return err
			}
		}
		return s.writeClaim(st.claim)
	case dropClaim:
		return s.removeClaim(st.was.Key)
	case confirmClaim:
		return s.confirmClaim(st.claim.Key)
	}
	panic("unknown step")
}

// undo takes one step back, also one that failed half-way.
func (s *session) undo(st step) error {
	switch st := st.(type) {
	case putEntry:
		return s.remove(s.state(indexDir, st.entry.att.hash()))
	case dropEntry:
		return s.do(putEntry{entry: st.was})
	case putSlot:
		if st.was.state == slotFree {
			return s.remove(s.slotPath(st.addr))
		}
		return s.writeSlot(st.addr, st.was.raw)
	case freeSlot:
		return s.writeSlot(st.addr, st.was.raw)
	case putClaim:
		if st.was == nil {
			return s.removeClaim(st.claim.Key)
		}
		return s.do(putClaim{claim: st.was})
	case dropClaim:
		return s.do(putClaim{claim: st.was})
	}
	return nil
}

func (s *session) remove(path string) error {
	if err := s.l.fs.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// writeLast writes in place where it can: a file that is truncated and written again is flushed to the disk
// by ext4, at ten times the cost.
func (s *session) writeLast(i int, a netip.Addr) error {
	text := []byte(a.String())
	was := s.lasts[i]
	s.lasts[i] = a
	if was.IsValid() && len(was.String()) == len(text) {
		return s.l.fs.Overwrite(s.lastPath(i), text)
	}
	return s.l.fs.WriteFile(s.lastPath(i), text, modeHostLocal)
}

func (s *session) writeSlot(a netip.Addr, data []byte) error {
	tmp := filepath.Join(s.l.dir, tempName)
	if err := s.l.fs.WriteFile(tmp, data, modeOurs); err != nil {
		return err
	}
	return s.l.fs.Rename(tmp, s.slotPath(a))
}

// replaceSlot writes the file of an address that has one. A rename over a file makes ext4 write the new content
// out before it returns (auto_da_alloc), which takes longer than all the rest; an exchange does not, and
// whether the content is on the disk is of no interest here.
func (s *session) replaceSlot(a netip.Addr, data []byte) error {
	tmp := filepath.Join(s.l.dir, tempName)
	if err := s.l.fs.WriteFile(tmp, data, modeOurs); err != nil {
		return err
	}
	err := s.l.fs.Exchange(tmp, s.slotPath(a))
	switch {
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, fs.ErrNotExist):
		return s.l.fs.Rename(tmp, s.slotPath(a))
	case err != nil:
		return err
	}
	s.l.fs.Remove(tmp) // if not, it is written over
	return nil
}

// writeClaim returns when the claim is durable: content first, then the name.
func (s *session) writeClaim(c *Claim) error {
	tmp := s.state(tempState)
	if err := s.l.fs.WriteFile(tmp, c.encode(), modeState); err != nil {
		return err
	}
	if err := s.l.fs.SyncFile(tmp); err != nil {
		return err
	}
	if err := s.l.fs.Rename(tmp, s.state(claimsDir, c.Key.hash())); err != nil {
		return err
	}
	return s.confirmClaim(c.Key)
}

// confirmClaim returns when the claim's name is durable, and remembers that in its mode.
func (s *session) confirmClaim(k Key) error {
	path := s.state(claimsDir, k.hash())
	if mode, err := s.l.fs.Mode(path); err != nil || mode == modeDurable {
		return err
	}
	if err := s.l.fs.SyncDir(s.state(claimsDir)); err != nil {
		return err
	}
	return s.l.fs.Chmod(path, modeDurable)
}

func (s *session) removeClaim(k Key) error {
	if k.shared() {
		set := s.state(setsDir, k.setHash())
		if err := s.remove(filepath.Join(set, k.hash())); err != nil {
			return err
		}
		s.l.fs.RemoveDir(set) // fails while the set has other claims
	}
	if err := s.remove(s.state(claimsDir, k.hash())); err != nil {
		return err
	}
	return s.l.fs.SyncDir(s.state(claimsDir))
}

func (s *session) addToSet(k Key) error {
	path := s.state(setsDir, k.setHash(), k.hash())
	err := s.l.fs.WriteFile(path, nil, modeState)
	if errors.Is(err, fs.ErrNotExist) {
		if err = s.l.fs.Mkdir(filepath.Dir(path)); err == nil || errors.Is(err, fs.ErrExist) {
			err = s.l.fs.WriteFile(path, nil, modeState)
		}
	}
	return err
}
