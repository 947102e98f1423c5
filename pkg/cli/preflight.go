package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/home"
)

// What a preflight check goes by is what the API server tells of a cluster without Stayput. A node's files, which
// decide in the end, it cannot see: what is not certain without them is a warning.

// oldest is the oldest Kubernetes that the definitions can be applied to: it has selectableFields.
var oldest = version.MustParseGeneric("1.31")

// surroundings are what Stayput would be installed into.
type surroundings struct {
	version     string // of the API server, such as v1.36.3
	gatePolicy  string // the newest version in which MutatingAdmissionPolicies are served, empty if there is none
	kruise      bool   // OpenKruise runs
	nodes       []corev1.Node
	daemonSets  []string // those that have pods
	calicoIPAM  string   // the IPAM plugin of Calico, empty if it is unknown
	calicoLacks string   // why there can be no pool of mode Calico, empty if there can
	ciliumIPAM  string   // Cilium's IPAM mode, empty if it is unknown
	ciliumChain string   // the kind of plugin that Cilium is chained to, empty if there is none
	unread      []Finding
}

// runPreflight checks whether Stayput would work in a cluster, and on these nodes or on all.
func runPreflight(ctx context.Context, c *cluster, args []string, line *progress) (*Report, error) {
	defer line.done()
	line.say("querying the API server ...")
	s, err := look(ctx, c, args)
	if err != nil {
		return nil, err
	}
	r := &Report{Findings: []Finding{}}
	r.add(s.findings()...)
	if len(args) == 0 {
		r.Install = s.install()
	}
	return r, nil
}

// look reads a cluster. What may not be read, but for nodes, is unread.
func look(ctx context.Context, c *cluster, args []string) (*surroundings, error) {
	nodes, err := nodesNamed(ctx, c, args)
	if err != nil {
		return nil, err
	}
	s := &surroundings{nodes: nodes}
	api, err := discovery.NewDiscoveryClientForConfig(c.config)
	if err != nil {
		return nil, err
	}
	is, err := api.ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("getting the version of the API server: %w", err)
	}
	s.version = is.GitVersion
	for _, v := range slices.Backward(home.PolicyVersions) {
		served, err := api.ServerResourcesForGroupVersion("admissionregistration.k8s.io/" + v)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("discovering the admission kinds of the API server: %w", err)
		}
		if served != nil && slices.ContainsFunc(served.APIResources, func(r metav1.APIResource) bool {
			return r.Kind == "MutatingAdmissionPolicy"
		}) {
			s.gatePolicy = v
		}
	}
	_, err = admission(ctx, c, "MutatingWebhookConfiguration", home.KruiseWebhooks)
	s.kruise = err == nil
	s.miss("OpenKruise", client.IgnoreNotFound(err))
	s.miss("network", errors.Join(s.readDaemonSets(ctx, c), s.readSettings(ctx, c)))
	return s, nil
}

// miss notes what could not be read, if there is an error.
func (s *surroundings) miss(check string, err error) {
	if err != nil {
		s.unread = append(s.unread, (&findings{check: check}).unread(err)...)
	}
}

func (s *surroundings) readDaemonSets(ctx context.Context, k client.Client) error {
	var sets appsv1.DaemonSetList
	err := k.List(ctx, &sets)
	for _, set := range sets.Items {
		if set.Status.DesiredNumberScheduled > 0 {
			s.daemonSets = append(s.daemonSets, set.Name)
		}
	}
	return rightTo("list DaemonSets", err)
}

// calicoIPAM finds the IPAM plugin in Calico's template of a CNI configuration, which is not JSON.
var calicoIPAM = regexp.MustCompile(`"ipam"\s*:\s*\{[^{}]*"type"\s*:\s*"([^"]*)"`)

