package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/home"
)

// checkNode says what is found on a node. clock is the API server's.
func checkNode(node *corev1.Node, l looked, clock interval) []Finding {
	if l.err != nil {
		f := Finding{LevelFail, node.Name, "agent", l.err.Error(), "kubectl describe daemonset stayput-agent, in the namespace of stayput, and the pod's log say why"}
		switch {
		case !home.NodeReady(node):
			f.Level, f.Text, f.Todo = LevelWarn, "the node is not Ready, so that its agent cannot be asked: "+l.err.Error(), "what it keeps is kept; pods wait for it for their home-wait"
		case !errors.Is(l.err, ErrNoAgent):
			f.Todo = "see the log of the agent's pod"
			if apierrors.IsForbidden(l.err) {
				f.Todo = askForIt
			}
		}
		return []Finding{f}
	}
	var all []Finding
	for _, f := range slices.Concat(findAgent(l.is), findCNI(l.is), findPlugin(l.is), findLedger(l.is), findClock(l, clock)) {
		f.Node = node.Name
		all = append(all, f)
	}
	return all
}

func findAgent(n *inspection.Node) (all []Finding) {
	const check = "agent"
	if n.Format > inspection.Format {
		all = append(all, Finding{LevelWarn, "", check, fmt.Sprintf("it says more (format %d) than this command understands (%d)", n.Format, inspection.Format), "use the kubectl-stayput of its version"})
	}
	a := n.Agent
	switch {
	case a.Error != "" && a.NRI == "":
		all = append(all, Finding{LevelFail, "", check, "it does not answer: " + a.Error, "the log of its pod says why"})
	case a.NRI != "connected":
		all = append(all, Finding{LevelFail, "", check, "NRI is " + a.NRI, "enable NRI in the runtime's configuration (containerd 2.0 has it on), and see that its socket's directory is mounted into the agent"})
	}
	if a.CRI != "" && a.CRI != "ok" || n.Runtime.Error != "" {
		why := a.CRI
		if n.Runtime.Error != "" {
			why = n.Runtime.Error
		}
		all = append(all, Finding{LevelFail, "", check, "the runtime does not answer: " + why, "what leaked is not reclaimed meanwhile; see --cri-socket and the runtime's log"})
	}
	if a.API != "" && a.API != "ok" {
		all = append(all, Finding{LevelFail, "", check, "the API server: " + a.API, "RetainedIPs are not up to date meanwhile; the agent's log says more"})
	}
	if len(all) == 0 {
		all = append(all, Finding{LevelOK, "", check, n.Version + ", connected to NRI, CRI and the API server", ""})
	}
	return all
}

// cniTodo is what to do in every state of a node's CNI configuration but those where there is nothing to do.
var cniTodo = map[string]string{
	"stock":       "let the agent keep the configuration (agent.cni.install in the Helm chart), or put stayput in the place of host-local there",
	"none":        "install a CNI plugin that takes its addresses from host-local, such as bridge or flannel",
	"unsupported": "stayput keeps the addresses of CNI plugins that take them from host-local: see docs/networks.md",
	"broken":      "repair it: until then the runtime starts no pod, or with an older configuration",
	"held":        "wait for what wrote that file to write it again, or install another CNI plugin; until then pods get their addresses as before",
	"multus":      "see that the network it hands on to has stayput in it: restart its pod on this node once the agent's file is there",
	"shadowed":    "rename that file, so that it sorts behind the agent's; a copy that multus has made goes with a restart of its pod on this node",
	"conflict":    "rename or remove the file that the agent leaves alone, or end the other program that changes it",
	"no-plugin":   "see --cni-bin-dir of the agent, and its log",
	"error":       "see --cni-conf-dir of the agent, and its log",
}

func findCNI(n *inspection.Node) []Finding {
	const check = "CNI configuration"
	c := n.CNI
	todo := cniTodo[c.State]
	if todo == "" {
		todo = "use the kubectl-stayput of the agent's version, and see the log of the agent" // of a later version
	}
	switch {
	case c.State == "no-plugin" && n.CNI.Plugin.Error != "": // said of the plugin
		return nil
	case !c.Good:
		return []Finding{{LevelFail, "", check, c.Message, todo}}
	case c.State == "multus" || c.State == "held":
		return []Finding{{LevelWarn, "", check, c.Message, todo}}
	case c.WithoutAnnotations:
		return []Finding{{LevelWarn, "", check, c.File + " does not hand on the pods' annotations: policies are known by the agent alone",
			`add "capabilities": {"io.kubernetes.cri.pod-annotations": true} to the entry of the main plugin`}}
	}
	return []Finding{{LevelOK, "", check, c.Message, ""}}
}

