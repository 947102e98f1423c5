// Package inspect describes a node as its files, its runtime and its agent have it, for kubectl stayput. It is another
// process than that agent.
package inspect

import (
	"cmp"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/cri"
)

// Options locate everything on the node.
type Options struct {
	Version string // of this program
	// Listen is the address of the daemon, as in its flag.
	Listen string

	StateDir              string
	CNIConfDir, CNIBinDir string // of the runtime
	CRISocket             string
	InstallCNI            bool   // the daemon installs the plugin and keeps the configuration
	PluginBinary          string // that it installs
	GracePeriod           time.Duration
}

const (
	// askTimeout is for what the daemon is asked.
	askTimeout = 5 * time.Second
	// secondLook is after how long what looked wrong is looked at again: a pod that starts or ends has its address
	// a moment before or after the runtime lists it.
	secondLook = 2 * time.Second
)

// Node describes the node and changes nothing. The description says what could not be found out.
func Node(ctx context.Context, o Options) *inspection.Node {
	agent, said := askAgent(ctx, o.Listen)
	n := &inspection.Node{
		Format: inspection.Format, Version: o.Version, StateDir: o.StateDir,
		Agent: agent, CNI: cniOf(o),
	}
	agentKnows(&n.CNI, said)
	if built, ok := debug.ReadBuildInfo(); ok {
		n.Build = built.Main.Version
	}
	n.Agent.GracePeriod = int64(o.GracePeriod.Seconds())
	ledgers, err := ledger.Networks(ledger.Options{StateDir: o.StateDir})
	if err != nil {
		n.NetworksError, n.NetworksNewer = err.Error(), errors.Is(err, ledger.ErrNewer)
	}
	sandboxes, err := cri.WithAddrs(ctx, o.CRISocket)
	if err != nil {
		n.Runtime.Error = err.Error()
	}
	n.Networks = []inspection.Network{}
	for _, l := range ledgers {
		n.Networks = append(n.Networks, inspectNetwork(l))
	}
	if err == nil {
		n.Runtime.Sandboxes = len(sandboxes)
		for _, s := range sandboxes {
			if s.Ready {
				n.Runtime.Ready++
			}
		}
		compareTwice(ctx, o.CRISocket, ledgers, n, sandboxes)
	}
	n.Clock.Wall = time.Now().UTC()
	if now, err := (ledger.SystemClock{}).Now(); err != nil {
		n.Clock.Error = err.Error()
	} else {
		n.Clock.Wall, n.Clock.BootID = now.Wall.UTC().Round(0), now.BootID
	}
	return n
}

func inspectNetwork(l *ledger.Ledger) inspection.Network {
	net := l.Network()
	n := inspection.Network{
		Name: net.Name, DataDir: net.DataDir, PromisedShare: cmp.Or(net.PromisedShare, ledger.DefaultPromisedShare),
		PromisedLimit: cmp.Or(net.PromisedLimit, ledger.DefaultPromisedLimit),
		RangeSets:     []inspection.RangeSet{}, Addresses: []inspection.Address{},
	}
	if net.LongestRetention > 0 {
		n.LongestRetention = net.LongestRetention.String()
	}
	addrs, err := l.List()
	if err == nil {
		var bad []error
		bad, err = l.Check()
		for _, b := range bad {
			if errors.Is(b, ledger.ErrNewer) {
				n.Newer = append(n.Newer, b.Error())
			} else {
				n.Violations = append(n.Violations, b.Error())
			}
		}
	}
	if err != nil {
		n.Error, n.ErrorNewer = err.Error(), errors.Is(err, ledger.ErrNewer)
	}
	for _, a := range addrs {
		n.Addresses = append(n.Addresses, addressOf(a))
	}
	for _, use := range net.Use(addrs) {
		rs := inspection.RangeSet{Size: use.Addresses, Promised: int64(use.Promised), PromiseLimit: use.Promisable}
		for _, r := range use.RangeSet {
			rs.Ranges = append(rs.Ranges, inspection.Range{Subnet: r.Subnet, Start: r.Start, End: r.End, Gateway: r.Gateway})
		}
		n.RangeSets = append(n.RangeSets, rs)
	}
	return n
}

func addressOf(a ledger.Address) inspection.Address {
	is := inspection.Address{
		IP: a.Addr, State: inspection.State(a.State), ContainerID: a.Attachment.ContainerID, Interface: a.Attachment.IfName,
		Namespace: a.Pod.Namespace, Pod: a.Pod.Name, UID: a.Pod.UID,
	}
	if k := a.Key; k != nil {
		is.Namespace, is.Pod, is.Interface = k.Namespace(), k.Pod, k.IfName
		is.Promise = &inspection.Promise{
			Identity: k.Identity, Retention: a.Policy.RetainIP(), WhenScaled: a.Policy.WhenScaled,
			WhenDeleted: a.Policy.WhenDeleted, WhenMoved: a.Policy.WhenMoved,
		}
	}
	if a.State == ledger.StateRetained {
		is.Since = &a.Since
		if a.Ends {
			left := int64(max(0, a.Left).Round(time.Second).Seconds())
			is.LeftSeconds = &left
		}
	}
	return is
}

// finding is what does not agree in one network, by its index.
type finding struct {
	network int
	doubled bool // else a leak
	inspection.Suspicion
}