// readSettings reads which IPAM Calico and Cilium have.
func (s *surroundings) readSettings(ctx context.Context, k client.Client) error {
	get := func(name string) (map[string]string, error) {
		var of corev1.ConfigMap
		err := k.Get(ctx, types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: name}, &of)
		return of.Data, client.IgnoreNotFound(err)
	}
	calico, calicoErr := get("calico-config")
	if found := calicoIPAM.FindStringSubmatch(calico["cni_network_config"]); found != nil {
		s.calicoIPAM = found[1]
	}
	lacks, lacksErr := readCalico(ctx, k)
	s.calicoLacks = lacks
	cilium, ciliumErr := get("cilium-config")
	s.ciliumIPAM = cilium["ipam"]
	if chain := cilium["cni-chaining-mode"]; chain != "none" {
		s.ciliumChain = chain
	}
	operator := object("operator.tigera.io/v1", "Installation")
	err := k.Get(ctx, types.NamespacedName{Name: "default"}, operator)
	switch kind, _, _ := unstructured.NestedString(operator.Object, "spec", "cni", "ipam", "type"); {
	case meta.IsNoMatchError(err) || apierrors.IsNotFound(err):
		err = nil
	case kind == "HostLocal":
		s.calicoIPAM = "host-local"
	case kind != "":
		s.calicoIPAM = "calico-ipam"
	}
	return errors.Join(calicoErr, lacksErr, ciliumErr, err)
}

// ipPools returns the IPPools of Calico, nil if the API server serves none: Calico is not there, or has an etcd of its
// own.
func ipPools(ctx context.Context, k client.Client) (*unstructured.UnstructuredList, error) {
	for _, version := range []string{"crd.projectcalico.org/v1", "projectcalico.org/v3"} {
		pools := &unstructured.UnstructuredList{}
		pools.SetAPIVersion(version)
		pools.SetKind("IPPoolList")
		err := k.List(ctx, pools)
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			continue
		}
		return pools, rightTo("list Calico's IPPools", err)
	}
	return nil, nil
}

// readCalico says why there can be no pool of mode Calico in a cluster that has Calico's IPAM, empty if there can.
func readCalico(ctx context.Context, k client.Client) (lacks string, err error) {
	pools, err := ipPools(ctx, k)
	if err != nil {
		return "", err
	}
	if pools == nil {
		return "keeps its data in an etcd of its own", nil
	}
	kind := "IPAMConfig"
	if pools.GetAPIVersion() == "projectcalico.org/v3" {
		kind = "IPAMConfiguration"
	}
	config := object(pools.GetAPIVersion(), kind)
	err = k.Get(ctx, types.NamespacedName{Name: "default"}, config)
	strict, _, _ := unstructured.NestedBool(config.Object, "spec", "strictAffinity")
	switch {
	case client.IgnoreNotFound(err) != nil && !meta.IsNoMatchError(err):
		return "", rightTo("get Calico's "+kind, err)
	case len(pools.Items) == 0:
		return "has no IPPool", nil
	case strict:
		return "has strictAffinity, by which no pod can take its address to another node", nil
	}
	return "", nil
}

// Whether a pod's address can be kept on a network.
type verdict int

const (
	unsure verdict = iota
	keeps
	never
	poolsOnly // those of pools of mode Calico
)

// network is what runs the CNI plugin of the pods.
type network struct {
	daemonSets []string
	name       string
	verdict    verdict
	why        string
}

// ownIPAM is why a network of its own allocator is left alone.
const ownIPAM = "allocates addresses itself"

// networks are known by their DaemonSets. Of several the first in this list has the pods: policy engines such as
// Calico's or Cilium's also run beside the network of a cloud.
var networks = []network{
	{[]string{"aws-node"}, "the AWS VPC CNI", never, ownIPAM},
	{[]string{"azure-cns", "azure-cns-cilium"}, "the Azure CNI", never, ownIPAM},
	{[]string{"terway", "terway-eni", "terway-eniip"}, "Terway", never, ownIPAM},
	{[]string{"kube-ovn-cni"}, "Kube-OVN", never, ownIPAM},
	{[]string{"ovnkube-node"}, "OVN-Kubernetes", never, ownIPAM},
	{[]string{"antrea-agent"}, "Antrea", never, "accepts no IPAM plugin but host-local and its own"},
	{[]string{"weave-net"}, "Weave Net", never, ownIPAM},
	{[]string{"anetd"}, "GKE's Dataplane V2", keeps, ""},
	{[]string{"cilium"}, cilium, never, ownIPAM},
	{[]string{"canal", "rke2-canal"}, "canal", keeps, ""},
	{[]string{"kube-flannel-ds", "kube-flannel"}, "flannel", keeps, ""},
	{[]string{"kindnet"}, "kindnet", keeps, ""},
	{[]string{"kube-router"}, "kube-router", keeps, ""},
	{[]string{"calico-node"}, calico, unsure,
		"is installed, but its IPAM plugin is unknown: see 10-calico.conflist on a node"},
}

