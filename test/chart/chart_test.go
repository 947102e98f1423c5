package chart

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// patience bounds a hanging test; it measures nothing.
const patience = 5 * time.Minute

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// renderings are values that together reach every branch of the templates.
var renderings = map[string]string{
	"the defaults": ``,
	"everything on": `
image: {repository: registry.example.com:5000/stayput, digest: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}
imagePullSecrets: [{name: pull}]
pools: {enabled: true, spiderpool: true, calico: true}
apiServer: {host: api.example.com, port: 443}
longestRetention: 720h
agent:
  cni: {dataDirs: [/var/lib/host-local, /run/cni]}
  runtime: {nriSocket: /run/nri/nri.sock, criSocket: /run/nri/cri.sock}
  metrics: {bindAddress: "::1", port: 19463}
  seLinuxOptions: {type: spc_t}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms: [{matchExpressions: [{key: virtual, operator: DoesNotExist}]}]
  podAnnotations: {a: b}
  podLabels: {c: d}
  extraArgs: [--log-level=debug]
  extraEnv: [{name: GOGC, value: "50"}]
controller:
  workloadKinds: [{group: example.com, version: v1beta1, kind: Game, resource: games}, {group: apps.kruise.io, version: v1alpha1, kind: CloneSet, resource: clonesets}]
  affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone, labelSelector: {matchLabels: {a: b}}}]}}
  topologySpreadConstraints: [{maxSkew: 2, topologyKey: rack, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {a: b}}}]
  podAnnotations: {a: b}
  podLabels: {c: d}
  extraArgs: [--metrics-bind-address=:18080]
  extraEnv: [{name: GOGC, value: "50"}]
monitoring:
  podMonitor: {enabled: true, labels: {release: prometheus}, interval: 1m}
  prometheusRule: {enabled: true, labels: {release: prometheus}}
  dashboard: {enabled: true, labels: {folder: network}}
networkPolicy:
  enabled: true
  metricsFrom: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
  webhookFrom: [{ipBlock: {cidr: 192.0.2.0/28, except: [192.0.2.1/32]}}]
`,
	"the webhook": `
gate: {mechanism: Webhook}
controller: {hostNetwork: true, ports: {metrics: 18080, health: 18081, gate: 19443}}
`,
	"everything off": `
gate: {mechanism: Template}
agent:
  cni: {install: false}
  runtime: {nriSocket: ""}
  updateStrategy: {type: OnDelete}
  nodeSelector: null
  tolerations: []
  priorityClassName: ""
controller:
  replicas: 1
  updateStrategy: {type: Recreate}
  topologySpreadConstraints: []
  tolerations: []
  nodeSelector: null
  priorityClassName: ""
  podDisruptionBudget: {enabled: false}
crds: {install: false}
rbac: {userRoles: false}
uninstall: {job: false}
`,
}

// A platform decides about what is not set.
func TestTheAgentLooksWhereThePlatformHasIt(t *testing.T) {
	t.Parallel()
	type node struct{ cri, conf, bin, data string }
	usual := node{cri: "/run/containerd/containerd.sock", conf: "/etc/cni/net.d", bin: "/opt/cni/bin"}
	with := func(change func(*node)) node {
		n := usual
		change(&n)
		return n
	}
	for values, want := range map[string]node{
		"":                usual,
		"platform: talos": usual,
		"platform: k3s": {cri: "/run/k3s/containerd/containerd.sock", conf: "/var/lib/rancher/k3s/agent/etc/cni/net.d",
			bin: "/var/lib/rancher/k3s/data/cni"},
		"platform: rke2": with(func(n *node) { n.cri = "/run/k3s/containerd/containerd.sock" }),
		"platform: k0s":  with(func(n *node) { n.cri = "/run/k0s/containerd.sock" }),
		"platform: microk8s": {cri: "/var/snap/microk8s/common/run/containerd.sock",
			conf: "/var/snap/microk8s/current/args/cni-network", bin: "/var/snap/microk8s/current/opt/cni/bin"},
		"platform: gke":  with(func(n *node) { n.bin = "/home/kubernetes/bin" }),
		"platform: kind": with(func(n *node) { n.data = "/run/cni-ipam-state" }),
		"platform: crio": with(func(n *node) { n.cri = "/var/run/crio/crio.sock" }),
		"{platform: crio, agent: {cni: {binDir: /usr/libexec/cni, dataDirs: [/x]}, runtime: {criSocket: /run/cri.sock}}}": {
			cri: "/run/cri.sock", conf: usual.conf, bin: "/usr/libexec/cni", data: "/x"},
	} {
		agent := podSpecs(t, objects(t, Namespace, values))["stayput-agent"]
		for _, flag := range []string{"--cri-socket=" + want.cri, "--cni-conf-dir=" + want.conf, "--cni-bin-dir=" + want.bin} {
			if !slices.Contains(agent.Containers[0].Args, flag) {
				t.Errorf("%s: no %s in %v", values, flag, agent.Containers[0].Args)
			}
		}
		mounted := func(path string) bool {
			return slices.ContainsFunc(agent.Containers[0].VolumeMounts,
				func(m corev1.VolumeMount) bool { return m.MountPath == path })
		}
		for _, path := range []string{filepath.Dir(want.cri), want.conf, want.bin, want.data} {
			if path != "" && !mounted(path) {
				t.Errorf("%s: %s is not mounted", values, path)
			}
		}
		if want.data == "" && slices.ContainsFunc(agent.Volumes,
			func(v corev1.Volume) bool { return strings.HasPrefix(v.Name, "cni-data") }) {
			t.Errorf("%s: a data directory is mounted", values)
		}
	}
}

// An agent that was told of another platform names this one's.
// GKE admits such pods elsewhere only where a quota has them in its scope.
func TestOnGKEAQuotaAdmitsPodsOfTheCriticalPriorityClasses(t *testing.T) {
	for values, want := range map[string]bool{"": false, "platform: k3s": false, "platform: gke": true} {
		for namespace, elsewhere := range map[string]bool{Namespace: true, "kube-system": false} {
			all := objects(t, namespace, values)
			var quota corev1.ResourceQuota
			for _, d := range all {
				if d.Kind == "ResourceQuota" {
					must.Do(t, yaml.UnmarshalStrict([]byte(d.Text), &quota))
				}
			}
			if (quota.Name != "") != (want && elsewhere) {
				t.Errorf("%q in %s: the quota is %q", values, namespace, quota.Name)
			}
			if quota.Name == "" {
				continue
			}
			scope := quota.Spec.ScopeSelector.MatchExpressions[0]
			for name, pod := range podSpecs(t, all) {
				if scope.ScopeName != corev1.ResourceQuotaScopePriorityClass || !slices.Contains(scope.Values,
					pod.PriorityClassName) {
					t.Errorf("%s has the priority class %s, the quota %+v", name, pod.PriorityClassName, scope)
				}
			}
		}
	}
}

func TestTheAgentKnowsThePlacesOfEveryPlatform(t *testing.T) {
	data, err := os.ReadFile("../../deploy/chart/files/platforms.yaml")
	must.Do(t, err)
	var platforms map[string]struct{ CRISocket, ConfDir, BinDir string }
	must.Do(t, yaml.Unmarshal(data, &platforms))
	for name, p := range platforms {
		for path, known := range map[string][]string{
			p.CRISocket: cri.KnownSockets, p.ConfDir: cniconf.KnownConfDirs, p.BinDir: cniconf.KnownBinDirs,
		} {
			if path != "" && !slices.Contains(known, path) {
				t.Errorf("%s: %s is not known", name, path)
			}
		}
	}
	if len(platforms) != 9 || platforms["k3s"].CRISocket == "" {
		t.Errorf("read %v", platforms)
	}
}

// OpenShift's restricted-v2 gives pods a user of its own, and refuses one that asks for another.
func TestTheControllersUserIsSetOrLeftToTheCluster(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]*int64{
		"":                                    ptr.To[int64](65532),
		"controller: {runAsUser: 1000650000}": ptr.To[int64](1000650000),
		"controller: {runAsUser: null}":       nil,
	} {
		for workload, pod := range podSpecs(t, objects(t, Namespace, values)) {
			is := pod.SecurityContext
			if workload != "stayput-agent" && (!ptr.Equal(is.RunAsUser, want) || !ptr.Equal(is.RunAsGroup, want)) {
				t.Errorf("%q: %s runs as user %v and group %v", values, workload, is.RunAsUser, is.RunAsGroup)
			}
		}
	}
}

