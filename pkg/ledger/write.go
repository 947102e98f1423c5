package ledger

import (
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"

	"github.com/stayput/stayput/pkg/disk"
)

// writer writes the files of one network, under its lock: one file, or one promise, by each method. It knows how a
// file is written, not why or when. What is not said to be durable survives a kill, but not a power loss.
type writer struct{ files }

// remove removes a file, which may be gone already.
func (w *writer) remove(path string) error {
	if err := w.fs.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// replace writes a file of the state directory that is whole at every moment, but not durable.
func (w *writer) replace(path string, data []byte) error {
	return disk.Replace(w.fs, w.inState(tempState), path, data, modeState)
}

// writeSlot writes the file of an address that has none, or that has to be as it was.
func (w *writer) writeSlot(a netip.Addr, data []byte) error {
	return disk.Replace(w.fs, filepath.Join(w.dir, tempName), w.slotPath(a), data, modeOurs)
}

// replaceSlot writes the file of an address that has one. A rename over a file makes ext4 write the new content
// out before it returns (auto_da_alloc), which takes longer than all the rest; an exchange does not, and
// whether the content is on the disk is of no interest here.
func (w *writer) replaceSlot(a netip.Addr, data []byte) error {
	tmp := filepath.Join(w.dir, tempName)
	if err := w.fs.WriteFile(tmp, data, modeOurs); err != nil {
		return err
	}
	err := w.fs.Exchange(tmp, w.slotPath(a))
	switch {
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, fs.ErrNotExist):
		return w.fs.Rename(tmp, w.slotPath(a))
	case err != nil:
		return err
	}
	_ = w.fs.Remove(tmp) // if not, it is written over
	return nil
}

// writeClaim returns when the claim is durable: content first, then the name.
func (w *writer) writeClaim(c *Claim) error {
	if c.Key.shared() {
		if err := w.addToSet(c.Key); err != nil {
			return err
		}
	}
	path := w.inState(claimsDir, c.Key.hash())
	if err := disk.ReplaceSynced(w.fs, w.inState(tempState), path, c.encode(), modeState); err != nil {
		return err
	}
	return w.confirmClaim(c.Key)
}

// confirmClaim returns when the claim's name is durable, and remembers that in its mode.
func (w *writer) confirmClaim(k Key) error {
	path := w.inState(claimsDir, k.hash())
	if mode, err := w.fs.Mode(path); err != nil || mode == modeDurable {
		return err
	}
	if err := w.fs.SyncDir(w.inState(claimsDir)); err != nil {
		return err
	}
	return w.fs.Chmod(path, modeDurable)
}

// removeClaim returns when the end of the claim is durable.
func (w *writer) removeClaim(k Key) error {
	if k.shared() {
		set := w.inState(setsDir, k.setHash())
		if err := w.remove(filepath.Join(set, k.hash())); err != nil {
			return err
		}
		_ = w.fs.RemoveDir(set) // fails while the set has other claims
	}
	if err := w.remove(w.inState(claimsDir, k.hash())); err != nil {
		return err
	}
	return w.fs.SyncDir(w.inState(claimsDir))
}

// addToSet notes that a shared identity has a claim of that key.
func (w *writer) addToSet(k Key) error {
	return disk.WriteFile(w.fs, w.inState(setsDir, k.setHash(), k.hash()), nil, modeState)
}

// removeClaims removes every claim, durably.
func (w *writer) removeClaims() error {
	dir := w.inState(claimsDir)
	names, err := w.fs.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) { // the removal of the directory may not be durable yet
		return disk.SyncAbsence(w.fs, dir)
	} else if err != nil {
		return err
	}
	for _, name := range names {
		if err := disk.RemoveAll(w.fs, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return w.fs.SyncDir(dir)
}

// forgetAll removes the state of a network that has no directory.
func (w *writer) forgetAll() error {
	if err := w.removeClaims(); err != nil {
		return err
	}
	if err := disk.SyncAbsence(w.fs, w.dir); err != nil { // of its retained records
		return err
	}
	return disk.RemoveAll(w.fs, w.state)
}

// removeTemps removes what a killed command left under the names that files are renamed from, so that what is written
// next is a file of its own. A power loss can give a file that was written over its older content back, which is then
// another address's; and a file system without a journal may have kept both names of a rename: writing to the old one
// would write into the new one.
func (w *writer) removeTemps() error {
	for _, tmp := range []string{filepath.Join(w.dir, tempName), w.inState(tempState)} {
		if err := w.remove(tmp); err != nil {
			return err
		}
	}
	return nil
}

// markUnderWay makes a marker of this boot say that a rebuild has begun, so that a rebuild that is killed begins again.
// The marker keeps naming the boot: after a power loss, what was bound in this boot is dead. A marker of an earlier
// boot makes the next command rebuild anyway: it gets what the clocks read in this boot, in which the network's time
// then goes on from there, whether or not the rebuild is killed. The write is durable: if the rebuild is killed before
// the marker at its end is durable, the next command takes that marker for durable.
func (w *writer) markUnderWay(was stamp, now Instant) error {
	st := was
	if !now.time.IsZero() {
		st.read = now.reading()
	}
	if !was.ofAnotherBoot(now) {
		st.boot, st.mtime = now.BootID, underWay
	}
	var err error
	if was.boot == "" {
		err = w.fs.WriteFile(w.marker(), st.encode(), modeState)
	} else {
		err = w.fs.Overwrite(w.marker(), st.encode())
	}
	if err == nil {
		err = w.fs.SyncFile(w.marker())
	}
	if err != nil || was.ofAnotherBoot(now) {
		return err
	}
	return w.fs.SyncDir(w.dir)
}

// writeMarker is durable, so that a power loss in this boot leaves a marker that names it.
func (w *writer) writeMarker(st stamp) error {
	if err := disk.ReplaceSynced(w.fs, filepath.Join(w.dir, tempName), w.marker(), st.encode(), modeState); err != nil {
		return err
	}
	return w.fs.SyncDir(w.dir)
}

// writeCounts keeps the counts, if they have changed, before the stamp that vouches for them.
func (w *writer) writeCounts(c *counts) error {
	if c == nil || !c.changed {
		return nil
	}
	path := w.inState(countsName)
	err := w.fs.Overwrite(path, c.encode())
	if errors.Is(err, fs.ErrNotExist) {
		err = w.fs.WriteFile(path, c.encode(), modeState)
	}
	return err
}
