package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// recordVersion is the version of every record. It tells apart what another version of stayput wrote:
//
//   - An older record is read.
//   - A newer one is never taken for another thing, changed or removed: ErrNewer. Nothing is decided for the pod
//     that it is about. The others go on.
//   - For that, claims and retained records of every version say v, key and addrs as this one does, and a retained
//     record is one line of JSON.
//   - A version that cannot keep to this writes "v2 " before the boot ID in the boot marker: then older ones refuse the
//     whole network.
const recordVersion = 1

// ErrNewer is a record that a newer version of stayput wrote.
var ErrNewer = errors.New("record was written by a newer version of stayput")

func newerError(path string, version int) error {
	return fmt.Errorf("%w: %s has version %d, this stayput supports versions up to %d: install the newer version again",
		ErrNewer, path, version, recordVersion)
}

// versionOf returns the version of a JSON record, regardless of the rest; 0 if the record has none.
func versionOf(b []byte) int {
	var r struct {
		Version int `json:"v"`
	}
	if json.Unmarshal(b, &r) != nil {
		return 0
	}
	return r.Version
}

// promiseOf is what a claim or a retained record of any version says.
type promiseOf struct {
	Version int          `json:"v"`
	Key     Key          `json:"key"`
	Addrs   []netip.Addr `json:"addrs"`
}

func decodePromise(b []byte) (p promiseOf, ok bool) {
	err := json.Unmarshal(b, &p)
	return p, err == nil && p.Key.Identity != "" && len(p.Addrs) > 0 && !slices.ContainsFunc(p.Addrs, invalidAddr)
}

// Claim is the promise of one address per range set to a key. It is written durably before the ADD that
// makes it is answered, changes only when the promise changes, and says nothing about who has the
// addresses now: that is in the address files.
//
//	{"v":1,"key":{…},"addrs":["10.244.1.7","fd00::7"],"policy":{"retention":"10m0s",…}}
type Claim struct {
	Version int              `json:"v"`
	Key     Key              `json:"key"`
	Addrs   []netip.Addr     `json:"addrs"`
	Policy  retention.Policy `json:"policy"`
	// From is the hash of the claim of the same shared identity whose addresses this one took over. If a crash left
	// both, this one counts.
	From string `json:"from,omitempty"`
}

func (c *Claim) encode() []byte {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err) // every field marshals
	}
	return append(b, '\n')
}

// ErrCorrupt is a record that does not parse, or that the disk has lost. Its owner is unknown, so it is never a reason
// to free anything.
var ErrCorrupt = errors.New("record is corrupt")

// decodeClaim reads the claim in the file path. With ErrNewer comes what can be known of it.
func decodeClaim(b []byte, path string) (*Claim, error) {
	var c Claim
	hash := filepath.Base(path)
	if err := json.Unmarshal(b, &c); err != nil || c.Version > recordVersion {
		if v := versionOf(b); v > recordVersion {
			if p, ok := decodePromise(b); ok && p.Key.hash() == hash {
				return &Claim{Version: v, Key: p.Key, Addrs: p.Addrs}, newerError(path, v)
			}
			return nil, newerError(path, v)
		}
		return nil, fmt.Errorf("%w: claim: %v", ErrCorrupt, err)
	}
	if c.Version != recordVersion || c.Key.hash() != hash ||
		len(c.Addrs) == 0 || slices.ContainsFunc(c.Addrs, invalidAddr) {
		return nil, fmt.Errorf("%w: claim of version %d, key %s, addresses %v", ErrCorrupt, c.Version, c.Key, c.Addrs)
	}
	return &c, nil
}

func invalidAddr(a netip.Addr) bool { return !a.IsValid() }

// slotState is what an address file says.
type slotState int

const (
	slotFree     slotState = iota // no file
	slotBound                     // host-local's content
	slotRetained                  // our JSON line
	slotGarbage                   // a file that says neither: taken, though it is unknown by whom
	slotNewer                     // a retained record of a newer version: taken, and left alone
)