// No container runtime of a node's own is there, or none that an agent could reach.
func TestNoAgentIsWantedWhereNoneCanRun(t *testing.T) {
	t.Parallel()
	agent := podSpecs(t, objects(t, Namespace, ""))["stayput-agent"]
	for name, labels := range map[string]map[string]string{
		"Fargate":           {"kubernetes.io/os": "linux", "eks.amazonaws.com/compute-type": "fargate"},
		"a virtual kubelet": {"kubernetes.io/os": "linux", "type": "virtual-kubelet"},
		"Windows":           {"kubernetes.io/os": "windows"},
		"":                  {"kubernetes.io/os": "linux", "type": "large", "eks.amazonaws.com/compute-type": "ec2"},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
		wanted, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: agent}).Match(node)
		if must.Do(t, err); wanted != (name == "") {
			t.Errorf("%s: an agent is wanted: %v", name, wanted)
		}
	}
}

// Each platform's block of docs/recipes.md is rendered as it stands there.
func TestTheRecipesInstallWhatTheyTell(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../docs/recipes.md")
	must.Do(t, err)
	recipes := map[string]string{}
	for section := range strings.SplitSeq(string(data), "\n## ") {
		platform, text, _ := strings.Cut(section, "\n")
		if _, block, ok := strings.Cut(text, "\n```\n"); ok {
			recipes[platform], _, _ = strings.Cut(block, "\n```")
		}
	}
	const (
		containerd = "--cri-socket=/run/containerd/containerd.sock"
		k3s        = "--cri-socket=/run/k3s/containerd/containerd.sock"
	)
	for platform, want := range map[string]struct {
		agent []string // flags, none if there is no agent
		user  *int64
	}{
		"k3s":       {[]string{k3s, "--cni-bin-dir=/var/lib/rancher/k3s/data/cni"}, ptr.To[int64](65532)},
		"RKE2":      {[]string{k3s, "--cni-conf-dir=/etc/cni/net.d"}, ptr.To[int64](65532)},
		"Talos":     {[]string{containerd, "--nri-socket="}, ptr.To[int64](65532)},
		"OpenShift": {nil, nil},
		"EKS":       {nil, ptr.To[int64](65532)},
	} {
		_, command, ok := strings.Cut(strings.ReplaceAll(recipes[platform], "\\\n", " "), helmInstall)
		delete(recipes, platform)
		if !ok {
			t.Errorf("%s: no %q", platform, helmInstall)
			continue
		}
		args := slices.DeleteFunc(strings.Fields(command), func(arg string) bool { return arg == "--create-namespace" })
		pods := podSpecs(t, objects(t, Namespace, "", args...))
		if is := pods["stayput-controller"].SecurityContext.RunAsUser; !ptr.Equal(is, want.user) {
			t.Errorf("%s: the controllers run as %v", platform, is)
		}
		agent, there := pods["stayput-agent"]
		if there != (want.agent != nil) {
			t.Errorf("%s: there are agents: %v", platform, there)
		}
		for _, flag := range want.agent {
			if there && !slices.Contains(agent.Containers[0].Args, flag) {
				t.Errorf("%s: no %s in %q", platform, flag, agent.Containers[0].Args)
			}
		}
	}
	if len(recipes) > 0 {
		t.Errorf("not expected: %v", recipes)
	}
}

const helmInstall = "helm install stayput deploy/chart --namespace " + Namespace

// valuesFile writes a rendering's values to a file.
func valuesFile(t *testing.T, values string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	must.Do(t, os.WriteFile(file, []byte(values), 0o600))
	return file
}

func objects(t *testing.T, namespace, values string, args ...string) []Document {
	t.Helper()
	out, err := lab.Template(testContext(t), namespace, append([]string{"--values", valuesFile(t, values)}, args...)...)
	must.Do(t, err)
	all, err := Split(out)
	must.Do(t, err)
	return all
}

// texts returns the objects of the chart by kind and name.
func texts(t *testing.T, values string, args ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, d := range objects(t, Namespace, values, args...) {
		all[d.Kind+" "+d.Name] = d.Text
	}
	return all
}

func TestManifestsMatchTheChart(t *testing.T) {
	files, err := Files(testContext(t))
	must.Do(t, err)
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join("..", "..", "deploy", name))
		must.Do(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("deploy/%s differs from the chart: run make manifests", name)
		}
	}
}

// Between two tags as well: a locally built image must have the name in the manifests.
func TestMakeImageBuildsTheImageOfTheManifests(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "deploy", "chart", "Chart.yaml"))
	must.Do(t, err)
	var about struct{ Version, AppVersion string }
	must.Do(t, yaml.Unmarshal(data, &about))
	if about.AppVersion != "v"+about.Version {
		t.Errorf("chart version %s has appVersion %s", about.Version, about.AppVersion)
	}
	images := map[string]bool{}
	for _, pod := range podSpecs(t, objects(t, Namespace, "")) {
		images[pod.Containers[0].Image] = true
	}
	want := lab.ProductImage + ":" + about.AppVersion
	if !maps.Equal(images, map[string]bool{want: true}) {
		t.Errorf("the manifests name %v, want %s", images, want)
	}
	for _, version := range []string{"", "v9.9.9-1-g0123456"} {
		make := exec.CommandContext(testContext(t), "make", "--no-print-directory", "-n", "image", "VERSION="+version)
		make.Dir, make.Env = filepath.Join("..", ".."), append(os.Environ(), "MAKEFLAGS=", "MAKEOVERRIDES=")
		out, err := make.CombinedOutput()
		must.Do(t, err)
		if !strings.HasSuffix(strings.TrimSpace(string(out)), " -archive "+want+" bin") {
			t.Errorf("with version %q, make image runs:\n%s", version, out)
		}
	}
}

// kindsAndNames returns the objects of a manifest, in its order.
func kindsAndNames(t *testing.T, manifest []byte) (all []string) {
	t.Helper()
	for doc := range strings.SplitSeq(string(manifest), "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
		}
		must.Do(t, yaml.Unmarshal([]byte(doc), &o))
		if o.Kind != "" {
			all = append(all, o.Kind+" "+o.Metadata.Name)
		}
	}
	return all
}

// Deleting the manifests in order ends the gating first: no pod may be gated once the controllers are gone.
func TestManifestsCanBeDeletedInOrder(t *testing.T) {
	all, err := installation(testContext(t))
	must.Do(t, err)
	order := kindsAndNames(t, all)
	first := []string{"ClusterRole stayput-gate", "ClusterRoleBinding stayput-gate"}
	if !slices.Equal(order[:len(first)], first) {
		t.Errorf("begins with %q", order[:len(first)])
	}
	files, err := Files(testContext(t))
	must.Do(t, err)
	for file, want := range map[string][]string{
		"gate-policies.yaml": {
			"MutatingAdmissionPolicyBinding stayput-gate-annotated", "MutatingAdmissionPolicyBinding stayput-gate-recorded",
			"MutatingAdmissionPolicyBinding stayput-gate-defaults", "MutatingAdmissionPolicyBinding stayput-default-retention",
			"MutatingAdmissionPolicyBinding stayput-restored",
			"MutatingAdmissionPolicy stayput-gate-annotated", "MutatingAdmissionPolicy stayput-gate-recorded",
			"MutatingAdmissionPolicy stayput-gate-defaults", "MutatingAdmissionPolicy stayput-default-retention",
			"MutatingAdmissionPolicy stayput-restored",
		},
		"gate-webhook.yaml": {
			"MutatingWebhookConfiguration stayput-gate", "Secret stayput-gate",
			"ClusterRole stayput-controller-gate", "ClusterRoleBinding stayput-controller-gate",
			"Role stayput-controller-gate", "RoleBinding stayput-controller-gate", "Service stayput-gate",
		},
		"pools-gate-policies.yaml": {
			"MutatingAdmissionPolicyBinding stayput-gate-pools", "MutatingAdmissionPolicyBinding stayput-default-pools",
			"MutatingAdmissionPolicy stayput-gate-pools", "MutatingAdmissionPolicy stayput-default-pools",
		},
	} {
		if is := kindsAndNames(t, files[file]); !slices.Equal(is, want) {
			t.Errorf("%s has %q, want %q", file, is, want)
		}
	}
	namespace := slices.Index(order, "Namespace stayput-system")
	if namespace < 0 {
		t.Fatalf("there is no namespace: %q", order)
	}
	for _, o := range order[namespace:] {
		if strings.Contains(o, "AdmissionPolicy") {
			t.Errorf("%s comes after the namespace, whose deletion begins to remove accounts and rights", o)
		}
	}
	for _, o := range []string{"CustomResourceDefinition", "Job"} {
		if slices.ContainsFunc(order, func(s string) bool { return strings.HasPrefix(s, o+" ") }) {
			t.Errorf("%s is among %q", o, order)
		}
	}
}

