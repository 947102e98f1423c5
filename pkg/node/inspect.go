package node

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
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
)

// Inspection says what Inspect looks at beside what the agent itself works with. An empty path is not looked at.
type Inspection struct {
	Version string // of this program
	// Listen is where the daemon answers, as its own flag says it.
	Listen string
	// CNIBinDir is where the runtime finds its plugins, PluginBinary the plugin that belongs to this program.
	CNIBinDir, PluginBinary string
}

const (
	// inspectTimeout is for each thing that has to be asked.
	inspectTimeout = 5 * time.Second
	// secondLook is after how long what looked wrong is looked at again: a pod that starts or ends has its address
	// a moment before or after the runtime lists it.
	secondLook = 2 * time.Second
)

// Inspect describes the node: its ledgers, its CNI configuration, its runtime and the agent that runs on it. It
// is another process than that agent, and changes nothing but what every command of the ledger does at the first
// look of a boot. What it cannot find out is said in the description.
func Inspect(ctx context.Context, o Options, in Inspection) *inspection.Node {
	set(&o.StateDir, ledger.DefaultStateDir)
	set(&o.CNIConfDir, DefaultCNIConfDir)
	set(&o.CRISocket, DefaultCRISocket)
	set(&o.GracePeriod, DefaultGracePeriod)
	if o.Clock == nil {
		o.Clock = ledger.SystemClock{}
	}
	n := &inspection.Node{
		Format: inspection.Format, Version: in.Version, StateDir: o.StateDir,
		Agent: askAgent(ctx, in.Listen), CNI: cniOf(o.CNIConfDir),
	}
	n.Agent.GracePeriod = int64(o.GracePeriod.Seconds())
	n.CNI.Image = binaryAt(in.PluginBinary)
	if in.CNIBinDir != "" {
		n.CNI.Plugin = binaryAt(filepath.Join(in.CNIBinDir, "stayput"))
	}
	ledgers, err := ledger.Networks(ledger.Options{StateDir: o.StateDir, Clock: o.Clock, Netns: o.Netns})
	if err != nil {
		n.NetworksError = err.Error()
	}
	sandboxes, err := askRuntime(ctx, o.CRISocket)
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
			if s.ready {
				n.Runtime.Ready++
			}
		}
		compareTwice(ctx, o.CRISocket, ledgers, n, sandboxes)
	}
	n.Clock.Wall = time.Now().UTC()
	if now, err := o.Clock.Now(); err != nil {
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
		RangeSets: []inspection.RangeSet{}, Addresses: []inspection.Address{},
	}
	if net.LongestRetention > 0 {
		n.LongestRetention = net.LongestRetention.String()
	}
	addrs, err := l.List()
	if err == nil {
		n.Violations, err = l.Check()
	}
	if err != nil {
		n.Error = err.Error()
	}
	for _, a := range addrs {
		n.Addresses = append(n.Addresses, addressOf(a))
	}
	for _, set := range net.Ranges {
		rs := inspection.RangeSet{Size: set.Size(), PromiseLimit: net.MostPromised(set)}
		for _, r := range set {
			rs.Ranges = append(rs.Ranges, inspection.Range{Subnet: r.Subnet, Start: r.Start, End: r.End, Gateway: r.Gateway})
		}
		for _, a := range addrs {
			over := a.State == ledger.StateRetained && a.Ends && a.Left <= 0
			if a.Key != nil && !over && slices.ContainsFunc(set, func(r ledger.Range) bool { return r.Contains(a.Addr) }) {
				rs.Promised++
			}
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
			Identity: k.Identity, Retention: retention(a.Policy), WhenScaled: a.Policy.WhenScaled, WhenDeleted: a.Policy.WhenDeleted,
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

// sandboxIPs is a sandbox with its addresses.
type sandboxIPs struct {
	listed
	ips []netip.Addr
}

// askRuntime lists the sandboxes of the runtime, those that run with their addresses.
func askRuntime(ctx context.Context, socket string) (map[string]sandboxIPs, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	c, err := newCRI(socket)
	if err != nil {
		return nil, err
	}
	defer c.close()
	list, err := c.list(ctx)
	if err != nil {
		return nil, err
	}
	all := make(map[string]sandboxIPs, len(list))
	for id, s := range list {
		is := sandboxIPs{listed: s}
		if s.ready {
			// One that ended meanwhile has no addresses to compare.
			if r, err := c.client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}); err == nil &&
				r.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() != runtimeapi.NamespaceMode_NODE {
				is.ips = ipsOf(r.GetStatus().GetNetwork())
			}
		}
		all[id] = is
	}
	return all, ctx.Err()
}

func ipsOf(s *runtimeapi.PodSandboxNetworkStatus) (ips []netip.Addr) {
	words := []string{s.GetIp()}
	for _, more := range s.GetAdditionalIps() {
		words = append(words, more.GetIp())
	}
	for _, w := range words {
		if a, err := netip.ParseAddr(w); err == nil {
			ips = append(ips, a.Unmap())
		}
	}
	return ips
}