func findPlugin(n *inspection.Node) []Finding {
	const check = "plugin"
	p, of := n.CNI.Plugin, n.CNI.Image
	replace := "copy the agent's there"
	if n.CNI.Installs {
		replace = "the agent replaces it by itself; its log says why if it does not"
	}
	switch {
	case p.Unseen:
		return []Finding{{LevelOK, "", check, "its directory is not mounted into the agent, which does not install it: not looked at", ""}}
	case p.Error != "":
		return []Finding{{LevelFail, "", check, p.Path + ": " + p.Error + ": no pod can start with a CNI configuration that names it", replace}}
	case of.SHA256 != "" && of.SHA256 != p.SHA256:
		return []Finding{{LevelWarn, "", check, fmt.Sprintf("%s (%s) is another one than the agent brought (%s)", p.Path, orNone(p.Version), orNone(of.Version)), replace}}
	case of.SHA256 == "" && p.Version != n.Build:
		return []Finding{{LevelWarn, "", check, fmt.Sprintf("%s is of version %s, the agent of %s", p.Path, orNone(p.Version), orNone(n.Build)), "install both of one version"}}
	}
	return []Finding{{LevelOK, "", check, p.Path + " is the agent's", ""}}
}

// mostAddresses is how many addresses a finding names.
const mostAddresses = 5

// upgrade is what to do where a newer version has written what this one cannot read.
const upgrade = "finish the upgrade, or install the newer version again: until then pods that it made promises to do not start here"

func findLedger(n *inspection.Node) (all []Finding) {
	const check = "ledger"
	report := "keep a copy of the network's directory and of " + n.StateDir + ", and report it: this should never happen"
	if n.NetworksError != "" {
		todo := report
		if n.NetworksNewer {
			todo = upgrade
		}
		all = append(all, Finding{LevelFail, "", check, n.NetworksError, todo})
	}
	taken := 0
	for _, net := range n.Networks {
		about := "network " + net.Name + ": "
		if net.Error != "" {
			todo := "see whether the disk is full, read-only or broken"
			if net.ErrorNewer {
				todo = upgrade
			}
			all = append(all, Finding{LevelFail, "", check, about + net.Error, todo})
			continue
		}
		taken += len(net.Addresses)
		var unreadable, newer []string
		for _, a := range net.Addresses {
			switch a.State {
			case inspection.Unreadable:
				unreadable = append(unreadable, a.IP.String())
			case inspection.Newer:
				newer = append(newer, a.IP.String())
			}
		}
		grace := "the agent reclaims them once nobody has used them for " + duration.HumanDuration(time.Duration(n.Agent.GracePeriod)*time.Second)
		if len(unreadable) > 0 {
			all = append(all, Finding{LevelWarn, "", check, about + "files that say nothing, of " + strings.Join(firstOf(unreadable, mostAddresses), ", "), grace})
		}
		switch {
		case len(newer) > 0:
			all = append(all, Finding{LevelFail, "", check, about + "a newer version of stayput keeps " + strings.Join(firstOf(newer, mostAddresses), ", ") + ", which the agent here can only leave alone", upgrade})
		case len(net.Newer) > 0:
			all = append(all, Finding{LevelFail, "", check, about + net.Newer[0], upgrade})
		}
		if len(net.Violations) > len(unreadable) { // each of those is one
			all = append(all, Finding{LevelFail, "", check, about + strings.Join(firstOf(net.Violations, mostAddresses), "; "), report})
		}
		if len(net.Leaks) > 0 {
			all = append(all, Finding{LevelWarn, "", check, about + suspicions(net.Leaks), grace + "; its log says why if it does not"})
		}
		if len(net.Doubled) > 0 {
			all = append(all, Finding{LevelFail, "", check, about + suspicions(net.Doubled), "delete the pods that have no right to them, and report it: this should never happen"})
		}
		all = append(all, findRoom(net)...)
	}
	if len(all) == 0 {
		all = append(all, Finding{LevelOK, "", check, fmt.Sprintf("%s in %s agree with each other and with the runtime's %s", count(taken, "address", "addresses"), count(len(n.Networks), "network", "networks"), count(n.Runtime.Sandboxes, "sandbox", "sandboxes")), ""})
	}
	return all
}

func suspicions(all []inspection.Suspicion) string {
	var s []string
	for _, x := range all {
		s = append(s, x.IP.String()+": "+x.Why)
	}
	return strings.Join(firstOf(s, mostAddresses), "; ")
}

// findRoom says where addresses run out.
func findRoom(net inspection.Network) (all []Finding) {
	const check = "ledger"
	for i, set := range net.RangeSets {
		var used, kept int64
		for _, a := range net.Addresses {
			if inRanges([]inspection.RangeSet{set}, a.IP) {
				used++
				if a.State == inspection.Retained {
					kept++
				}
			}
		}
		about := fmt.Sprintf("network %s, range set %d: ", net.Name, i)
		switch {
		case used >= set.Size:
			all = append(all, Finding{LevelFail, "", check, fmt.Sprintf("%snone of %d addresses is free, %d are retained: no pod can start", about, set.Size, kept),
				"kubectl stayput release gives retained ones up; enlarge the range, or lower promisedShare"})
		case set.Promised >= set.PromiseLimit:
			all = append(all, Finding{LevelWarn, "", check, fmt.Sprintf("%s%d addresses are promised, of at most %d: further pods get ordinary addresses", about, set.Promised, set.PromiseLimit),
				"kubectl stayput release gives retained ones up; enlarge the range, or raise promisedShare"})
		}
	}
	return all
}
