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
	// StateNewer is an address retained by a newer version of stayput: taken, and not to be touched.
	StateNewer State = "Newer"
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
	// Newer is set, and satisfies errors.Is with ErrNewer, where a newer version of stayput has decided about
	// the address. What is known of it then is not enough to act on.
	Newer error
}

// List returns every address that is not free, sorted. It takes the lock only where a boot has to be rebuilt
// or the index completed; the picture may be torn by commands that run meanwhile, so whoever acts on it names
// what it saw, and the command that acts looks again.
//
// It also completes an index whose stamp hides what somebody changed without the lock while a command ran: every
// attachment that it lists can be acted on.
func (l *Ledger) List() ([]Address, error) {
	addrs, hidden, err := l.list(false)
	if err == nil && hidden {
		addrs, _, err = l.list(true)
	}
	return addrs, err
}

// list completes the index where it must or is told to. hidden says that the index does not know an attachment that
// has an address.
func (l *Ledger) list(complete bool) (out []Address, hidden bool, err error) {
	s, err := l.begin()
	if err != nil {
		return nil, false, err
	}
	if complete || !s.trusted {
		err = s.scan()
	}
	s.end()
	if err != nil {
		return nil, false, err
	}
	slots, err := s.allSlots()
	if err != nil {
		return nil, false, err
	}
	entries, newerEntries, err := s.allEntries()
	if err != nil {
		return nil, false, err
	}
	byAtt := map[Attachment]*entry{}
	for _, e := range entries {
		byAtt[e.att] = e
	}
	claims, err := s.allClaims()
	if err != nil {
		return nil, false, err
	}
	known, newer := map[string]*Claim{}, map[string]*Claim{}
	for _, c := range claims.known {
		known[c.Key.hash()] = c
	}
	newerOn := map[netip.Addr]*Claim{}
	for _, c := range claims.newer {
		newer[c.Key.hash()] = c
		for _, a := range c.Addrs {
			newerOn[a] = c
		}
	}
	newerClaim := func(c *Claim) error { return newerError(s.state(claimsDir, c.Key.hash()), c.Version) }
	for _, a := range slices.SortedFunc(maps.Keys(slots), netip.Addr.Compare) {
		switch sl := slots[a]; sl.state {
		case slotRetained:
			r := sl.retained
			if c := newer[r.Key.hash()]; c != nil {
				out = append(out, Address{Addr: a, State: StateNewer, Newer: newerClaim(c)})
				continue
			}
			ad := Address{Addr: a, State: StateRetained, Key: &r.Key, Policy: r.Policy, Since: r.Since, Netns: r.Netns}
			ad.Left, ad.Ends = r.Expires(s.now)
			out = append(out, ad)
		case slotBound:
			ad := Address{Addr: a, State: StateBound, Attachment: sl.att}
			if e := byAtt[sl.att]; e != nil {
				ad.Pod, ad.Netns, ad.Boot = e.pod, e.netns, e.boot
				if c := newer[e.claim]; c != nil {
					ad.Newer = newerClaim(c)
				} else if c := known[e.claim]; c != nil {
					ad.Key, ad.Policy = &c.Key, c.Policy
				}
			} else if hash := sl.att.hash(); newerEntries[hash] {
				_, ad.Newer = s.readEntry(hash)
			} else {
				hidden = true
			}
			out = append(out, ad)
		case slotNewer:
			out = append(out, Address{Addr: a, State: StateNewer, Newer: newerError(s.slotPath(a), sl.retained.Version)})
		default:
			ad := Address{Addr: a, State: StateUnreadable}
			if c := newerOn[a]; c != nil {
				ad.State, ad.Newer = StateNewer, newerClaim(c)
			}
			out = append(out, ad)
		}
	}
	return out, hidden, nil
}

// SetPolicy applies a policy to an attachment whose ADD did not know it, and records its pod and netns where
// they were unknown. Decided attachments keep their policy. The zero Policy decides that nothing is retained.
func (l *Ledger) SetPolicy(att Attachment, pod Pod, policy Policy, ns Netns) (*Result, error) {
	return l.run(policyCommand{att, pod, policy, ns})
}

