package cli

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/pool"
)

// checkNode returns the findings of a node. clock is the API server's.
func checkNode(node *corev1.Node, l looked, clock interval) []Finding {
	if l.err != nil {
		return onNode(node.Name, findUnreachable(node, l.err))
	}
	return onNode(node.Name, slices.Concat(findAgent(l.is), findCNI(l.is), findPlugin(l.is), findLedger(l.is),
		findRange(node, l.is), findClock(l, clock)))
}

// agentless returns on what kind of node no agent is wanted, empty if one is. The chart's agent.affinity leaves out the
// same kinds by default.
func agentless(node *corev1.Node) string {
	switch {
	case node.Status.NodeInfo.OperatingSystem == string(corev1.Windows),
		node.Labels[corev1.LabelOSStable] == string(corev1.Windows):
		return "Windows"
	case node.Labels["eks.amazonaws.com/compute-type"] == "fargate":
		return "Fargate"
	case node.Labels["type"] == "virtual-kubelet":
		return "a virtual kubelet"
	case node.Labels[pool.AgentLabel] == pool.NoAgent:
		return "a Node with the label " + pool.AgentLabel + "=" + pool.NoAgent
	}
	return ""
}

func findAgentless(on string) []Finding {
	return finding("agent", LevelOK, "none is wanted here, on "+on+": pods on this node keep no addresses", "")
}

func findUnreachable(node *corev1.Node, err error) []Finding {
	f := findings{check: "agent"}
	on := agentless(node)
	switch {
	case errors.Is(err, ErrNoAgent) && on != "":
		return findAgentless(on)
	case !home.NodeReady(node):
		f.warn("the node is not Ready, so its agent cannot be queried: "+err.Error(),
			"recover the node. Its addresses stay kept, and pods wait for it for their home-wait")
	case errors.Is(err, ErrNoAgent):
		f.fail(err.Error(),
			"see kubectl describe daemonset stayput-agent in Stayput's namespace, and the log of the agent's pod")
	case apierrors.IsForbidden(err):
		f.fail(err.Error(), askForIt)
	default:
		f.fail(err.Error(), "see the log of the agent's pod")
	}
	return f.all
}

// enableNRI is what to do about a missing connection.
const enableNRI = "enable NRI in the runtime's configuration (in containerd 2.0 it is enabled by default), " +
	"and mount the directory of its socket into the agent"

func findAgent(n *inspection.Node) []Finding {
	f := findings{check: "agent"}
	if n.Format > inspection.Format {
		f.warn(fmt.Sprintf("the agent's response has format %d, this command supports formats up to %d",
			n.Format, inspection.Format),
			"use kubectl-stayput of the agent's version")
	}
	a, reached := n.Agent, "NRI, CRI and the API server"
	switch {
	case a.Error != "" && a.NRI == "":
		f.fail("the agent does not respond: "+a.Error, "see the log of its pod")
	case a.NRI == inspection.NRIOff:
		reached = "CRI and the API server, without NRI"
	case a.NRI != "connected" && a.Annotations != "":
		f.warn("NRI is "+a.NRI,
			enableNRI+`. If the runtime has no NRI, or NRI is to stay disabled, set agent.runtime.nriSocket to ""`)
	case a.NRI != "connected":
		f.fail("NRI is "+a.NRI, enableNRI)
	}
	switch a.Annotations {
	case "", "ok":
	case inspection.AnnotationsListed:
		f.warn("pod annotations are available neither from CNI nor from NRI: the agent lists them from the runtime, "+
			"and a pod that ends before it is listed, a few tenths of a second after its start, gets no promise",
			enableNRI)
	default:
		f.fail("pod annotations reach neither the plugin nor the agent: "+a.Annotations,
			enableNRI+", or have CNI pass the annotations on. Until then new pods get no promise")
	}
	if a.CRI != "" && a.CRI != "ok" || n.Runtime.Error != "" {
		f.fail("the container runtime does not respond: "+cmp.Or(n.Runtime.Error, a.CRI),
			"see the agent's flag --cri-socket and the runtime's log. Until then leaked addresses are not reclaimed")
	}
	if a.API != "" && a.API != "ok" {
		f.fail("the agent cannot reach the API server: "+a.API,
			"see the agent's log. Until then its RetainedIPs are out of date")
	}
	return f.orOK(n.Version + ", connected to " + reached)
}

