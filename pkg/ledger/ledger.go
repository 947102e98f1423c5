package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/grants"
)

// The defaults of a Network: host-local's directory and ours.
const (
	DefaultDataDir  = "/var/lib/cni/networks"
	DefaultStateDir = "/var/lib/stayput"
	// DefaultPromisedShare is the share of a range that may be promised if the network does not say.
	DefaultPromisedShare = 0.5
	// DefaultPromisedLimit is how many addresses of a range may be promised if the network does not say. A share bounds
	// nothing in a /64, and each promise costs files on the node and an object in the cluster. It is several times the
	// pods that a node runs at once (110 by default, 250 on large ones), so that pods which have stopped keep theirs.
	DefaultPromisedLimit = 1024
)

// The errors of the ledger. A caller may try again after ErrInUse, ErrFull, and every error that is none of these,
// ErrNewer or ErrCorrupt: it came from the disk.
var (
	// ErrInUse means that the identity's addresses are still used by its predecessor.
	ErrInUse = errors.New("the predecessor of this pod still has its address")
	// ErrFull means that no address of a range set is free.
	ErrFull = errors.New("no IP addresses available")
	// ErrNotAvailable means that a requested address is taken, a gateway, or in no range.
	ErrNotAvailable = errors.New("requested IP address is not available")
	// ErrDuplicate means that the attachment has addresses already (CNI SPEC: no two ADDs without a DEL).
	ErrDuplicate = errors.New("duplicate allocation is not allowed")
	// ErrNetnsGone means that the attachment's own network namespace went away while it waited.
	ErrNetnsGone = errors.New("the network namespace of this container no longer exists")
	// ErrUnknownAttachment means that the attachment has no address in this network.
	ErrUnknownAttachment = errors.New("attachment has no address")
	// ErrUnknownClaim means that there is no promise under this key.
	ErrUnknownClaim = errors.New("no such claim")
)

var errNotADirectory = unix.ENOTDIR

// Options are the seams of a Ledger; every zero field is the machine's own, and StateDir DefaultStateDir.
type Options struct {
	StateDir string
	FS       disk.FS
	Clock    Clock
	Netns    NetnsProber
	// Sleep waits between two tries of an ADD. Patience is how long an ADD waits for its predecessor, zero [Patience].
	Sleep    func(time.Duration)
	Patience time.Duration
	// Freeing, if not nil, is called with the addresses of an attachment that ends by Del, Reclaim or Collect, and with
	// those that an ADD with addresses of pools frees of a dead attachment; under the lock and before any other attachment
	// can have them. If it fails they stay as they are; it is called again with the next try.
	Freeing func(addrs []netip.Addr) error
}

func (o *Options) setDefaults() {
	if o.StateDir == "" {
		o.StateDir = DefaultStateDir
	}
	if o.FS == nil {
		o.FS = disk.Local{}
	}
	if o.Clock == nil {
		o.Clock = SystemClock{}
	}
	if o.Netns == nil {
		o.Netns = SystemNetns{}
	}
	if o.Sleep == nil {
		o.Sleep = time.Sleep
	}
	if o.Patience == 0 {
		o.Patience = Patience
	}
}

// Ledger is the book of one network. Its methods may be called from many goroutines and processes at once. Each says
// whether it takes the network's lock, which it never holds longer than for one decision.
type Ledger struct {
	writer
	net        *Network
	configured bool // net comes from a CNI configuration
	clock      Clock
	netns      NetnsProber
	sleep      func(time.Duration)
	patience   time.Duration
	freeing    func([]netip.Addr) error
	grants     grants.Dir
}

// New returns the ledger of a network as its CNI configuration describes it. It does not touch the disk.
func New(n *Network, o Options) *Ledger {
	l := newLedger(n, o)
	l.configured = true
	return l
}

// Partial returns the ledger of a network that is known by name and data directory alone: for commands that end
// attachments, and for reads. It must not Add. It does not touch the disk.
func Partial(n *Network, o Options) *Ledger { return newLedger(n, o) }

func newLedger(n *Network, o Options) *Ledger {
	o.setDefaults()
	l := &Ledger{writer: writer{files{fs: o.FS}}, net: n, clock: o.Clock, netns: o.Netns, sleep: o.Sleep}
	l.patience, l.freeing, l.grants = o.Patience, o.Freeing, o.Grants()
	if n.DataDir == "" {
		n.DataDir = DefaultDataDir
	}
	l.dir = filepath.Join(n.DataDir, n.Name)
	l.state = filepath.Join(o.StateDir, n.Name+"-"+hashOf(filepath.Clean(n.DataDir))[:8])
	return l
}

// Networks returns the ledger of every network that the plugin has served under StateDir. It takes no lock. The error
// joins one for each network whose description cannot be read: ErrNewer, ErrCorrupt, or the disk's.
func Networks(o Options) ([]*Ledger, error) {
	o.setDefaults()
	names, err := o.FS.ReadDir(o.StateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var ledgers []*Ledger
	var errs []error
	for _, name := range names {
		path := filepath.Join(o.StateDir, name, infoName)
		b, err := o.FS.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNotADirectory) {
			continue
		}
		n := &Network{}
		if err == nil {
			switch v := versionOf(b); {
			case v > recordVersion:
				err = newerError(path, v)
			default:
				if err = json.Unmarshal(b, n); err != nil {
					err = fmt.Errorf("%w: %s: %v", ErrCorrupt, path, err)
				}
			}
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ledgers = append(ledgers, newLedger(n, o))
	}
	return ledgers, errors.Join(errs...)
}

// ErrUndescribed means that a network has no description: where its addresses are is unknown.
var ErrUndescribed = errors.New("the description file of this network is missing")

// Described returns ErrUndescribed if [Networks] leaves a network out that has attachments, because its description was
// removed. An ADD that is the first of its network makes the description before its index entry.
func Described(o Options) error {
	o.setDefaults()
	names, err := o.FS.ReadDir(o.StateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		dir := filepath.Join(o.StateDir, name)
		_, err := o.FS.Mode(filepath.Join(dir, infoName))
		if !errors.Is(err, fs.ErrNotExist) {
			if err != nil && !errors.Is(err, errNotADirectory) {
				errs = append(errs, err)
			}
			continue
		}
		entries, err := o.FS.ReadDir(filepath.Join(dir, indexDir))
		if err == nil && len(entries) > 0 {
			err = fmt.Errorf("%w: %s: remove %s in the network's directory, so that the next command writes it, or %s if the "+
				"network was deleted", ErrUndescribed, filepath.Join(dir, infoName), markerName, dir)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Network returns the network that l is the book of.
func (l *Ledger) Network() *Network { return l.net }

// Result is what a command did.
type Result struct {
	// Addrs are of an ADD its addresses, one per range set in their order; of a DEL those that became retained; of
	// SetPolicy and Move those of the attachment.
	Addrs    []netip.Addr
	Restored bool
	// Promised says of an ADD that fresh addresses are promised to the pod from now on.
	Promised bool
	Events   []Event
}

// Status returns nil if an ADD could work: the data directory can be read. It takes no lock. A full range is no reason
// for an error, which would make the node NotReady.
func (l *Ledger) Status() error {
	_, err := l.fs.ReadDir(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
