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
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// the is the package's cluster. Its node runs no stayput pods, since it lacks their image: test/cluster tests running
// ones.
var the struct {
	sync.Mutex
	cluster *lab.Cluster
	err     error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if the.cluster != nil {
		if err := the.cluster.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "test/chart:", err)
			code = 1
		}
	}
	os.Exit(code)
}

func cluster(t *testing.T) *lab.Cluster {
	t.Helper()
	the.Lock()
	defer the.Unlock()
	if the.cluster == nil && the.err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		the.cluster, the.err = lab.StartCluster(ctx, lab.ClusterOptions{Nodes: 1})
		if the.err == nil {
			the.err = definePrometheusOperator(ctx, the.cluster)
		}
	}
	must.Do(t, the.err)
	return the.cluster
}

// definePrometheusOperator applies the definitions of PodMonitor and PrometheusRule from the operator's own module.
func definePrometheusOperator(ctx context.Context, c *lab.Cluster) error {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", "github.com/prometheus-operator/prometheus-operator")
	cmd.Dir = filepath.Join("testdata", "prometheus-operator")
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go mod download: %w: %s%s", err, out, stderr.Bytes())
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return err
	}
	for _, kind := range []string{"podmonitors", "prometheusrules"} {
		file := filepath.Join(module.Dir, "example", "prometheus-operator-crd", "monitoring.coreos.com_"+kind+".yaml")
		if _, err := c.Kubectl(ctx, "", "apply", "--server-side", "-f", file); err != nil {
			return err
		}
	}
	return c.WaitForCRDs(ctx)
}

func kubectl(t *testing.T, c *lab.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(testContext(t), "", args...)
	must.Do(t, err)
	return out
}

func helm(t *testing.T, c *lab.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Helm(testContext(t), args...)
	must.Do(t, err)
	return out
}

// ours returns the cluster's objects that carry our label, as KIND/NAME, except those derived by Kubernetes'
// controllers.
func ours(t *testing.T, c *lab.Cluster) []string {
	t.Helper()
	kinds := strings.Join([]string{
		"mutatingadmissionpolicies", "mutatingadmissionpolicybindings", "validatingadmissionpolicies",
		"validatingadmissionpolicybindings",
		"clusterroles", "clusterrolebindings", "roles", "rolebindings", "serviceaccounts", "configmaps", "namespaces",
		"daemonsets", "deployments", "jobs", "poddisruptionbudgets", "networkpolicies", "podmonitors", "prometheusrules",
		"customresourcedefinitions",
	}, ",")
	out := kubectl(t, c, "get", kinds, "-A", "-l", "app.kubernetes.io/part-of=stayput", "-o", "name")
	names := strings.Fields(out)
	slices.Sort(names)
	return names
}

func definitions(names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool {
		return !strings.HasPrefix(n, "customresourcedefinition")
	})
}

var bothDefinitions = []string{
	"customresourcedefinition.apiextensions.k8s.io/persistentpodstates.apps.kruise.io",
	"customresourcedefinition.apiextensions.k8s.io/retainedips.stayput.io",
}

var definitionsOfPools = []string{
	"podipaudits.stayput.io", "podippools.stayput.io", "podipreports.stayput.io", "podips.stayput.io",
}

// andPools adds the definitions of pools to names of objects.
func andPools(names []string) []string { return and(names, definitionsOfPools...) }

// andEvery adds the definitions of pools, Spiderpool's among them, to names of objects.
func andEvery(names []string) []string { return and(andPools(names), spiderIPPools) }

// and adds definitions to names of objects.
func and(names []string, definitions ...string) []string {
	all := slices.Clone(names)
	for _, name := range definitions {
		all = append(all, "customresourcedefinition.apiextensions.k8s.io/"+name)
	}
	slices.Sort(all)
	return all
}

