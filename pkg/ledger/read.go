package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
)

// The names in a network directory and in a state directory.
const (
	lockFile   = "lock" // host-local's
	lastPrefix = "last_reserved_ip."
	tempName   = ".stayput.tmp" // the one name every address file is renamed from
	markerName = ".stayput.boot"

	claimsDir  = "claims" // <hash of key>: Claim
	indexDir   = "index"  // <hash of attachment>: entry
	setsDir    = "sets"   // <hash of identity and ifname>/<hash of key>: empty; which claims a shared identity has
	infoName   = "network"
	countsName = "counts"
	tempState  = ".tmp" // what a file of the state directory is renamed from
)

// stampedDirs are the directories of the state whose content the stamp vouches for.
var stampedDirs = []string{claimsDir, indexDir, setsDir}

// files are the files of one network. Its methods only read; without the lock they may see a command half-way.
// Absence is a fact, a record that is missing nil without an error; every error means unknown.
type files struct {
	fs    disk.FS
	dir   string // address files
	state string // claims, index, sets
}

// Both directories and every name in them are clean paths already, as filepath.Join would make them.
func (f *files) marker() string               { return f.dir + "/" + markerName }
func (f *files) slotPath(a netip.Addr) string { return f.dir + "/" + a.String() }
func (f *files) lastPath(i int) string        { return f.dir + "/" + lastPrefix + strconv.Itoa(i) }
func (f *files) inState(elem ...string) string {
	return f.state + "/" + strings.Join(elem, "/")
}

// names lists a directory, sorted; a directory that is missing is empty.
func (f *files) names(dir string) ([]string, error) {
	names, err := f.fs.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	slices.Sort(names)
	return names, err
}

// readLast returns the zero Addr for a file that cannot be read or parsed, which host-local ignores too, and reports
// whether there is one.
func (f *files) readLast(i int) (a netip.Addr, there bool, err error) {
	b, err := f.fs.ReadFile(f.lastPath(i))
	if errors.Is(err, fs.ErrNotExist) {
		return a, false, nil
	} else if err != nil && !disk.Unreadable(err) {
		return a, false, err
	}
	a, _ = netip.ParseAddr(string(b))
	return a.Unmap(), true, nil
}

// stampState returns the modification times of stampedDirs; fs.ErrNotExist if one is missing.
func (f *files) stampState() ([]int64, error) {
	mtimes := make([]int64, len(stampedDirs))
	for i, dir := range stampedDirs {
		var err error
		if mtimes[i], err = f.fs.ChangeTime(f.inState(dir)); err != nil {
			return nil, err
		}
	}
	return mtimes, nil
}

func (f *files) slot(a netip.Addr) (slot, error) {
	b, err := f.fs.ReadFile(f.slotPath(a))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return slot{}, nil
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ELOOP):
		return slot{state: slotGarbage}, nil
	case disk.Unreadable(err):
		return slot{state: slotGarbage, unread: true}, nil
	case err != nil:
		return slot{}, err
	}
	return decodeSlot(b), nil
}

// ours reports whether stayput wrote the address file.
func (f *files) ours(a netip.Addr) (bool, error) {
	mode, err := f.fs.Mode(f.slotPath(a))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return mode == modeOurs, err
}

// written returns when an address was bound, which is when its file was written; the zero time if there is no file.
func (f *files) written(a netip.Addr) (time.Time, error) {
	at, err := f.fs.ChangeTime(f.slotPath(a))
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, nil
	}
	return time.Unix(0, at).UTC(), err
}

// claim returns ErrCorrupt for a claim that cannot be read or parsed, and ErrNewer beside what is known of a newer one.
func (f *files) claim(hash string) (*Claim, error) {
	path := f.inState(claimsDir, hash)
	b, err := f.fs.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, corrupt(err)
	}
	return decodeClaim(b, path)
}

func (f *files) entry(att Attachment) (*entry, error) { return f.entryNamed(att.hash()) }

// corrupt makes ErrCorrupt of the error of a file that the disk has lost.
func corrupt(err error) error {
	if disk.Unreadable(err) {
		return fmt.Errorf("%w: %v", ErrCorrupt, err)
	}
	return err
}

// entryNamed returns ErrCorrupt for an entry that cannot be read or parsed, and ErrNewer.
func (f *files) entryNamed(hash string) (*entry, error) {
	path := f.inState(indexDir, hash)
	b, err := f.fs.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, corrupt(err)
	}
	e, err := decodeEntry(b, path)
	if err == nil && e.att.hash() != hash {
		return nil, ErrCorrupt
	}
	return e, err
}

