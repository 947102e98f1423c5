package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// cniDir is where containerd looks for CNI configurations.
const cniDir = "/etc/cni/net.d"

// AnnotationsCapability makes containerd pass a pod's annotations to the plugins that declare it.
const AnnotationsCapability = "io.kubernetes.cri.pod-annotations"

// Network is a CNI network of a node, written as a configuration list with one plugin.
type Network struct {
	// Name of the network; "pods" if empty. Its bridge is br-<name>, unless it is said.
	Name string
	// File is the name of the configuration file; 10-<name>.conflist if empty.
	File string
	// Type is the main plugin: bridge (if empty), ptp or macvlan. The node itself reaches pods of the first two.
	Type string
	// Bridge is one that the node has already, and that is not the pods' gateway; if empty, the plugin makes one that is.
	Bridge string
	// CNIVersion is the version of the configuration; 1.0.0 if empty.
	CNIVersion string
	// IPAM is the configuration of the IPAM plugin; nil means [RangeIPAM]("host-local", "10.88.0.0/16").
	IPAM map[string]any
	// Annotations declares [AnnotationsCapability].
	Annotations bool
}

// RangeIPAM returns the configuration of an IPAM plugin, host-local or stayput, with one range set per subnet: every
// pod gets one address of each.
func RangeIPAM(plugin string, subnets ...string) map[string]any {
	sets := make([]any, 0, len(subnets))
	for _, s := range subnets {
		sets = append(sets, []any{map[string]any{"subnet": s}})
	}
	return map[string]any{"type": plugin, "ranges": sets}
}

func (w Network) withDefaults() Network {
	if w.Name == "" {
		w.Name = "pods"
	}
	if w.File == "" {
		w.File = "10-" + w.Name + ".conflist"
	}
	if w.Type == "" {
		w.Type = "bridge"
	}
	if w.CNIVersion == "" {
		w.CNIVersion = "1.0.0"
	}
	if w.IPAM == nil {
		w.IPAM = RangeIPAM("host-local", "10.88.0.0/16")
	}
	return w
}

// plugin returns the main plugin's entry.
func (w Network) plugin() map[string]any {
	p := map[string]any{"type": w.Type, "ipam": w.IPAM}
	switch w.Type {
	case "bridge":
		if p["bridge"] = w.Bridge; w.Bridge == "" {
			p["bridge"], p["isGateway"] = "br-"+w.Name, true
		}
	case "macvlan":
		p["master"] = Uplink
	}
	if w.Annotations {
		p["capabilities"] = map[string]any{AnnotationsCapability: true}
	}
	return p
}

// Conflist returns the network's configuration list.
func (w Network) Conflist() []byte {
	w = w.withDefaults()
	data, err := json.MarshalIndent(map[string]any{
		"cniVersion": w.CNIVersion, "name": w.Name, "plugins": []any{w.plugin()},
	}, "", "  ")
	if err != nil {
		panic(err) // an IPAM that is no JSON is a mistake in the test
	}
	return append(data, '\n')
}

// NetConf returns the main plugin's input to the IPAM plugin, for [Node.CNI].
func (w Network) NetConf() []byte {
	w = w.withDefaults()
	p := w.plugin()
	p["cniVersion"], p["name"] = w.CNIVersion, w.Name
	data, err := json.Marshal(p)
	if err != nil {
		panic(err)
	}
	return data
}

// SetNetworks replaces the node's networks, from its options or the last SetNetworks, and waits until a running
// containerd has loaded the new ones. Other configuration files stay.
func (n *Node) SetNetworks(ctx context.Context, networks ...Network) error {
	keep := map[string]bool{}
	for _, w := range networks {
		w = w.withDefaults()
		keep[w.File] = true
		if err := n.WriteFile(path.Join(cniDir, w.File), w.Conflist()); err != nil {
			return err
		}
	}
	for _, old := range n.networkFiles {
		if !keep[old] {
			if err := os.Remove(n.Path(path.Join(cniDir, old))); err != nil {
				return err
			}
		}
	}
	n.networkFiles = slices.Sorted(maps.Keys(keep))
	if !n.running() {
		return nil
	}
	return n.waitCNI(ctx)
}

// NewNetNS makes a network namespace in the node, as runtimes other than containerd's CRI do, and returns its path.
func (n *Node) NewNetNS(ctx context.Context, name string) (string, error) {
	file := path.Join("/var/run/netns", name)
	if err := n.WriteFile(file, nil); err != nil {
		return "", err
	}
	_, err := n.Run(ctx, "/usr/bin/unshare", "--net="+file, "/bin/true")
	return file, err
}

// DeleteNetNS removes a network namespace of the node.
func (n *Node) DeleteNetNS(netNS string) error {
	err := inside(n.Pid(), unix.CLONE_NEWNS, func() error { return unix.Unmount(netNS, unix.MNT_DETACH) })
	if err != nil {
		return fmt.Errorf("unmounting %s: %w", netNS, err)
	}
	return os.Remove(n.Path(netNS))
}

// CNICall is a call of a CNI plugin, as a runtime or, for an IPAM plugin, a main plugin makes it.
type CNICall struct {
	Plugin      string // name in /opt/cni/bin
	Command     string // ADD, DEL, ...
	ContainerID string
	NetNS       string // path in the node
	IfName      string // eth0 if empty
	Args        string // CNI_ARGS
	Config      []byte // standard input
}

// CNI calls a CNI plugin in the node and returns its output: the result, or the CNI error if err is not nil.
func (n *Node) CNI(ctx context.Context, c CNICall) ([]byte, error) {
	if c.IfName == "" {
		c.IfName = "eth0"
	}
	env := []string{
		"CNI_COMMAND=" + c.Command, "CNI_CONTAINERID=" + c.ContainerID, "CNI_NETNS=" + c.NetNS,
		"CNI_IFNAME=" + c.IfName, "CNI_ARGS=" + c.Args, "CNI_PATH=/opt/cni/bin",
	}
	out, err := n.RunInput(ctx, env, c.Config, path.Join("/opt/cni/bin", c.Plugin))
	if err != nil {
		return out, fmt.Errorf("%s %s: %w: %s", c.Plugin, c.Command, err, strings.TrimSpace(string(out)))
	}
	return out, nil
}
