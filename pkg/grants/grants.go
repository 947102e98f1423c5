// Package grants holds the files by which a node's agent lets its CNI plugin give addresses of pools. No node owns such
// an address: the cluster gives it to one pod at a time, and a node may use it only once the address's PodIP names it.
// The agent sees to that, and then grants; the plugin gives what is granted, and nothing else.
//
// # Files
//
// In <stateDir>/pools, of mode 0600:
//
//	file                         writer  content
//	served                       agent   Served: what the cluster's pools are, or that it has none. Durable
//	node                         agent   the name of the node in the cluster
//	grants-BOOT-ID/UID           agent   a grant: the pod's addresses, as its annotation says them
//	grants-BOOT-ID/UID.*.pending agent   a grant that is not valid yet
//	ADDRESS.used                 plugin  empty: a pod of this machine has had the address, since the plugin asked for it
//	                                     on the link. A machine that has taken over the node's name lacks it
//	*.tmp                                served or node before its rename
//
// # Crashes
//
// A grant is good for the boot in which it was given: after another one no pod runs, and the PodIPs may name another
// node by then. So nothing reads the directory of another boot, and no grant is durable.
//
// A grant has three steps: Begin writes a pending file under a name of its own, the agent names the node in the PodIPs,
// and Finish renames that file. A kill between them leaves a pending file, which is no grant. Revoke removes the grant
// and every pending file of the pod, so that a thread, or another agent, that was slow finds its file gone.
//
// # Locks
//
// A Dir takes none. The locks of the networks order grants against ADDs: an ADD reads its grant under its network's
// lock, and whoever revokes takes every network's lock once after that (ledger.Revoke). So an ADD that is under way
// either finds no grant, or has ended when the agent goes on, which then finds the addresses in the ledger.
package grants

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/disk"
)

// Name is the name of the directory in the state directory.
const Name = "pools"

const (
	servedName    = "served"
	nodeName      = "node"
	grantsPrefix  = "grants-"
	pendingSuffix = ".pending"
	usedSuffix    = ".used"
	tempSuffix    = ".tmp"

	modeFile = 0o600
)

// Dir has the files of a node. Its methods may be called from many goroutines and processes at once. Their errors are
// the disk's, and that of [ValidPodUID].
type Dir struct {
	dir  string
	fs   disk.FS
	boot func() (string, error)
}

// New returns the files in a state directory. boot returns the ID of this boot. New does not touch the disk.
func New(stateDir string, fsys disk.FS, boot func() (string, error)) Dir {
	return Dir{filepath.Join(stateDir, Name), fsys, boot}
}

func (b Dir) path(name string) string { return filepath.Join(b.dir, name) }

// absent is the error unless a file is missing.
func absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Remove removes the files.
func (b Dir) Remove() error { return disk.RemoveAll(b.fs, b.dir) }

// version is that of Served.
const version = 1

// ErrCorrupt is a file that does not parse: nothing is known of what it said.
var ErrCorrupt = errors.New("record is corrupt")