// compareTwice holds the ledgers against the runtime, and what does not agree once more a moment later.
func compareTwice(ctx context.Context, socket string, ledgers []*ledger.Ledger, n *inspection.Node, sandboxes map[string]sandboxIPs) {
	type finding struct {
		network int
		inspection.Suspicion
	}
	compareAll := func(sandboxes map[string]sandboxIPs) (leaks, doubled []finding) {
		for i := range n.Networks {
			l, d := compare(&n.Networks[i], sandboxes)
			for _, s := range l {
				leaks = append(leaks, finding{i, s})
			}
			for _, s := range d {
				doubled = append(doubled, finding{i, s})
			}
		}
		return leaks, doubled
	}
	leaks, doubled := compareAll(sandboxes)
	if len(leaks)+len(doubled) == 0 {
		return
	}
	if !pause(ctx, secondLook) {
		n.Runtime.Error = "the ledgers were not compared with it: " + ctx.Err().Error()
		return
	}
	for i, l := range ledgers {
		n.Networks[i] = inspectNetwork(l)
	}
	sandboxes, err := askRuntime(ctx, socket)
	if err != nil {
		n.Runtime.Error = err.Error()
		return
	}
	leaksNow, doubledNow := compareAll(sandboxes)
	for _, f := range leaksNow {
		if slices.Contains(leaks, f) {
			n.Networks[f.network].Leaks = append(n.Networks[f.network].Leaks, f.Suspicion)
		}
	}
	for _, f := range doubledNow {
		if slices.Contains(doubled, f) {
			n.Networks[f.network].Doubled = append(n.Networks[f.network].Doubled, f.Suspicion)
		}
	}
}

func compare(n *inspection.Network, sandboxes map[string]sandboxIPs) (leaks, doubled []inspection.Suspicion) {
	byIP := map[netip.Addr]inspection.Address{}
	for _, a := range n.Addresses {
		byIP[a.IP] = a
		if _, known := sandboxes[a.ContainerID]; a.State == inspection.Bound && !known {
			leaks = append(leaks, inspection.Suspicion{IP: a.IP, Why: "bound to sandbox " + a.ContainerID + ", which the runtime does not list"})
		}
	}
	for id, s := range sandboxes {
		for _, ip := range s.ips {
			if !slices.ContainsFunc(n.RangeSets, func(set inspection.RangeSet) bool {
				return slices.ContainsFunc(set.Ranges, func(r inspection.Range) bool { return r.Contains(ip) })
			}) {
				continue
			}
			a, taken := byIP[ip]
			switch {
			case taken && a.State == inspection.Bound && a.ContainerID == id:
				continue
			case !taken:
				doubled = append(doubled, inspection.Suspicion{IP: ip, Why: fmt.Sprintf("pod %s has it, but the ledger says that it is free", s.Pod)})
			case a.State == inspection.Bound:
				doubled = append(doubled, inspection.Suspicion{IP: ip, Why: fmt.Sprintf("pod %s has it, but the ledger says that it is bound to sandbox %s", s.Pod, a.ContainerID)})
			default:
				doubled = append(doubled, inspection.Suspicion{IP: ip, Why: fmt.Sprintf("pod %s has it, but the ledger says that it is %s", s.Pod, strings.ToLower(string(a.State)))})
			}
		}
	}
	slices.SortFunc(doubled, func(a, b inspection.Suspicion) int { return cmp.Or(a.IP.Compare(b.IP), strings.Compare(a.Why, b.Why)) })
	return leaks, doubled
}

// askAgent asks the daemon how it is.
func askAgent(ctx context.Context, listen string) inspection.Agent {
	if listen == "" {
		return inspection.Agent{Error: "it has no --listen, so that it cannot be asked"}
	}
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return inspection.Agent{Error: fmt.Sprintf("--listen: %v", err)}
	}
	if a, err := netip.ParseAddr(host); host == "" || err == nil && a.IsUnspecified() {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/readyz", nil)
	if err != nil {
		return inspection.Agent{Error: err.Error()}
	}
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return inspection.Agent{Error: err.Error()}
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 64<<10))
	if err != nil {
		return inspection.Agent{Error: err.Error()}
	}
	is := inspection.Agent{Ready: answer.StatusCode == http.StatusOK}
	if !is.Ready {
		is.Error = strings.TrimSpace(string(body))
	}
	for line := range strings.Lines(string(body)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "nri":
			is.NRI = value
		case "cri":
			is.CRI = value
		case "api":
			is.API = value
		}
	}
	return is
}

// cniOf reads the runtime's configuration as the runtime does.
func cniOf(dir string) inspection.CNI {
	is := inspection.CNI{Dir: dir, Files: []inspection.CNIFile{}}
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		is.Error = err.Error()
		return is
	}
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json":
		default:
			continue
		}
		f := cniFile(filepath.Join(dir, e.Name()))
		is.Files = append(is.Files, f)
		if is.Active == "" && f.Error == "" {
			is.Active = f.Name
		}
	}
	return is
}

func cniFile(path string) inspection.CNIFile {
	f := inspection.CNIFile{Name: filepath.Base(path)}
	type plugin struct {
		Type         string
		IPAM         struct{ Type string }
		Capabilities map[string]bool
	}
	var conf struct {
		Name    string
		Plugins []plugin
		plugin
	}
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &conf)
	}
	plugins := conf.Plugins
	if filepath.Ext(path) != ".conflist" {
		plugins = []plugin{conf.plugin}
	}
	switch {
	case err != nil:
		f.Error = err.Error()
		return f
	case conf.Name == "":
		f.Error = "name: missing"
	case len(plugins) == 0 || plugins[0].Type == "":
		f.Error = "it names no plugin"
	}
	f.Network = conf.Name
	for _, p := range plugins {
		f.Types = append(f.Types, p.Type)
		if p.IPAM.Type != "" {
			f.IPAM = append(f.IPAM, p.IPAM.Type)
		}
		if p.IPAM.Type == "stayput" && p.Capabilities["io.kubernetes.cri.pod-annotations"] {
			f.Annotations = true
		}
	}
	return f
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
		if _, err := os.Stat(filepath.Dir(path)); err != nil {
			b.Unseen = true // the agent's container has no such directory
		}
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
