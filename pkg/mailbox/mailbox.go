// Package mailbox holds the files by which a node's agent and CNI plugin tell each other of pods of pools. No node owns
// an address of a pool: the cluster gives it to one pod at a time. The agent hears what the cluster says. The plugin
// starts pods while agent and API server may be down, and has it from here.
//
// # Files
//
// In <stateDir>/pools, of mode 0600 unless stated otherwise:
//
//	file              writer  content
//	served            agent   Served: what the cluster's pools are, or that it has none. Without it no ADD gets an
//	                          address of a pool. Durable
//	<pod UID>         agent   the pod's addresses, the text of its annotation: the agent has seen the pod, and the
//	                          cluster has given the addresses to it. The sticky bit, mode 1600, says so: versions that
//	                          wrote the file without asking did not set it, and such a file says nothing
//	<pod UID>.barred  agent   empty: the pod has ended on this node, no ADD of it may succeed any more. Durable
//	checked           agent   BOOT-ID EPOCH [lost]: in this boot an ADD may succeed only for a pod that has its file.
//	                          lost: bars of this boot may be lost. Durable
//	node              agent   the name of the node in the cluster
//	<pod UID>.probed  plugin  addresses, a line each, that no other machine on the link had when the pod got them here
//	<address>.used    plugin  empty: a pod of this machine has had the address, since the plugin asked for it on the
//	                          link. A machine that has taken over the node's name lacks it
//	*.tmp                     any of these before its rename
//
// # Locks
//
// A Box takes none. Each file has one writer and is replaced as a whole, so that a reader finds the old content or the
// new one.
//
// The locks of the networks order bars and epochs against ADDs. An ADD asks Barred and Confirms under its network's
// lock. The agent writes the bar or the epoch, and then takes every network's lock once (ledger.Bar,
// ledger.BeginEpoch). So an ADD that is under way either sees the file, or has ended when the agent goes on, which then
// finds the addresses in the ledger.
//
// The other files need no order. The plugin may give what a pod's file said a moment ago: before the addresses are
// another pod's, this one is barred. Two ADDs of a pod at once may lose a line of its .probed, and ask once more.
package mailbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/disk"
)

// Dir is the name of the directory in the state directory.
const Dir = "pools"

const (
	servedName   = "served"
	checkedName  = "checked"
	nodeName     = "node"
	barSuffix    = ".barred"
	probedSuffix = ".probed"
	usedSuffix   = ".used"
	tempSuffix   = ".tmp"

	lostWord = "lost"

	modeFile = 0o600
	modePod  = 0o1600
)

// Box is the mailbox of a node. Its methods may be called from many goroutines and processes at once. Their errors are
// the disk's, and that of [ValidPodUID].
type Box struct {
	dir string
	fs  disk.FS
}

// New returns the mailbox in a state directory. It does not touch the disk.
func New(stateDir string, fsys disk.FS) Box { return Box{filepath.Join(stateDir, Dir), fsys} }

// put replaces a file as a whole. A durable file is so when put returns; a power loss may take back any other.
func (b Box) put(name string, data []byte, mode uint32, durable bool) error {
	if err := disk.MkdirAll(b.fs, b.dir); err != nil {
		return err
	}
	temp := name + tempSuffix
	if err := b.remove(temp); err != nil { // it would keep its mode
		return err
	}
	if err := b.fs.WriteFile(b.path(temp), data, mode); err != nil {
		return err
	}
	if durable {
		if err := b.fs.SyncFile(b.path(temp)); err != nil {
			return err
		}
	}
	if err := b.fs.Rename(b.path(temp), b.path(name)); err != nil || !durable {
		return err
	}
	return disk.SyncPathTo(b.fs, b.path(name))
}

func (b Box) has(name string) (bool, error) {
	_, err := b.fs.Mode(b.path(name))
	return err == nil, absent(err)
}

// remove removes a file. It is no error if it is missing.
func (b Box) remove(name string) error { return absent(b.fs.Remove(b.path(name))) }

func (b Box) path(name string) string { return filepath.Join(b.dir, name) }

// absent is the error unless a file is missing.
func absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Remove removes the mailbox.
func (b Box) Remove() error { return disk.RemoveAll(b.fs, b.dir) }

// version is that of Served.
const version = 1

// ErrCorrupt is a file that does not parse: nothing is known of what it said.
var ErrCorrupt = errors.New("record is corrupt")

// Served is what the agent has durably said of the cluster's pools. Its JSON is the file served:
//
//	{"v":1,"guard":"…","subnets":["10.6.0.0/16"],"gateways":["10.6.0.1"]}
//	{"v":1,"none":true}
type Served struct {
	Version int `json:"v"`
	// None says that the cluster has no pool. Then nothing else is set.
	None bool `json:"none,omitempty"`
	// Guard names the admission policy that lets only the controller write the addresses of pods, as it is now. Addresses
	// that carry it were written by the controller. If it is empty, addresses never say by themselves who wrote them.
	Guard string `json:"guard,omitempty"`
	// Subnets are those of all pools, unless More, and Gateways the addresses that pods of pools have for gateways.
	Subnets  []netip.Prefix `json:"subnets,omitempty"`
	Gateways []netip.Addr   `json:"gateways,omitempty"`
	More     bool           `json:"more,omitempty"`
	// Spiderpool says that pods ask for addresses of the pools by Spiderpool's annotations, too.
	Spiderpool bool `json:"spiderpool,omitempty"`
}

