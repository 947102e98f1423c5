package ledger

import (
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"

	"github.com/stayput/stayput/pkg/disk"
)

// apply carries out steps in their order. With undo a failure takes back what was done before it, from the
// end, up to the first step that the disk does not let it take back: what is left is a prefix of the order, which
// is what a kill leaves.
func (s *session) apply(steps []step, undo bool) error {
	for i, st := range steps {
		if err := s.do(st); err != nil {
			s.trusted = false // what could not be taken back is found by a scan
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
		path := s.inState(indexDir, st.entry.att.hash())
		if st.was != nil {
			return s.replace(path, st.entry.encode())
		}
		return s.fs.WriteFile(path, st.entry.encode(), modeState)
	case dropEntry:
		return s.remove(s.inState(indexDir, st.was.att.hash()))
	case putSlot:
		if st.was.state != slotFree {
			return s.replaceSlot(st.addr, st.data)
		}
		return s.writeSlot(st.addr, st.data)
	case freeSlot:
		return s.remove(s.slotPath(st.addr))
	case adoptSlot:
		return s.fs.Chmod(s.slotPath(st.addr), modeOurs)
	case syncSlots:
		return s.fs.SyncDir(s.dir)
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
	case tellFreeing:
		if s.freeing == nil {
			return nil
		}
		return s.freeing(st.addrs)
	case noteEnd:
		s.change(func(c *counts) {
			if due := s.now.Boot + st.left; due < c.due {
				c.due, c.changed = due, true
			}
		})
		return nil
	}
	panic("unknown step")
}

// undo takes one step back, also a step that failed half-way.
func (s *session) undo(st step) error {
	switch st := st.(type) {
	case putEntry:
		if st.was != nil {
			return s.do(putEntry{st.was, st.was})
		}
		return s.remove(s.inState(indexDir, st.entry.att.hash()))
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
	if err := s.fs.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// replace writes a file of the state directory that is whole at every moment, but not durable.
func (s *session) replace(path string, data []byte) error {
	tmp := s.inState(tempState)
	if err := s.fs.WriteFile(tmp, data, modeState); err != nil {
		return err
	}
	return s.fs.Rename(tmp, path)
}

// writeLast writes in place if it can: ext4 flushes a file that is truncated and written again, at ten times the cost.
func (s *session) writeLast(i int, a netip.Addr) error {
	text := []byte(a.String())
	was := s.last(i)
	if i >= len(s.lasts) {
		s.lasts = append(s.lasts, netip.Addr{}) // of a network without ranges
	}
	s.lasts[i] = a
	if was.IsValid() && len(was.String()) == len(text) {
		return s.fs.Overwrite(s.lastPath(i), text)
	}
	return s.fs.WriteFile(s.lastPath(i), text, modeHostLocal)
}

func (s *session) writeSlot(a netip.Addr, data []byte) error {
	tmp := filepath.Join(s.dir, tempName)
	if err := s.fs.WriteFile(tmp, data, modeOurs); err != nil {
		return err
	}
	return s.fs.Rename(tmp, s.slotPath(a))
}

// replaceSlot writes the file of an address that has one. A rename over a file makes ext4 write the new content
// out before it returns (auto_da_alloc), which takes longer than all the rest; an exchange does not, and
// whether the content is on the disk is of no interest here.
func (s *session) replaceSlot(a netip.Addr, data []byte) error {
	tmp := filepath.Join(s.dir, tempName)
	if err := s.fs.WriteFile(tmp, data, modeOurs); err != nil {
		return err
	}
	err := s.fs.Exchange(tmp, s.slotPath(a))
	switch {
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, fs.ErrNotExist):
		return s.fs.Rename(tmp, s.slotPath(a))
	case err != nil:
		return err
	}
	_ = s.fs.Remove(tmp) // if not, it is written over
	return nil
}

// writeClaim returns when the claim is durable: content first, then the name.
func (s *session) writeClaim(c *Claim) error {
	tmp := s.inState(tempState)
	if err := s.fs.WriteFile(tmp, c.encode(), modeState); err != nil {
		return err
	}
	if err := s.fs.SyncFile(tmp); err != nil {
		return err
	}
	path := s.inState(claimsDir, c.Key.hash())
	there := s.countable(c.Key)
	if err := s.fs.Rename(tmp, path); err != nil {
		return err
	}
	if !there {
		s.change(func(n *counts) { n.add(c.Key.Namespace(), 1) })
	}
	return s.confirmClaim(c.Key)
}

// confirmClaim returns when the claim's name is durable, and remembers that in its mode.
func (s *session) confirmClaim(k Key) error {
	path := s.inState(claimsDir, k.hash())
	if mode, err := s.fs.Mode(path); err != nil || mode == modeDurable {
		return err
	}
	if err := s.fs.SyncDir(s.inState(claimsDir)); err != nil {
		return err
	}
	return s.fs.Chmod(path, modeDurable)
}

func (s *session) removeClaim(k Key) error {
	if k.shared() {
		set := s.inState(setsDir, k.setHash())
		if err := s.remove(filepath.Join(set, k.hash())); err != nil {
			return err
		}
		_ = s.fs.RemoveDir(set) // fails while the set has other claims
	}
	there := s.countable(k)
	if err := s.remove(s.inState(claimsDir, k.hash())); err != nil {
		return err
	}
	if there {
		s.change(func(n *counts) { n.add(k.Namespace(), -1) })
	}
	return s.fs.SyncDir(s.inState(claimsDir))
}

func (s *session) addToSet(k Key) error {
	path := s.inState(setsDir, k.setHash(), k.hash())
	err := s.fs.WriteFile(path, nil, modeState)
	if errors.Is(err, fs.ErrNotExist) {
		if err = disk.MkdirAll(s.fs, filepath.Dir(path)); err == nil {
			err = s.fs.WriteFile(path, nil, modeState)
		}
	}
	return err
}