const calico, cilium = "Calico", "Cilium"

// multus are the names of its DaemonSets: its own manifests', the operators' and RKE2's.
var multus = []string{"kube-multus-ds", "multus", "rke2-multus"}

// runs reports whether one of these DaemonSets has pods.
func (s *surroundings) runs(daemonSets ...string) bool {
	return slices.ContainsFunc(daemonSets, func(name string) bool { return slices.Contains(s.daemonSets, name) })
}

// someNode reports whether one of the nodes is of a kind.
func (s *surroundings) someNode(is func(*corev1.Node) bool) bool {
	return slices.ContainsFunc(s.nodes, func(n corev1.Node) bool { return is(&n) })
}

// network returns what runs the CNI plugin of the pods, as far as the API server tells.
func (s *surroundings) network() network {
	for _, n := range networks {
		if s.runs(n.daemonSets...) && (n.name != cilium || s.ciliumChain == "") {
			return s.settled(n)
		}
	}
	switch {
	case s.someNode(func(n *corev1.Node) bool { return n.Annotations["flannel.alpha.coreos.com/backend-type"] != "" }):
		return network{name: "flannel", verdict: keeps} // k3s has it built in
	case s.ciliumChain != "":
		return network{name: cilium, why: "is chained to a plugin that is unknown to the API server (" + s.ciliumChain + ")"}
	}
	return network{name: "the CNI plugin", why: "cannot be identified by a DaemonSet: check ipam.type in the first " +
		"file in /etc/cni/net.d on a node"}
}

// settled judges a network by its settings.
func (s *surroundings) settled(n network) network {
	gke := func(n *corev1.Node) bool { return strings.Contains(n.Status.NodeInfo.KubeletVersion, "-gke.") }
	switch {
	case n.name == cilium && s.ciliumIPAM == "delegated-plugin":
		n.verdict, n.why = unsure, "delegates to the IPAM plugin in its file on the node: set that to stayput by hand "+
			"(never tested)"
	case n.name == cilium && s.ciliumIPAM != "":
		n.why += " (ipam: " + s.ciliumIPAM + ")"
	case n.name != calico:
	case s.calicoIPAM == "host-local", s.calicoIPAM == "" && s.someNode(gke):
		n.name, n.verdict = "Calico with host-local", keeps
	case s.calicoIPAM == "calico-ipam" && s.calicoLacks != "":
		n.name, n.verdict, n.why = "Calico's own IPAM", never, s.calicoLacks
	case s.calicoIPAM == "calico-ipam":
		n.name, n.verdict = "Calico's own IPAM", poolsOnly
	}
	return n
}

// findings are what will work and what will not: first of the cluster, then of its nodes.
func (s *surroundings) findings() []Finding {
	all := slices.Concat(s.findVersion(), s.findGate(), s.findNetwork())
	for _, row := range []struct {
		is                bool
		check, text, todo string
	}{
		{s.runs(multus...), "multus", "Multus delegates to that network",
			"once Stayput is installed, restart the Multus pod on each node; see docs/networks.md"},
		{s.kruise, "OpenKruise", "it is running and continues to serve PersistentPodStates itself: without Helm, leave out " +
			"deploy/persistentpodstates.yaml", ""},
		{s.someNode(onOpenShift), "OpenShift", "its SCC restricted-v2 gives the controllers their user",
			"set controller.runAsUser: null in the Helm chart"},
	} {
		if row.is {
			all = append(all, finding(row.check, LevelOK, row.text, row.todo)...)
		}
	}
	all = append(all, s.unread...)
	for i := range s.nodes {
		node := &s.nodes[i]
		if why := agentless(node); why != "" {
			all = append(all, onNode(node.Name, findAgentless(why))...)
			continue
		}
		all = append(all, onNode(node.Name, slices.Concat(findRuntime(node), findPlatform(node)))...)
	}
	return all
}

