package ledger

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

// This file is about addresses of pools. No node owns one: the cluster gives it to one pod at a time, and that word is
// the promise. So the ledger of a node only says which attachment has it, in ranges or not: it makes no claim, counts
// it to no share, and its DEL, its death and the end of the boot free it. What the ledger knows of others it keeps to
// all the same: what is bound to another pod, or retained for one, is given to nobody, whatever the cluster says.
//
// The agent tells the plugin of pods by files, <stateDir>/pools:
//
//	served            what the cluster's pools are, or that it has none: without it no ADD gets an address of a pool. Durable
//	<pod UID>         the pod's addresses, as the annotation says them: the pod is one that the agent has seen, and the
//	                  addresses are those that the cluster has given to it. The sticky bit says so: versions that wrote
//	                  the file without asking did not set it, and such a file says nothing
//	<pod UID>.barred  the pod has ended on this node: no ADD of it may succeed any more. Durable
//	<pod UID>.probed  the addresses, a line each, that nobody else on the link had when the pod got them here: the plugin
//	                  writes it, and the agent removes it with the pod's file
//	checked           BOOT-ID EPOCH [lost]: in this boot an ADD may succeed only for a pod that has its file. lost: bars of
//	                  this boot may be lost
//	<address>.used  a pod of this machine has had the address, since the plugin asked for it on the link: a machine that
//	                has taken over the node's name lacks it
//	node              the name of the node in the cluster

// The errors of an ADD that asks for addresses of pools, besides those of the others.
var (
	// ErrBarred: the agent has told the cluster that the pod is gone.
	ErrBarred = errors.New("this pod has ended on this node")
	// ErrUnseen: the agent has yet to see the pod as the runtime knows it, in a cluster that was restored from a backup.
	ErrUnseen = errors.New("the agent of this node has not confirmed this pod since the cluster was restored")
)

// PoolsDir is their directory in the state directory.
const PoolsDir = "pools"

const (
	servedName   = "served"
	barSuffix    = ".barred"
	probedSuffix = ".probed"
	usedSuffix   = ".used"
	tempSuffix   = ".tmp"
	checkedName  = "checked"
	lostWord     = "lost"
	nodeName     = "node"
)

// ValidPodUID returns an error, in the words of CNI_ARGS, unless uid is the UID of a pod of the API server, in the one
// form that it has. Only such a one names files.
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

// PoolFile returns the path of the file with the addresses of a pod, and the error of ValidPodUID.
func PoolFile(stateDir, uid string) (string, error) {
	if stateDir == "" {
		stateDir = DefaultStateDir
	}
	return filepath.Join(stateDir, PoolsDir, uid), ValidPodUID(uid)
}

// Served is what the agent has durably said of the cluster's pools. Its JSON is the file served of the pools'
// directory:
//
//	{"v":1,"guard":"…","subnets":["10.6.0.0/16"],"gateways":["10.6.0.1"]}
//	{"v":1,"none":true}
type Served struct {
	Version int `json:"v"`
	// None: the cluster has no pool. Then nothing else is set.
	None bool `json:"none,omitempty"`
	// Guard names the admission policy that lets only the controller write the addresses of pods, as it is now. Addresses
	// that carry it were written by the controller. If it is empty, addresses never say by themselves who wrote them.
	Guard string `json:"guard,omitempty"`
	// Subnets are those of all pools, unless More, and Gateways the addresses that pods of pools have for gateways.
	Subnets  []netip.Prefix `json:"subnets,omitempty"`
	Gateways []netip.Addr   `json:"gateways,omitempty"`
	More     bool           `json:"more,omitempty"`
}

