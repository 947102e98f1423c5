package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/placement"
)

// reinstall is what to do where something of the installation is missing.
const reinstall = "apply the manifests or the Helm chart of stayput again"

// checkCluster looks at what stayput has in the cluster. now is the API server's time.
func checkCluster(ctx context.Context, k client.Client, home string, now time.Time) []Finding {
	return slices.Concat(
		checkDefinitions(ctx, k), checkPolicies(ctx, k), checkLeader(ctx, k, home, now), checkGated(ctx, k, now),
	)
}

func checkDefinitions(ctx context.Context, k client.Client) (all []Finding) {
	const check = "definitions"
	for _, crd := range []struct {
		name string
		miss Level
	}{{"retainedips.stayput.io", LevelFail}, {"persistentpodstates.apps.kruise.io", LevelWarn}} {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
		err := k.Get(ctx, types.NamespacedName{Name: crd.name}, o)
		switch {
		case apierrors.IsNotFound(err):
			all = append(all, Finding{crd.miss, "", check, "CustomResourceDefinition " + crd.name + " is missing", reinstall})
		case err != nil:
			all = append(all, unseen(check, err))
		case !conditionTrue(o, "Established"):
			all = append(all, Finding{crd.miss, "", check, "CustomResourceDefinition " + crd.name + " is not established", "kubectl describe crd " + crd.name + " says why"})
		}
	}
	if len(all) == 0 {
		all = append(all, Finding{LevelOK, "", check, "the CustomResourceDefinitions are established", ""})
	}
	return all
}

func conditionTrue(o *unstructured.Unstructured, kind string) bool {
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, ok := c.(map[string]any)
		return ok && m["type"] == kind && m["status"] == "True"
	})
}

// kruiseWebhooks is there where OpenKruise runs, which sees to PersistentPodStates itself.
const kruiseWebhooks = "kruise-mutating-webhook-configuration"

func checkPolicies(ctx context.Context, k client.Client) (all []Finding) {
	const check = "policies"
	get := func(kind, name string) error {
		o := &metav1.PartialObjectMetadata{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: kind})
		return k.Get(ctx, types.NamespacedName{Name: name}, o)
	}
	kruise := get("MutatingWebhookConfiguration", kruiseWebhooks) == nil
	for _, p := range []struct {
		kind, name, without string
		miss                Level
	}{
		{"MutatingAdmissionPolicy", "stayput-gate-annotated", "new pods are not gated, and go wherever the scheduler likes", LevelFail},
		{"MutatingAdmissionPolicy", "stayput-gate-recorded", "new pods with a PersistentPodState are not gated, and go wherever the scheduler likes", LevelFail},
		{"ValidatingAdmissionPolicy", "stayput-annotations", "bad annotations are refused by nodes only", LevelWarn},
		{"ValidatingAdmissionPolicy", "stayput-unique-target", "two PersistentPodStates for one workload are not refused", LevelWarn},
		{"ValidatingAdmissionPolicy", "stayput-controller", "the controller's rights on pods are not narrowed", LevelFail},
		{"ValidatingAdmissionPolicy", "stayput-agent", "an agent may write other nodes' RetainedIPs", LevelFail},
	} {
		for _, kind := range []string{p.kind, p.kind + "Binding"} {
			err := get(kind, p.name)
			switch {
			case meta.IsNoMatchError(err):
				text := "the API server does not know " + kind + " (it is Kubernetes 1.36's): " + p.without
				todo := "write the scheduling gate " + stayputv1alpha1.PlacementGate + " into the pod templates"
				if !slices.ContainsFunc(all, func(f Finding) bool { return f.Todo == todo }) {
					all = append(all, Finding{LevelWarn, "", check, text, todo})
				}
			case apierrors.IsNotFound(err) && p.name == "stayput-gate-recorded" && kruise:
			case apierrors.IsNotFound(err):
				all = append(all, Finding{p.miss, "", check, kind + " " + p.name + " is missing: " + p.without, reinstall})
			case err != nil:
				all = append(all, unseen(check, err))
			}
		}
	}
	if len(all) == 0 {
		all = append(all, Finding{LevelOK, "", check, "the admission policies and their bindings are there", ""})
	}
	if kruise {
		all = append(all, Finding{LevelOK, "", check, "OpenKruise runs here: PersistentPodStates are left to it", ""})
	}
	return all
}

