package cli

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// machines returns so many nodes with what the API server tells of them.
func machines(n int, kubelet, runtime string, annotations map[string]string) (nodes []corev1.Node) {
	for i := range n {
		nodes = append(nodes, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i+1), Annotations: annotations},
			Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{
				OperatingSystem: "linux", KubeletVersion: kubelet, ContainerRuntimeVersion: runtime,
			}},
		})
	}
	return nodes
}

func TestPreflightTellsWhatWouldWorkInAClusterWithoutStayput(t *testing.T) {
	byFlannel := map[string]string{"flannel.alpha.coreos.com/backend-type": "vxlan"}
	eks := machines(3, "v1.33.5-eks-113cf36", "containerd://1.7.27", nil)
	kubeadm := machines(3, "v1.36.3", "containerd://2.4.2", byFlannel)
	k3s := machines(2, "v1.35.8+k3s1", "containerd://2.1.4-k3s2", byFlannel)
	gke := machines(2, "v1.34.1-gke.2037000", "containerd://2.0.6", nil)
	crio := machines(1, "v1.36.3", "cri-o://1.36.3", nil)
	docker := machines(1, "v1.36.3", "docker://28.0.1", nil)
	microk8s := machines(1, "v1.34.1", "containerd://1.7.28", nil)
	microk8s[0].Labels = map[string]string{"microk8s.io/cluster": "true"}
	talos := machines(1, "v1.34.1", "containerd://2.1.4", byFlannel)
	talos[0].Status.NodeInfo.OSImage = "Talos (v1.11.3)"
	mixed := append(machines(1, "v1.36.3", "containerd://2.4.2", byFlannel),
		corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "windows", Labels: map[string]string{
			corev1.LabelOSStable: "windows"}}},
		corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "fargate", Labels: map[string]string{
			"eks.amazonaws.com/compute-type": "fargate"}}},
		corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "virtual", Labels: map[string]string{"type": "virtual-kubelet"}}},
	)
	openshift := machines(2, "v1.34.1", "cri-o://1.34.0", nil)
	for i := range openshift {
		openshift[i].Labels = map[string]string{"node.openshift.io/os_id": "rhel"}
	}
	for name, c := range map[string]struct {
		in surroundings
		// says has lines of the text, each from its start; failures is how many of them make the exit code 1.
		says     []string
		failures int
	}{
		"EKS": {
			surroundings{version: "v1.33.5-eks-3025e55", nodes: eks, daemonSets: []string{"calico-node", "aws-node"},
				calicoIPAM: "calico-ipam"},
			[]string{
				"OK    Kubernetes: v1.33.5-eks-3025e55",
				"OK    gate: by a webhook of the controllers",
				"WARN  node-1, node-2, node-3: runtime: containerd 1.7.27 has NRI disabled",
				"WARN  network: the AWS VPC CNI allocates addresses itself: pods keep their nodes, but not their addresses",
				"      -> install with agent.enabled=false",
				"  " + helmInstall + " --set agent.enabled=false",
			}, 0},
		"kubeadm with flannel": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm, daemonSets: []string{"kube-flannel-ds"}},
			[]string{
				"OK    gate: by MutatingAdmissionPolicy v1",
				"OK    node-1, node-2, node-3: runtime: containerd 2.4.2",
				"OK    network: flannel allocates addresses with host-local",
				"  " + helmInstall,
			}, 0},
		"k3s": {
			surroundings{version: "v1.35.8+k3s1", nodes: k3s},
			[]string{
				"OK    gate: by a webhook", "OK    node-1, node-2: runtime: containerd 2.1.4-k3s2",
				"OK    node-1, node-2: platform: k3s uses", "      -> set platform: k3s", "OK    network: flannel",
				"  " + helmInstall + " --set platform=k3s",
			}, 0},
		"GKE with Calico's policies": {
			surroundings{version: "v1.34.1-gke.2037000", nodes: gke, daemonSets: []string{"calico-node"}},
			[]string{"OK    network: Calico with host-local", "      -> set platform: gke"}, 0},
		"Calico": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm[:1], daemonSets: []string{"calico-node"},
				calicoIPAM: "calico-ipam"},
			[]string{"OK    network: Calico's own IPAM: pods can keep their addresses: a pool of mode Calico",
				"  " + helmInstall + " --set pools.enabled=true,pools.calico=true --set agent.enabled=false"}, 0},
		"Calico with strictAffinity": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm[:1], daemonSets: []string{"calico-node"},
				calicoIPAM: "calico-ipam", calicoLacks: "has strictAffinity"},
			[]string{"WARN  network: Calico's own IPAM has strictAffinity: pods keep their nodes, but not",
				"  " + helmInstall + " --set agent.enabled=false"}, 0},
		"Calico, its IPAM unknown": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm[:1], daemonSets: []string{"calico-node"}},
			[]string{"WARN  network: Calico is installed, but its IPAM plugin is unknown", "  " + helmInstall}, 0},
		"Cilium": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: crio, daemonSets: []string{"cilium"},
				ciliumIPAM: "cluster-pool"},
			[]string{"WARN  network: Cilium allocates addresses itself (ipam: cluster-pool)",
				"WARN  node-1: runtime: CRI-O 1.36.3", "      -> set platform: crio",
				"  " + helmInstall + " --set agent.enabled=false"}, 0},
		"Cilium with a plugin for addresses": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: crio, daemonSets: []string{"cilium"},
				ciliumIPAM: "delegated-plugin"},
			[]string{"WARN  network: Cilium delegates to the IPAM plugin"}, 0},
		"Cilium chained to flannel": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm[:1],
				daemonSets: []string{"cilium", "kube-flannel-ds"}, ciliumChain: "generic-veth"},
			[]string{"OK    network: flannel"}, 0},
		"a network of one's own": {
			surroundings{version: "v1.37.1", gatePolicy: "v1", nodes: docker},
			[]string{`WARN  node-1: runtime: "docker://28.0.1": Stayput was never tested`,
				"WARN  network: the CNI plugin cannot be identified by a DaemonSet"}, 0},
		"EKS with Cilium": {
			surroundings{version: "v1.33.5-eks-3025e55", nodes: eks, daemonSets: []string{"cilium"}},
			[]string{"WARN  gate: by a webhook of the controllers, since", "      -> set controller.hostNetwork",
				"  " + helmInstall + " --set agent.enabled=false --set controller.hostNetwork=true"}, 0},
		"EKS with Cilium and policies": {
			surroundings{version: "v1.36.1-eks-3025e55", gatePolicy: "v1", nodes: eks, daemonSets: []string{"cilium"}},
			[]string{"OK    gate: by MutatingAdmissionPolicy v1", "  " + helmInstall + " --set agent.enabled=false"}, 0},
		"multus": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm,
				daemonSets: []string{"kube-multus-ds", "kube-flannel-ds"}},
			[]string{
				"OK    network: flannel",
				"OK    multus: Multus delegates to that network",
				"      -> once Stayput is installed, restart the Multus pod",
			}, 0},
		"MicroK8s": {
			surroundings{version: "v1.34.1", nodes: microk8s, daemonSets: []string{"calico-node"}},
			[]string{"OK    node-1: platform: microk8s uses", "      -> set platform: microk8s"}, 0},
		"Talos": {
			surroundings{version: "v1.34.1", nodes: talos},
			[]string{
				"OK    node-1: platform: talos uses",
				"      -> set platform: talos in the Helm chart, and first label the namespace " +
					"pod-security.kubernetes.io/enforce=privileged",
				"OK    network: flannel",
				"  " + helmInstall + " --set platform=talos",
			}, 0},
		"Windows, Fargate and virtual kubelets beside Linux": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: mixed},
			[]string{
				"OK    windows: agent: none is wanted here, on Windows: pods on this node keep no addresses",
				"OK    fargate: agent: none is wanted here, on Fargate: ",
				"OK    virtual: agent: none is wanted here, on a virtual kubelet: ",
				"OK    network: flannel allocates addresses with host-local",
				"  " + helmInstall,
			}, 0},
		"only Fargate": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: mixed[2:3]},
			[]string{"WARN  network: pods keep their nodes, but not their addresses: an agent can run on no node",
				"  " + helmInstall + " --set agent.enabled=false"}, 0},
		"two platforms": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: slices.Concat(k3s, talos)},
			[]string{"      -> set platform: k3s", "      -> set platform: talos", "  " + helmInstall}, 0},
		"OpenShift": {
			surroundings{version: "v1.34.1", nodes: openshift, daemonSets: []string{"ovnkube-node"}},
			[]string{
				"OK    OpenShift: its SCC restricted-v2 gives the controllers their user",
				"      -> set controller.runAsUser: null",
				"  " + helmInstall + " --set agent.enabled=false --set controller.runAsUser=null",
			}, 0},
		"OpenKruise": {
			surroundings{version: "v1.36.3", gatePolicy: "v1", nodes: kubeadm, kruise: true},
			[]string{"OK    OpenKruise: it is running"}, 0},
		"policies of an older version": {
			surroundings{version: "v1.35.8", gatePolicy: "v1beta1", nodes: kubeadm},
			[]string{"OK    gate: by MutatingAdmissionPolicy v1beta1, which the API server serves: it applies them only if"}, 0},
		"too old": {
			surroundings{version: "v1.30.14", nodes: kubeadm},
			[]string{"FAIL  Kubernetes: v1.30.14: the CustomResourceDefinitions require at least 1.31"}, 1},
		"no nodes": {
			surroundings{version: "v1.36.3", gatePolicy: "v1"},
			[]string{"WARN  network: the cluster has no nodes"}, 0},
	} {
		r := &Report{}
		r.add(c.in.findings()...)
		r.Install = c.in.install()
		var out bytes.Buffer
		if err := r.writePreflight(&out, 1000); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(out.String(), "\n")
		for _, line := range c.says {
			command := strings.HasPrefix(line, "  helm ")
			if !slices.ContainsFunc(lines, func(is string) bool {
				return is == line || !command && strings.HasPrefix(is, line)
			}) {
				t.Errorf("%s: no line %q in\n%s", name, line, out.String())
			}
		}
		if r.Failures != c.failures {
			t.Errorf("%s: %d failures, want %d:\n%s", name, r.Failures, c.failures, out.String())
		}
	}
}

func TestTheIPAMOfCalicoIsReadFromItsTemplate(t *testing.T) {
	for template, want := range map[string]string{
		`{"plugins":[{"type":"calico","mtu":__CNI_MTU__,"ipam":{"type":"calico-ipam"}}]}`:                 "calico-ipam",
		"{\"type\": \"calico\", \"ipam\": {\n  \"type\": \"host-local\",\n \"subnet\": \"usePodCidr\"\n}": "host-local",
		`{"type": "calico", "ipam": {"subnet": "usePodCidr", "type": "host-local"}}`:                      "host-local",
		`{"type": "flannel"}`: "",
	} {
		got := ""
		if found := calicoIPAM.FindStringSubmatch(template); found != nil {
			got = found[1]
		}
		if got != want {
			t.Errorf("%s: %q, want %q", template, got, want)
		}
	}
}
