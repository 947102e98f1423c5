package ledger

import (
	"net/netip"

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
		return s.counting(st.claim.Key, 1, func() error { return s.writeClaim(st.claim) })
	case dropClaim:
		return s.counting(st.was.Key, -1, func() error { return s.removeClaim(st.was.Key) })
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
			return s.do(dropClaim{st.claim})
		}
		return s.do(putClaim{claim: st.was})
	case dropClaim:
		return s.do(putClaim{claim: st.was})
	}
	return nil
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
		if err := s.fs.Overwrite(s.lastPath(i), text); !disk.Unreadable(err) {
			return err
		}
	}
	return s.fs.WriteFile(s.lastPath(i), text, modeHostLocal)
}