// cniTodo is what to do about a state of a node's CNI configuration, unless nothing needs to be done.
var cniTodo = map[string]string{
	"stock": "let the agent manage the configuration (agent.cni.install in the Helm chart), " +
		"or replace host-local with stayput there",
	"none":        "install a CNI plugin that allocates addresses with host-local, such as bridge or flannel",
	"unsupported": "Stayput keeps only addresses that a CNI plugin allocates with host-local: see docs/networks.md",
	"broken":      "repair the file. Until then the runtime starts no pod, or uses an older configuration",
	"held": "wait until the program that wrote the file writes it again, or install another CNI plugin. " +
		"Until then pods get addresses as before",
	"multus": "make sure that the network that Multus delegates to uses stayput: " +
		"once the agent's file is there, restart the Multus pod of this node",
	"shadowed": "rename that file so that it sorts after the agent's. " +
		"If Multus made it, restart the Multus pod of this node",
	"conflict":  "rename or remove the file that the agent does not own, or stop the other program that changes it",
	"no-plugin": "see the agent's flag --cni-bin-dir and its log",
	"error":     "see the agent's flag --cni-conf-dir and its log",
}

func findCNI(n *inspection.Node) []Finding {
	f := findings{check: "CNI configuration"}
	c := n.CNI
	todo, known := cniTodo[c.State]
	if !known { // a state that a later version has
		todo = "use kubectl-stayput of the agent's version, and see the agent's log"
	}
	switch {
	case c.State == "no-plugin" && c.Plugin.Error != "": // a finding of the plugin
		return nil
	case !c.Good:
		f.fail(c.Message, todo)
	case c.State == "multus" || c.State == "held":
		f.warn(c.Message, todo)
	case c.WithoutAnnotations:
		f.warn(c.File+" does not pass pod annotations on: the plugin learns only from the agent what to keep",
			`add "capabilities": {"io.kubernetes.cri.pod-annotations": true} to the entry of the main plugin`)
	}
	return f.orOK(c.Message)
}

func findPlugin(n *inspection.Node) []Finding {
	f := findings{check: "plugin"}
	p, of := n.CNI.Plugin, n.CNI.Image
	replace := "copy the agent's plugin there"
	if n.CNI.Installs {
		replace = "the agent replaces it; if not, its log says why"
	}
	switch {
	case p.Unseen:
		return f.orOK("not checked: the agent does not install it, and its directory is not mounted into the agent")
	case p.Error != "":
		f.fail(p.Path+": "+p.Error+": no pod can start with a CNI configuration that uses it", replace)
	case of.SHA256 != "" && of.SHA256 != p.SHA256:
		f.warn(fmt.Sprintf("%s (version %s) is not the plugin that the agent installs (version %s)",
			p.Path, orNone(p.Version), orNone(of.Version)), replace)
	case of.SHA256 == "" && p.Version != n.Build:
		f.warn(fmt.Sprintf("%s has version %s, the agent has %s", p.Path, orNone(p.Version), orNone(n.Build)),
			"install the same version of both")
	}
	return f.orOK(p.Path + " is the agent's")
}

// mostAddresses is how many addresses a finding names.
const mostAddresses = 5

// upgrade is what to do about a record of a newer version, which this one cannot read.
const upgrade = "finish the upgrade, or install the newer version again. " +
	"Until then the pods whose addresses it kept cannot start on this node"

func findLedger(n *inspection.Node) []Finding {
	f := findings{check: "ledger"}
	report := "this should never happen: keep a copy of the network's directory and of " + n.StateDir +
		", and report it"
	// unless returns what to do about an error, unless it is that of a newer version's record.
	unless := func(newer bool, todo string) string {
		if newer {
			return upgrade
		}
		return todo
	}
	if n.NetworksError != "" {
		f.fail(n.NetworksError, unless(n.NetworksNewer, report))
	}
	taken := 0
	for _, net := range n.Networks {
		about := "network " + net.Name + ": "
		if net.Error != "" {
			f.fail(about+net.Error, unless(net.ErrorNewer, "check whether the disk is full, read-only or broken"))
			continue
		}
		taken += len(net.Addresses)
		named := map[inspection.State][]string{}
		for _, a := range net.Addresses {
			named[a.State] = append(named[a.State], a.IP.String())
		}
		unreadable, newer := named[inspection.Unreadable], named[inspection.Newer]
		reclaimed := fmt.Sprintf("the agent reclaims them once they have been unused for %s; "+
			"if not, its log says why", duration.HumanDuration(time.Duration(n.Agent.GracePeriod)*time.Second))
		if len(unreadable) > 0 {
			f.warn(about+"unreadable address files: "+strings.Join(firstOf(unreadable, mostAddresses), ", "), reclaimed)
		}
		switch {
		case len(newer) > 0:
			f.fail(about+"a newer version of Stayput keeps "+strings.Join(firstOf(newer, mostAddresses), ", ")+
				", which the agent leaves unchanged", upgrade)
		case len(net.Newer) > 0:
			f.fail(about+net.Newer[0], upgrade)
		}
		if len(net.Violations) > len(unreadable) { // each of those is one
			f.fail(about+strings.Join(firstOf(net.Violations, mostAddresses), "; "), report)
		}
		if len(net.Leaks) > 0 {
			f.warn(about+suspicions(net.Leaks), reclaimed)
		}
		if len(net.Doubled) > 0 {
			f.fail(about+suspicions(net.Doubled),
				"this should never happen: delete the pods that use an address without owning it, and report it")
		}
		f.room(&net)
	}
	return f.orOK(fmt.Sprintf("%s in %s, consistent with each other and with the runtime's %s",
		count(taken, "address", "addresses"), count(len(n.Networks), "network", "networks"),
		count(n.Runtime.Sandboxes, "sandbox", "sandboxes")))
}