// Pods obey stayput.io/addresses on nodes whose agent remembers pools: without its guard no installation may be.
func TestEveryInstallationGuardsTheAddressesOfPods(t *testing.T) {
	for name, values := range renderings {
		for _, set := range []string{"pools.enabled=false", "pools.enabled=true", "agent.enabled=false,pools.enabled=false"} {
			all := texts(t, values, "--set="+set)
			policy, binding := all["ValidatingAdmissionPolicy stayput-addresses"],
				all["ValidatingAdmissionPolicyBinding stayput-addresses"]
			if !strings.Contains(policy, "only Stayput's controller may write the annotation stayput.io/addresses") ||
				!strings.Contains(binding, "validationActions: [Deny]") {
				t.Errorf("%s with %s: the policy is %q, its binding %q", name, set, policy, binding)
			}
		}
	}
	install, err := os.ReadFile("../../deploy/install.yaml")
	must.Do(t, err)
	if strings.Count(string(install), "\n  name: stayput-addresses\n") != 2 {
		t.Error("install.yaml has no policy stayput-addresses, or no binding")
	}
}

// What pools take can be applied and deleted beside the rest, in the order of the file.
func TestPoolsAddWhatTheyTakeAndChangeNothingElse(t *testing.T) {
	want := []string{
		"ClusterRole stayput-agent-pools", "ClusterRole stayput-controller-pools", "ClusterRole stayput-pools-view",
		"ClusterRoleBinding stayput-agent-pools", "ClusterRoleBinding stayput-controller-pools",
		"CustomResourceDefinition podipaudits.stayput.io", "CustomResourceDefinition podippools.stayput.io",
		"CustomResourceDefinition podipreports.stayput.io", "CustomResourceDefinition podips.stayput.io",
		"MutatingAdmissionPolicy stayput-default-pools", "MutatingAdmissionPolicy stayput-gate-pools",
		"MutatingAdmissionPolicyBinding stayput-default-pools", "MutatingAdmissionPolicyBinding stayput-gate-pools",
		"Role stayput-controller-pools", "RoleBinding stayput-controller-pools",
		"ValidatingAdmissionPolicy stayput-agent-pools", "ValidatingAdmissionPolicyBinding stayput-agent-pools",
	}
	isDefinition := func(name string) bool { return strings.HasPrefix(name, "CustomResourceDefinition") }
	for name, values := range renderings {
		// A later value wins.
		without, with := texts(t, values, "--set=pools.enabled=false"),
			texts(t, values, "--set=pools.enabled=true,pools.spiderpool=false,pools.calico=false")
		for object, text := range without {
			if with[object] != text {
				t.Errorf("%s: %s is another one with pools", name, object)
			}
			if strings.Contains(object, "pool") || strings.Contains(object, "podip") {
				t.Errorf("%s: %s is there without pools", name, object)
			}
			delete(with, object)
		}
		expect := want
		if name == "everything off" { // neither definitions nor roles for people
			expect = slices.DeleteFunc(slices.Clone(want), func(object string) bool {
				return isDefinition(object) || object == "ClusterRole stayput-pools-view"
			})
		}
		if name == "everything off" || name == "the webhook" { // no policies gate there
			expect = slices.DeleteFunc(slices.Clone(expect), func(object string) bool {
				return strings.HasPrefix(object, "Mutating")
			})
		}
		if added := slices.Sorted(maps.Keys(with)); !slices.Equal(added, expect) {
			t.Errorf("%s: pools add %q, want %q", name, added, expect)
		}
	}

	// So can what Spiderpool's words take, beside that.
	theirs := []string{"ClusterRole stayput-controller-pools-spiderpool",
		"ClusterRoleBinding stayput-controller-pools-spiderpool", "CustomResourceDefinition " + spiderIPPools}
	for name, values := range renderings {
		without, with := texts(t, values, "--set=pools.enabled=true,pools.spiderpool=false"),
			texts(t, values, "--set=pools.enabled=true,pools.spiderpool=true")
		for object, text := range without {
			if with[object] != text {
				t.Errorf("%s: %s is another one with Spiderpool's words", name, object)
			}
			delete(with, object)
		}
		expect := theirs
		if name == "everything off" {
			expect = slices.DeleteFunc(slices.Clone(theirs), isDefinition)
		}
		if added := slices.Sorted(maps.Keys(with)); !slices.Equal(added, expect) {
			t.Errorf("%s: Spiderpool's words add %q, want %q", name, added, expect)
		}
	}
	for object := range texts(t, "", "--set=pools.spiderpool=true") {
		if strings.Contains(object, "spiderpool") {
			t.Errorf("without pools: %s", object)
		}
	}
	for object := range texts(t, "", "--set=pools.enabled=true,pools.spiderpool=true",
		"--api-versions=spiderpool.spidernet.io/v2beta1/SpiderEndpoint") {
		if object == theirs[2] {
			t.Errorf("Spiderpool has brought it, and there is %s", object)
		}
	}

	files, err := Files(testContext(t))
	must.Do(t, err)
	order := kindsAndNames(t, files["pools.yaml"])
	inFile := slices.DeleteFunc(slices.Clone(want), func(object string) bool {
		return isDefinition(object) || strings.HasPrefix(object, "Mutating")
	})
	if slices.Sort(order); !slices.Equal(order, inFile) {
		t.Errorf("pools.yaml has %q, want %q", order, inFile)
	}
}

// Without agents pods keep their nodes alone.
func TestWithoutAgentsNothingOfThemIsInstalled(t *testing.T) {
	const none = `agent: {enabled: false}`
	with, without := texts(t, ""), texts(t, none)
	changed := map[string]string{}
	for object, text := range without {
		switch was, there := with[object]; {
		case !there:
			t.Errorf("%s is only there without agents", object)
		case was != text:
			changed[object] = text
		}
		delete(with, object)
	}
	want := []string{
		"ClusterRole stayput-agent", "ClusterRoleBinding stayput-agent", "DaemonSet stayput-agent",
		"MutatingAdmissionPolicy stayput-default-retention", "MutatingAdmissionPolicy stayput-gate-annotated",
		"MutatingAdmissionPolicy stayput-gate-defaults",
		"MutatingAdmissionPolicyBinding stayput-default-retention", "MutatingAdmissionPolicyBinding stayput-gate-annotated",
		"MutatingAdmissionPolicyBinding stayput-gate-defaults",
		"ServiceAccount stayput-agent",
		"ValidatingAdmissionPolicy stayput-agent", "ValidatingAdmissionPolicyBinding stayput-agent",
	}
	if gone := slices.Sorted(maps.Keys(with)); !slices.Equal(gone, want) {
		t.Errorf("there are no %q, want %q", gone, want)
	}
	differ := []string{"ConfigMap stayput-installation", "RoleBinding stayput-installation",
		"ValidatingAdmissionPolicy stayput-advice"}
	if is := slices.Sorted(maps.Keys(changed)); !slices.Equal(is, differ) {
		t.Errorf("other ones are %q, want %q", is, differ)
	}
	if text := changed["RoleBinding stayput-installation"]; strings.Contains(text, "stayput-agent") {
		t.Errorf("agents have rights:\n%s", text)
	}
	for _, d := range objects(t, Namespace, none+"\nnamespace: {create: true}") {
		if d.Kind == "Namespace" && strings.Contains(d.Text, "privileged") {
			t.Errorf("the namespace allows privileged pods:\n%s", d.Text)
		}
	}
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	_, err = lab.Helm(testContext(t), "lint", "--strict", dir, "--values", valuesFile(t, none))
	must.Do(t, err)
	_, err = lab.Template(testContext(t), Namespace, "--set=agent.enabled=false,pools.enabled=true")
	refusal := "pools.enabled: pools need agents, but for those of mode Calico: " +
		"expected agent.enabled or pools.calico to be true"
	if err == nil || !strings.Contains(err.Error(), refusal) {
		t.Errorf("with pools: %v", err)
	}
	_, err = lab.Template(testContext(t), Namespace, "--set=agent.enabled=false,pools.enabled=true,pools.calico=true")
	must.Do(t, err)
}