// Served is what the agent has durably said of the cluster's pools. Its JSON is the file served:
//
//	{"v":1,"subnets":["10.6.0.0/16"],"gateways":["10.6.0.1"]}
//	{"v":1,"none":true}
type Served struct {
	Version int `json:"v"`
	// None says that the cluster has no pool. Then nothing else is set.
	None bool `json:"none,omitempty"`
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
func (b Dir) PutServed(s Served) error {
	s.Version = version
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := disk.MkdirAll(b.fs, b.dir); err != nil {
		return err
	}
	path := b.path(servedName)
	if err := disk.ReplaceSynced(b.fs, path+tempSuffix, path, append(data, '\n'), modeFile); err != nil {
		return err
	}
	return disk.SyncPathTo(b.fs, path)
}

// Served returns what PutServed noted, nil if that is nothing. After an error, which may be ErrCorrupt or that a newer
// version wrote the file, nothing is known.
func (b Dir) Served() (*Served, error) {
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

// ErrRevoked means that a grant was revoked, or an epoch begun, before it was finished: look again.
var ErrRevoked = errors.New("the grant was revoked before it was finished")

// Pending is a grant that is not valid yet.
type Pending struct {
	dir Dir
	uid string
	at  string
}

// Begin begins a grant of the addresses that a text says.
func (b Dir) Begin(uid, text string) (Pending, error) {
	dir, err := b.grants(uid)
	if err != nil {
		return Pending{}, err
	}
	p := Pending{b, uid, filepath.Join(dir, uid+"."+strconv.FormatUint(rand.Uint64(), 36)+pendingSuffix)}
	return p, disk.WriteFile(b.fs, p.at, []byte(text), modeFile)
}

// Finish makes the grant valid. The PodIPs must name this node. ErrRevoked means that it was revoked since.
func (p Pending) Finish() error {
	err := p.dir.fs.Rename(p.at, filepath.Join(filepath.Dir(p.at), p.uid))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: pod %s", ErrRevoked, p.uid)
	}
	return err
}

// Cancel removes the pending grant. What it cannot remove is no grant.
func (p Pending) Cancel() { _ = p.dir.fs.Remove(p.at) }

// Granted returns the addresses that a pod is granted, as Begin was told them, empty if there is no grant.
func (b Dir) Granted(uid string) (text string, err error) {
	dir, err := b.grants(uid)
	if err != nil {
		return "", err
	}
	data, err := b.fs.ReadFile(filepath.Join(dir, uid))
	return string(data), absent(err)
}

// Path names the grant of a pod, for people.
func (b Dir) Path(uid string) string {
	boot, _ := b.boot()
	return filepath.Join(b.path(grantsPrefix+boot), uid)
}

// All returns what is granted in this boot, by UID. A pod of which there is a pending grant alone has an empty text.
func (b Dir) All() (map[string]string, error) {
	dir, names, err := b.names()
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for _, name := range names {
		uid, _, _ := strings.Cut(name, ".")
		if ValidPodUID(uid) != nil || all[uid] != "" {
			continue
		}
		data, err := b.fs.ReadFile(filepath.Join(dir, uid))
		if absent(err) != nil {
			return nil, err
		}
		all[uid] = string(data)
	}
	return all, nil
}

// Revoke removes the grant of a pod and every pending one. An ADD that is under way may have read the grant:
// ledger.Revoke waits for such ADDs. After an error nothing is known; it may be called again.
func (b Dir) Revoke(uid string) error {
	dir, err := b.grants(uid)
	if err != nil {
		return err
	}
	// The pending ones first: one that is renamed meanwhile is removed as the grant.
	if err := b.endPending(uid + "."); err != nil {
		return err
	}
	return absent(b.fs.Remove(filepath.Join(dir, uid)))
}

// EndPending removes every pending grant: for each of them the agent has to look again.
func (b Dir) EndPending() error { return b.endPending("") }

func (b Dir) endPending(prefix string) error {
	dir, names, err := b.names()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if strings.HasPrefix(name, prefix) && strings.HasSuffix(name, pendingSuffix) {
			errs = append(errs, absent(b.fs.Remove(filepath.Join(dir, name))))
		}
	}
	return errors.Join(errs...)
}

// grants returns the directory of this boot's grants.
func (b Dir) grants(uid string) (dir string, err error) {
	if err := ValidPodUID(uid); err != nil {
		return "", err
	}
	boot, err := b.boot()
	return b.path(grantsPrefix + boot), err
}

// names returns the directory of this boot's grants, and the names of its files.
func (b Dir) names() (dir string, names []string, err error) {
	boot, err := b.boot()
	if err != nil {
		return "", nil, err
	}
	dir = b.path(grantsPrefix + boot)
	names, err = b.fs.ReadDir(dir)
	return dir, names, absent(err)
}

// PutNode writes the name of the node, unless it is written already.
func (b Dir) PutNode(name string) error {
	if current, err := b.Node(); err != nil || current == name {
		return err
	}
	if err := disk.MkdirAll(b.fs, b.dir); err != nil {
		return err
	}
	return disk.Replace(b.fs, b.path(nodeName+tempSuffix), b.path(nodeName), []byte(name), modeFile)
}

// Node returns what PutNode wrote, empty if that is nothing.
func (b Dir) Node() (string, error) {
	data, err := b.fs.ReadFile(b.path(nodeName))
	return strings.TrimSpace(string(data)), absent(err)
}

// PutUsed notes that this machine has had addresses, and no other one on the link had them.
func (b Dir) PutUsed(addrs []netip.Addr) error {
	if err := disk.MkdirAll(b.fs, b.dir); err != nil {
		return err
	}
	for _, a := range addrs {
		if err := b.fs.WriteFile(b.path(a.String()+usedSuffix), nil, modeFile); err != nil {
			return err
		}
	}
	return nil
}

// Used reports whether PutUsed has noted an address. It is forgotten after [UsedFor], and is then asked for once more.
func (b Dir) Used(a netip.Addr) (bool, error) {
	_, err := b.fs.Mode(b.path(a.String() + usedSuffix))
	return err == nil, absent(err)
}

// UsedFor is how long it is known at least that an address was used here.
const UsedFor = 30 * 24 * time.Hour

// Sweep removes what is older than [UsedFor], what kills have left of files, and the grants of other boots.
func (b Dir) Sweep() error {
	boot, err := b.boot()
	if err != nil {
		return err
	}
	names, err := b.fs.ReadDir(b.dir)
	errs := []error{absent(err)}
	for _, name := range names {
		switch {
		case strings.HasPrefix(name, grantsPrefix):
			if name != grantsPrefix+boot {
				errs = append(errs, disk.RemoveAll(b.fs, b.path(name)))
			}
		case strings.HasSuffix(name, usedSuffix), strings.HasSuffix(name, tempSuffix):
			at, err := b.fs.ChangeTime(b.path(name))
			if err == nil && time.Since(time.Unix(0, at)) > UsedFor {
				err = b.fs.Remove(b.path(name))
			}
			errs = append(errs, absent(err))
		}
	}
	return errors.Join(errs...)
}