// InPool reports whether an address can be one of a pool.
func (s *Served) InPool(a netip.Addr) bool {
	return s.More || slices.ContainsFunc(s.Subnets, func(p netip.Prefix) bool { return p.Contains(a) })
}

// PutServed notes durably what the cluster's pools are.
func (b Box) PutServed(s Served) error {
	s.Version = version
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return b.put(servedName, append(data, '\n'), modeFile, true)
}

// Served returns what PutServed noted, nil if that is nothing. After an error, which may be ErrCorrupt or that a newer
// version wrote the file, nothing is known.
func (b Box) Served() (*Served, error) {
	data, err := b.fs.ReadFile(b.path(servedName))
	if err != nil {
		return nil, absent(err)
	}
	var written struct {
		Version int `json:"v"`
	}
	if json.Unmarshal(data, &written) == nil && written.Version > version {
		return nil, fmt.Errorf("record was written by a newer version of stayput: %s has version %d, this stayput supports "+
			"versions up to %d: install the newer version again", b.path(servedName), written.Version, version)
	}
	s := &Served{}
	if err := json.Unmarshal(data, s); err != nil {
		return nil, fmt.Errorf("%w: %s: %v", ErrCorrupt, b.path(servedName), err)
	}
	return s, nil
}

// ValidPodUID returns an error, in the words of CNI_ARGS, unless uid is the UID of a pod of the API server, in the one
// form that it has. Only such a UID names files.
func ValidPodUID(uid string) error {
	ok := len(uid) == 36
	for i := 0; ok && i < len(uid); i++ {
		c := uid[i]
		if i == 8 || i == 13 || i == 18 || i == 23 {
			ok = c == '-'
		} else {
			ok = c >= '0' && c <= '9' || c >= 'a' && c <= 'f'
		}
	}
	if !ok {
		return fmt.Errorf("K8S_POD_UID: %.64q is not valid: expected the UID of a pod of the API server, "+
			"such as 6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e", uid)
	}
	return nil
}

// PutPod writes the file with the addresses of a pod: the cluster has surely given them to this pod, and it has not
// ended here. A power loss may take the file back.
func (b Box) PutPod(uid, text string) error {
	if err := ValidPodUID(uid); err != nil {
		return err
	}
	return b.put(uid, []byte(text), modePod, false)
}

// Pod returns the addresses of a pod as PutPod wrote them, empty if there are none.
func (b Box) Pod(uid string) (text string, err error) {
	path, err := b.PodPath(uid)
	if err != nil {
		return "", err
	}
	// The mode first: a file that says nothing may be replaced by a file that does, not the other way round.
	if mode, err := b.fs.Mode(path); err != nil || mode != modePod {
		return "", absent(err)
	}
	data, err := b.fs.ReadFile(path)
	return string(data), absent(err)
}

// PodPath returns the path of the file with the addresses of a pod, and the error of ValidPodUID.
func (b Box) PodPath(uid string) (string, error) { return b.path(uid), ValidPodUID(uid) }

// DeletePod removes the file with the addresses of a pod, and what the plugin has noted of them. It is no error if they
// are missing.
func (b Box) DeletePod(uid string) error {
	if err := ValidPodUID(uid); err != nil {
		return err
	}
	if err := b.remove(uid); err != nil {
		return err
	}
	return b.remove(uid + probedSuffix)
}

// Pod is a pod that has files.
type Pod struct {
	Text   string // of its addresses, empty if PutPod has not written any
	Barred bool
}

// Pods returns the pods that have files, by UID.
func (b Box) Pods() (map[string]Pod, error) {
	names, err := b.fs.ReadDir(b.dir)
	if absent(err) != nil {
		return nil, err
	}
	pods := map[string]Pod{}
	for _, name := range names {
		uid, barred := strings.CutSuffix(name, barSuffix)
		if ValidPodUID(uid) != nil {
			continue
		}
		p := pods[uid]
		if barred {
			p.Barred = true
		} else if p.Text, err = b.Pod(uid); err != nil {
			return nil, err
		}
		pods[uid] = p
	}
	return pods, nil
}

// PutBar notes durably that no ADD of a pod with addresses of pools may succeed any more. An ADD that is under way may
// not have seen the bar: ledger.Bar waits for such ADDs.
func (b Box) PutBar(uid string) error {
	if err := ValidPodUID(uid); err != nil {
		return err
	}
	return b.put(uid+barSuffix, nil, modeFile, true)
}

// Barred reports whether there is a bar for a pod.
func (b Box) Barred(uid string) (bool, error) {
	if err := ValidPodUID(uid); err != nil {
		return false, err
	}
	return b.has(uid + barSuffix)
}