func TestHelmLintPasses(t *testing.T) {
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	for name, values := range renderings {
		_, err := lab.Helm(testContext(t), "lint", "--strict", dir, "--values", valuesFile(t, values))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestErrorsNameTheInvalidValue(t *testing.T) {
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	for _, value := range []string{
		"agnt.logLevel=debug",
		"image.repository=Stayput",
		"image.repository=",
		"image.tag=a b",
		"image.digest=sha256:1234",
		"image.pullPolicy=Sometimes",
		"imagePullSecrets[0]=pull",
		"imagePullSecrets[0].nam=pull",
		"crds.keep=maybe",
		"crds.Install=true",
		"gate=Auto",
		"gate.mechanism=Sometimes",
		"gate.webhook.port=1",
		"gate.webhook.removeAfter=1h",
		"gate.webhook.certManager.enabled=2",
		"gate.webhook.certManager.issuerRef.nam=a",
		"controller.hostNetwork=maybe",
		"controller.ports.gate=0",
		"controller.ports.webhook=9443",
		"pools=true",
		"pools.enabled=yes please",
		"pools.mode=L2",
		"pools.spiderpool=v2beta1",
		"apiServer.port=0",
		"apiServer.port=65536",
		"rbac.userRoles=yes please",
		"agent.enabled=never",
		"agent.cni.install=1",
		"platform=kubeadm",
		"agent.cni.confDir=etc/cni/net.d",
		"agent.cni.binDir=/opt/cni/bin/",
		"agent.cni.cacheDir=",
		"agent.cni.dataDirs=/var/lib/x",
		"agent.cni.dataDirs[0]=x",
		"agent.stateDir=/",
		"agent.promisedShare=0",
		"agent.promisedShare=1.1",
		"agent.promisedShare=50%",
		"agent.promisedSharePerNamespace=0",
		"agent.promisedLimit=0",
		"agent.promisedLimit=0.5",
		"agent.promisedLimitPerNamespace=0",
		"agent.promisedLimitPerNamespace=many",
		"longestRetention=30",
		"longestRetention=30d",
		"longestRetention=0h",
		"agent.gracePeriod=10",
		"agent.gracePeriod=-10m",
		"agent.gracePeriod=0s",
		"agent.gracePeriod=",
		"agent.reconcileInterval=often",
		"agent.runtime.nriSocket=unix:///var/run/nri/nri.sock",
		"agent.runtime.criSocket=containerd.sock",
		"agent.logLevel=trace",
		"agent.logFormat=xml",
		"agent.metrics.port=metrics",
		"agent.metrics.bindAddress=localhost",
		"agent.resources.limit.cpu=1",
		"agent.tolerations=Exists",
		"agent.updateStrategy.type=Recreate",
		"agent.updateStrategy.rollingUpdate.maxUnavailable=110%",
		"agent.updateStrategy.rollingUpdate.partition=1",
		"agent.podLabels.app\\.kubernetes\\.io/component=other",
		"agent.extraArgs=--log-level=debug",
		"agent.livenessProbe.periodSeconds=1",
		"controller.replicas=0",
		"controller.replicas=two",
		"controller.runAsUser=0",
		"controller.workloadKinds[0]=Game.v1.example.com",
		"controller.workloadKinds[0].kind=game",
		"controller.logLevel=LOUD",
		"controller.updateStrategy.type=OnDelete",
		"controller.podDisruptionBudget.maxUnavailable=-1",
		"controller.podDisruptionBudget.minAvailable=1",
		"uninstall.timeout=120",
		"monitoring.podMonitor.interval=30",
		"monitoring.podMonitor.enabled=on",
		"monitoring.serviceMonitor.enabled=true",
		"namespace.name=x",
	} {
		_, err := lab.Helm(testContext(t), "template", "x", dir, "--set", value)
		if err == nil {
			t.Errorf("%s is accepted", value)
			continue
		}
		path, _, _ := strings.Cut(value, "=")
		if !names(err.Error(), path) {
			t.Errorf("%s: the error does not name it: %v", value, err)
		}
	}
}

// names reports whether helm's error is about the value at a path: it names the value, or the part of its path that is
// in the schema and the first field beyond.
func names(said, path string) bool {
	path = strings.NewReplacer(`\.`, "\x00", "[", ".", "]", "").Replace(path)
	var fields []string
	for f := range strings.SplitSeq(path, ".") {
		fields = append(fields, strings.NewReplacer("\x00", ".", "/", "~1").Replace(f))
	}
	for n := range fields {
		at := strings.Join(append([]string{""}, fields[:n]...), "/")
		if strings.Contains(said, "at '"+at+"/"+fields[n]+"'") && n == len(fields)-1 ||
			strings.Contains(said, "at '"+at+"': additional properties '"+fields[n]+"' not allowed") {
			return true
		}
	}
	return false
}

// leaves returns the paths in the schema or in the default values, down to fields without named parts.
func leaves(path string, of any, parts func(any) map[string]any) []string {
	named := parts(of)
	if len(named) == 0 {
		return []string{path}
	}
	var all []string
	for name, part := range named {
		all = append(all, leaves(path+"."+name, part, parts)...)
	}
	return all
}

func TestEveryValueHasADefaultAndIsInTheSchema(t *testing.T) {
	dir := filepath.Join("..", "..", "deploy", "chart")
	data, err := os.ReadFile(filepath.Join(dir, "values.yaml"))
	must.Do(t, err)
	var values, schema map[string]any
	must.Do(t, yaml.Unmarshal(data, &values))
	data, err = os.ReadFile(filepath.Join(dir, "values.schema.json"))
	must.Do(t, err)
	must.Do(t, json.Unmarshal(data, &schema))
	inSchema := leaves("", schema, func(s any) map[string]any {
		properties, _ := s.(map[string]any)["properties"].(map[string]any)
		return properties
	})
	open := map[string]bool{} // fields whose parts are not in the schema
	for _, path := range inSchema {
		open[path] = true
	}
	// Defaults may be deeper than the schema, such as those of resources and tolerations, or less deep.
	seen := map[string]bool{}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		m, ok := v.(map[string]any)
		if open[path] || !ok {
			seen[path] = true
			return
		}
		for name, part := range m {
			walk(path+"."+name, part)
		}
	}
	walk("", values)
	for path := range seen {
		if !open[path] {
			t.Errorf("%s has a default but is not in the schema", path)
		}
	}
	for path := range open {
		optional := path == ".global" || strings.HasSuffix(path, ".resources.claims") ||
			strings.HasPrefix(path, ".agent.updateStrategy.") ||
			strings.HasPrefix(path, ".gate.webhook.certManager.issuerRef.") // empty as a whole
		if !seen[path] && !optional {
			t.Errorf("%s is in the schema but has no default", path)
		}
	}
	var closed func(path string, s map[string]any)
	closed = func(path string, s map[string]any) {
		properties, ok := s["properties"].(map[string]any)
		if !ok {
			return
		}
		if s["additionalProperties"] != false {
			t.Errorf("%s accepts unknown fields", path)
		}
		for name, part := range properties {
			closed(path+"."+name, part.(map[string]any))
		}
	}
	closed("", schema)
}

// podSpecs returns the pods of a rendering by workload name.
func podSpecs(t *testing.T, all []Document) map[string]corev1.PodSpec {
	t.Helper()
	pods := map[string]corev1.PodSpec{}
	for _, d := range all {
		switch d.Kind {
		case "Deployment", "DaemonSet", "Job":
			var o struct {
				Spec struct {
					Template corev1.PodTemplateSpec `json:"template"`
				} `json:"spec"`
			}
			must.Do(t, yaml.Unmarshal([]byte(d.Text), &o))
			pods[d.Name] = o.Spec.Template.Spec
		}
	}
	return pods
}

func TestPodsHaveLeastPrivileges(t *testing.T) {
	for name, values := range renderings {
		all := objects(t, Namespace, values)
		pods := podSpecs(t, all)
		if len(pods) < 2 {
			t.Errorf("%s: only the pods of %v", name, slices.Sorted(maps.Keys(pods)))
		}
		images := map[string]bool{}
		for workload, pod := range pods {
			at := name + ": " + workload
			if p := pod.SecurityContext; p == nil || p.SeccompProfile == nil ||
				p.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("%s: no seccomp profile", at)
			}
			for _, c := range append(pod.InitContainers, pod.Containers...) {
				images[c.Image] = true
				s := c.SecurityContext
				switch {
				case s == nil || s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}):
					t.Errorf("%s: does not drop all capabilities", at)
				case s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem:
					t.Errorf("%s: the root file system is writable", at)
				case s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation:
					t.Errorf("%s: allows privilege escalation", at)
				case s.Privileged != nil && *s.Privileged:
					t.Errorf("%s: is privileged", at)
				}
				if c.Resources.Requests.Memory().IsZero() || c.Resources.Requests.Cpu().IsZero() {
					t.Errorf("%s: requests no CPU or memory", at)
				}
				if !c.Resources.Limits.Cpu().IsZero() {
					t.Errorf("%s: has a CPU limit", at)
				}
				if workload == "stayput-agent" {
					continue
				}
				onHost := workload == "stayput-controller" && strings.Contains(values, "hostNetwork: true")
				if p := pod.SecurityContext; p.RunAsNonRoot == nil || !*p.RunAsNonRoot || len(s.Capabilities.Add) > 0 ||
					pod.HostNetwork != onHost || pod.HostPID || len(pod.Volumes) > 0 {
					t.Errorf("%s: is root, on the host, or has capabilities", at)
				}
			}
		}
		if len(images) != 1 {
			t.Errorf("%s: more than one image: %v", name, images)
		}
	}
}

