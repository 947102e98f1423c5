package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
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
	networks    map[string][]string // names of known networks' DaemonSets that have a pod on a node, by node
	calicoIPAM  string              // the IPAM plugin of Calico or canal, empty if it is unknown
	calicoLacks string              // why there can be no pool of mode Calico, empty if there can
	ciliumIPAM  string              // Cilium's IPAM mode, empty if it is unknown
	ciliumChain string              // the kind of plugin that Cilium is chained to, empty if there is none
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
	s := &surroundings{nodes: nodes, networks: map[string][]string{}}
	api, err := discovery.NewDiscoveryClientForConfig(c.config)
	if err != nil {
		return nil, err
	}
	is, err := api.ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("getting the version of the API server: %w", err)
	}
	s.version = is.GitVersion
	for _, v := range home.PolicyVersions {
		served, err := api.ServerResourcesForGroupVersion("admissionregistration.k8s.io/" + v)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("discovering the admission kinds of the API server: %w", err)
		}
		if served != nil && s.gatePolicy == "" && slices.ContainsFunc(served.APIResources, func(r metav1.APIResource) bool {
			return r.Kind == "MutatingAdmissionPolicy"
		}) {
			s.gatePolicy = v
		}
	}

	unread := func(check string, err error) {
		s.unread = append(s.unread, (&findings{check: check}).unread(err)...)
	}
	err = c.Get(ctx, types.NamespacedName{Name: home.KruiseWebhooks}, &admissionv1.MutatingWebhookConfiguration{})
	s.kruise = err == nil
	if client.IgnoreNotFound(err) != nil {
		unread("OpenKruise", err)
	}
	if err := s.readNetworks(ctx, c); err != nil {
		unread("network", err)
	}
	if err := s.readSettings(ctx, c); err != nil {
		unread("network", err)
	}
	return s, nil
}