func (f *files) setClaims(k Key) ([]*Claim, error) {
	names, err := f.names(f.inState(setsDir, k.setHash()))
	if err != nil {
		return nil, err
	}
	var claims []*Claim
	for _, hash := range names {
		c, err := f.claim(hash)
		if err != nil && !errors.Is(err, ErrCorrupt) {
			return nil, err
		}
		if c != nil {
			claims = append(claims, c)
		}
	}
	return claims, nil
}

func (f *files) retainedFor(k Key) (*Retained, error) {
	slots, err := f.allSlots()
	if err != nil {
		return nil, err
	}
	for a, sl := range slots {
		switch {
		case sl.state == slotRetained && sl.retained.Key == k:
			return sl.retained, nil
		case sl.state == slotNewer && sl.retained.Key == k:
			return nil, newerError(f.slotPath(a), sl.retained.Version)
		}
	}
	return nil, nil
}

// allSlots returns every address that has a file.
func (f *files) allSlots() (map[netip.Addr]slot, error) {
	names, err := f.names(f.dir)
	if err != nil {
		return nil, err
	}
	addrs := make([]netip.Addr, 0, len(names))
	for _, name := range names {
		if a, err := netip.ParseAddr(name); err == nil && a.String() == name {
			addrs = append(addrs, a)
		}
	}
	slots := make(map[netip.Addr]slot, len(addrs))
	for i, r := range readAll(addrs, f.slotAndFile) {
		if r.err != nil {
			return nil, r.err
		}
		if r.is.state != slotFree {
			slots[addrs[i]] = r.is
		}
	}
	return slots, nil
}

// slotAndFile returns a slot with what only a picture knows.
func (f *files) slotAndFile(a netip.Addr) (sl slot, err error) {
	if sl, err = f.slot(a); err != nil {
		return sl, err
	}
	if sl.ours, err = f.ours(a); err == nil && sl.state == slotBound {
		sl.written, err = f.written(a)
	}
	if sl.unread {
		err = nil // it is not known to be ours
	}
	return sl, err
}

// readCounts returns nil if the file is missing, as no command has counted yet, or cannot be read; missing tells the
// two apart.
func (f *files) readCounts() (c *counts, missing bool) {
	b, err := f.fs.ReadFile(f.inState(countsName))
	if err != nil {
		return nil, errors.Is(err, fs.ErrNotExist)
	}
	return decodeCounts(b), false
}

// result is what reading one file returned.
type result[T any] struct {
	is  T
	err error
}

// manyFiles is how many files take longer to read than it takes to share them out.
const manyFiles = 1000

// readAll reads a file for each name, many of them on all cores: the node's other pods wait for the lock meanwhile.
func readAll[N, T any](names []N, read func(N) (T, error)) []result[T] {
	results := make([]result[T], len(names))
	part := len(names)
	if part >= manyFiles {
		part = part/runtime.GOMAXPROCS(0) + 1
	}
	var readers sync.WaitGroup
	for begin := 0; begin < len(names); begin += part {
		some := func() {
			for i := begin; i < min(begin+part, len(names)); i++ {
				results[i].is, results[i].err = read(names[i])
			}
		}
		if part == len(names) {
			some()
		} else {
			readers.Go(some)
		}
	}
	readers.Wait()
	return results
}

// claimFiles is what the claims of a network say.
type claimFiles struct {
	claims      []*Claim        // in the order of their keys
	newerClaims []*Claim        // of a newer version: only version, key and addresses are known
	corrupt     map[string]bool // hashes of those that cannot be read or parsed
}

// allClaims fails with ErrNewer if a newer claim does not even name its owner.
func (f *files) allClaims() (all claimFiles, err error) {
	all.corrupt = map[string]bool{}
	names, err := f.names(f.inState(claimsDir))
	if err != nil {
		return all, err
	}
	for i, r := range readAll(names, f.claim) {
		c, err := r.is, r.err
		switch {
		case errors.Is(err, ErrCorrupt):
			all.corrupt[names[i]] = true
		case errors.Is(err, ErrNewer) && c != nil:
			all.newerClaims = append(all.newerClaims, c)
		case err != nil:
			return all, err
		case c != nil:
			all.claims = append(all.claims, c)
		}
	}
	slices.SortFunc(all.claims, byKey)
	return all, nil
}