// find returns the object of this kind and name in a rendering, nil if there is none.
func find[object any](t *testing.T, all []Document, kind, name string) *object {
	t.Helper()
	i := slices.IndexFunc(all, func(d Document) bool { return d.Kind == kind && d.Name == name })
	if i < 0 {
		return nil
	}
	var o object
	must.Do(t, yaml.UnmarshalStrict([]byte(all[i].Text), &o))
	return &o
}

// Without a peer that is named, only the node connects to the ports of a controller. All clients connect to the port of
// the webhook, which gates no pods that it is not asked about.
func TestTheNetworkPolicyAdmitsWhoIsNamed(t *testing.T) {
	for values, want := range map[string]string{
		"": "", "networkPolicy: {enabled: true}": "[]",
		"gate: {mechanism: Webhook}\nnetworkPolicy: {enabled: true}":                                         "[{gate 0}]",
		"networkPolicy: {enabled: true, metricsFrom: [{podSelector: {}}], webhookFrom: [{podSelector: {}}]}": "[{metrics 1}]",
		"gate: {mechanism: Webhook}\nnetworkPolicy: {enabled: true, metricsFrom: [{podSelector: {}}], " +
			"webhookFrom: [{podSelector: {}}, {ipBlock: {cidr: 192.0.2.0/28}}]}": "[{metrics 1} {gate 2}]",
	} {
		all := objects(t, Namespace, values)
		policy := find[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", "stayput-controller")
		if want == "" || policy == nil {
			if want != "" || policy != nil {
				t.Errorf("%q: the policy is %v", values, policy)
			}
			continue
		}
		type rule struct {
			port  string
			peers int
		}
		rules := []rule{}
		for _, r := range policy.Spec.Ingress {
			for _, p := range r.Ports {
				rules = append(rules, rule{p.Port.StrVal, len(r.From)})
			}
		}
		d := find[appsv1.Deployment](t, all, "Deployment", "stayput-controller")
		if got := fmt.Sprint(rules); got != want ||
			!slices.Equal(policy.Spec.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) ||
			!maps.Equal(policy.Spec.PodSelector.MatchLabels, d.Spec.Selector.MatchLabels) {
			t.Errorf("%q: it admits %s, expected %s: %+v", values, got, want, policy.Spec)
		}
	}
}

func TestTheGarbageCollectorKeepsThePodsBelowTheirMemoryLimits(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"": "GOGC=50 GOMEMLIMIT=483183820",
		"controller: {resources: {limits: {memory: 1.5Gi}}}":                   "GOGC=50 GOMEMLIMIT=1449551462",
		"controller: {resources: {limits: {memory: 1000000000}}}":              "GOGC=50 GOMEMLIMIT=900000000",
		"controller: {resources: {limits: {memory: 500M}}}":                    "GOGC=50 GOMEMLIMIT=450000000",
		"controller: {resources: {limits: null}}":                              "GOGC=50",
		"controller: {resources: null}":                                        "GOGC=50",
		`controller: {extraEnv: [{name: GOGC, value: "25"}]}`:                  "GOMEMLIMIT=483183820 GOGC=25",
		`controller: {extraEnv: [{name: GOMEMLIMIT, value: "450MiB"}]}`:        "GOGC=50 GOMEMLIMIT=450MiB",
		`controller: {resources: {limits: {memory: 512Mi, cpu: 100m}}}`:        "GOGC=50 GOMEMLIMIT=483183820",
		`controller: {resources: {limits: {memory: 512000000000m, cpu: 2.5}}}`: "GOGC=50",
	} {
		var got []string
		for _, e := range podSpecs(t, objects(t, Namespace, values))["stayput-controller"].Containers[0].Env {
			if strings.HasPrefix(e.Name, "GO") {
				got = append(got, e.Name+"="+e.Value)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("with %q: %q, want %q", values, got, want)
		}
	}
	agent := podSpecs(t, objects(t, Namespace, ""))["stayput-agent"].Containers[0]
	for _, want := range []corev1.EnvVar{{Name: "GOMAXPROCS", Value: "1"}, {Name: "GOMEMLIMIT", Value: "188743680"}} {
		if !slices.Contains(agent.Env, want) {
			t.Errorf("the agent has %v, not %v", agent.Env, want)
		}
	}
}

func TestTwoControllersAreRedundant(t *testing.T) {
	const name = "stayput-controller"
	all := objects(t, Namespace, "")
	d := find[appsv1.Deployment](t, all, "Deployment", name)
	pdb := find[policyv1.PodDisruptionBudget](t, all, "PodDisruptionBudget", name)
	if d == nil || pdb == nil {
		t.Fatalf("Deployment %v, PodDisruptionBudget %v", d, pdb)
	}
	if d.Spec.Replicas == nil || *d.Spec.Replicas != 2 {
		t.Errorf("%v replicas", d.Spec.Replicas)
	}
	if r := d.Spec.Strategy.RollingUpdate; r == nil || r.MaxUnavailable.IntValue() != 0 || r.MaxSurge.IntValue() != 1 {
		t.Errorf("an upgrade leaves too few controllers: %+v", d.Spec.Strategy)
	}
	if pdb.Namespace != Namespace || pdb.Spec.MinAvailable != nil || pdb.Spec.MaxUnavailable.String() != "1" {
		t.Errorf("not exactly one may be evicted: %+v", pdb)
	}
	if p := pdb.Spec.UnhealthyPodEvictionPolicy; p == nil || *p != policyv1.AlwaysAllow {
		t.Error("a controller that never becomes ready blocks its node's drain")
	}
	apart := d.Spec.Template.Spec.Affinity
	if apart == nil || apart.PodAntiAffinity == nil ||
		len(apart.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution) != 1 {
		t.Fatalf("both may share a node: %+v", apart)
	}
	term := apart.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution[0].PodAffinityTerm
	if term.TopologyKey != "kubernetes.io/hostname" {
		t.Errorf("the anti-affinity's topology key is %s", term.TopologyKey)
	}
	selectors := map[string]*metav1.LabelSelector{
		"the Deployment": d.Spec.Selector, "the budget": pdb.Spec.Selector, "the anti-affinity": term.LabelSelector,
	}
	for _, spread := range d.Spec.Template.Spec.TopologySpreadConstraints {
		selectors["the spread by "+spread.TopologyKey] = spread.LabelSelector
	}
	own := labels.Set(d.Spec.Template.Labels)
	agents := labels.Set(find[appsv1.DaemonSet](t, all, "DaemonSet", "stayput-agent").Spec.Template.Labels)
	for who, s := range selectors {
		selector, err := metav1.LabelSelectorAsSelector(s)
		must.Do(t, err)
		if !selector.Matches(own) || selector.Matches(agents) {
			t.Errorf("%s selects %s, but the controller's labels are %v", who, selector, own)
		}
	}

	// A budget would keep a single replica's node from being drained.
	if find[policyv1.PodDisruptionBudget](t, objects(t, Namespace, "controller: {replicas: 1}"), "PodDisruptionBudget",
		name) != nil {
		t.Error("a single replica has a PodDisruptionBudget")
	}
	if find[policyv1.PodDisruptionBudget](t, objects(t, Namespace, "controller: {podDisruptionBudget: {enabled: false}}"),
		"PodDisruptionBudget", name) != nil {
		t.Error("there is a PodDisruptionBudget although it is disabled")
	}
}

func TestPodsHaveProbesAndPriorityClasses(t *testing.T) {
	pods := podSpecs(t, objects(t, Namespace, ""))
	for workload, class := range map[string]string{
		"stayput-agent": "system-node-critical", "stayput-controller": "system-cluster-critical",
		"stayput-uninstall": "system-cluster-critical",
	} {
		pod, ok := pods[workload]
		if !ok || pod.PriorityClassName != class {
			t.Errorf("%s has the priority class %q, want %q", workload, pod.PriorityClassName, class)
		}
	}
	for name, values := range renderings {
		pods := podSpecs(t, objects(t, Namespace, values))
		for workload, port := range map[string]string{"stayput-agent": "metrics", "stayput-controller": "health"} {
			c := pods[workload].Containers[0]
			if !slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == port }) {
				t.Errorf("%s: %s has no port %s", name, workload, port)
			}
			for path, probe := range map[string]*corev1.Probe{"/healthz": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
				if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path || probe.HTTPGet.Port.String() != port {
					t.Errorf("%s: %s is not probed for %s on its port %s: %+v", name, workload, path, port, probe)
				}
			}
		}
	}
	// An agent that listens on one address is probed there.
	agent := podSpecs(t, objects(t, Namespace,
		`agent: {metrics: {bindAddress: 127.0.0.1}}`))["stayput-agent"].Containers[0]
	if agent.LivenessProbe.HTTPGet.Host != "127.0.0.1" || agent.ReadinessProbe.HTTPGet.Host != "127.0.0.1" {
		t.Errorf("probed at %q and %q", agent.LivenessProbe.HTTPGet.Host, agent.ReadinessProbe.HTTPGet.Host)
	}
}