// Move gives the addresses of from to the attachment of to, which uses them though the ledger does not know it, and
// promises them to its pod. They are bound all the while, also where it fails. from must be over: while its own
// network namespace lives it is ErrInUse. Requested is what was seen; where from has other addresses by now it is
// ErrUnknownAttachment. Without Addrs in the result no promise could be made and nothing has changed; an event says
// why unless a newer attachment of the pod holds its promise.
func (l *Ledger) Move(from Attachment, to AddRequest) (*Result, error) {
	return l.run(moveCommand{from, to})
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
	claims, err := s.allClaims()
	if err != nil {
		return nil, err
	}
	return claims.known, nil
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

// Freed is what Uninstall did.
type Freed struct {
	// Addrs were retained, or left behind by an attachment that is dead, and are free. InUse were promised to
	// attachments that live: they are ordinary ones now, and become free when these end.
	Addrs, InUse []netip.Addr
}

// Uninstall ends every promise and leaves the network to host-local: retained addresses become free, bound ones
// are as host-local would have written them, and nothing of ours is left in the network directory or of its state.
// Records of other versions go as well. Where there is nothing it makes nothing, so that it may be called again.
//
// The claims go first and durably, since no power loss may bring a promise back for an address that was given
// away; the description of the network goes last, since by it Networks finds what is left to do after a kill.
func (l *Ledger) Uninstall() (*Freed, error) {
	freed := &Freed{}
	now, err := l.clock.Now()
	if err != nil {
		return freed, err
	}
	unlock, err := l.fs.Lock(filepath.Join(l.dir, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		return freed, RemoveAll(l.fs, l.state) // host-local's directory is gone, and all addresses with it
	} else if err != nil {
		return freed, err
	}
	defer unlock()
	s := &session{l: l, now: now, unlock: unlock, trusted: true}

	entries, _, err := s.allEntries()
	if err != nil {
		return freed, err
	}
	byAtt := map[Attachment]*entry{}
	for _, e := range entries {
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
			sl.state == slotBound && e != nil && e.claim != "" && s.liveness(e.netns, e.boot) == Dead:
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
	for _, name := range []string{tempName, markerName} {
		if err := s.remove(filepath.Join(l.dir, name)); err != nil {
			return freed, err
		}
	}
	for _, dir := range []string{claimsDir, indexDir, setsDir, marksDir} {
		if err := RemoveAll(l.fs, s.state(dir)); err != nil {
			return freed, err
		}
	}
	return freed, RemoveAll(l.fs, l.state)
}

// removeClaims removes every claim, durably.
func (s *session) removeClaims() error {
	names, err := s.l.fs.ReadDir(s.state(claimsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, name := range names {
		if err := s.remove(s.state(claimsDir, name)); err != nil {
			return err
		}
	}
	return s.l.fs.SyncDir(s.state(claimsDir))
}

// RemoveState removes what is left of the state directory once every network was uninstalled: what a kill left of a
// network without its description, and the directory itself. What is not of a ledger stays. So does a network that
// still has a description, because it could not be uninstalled or is in use again: left says how many there are.
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
			return !slices.Contains([]string{claimsDir, indexDir, setsDir, marksDir, tempState}, s)
		}):
			errs = append(errs, RemoveAll(o.FS, path))
		}
	}
	o.FS.RemoveDir(o.StateDir) // fails while something is left in it, or it is a mount
	return left, errors.Join(errs...)
}

// RemoveAll removes a directory of plain files and directories, or one file. A missing one is no error.
func RemoveAll(fsys FileSystem, path string) error {
	err := fsys.Remove(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	names, dirErr := fsys.ReadDir(path)
	if dirErr != nil {
		return err
	}
	for _, name := range names {
		if err := RemoveAll(fsys, filepath.Join(path, name)); err != nil {
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
	marks, _, err := (&session{l: l}).allMarks()
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