// slot is one address file.
//
// Bound, byte-identical to host-local's (plugins/ipam/host-local/backend/disk/backend.go):
//
//	containerID CR LF ifname
//
// Files of host-local before 0.8 lack CR LF ifname. A file that stayput wrote has the sticky bit beside host-local's
// mode 0600 (it means nothing on a file, and no umask takes it away): after a reboot that tells a bound file of an
// earlier boot, which stayput wrote and no container can still be using, from a file that host-local may have written
// in this boot before us.
//
// Retained, one line of JSON that begins with {, which no container ID can:
//
//	{"v":1,"key":{…},"addrs":[…],"policy":{…},"bound":"…","since":"…","run":{…},"at":{…},"netns":{…}}
type slot struct {
	state    slotState
	att      Attachment // of a bound slot
	unread   bool       // the disk has lost what the file said: garbage that may be anybody's, in any boot
	ours     bool       // stayput wrote the file; only a picture knows
	written  time.Time  // when a bound slot was; only a picture knows
	retained *Retained  // of a newer record the version and, as far as known, key and addresses
	raw      []byte
}

// boundTo reports whether the file names the attachment. A file that names no interface is of every interface of its
// container, as host-local reads it.
func (s slot) boundTo(att Attachment) bool {
	return s.state == slotBound && s.att.ContainerID == att.ContainerID &&
		(s.att.IfName == "" || s.att.IfName == att.IfName)
}

const (
	modeHostLocal = 0o600
	modeOurs      = 0o1600
	modeState     = 0o600 // of everything in the state directory
	// modeDurable marks a claim whose name, too, is known to be durable.
	modeDurable = 0o1600
)

// Retained is the record of a retained address. It alone suffices to restore and to expire.
type Retained struct {
	Version int              `json:"v"`
	Key     Key              `json:"key"`
	Addrs   []netip.Addr     `json:"addrs"`
	Policy  retention.Policy `json:"policy"`
	// Bound is when the address was bound for the last time, Since when that ended. A zero Bound is not known: a
	// power loss took the file that told.
	Bound time.Time `json:"bound,omitzero"`
	Since time.Time `json:"since"`
	// Run is the retention as it runs; without a Left it has no end.
	Run anchor `json:"run"`
	// At is when the attachment ended, and Netns where it was: an ADD that takes the address over while the namespace
	// is still there gives the main plugin a moment to take the link away.
	At    anchor `json:"at"`
	Netns Netns  `json:"netns,omitzero"`
}

// Expires returns what is left of the retention; ok is false if it has no end.
func (r *Retained) Expires(now Instant) (left time.Duration, ok bool) {
	if r.Policy.Retention == 0 {
		return 0, false
	}
	return r.Run.remaining(now), true
}

func (r *Retained) expired(now Instant) bool {
	left, ends := r.Expires(now)
	return ends && left <= 0
}

func (r *Retained) claim() *Claim {
	return &Claim{Version: recordVersion, Key: r.Key, Addrs: r.Addrs, Policy: r.Policy}
}

func retainedOf(c *Claim, now Instant, ns Netns) *Retained {
	return &Retained{
		Version: recordVersion, Key: c.Key, Addrs: c.Addrs, Policy: c.Policy,
		Since: now.Wall.UTC().Round(0), Run: anchorAt(now, c.Policy.Duration()), At: anchorAt(now, 0), Netns: ns,
	}
}

func (r *Retained) encode() []byte {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	return append(b, '\n')
}

func encodeBound(a Attachment) []byte {
	if a.IfName == "" {
		return []byte(a.ContainerID)
	}
	return []byte(a.ContainerID + "\r\n" + a.IfName)
}

func decodeSlot(b []byte) slot {
	s := slot{raw: b, state: slotGarbage}
	if len(b) > 0 && b[0] == '{' {
		var r Retained
		if json.Unmarshal(b, &r) == nil && r.Version == recordVersion && r.Key.Identity != "" &&
			len(r.Addrs) > 0 && !slices.ContainsFunc(r.Addrs, invalidAddr) {
			s.state, s.retained = slotRetained, &r
		} else if v := versionOf(b); v > recordVersion {
			p, _ := decodePromise(b)
			s.state, s.retained = slotNewer, &Retained{Version: v, Key: p.Key, Addrs: p.Addrs}
		}
		return s
	}
	id, ifname, _ := strings.Cut(string(bytes.TrimSpace(b)), "\r\n")
	if isWord(id) && (ifname == "" || ValidIfName(ifname)) {
		s.state, s.att = slotBound, Attachment{id, ifname}
	}
	return s
}