// The API server calls nothing of stayput, its admission logic consists of policies, except where it has none that gate
// pods.
func TestThereIsNoWebhookWhereThereArePolicies(t *testing.T) {
	for name, values := range renderings {
		webhooks := false
		for _, d := range objects(t, Namespace, values) {
			if strings.HasSuffix(d.Kind, "WebhookConfiguration") || d.Kind == "APIService" || d.Kind == "Service" {
				webhooks = true
				if name != "the webhook" {
					t.Errorf("%s: %s %s", name, d.Kind, d.Name)
				}
			}
			if d.Kind == "CustomResourceDefinition" {
				var o struct{ Spec struct{ Conversion any } }
				must.Do(t, yaml.Unmarshal([]byte(d.Text), &o))
				if o.Spec.Conversion != nil {
					t.Errorf("%s: %s is converted by %v", name, d.Name, o.Spec.Conversion)
				}
			}
		}
		if name == "the webhook" && !webhooks {
			t.Error("there is no webhook")
		}
	}
}

// The webhook is asked about no more pods than policies would gate, cannot hold up any, and takes rights to one object
// of each kind.
func TestTheWebhookIsAskedAboutTheSamePods(t *testing.T) {
	for name, values := range map[string]string{
		"the defaults": "", "without agents": "agent: {enabled: false}",
		"with kinds": "controller: {workloadKinds: [{group: example.com, version: v1, kind: Game, resource: games}]}",
	} {
		all := objects(t, "elsewhere", values+"\ngate: {mechanism: Webhook}")
		is := find[admissionregistrationv1.MutatingWebhookConfiguration](t, all, "MutatingWebhookConfiguration",
			"stayput-gate")
		of := map[string]admissionregistrationv1.MutatingWebhook{}
		for _, w := range is.Webhooks {
			of[w.Name] = w
			ref := w.ClientConfig.Service
			if *w.FailurePolicy != admissionregistrationv1.Ignore || *w.TimeoutSeconds != 2 ||
				*w.SideEffects != admissionregistrationv1.SideEffectClassNone || ref == nil || ref.Namespace != "elsewhere" {
				t.Errorf("%s: %+v", name, w)
			}
			own := labels.Set{"kubernetes.io/metadata.name": "elsewhere"}
			s, err := metav1.LabelSelectorAsSelector(w.NamespaceSelector)
			if err != nil || s.Matches(own) {
				t.Errorf("%s: %s is asked about the controller's own pods: %v", name, w.Name, err)
			}
			const may = "authorizer.serviceAccount('elsewhere', 'stayput-controller')" +
				".group('stayput.io').resource('placements').check('gate').allowed()"
			if len(w.MatchConditions) != 1 || !strings.HasSuffix(w.MatchConditions[0].Expression, " && "+may) {
				t.Errorf("%s: %s is asked also if the controller may not ungate: %v", name, w.Name, w.MatchConditions)
			}
		}
		// What the policies say comes first, word by word.
		policies := objects(t, "elsewhere", values+"\ngate: {mechanism: Policy}")
		policy := find[admissionregistrationv1.MutatingAdmissionPolicy](t, policies, "MutatingAdmissionPolicy",
			home.PolicyGateAnnotated)
		annotated, there := of["annotated.gate.stayput.io"]
		if there != (policy != nil) || there &&
			!strings.HasPrefix(annotated.MatchConditions[0].Expression, policy.Spec.MatchConditions[0].Expression) {
			t.Errorf("%s: other pods: %+v", name, annotated.MatchConditions)
		}
		recorded := of["recorded.gate.stayput.io"]
		policy = find[admissionregistrationv1.MutatingAdmissionPolicy](t, policies, "MutatingAdmissionPolicy",
			home.PolicyGateRecorded)
		if !equality.Semantic.DeepEqual(recorded.ObjectSelector, policy.Spec.MatchConstraints.ObjectSelector) {
			t.Errorf("%s: other pods: %v", name, recorded.ObjectSelector)
		}
		if kinds := "['StatefulSet', 'Game']"; name == "with kinds" &&
			!strings.Contains(recorded.MatchConditions[0].Expression, kinds) {
			t.Errorf("%s: %s", name, recorded.MatchConditions[0].Expression)
		}

		role := find[rbacv1.Role](t, all, "Role", "stayput-controller-gate")
		cluster := find[rbacv1.ClusterRole](t, all, "ClusterRole", "stayput-controller-gate")
		for _, r := range slices.Concat(role.Rules, cluster.Rules) {
			if !slices.Equal(r.ResourceNames, []string{"stayput-gate"}) ||
				!slices.Contains([]string{"[get update]", "[get patch]"}, fmt.Sprint(r.Verbs)) {
				t.Errorf("%s: the right %+v", name, r)
			}
		}
		service := find[corev1.Service](t, all, "Service", "stayput-gate")
		pods := find[appsv1.Deployment](t, all, "Deployment", "stayput-controller").Spec.Template
		if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pods.Labels)) ||
			!slices.Contains(pods.Spec.Containers[0].Args, "--gate-webhook") || pods.Spec.Containers[0].Lifecycle == nil ||
			!slices.ContainsFunc(pods.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool {
				return p.Name == service.Spec.Ports[0].TargetPort.String()
			}) {
			t.Errorf("%s: the Service %+v has no pods that serve it: %+v", name, service.Spec, pods)
		}
	}

	// On the network of its node a controller listens where the values say.
	all := objects(t, Namespace, renderings["the webhook"])
	pod := find[appsv1.Deployment](t, all, "Deployment", "stayput-controller").Spec.Template.Spec
	ports := map[string]int32{}
	for _, p := range pod.Containers[0].Ports {
		ports[p.Name] = p.ContainerPort
	}
	if !pod.HostNetwork || !maps.Equal(ports, map[string]int32{"metrics": 18080, "health": 18081, "gate": 19443}) {
		t.Errorf("hostNetwork: %v, ports %v", pod.HostNetwork, ports)
	}
	for _, flag := range []string{
		"--metrics-bind-address=:18080", "--health-probe-bind-address=:18081", "--gate-webhook-port=19443",
	} {
		if !slices.Contains(pod.Containers[0].Args, flag) {
			t.Errorf("no %s in %q", flag, pod.Containers[0].Args)
		}
	}

	// With cert-manager the controllers only read the certificate.
	for issuer, want := range map[string]string{"": "{Issuer stayput-gate}",
		", issuerRef: {kind: ClusterIssuer, name: internal}": "{ClusterIssuer internal}"} {
		all := objects(t, Namespace, "gate: {mechanism: Webhook, webhook: {certManager: {enabled: true"+issuer+"}}}")
		type certificate struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
			Spec              struct {
				SecretName     string
				DNSNames       []string `json:"dnsNames"`
				IssuerRef      struct{ Kind, Name string }
				SecretTemplate metav1.ObjectMeta
			}
		}
		cert := find[certificate](t, all, "Certificate", "stayput-gate")
		if cert == nil || cert.Spec.SecretName != "stayput-gate" || fmt.Sprint(cert.Spec.IssuerRef) != want ||
			!slices.Equal(cert.Spec.DNSNames, []string{"stayput-gate." + Namespace + ".svc"}) ||
			slices.ContainsFunc(all, func(d Document) bool { return d.Kind == "Issuer" }) != (issuer == "") {
			t.Errorf("certificate %+v", cert)
		}
		// The Secret is the chart's, so that it goes with the rest, and the chart may have it with and without cert-manager.
		if s := find[corev1.Secret](t, all, "Secret", "stayput-gate"); s == nil || len(s.Data)+len(s.StringData) > 0 ||
			cert.Spec.SecretTemplate.Annotations["meta.helm.sh/release-namespace"] != Namespace {
			t.Errorf("the Secret %+v", s)
		}
		config := find[admissionregistrationv1.MutatingWebhookConfiguration](t, all, "MutatingWebhookConfiguration",
			"stayput-gate")
		if config.Annotations["cert-manager.io/inject-ca-from"] != Namespace+"/stayput-gate" {
			t.Errorf("nobody says whom to trust: %v", config.Annotations)
		}
		if find[rbacv1.ClusterRole](t, all, "ClusterRole", "stayput-controller-gate") != nil ||
			!slices.Equal(find[rbacv1.Role](t, all, "Role", "stayput-controller-gate").Rules[0].Verbs, []string{"get"}) {
			t.Error("the controllers may change the certificate")
		}
		args := find[appsv1.Deployment](t, all, "Deployment", "stayput-controller").Spec.Template.Spec.Containers[0].Args
		if !slices.Contains(args, "--gate-webhook-cert-given") {
			t.Errorf("the controllers make the certificate: %q", args)
		}
	}
}