// InPool reports whether an address can be one of a pool.
func (s *Served) InPool(a netip.Addr) bool {
	return s.More || slices.ContainsFunc(s.Subnets, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Serve notes durably what the cluster's pools are.
func Serve(o Options, is Served) error {
	o.setDefaults()
	is.Version = recordVersion
	b, err := json.Marshal(is)
	if err != nil {
		return err
	}
	return o.keepDurably(filepath.Join(o.StateDir, PoolsDir, servedName), append(b, '\n'))
}

// PoolsServed returns what [Serve] noted, nil: nothing. The error is ErrCorrupt or ErrNewer, or the disk's: then
// nothing is known.
func PoolsServed(o Options) (*Served, error) {
	o.setDefaults()
	path := filepath.Join(o.StateDir, PoolsDir, servedName)
	b, err := o.FS.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if v := versionOf(b); v > recordVersion {
		return nil, newerError(path, v)
	}
	is := &Served{}
	if err := json.Unmarshal(b, is); err != nil {
		return nil, fmt.Errorf("%w: %s: %v", ErrCorrupt, path, err)
	}
	return is, nil
}

// PoolPod is a pod of which the files of the agent tell.
type PoolPod struct {
	Text   string // of its addresses, empty if there is no such file that says who wrote it
	Barred bool
}

// PoolPods returns the pods of which there are files, by UID.
func PoolPods(o Options) (map[string]PoolPod, error) {
	o.setDefaults()
	dir := filepath.Join(o.StateDir, PoolsDir)
	names, err := o.FS.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	pods := map[string]PoolPod{}
	for _, name := range names {
		uid, barred := strings.CutSuffix(name, barSuffix)
		if ValidPodUID(uid) != nil {
			continue
		}
		p := pods[uid]
		if barred {
			p.Barred = true
		} else {
			if p.Text, err = told(o.FS, filepath.Join(dir, name)); err != nil {
				return nil, err
			}
		}
		pods[uid] = p
	}
	return pods, nil
}

// Told returns the addresses of a pod as the agent has written them with [Tell], empty if it has not.
func Told(o Options, uid string) (string, error) {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return "", err
	}
	return told(o.FS, path)
}

// told looks at the mode first: a file that says nothing may be replaced by one that does, not the other way round.
func told(fsys disk.FS, path string) (string, error) {
	mode, err := fsys.Mode(path)
	if err != nil || mode != modeTold {
		return "", absent(err)
	}
	b, err := fsys.ReadFile(path)
	return string(b), absent(err)
}

// absent is the error unless a file is missing.
func absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Tell writes the file with the addresses of a pod, whole at every moment: the cluster has surely given them to this
// pod, and it has not ended here. A machine that lost power may have lost it.
func Tell(o Options, uid, text string) error {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return err
	}
	if err := disk.MkdirAll(o.FS, filepath.Dir(path)); err != nil {
		return err
	}
	if err := o.FS.Remove(path + tempSuffix); absent(err) != nil { // it would keep its mode
		return err
	}
	if err := o.FS.WriteFile(path+tempSuffix, []byte(text), modeTold); err != nil {
		return err
	}
	return o.FS.Rename(path+tempSuffix, path)
}