// compareTwice holds the ledgers against the runtime, and what does not agree once more a moment later.
func compareTwice(ctx context.Context, socket string, ledgers []*ledger.Ledger, n *inspection.Node,
	sandboxes map[string]cri.Sandbox) {
	found := compare(n.Networks, sandboxes)
	if len(found) == 0 {
		return
	}
	select {
	case <-ctx.Done():
		n.Runtime.Error = "the ledgers were not compared with the runtime: " + ctx.Err().Error()
		return
	case <-time.After(secondLook):
	}
	for i, l := range ledgers {
		n.Networks[i] = inspectNetwork(l)
	}
	sandboxes, err := cri.WithAddrs(ctx, socket)
	if err != nil {
		n.Runtime.Error = err.Error()
		return
	}
	for _, f := range compare(n.Networks, sandboxes) {
		if !slices.Contains(found, f) {
			continue
		}
		if net := &n.Networks[f.network]; f.doubled {
			net.Doubled = append(net.Doubled, f.Suspicion)
		} else {
			net.Leaks = append(net.Leaks, f.Suspicion)
		}
	}
}

func compare(networks []inspection.Network, sandboxes map[string]cri.Sandbox) (found []finding) {
	for i, n := range networks {
		byIP := map[netip.Addr]inspection.Address{}
		for _, a := range n.Addresses {
			byIP[a.IP] = a
			if _, known := sandboxes[a.ContainerID]; a.State == inspection.Bound && !known {
				why := "bound to sandbox " + a.ContainerID + ", which the runtime does not list"
				found = append(found, finding{i, false, inspection.Suspicion{IP: a.IP, Why: why}})
			}
		}
		leaks := len(found)
		for id, s := range sandboxes {
			for _, ip := range s.Addrs {
				is := "free"
				if a, taken := byIP[ip]; taken && a.State == inspection.Bound {
					if a.ContainerID == id {
						continue
					}
					is = "bound to sandbox " + a.ContainerID
				} else if taken {
					is = strings.ToLower(string(a.State))
				}
				if slices.ContainsFunc(n.RangeSets, func(s inspection.RangeSet) bool { return s.Contains(ip) }) {
					why := fmt.Sprintf("pod %s has it, but the ledger records it as %s", s.Pod, is)
					found = append(found, finding{i, true, inspection.Suspicion{IP: ip, Why: why}})
				}
			}
		}
		slices.SortFunc(found[leaks:], func(a, b finding) int {
			return cmp.Or(a.IP.Compare(b.IP), strings.Compare(a.Why, b.Why))
		})
	}
	return found
}

// askAgent asks the daemon how it is.
func askAgent(ctx context.Context, listen string) (inspection.Agent, inspection.Status) {
	if listen == "" {
		return inspection.Agent{Error: "the agent runs without --listen and cannot be queried"}, inspection.Status{}
	}
	said, err := statusAt(ctx, listen)
	if err != nil {
		return inspection.Agent{Error: err.Error()}, said
	}
	return inspection.Agent{
		Ready: said.Ready, NRI: said.NRI, CRI: said.CRI, Annotations: said.Annotations, API: said.API,
		CNI: said.CNI, Error: said.Message,
	}, said
}

func statusAt(ctx context.Context, listen string) (said inspection.Status, err error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return said, fmt.Errorf("--listen: %w", err)
	}
	if a, err := netip.ParseAddr(host); host == "" || err == nil && a.IsUnspecified() {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	url := "http://" + net.JoinHostPort(host, port) + inspection.StatusPath
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return said, err
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return said, err
	}
	defer answer.Body.Close()
	if err := json.NewDecoder(io.LimitReader(answer.Body, 64<<10)).Decode(&said); err != nil {
		return inspection.Status{}, fmt.Errorf("%s: %w", url, err)
	}
	return said, nil
}

// cniOf says how the runtime is configured, as the keeper sees it, and looks at the plugins on disk.
func cniOf(o Options) inspection.CNI {
	s := cniconf.Inspect(o.CNIConfDir, o.CNIBinDir)
	plugin := binaryAt(s.Plugin.Path)
	if plugin.Unseen {
		s = cniconf.InspectFiles(o.CNIConfDir, o.CNIBinDir)
	}
	is := inspection.CNI{
		State: string(s.State), Message: s.Text(), Good: s.State.Good(), Dir: s.ConfDir, File: s.File, Network: s.Network,
		Source: s.Source, Installs: o.InstallCNI, Plugin: plugin, Image: binaryAt(o.PluginBinary),
	}
	if is.Plugin.Error == "" && !s.Plugin.Installed {
		is.Plugin.Error = s.Plugin.Problem
	}
	if s.State == cniconf.StateByHand {
		dir, _ := cniconf.ReadDir(s.ConfDir)
		c := dir.Find(s.File)
		is.WithoutAnnotations = c != nil && c.WithoutAnnotations()
	}
	return is
}

// agentKnows takes over from what the running agent says the states that cannot be seen on disk: that the source of its
// file is gone, that another program keeps changing the file, and that the runtime has other directories.
func agentKnows(c *inspection.CNI, said inspection.Status) {
	s := cniconf.State(said.CNIState)
	if s == cniconf.StateError || s == cniconf.StateNoPlugin ||
		c.Good && (s == cniconf.StateHeld || s == cniconf.StateConflict) {
		c.State, c.Message, c.Good = said.CNIState, said.CNIMessage, s.Good()
	}
}

// binaryAt describes a program on disk by what the Go linker has put into it.
func binaryAt(path string) inspection.Binary {
	b := inspection.Binary{Path: path}
	if path == "" {
		return b
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		b.Error = "missing"
		_, err := os.Stat(filepath.Dir(path))
		b.Unseen = err != nil // the agent's container has no such directory
		return b
	case err != nil:
		b.Error = err.Error()
		return b
	case info.Mode()&0o111 == 0:
		b.Error = "not executable"
	}
	if built, err := buildinfo.ReadFile(path); err == nil {
		b.Version = built.Main.Version
	}
	f, err := os.Open(path)
	if err != nil {
		b.Error = err.Error()
		return b
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		b.Error = err.Error()
		return b
	}
	b.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return b
}