func TestEveryCapabilityHasAReason(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "deploy", "chart", "templates", "41-agent.yaml"))
	must.Do(t, err)
	_, list, ok := strings.Cut(string(data), "            add:\n")
	if !ok {
		t.Fatal("no capabilities are added")
	}
	line := regexp.MustCompile(`^            (- [A-Z_]+|# .*)$`)
	reason, n := false, 0
	for l := range strings.Lines(list) {
		l = strings.TrimSuffix(l, "\n")
		if !line.MatchString(l) {
			break
		}
		is := strings.HasPrefix(l, "            # ")
		if !is {
			n++
			if !reason {
				t.Errorf("%s: no reason", strings.TrimSpace(l))
			}
		}
		reason = is
	}
	if pods := podSpecs(t, objects(t, Namespace, "")); n == 0 ||
		n != len(pods["stayput-agent"].Containers[0].SecurityContext.Capabilities.Add) {
		t.Errorf("only %d capabilities with reasons", n)
	}
}

func TestTheAgentMountsTheNodesPathsUnchanged(t *testing.T) {
	for name, values := range renderings {
		pod := podSpecs(t, objects(t, Namespace, values))["stayput-agent"]
		if !pod.HostNetwork || !pod.HostPID {
			t.Errorf("%s: not in the node's network and process namespaces", name)
		}
		host := map[string]string{}
		for _, v := range pod.Volumes {
			host[v.Name] = v.HostPath.Path
		}
		mounts := map[string]corev1.VolumeMount{}
		for _, m := range pod.Containers[0].VolumeMounts {
			if host[m.Name] != m.MountPath {
				t.Errorf("%s: %s is mounted at %s", name, host[m.Name], m.MountPath)
			}
			mounts[m.MountPath] = m
		}
		flags := map[string]string{}
		for _, a := range pod.Containers[0].Args {
			k, v, _ := strings.Cut(a, "=")
			flags[k] = v
		}
		need := []string{
			"/run/netns", "/var/run/netns", filepath.Dir(flags["--cri-socket"]),
			flags["--state-dir"], flags["--cni-cache-dir"], flags["--cni-conf-dir"], flags["--cni-bin-dir"],
		}
		switch nri, told := flags["--nri-socket"]; {
		case !told:
			t.Errorf("%s: it is told of no NRI socket", name)
		case nri != "":
			need = append(need, filepath.Dir(nri))
		}
		for _, path := range need {
			if _, ok := mounts[path]; !ok {
				t.Errorf("%s: %s is not mounted", name, path)
			}
		}
		// Also by an agent that installs nothing: it removes what an earlier one installed.
		for _, path := range []string{flags["--cni-conf-dir"], flags["--cni-bin-dir"]} {
			if mounts[path].ReadOnly {
				t.Errorf("%s: %s is not writable", name, path)
			}
		}
		for _, path := range []string{"/run/netns", "/var/run/netns"} {
			if p := mounts[path].MountPropagation; p == nil || *p != corev1.MountPropagationHostToContainer {
				t.Errorf("%s: new namespaces at %s are not visible", name, path)
			}
		}
	}
}

// Objects use the release's namespace throughout, but for those about the Leases of nodes.
func TestNoObjectHardcodesTheNamespace(t *testing.T) {
	for name, values := range renderings {
		for _, d := range objects(t, "elsewhere", values) {
			if strings.Contains(d.Text, Namespace) {
				t.Errorf("%s: %s %s names %s", name, d.Kind, d.Name, Namespace)
			}
			if clustered := regexp.MustCompile("^(Cluster|MutatingWebhook|.*AdmissionPolicy|CustomResource|FlowSchema)").MatchString(d.Kind); !clustered &&
				d.Namespace != "elsewhere" && d.Namespace != corev1.NamespaceNodeLease {
				t.Errorf("%s: %s %s is in the namespace %q", name, d.Kind, d.Name, d.Namespace)
			}
		}
	}
}