// isWord is deliberately wide: what could be a container ID is one.
func isWord(s string) bool {
	if s == "" || len(s) > 1024 {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// entry is one index record: what is known of an attachment beside its address files. It is believed only
// for addresses whose files name the attachment, and never fsynced: a power loss ends every attachment.
//
//	v1 BOOT-ID open|decided CLAIM-HASH|-
//	CONTAINERID IFNAME
//	ADDR ADDR
//	DEV INO NETNS-PATH
//	NAMESPACE/NAME UID
type entry struct {
	att   Attachment
	boot  string
	open  bool   // the pod's policy is not known yet
	claim string // hash of the claim that the attachment holds, or ""
	addrs []netip.Addr
	netns Netns
	pod   Pod
}

func (e *entry) encode() []byte {
	var b strings.Builder
	word := "decided"
	if e.open {
		word = "open"
	}
	claim := e.claim
	if claim == "" {
		claim = "-"
	}
	b.WriteString("v1 " + e.boot + " " + word + " " + claim + "\n" + e.att.ContainerID + " " + e.att.IfName + "\n")
	for i, a := range e.addrs {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(a.String())
	}
	b.WriteString("\n" + strconv.FormatUint(e.netns.Dev, 10) + " " + strconv.FormatUint(e.netns.Ino, 10))
	b.WriteString(" " + strings.ReplaceAll(e.netns.Path, "\n", "") + "\n")
	b.WriteString(e.pod.Namespace + "/" + e.pod.Name + " " + e.pod.UID + "\n")
	return []byte(b.String())
}

func decodeEntry(b []byte, path string) (*entry, error) {
	lines := strings.Split(string(b), "\n")
	head := strings.Split(lines[0], " ")
	if v := wordVersion(head[0]); v > recordVersion {
		return nil, newerError(path, v)
	}
	if len(lines) != 6 || lines[5] != "" {
		return nil, badEntry()
	}
	if len(head) != 4 || head[0] != "v1" {
		return nil, badEntry()
	}
	e := &entry{boot: head[1], open: head[2] == "open"}
	if head[3] != "-" {
		e.claim = head[3]
	}
	e.att.ContainerID, e.att.IfName, _ = strings.Cut(lines[1], " ")
	for f := range strings.FieldsSeq(lines[2]) {
		a, err := netip.ParseAddr(f)
		if err != nil {
			return nil, badEntry()
		}
		e.addrs = append(e.addrs, a)
	}
	ns := strings.SplitN(lines[3], " ", 3)
	if len(ns) != 3 {
		return nil, badEntry()
	}
	var err1, err2 error
	e.netns.Dev, err1 = strconv.ParseUint(ns[0], 10, 64)
	e.netns.Ino, err2 = strconv.ParseUint(ns[1], 10, 64)
	e.netns.Path = ns[2]
	name, uid, _ := strings.Cut(lines[4], " ")
	e.pod.UID = uid
	e.pod.Namespace, e.pod.Name, _ = strings.Cut(name, "/")
	if err1 != nil || err2 != nil || len(e.addrs) == 0 || e.att.ContainerID == "" {
		return nil, badEntry()
	}
	return e, nil
}

func badEntry() error { return fmt.Errorf("%w: index entry", ErrCorrupt) }

// wordVersion reads v2, as the index and the boot marker begin; 0 is no such word.
func wordVersion(w string) int {
	digits, ok := strings.CutPrefix(w, "v")
	if !ok {
		return 0
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return 0
	}
	return int(n)
}

// stamp is the boot marker, the file .stayput.boot in the network directory:
//
//	BOOT-ID
//	BOOT-ID WALL BOOTTIME TIME
//	MTIME LAST0 LAST1 …
//	FINGERPRINT
//	MTIME MTIME MTIME
//
// The first line is the boot in which the ledger was last rebuilt; a later version of everything here begins it with
// its name, v2.
//
// The second is what the clocks read at the last command that wrote the marker, and the network's time then, all in
// nanoseconds, so that a boot need not write every retained record again; - if it is not known. It is in the first
// sector, which a power loss leaves whole.
//
// The third is how stayput left the directory: its modification time and the contents of host-local's
// last_reserved_ip.N; the fifth the modification times of claims, index and sets. If all still agree, the index is
// complete, and an attachment that the index does not know has no address here; if not (host-local has been at work, we
// were killed, files were removed), one scan completes it. Both facts of the directory are needed: clocks of older
// kernels tick in steps of 4 ms, but host-local writes last_reserved_ip.N at each allocation. And no program removes
// these: if one is missing that stayput has seen, so are address files.
//
// The fourth is the fingerprint of the network's configuration as it was last recorded for the agent.
type stamp struct {
	boot  string
	read  reading      // zero if it is not known
	mtime int64        // -1: unknown
	last  []netip.Addr // as far as known; the zero Addr if there is no file
	// config is Network.fingerprint
	config string
	state  []int64 // of stampedDirs, in their order
}

// underWay stands for the modification time while a rebuild runs.
const underWay = -2

// ofAnotherBoot reports whether the stamp names a boot that has ended.
func (s *stamp) ofAnotherBoot(now Instant) bool { return s.boot != "" && s.boot != now.BootID }

func (s *stamp) encode() []byte {
	var b strings.Builder
	b.WriteString(s.boot + "\n" + s.read.encode() + "\n" + strconv.FormatInt(s.mtime, 10))
	for _, a := range s.last {
		if a.IsValid() {
			b.WriteString(" " + a.String())
		} else {
			b.WriteString(" -")
		}
	}
	b.WriteString("\n" + s.config + "\n")
	for i, mtime := range s.state {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(strconv.FormatInt(mtime, 10))
	}
	b.WriteByte('\n')
	// Overwritten in place, and never shorter than before: a power loss leaves a mixture of old and new
	// bytes, whose first line is the same in both.
	for b.Len()%512 != 0 {
		b.WriteByte(' ')
	}
	return []byte(b.String())
}

// decodeStamp fails only with ErrNewer: what cannot be read is a stamp that agrees with nothing.
func decodeStamp(b []byte, path string) (stamp, error) {
	boot, rest, _ := strings.Cut(string(b), "\n")
	if w, _, many := strings.Cut(boot, " "); many {
		if v := wordVersion(w); v > recordVersion {
			return stamp{}, newerError(path, v)
		}
	}
	return decodeStampLines(boot, rest), nil
}

func decodeStampLines(boot, rest string) stamp {
	s := stamp{boot: boot, mtime: -1}
	read, rest, _ := strings.Cut(rest, "\n")
	s.read = decodeReading(read)
	line, rest, _ := strings.Cut(rest, "\n")
	config, rest, whole := strings.Cut(rest, "\n")
	f := strings.Fields(line)
	if !whole || len(f) == 0 {
		return s
	}
	state, _, _ := strings.Cut(rest, "\n")
	for w := range strings.FieldsSeq(state) {
		if n, err := strconv.ParseInt(w, 10, 64); err == nil {
			s.state = append(s.state, n)
		}
	}
	var last []netip.Addr
	for _, w := range f[1:] {
		a, err := netip.ParseAddr(w)
		if err != nil && w != "-" {
			return s
		}
		last = append(last, a)
	}
	if n, err := strconv.ParseInt(f[0], 10, 64); err == nil {
		s.mtime, s.last, s.config = n, last, config
	}
	return s
}

func (r reading) encode() string {
	if r.bootID == "" {
		return "-"
	}
	return fmt.Sprint(r.bootID, " ", r.wall.UnixNano(), " ", int64(r.boot), " ", r.time.UnixNano())
}

// decodeReading returns the zero reading for what cannot be read.
func decodeReading(s string) reading {
	f := strings.Fields(s)
	if len(f) != 4 {
		return reading{}
	}
	var n [3]int64
	for i := range n {
		var err error
		if n[i], err = strconv.ParseInt(f[i+1], 10, 64); err != nil {
			return reading{}
		}
	}
	return reading{f[0], time.Unix(0, n[0]).UTC(), time.Duration(n[1]), time.Unix(0, n[2]).UTC()}
}