// helmInstall is how the chart is installed with its defaults.
const helmInstall = "helm install stayput deploy/chart --namespace stayput-system --create-namespace"

// install returns the command that installs what works in the cluster.
func (s *surroundings) install() string {
	is := s.network().verdict
	var platforms []string
	for i := range s.nodes {
		if agentless(&s.nodes[i]) == "" {
			platforms = append(platforms, platformOf(&s.nodes[i]))
		}
	}
	slices.Sort(platforms)
	platforms = slices.Compact(platforms)
	agents := len(platforms) > 0 && (is == keeps || is == unsure)
	command := helmInstall
	for _, value := range []struct {
		is  bool
		set string
	}{
		{is == poolsOnly && len(platforms) > 0, "pools.enabled=true,pools.calico=true"},
		{!agents, "agent.enabled=false"},
		{agents && len(platforms) == 1 && platforms[0] != "", "platform=" + strings.Join(platforms, "")},
		{s.gatePolicy == "" && s.apartOnEKS(), "controller.hostNetwork=true"},
		{s.someNode(onOpenShift), "controller.runAsUser=null"},
	} {
		if value.is {
			command += " --set " + value.set
		}
	}
	return command
}

func onOpenShift(n *corev1.Node) bool { return n.Labels["node.openshift.io/os_id"] != "" }

// apartOnEKS reports whether these are nodes of EKS whose pods have addresses that its control plane does not know.
func (s *surroundings) apartOnEKS() bool {
	return !s.runs("aws-node") && s.someNode(func(n *corev1.Node) bool {
		return strings.Contains(n.Status.NodeInfo.KubeletVersion, "-eks-")
	})
}

func (s *surroundings) findVersion() []Finding {
	f := findings{check: "Kubernetes"}
	is, err := version.ParseGeneric(s.version)
	switch {
	case err != nil:
		f.warn(fmt.Sprintf("the API server's version %q cannot be parsed", s.version), "")
	case is.LessThan(oldest):
		f.fail(fmt.Sprintf("%s: the CustomResourceDefinitions require at least %s", s.version, oldest), "upgrade Kubernetes")
	}
	return f.orOK(s.version + "; docs/networks.md lists the tested versions")
}

func (s *surroundings) findGate() []Finding {
	const webhook = "by a webhook of the controllers, since the API server has no MutatingAdmissionPolicies (from " +
		"Kubernetes 1.36 on)"
	level, text, todo := LevelOK, "by MutatingAdmissionPolicy "+s.gatePolicy, ""
	switch {
	case s.gatePolicy == "" && s.apartOnEKS():
		level, todo = LevelWarn, "set controller.hostNetwork in the Helm chart"
		text = webhook + ", and the API server of EKS cannot reach pods of CNI plugins other than AWS's"
	case s.gatePolicy == "":
		text = webhook + ": it must be able to reach these pods, and while no controller responds pods start ungated"
	case s.gatePolicy != home.PolicyVersions[0]:
		text += ", which the API server serves: it applies them only if its feature gate MutatingAdmissionPolicy is on. " +
			"If it is not, set gate.mechanism to Webhook"
	}
	return finding("gate", level, text, todo)
}