// Untell removes the file with the addresses of a pod, and what the plugin has noted of them. It is no error if
// they are missing.
func Untell(o Options, uid string) error {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return err
	}
	for _, p := range []string{path, path + probedSuffix} {
		if err := o.FS.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// TellNode writes the name of the node, unless it is written already.
func TellNode(o Options, name string) error {
	o.setDefaults()
	path := filepath.Join(o.StateDir, PoolsDir, nodeName)
	if is, err := NodeName(o); err != nil || is == name {
		return err
	}
	if err := disk.MkdirAll(o.FS, filepath.Dir(path)); err != nil {
		return err
	}
	if err := o.FS.WriteFile(path+tempSuffix, []byte(name), modeState); err != nil {
		return err
	}
	return o.FS.Rename(path+tempSuffix, path)
}

// NodeName returns what TellNode wrote, empty if that is nothing.
func NodeName(o Options) (string, error) {
	o.setDefaults()
	b, err := o.FS.ReadFile(filepath.Join(o.StateDir, PoolsDir, nodeName))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

// NoteProbed notes that nobody else on the link had these addresses, besides those that were noted before.
func NoteProbed(o Options, uid string, addrs []netip.Addr) error {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return err
	}
	was, err := Probed(o, uid)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, a := range slices.Concat(was, addrs) {
		text.WriteString(a.String() + "\n")
	}
	if err := disk.MkdirAll(o.FS, filepath.Dir(path)); err != nil {
		return err
	}
	for _, a := range addrs {
		if err := o.FS.WriteFile(o.usedFile(a), nil, modeState); err != nil {
			return err
		}
	}
	path += probedSuffix
	if err := o.FS.WriteFile(path+tempSuffix, []byte(text.String()), modeState); err != nil {
		return err
	}
	return o.FS.Rename(path+tempSuffix, path)
}

func (o *Options) usedFile(a netip.Addr) string {
	return filepath.Join(o.StateDir, PoolsDir, a.String()+usedSuffix)
}

// Used reports whether NoteProbed has noted an address for any pod. It is forgotten after [BarFor], and is then asked
// for once more.
func Used(o Options, a netip.Addr) (bool, error) {
	o.setDefaults()
	_, err := o.FS.Mode(o.usedFile(a))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Probed returns the addresses of a pod that NoteProbed noted.
func Probed(o Options, uid string) (addrs []netip.Addr, err error) {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return nil, err
	}
	b, err := o.FS.ReadFile(path + probedSuffix)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		if a, err := netip.ParseAddr(strings.TrimSuffix(line, "\n")); err == nil { // else it is probed again
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

// BarFor is how long a bar stays at least: no backup of a cluster that is older than that is restored.
const BarFor = 30 * 24 * time.Hour

// SweepBars removes the bars that are older than [BarFor], and what was noted of probes, but those of pods that the
// cluster still has, and what kills have left of files.
func SweepBars(o Options, has func(uid string) bool) error {
	o.setDefaults()
	now, err := o.Clock.Now()
	if err != nil {
		return err
	}
	dir := filepath.Join(o.StateDir, PoolsDir)
	names, err := o.FS.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, name := range names {
		uid, of, _ := strings.Cut(name, ".")
		ended := (of == barSuffix[1:] || of == probedSuffix[1:]) && ValidPodUID(uid) == nil && !has(uid)
		ended = ended || strings.HasSuffix(name, usedSuffix)
		if !ended && !strings.HasSuffix(name, tempSuffix) {
			continue
		}
		at, err := o.FS.ChangeTime(filepath.Join(dir, name))
		if err == nil && now.Wall.Sub(time.Unix(0, at)) > BarFor {
			err = o.FS.Remove(filepath.Join(dir, name))
		}
		if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Barred reports whether there is a bar for a pod.
func Barred(o Options, uid string) (bool, error) {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return false, err
	}
	if _, err = o.FS.Mode(path + barSuffix); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Bar notes durably that no ADD of a pod with addresses of pools may succeed any more on this node, and then returns
// the addresses that the pod has: those of an ADD that succeeded before, and those of addrs that are bound to nobody
// known, which may be the pod's. It takes the lock of every network after the bar is there, so that no ADD can be under
// way that has not seen it. After an error nothing is known; it may be called again.
func Bar(o Options, uid string, addrs ...netip.Addr) ([]Address, error) {
	o.setDefaults()
	path, err := PoolFile(o.StateDir, uid)
	if err != nil {
		return nil, err
	}
	if err := o.keepDurably(path+barSuffix, nil); err != nil {
		return nil, err
	}
	return o.bound(func(a Address) bool {
		return a.Pod.UID == uid || a.Pod.UID == "" && slices.Contains(addrs, a.Addr)
	})
}

// Bound returns every address that is bound, as it is once every ADD has ended that is under way.
func Bound(o Options) ([]Address, error) {
	o.setDefaults()
	return o.bound(func(Address) bool { return true })
}

// Recheck begins an epoch: until the next boot an ADD may get addresses of pools only if the agent has written the
// pod's file since. It forgets all files, and returns every address that is bound, as Bar does. lost notes that bars of
// this boot may be lost. After an error it has to be called again.
func Recheck(o Options, epoch int64, lost bool) ([]Address, error) {
	o.setDefaults()
	now, err := o.Clock.Now()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(o.StateDir, PoolsDir)
	names, err := o.FS.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, name := range names { // first: none of them is from this epoch
		if ValidPodUID(name) != nil {
			continue
		}
		if err := o.FS.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	text := now.BootID + " " + strconv.FormatInt(epoch, 10)
	if lost {
		text += " " + lostWord
	}
	text += "\n"
	if err := o.keepDurably(filepath.Join(dir, checkedName), []byte(text)); err != nil {
		return nil, err
	}
	return o.bound(func(Address) bool { return true })
}

// Rechecked returns the epoch that Recheck has begun in this boot, and what it was told of bars. The epoch is 0 if it
// was not called.
func Rechecked(o Options) (epoch int64, lost bool, err error) {
	o.setDefaults()
	now, err := o.Clock.Now()
	if err != nil {
		return 0, false, err
	}
	b, err := o.FS.ReadFile(filepath.Join(o.StateDir, PoolsDir, checkedName))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	} else if err != nil {
		return 0, false, err
	}
	boot, rest, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	if boot != now.BootID {
		return 0, false, nil
	}
	rest, lost = strings.CutSuffix(rest, " "+lostWord)
	epoch, err = strconv.ParseInt(rest, 10, 64)
	return epoch, lost, err
}

// keepDurably writes a file of the pools' directory, whole at every moment and durable when it returns.
func (o *Options) keepDurably(path string, data []byte) error {
	dir := filepath.Dir(path)
	if err := disk.MkdirAll(o.FS, dir); err != nil {
		return err
	}
	tmp := path + tempSuffix
	if err := o.FS.WriteFile(tmp, data, modeState); err != nil {
		return err
	}
	if err := o.FS.SyncFile(tmp); err != nil {
		return err
	}
	if err := o.FS.Rename(tmp, path); err != nil {
		return err
	}
	return disk.SyncPathTo(o.FS, path)
}

// ErrUndescribed means that a network has no description: where its addresses are is unknown.
var ErrUndescribed = errors.New("the file that describes this network is missing")

// Described returns ErrUndescribed if [Networks] leaves a network out that has attachments, because its description was
// removed. An ADD that is the first of its network makes the description before its index entry.
func Described(o Options) error {
	o.setDefaults()
	names, err := o.FS.ReadDir(o.StateDir)
	if err != nil {
		return absent(err)
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
				"network is no more", ErrUndescribed, filepath.Join(dir, infoName), markerName, dir)
		}
		if absent(err) != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// bound returns the bound addresses of all networks that match, as they are once every ADD has ended that is under way.
func (o *Options) bound(match func(Address) bool) (found []Address, err error) {
	ledgers, err := Networks(*o)
	if err = errors.Join(err, Described(*o)); err != nil {
		return nil, err
	}
	for _, l := range ledgers {
		addrs, err := l.List()
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			if a.State == StateBound && match(a) {
				found = append(found, a)
			}
		}
	}
	return found, nil
}

// admit returns an error if the agent's files forbid that the pod gets these addresses. Under the lock: whoever writes
// such a file takes it afterwards, and then sees what was given.
func (s *session) admit(r *AddRequest) error {
	path := filepath.Join(filepath.Dir(s.state), PoolsDir, r.Pod.UID)
	if err := ValidPodUID(r.Pod.UID); err != nil {
		return err
	}
	switch _, err := s.fs.Mode(path + barSuffix); {
	case err == nil:
		return fmt.Errorf("%w: %s (%s)", ErrBarred, r.Pod, r.Pod.UID)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	b, err := s.fs.ReadFile(filepath.Join(filepath.Dir(path), checkedName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	// One that does not parse may be of this boot.
	if boot, _, whole := strings.Cut(string(b), " "); whole && boot != s.now.BootID {
		return nil
	}
	text, err := told(s.fs, path)
	if err != nil {
		return err
	}
	if text == "" || text != r.PoolText {
		return fmt.Errorf("%w: %s (%s)", ErrUnseen, r.Pod, r.Pod.UID)
	}
	return nil
}

// addPooled gives the attachment the addresses that the cluster has given to its pod, and no others. It promises
// nothing: a claim that the pod has from before ends, as that of a pod that asks for nothing any more.
//
// Steps: index entry, address files, then what ends. Killed in between, the entry lets the runtime's DEL undo the rest.
// An address that was retained for the pod itself is bound before its claim goes: by an attachment that does not hold
// the claim, so that an expiry ends this, too.
func (a *adding) addPooled() error {
	if len(a.has) > 0 {
		return duplicate(a.Attachment, a.has[0])
	}
	var slots, overdue []slot
	var ended []*entry
	for _, addr := range a.Pool {
		s, err := a.slot(addr)
		if err != nil {
			return err
		}
		e, err := a.assessPooled(addr, s)
		if err != nil || a.out.waitFor != nil {
			return err
		}
		if e != nil && !slices.ContainsFunc(ended, func(o *entry) bool { return o.att == e.att }) {
			ended = append(ended, e)
		}
		slots, overdue = append(slots, s), append(overdue, s)
	}
	a.out.addrs = a.Pool
	if err := a.dropExpired(overdue, a.Pool); err != nil {
		return err
	}
	a.enter("", a.Pool, true)
	for i, addr := range a.Pool {
		a.bind(addr, slots[i])
	}
	if len(a.net.Ranges) == 0 && !a.last(0).IsValid() {
		a.out.do(setLast{0, a.Pool[0]}) // by which a wipe is noticed: there is none of a range set
	}
	if a.own != nil {
		a.out.do(dropClaim{a.own})
		if err := a.freeAddrs(a.own, a.Pool); err != nil {
			return err
		}
		a.out.do(syncSlots{})
	}
	for _, e := range ended {
		mine, files, err := boundTo(a, e)
		if err != nil {
			return err
		}
		free := slices.DeleteFunc(slices.Clone(mine), func(addr netip.Addr) bool { return slices.Contains(a.Pool, addr) })
		if len(free) > 0 {
			a.out.do(tellFreeing{free})
		}
		for i, addr := range mine {
			if slices.Contains(free, addr) {
				a.out.do(freeSlot{addr, files[i]})
			}
		}
		a.out.do(dropEntry{e})
	}
	return nil
}

// assessPooled finds out whether the attachment can have an address that the cluster says is its pod's. ended is an
// attachment that had it, is dead and has not been DELed. If it is the pod's own and lives, the outcome waits for it.
func (a *adding) assessPooled(addr netip.Addr, s slot) (ended *entry, err error) {
	taken := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s, which the cluster has given to pod %s, %s", ErrNotAvailable, addr, a.Pod,
			fmt.Sprintf(format, args...))
	}
	for _, set := range a.net.Ranges {
		for _, r := range set {
			if r.Gateway == addr {
				return nil, taken("is the gateway of %s", r.Subnet)
			}
		}
	}
	switch s.state {
	case slotRetained:
		if _, over := a.overdue(s); !over && !a.isOwn(s) {
			return nil, taken("is retained on this node for %s", s.retained.Key)
		}
	case slotBound:
		e, err := a.holder(s.att)
		switch {
		case err != nil:
			return nil, err
		case e == nil:
			return nil, taken("is in use by %s", s.att)
		case !a.alive(e):
			return e, a.claimless(e, addr, taken)
		case e.pod.Name != "" && (e.pod.Namespace != a.Pod.Namespace || e.pod.Name != a.Pod.Name),
			e.att.IfName != "" && e.att.IfName != a.Attachment.IfName:
			return nil, taken("is in use on this node by pod %s, container %s", e.pod, s.att)
		}
		a.out.waitFor = &s.att
	case slotGarbage:
		return nil, taken("has a file on this node that says nothing: unknown who uses it")
	case slotNewer:
		return nil, a.newer(addr, s)
	}
	return nil, nil
}

// claimless returns an error if another pod than this one is promised what a dead attachment has.
func (a *adding) claimless(e *entry, addr netip.Addr, taken func(string, ...any) error) error {
	if e.claim == "" || a.own != nil && e.claim == a.own.Key.hash() {
		return nil
	}
	cl, err := a.claim(e.claim)
	switch {
	case errors.Is(err, ErrCorrupt):
		return taken("may be promised on this node to pod %s", e.pod)
	case err != nil:
		return err
	case cl != nil && slices.Contains(cl.Addrs, addr):
		return taken("is promised on this node to %s", cl.Key)
	}
	return nil
}