// PutEpoch begins an epoch: in the boot with this ID an ADD may get addresses of pools only if PutPod has written the
// pod's file since. It forgets the files of all pods. lost notes that bars of this boot may be lost. After an error it
// has to be called again. An ADD that is under way may not have seen it: ledger.BeginEpoch waits for those.
func (b Box) PutEpoch(boot string, epoch int64, lost bool) error {
	names, err := b.fs.ReadDir(b.dir)
	if absent(err) != nil {
		return err
	}
	for _, name := range names { // first: none of them is from this epoch
		if ValidPodUID(name) != nil {
			continue
		}
		if err := b.remove(name); err != nil {
			return err
		}
	}
	text := boot + " " + strconv.FormatInt(epoch, 10)
	if lost {
		text += " " + lostWord
	}
	return b.put(checkedName, []byte(text+"\n"), modeFile, true)
}

// Epoch returns what PutEpoch was told last, if that was in the boot with this ID, else 0.
func (b Box) Epoch(boot string) (epoch int64, lost bool, err error) {
	data, err := b.fs.ReadFile(b.path(checkedName))
	if err != nil {
		return 0, false, absent(err)
	}
	begun, rest, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
	if begun != boot {
		return 0, false, nil
	}
	rest, lost = strings.CutSuffix(rest, " "+lostWord)
	epoch, err = strconv.ParseInt(rest, 10, 64)
	return epoch, lost, err
}

// Confirms reports whether a pod may have the addresses that a text says. It may if no epoch has begun in the boot with
// this ID, or if PutPod has written the very text since.
func (b Box) Confirms(uid, text, boot string) (bool, error) {
	data, err := b.fs.ReadFile(b.path(checkedName))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist), absent(err)
	}
	// A file that does not parse may be of this boot.
	if begun, _, whole := strings.Cut(string(data), " "); whole && begun != boot {
		return true, nil
	}
	confirmed, err := b.Pod(uid)
	return confirmed != "" && confirmed == text, err
}

// PutNode writes the name of the node, unless it is written already.
func (b Box) PutNode(name string) error {
	if current, err := b.Node(); err != nil || current == name {
		return err
	}
	return b.put(nodeName, []byte(name), modeFile, false)
}

// Node returns what PutNode wrote, empty if that is nothing.
func (b Box) Node() (string, error) {
	data, err := b.fs.ReadFile(b.path(nodeName))
	return strings.TrimSpace(string(data)), absent(err)
}

// PutProbed notes that no other machine on the link had these addresses, besides those that were noted of the pod
// before.
func (b Box) PutProbed(uid string, addrs []netip.Addr) error {
	before, err := b.Probed(uid)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, a := range slices.Concat(before, addrs) {
		text.WriteString(a.String() + "\n")
	}
	if err := disk.MkdirAll(b.fs, b.dir); err != nil {
		return err
	}
	for _, a := range addrs {
		if err := b.fs.WriteFile(b.path(a.String()+usedSuffix), nil, modeFile); err != nil {
			return err
		}
	}
	return b.put(uid+probedSuffix, []byte(text.String()), modeFile, false)
}

// Probed returns the addresses of a pod that PutProbed noted.
func (b Box) Probed(uid string) (addrs []netip.Addr, err error) {
	if err := ValidPodUID(uid); err != nil {
		return nil, err
	}
	data, err := b.fs.ReadFile(b.path(uid + probedSuffix))
	for line := range strings.Lines(string(data)) {
		if a, err := netip.ParseAddr(strings.TrimSuffix(line, "\n")); err == nil { // else it is probed again
			addrs = append(addrs, a)
		}
	}
	return addrs, absent(err)
}

// Used reports whether PutProbed has noted an address for any pod. It is forgotten after [BarFor], and is then asked
// for once more.
func (b Box) Used(a netip.Addr) (bool, error) { return b.has(a.String() + usedSuffix) }

// BarFor is how long a bar stays at least: no backup of a cluster that is older than that is restored.
const BarFor = 30 * 24 * time.Hour

// Sweep removes the bars that are older than [BarFor], and what was noted of probes, but those of pods that the cluster
// still has, and what kills have left of files.
func (b Box) Sweep(has func(uid string) bool) error {
	names, err := b.fs.ReadDir(b.dir)
	errs := []error{absent(err)}
	for _, name := range names {
		uid, of, _ := strings.Cut(name, ".")
		ended := (of == barSuffix[1:] || of == probedSuffix[1:]) && ValidPodUID(uid) == nil && !has(uid)
		if !ended && !strings.HasSuffix(name, usedSuffix) && !strings.HasSuffix(name, tempSuffix) {
			continue
		}
		at, err := b.fs.ChangeTime(b.path(name))
		if err == nil && time.Since(time.Unix(0, at)) > BarFor {
			err = b.fs.Remove(b.path(name))
		}
		errs = append(errs, absent(err))
	}
	return errors.Join(errs...)
}