// readNetworks reads on which nodes known networks run.
func (s *surroundings) readNetworks(ctx context.Context, k client.Client) error {
	var sets appsv1.DaemonSetList
	if err := k.List(ctx, &sets); err != nil {
		return rightTo("list DaemonSets", err)
	}
	var errs []error
	for _, set := range sets.Items {
		if networkOf(set.Name) == nil && !slices.Contains(multus, set.Name) {
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
		var pods corev1.PodList
		if err == nil {
			err = k.List(ctx, &pods, client.InNamespace(set.Namespace), client.MatchingLabelsSelector{Selector: selector})
		}
		if err != nil {
			errs = append(errs, rightTo("list pods in namespace "+set.Namespace, err))
		}
		for i := range pods.Items {
			on := pods.Items[i].Spec.NodeName
			s.networks[on] = append(s.networks[on], set.Name)
		}
	}
	return errors.Join(errs...)
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
	var errs []error
	for _, name := range []string{"calico-config", "canal-config", "rke2-canal-config"} {
		data, err := get(name)
		errs = append(errs, err)
		if found := calicoIPAM.FindStringSubmatch(data["cni_network_config"]); found != nil {
			s.calicoIPAM = found[1]
		}
	}
	lacks, err := readCalico(ctx, k)
	s.calicoLacks = lacks
	errs = append(errs, err)
	data, err := get("cilium-config")
	errs = append(errs, err)
	s.ciliumIPAM = data["ipam"]
	if chain := data["cni-chaining-mode"]; chain != "none" {
		s.ciliumChain = chain
	}
	operator := object("operator.tigera.io/v1", "Installation")
	err = k.Get(ctx, types.NamespacedName{Name: "default"}, operator)
	switch kind, _, _ := unstructured.NestedString(operator.Object, "spec", "cni", "ipam", "type"); {
	case meta.IsNoMatchError(err) || apierrors.IsNotFound(err):
	case err != nil:
		errs = append(errs, err)
	case kind == "HostLocal":
		s.calicoIPAM = "host-local"
	case kind != "":
		s.calicoIPAM = "calico-ipam"
	}
	return errors.Join(errs...)
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

// network is what runs the CNI plugin of a node's pods.
type network struct {
	daemonSets []string
	name       string
	verdict    verdict
	why        string
}

// ownIPAM is why a network of its own allocator is left alone.
const ownIPAM = "allocates addresses itself"

// networks are known by their DaemonSets. Of several on a node the first in this list has the pods: policy engines such
// as Calico's or Cilium's also run beside the network of a cloud.
var networks = []network{
	{[]string{"aws-node"}, "the AWS VPC CNI", never, ownIPAM},
	{[]string{"azure-cns", "azure-cns-cilium"}, "the Azure CNI", never, ownIPAM},
	{[]string{"terway", "terway-eni", "terway-eniip"}, "Terway", never, ownIPAM},
	{[]string{"kube-ovn-cni"}, "Kube-OVN", never, ownIPAM},
	{[]string{"ovnkube-node"}, "OVN-Kubernetes", never, ownIPAM},
	{[]string{"antrea-agent"}, "Antrea", never, "accepts no IPAM plugin but host-local and its own"},
	{[]string{"weave-net"}, "Weave Net", never, ownIPAM},
	{[]string{"anetd"}, "GKE's Dataplane V2", keeps, ""},
	{[]string{"cilium"}, "Cilium", never, ownIPAM},
	{[]string{"canal", "rke2-canal"}, "canal", keeps, ""},
	{[]string{"kube-flannel-ds", "kube-flannel"}, "flannel", keeps, ""},
	{[]string{"kindnet"}, "kindnet", keeps, ""},
	{[]string{"kube-router"}, "kube-router", keeps, ""},
	{[]string{"calico-node"}, "Calico", unsure, ""},
}

// multus are the names of its DaemonSets: its own manifests', the operators' and RKE2's.
var multus = []string{"kube-multus-ds", "multus", "rke2-multus"}

// networkOf returns the network that a DaemonSet runs, nil if it is not known to run one.
func networkOf(daemonSet string) *network {
	for i := range networks {
		if slices.Contains(networks[i].daemonSets, daemonSet) {
			return &networks[i]
		}
	}
	return nil
}

// network returns what runs the CNI plugin of a node, as far as the API server tells.
func (s *surroundings) network(node *corev1.Node) network {
	var found []network
	for _, n := range networks {
		if slices.ContainsFunc(n.daemonSets, func(name string) bool {
			return slices.Contains(s.networks[node.Name], name)
		}) {
			found = append(found, n)
		}
	}
	_, flannel := node.Annotations["flannel.alpha.coreos.com/backend-type"]
	if flannel && len(found) == 0 { // k3s has it built in
		found = append(found, network{name: "flannel", verdict: keeps})
	}
	if len(found) > 1 && found[0].name == "Cilium" && s.ciliumChain != "" {
		found = found[1:]
	}
	if len(found) == 0 {
		return network{name: "the CNI plugin", why: "cannot be identified by a DaemonSet: check ipam.type in the first " +
			"file in /etc/cni/net.d on the node"}
	}
	n := found[0]
	switch n.name {
	case "Calico":
		switch gke := strings.Contains(node.Status.NodeInfo.KubeletVersion, "-gke."); {
		case s.calicoIPAM == "host-local", s.calicoIPAM == "" && gke:
			n.name, n.verdict = "Calico with host-local", keeps
		case s.calicoIPAM == "calico-ipam" && s.calicoLacks != "":
			n.name, n.verdict, n.why = "Calico's own IPAM", never, s.calicoLacks
		case s.calicoIPAM == "calico-ipam":
			n.name, n.verdict = "Calico's own IPAM", poolsOnly
		case s.calicoIPAM != "":
			n.verdict, n.why = never, "uses the IPAM plugin "+s.calicoIPAM
		default:
			n.why = "is installed, but its IPAM plugin is unknown: see 10-calico.conflist on a node"
		}
	case "Cilium":
		switch {
		case s.ciliumIPAM == "delegated-plugin":
			n.verdict, n.why = unsure, "delegates to the IPAM plugin in its file on the node: "+
				"set that to stayput by hand (never tested)"
		case s.ciliumChain != "":
			n.verdict, n.why = unsure, "is chained to a plugin that is unknown to the API server ("+s.ciliumChain+")"
		case s.ciliumIPAM != "":
			n.why += " (ipam: " + s.ciliumIPAM + ")"
		}
	}
	return n
}

// findings are what will work and what will not: first of the cluster, then of its nodes.
func (s *surroundings) findings() []Finding {
	all := slices.Concat(s.findVersion(), s.findGate(), s.findKruise(), s.findOpenShift(), s.unread)
	var ofNodes []Finding
	for i := range s.nodes {
		node := &s.nodes[i]
		if why := agentless(node); why != "" {
			ofNodes = append(ofNodes, onNode(node.Name, findAgentless(why))...)
			continue
		}
		ofNodes = append(ofNodes, onNode(node.Name,
			slices.Concat(findRuntime(node), findPlatform(node), findNetwork(s.network(node)), s.findMultus(node)))...)
	}
	return slices.Concat(all, ofNodes, s.summary())
}

// helmInstall is how the chart is installed with its defaults.
const helmInstall = "helm install stayput deploy/chart --namespace stayput-system --create-namespace"

// install returns the command that installs what works in the cluster.
func (s *surroundings) install() string {
	command := helmInstall
	set := func(value string) { command += " --set " + value }
	kept := s.kept()
	if len(kept[poolsOnly]) > 0 {
		set("pools.enabled=true,pools.calico=true")
	}
	if len(kept[keeps])+len(kept[unsure]) == 0 {
		set("agent.enabled=false")
	} else if platform := s.platform(); platform != "" {
		set("platform=" + platform)
	}
	if s.gatePolicy == "" && s.apartOnEKS() {
		set("controller.hostNetwork=true")
	}
	if s.onOpenShift() {
		set("controller.runAsUser=null")
	}
	return command
}

// kept returns the nodes with agents by whether pods can keep their addresses there.
func (s *surroundings) kept() map[verdict][]string {
	kept := map[verdict][]string{}
	for i := range s.nodes {
		if node := &s.nodes[i]; agentless(node) == "" {
			v := s.network(node).verdict
			kept[v] = append(kept[v], node.Name)
		}
	}
	return kept
}

// platform returns that of all nodes with agents, empty if they do not have the same one.
func (s *surroundings) platform() string {
	var all []string
	for i := range s.nodes {
		if agentless(&s.nodes[i]) == "" {
			all = append(all, platformOf(&s.nodes[i]))
		}
	}
	slices.Sort(all)
	if all = slices.Compact(all); len(all) != 1 {
		return ""
	}
	return all[0]
}

// onOpenShift reports whether these are nodes of OpenShift.
func (s *surroundings) onOpenShift() bool {
	return slices.ContainsFunc(s.nodes, func(n corev1.Node) bool { return n.Labels["node.openshift.io/os_id"] != "" })
}

func (s *surroundings) findOpenShift() []Finding {
	if !s.onOpenShift() {
		return nil
	}
	return finding("OpenShift", LevelOK, "its SCC restricted-v2 gives the controllers their user",
		"set controller.runAsUser: null in the Helm chart")
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
	const check = "gate"
	if s.gatePolicy == "" && s.apartOnEKS() {
		return finding(check, LevelWarn, "by a webhook of the controllers, since the API server has no "+
			"MutatingAdmissionPolicies (from Kubernetes 1.36 on), and the API server of EKS cannot reach pods of "+
			"CNI plugins other than AWS's",
			"set controller.hostNetwork in the Helm chart")
	}
	if s.gatePolicy == "" {
		return finding(check, LevelOK, "by a webhook of the controllers, since the API server has no "+
			"MutatingAdmissionPolicies (from Kubernetes 1.36 on): it must be able to reach these pods, and while no "+
			"controller responds pods start ungated", "")
	}
	text := "by MutatingAdmissionPolicy " + s.gatePolicy
	if s.gatePolicy != home.PolicyVersions[0] {
		text += ", which the API server serves: it applies them only if its feature gate MutatingAdmissionPolicy is on. " +
			"If it is not, set gate.mechanism to Webhook"
	}
	return finding(check, LevelOK, text, "")
}

// apartOnEKS reports whether these are nodes of EKS whose pods have addresses that its control plane does not know.
func (s *surroundings) apartOnEKS() bool {
	return slices.ContainsFunc(s.nodes, func(n corev1.Node) bool {
		return strings.Contains(n.Status.NodeInfo.KubeletVersion, "-eks-") && !slices.Contains(s.networks[n.Name], "aws-node")
	})
}

func (s *surroundings) findKruise() []Finding {
	if !s.kruise {
		return nil
	}
	return finding("OpenKruise", LevelOK, "it is running and continues to serve PersistentPodStates itself: "+
		"without Helm, leave out deploy/persistentpodstates.yaml", "")
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
	switch {
	case strings.Contains(is.KubeletVersion, "+k3s"):
		return "k3s"
	case strings.Contains(is.KubeletVersion, "+rke2"):
		return "rke2"
	case strings.Contains(is.KubeletVersion, "+k0s"):
		return "k0s"
	case strings.Contains(is.KubeletVersion, "-gke."):
		return "gke"
	case strings.HasPrefix(node.Spec.ProviderID, "kind://"):
		return "kind"
	case node.Labels["microk8s.io/cluster"] == "true":
		return "microk8s"
	case strings.HasPrefix(is.OSImage, "Talos "):
		return "talos"
	case strings.HasPrefix(is.ContainerRuntimeVersion, "cri-o://"):
		return "crio"
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

func findNetwork(n network) []Finding {
	const check = "network"
	switch n.verdict {
	case keeps:
		return finding(check, LevelOK, n.name+" allocates addresses with host-local: pods can keep their addresses", "")
	case poolsOnly:
		return finding(check, LevelOK, n.name+": pods can keep their addresses: a pool of mode Calico",
			"create a PodIPPool of mode Calico; see docs/calico.md")
	case never:
		return finding(check, LevelWarn, n.name+" "+n.why+": pods cannot keep their addresses", "see docs/networks.md")
	}
	return finding(check, LevelWarn, n.name+" "+n.why, "see docs/networks.md")
}

// findMultus says what multus needs: it has a copy of the network's configuration, made when its pod started.
func (s *surroundings) findMultus(node *corev1.Node) []Finding {
	if !slices.ContainsFunc(s.networks[node.Name], func(name string) bool { return slices.Contains(multus, name) }) {
		return nil
	}
	return finding("multus", LevelOK, "Multus delegates to that network",
		"once Stayput is installed, restart the Multus pod on each node; see docs/networks.md")
}

// summary says what pods would keep.
func (s *surroundings) summary() []Finding {
	f := findings{check: "summary"}
	kept := s.kept()
	with := len(kept[keeps]) + len(kept[never]) + len(kept[unsure]) + len(kept[poolsOnly])
	all := count(with, "node", "nodes")
	f.add(LevelOK, "pods keep their nodes on any network", "")
	const without = "install with agent.enabled=false, for which nothing runs on the nodes"
	switch {
	case len(s.nodes) == 0:
		f.warn("the cluster has no nodes", "")
	case with == 0:
		f.warn("pods keep their addresses on no node: an agent can run on none", without)
	case len(kept[poolsOnly]) == with:
		f.add(LevelOK, "pods of pools of mode Calico keep their addresses on "+all, "")
	case len(kept[keeps])+len(kept[poolsOnly]) == with:
		f.add(LevelOK, "pods keep their addresses on "+all, "")
	case len(kept[never]) == with:
		f.warn("pods keep their addresses on none of "+all, without)
	default:
		f.warn(fmt.Sprintf("pods keep their addresses on %d of %s; uncertain on %d",
			len(kept[keeps])+len(kept[poolsOnly]), all, len(kept[unsure])), "")
	}
	return f.all
}

// writePreflight prints the findings: equal ones of several nodes once.
func (r *Report) writePreflight(w io.Writer, most int) error {
	var merged []Finding
	nodes := map[Finding][]string{} // of those that differ in the node alone
	for _, f := range r.Findings {
		key := f
		key.Node = ""
		if f.Node == "" || nodes[key] == nil {
			merged = append(merged, f)
		}
		if f.Node != "" {
			nodes[key] = append(nodes[key], f.Node)
		}
	}
	for i, f := range merged {
		if f.Node != "" {
			f.Node = ""
			merged[i].Node = strings.Join(firstOf(nodes[f], 5), ", ")
		}
	}
	short := *r
	short.Findings = merged
	if err := short.write(w, true, most); err != nil || r.Install == "" {
		return err
	}
	_, err := fmt.Fprintf(w, "\nTo install what works here, with a few more values if findings above say so:\n\n  %s\n",
		r.Install)
	return err
}