// clean removes a test's leftovers.
func clean(t *testing.T, c *lab.Cluster, namespace string) {
	t.Helper()
	kubectl(t, c, "delete", "namespace", namespace, "--ignore-not-found")
	kubectl(t, c, append([]string{"delete", "crd", "--ignore-not-found", "retainedips.stayput.io",
		"persistentpodstates.apps.kruise.io", spiderIPPools}, definitionsOfPools...)...)
	if left := ours(t, c); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestTheAPIServerAcceptsEveryFieldOfEveryRendering(t *testing.T) {
	c := cluster(t)
	const namespace = "strict"
	kubectl(t, c, "create", "namespace", namespace)
	defer clean(t, c, namespace)
	for _, name := range slices.Sorted(maps.Keys(renderings)) {
		var all strings.Builder
		for _, d := range objects(t, namespace, renderings[name]) {
			fmt.Fprintf(&all, "---\n%s\n", d.Text)
		}
		for _, how := range [][]string{{"--server-side"}, nil} {
			args := append([]string{"apply", "-f", "-", "--dry-run=server", "--validate=strict"}, how...)
			if _, err := c.Kubectl(testContext(t), all.String(), args...); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// deployed returns a release's revision and status.
func deployed(t *testing.T, c *lab.Cluster, namespace string) (revision int, status string) {
	t.Helper()
	var is struct {
		Version int
		Info    struct{ Status string }
	}
	must.Do(t, json.Unmarshal([]byte(helm(t, c, "status", lab.Release, "-n", namespace, "-o", "json")), &is))
	return is.Version, is.Info.Status
}

func TestAReleaseIsInstalledChangedRolledBackAndUninstalled(t *testing.T) {
	c := cluster(t)
	const namespace = "by-helm"
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	defer clean(t, c, namespace)
	helm(t, c, "install", lab.Release, dir, "-n", namespace, "--create-namespace")
	installed := ours(t, c)
	if !slices.Equal(definitions(installed), bothDefinitions) {
		t.Errorf("definitions: %q", definitions(installed))
	}
	sentinel := uid(t, c, namespace, "configmap", "stayput-installation")

	// Every rendering over every other one. The first brings all definitions, which stay.
	for _, name := range []string{"everything on", "everything off", "the defaults", "everything off", "everything on",
		"the defaults"} {
		helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--reset-values", "--values",
			valuesFile(t, renderings[name]))
		if got := definitions(ours(t, c)); !slices.Equal(got, andEvery(bothDefinitions)) {
			t.Fatalf("%s: definitions: %q", name, got)
		}
		if revision, status := deployed(t, c, namespace); status != "deployed" {
			t.Errorf("%s: revision %d is %s", name, revision, status)
		}
	}
	if got := ours(t, c); !slices.Equal(got, andEvery(installed)) {
		t.Errorf("got %q, want %q", got, andEvery(installed))
	}
	helm(t, c, "rollback", lab.Release, "2", "-n", namespace)
	if got := kubectl(t, c, "get", "daemonset", "stayput-agent", "-n", namespace, "-o",
		"jsonpath={.spec.template.spec.containers[0].args}"); !strings.Contains(got, "--longest-retention=720h") {
		t.Errorf("not the revision's agent: %s", got)
	}
	helm(t, c, "rollback", lab.Release, "1", "-n", namespace)
	if got := ours(t, c); !slices.Equal(got, andEvery(installed)) {
		t.Errorf("got %q, want %q", got, andEvery(installed))
	}
	if got := uid(t, c, namespace, "configmap", "stayput-installation"); got != sentinel {
		t.Error("the ConfigMap stayput-installation was deleted in between")
	}

	// The hook needs running pods: see test/cluster.
	helm(t, c, "uninstall", lab.Release, "-n", namespace, "--no-hooks")
	must.Within(t, patience, "everything but the definitions to be gone", func() bool {
		return slices.Equal(ours(t, c), andEvery(bothDefinitions))
	})

	// Leftovers do not obstruct the next installation, and crds.keep=false removes them.
	helm(t, c, "install", lab.Release, dir, "-n", namespace,
		"--set=crds.keep=false,pools.enabled=true,pools.spiderpool=true")
	helm(t, c, "uninstall", lab.Release, "-n", namespace, "--no-hooks")
	must.Within(t, patience, "everything to be gone", func() bool { return len(ours(t, c)) == 0 })
}

func uid(t *testing.T, c *lab.Cluster, namespace, kind, name string) string {
	t.Helper()
	return kubectl(t, c, "get", kind, name, "-n", namespace, "-o", "jsonpath={.metadata.uid}")
}

func TestPoolsAreSwitchedOnAndOff(t *testing.T) {
	c := cluster(t)
	const namespace = "pools"
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	defer clean(t, c, namespace)
	helm(t, c, "install", lab.Release, dir, "-n", namespace, "--create-namespace")
	without := ours(t, c)
	helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=pools.enabled=true")
	with := ours(t, c)
	must.Do(t, c.WaitForCRDs(testContext(t)))
	_, err = c.Kubectl(testContext(t), `{apiVersion: stayput.io/v1alpha1, kind: PodIPPool, metadata: {name: blue},
		spec: {mode: L2, subnet: 10.6.0.0/16}}`, "apply", "-f", "-")
	must.Do(t, err)
	for range 2 {
		helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=pools.enabled=false")
		if is := ours(t, c); !slices.Equal(is, andPools(without)) {
			t.Errorf("switched off, there are %q, want %q", is, andPools(without))
		}
		kubectl(t, c, "get", "podippool", "blue")
		helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=pools.enabled=true")
		if is := ours(t, c); !slices.Equal(is, with) {
			t.Errorf("switched on again, there are %q, want %q", is, with)
		}
	}
	// Spiderpool's definition is left alone.
	_, err = c.Kubectl(testContext(t), spiderpoolDefinition, "apply", "-f", "-")
	must.Do(t, err)
	helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=pools.enabled=true,pools.spiderpool=true")
	if is := ours(t, c); slices.ContainsFunc(is, func(o string) bool { return strings.Contains(o, "spiderippools") }) {
		t.Errorf("Spiderpool's definition has become ours: %q", is)
	}
	kubectl(t, c, "delete", "crd", spiderIPPools)
	for range 2 { // the second time it is there, and ours
		helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=pools.enabled=true,pools.spiderpool=true")
		must.Do(t, c.WaitForCRDs(testContext(t)))
		kubectl(t, c, "get", "spiderippools")
	}
	helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=pools.enabled=true,pools.spiderpool=false")
	kubectl(t, c, "delete", "crd", spiderIPPools)
	helm(t, c, "uninstall", lab.Release, "-n", namespace, "--no-hooks")
	must.Within(t, patience, "everything but the definitions to be gone", func() bool {
		return slices.Equal(ours(t, c), andPools(bothDefinitions))
	})
	kubectl(t, c, "delete", "podippool", "blue")

	// Without Helm.
	file := func(name string) string {
		path, err := filepath.Abs(filepath.Join("..", "..", "deploy", name))
		must.Do(t, err)
		return path
	}
	kubectl(t, c, "delete", "namespace", namespace)
	for _, how := range [][]string{nil, {"--server-side"}} {
		kubectl(t, c, "apply", "--server-side", "-f", file("crds.yaml"), "-f", file("persistentpodstates.yaml"), "-f",
			file("pools-crds.yaml"))
		kubectl(t, c, append([]string{"apply", "-f", file("install.yaml"), "-f", file("gate-policies.yaml")}, how...)...)
		without := ours(t, c)
		pools := []string{"-f", file("pools-gate-policies.yaml"), "-f", file("pools.yaml")}
		kubectl(t, c, slices.Concat([]string{"apply"}, pools, how)...)
		kubectl(t, c, append([]string{"apply", "-f", file("install.yaml")}, how...)...) // which changes nothing
		kubectl(t, c, append([]string{"delete"}, pools...)...)
		if is := ours(t, c); !slices.Equal(is, without) {
			t.Errorf("without pools.yaml there are %q, want %q", is, without)
		}
		kubectl(t, c, slices.Concat([]string{"apply"}, pools, how)...)
		kubectl(t, c, slices.Concat([]string{"delete"}, pools, []string{"-f", file("gate-policies.yaml"), "-f",
			file("install.yaml")})...)
		if left := ours(t, c); !slices.Equal(left, andPools(bothDefinitions)) {
			t.Errorf("left: %q", left)
		}
	}
	kubectl(t, c, "delete", "-f", file("pools-crds.yaml"))
}

// spiderpoolDefinition is the relevant part of Spiderpool's, without our label.
const spiderpoolDefinition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: spiderippools.spiderpool.spidernet.io}
spec:
  group: spiderpool.spidernet.io
  scope: Cluster
  names: {plural: spiderippools, kind: SpiderIPPool}
  versions:
  - {name: v2beta1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

// kruiseDefinition is the relevant part of OpenKruise's, without our label.
const kruiseDefinition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: persistentpodstates.apps.kruise.io
spec:
  group: apps.kruise.io
  names: {kind: PersistentPodState, listKind: PersistentPodStateList, plural: persistentpodstates, singular: persistentpodstate}
  scope: Namespaced
  versions:
  - name: v1alpha1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

func TestOpenKruisesDefinitionIsNotTouched(t *testing.T) {
	c := cluster(t)
	const namespace = "beside-kruise"
	const name = "persistentpodstates.apps.kruise.io"
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	defer clean(t, c, namespace)
	_, err = c.Kubectl(testContext(t), kruiseDefinition, "apply", "-f", "-")
	must.Do(t, err)
	was := func() string {
		return kubectl(t, c, "get", "crd", name, "-o",
			"jsonpath={.metadata.uid} {.metadata.generation} {.metadata.labels} {.metadata.annotations}")
	}
	before := was()
	helm(t, c, "install", lab.Release, dir, "-n", namespace, "--create-namespace", "--set=crds.keep=false")
	helm(t, c, "upgrade", lab.Release, dir, "-n", namespace, "--set=crds.keep=false,controller.replicas=3")
	helm(t, c, "rollback", lab.Release, "1", "-n", namespace)
	helm(t, c, "uninstall", lab.Release, "-n", namespace, "--no-hooks")
	must.Within(t, patience, "everything to be gone", func() bool { return len(ours(t, c)) == 0 })
	if after := was(); after != before {
		t.Errorf("was %s, is %s", before, after)
	}
}

// When OpenKruise's chart takes over the definition or replaces it, our upgrades leave it alone.
func TestADefinitionTakenOverByOpenKruiseIsNotDeleted(t *testing.T) {
	c := cluster(t)
	const namespace = "before-kruise"
	const name = "persistentpodstates.apps.kruise.io"
	dir, err := lab.Chart(testContext(t))
	must.Do(t, err)
	defer clean(t, c, namespace)
	helm(t, c, "install", lab.Release, dir, "-n", namespace, "--create-namespace")
	was := uid(t, c, namespace, "crd", name)
	_, err = c.Kubectl(testContext(t), kruiseDefinition, "replace", "-f", "-")
	must.Do(t, err)
	still := func(when string) {
		t.Helper()
		if is := uid(t, c, namespace, "crd", name); is != was {
			t.Fatalf("%s: was %s, is %s", when, was, is)
		}
	}
	_, err = c.Helm(testContext(t), "upgrade", lab.Release, dir, "-n", namespace)
	const advice = "kubectl annotate crd " + name + " helm.sh/resource-policy=keep"
	if err == nil || !strings.Contains(err.Error(), advice) {
		t.Errorf("the upgrade says %v, want the advice %q", err, advice)
	}
	still("after the refused upgrade")
	kubectl(t, c, strings.Fields(advice)[1:]...)
	for range 2 {
		helm(t, c, "upgrade", lab.Release, dir, "-n", namespace)
		still("after the upgrade")
	}
	helm(t, c, "uninstall", lab.Release, "-n", namespace, "--no-hooks")
	must.Within(t, patience, "everything but RetainedIP to be gone", func() bool {
		return slices.Equal(ours(t, c), bothDefinitions[1:])
	})
	still("after the uninstallation")
}

func TestKubectlAppliesAndDeletesTheManifestsInOneGo(t *testing.T) {
	c := cluster(t)
	deploy, err := filepath.Abs(filepath.Join("..", "..", "deploy"))
	must.Do(t, err)
	defer clean(t, c, Namespace)
	for _, how := range [][]string{nil, {"--server-side"}} {
		kubectl(t, c, "apply", "--server-side", "-f", filepath.Join(deploy, "crds.yaml"), "-f",
			filepath.Join(deploy, "persistentpodstates.yaml"))
		files := []string{"-f", filepath.Join(deploy, "gate-policies.yaml"), "-f", filepath.Join(deploy, "install.yaml")}
		kubectl(t, c, slices.Concat([]string{"apply"}, files, how)...)
		// Applying twice changes nothing.
		kubectl(t, c, slices.Concat([]string{"apply"}, files, how)...)
		must.Within(t, patience, "the pods to be created, although their accounts came last", func() bool {
			pods := kubectl(t, c, "get", "pods", "-n", Namespace, "-o", "name")
			return strings.Count(pods, "pod/stayput-controller-") == 2 && strings.Count(pods, "pod/stayput-agent-") == 1
		})
		kubectl(t, c, append([]string{"delete"}, files...)...)
		if left := ours(t, c); !slices.Equal(left, bothDefinitions) {
			t.Errorf("left: %q", left)
		}
		_, err := c.Client().CoreV1().Namespaces().Get(testContext(t), Namespace, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			t.Errorf("the namespace: %v", err)
		}
	}
}

func TestKustomizeKeepsTheOrderOfTheManifests(t *testing.T) {
	c := cluster(t)
	deploy := filepath.Join("..", "..", "deploy")
	names := func(text string) []string {
		out, err := c.Kubectl(testContext(t), text, "create", "--dry-run=client", "-o", "name", "-f", "-")
		must.Do(t, err)
		return strings.Fields(out)
	}
	files, err := Files(testContext(t))
	must.Do(t, err)
	var want []string
	for _, name := range []string{"gate-policies.yaml", "install.yaml", "crds.yaml"} {
		want = append(want, names(string(files[name]))...)
	}
	if got := names(kubectl(t, c, "kustomize", deploy)); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A namespace of kustomize moves the accounts of the programs, but not what the policies say of these accounts. The
// programs then refuse to run (cmd/internal/program, InstalledIn), because they know what they were made for.
func TestProgramsInANamespaceOfKustomizeKnowThatTheyWereMadeForAnother(t *testing.T) {
	c := cluster(t)
	deploy, err := filepath.Abs(filepath.Join("..", "..", "deploy"))
	must.Do(t, err)
	overlay := t.TempDir()
	base, err := filepath.Rel(overlay, deploy)
	must.Do(t, err)
	must.Do(t, os.WriteFile(filepath.Join(overlay, "kustomization.yaml"),
		[]byte("namespace: elsewhere\nresources: ["+base+"]\n"), 0o644))
	programs := 0
	for text := range strings.SplitSeq(kubectl(t, c, "kustomize", overlay), "\n---\n") {
		var o struct {
			Kind     string
			Metadata metav1.ObjectMeta
			Spec     struct{ Template corev1.PodTemplateSpec }
		}
		if err := yaml.Unmarshal([]byte(text), &o); err != nil || o.Kind != "Deployment" && o.Kind != "DaemonSet" {
			continue
		}
		programs++
		if args := o.Spec.Template.Spec.Containers[0].Args; o.Metadata.Namespace != "elsewhere" ||
			!slices.Contains(args, "--namespace="+Namespace) {
			t.Errorf("%s %s in namespace %s has the arguments %q", o.Kind, o.Metadata.Name, o.Metadata.Namespace, args)
		}
	}
	if programs != 2 {
		t.Errorf("kustomize renders %d programs", programs)
	}
}
