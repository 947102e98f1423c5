package ledger

import (
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/disk"
)

// Freed is what Uninstall did.
type Freed struct {
	// Addrs were retained, or bound in an earlier boot, and are free. InUse were promised to attachments of this boot:
	// they are ordinary ones now, and become free at the DELs of these.
	Addrs, InUse []netip.Addr
}

// Uninstall ends every promise and leaves the network to host-local: retained addresses become free, bound ones are as
// host-local would have written them, and nothing of ours is left in the network directory or of its state. Records of
// newer versions go too. It takes the lock, and may be called again. Freed is never nil, and true after an error, which
// is the disk's.
//
// The claims go first and durably, since no power loss may bring a promise back for an address that was given away; the
// description of the network goes last, since by it Networks finds what is left to do after a kill.
func (l *Ledger) Uninstall() (*Freed, error) {
	freed := &Freed{}
	now, err := l.clock.Now()
	if err != nil {
		return freed, err
	}
	_, err = l.fs.Mode(l.inState(indexDir))
	served := err == nil
	lock := filepath.Join(l.dir, lockFile)
	unlock, err := l.fs.Lock(lock)
	if errors.Is(err, fs.ErrNotExist) {
		if !served {
			return freed, l.forgetAll()
		}
		if err = disk.MkdirAll(l.fs, l.dir); err == nil {
			unlock, err = l.fs.Lock(lock)
		}
	}
	if err != nil {
		return freed, err
	}
	defer unlock()
	s := &session{Ledger: l, now: now, unlock: unlock}
	if err := s.open(); err != nil && !errors.Is(err, ErrNewer) {
		return freed, err
	}
	if s.due && served {
		// What was wiped under running pods must be there again before host-local gives it away.
		if err := s.rebuild(); err != nil {
			return freed, err
		}
	}

	index, err := s.allEntries()
	if err != nil {
		return freed, err
	}
	byAtt := map[Attachment]*entry{}
	for _, e := range index.entries {
		byAtt[e.att] = e
	}
	if err := s.removeClaims(); err != nil {
		return freed, err
	}
	slots, err := s.allSlots()
	if err != nil {
		return freed, err
	}
	for _, a := range slices.SortedFunc(maps.Keys(slots), netip.Addr.Compare) {
		sl := slots[a]
		e := byAtt[sl.att]
		switch {
		case sl.state == slotRetained, sl.state == slotNewer, sl.state == slotGarbage && len(sl.raw) > 0 && sl.raw[0] == '{',
			sl.state == slotBound && e != nil && e.claim != "" && e.boot != now.BootID:
			if err := s.remove(s.slotPath(a)); err != nil {
				return freed, err
			}
			freed.Addrs = append(freed.Addrs, a)
		case sl.state == slotBound:
			if e != nil && e.claim != "" {
				freed.InUse = append(freed.InUse, a)
			}
			if !sl.ours {
				continue
			}
			if err := l.fs.Chmod(s.slotPath(a), modeHostLocal); err != nil {
				return freed, err
			}
		}
	}
	return freed, s.removeNetwork()
}

// removeNetwork removes what is ours of a network whose claims are gone.
func (w *writer) removeNetwork() error {
	for _, name := range []string{tempName, markerName} {
		if err := w.remove(filepath.Join(w.dir, name)); err != nil {
			return err
		}
	}
	if err := w.fs.SyncDir(w.dir); err != nil { // a retained record is a promise of its own
		return err
	}
	for _, dir := range []string{claimsDir, indexDir, setsDir} {
		if err := disk.RemoveAll(w.fs, w.inState(dir)); err != nil {
			return err
		}
	}
	return disk.RemoveAll(w.fs, w.state)
}

// Forget removes what is ours of a network that has had no address for so long, and reports whether it did. The next
// command makes it again. It takes the lock; the errors are the disk's.
func (l *Ledger) Forget(unused time.Duration) (forgotten bool, err error) {
	s, err := l.begin()
	if err != nil {
		return false, err
	}
	p, err := s.files.picture()
	changed, err2 := s.fs.ChangeTime(s.dir)
	if err := errors.Join(err, err2); err != nil ||
		len(p.slots)+len(p.claims)+len(p.newerClaims)+len(p.corrupt)+len(p.entries)+len(p.newerEntries) > 0 ||
		s.now.Wall.Sub(time.Unix(0, changed)) < unused {
		s.end()
		return false, err
	}
	defer s.unlock()
	return true, s.removeNetwork()
}

// RemoveState removes what is left of the state directory once every network was uninstalled: what a kill left of a
// network without its description, and the directory itself. What is not of a ledger stays. So does a network that
// still has a description, because it could not be uninstalled or is in use again: left says how many there are.
// It takes no lock. The errors are the disk's, joined.
func RemoveState(o Options) (left int, err error) {
	o.setDefaults()
	names, err := o.FS.ReadDir(o.StateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	var errs []error
	for _, name := range names {
		path := filepath.Join(o.StateDir, name)
		sub, err := o.FS.ReadDir(path)
		switch {
		case errors.Is(err, errNotADirectory), errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		case slices.Contains(sub, infoName):
			left++
		case !slices.ContainsFunc(sub, func(s string) bool {
			return !slices.Contains([]string{claimsDir, indexDir, setsDir, countsName, tempState}, s)
		}):
			errs = append(errs, disk.RemoveAll(o.FS, path))
		}
	}
	if left == 0 && len(errs) == 0 {
		errs = append(errs, o.Grants().Remove())
	}
	_ = o.FS.RemoveDir(o.StateDir) // fails while something is left in it, or it is a mount
	return left, errors.Join(errs...)
}