func checkLeader(ctx context.Context, k client.Client, home string, now time.Time) []Finding {
	const check = "controller"
	var lease coordinationv1.Lease
	err := k.Get(ctx, types.NamespacedName{Namespace: home, Name: leaseName}, &lease)
	todo := fmt.Sprintf("kubectl -n %s get pods -l %s=controller; until one leads, new annotated pods stay gated", home, labelComponent)
	switch {
	case apierrors.IsNotFound(err):
		return []Finding{{LevelFail, "", check, fmt.Sprintf("no controller has ever led: there is no lease %s/%s", home, leaseName), todo + "; --stayput-namespace says where to look"}}
	case err != nil:
		return []Finding{unseen(check, err)}
	}
	if why := staleLease(&lease, now); why != "" {
		return []Finding{{LevelFail, "", check, "no controller leads: " + why, todo}}
	}
	pod, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_") // what follows is a UID
	return []Finding{{LevelOK, "", check, pod + " leads", ""}}
}

// gateSlack is how long after its home-wait a pod may still be gated: the controller may have changed meanwhile.
const gateSlack = 30 * time.Second

func checkGated(ctx context.Context, k client.Client, now time.Time) (all []Finding) {
	const check = "gated pods"
	var pods corev1.PodList
	if err := k.List(ctx, &pods, client.MatchingFields{"status.phase": string(corev1.PodPending)}); err != nil {
		return []Finding{unseen(check, err)}
	}
	waiting := 0
	for i := range pods.Items {
		p := &pods.Items[i]
		if !isGated(p) || p.DeletionTimestamp != nil {
			continue
		}
		waiting++
		wait := placement.DefaultHomeWait
		switch value, there := p.Annotations[stayputv1alpha1.AnnotationHomeWait]; {
		case value == stayputv1alpha1.HomeWaitRetention:
			continue
		case there:
			if d, err := time.ParseDuration(value); err == nil {
				wait = d
			}
		}
		if age := now.Sub(p.CreationTimestamp.Time); age > wait+gateSlack {
			all = append(all, Finding{LevelFail, "", check, fmt.Sprintf("pod %s/%s has been gated for %s, longer than it was to wait (%s)", p.Namespace, p.Name, duration.HumanDuration(age), short(wait)),
				fmt.Sprintf("kubectl stayput why %s -n %s", p.Name, p.Namespace)})
		}
	}
	if len(all) > 0 {
		return all
	}
	if waiting == 0 {
		return []Finding{{LevelOK, "", check, "no pod waits for its placement", ""}}
	}
	return []Finding{{LevelOK, "", check, count(waiting, "pod") + " waiting, none longer than it was to", ""}}
}

func compareVersions(all []looked) []Finding {
	nodes := map[string][]string{}
	for _, l := range all {
		if l.is != nil {
			nodes[l.is.Version] = append(nodes[l.is.Version], l.node)
		}
	}
	if len(nodes) <= 1 {
		return nil
	}
	var s []string
	for _, v := range slices.Sorted(maps.Keys(nodes)) {
		s = append(s, fmt.Sprintf("%s on %s", v, strings.Join(firstOf(nodes[v], 5), ", ")))
	}
	return []Finding{{LevelWarn, "", "versions", "agents of several versions run: " + strings.Join(s, "; "), "if no upgrade is under way, look at the DaemonSet stayput-agent"}}
}

// firstOf shortens a list for people.
func firstOf(all []string, most int) []string {
	if len(all) <= most {
		return all
	}
	return append(slices.Clone(all[:most]), fmt.Sprintf("and %d more", len(all)-most))
}