func (s *surroundings) findNetwork() []Finding {
	const without = "install with agent.enabled=false, for which nothing runs on the nodes; see docs/networks.md"
	n := s.network()
	level, text, todo := LevelWarn, n.name+" "+n.why, "see docs/networks.md"
	switch {
	case len(s.nodes) == 0:
		text = "the cluster has no nodes"
	case !s.someNode(func(n *corev1.Node) bool { return agentless(n) == "" }):
		text, todo = "pods keep their nodes, but not their addresses: an agent can run on no node", without
	case n.verdict == keeps:
		level, text, todo = LevelOK, n.name+" allocates addresses with host-local: pods can keep their addresses", ""
	case n.verdict == poolsOnly:
		level, text = LevelOK, n.name+": pods can keep their addresses: a pool of mode Calico"
		todo = "create a PodIPPool of mode Calico; see docs/calico.md"
	case n.verdict == never:
		text, todo = text+": pods keep their nodes, but not their addresses", without
	}
	return finding("network", level, text, todo)
}

func findRuntime(node *corev1.Node) []Finding {
	f := findings{check: "runtime"}
	is := node.Status.NodeInfo.ContainerRuntimeVersion
	name, v, _ := strings.Cut(is, "://")
	parsed, err := version.ParseGeneric(v)
	switch {
	case name == "containerd" && err == nil && parsed.AtLeast(version.MustParseGeneric("2.0")):
		return f.orOK("containerd " + v + ", in which NRI is enabled unless it was disabled")
	case name == "containerd":
		f.warn("containerd "+v+" has NRI disabled or lacks it: annotations that do not reach Stayput through CNI arrive "+
			"a moment late", enableNRI+`, or set agent.runtime.nriSocket to ""`)
	case name == "cri-o":
		f.warn("CRI-O "+v+": the API server does not know whether NRI is enabled",
			"see enable_nri in the section crio.nri of its configuration")
	default:
		f.warn(fmt.Sprintf("%q: Stayput was never tested with this runtime", is), "")
	}
	return f.all
}

// platformOf returns the platform of a node, as the chart calls it, if it keeps the runtime's socket or CNI's files
// elsewhere, empty otherwise.
func platformOf(node *corev1.Node) string {
	is := node.Status.NodeInfo
	for _, p := range []struct {
		is   bool
		name string
	}{
		{strings.Contains(is.KubeletVersion, "+k3s"), "k3s"},
		{strings.Contains(is.KubeletVersion, "+rke2"), "rke2"},
		{strings.Contains(is.KubeletVersion, "+k0s"), "k0s"},
		{strings.Contains(is.KubeletVersion, "-gke."), "gke"},
		{strings.HasPrefix(node.Spec.ProviderID, "kind://"), "kind"},
		{node.Labels["microk8s.io/cluster"] == "true", "microk8s"},
		{strings.HasPrefix(is.OSImage, "Talos "), "talos"},
		{strings.HasPrefix(is.ContainerRuntimeVersion, "cri-o://"), "crio"},
	} {
		if p.is {
			return p.name
		}
	}
	return ""
}

func findPlatform(node *corev1.Node) []Finding {
	platform := platformOf(node)
	if platform == "" {
		return nil
	}
	todo := "set platform: " + platform + " in the Helm chart"
	if platform == "talos" { // it enforces pod security
		todo += ", and first label the namespace pod-security.kubernetes.io/enforce=privileged"
	}
	return finding("platform", LevelOK, platform+" uses a non-default socket or directories", todo)
}

// writePreflight prints the findings: equal ones of several nodes once.
func (r *Report) writePreflight(w io.Writer, most int) error {
	nodes := map[Finding][]string{} // of those that differ in the node alone
	short := *r
	short.Findings = nil
	for _, f := range r.Findings {
		node := f.Node
		f.Node = ""
		if nodes[f] == nil {
			short.Findings = append(short.Findings, f)
		}
		nodes[f] = append(nodes[f], node)
	}
	for i, f := range short.Findings {
		short.Findings[i].Node = strings.Join(firstOf(nodes[f], 5), ", ")
	}
	if err := short.write(w, true, most); err != nil || r.Install == "" {
		return err
	}
	_, err := fmt.Fprintf(w, "\nTo install what works here, with a few more values if findings above say so:\n\n  %s\n",
		r.Install)
	return err
}
