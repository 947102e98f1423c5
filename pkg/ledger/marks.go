package ledger

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
)

// Mark is a pod's policy as the agent saw it: the second source, for runtimes that hand no annotations to CNI.
//
//	{"v":1,"containerID":"…","namespace":"…","name":"…","uid":"…","policy":{…},
//	 "addrs":[…],"ifname":"eth0","boot":"…"}     on one line
type Mark struct {
	Version     int    `json:"v"`
	ContainerID string `json:"containerID"`
	Namespace   string `json:"namespace"`
	Name        string `json:"name"`
	UID         string `json:"uid,omitempty"`
	Policy      Policy `json:"policy"`
	// Addrs and IfName are what the runtime said the pod got, and Boot when: after a power loss that took
	// the address files they are all that is known. Without them the mark counts from the claim on.
	Addrs  []netip.Addr `json:"addrs,omitempty"`
	IfName string       `json:"ifname,omitempty"`
	Boot   string       `json:"boot,omitempty"`
}

func (m *Mark) pod() Pod { return Pod{m.Namespace, m.Name, m.UID} }

func decodeMark(b []byte, path string) (*Mark, error) {
	var m Mark
	hash := filepath.Base(path)
	if err := json.Unmarshal(b, &m); err != nil || m.Version > recordVersion {
		if v := versionOf(b); v > recordVersion {
			return nil, newerError(path, v)
		}
		return nil, fmt.Errorf("%w: mark: %v", ErrCorrupt, err)
	}
	if m.Version != recordVersion || hashOf(m.ContainerID) != hash || m.Namespace == "" || m.Name == "" {
		return nil, fmt.Errorf("%w: mark of version %d for container %q", ErrCorrupt, m.Version, m.ContainerID)
	}
	return &m, nil
}

// PutMark records a pod's policy. It is durable on return, and takes no lock: the runtime waits for it. The network's
// directories must be there (Prepare, or any command). The errors are the disk's.
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

// Marks returns the marks, sorted by container. It takes no lock. What does not parse, or is of a newer version, is
// left out; the errors are the disk's.
func (l *Ledger) Marks() ([]Mark, error) {
	marks, _, err := l.allMarks()
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

// DropMark removes a mark; a missing one is no error. It takes the lock: the first command of a boot has to have read
// the marks of the one before. Errors: ErrNewer if the whole network is a newer version's, or the disk's.
func (l *Ledger) DropMark(containerID string) error {
	s, err := l.begin()
	if err != nil {
		return err
	}
	defer s.end()
	return s.remove(s.inState(marksDir, hashOf(containerID)))
}