func byKey(a, b *Claim) int {
	return cmp.Or(strings.Compare(a.Key.Identity, b.Key.Identity), strings.Compare(a.Key.Pod, b.Key.Pod),
		strings.Compare(a.Key.IfName, b.Key.IfName), strings.Compare(a.Key.Network, b.Key.Network))
}

// indexFiles is what the index of a network says.
type indexFiles struct {
	entries        []*entry         // in the order of their hashes
	newerEntries   map[string]error // of a newer version, by the hash of the attachment
	corruptEntries []string         // names of those that cannot be read or parsed
}

func (f *files) allEntries() (index indexFiles, err error) {
	index.newerEntries = map[string]error{}
	names, err := f.names(f.inState(indexDir))
	if err != nil {
		return index, err
	}
	for i, r := range readAll(names, f.entryNamed) {
		e, err := r.is, r.err
		switch {
		case errors.Is(err, ErrNewer):
			index.newerEntries[names[i]] = err
		case errors.Is(err, ErrCorrupt):
			index.corruptEntries = append(index.corruptEntries, names[i])
		case err != nil:
			return index, err
		case e != nil:
			index.entries = append(index.entries, e)
		}
	}
	return index, nil
}

// picture is everything that the files of a network say.
type picture struct {
	slots map[netip.Addr]slot
	claimFiles
	indexFiles
	ahead bool // a scan has yet to make the files what entries and claims say
}

// picture reads entries after address files: without the lock, an attachment that has an address is in the index
// unless it was DELed in between, or the index is incomplete.
func (f *files) picture() (*picture, error) {
	p := &picture{}
	var err error
	if p.slots, err = f.allSlots(); err != nil {
		return nil, err
	}
	if p.indexFiles, err = f.allEntries(); err != nil {
		return nil, err
	}
	if p.claimFiles, err = f.allClaims(); err != nil {
		return nil, err
	}
	return p, nil
}

// apply carries out the steps of a rebuild on the picture, not on the files.
func (p *picture) apply(steps []step) {
	claims, entries := p.claimsByHash(), p.entriesByAttachment()
	for _, st := range steps {
		switch st := st.(type) {
		case putSlot:
			s := decodeSlot(st.data)
			s.ours = true
			p.slots[st.addr] = s
		case freeSlot:
			delete(p.slots, st.addr)
		case putClaim:
			claims[st.claim.Key.hash()] = st.claim
			delete(p.corrupt, st.claim.Key.hash())
		case putEntry:
			entries[st.entry.att] = st.entry
		case dropEntry:
			delete(entries, st.was.att)
		}
	}
	p.claims = slices.SortedFunc(maps.Values(claims), byKey)
	p.entries = slices.SortedFunc(maps.Values(entries), func(a, b *entry) int {
		return strings.Compare(a.att.String(), b.att.String())
	})
}

// complete makes the picture what a scan will make of the files.
func (p *picture) complete(n *Network, now Instant, live func(Netns, string) Liveness) {
	steps := scan(p, n, now, live)
	p.ahead = len(steps) > 0
	p.apply(steps)
}

func (p *picture) claimsByHash() map[string]*Claim {
	m := make(map[string]*Claim, len(p.claims))
	for _, c := range p.claims {
		m[c.Key.hash()] = c
	}
	return m
}

func (p *picture) entriesByAttachment() map[Attachment]*entry {
	m := make(map[Attachment]*entry, len(p.entries))
	for _, e := range p.entries {
		m[e.att] = e
	}
	return m
}

// hides reports whether an attachment has an address and is not in the index, or an address is retained without a
// claim.
func (p *picture) hides() bool {
	entries := p.entriesByAttachment()
	claims := p.claimsByHash()
	for _, c := range p.newerClaims {
		claims[c.Key.hash()] = c
	}
	for _, s := range p.slots {
		if s.state == slotBound && entries[s.att] == nil && p.newerEntries[s.att.hash()] == nil ||
			s.state == slotRetained && claims[s.retained.Key.hash()] == nil {
			return true
		}
	}
	return false
}

func (p *picture) slot(a netip.Addr) (slot, error) { return p.slots[a], nil }

func (p *picture) entry(att Attachment) (*entry, error) {
	if err := p.newerEntries[att.hash()]; err != nil {
		return nil, err
	}
	return p.entriesByAttachment()[att], nil
}
