package ledger

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// This file is what the agent needs beside the commands of CNI.

var errNotADirectory = unix.ENOTDIR

// State is what an address is.
type State string

const (
	StateBound    State = "Bound"
	StateRetained State = "Retained"
	// StateUnreadable is an address file that says nothing: taken, by nobody knows whom.
	StateUnreadable State = "Unreadable"
)

// Address is one address that is not free.
type Address struct {
	Addr  netip.Addr
	State State
	// Attachment, Pod, Netns and Boot are of a bound address; all but the first may be unknown. Boot is the
	// boot in which it was bound.
	Attachment Attachment
	Pod        Pod
	Netns      Netns
	Boot       string
	// Key and Policy are of the claim, where there is one.
	Key    *Key
	Policy Policy
	// Since and Left are of a retained address; Ends is false where it has no end.
	Since time.Time
	Left  time.Duration
	Ends  bool
}

// List returns every address that is not free, sorted. It takes the lock only where a boot has to be rebuilt
// or the index completed; the picture may be torn by commands that run meanwhile, so whoever acts on it names
// what it saw, and the command that acts looks again.
func (l *Ledger) List() ([]Address, error) {
	s, err := l.begin()
	if err != nil {
		return nil, err
	}
	if !s.trusted {
		err = s.scan()
	}
	s.end()
	if err != nil {
		return nil, err
	}
	slots, err := s.allSlots()
	if err != nil {
		return nil, err
	}
	entries, err := s.allEntries()
	if err != nil {
		return nil, err
	}
	byAtt := map[Attachment]*entry{}
	for _, e := range entries {
		byAtt[e.att] = e
	}
	var out []Address
	for _, a := range slices.SortedFunc(maps.Keys(slots), netip.Addr.Compare) {
		switch sl := slots[a]; sl.state {
		case slotRetained:
			r := sl.retained
			ad := Address{Addr: a, State: StateRetained, Key: &r.Key, Policy: r.Policy, Since: r.Since, Netns: r.Netns}
			ad.Left, ad.Ends = r.Expires(s.now)
			out = append(out, ad)
		case slotBound:
			ad := Address{Addr: a, State: StateBound, Attachment: sl.att}
			if e := byAtt[sl.att]; e != nil {
				ad.Pod, ad.Netns, ad.Boot = e.pod, e.netns, e.boot
				if c, err := s.claim(e.claim); e.claim != "" && err == nil && c != nil {
					ad.Key, ad.Policy = &c.Key, c.Policy
				}
			}
			out = append(out, ad)
		default:
			out = append(out, Address{Addr: a, State: StateUnreadable})
		}
	}
	return out, nil
}

// SetPolicy applies a policy to an attachment whose ADD did not know it, and records its pod and netns where
// they were unknown. Decided attachments keep their policy. The zero Policy decides that nothing is retained.
func (l *Ledger) SetPolicy(att Attachment, pod Pod, policy Policy, ns Netns) (*Result, error) {
	return l.run(policyCommand{att, pod, policy, ns})
}

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
	claims, _, err := s.allClaims()
	return claims, err
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

// Reclaim ends an attachment that leaked, as its DEL would: what is promised becomes retained, the rest free.
func (l *Ledger) Reclaim(att Attachment) (*Result, error) {
	return l.run(delCommand{DelRequest{Attachment: att}})
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
	return s.apply([]step{freeSlot{a, sl}}, false)
}

// Uninstall ends every promise: retained addresses become free, bound ones ordinary, and nothing of ours is
// left in the network directory. The state directory is removed as far as it is ours.
func (l *Ledger) Uninstall() (freed []netip.Addr, err error) {
	claims, err := l.claims()
	if err != nil {
		return nil, err
	}
	for _, c := range claims {
		if err := l.Release(c.Key); err != nil && !errors.Is(err, ErrUnknownClaim) {
			return freed, fmt.Errorf("%s: %w", c.Key, err)
		}
	}
	addrs, err := l.List()
	if err != nil {
		return freed, err
	}
	for _, a := range addrs {
		if a.State != StateRetained {
			continue
		}
		if _, err := l.run(orphanCommand{a.Addr}); err != nil {
			return freed, fmt.Errorf("%s: %w", a.Addr, err)
		}
	}
	for _, c := range claims {
		freed = append(freed, c.Addrs...)
	}
	s, err := l.begin()
	if err != nil {
		return freed, err
	}
	defer s.unlock()
	for _, name := range []string{tempName, markerName} {
		if err := s.remove(filepath.Join(l.dir, name)); err != nil {
			return freed, err
		}
	}
	return freed, removeAll(l.fs, l.state)
}

// removeAll removes a directory of plain files and directories.
func removeAll(fsys FileSystem, path string) error {
	err := fsys.Remove(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	names, dirErr := fsys.ReadDir(path)
	if dirErr != nil {
		return err
	}
	for _, name := range names {
		if err := removeAll(fsys, filepath.Join(path, name)); err != nil {
			return err
		}
	}
	return fsys.RemoveDir(path)
}

// PutMark records a pod's policy durably and without the lock: it is called while the runtime waits.
func (l *Ledger) PutMark(m Mark) error {
	now, err := l.clock.Now()
	if err != nil {
		return err
	}
	m.Version, m.Boot = recordVersion, now.BootID
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	dir := filepath.Join(l.state, marksDir)
	path := filepath.Join(dir, hashOf(m.ContainerID))
	if err := l.fs.WriteFile(path+".tmp", append(b, '\n'), modeState); err != nil {
		return err
	}
	if err := l.fs.SyncFile(path + ".tmp"); err != nil {
		return err
	}
	if err := l.fs.Rename(path+".tmp", path); err != nil {
		return err
	}
	return l.fs.SyncDir(dir)
}

// Marks lists the marks, without the lock. What does not parse is left out.
func (l *Ledger) Marks() ([]Mark, error) {
	marks, err := (&session{l: l}).allMarks()
	if err != nil {
		return nil, err
	}
	var out []Mark
	for _, m := range marks {
		out = append(out, *m)
	}
	slices.SortFunc(out, func(a, b Mark) int { return cmp.Compare(a.ContainerID, b.ContainerID) })
	return out, nil
}

// DropMark removes a mark; a missing one is no error.
func (l *Ledger) DropMark(containerID string) error {
	err := l.fs.Remove(filepath.Join(l.state, marksDir, hashOf(containerID)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