func TestEveryObjectHasTheRecommendedLabels(t *testing.T) {
	for name, values := range renderings {
		for _, d := range objects(t, Namespace, values) {
			var o struct {
				Metadata struct{ Labels map[string]string }
			}
			must.Do(t, yaml.Unmarshal([]byte(d.Text), &o))
			want := []string{"app.kubernetes.io/part-of"}
			if d.Kind != "CustomResourceDefinition" {
				want = append(want, "app.kubernetes.io/name", "app.kubernetes.io/component", "app.kubernetes.io/managed-by",
					"app.kubernetes.io/version")
			}
			for _, label := range want {
				if o.Metadata.Labels[label] == "" {
					t.Errorf("%s: %s %s has no label %s", name, d.Kind, d.Name, label)
				}
			}
		}
	}
}

// What gates pods is what the API server has, unless that is said.
func TestWhatGatesPodsDependsOnTheAPIServer(t *testing.T) {
	const group = "admissionregistration.k8s.io"
	const v1, beta = group + "/v1/MutatingAdmissionPolicy", group + "/v1beta1/MutatingAdmissionPolicy"
	for _, c := range []struct {
		mechanism, version string
		serves             []string // empty: nobody knows
		want               string   // a refusal is in words
	}{
		{"Auto", "1.31.0", nil, "webhook"},
		{"Auto", "1.35.9", nil, "webhook"},
		{"Auto", "1.36.0", nil, "v1"},
		{"Auto", "1.36.3-gke.100", nil, "v1"},
		{"Auto", "1.40.0", nil, "v1"},
		{"Auto", "1.35.9", []string{"v1/Pod"}, "webhook"},
		{"Auto", "1.35.9", []string{"v1/Pod", beta}, "v1beta1"},
		{"Auto", "1.36.0", []string{"v1/Pod"}, "webhook"}, // switched off
		{"Auto", "1.36.0", []string{"v1/Pod", beta, v1}, "v1"},
		{"Policy", "1.34.2", []string{"v1/Pod", beta}, "v1beta1"},
		{"Policy", "1.34.2", nil, "v1beta1"},
		{"Policy", "1.36.0", nil, "v1"},
		{"Policy", "1.34.2", []string{"v1/Pod"}, "gate.mechanism: this API server, v1.34.2, has no MutatingAdmission"},
		{"Policy", "1.33.1", nil, "expected Auto, Webhook or Template"},
		{"Webhook", "1.36.0", nil, "webhook"},
		{"Webhook", "1.36.0", []string{"v1/Pod", v1}, "webhook"},
		{"Template", "1.36.0", nil, ""},
		{"Template", "1.31.0", nil, ""},
	} {
		args := []string{"--namespace=" + Namespace, "--kube-version=" + c.version,
			"--set=pools.enabled=true,gate.mechanism=" + c.mechanism}
		for _, kind := range c.serves {
			args = append(args, "--api-versions="+kind)
		}
		out, err := lab.Template(testContext(t), Namespace, args...)
		if strings.Contains(c.want, " ") {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		must.Do(t, err)
		all, err := Split(out)
		must.Do(t, err)
		is := map[string]int{}
		for _, d := range all {
			if version, ok := strings.CutPrefix(apiVersion(t, d), group+"/"); ok && strings.HasPrefix(d.Kind, "MutatingAdm") {
				is[version]++
			} else if d.Kind == "MutatingWebhookConfiguration" {
				is["webhook"]++
			}
		}
		want := map[string]int{}
		switch c.want {
		case "webhook":
			want[c.want] = 1
		case "v1", "v1beta1":
			want[c.want] = 14 // seven policies with their bindings
		}
		if !maps.Equal(is, want) {
			t.Errorf("%+v: there are %v", c, is)
		}
		if len(all) < 30 { // the rest is unchanged
			t.Errorf("%+v: only %d objects", c, len(all))
		}
	}
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	_, err = lab.Helm(testContext(t), "template", "x", dir, "--kube-version=1.30.9")
	if err == nil || !strings.Contains(err.Error(), "1.31") {
		t.Errorf("Kubernetes 1.30: %v", err)
	}
}

func apiVersion(t *testing.T, d Document) string {
	t.Helper()
	var o metav1.TypeMeta
	must.Do(t, yaml.Unmarshal([]byte(d.Text), &o))
	return o.APIVersion
}

// As Argo CD renders: it looks nothing up, but hands in every kind of the cluster.
func TestOpenKruisesDefinitionIsLeftAloneWithoutALookup(t *testing.T) {
	for kinds, want := range map[string]bool{
		"v1/Pod": true,
		"v1/Pod,apps.kruise.io/v1alpha1/PersistentPodState":                                  true, // perhaps ours
		"v1/Pod,apps.kruise.io/v1alpha1/PersistentPodState,apps.kruise.io/v1alpha1/CloneSet": false,
	} {
		var args []string
		for _, kind := range strings.Split(kinds, ",") {
			args = append(args, "--api-versions="+kind)
		}
		all := objects(t, Namespace, "", args...)
		ours := slices.ContainsFunc(all, func(d Document) bool { return d.Name == persistentPodStates })
		if ours != want {
			t.Errorf("with %s, the definition is in the chart: %v, want %v", kinds, ours, want)
		}
	}
}

// Argo CD knows PreDelete hooks by its own annotation, and takes over no definition by a prune.
func TestArgoCDRunsTheHooksAndPrunesNoDefinition(t *testing.T) {
	hooks, definitions := 0, 0
	for _, d := range objects(t, Namespace, "pools: {enabled: true}") {
		var o metav1.PartialObjectMetadata
		must.Do(t, yaml.Unmarshal([]byte(d.Text), &o))
		if o.Annotations["helm.sh/hook"] != "" {
			hooks++
			if o.Annotations["helm.sh/hook"] != "pre-delete" || o.Annotations["argocd.argoproj.io/hook"] != "PreDelete" ||
				o.Annotations["argocd.argoproj.io/hook-delete-policy"] != "BeforeHookCreation,HookSucceeded" {
				t.Errorf("%s %s has the annotations %v", d.Kind, d.Name, o.Annotations)
			}
		}
		if d.Kind == "CustomResourceDefinition" {
			definitions++
			if o.Annotations["argocd.argoproj.io/sync-options"] != "Prune=false,Delete=false" {
				t.Errorf("%s %s has the annotations %v", d.Kind, d.Name, o.Annotations)
			}
		}
	}
	if hooks == 0 || definitions != 6 {
		t.Errorf("there are %d hooks and %d definitions", hooks, definitions)
	}
}

func TestPodsAreScrapedByPortName(t *testing.T) {
	all := objects(t, Namespace, renderings["everything on"])
	for name, pod := range podSpecs(t, all) {
		if name == "stayput-uninstall" {
			continue
		}
		if !slices.ContainsFunc(pod.Containers[0].Ports, func(p corev1.ContainerPort) bool { return p.Name == "metrics" }) {
			t.Errorf("%s has no port metrics", name)
		}
	}
	i := slices.IndexFunc(all, func(d Document) bool { return d.Kind == "ConfigMap" && d.Name == "stayput-dashboards" })
	if i < 0 {
		t.Fatal("no dashboards")
	}
	var dashboards corev1.ConfigMap
	must.Do(t, yaml.Unmarshal([]byte(all[i].Text), &dashboards))
	for _, name := range []string{"overview", "debug"} {
		want, err := os.ReadFile(filepath.Join("..", "..", "deploy", "chart", "files", "dashboards", name+".json"))
		must.Do(t, err)
		if got := dashboards.Data["stayput-"+name+".json"]; strings.TrimSpace(got) != strings.TrimSpace(string(want)) ||
			!json.Valid([]byte(got)) {
			t.Errorf("the dashboard %s is not the file: %.200q", name, got)
		}
	}
	i = slices.IndexFunc(all, func(d Document) bool { return d.Kind == "PrometheusRule" })
	if i < 0 {
		t.Fatal("no rules")
	}
	var rule struct{ Spec any }
	must.Do(t, yaml.Unmarshal([]byte(all[i].Text), &rule))
	data, err := os.ReadFile(filepath.Join("..", "..", "deploy", "chart", "files", "rules.yaml"))
	must.Do(t, err)
	var groups any
	must.Do(t, yaml.Unmarshal(data, &groups))
	if fmt.Sprint(rule.Spec) != fmt.Sprint(groups) {
		t.Errorf("the rules are not the file: %v", rule.Spec)
	}
}