// checkNode says what is found on a node. clock is the API server's.
func checkNode(node *corev1.Node, l looked, clock interval) []Finding {
	ready := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	if l.err != nil {
		f := Finding{LevelFail, node.Name, "agent", l.err.Error(), "kubectl describe daemonset stayput-agent, in the namespace of stayput, and the pod's log say why"}
		switch {
		case !ready:
			f.Level, f.Text, f.Todo = LevelWarn, "the node is not Ready, so that its agent cannot be asked: "+l.err.Error(), "what it keeps is kept; pods wait for it for their home-wait"
		case !isNoAgent(l.err):
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

// isOfNewer says whether a node complains of a newer version's record.
func isOfNewer(said string) bool { return strings.Contains(said, ledger.ErrNewer.Error()) }

func findLedger(n *inspection.Node) (all []Finding) {
	const check = "ledger"
	report := "keep a copy of the network's directory and of " + n.StateDir + ", and report it: this should never happen"
	if n.NetworksError != "" {
		todo := report
		if isOfNewer(n.NetworksError) {
			todo = upgrade
		}
		all = append(all, Finding{LevelFail, "", check, n.NetworksError, todo})
	}
	taken := 0
	for _, net := range n.Networks {
		about := "network " + net.Name + ": "
		if net.Error != "" {
			todo := "see whether the disk is full, read-only or broken"
			if isOfNewer(net.Error) {
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
		// A newer version's records are no contradictions, whether they are of a known address or not.
		violations := slices.DeleteFunc(slices.Clone(net.Violations), isOfNewer)
		grace := "the agent reclaims them once nobody has used them for " + short(time.Duration(n.Agent.GracePeriod)*time.Second)
		if len(unreadable) > 0 {
			all = append(all, Finding{LevelWarn, "", check, about + "files that say nothing, of " + strings.Join(firstOf(unreadable, mostAddresses), ", "), grace})
		}
		switch {
		case len(newer) > 0:
			all = append(all, Finding{LevelFail, "", check, about + "a newer version of stayput keeps " + strings.Join(firstOf(newer, mostAddresses), ", ") + ", which the agent here can only leave alone", upgrade})
		case len(violations) < len(net.Violations):
			all = append(all, Finding{LevelFail, "", check, about + net.Violations[slices.IndexFunc(net.Violations, isOfNewer)], upgrade})
		}
		if len(violations) > len(unreadable) { // each of those is one
			all = append(all, Finding{LevelFail, "", check, about + strings.Join(firstOf(violations, mostAddresses), "; "), report})
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
		all = append(all, Finding{LevelOK, "", check, fmt.Sprintf("%s in %s agree with each other and with the runtime's %s", count2(taken, "address", "addresses"), count(len(n.Networks), "network"), count2(n.Runtime.Sandboxes, "sandbox", "sandboxes")), ""})
	}
	return all
}

func count2(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
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

// A wrong clock costs a retention only over a reboot, when nothing else is left to count by.
const (
	skewWarn = 2 * time.Second
	skewFail = time.Minute
)

func findClock(l looked, server interval) []Finding {
	const check = "clock"
	if l.is.Clock.Error != "" {
		return []Finding{{LevelFail, "", check, l.is.Clock.Error, "see the log of the agent: without the clock of the boot nothing of this node can expire"}}
	}
	skew := between(l.is.Clock.Wall, l.from, l.to).minus(server)
	f := Finding{LevelOK, "", check, "agrees with the API server's", ""}
	if skew.Abs() > skewWarn {
		word := "ahead of"
		if skew < 0 {
			word = "behind"
		}
		f = Finding{LevelWarn, "", check, fmt.Sprintf("at least %s %s the API server's: over a reboot retentions end early or late by that", short(skew.Abs()), word), "let NTP set it"}
		if skew.Abs() > skewFail {
			f.Level = LevelFail
		}
	}
	return []Finding{f}
}