// findRange finds that retained addresses could leave too few for the node's other pods. Other networks than the pods'
// own need not have one for each pod.
func findRange(node *corev1.Node, n *inspection.Node) []Finding {
	f := findings{check: "range"}
	most := node.Status.Capacity.Pods().Value()
	for _, net := range podNetworks(n) {
		for i, set := range net.RangeSets {
			left := max(0, set.Size-set.PromiseLimit)
			if left >= most {
				continue
			}
			todo := "enlarge the range (spec.podCIDR of the Node), or lower maxPods of the kubelet"
			if share := math.Floor(100*float64(set.Size-most)/float64(set.Size)) / 100; share > 0 {
				todo = fmt.Sprintf("lower promisedShare (agent.promisedShare in the Helm chart) to %g, ", share) + todo
			}
			f.warn(fmt.Sprintf("network %s, range set %d: %d of %d addresses may be promised, so %d are left for other pods, "+
				"fewer than status.capacity.pods of the Node, %d: if all promises belong to stopped pods, other pods cannot start",
				net.Name, i, set.PromiseLimit, set.Size, left, most), todo)
		}
	}
	return f.all
}

// podNetworks returns what the node knows by the name of the pods' own network.
func podNetworks(n *inspection.Node) []inspection.Network {
	return slices.DeleteFunc(slices.Clone(n.Networks), func(net inspection.Network) bool {
		return net.Name != n.CNI.Network
	})
}

func suspicions(all []inspection.Suspicion) string {
	var s []string
	for _, x := range all {
		s = append(s, x.IP.String()+": "+x.Why)
	}
	return strings.Join(firstOf(s, mostAddresses), "; ")
}

// room adds which range sets of a network run out of addresses.
func (f *findings) room(net *inspection.Network) {
	for i, set := range net.RangeSets {
		var used, kept int64
		for _, a := range net.Addresses {
			if set.Contains(a.IP) {
				used++
				if a.State == inspection.Retained {
					kept++
				}
			}
		}
		about := fmt.Sprintf("network %s, range set %d: ", net.Name, i)
		switch {
		case used >= set.Size:
			f.fail(about+fmt.Sprintf("none of %d addresses is free, %d are retained: no pod can start", set.Size, kept),
				"release retained addresses (kubectl stayput release), enlarge the range, or lower promisedShare")
		case set.Promised >= set.PromiseLimit:
			todo := "release retained addresses (kubectl stayput release), enlarge the range, or raise promisedShare"
			if limited(net, set) {
				todo = "release retained addresses (kubectl stayput release), or raise promisedLimit"
			}
			f.warn(about+fmt.Sprintf("%d of at most %d addresses are promised: further pods get ordinary addresses",
				set.Promised, set.PromiseLimit), todo)
		}
	}
}

// limited reports whether promisedLimit, and not promisedShare, says how many addresses of a range set may be promised.
func limited(net *inspection.Network, set inspection.RangeSet) bool {
	return net.PromisedLimit != 0 && set.PromiseLimit >= net.PromisedLimit
}

// promiseSetting returns the setting that says how many addresses of a range set may be promised.
func promiseSetting(net *inspection.Network, set inspection.RangeSet) string {
	if limited(net, set) {
		return fmt.Sprintf("promisedLimit %d", net.PromisedLimit)
	}
	return fmt.Sprintf("promisedShare %g", net.PromisedShare)
}
