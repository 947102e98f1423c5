package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	rules "github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/chart"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// guard is a cluster with the manifests of stayput but none of its programs, so that only the API server answers.
// Every attempt is made twice: before the admission policies exist, and with them.
type guard struct {
	c      *lab.Cluster
	mapper meta.RESTMapper
	// The users and accounts that make attempts.
	admin, controller, agent, stray *rest.Config
}

// guarded is the guard, once it has been started. policies is true once they are applied.
var guarded struct {
	*guard
	policies bool
}

// manifests returns the objects of the chart whose templates match the patterns, in the order of the patterns.
func manifests(ctx context.Context, patterns ...string) (string, error) {
	objects, err := chart.Render(ctx, "--no-hooks",
		"--set=namespace.create=true,controller.nominateHomes=true,pools.enabled=true,pools.spiderpool=true")
	if err != nil {
		return "", err
	}
	var all strings.Builder
	for _, pattern := range patterns {
		found := false
		for _, o := range objects {
			matches, err := path.Match(pattern, path.Base(o.Source))
			if err != nil {
				return "", err
			}
			if matches {
				found = true
				fmt.Fprintf(&all, "---\n%s\n", o.Text)
			}
		}
		if !found {
			return "", fmt.Errorf("no template %s", pattern)
		}
	}
	return all.String(), nil
}

// The templates of the admission policies and of their bindings.
const (
	bindingFiles = "0[01]-gate-*.yaml"
	policyFiles  = "2*-policy-*.yaml"
)

// guardedWith returns the guard, with or without the policies. Tests without them run first.
func guardedWith(t *testing.T, policies bool) *guard {
	t.Helper()
	common.get(t, "without programs", func() (*lab.Cluster, error) {
		var err error
		guarded.policies = false
		if guarded.guard, err = startGuard(testContext(t)); guarded.guard == nil {
			return nil, err
		}
		return guarded.c, err
	})
	switch {
	case !policies && guarded.policies:
		t.Fatal("the policies already exist: tests without them have to run first")
	case policies && !guarded.policies:
		files, err := manifests(testContext(t), bindingFiles, policyFiles)
		must.Do(t, err)
		_, err = guarded.c.Kubectl(testContext(t), files, "apply", "--server-side", "-f", "-")
		must.Do(t, err)
		// An API server reads policies and bindings from its caches, which follow a moment later.
		until(t, "the policies to be in force", func(ctx context.Context) bool {
			change := merge(retipKind, "web-1.node-2", `{metadata: {finalizers: [example.com/x]}}`)
			return !slices.ContainsFunc([]func(*guard) *rest.Config{asEditor, asAgent, asController},
				func(as func(*guard) *rest.Config) bool {
					_, err := change(ctx, guarded.guard, as(guarded.guard))
					return err == nil
				})
		})
		guarded.policies = true
	}
	return guarded.guard
}

func startGuard(ctx context.Context) (*guard, error) {
	c, err := lab.StartCluster(ctx, lab.ClusterOptions{Nodes: 2})
	if err != nil {
		return nil, err
	}
	g := &guard{c: c, admin: c.RESTConfig()}
	files, err := manifests(ctx, "10-*.yaml", "[23]*-rbac-*.yaml", "05-crds.yaml")
	if err != nil {
		return g, err
	}
	if _, err := c.Kubectl(ctx, files+kruiseWorkloads, "apply", "--server-side", "-f", "-"); err != nil {
		return g, err
	}
	if err := c.WaitForCRDs(ctx); err != nil {
		return g, err
	}
	if _, err := c.Kubectl(ctx, fixtures+"---"+people, "apply", "--server-side", "-f", "-"); err != nil {
		return g, err
	}
	for name, status := range podIPStates { // a subresource: it is not created with the object
		if _, err := c.Kubectl(ctx, "", "patch", "podip", name, "--subresource=status", "--type=merge", "-p",
			`{"status": `+status+`}`); err != nil {
			return g, err
		}
	}
	g.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.Client().Discovery()))
	as := func(account, node string) *rest.Config {
		token, tokenErr := c.AccountToken(ctx, lab.SystemNamespace, account, node)
		err = errors.Join(err, tokenErr)
		config := c.RESTConfig()
		config.BearerToken = token
		return config
	}
	g.controller = as(lab.ControllerAccount, "node-2")
	g.agent = as(lab.AgentAccount, "node-1")
	g.stray = as(lab.AgentAccount, "")
	return g, err
}

// kruiseWorkloads defines OpenKruise's workloads well enough to create objects.
var kruiseWorkloads = func() string {
	var all strings.Builder
	for plural, kind := range map[string]string{
		"statefulsets": "StatefulSet", "clonesets": "CloneSet", "daemonsets": "DaemonSet",
	} {
		fmt.Fprintf(&all, `
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[1]s.apps.kruise.io}
spec:
  group: apps.kruise.io
  scope: Namespaced
  names: {plural: %[1]s, kind: %[2]s}
  versions:
  - {name: v1beta1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`, plural, kind)
	}
	return all.String()
}()

// fixtures are applied before any policy.
const fixtures = `
apiVersion: v1
kind: Namespace
metadata: {name: guarded}
---
apiVersion: v1
kind: Namespace
metadata: {name: elsewhere}
---
apiVersion: v1
kind: Namespace
metadata: {name: pooled, annotations: {stayput.io/pools: blue}}
---
apiVersion: v1
kind: Namespace
metadata: {name: theirs, annotations: {ipam.spidernet.io/default-ipv6-ippool: '["blue"]'}}
---
apiVersion: v1
kind: Namespace
metadata: {name: unpooled, annotations: {ipam.spidernet.io/default-ipv4-ippool: '["blue"]', stayput.io/pools: ""}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: stayput-gated-workloads, namespace: guarded}
data: {workloads: "\nStatefulSet.apps.db\nStatefulSet.apps.kruise.io.queue\n"}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: guarded}
---
apiVersion: v1
kind: Secret
metadata: {name: password, namespace: guarded}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: guarded}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: elsewhere}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: pooled}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: theirs}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: unpooled}
---
apiVersion: v1
kind: Pod
metadata: {name: waiting, namespace: guarded, labels: {a: b}, annotations: {stayput.io/retain-ip: 10m}}
spec:
  schedulingGates: [{name: stayput.io/placement}, {name: example.com/quota}]
  nodeSelector: {disk: fast}
  affinity:
    podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, podAffinityTerm: {topologyKey: zone}}]}
  containers: [{name: c, image: i}]
---
apiVersion: v1
kind: Pod
metadata: {name: placed, namespace: guarded}
spec: {nodeName: node-2, containers: [{name: c, image: none, imagePullPolicy: Never}]}
---
apiVersion: v1
kind: Pod
metadata: {name: asking, namespace: guarded, annotations: {stayput.io/pools: blue}}
spec: {schedulingGates: [{name: stayput.io/placement}], containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: asking, namespace: pooled}
spec: {schedulingGates: [{name: stayput.io/placement}], containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: theirs, namespace: guarded, annotations: {ipam.spidernet.io/ippool: '{"ipv4":["blue"]}'}}
spec: {schedulingGates: [{name: stayput.io/placement}], containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: neither, namespace: guarded, annotations: {ipam.spidernet.io/ippool: '{"ipv4":["blue"]}', stayput.io/pools: ""}}
spec: {schedulingGates: [{name: stayput.io/placement}], containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: asking, namespace: theirs}
spec: {schedulingGates: [{name: stayput.io/placement}], containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: unbound, namespace: guarded, annotations: {stayput.io/pools: blue}}
spec: {schedulerName: none, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: late, namespace: guarded, annotations: {stayput.io/pools: blue}}
spec: {nodeName: node-2, containers: [{name: c, image: none, imagePullPolicy: Never}]}
---
apiVersion: v1
kind: Pod
metadata: {name: served, namespace: guarded, annotations: {stayput.io/pools: blue, stayput.io/addresses: "[]"}}
spec: {nodeName: node-2, containers: [{name: c, image: none, imagePullPolicy: Never}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: told, namespace: guarded}
spec:
  replicas: 0
  selector: {matchLabels: {a: told}}
  template:
    metadata: {labels: {a: told}, annotations: {stayput.io/pools: blue@, stayput.io/addresses: "[]"}}
    spec: {containers: [{name: c, image: i}]}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue}
spec: {mode: L2, subnet: 10.6.0.0/16, addresses: [10.6.168.101-10.6.168.110], gateway: 10.6.0.1}
---
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderIPPool
metadata: {name: green}
spec: {subnet: 10.9.0.0/16, ips: [10.9.168.101]}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.6.168.101}
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-1, podUID: one, interface: eth0}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.6.168.102}
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-2, podUID: two, interface: eth0}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.6.168.103}
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-3, podUID: three, interface: eth0}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.6.168.104}
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-4, podUID: next, interface: eth0}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.8.168.101}
spec: {pool: far, mode: Routed, namespace: guarded, podName: far-1, podUID: far, interface: eth0}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.8.168.102}
spec: {pool: far, mode: Routed, namespace: guarded, podName: far-2, podUID: away, interface: eth0}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPRoll
metadata: {name: cluster}
spec: {round: 1, mark: "2026-01-01T00:00:00.000000Z"}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPAnswer
metadata: {name: node-1}
spec: {round: 1}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPAnswer
metadata: {name: node-2}
spec: {round: 1}
---
apiVersion: stayput.io/v1alpha1
kind: RetainedIP
metadata: {name: web-0.node-1, namespace: guarded}
spec: {nodeName: node-1, podName: web-0, retention: 10m, release: true, workload: {apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}}
status: {phase: Retained, ips: [10.244.1.5, "fd00::5"], expires: "2042-11-21T07:12:55Z"}
---
apiVersion: stayput.io/v1alpha1
kind: RetainedIP
metadata: {name: web-1.node-2, namespace: guarded}
spec: {nodeName: node-2, podName: web-1, retention: while-owned}
status: {phase: Bound, ips: [10.244.2.5]}
---
apiVersion: stayput.io/v1alpha1
kind: RetainedIP
metadata: {name: db-8.node-1, namespace: elsewhere}
spec: {nodeName: node-2, podName: db-8, retention: 10m}
status: {phase: Bound, ips: [10.244.2.8]}
---
apiVersion: stayput.io/v1alpha1
kind: RetainedIP
metadata: {name: db-9.node-2, namespace: guarded}
spec: {nodeName: node-1, podName: db-9, retention: 10m}
status: {phase: Bound, ips: [10.244.1.9]}
---
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata: {name: web, namespace: guarded}
spec: {targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: web}, requiredPersistentTopology: {nodeTopologyKeys: [zone]}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: bad, namespace: guarded}
spec:
  replicas: 0
  selector: {matchLabels: {a: bad}}
  template:
    metadata: {labels: {a: bad}, annotations: {stayput.io/retain-ip: "true"}}
    spec: {containers: [{name: c, image: i}]}
`

// podIPStates are the statuses of the PodIPs among the fixtures. That of 10.6.168.104 is about an earlier pod than the
// one it is given to.
var podIPStates = map[string]string{
	"10.6.168.102": `{"phase": "Bound", "podUID": "two", "nodeName": "node-1"}`,
	"10.6.168.103": `{"phase": "Bound", "podUID": "three", "nodeName": "node-2"}`,
	"10.8.168.102": `{"phase": "Bound", "podUID": "away", "nodeName": "node-2", "podCIDR": "10.244.2.0/24"}`,
	"10.6.168.104": `{"phase": "Retained", "podUID": "last", "nodeName": "node-2", "expires": "2042-11-21T07:12:55Z"}`,
}

// try makes one dry-run request: admission sees it, and nothing is stored.
type try func(ctx context.Context, g *guard, as *rest.Config) (*unstructured.Unstructured, error)

var dryRun = []string{metav1.DryRunAll}

func (g *guard) resource(
	as *rest.Config, gvk schema.GroupVersionKind, namespace string,
) (dynamic.ResourceInterface, error) {
	mapping, err := g.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return nil, err
	}
	quiet := rest.CopyConfig(as)
	if quiet.WarningHandler == nil {
		quiet.WarningHandler = rest.NoWarnings{}
	}
	client, err := dynamic.NewForConfig(quiet)
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		return client.Resource(mapping.Resource), nil
	}
	return client.Resource(mapping.Resource).Namespace(namespace), nil
}

// create creates an object from YAML, in the namespace guarded unless it names another.
func create(text string) try {
	return func(ctx context.Context, g *guard, as *rest.Config) (*unstructured.Unstructured, error) {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &object.Object); err != nil {
			return nil, err
		}
		namespace := object.GetNamespace()
		if namespace == "" {
			namespace = "guarded"
		}
		r, err := g.resource(as, object.GroupVersionKind(), namespace)
		if err != nil {
			return nil, err
		}
		return r.Create(ctx, object, metav1.CreateOptions{DryRun: dryRun})
	}
}

type action func(ctx context.Context, r dynamic.ResourceInterface, name string) (*unstructured.Unstructured, error)

// object calls do for an object. Its kind is written Kind.version.group, its name as name or namespace/name; the
// default namespace is guarded.
func object(kind, name string, do action) try {
	return func(ctx context.Context, g *guard, as *rest.Config) (*unstructured.Unstructured, error) {
		parts := append(strings.SplitN(kind, ".", 3), "")
		namespace, name, other := strings.Cut(name, "/")
		if !other {
			namespace, name = "guarded", namespace
		}
		r, err := g.resource(as, schema.GroupVersionKind{Kind: parts[0], Version: parts[1], Group: parts[2]}, namespace)
		if err != nil {
			return nil, err
		}
		return do(ctx, r, name)
	}
}

func patch(kind, name string, how types.PatchType, text string, subresources ...string) try {
	return object(kind, name,
		func(ctx context.Context, r dynamic.ResourceInterface, name string) (*unstructured.Unstructured, error) {
			body, err := yaml.YAMLToJSON([]byte(text))
			if err != nil {
				return nil, err
			}
			options := metav1.PatchOptions{DryRun: dryRun}
			if how == types.ApplyPatchType {
				force := true
				options.FieldManager, options.Force = "test", &force
			}
			return r.Patch(ctx, name, how, body, options, subresources...)
		})
}

func merge(kind, name, text string, subresources ...string) try {
	return patch(kind, name, types.MergePatchType, text, subresources...)
}

func remove(kind, name string) try {
	return object(kind, name,
		func(ctx context.Context, r dynamic.ResourceInterface, name string) (*unstructured.Unstructured, error) {
			return nil, r.Delete(ctx, name, metav1.DeleteOptions{DryRun: dryRun})
		})
}

// bind binds a pod to a node by its subresource.
func bind(pod, annotations string) try {
	return object(podKind, pod,
		func(ctx context.Context, r dynamic.ResourceInterface, name string) (*unstructured.Unstructured, error) {
			binding := &unstructured.Unstructured{}
			text := fmt.Sprintf(newBinding, name, annotations)
			if err := yaml.Unmarshal([]byte(text), &binding.Object); err != nil {
				return nil, err
			}
			return r.Create(ctx, binding, metav1.CreateOptions{DryRun: dryRun}, "binding")
		})
}

func get(kind, name string) try {
	return object(kind, name,
		func(ctx context.Context, r dynamic.ResourceInterface, name string) (*unstructured.Unstructured, error) {
			return r.Get(ctx, name, metav1.GetOptions{})
		})
}

func list(kind string, fields string, everywhere bool) try {
	namespace := "guarded/"
	if everywhere {
		namespace = "/"
	}
	return object(kind, namespace,
		func(ctx context.Context, r dynamic.ResourceInterface, _ string) (*unstructured.Unstructured, error) {
			_, err := r.List(ctx, metav1.ListOptions{FieldSelector: fields})
			return nil, err
		})
}

// An attempt is a request, and how admission should answer it.
type attempt struct {
	name string
	as   func(*guard) *rest.Config
	do   try
	// refusal is part of the policy's message; if empty, the request is accepted.
	refusal string
}

func asAdmin(g *guard) *rest.Config      { return g.admin }
func asController(g *guard) *rest.Config { return g.controller }
func asAgent(g *guard) *rest.Config      { return g.agent } // of node-1
func asStray(g *guard) *rest.Config      { return g.stray } // the agent's account with a token that names no node

const (
	podKind    = "Pod.v1."
	retipKind  = "RetainedIP.v1alpha1.stayput.io"
	ppsKind    = "PersistentPodState.v1alpha1.apps.kruise.io"
	cmKind     = "ConfigMap.v1."
	secretKind = "Secret.v1."
	poolKind   = "PodIPPool.v1alpha1.stayput.io"
	podIPKind  = "PodIP.v1alpha1.stayput.io"
	rollKind   = "PodIPRoll.v1alpha1.stayput.io"
	answerKind = "PodIPAnswer.v1alpha1.stayput.io"
	stsKind    = "StatefulSet.v1.apps"
	newPod     = "apiVersion: v1\nkind: Pod\nmetadata: {name: new, annotations: {%s}}\n" +
		"spec: {containers: [{name: c, image: i}]}"
	newRetp = "apiVersion: stayput.io/v1alpha1\nkind: RetainedIP\nmetadata: {name: web-2.%[1]s}\n" +
		"spec: {nodeName: %[1]s, podName: web-2, retention: 10m%[2]s}\nstatus: {phase: Bound}"
	newBinding = `{apiVersion: v1, kind: Binding, metadata: {name: %s, annotations: {%s}}, target: {kind: Node, name: node-1}}`
	newAnswer  = `{apiVersion: stayput.io/v1alpha1, kind: PodIPAnswer, metadata: {name: %s}, spec: {round: 1}}`
	// told are addresses by annotation.
	told = `stayput.io/addresses: "[{}]"`
)

// ownRetp is a RetainedIP of node-1 with more metadata.
func ownRetp(metadata string) string {
	return strings.Replace(fmt.Sprintf(newRetp, "node-1", ""), "{name: web-2.node-1}",
		"{name: web-2.node-1, "+metadata+"}", 1)
}

// retpNamed is a RetainedIP of node-1 by another name.
func retpNamed(name string) string {
	return strings.Replace(fmt.Sprintf(newRetp, "node-1", ""), "{name: web-2.node-1}", "{name: "+name+"}", 1)
}

func newPool(spec string) string {
	return "{apiVersion: stayput.io/v1alpha1, kind: PodIPPool, metadata: {name: new}, spec: {" + spec + "}}"
}

func newPodIP(name string) string {
	return fmt.Sprintf(`{apiVersion: stayput.io/v1alpha1, kind: PodIP, metadata: {name: %q},
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-5, podUID: five, interface: eth0}}`, name)
}

func newState(name, target string) string {
	return fmt.Sprintf(`{apiVersion: apps.kruise.io/v1alpha1, kind: PersistentPodState, metadata: {name: %s},
spec: {targetRef: %s, preferredPersistentTopology: [{weight: 1, preference: {nodeTopologyKeys: [zone]}}]}}`, name, target)
}

// template returns a workload of a kind whose pod template has the annotations.
func template(apiVersion, kind, annotations string) string {
	pods := fmt.Sprintf(`{metadata: {labels: {a: b}, annotations: {%s}}, spec: {restartPolicy: %s, containers: [{name: c, image: i}]}}`,
		annotations, map[bool]string{true: "Never", false: "Always"}[strings.HasSuffix(kind, "Job")])
	var spec string
	switch kind {
	case "Job":
		spec = `{template: ` + pods + `}`
	case "CronJob":
		spec = `{schedule: "0 0 1 1 *", jobTemplate: {spec: {template: ` + pods + `}}}`
	case "ReplicationController":
		spec = `{selector: {a: b}, template: ` + pods + `}`
	default:
		spec = `{selector: {matchLabels: {a: b}}, template: ` + pods + `}`
	}
	return fmt.Sprintf("{apiVersion: %s, kind: %s, metadata: {name: new}, spec: %s}", apiVersion, kind, spec)
}

// reports writes the status of a PodIP.
func reports(podIP, status string) try {
	return merge(podIPKind, podIP, "{status: {"+status+"}}", "status")
}

// attempts cover what the policies decide; RBAC allows all of them.
var attempts = func() []attempt {
	const onlyTheController = "only stayput's controller may write the annotation stayput.io/addresses"
	const onlyRelease = "of a RetainedIP only spec.release, labels and annotations may be changed"
	many := ""
	for i := range 65 {
		many += fmt.Sprintf("label-%d: x, ", i)
	}
	const notValid = `stayput.io/retain-ip: "true" is not valid: expected a duration such as 10m or 720h, or while-owned`
	all := []attempt{
		// The controller, on pods.
		{"the controller sets node affinity, node selector and annotations of a pod and removes our gate", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{metadata: {annotations: {seen: "yes"}}, spec: {
				nodeSelector: {zone: a}, schedulingGates: [{$patch: delete, name: stayput.io/placement}],
				affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: Exists}]}]}}}}}`), ""},
		{"the controller applies node affinity", asController,
			patch(podKind, "waiting", types.ApplyPatchType, `{apiVersion: v1, kind: Pod, metadata: {name: waiting, annotations: {seen: 'yes'}}, spec: {
				affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, preference: {matchExpressions: [{key: zone, operator: Exists}]}}]}}}}`), ""},
		{"the controller changes the image of a pod", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller changes the image of a running pod", asController,
			patch(podKind, "placed", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller changes a deadline of a pod", asController,
			merge(podKind, "waiting", `{spec: {activeDeadlineSeconds: 5}}`), "may change only the annotations, node affinity, "},
		{"the controller adds a toleration to a pod", asController,
			patch(podKind, "waiting", types.JSONPatchType, `[{op: add, path: /spec/tolerations/-, value: {key: k, operator: Exists}}]`),
			"may change only the annotations, node affinity, "},
		{"the controller changes a label of a pod", asController,
			merge(podKind, "waiting", `{metadata: {labels: {a: c}}}`), "may change only the annotations, node affinity, "},
		{"the controller removes a label of a pod", asController,
			merge(podKind, "waiting", `{metadata: {labels: {a: null}}}`), "may change only the annotations, node affinity, "},
		// Not the ordinary write, which the policy does not look at further.
		{"the controller removes our gate and changes the image of a pod", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}],
				schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller removes our gate and a label of a pod", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{metadata: {labels: {a: null}},
				spec: {schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller adds a finalizer to a pod", asController,
			merge(podKind, "waiting", `{metadata: {finalizers: [example.com/x]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller gives a pod an owner", asController,
			merge(podKind, "waiting", `{metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: other, uid: u}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller removes a foreign gate", asController,
			merge(podKind, "waiting", `{spec: {schedulingGates: [{name: stayput.io/placement}]}}`),
			"may remove only the scheduling gate"},
		{"the controller nominates a node for a gated pod", asController,
			merge(podKind, "waiting", `{status: {nominatedNodeName: node-1}}`, "status"), ""},
		{"the controller nominates a node for a pod that has one", asController,
			merge(podKind, "placed", `{status: {nominatedNodeName: ""}}`, "status"), "may change only nominatedNodeName"},
		{"the controller gives a pod an address", asController,
			merge(podKind, "waiting", `{status: {podIP: 192.0.2.7, podIPs: [{ip: 192.0.2.7}]}}`, "status"),
			"may change only nominatedNodeName"},
		{"the controller annotates a pod by its status", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {seen: "yes"}}, status: {nominatedNodeName: node-1}}`, "status"),
			"may change only nominatedNodeName"},
		{"the controller removes all gates", asController,
			merge(podKind, "waiting", `{spec: {schedulingGates: null}}`), "may remove only the scheduling gate"},
		{"the controller deletes a pod that has no node", asController, remove(podKind, "waiting"), ""},
		{"the controller deletes a pod that has a node", asController,
			remove(podKind, "placed"), "may not delete a pod that has a node"},

		{"the controller annotates a pod that has a node", asController,
			merge(podKind, "placed", `{metadata: {annotations: {seen: "yes"}}}`), "may not change a pod that has a node"},

		// The controller, on pods of pools.
		{"the controller tells a gated pod its addresses and removes our gate", asController,
			patch(podKind, "asking", types.StrategicMergePatchType, `{metadata: {annotations: {`+told+`}},
				spec: {schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`), ""},
		{"the controller tells a pod of a namespace with pools its addresses", asController,
			merge(podKind, "pooled/asking", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod its addresses that asks in Spiderpool's words", asController,
			merge(podKind, "theirs", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod its addresses whose namespace asks in Spiderpool's words", asController,
			merge(podKind, "theirs/asking", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod addresses that asks for none, whatever its words of Spiderpool", asController,
			merge(podKind, "neither", `{metadata: {annotations: {`+told+`}}}`), "on a pod that asks for addresses"},
		{"the controller has a pod ask for addresses in Spiderpool's words", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {ipam.spidernet.io/ippool: "{}", `+told+`}}}`),
			"and never those by which it asks"},
		{"the controller tells a pod that has a node its addresses", asController,
			merge(podKind, "late", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod that has a node its addresses and something else", asController,
			merge(podKind, "late", `{metadata: {annotations: {seen: "yes", `+told+`}}}`),
			"may not change a pod that has a node"},
		{"the controller deletes a pod that has a node and addresses of pools", asController,
			remove(podKind, "served"), ""},
		{"the controller deletes a pod that has a node and only asks", asController,
			remove(podKind, "late"), "may not delete a pod that has a node"},
		{"the controller changes the addresses of a pod", asController,
			merge(podKind, "served", `{metadata: {annotations: {`+told+`}}}`), "may write the annotation stayput.io/addresses only once"},
		{"the controller takes the addresses of a pod back", asController,
			merge(podKind, "served", `{metadata: {annotations: {stayput.io/addresses: null}}}`),
			"may write the annotation stayput.io/addresses only once"},
		{"the controller tells a pod addresses that asks for none", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {`+told+`}}}`), "on a pod that asks for addresses"},
		{"the controller has a pod ask for addresses", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {stayput.io/pools: blue}}}`), "and never those by which it asks"},
		{"the controller has a pod ask for addresses that it tells it", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {stayput.io/pools: blue, `+told+`}}}`),
			"and never those by which it asks"},

		// Others, on pods of pools.
		{"a new pod has addresses", asAdmin, create(fmt.Sprintf(newPod, "stayput.io/pools: blue, "+told)), onlyTheController},
		{"a user tells a pod its addresses", asAdmin,
			merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`), onlyTheController},
		{"a user changes the addresses of a pod", asAdmin,
			merge(podKind, "served", `{metadata: {annotations: {`+told+`}}}`), onlyTheController},
		{"a user takes the addresses of a pod", asAdmin,
			merge(podKind, "served", `{metadata: {annotations: {stayput.io/addresses: null}}}`), onlyTheController},
		{"a user tells a pod its addresses by its status", asAdmin,
			merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`, "status"), onlyTheController},
		{"a user binds a pod with addresses", asAdmin, bind("unbound", told), onlyTheController},
		{"a user binds a pod with addresses by the older way", asAdmin,
			create(fmt.Sprintf(newBinding, "unbound", told)), onlyTheController},
		{"a user binds a pod", asAdmin, bind("unbound", `seen: "yes"`), ""},
		{"a user annotates a pod that has addresses", asAdmin,
			merge(podKind, "served", `{metadata: {annotations: {seen: "yes", stayput.io/pools: green}}}`), ""},
		{"a user changes the status of a pod that has addresses", asAdmin,
			merge(podKind, "served", `{status: {message: hello}}`, "status"), ""},
		{"a template with addresses stays as it is", asAdmin,
			merge(stsKind, "told", `{spec: {template: {metadata: {annotations: {seen: "yes"}}}}}`), ""},
		{"a template gets other addresses", asAdmin,
			merge(stsKind, "told", `{spec: {template: {metadata: {annotations: {`+told+`}}}}}`),
			"stayput.io/addresses is not for pod templates"},
		{"a namespace with pools", asAdmin, merge("Namespace.v1.", "pooled", `{metadata: {annotations: {stayput.io/pools: "green,blue"}}}`), ""},
		{"a namespace with a bad value", asAdmin,
			merge("Namespace.v1.", "pooled", `{metadata: {annotations: {stayput.io/pools: "green blue"}}}`),
			`stayput.io/pools: "green blue" is not valid: expected names of pools`},

		// The controller, on other objects.
		{"the controller says which pools there are", asController, merge(cmKind, lab.SystemNamespace+"/stayput-installation",
			`{metadata: {annotations: {stayput.io/pools: "true", stayput.io/routed-pools: "true"}}}`), ""},
		{"the controller confirms the end of the installation", asController,
			merge(cmKind, lab.SystemNamespace+"/stayput-installation", `{metadata: {annotations: {stayput.io/uninstall: "true"}}}`),
			"may write only the ConfigMap stayput-gated-workloads, and whether there are pools"},
		{"the controller changes the installation", asController,
			merge(cmKind, lab.SystemNamespace+"/stayput-installation", `{data: {version: x}}`),
			"may write only the ConfigMap stayput-gated-workloads, and whether there are pools"},
		{"the controller holds a pool", asController,
			merge(poolKind, "blue", `{metadata: {finalizers: [stayput.io/in-use]}}`), ""},
		{"the controller adds a foreign finalizer to a pool", asController,
			merge(poolKind, "blue", `{metadata: {finalizers: [example.com/x]}}`), "may change only its finalizer"},
		{"the controller changes a pool", asController, merge(poolKind, "blue", `{spec: {disabled: true}}`),
			"may change only its finalizer"},
		{"the controller changes a pool of Spiderpool", asController,
			merge("SpiderIPPool.v2beta1.spiderpool.spidernet.io", "green", `{spec: {disable: true}}`), "may change only its finalizer"},
		{"the controller counts the addresses of a pool of Spiderpool", asController,
			merge("SpiderIPPool.v2beta1.spiderpool.spidernet.io", "green", `{status: {totalIPCount: 1}}`, "status"), ""},
		{"the controller writes its ConfigMap", asController,
			merge(cmKind, "stayput-gated-workloads", `{data: {workloads: "\n"}}`), ""},
		{"the controller applies its ConfigMap in a namespace without it", asController,
			patch(cmKind, "elsewhere/stayput-gated-workloads", types.ApplyPatchType,
				`{apiVersion: v1, kind: ConfigMap, metadata: {name: stayput-gated-workloads}, data: {workloads: "\n"}}`), ""},
		{"the controller deletes its ConfigMap", asController, remove(cmKind, "stayput-gated-workloads"), ""},
		{"the controller creates another ConfigMap", asController,
			create(`{apiVersion: v1, kind: ConfigMap, metadata: {name: other}}`), "may write only the ConfigMap"},
		{"the controller sets the workload of a RetainedIP, that its pod was scheduled, and releases it", asController,
			patch(retipKind, "web-1.node-2", types.ApplyPatchType, `{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-1.node-2},
				spec: {release: true, scheduled: pod/web-1, workload: {apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}}}`), ""},
		{"the controller withdraws a release", asController,
			merge(retipKind, "web-0.node-1", `{spec: {release: false}}`), ""},
		{"the controller changes a retention", asController,
			merge(retipKind, "web-0.node-1", `{spec: {retention: 1h}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller removes a field", asController,
			merge(retipKind, "web-0.node-1", `{spec: {podName: other}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller changes a status", asController,
			merge(retipKind, "web-0.node-1", `{status: {ips: ["10.0.0.1"]}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller changes metadata", asController,
			merge(retipKind, "web-0.node-1", `{metadata: {labels: {a: b}}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller annotates a RetainedIP", asController,
			merge(retipKind, "web-0.node-1", `{metadata: {annotations: {a: b}}}`),
			"may change only spec.workload, spec.scheduled and spec.release"},

		// Users, on RetainedIPs.
		{"an editor releases an address", asEditor, merge(retipKind, "web-1.node-2", `{spec: {release: true}}`), ""},
		{"an editor withdraws a release", asEditor, merge(retipKind, "web-0.node-1", `{spec: {release: null}}`), ""},
		{"an editor labels and annotates a RetainedIP", asEditor,
			merge(retipKind, "web-0.node-1", `{metadata: {labels: {a: b}, annotations: {a: b}}}`), ""},
		{"an editor applies a release", asEditor, patch(retipKind, "web-1.node-2", types.ApplyPatchType,
			`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-1.node-2}, spec: {release: true}}`), ""},
		{"an editor changes a status", asEditor, merge(retipKind, "web-0.node-1", `{status: {ips: ["10.0.0.1"]}}`), onlyRelease},
		{"an editor removes a status", asEditor, merge(retipKind, "web-0.node-1", `{status: null}`), onlyRelease},
		{"an editor says that a pod was scheduled to a node", asEditor,
			merge(retipKind, "web-0.node-1", `{spec: {scheduled: pod/web-0}}`), onlyRelease},
		{"an editor changes a workload", asEditor, merge(retipKind, "web-0.node-1", `{spec: {workload: {uid: v}}}`), onlyRelease},
		{"an editor removes a workload", asEditor, merge(retipKind, "web-0.node-1", `{spec: {workload: null}}`), onlyRelease},
		{"an editor changes a retention and releases the address", asEditor,
			merge(retipKind, "web-1.node-2", `{spec: {retention: 1h, release: true}}`), onlyRelease},
		{"an editor adds a finalizer", asEditor,
			merge(retipKind, "web-0.node-1", `{metadata: {finalizers: [example.com/x]}}`), "takes no finalizers"},
		{"an editor adds an owner", asEditor, merge(retipKind, "web-0.node-1",
			`{metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]}}`), "takes no finalizers"},
		{"an editor writes a long annotation", asEditor, merge(retipKind, "web-0.node-1",
			`{metadata: {annotations: {a: `+strings.Repeat("x", 17<<10)+`}}}`), "metadata.annotations: expected at most 16 KiB"},
		{"an editor writes many labels", asEditor, merge(retipKind, "web-0.node-1", `{metadata: {labels: {`+many+`}}}`),
			"expected at most 64 labels"},
		{"an editor writes a long annotation of a PersistentPodState", asEditor, merge(ppsKind, "web",
			`{metadata: {annotations: {a: `+strings.Repeat("x", 17<<10)+`}}}`), "metadata.annotations: expected at most 16 KiB"},
		{"an editor writes many labels of a PersistentPodState", asEditor, merge(ppsKind, "web",
			`{metadata: {labels: {`+many+`}}}`), "expected at most 64 labels"},
		{"an administrator says that a pod was scheduled to a node", asAdmin,
			merge(retipKind, "web-0.node-1", `{spec: {scheduled: pod/web-0}}`), ""},

		// The agent of node-1.
		{"an agent creates an object of its node", asAgent, create(fmt.Sprintf(newRetp, "node-1", "")), ""},
		{"an agent applies an object of its node", asAgent, patch(retipKind, "web-3.node-1", types.ApplyPatchType,
			`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-3.node-1}, spec: {nodeName: node-1, podName: web-3, retention: 10m}, status: {phase: Bound}}`), ""},
		{"an agent applies a change to an object of its node, without release and workload", asAgent,
			patch(retipKind, "web-0.node-1", types.ApplyPatchType,
				`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-0.node-1}, spec: {nodeName: node-1, podName: web-0, retention: 1h}, status: {phase: Bound}}`), ""},
		{"an agent withdraws a release", asAgent, merge(retipKind, "web-0.node-1", `{spec: {release: null}}`), ""},
		{"an agent deletes an object of its node", asAgent, remove(retipKind, "web-0.node-1"), ""},
		{"an agent creates an object of another node", asAgent,
			create(fmt.Sprintf(newRetp, "node-2", "")), "the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent takes the name of an object of another node", asAgent, create(retpNamed("db-0.node-2")),
			"may not write the RetainedIP db-0.node-2: expected the name POD.node-1"},
		{"an agent takes the name of an object of a node whose name ends like its own", asAgent,
			create(retpNamed("db-0.other.node-1")), "may not write the RetainedIP db-0.other.node-1"},
		{"an agent takes a name of no node", asAgent, create(retpNamed("db-0")), "may not write the RetainedIP db-0"},
		{"an agent takes the name of its node alone", asAgent, create(retpNamed("node-1")), "may not write the RetainedIP node-1"},
		{"an agent creates an object of a pod with a dot", asAgent,
			create(retpNamed(v1alpha1.RetainedIPName("db.0", "node-1"))), ""},
		{"an agent creates an object of a pod with a long name", asAgent,
			create(retpNamed(v1alpha1.RetainedIPName(strings.Repeat("d", 250), "node-1"))), ""},
		{"an agent changes what it wrote under the name of another node", asAgent,
			merge(retipKind, "db-9.node-2", `{status: {phase: Retained}}`), "may not write the RetainedIP db-9.node-2"},
		{"an agent deletes what it wrote under the name of another node", asAgent, remove(retipKind, "db-9.node-2"), ""},
		{"an agent changes what another node wrote under its name", asAgent,
			merge(retipKind, "elsewhere/db-8.node-1", `{status: {phase: Retained}}`),
			"the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent deletes what another node wrote under its name", asAgent, remove(retipKind, "elsewhere/db-8.node-1"), ""},
		{"an agent changes an object of another node", asAgent,
			merge(retipKind, "web-1.node-2", `{status: {phase: Retained}}`),
			"the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent deletes an object of another node", asAgent,
			remove(retipKind, "web-1.node-2"), "the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent creates an object with spec.release", asAgent,
			create(fmt.Sprintf(newRetp, "node-1", ", release: true")), "may not set spec.release"},
		{"an agent creates an object with a workload", asAgent,
			create(fmt.Sprintf(newRetp, "node-1", ", workload: {apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}")),
			"may not write spec.workload and spec.scheduled"},
		{"an agent changes the workload", asAgent,
			merge(retipKind, "web-0.node-1", `{spec: {workload: {name: other}}}`), "may not write spec.workload and spec.scheduled"},
		{"an agent removes the workload", asAgent,
			merge(retipKind, "web-0.node-1", `{spec: {workload: null}}`), "may not write spec.workload and spec.scheduled"},
		{"an agent creates an object that says that its pod was scheduled", asAgent,
			create(fmt.Sprintf(newRetp, "node-1", ", scheduled: pod/web-2")), "may not write spec.workload and spec.scheduled"},
		{"an agent says that a pod was scheduled to its node", asAgent,
			merge(retipKind, "web-0.node-1", `{spec: {scheduled: pod/web-0}}`), "may not write spec.workload and spec.scheduled"},
		{"an agent creates an object with a finalizer", asAgent,
			create(ownRetp(`finalizers: [example.com/x]`)), "may not write finalizers"},
		{"an agent adds a finalizer", asAgent,
			merge(retipKind, "web-0.node-1", `{metadata: {finalizers: [example.com/x]}}`), "may not write finalizers"},
		{"an agent creates an object with a label", asAgent, create(ownRetp(`labels: {a: b}`)), "may not write labels"},
		{"an agent adds a label", asAgent,
			merge(retipKind, "web-0.node-1", `{metadata: {labels: {a: b}}}`), "may not write labels"},
		{"an agent names its node as the owner", asAgent,
			create(ownRetp(`ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]`)), ""},
		{"an agent names another owner", asAgent,
			create(ownRetp(`ownerReferences: [{apiVersion: v1, kind: Node, name: node-2, uid: u}]`)),
			"may name no other owner than its node"},
		{"an agent adds an owner", asAgent, merge(retipKind, "web-0.node-1",
			`{metadata: {ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}]}}`),
			"may name no other owner than its node"},
		{"a token without a node creates an object", asStray, create(fmt.Sprintf(newRetp, "node-1", "")), "names no node"},
		{"a token without a node changes an object", asStray,
			merge(retipKind, "web-0.node-1", `{status: {phase: Bound}}`), "names no node"},
		{"a token without a node deletes an object", asStray, remove(retipKind, "web-0.node-1"), "names no node"},

		// The agent of node-1, on addresses of pools.
		{"an agent has a pod of which no node has spoken", asAgent,
			reports("10.6.168.101", "phase: Bound, podUID: one, nodeName: node-1"), ""},
		{"an agent has a pod whose predecessor was on another node", asAgent,
			reports("10.6.168.104", "phase: Bound, podUID: next, nodeName: node-1"), ""},
		{"an agent says that its pod is gone", asAgent,
			reports("10.6.168.102", "phase: Retained, podUID: two, nodeName: node-1"), ""},
		{"an agent says that the pod of another node is gone", asAgent,
			reports("10.6.168.103", "phase: Retained, podUID: three, nodeName: node-1"),
			"the agent of node node-1 may not write the status of a PodIP whose pod is on node node-2"},
		{"an agent speaks for another node", asAgent,
			reports("10.6.168.101", "phase: Bound, podUID: one, nodeName: node-2"), "may write of a PodIP only that"},
		{"an agent says that the pod was on no node", asAgent,
			reports("10.6.168.102", "phase: Retained, podUID: two, nodeName: null"), "may write of a PodIP only that"},
		{"an agent speaks of an earlier pod", asAgent,
			reports("10.6.168.104", "phase: Retained, podUID: last, nodeName: node-1"), "may write of a PodIP only that"},
		{"an agent allocates an address", asAgent,
			reports("10.6.168.101", "phase: Allocated, podUID: one, nodeName: node-1"), "may write of a PodIP only that"},
		{"an agent says that another machine has an address", asAgent,
			reports("10.6.168.101", "phase: Allocated, podUID: one, nodeName: node-1, conflict: '02:00:00:00:00:01'"), ""},
		{"an agent says so of a pod that has the address", asAgent,
			reports("10.6.168.101", "phase: Bound, podUID: one, nodeName: node-1, conflict: '02:00:00:00:00:01'"),
			"may write of a PodIP only that"},
		{"an agent says how to route to its pod, before it starts", asAgent, reports("10.8.168.101",
			"phase: Allocated, podUID: far, nodeName: node-1, podCIDR: 10.244.1.0/24"), ""},
		{"an agent says how to route to its pod", asAgent, reports("10.8.168.101",
			"phase: Bound, podUID: far, nodeName: node-1, podCIDR: 10.244.1.0/24"), ""},
		{"an agent says how to route to a pod of another node", asAgent, reports("10.8.168.102",
			"phase: Bound, podUID: away, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"the agent of node node-1 may not write the status of a PodIP whose pod is on node node-2"},
		{"an agent says how to route to another node", asAgent, reports("10.8.168.101",
			"phase: Bound, podUID: far, nodeName: node-2, podCIDR: 10.244.2.0/24"), "may write of a PodIP only that"},
		{"an agent says how to route to an earlier pod", asAgent, reports("10.8.168.101",
			"phase: Bound, podUID: last, nodeName: node-1, podCIDR: 10.244.1.0/24"), "may write of a PodIP only that"},
		{"an agent says how to route to a pod that is gone", asAgent, reports("10.8.168.101",
			"phase: Retained, podUID: far, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"may write status.podCIDR only of an address of mode Routed"},
		{"an agent says how to route to a pod of a link", asAgent, reports("10.6.168.101",
			"phase: Bound, podUID: one, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"may write status.podCIDR only of an address of mode Routed"},
		{"an agent allocates an address of a link", asAgent, reports("10.6.168.101",
			"phase: Allocated, podUID: one, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"may write status.podCIDR only of an address of mode Routed"},
		{"an agent says when an address becomes free", asAgent,
			reports("10.6.168.102", `phase: Retained, podUID: two, nodeName: node-1, expires: never`),
			"may not write status.expires"},
		{"an agent answers", asAgent, merge(answerKind, "node-1", `{spec: {round: 2}}`), ""},
		{"an agent applies its answer", asAgent, patch(answerKind, "node-1", types.ApplyPatchType,
			`{apiVersion: stayput.io/v1alpha1, kind: PodIPAnswer, metadata: {name: node-1, ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]}, spec: {round: 2}}`), ""},
		{"an agent answers for another node", asAgent, merge(answerKind, "node-2", `{spec: {round: 2}}`),
			"the agent of node node-1 may not write the PodIPAnswer node-2"},
		{"an agent answers for a node that has not answered", asAgent, create(fmt.Sprintf(newAnswer, "node-3")),
			"the agent of node node-1 may not write the PodIPAnswer node-3"},
		{"an agent adds a finalizer to its answer", asAgent,
			merge(answerKind, "node-1", `{metadata: {finalizers: [example.com/x]}}`), "may not write finalizers and labels"},
		{"an agent labels its answer", asAgent,
			merge(answerKind, "node-1", `{metadata: {labels: {a: b}}}`), "may not write finalizers and labels"},
		{"an agent names another owner of its answer", asAgent, merge(answerKind, "node-1",
			`{metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: node-2, uid: u}]}}`),
			"may name no other owner than its node"},
		{"a token without a node answers", asStray, merge(answerKind, "node-1", `{spec: {round: 2}}`), "names no node"},
		{"a token without a node says that a pod is gone", asStray,
			reports("10.6.168.102", "phase: Retained, podUID: two"), "names no node"},

		// PersistentPodStates.
		{"a second PersistentPodState for a workload", asAdmin,
			create(newState("second", "{apiVersion: apps/v1, kind: StatefulSet, name: web}")),
			"StatefulSet web already has a PersistentPodState: web"},
		{"a second PersistentPodState by another version of the group", asAdmin,
			create(newState("second", "{apiVersion: apps/v1beta2, kind: StatefulSet, name: web}")),
			"already has a PersistentPodState: web"},
		{"a PersistentPodState for another workload", asAdmin,
			create(newState("second", "{apiVersion: apps/v1, kind: StatefulSet, name: db}")), ""},
		{"a PersistentPodState for a workload of another group", asAdmin,
			create(newState("second", "{apiVersion: apps.kruise.io/v1beta1, kind: StatefulSet, name: web}")), ""},
		{"a PersistentPodState for a workload of another kind", asAdmin,
			create(newState("second", "{apiVersion: apps/v1, kind: Other, name: web}")), ""},
		{"a PersistentPodState for a workload of the same name in another namespace", asAdmin,
			create(strings.Replace(newState("second", "{apiVersion: apps/v1, kind: StatefulSet, name: web}"),
				"metadata: {", "metadata: {namespace: elsewhere, ", 1)), ""},

		// The objects whose annotations are checked. For the values, see TestAdmissionAndThePluginAgreeOnEveryValue.
		{"a pod", asAdmin, create(fmt.Sprintf(newPod, `stayput.io/retain-ip: "true"`)), notValid},
		{"a pod with a label and owner as of a StatefulSet's pods", asAdmin,
			create(labelled(ownedPod("guarded", "apps/v1", "StatefulSet", "bad", `stayput.io/retain-ip: "true"`, ""))),
			notValid},
		{"a pod with such a label asks for bad pools", asAdmin,
			create(labelled(ownedPod("guarded", "apps/v1", "StatefulSet", "bad", `stayput.io/pools: "blue,blue"`, ""))),
			`stayput.io/pools: "blue,blue" is not valid`},
		{"a pod with such a label and addresses", asAdmin,
			create(labelled(ownedPod("guarded", "apps/v1", "StatefulSet", "bad", "stayput.io/pools: blue, "+told, ""))),
			onlyTheController},
		{"a ReplicaSet with a label as of a Deployment's", asAdmin, create(strings.Replace(
			template("apps/v1", "ReplicaSet", `stayput.io/retain-ip: "true"`),
			"metadata: {name: new}", "metadata: {name: new, labels: {pod-template-hash: x}}", 1)), notValid},
		{"a pod gets a bad annotation by its status", asAdmin,
			merge(podKind, "placed", `{metadata: {annotations: {stayput.io/retain-ip: "true"}}}`, "status"), notValid},
		{"a user binds a pod with a bad annotation", asAdmin, bind("unbound", `stayput.io/retain-ip: "true"`), notValid},
		{"a pod of a kind that the policy does not check", asAdmin,
			create(ownedPod("guarded", "example.com/v1", "StatefulSet", "bad", `stayput.io/retain-ip: "true"`, "")), notValid},
		{"a pod gets a bad annotation later", asAdmin,
			merge(podKind, "placed", `{metadata: {annotations: {stayput.io/retain-ip: "true"}}}`), notValid},
		{"a bad object stays as it is", asAdmin,
			merge(stsKind, "bad", `{spec: {replicas: 1, template: {metadata: {annotations: {restarted: now}}}}}`), ""},
		{"a bad object is changed and stays bad", asAdmin,
			merge(stsKind, "bad", `{spec: {template: {metadata: {annotations: {stayput.io/identity: x}}}}}`), notValid},
		{"a bad object is fixed", asAdmin,
			merge(stsKind, "bad", `{spec: {template: {metadata: {annotations: {stayput.io/retain-ip: 10m}}}}}`), ""},
		{"several bad values are reported together", asAdmin,
			create(template("apps/v1", "StatefulSet", `stayput.io/retain-ip: "true", stayput.io/home-wait: soon`)),
			notValid + `; stayput.io/home-wait: "soon" is not valid: expected a duration such as 60s or 10m, or retention`},
		{"a workload's own annotations are its own", asAdmin,
			create(strings.Replace(template("apps/v1", "StatefulSet", ""), "metadata: {name: new}",
				`metadata: {name: new, annotations: {stayput.io/retain-ip: "true"}}`, 1)), ""},
	}
	for _, kind := range [][2]string{
		{"apps/v1", "Deployment"}, {"apps/v1", "ReplicaSet"}, {"apps/v1", "StatefulSet"}, {"apps/v1", "DaemonSet"},
		{"batch/v1", "Job"}, {"batch/v1", "CronJob"}, {"v1", "ReplicationController"},
		{"apps.kruise.io/v1beta1", "StatefulSet"}, {"apps.kruise.io/v1beta1", "CloneSet"},
		{"apps.kruise.io/v1beta1", "DaemonSet"},
	} {
		all = append(all,
			attempt{"a good " + kind[1] + " of " + kind[0], asAdmin,
				create(template(kind[0], kind[1], `stayput.io/retain-ip: 10m`)), ""},
			attempt{"a bad " + kind[1] + " of " + kind[0], asAdmin,
				create(template(kind[0], kind[1], `stayput.io/retain-ip: "true"`)), notValid},
			attempt{"a " + kind[1] + " of " + kind[0] + " that asks for pools", asAdmin,
				create(template(kind[0], kind[1], `stayput.io/pools: "blue,green@net1"`)), ""},
			attempt{"a " + kind[1] + " of " + kind[0] + " that asks for bad pools", asAdmin,
				create(template(kind[0], kind[1], `stayput.io/pools: "blue,blue"`)), `stayput.io/pools: "blue,blue" is not valid`},
			attempt{"a " + kind[1] + " of " + kind[0] + " with addresses", asAdmin,
				create(template(kind[0], kind[1], told)), "stayput.io/addresses is not for pod templates"})
	}
	return all
}()

// refused reports whether an admission policy refused a request with this message.
func refused(err error, why string) bool {
	return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy") && strings.Contains(err.Error(), why)
}

// It runs first, and shows that what the policies refuse is refused by nothing else.
func TestWithoutThePoliciesEveryAttemptIsAccepted(t *testing.T) {
	g := guardedWith(t, false)
	for _, a := range attempts {
		t.Run(a.name, func(t *testing.T) {
			// The API server caches RBAC.
			until(t, "the attempt to be accepted", func(ctx context.Context) bool {
				_, err := a.do(ctx, g, a.as(g))
				if err != nil && !apierrors.IsForbidden(err) {
					t.Fatal(err)
				}
				return err == nil
			})
		})
	}
	for _, p := range gateAttempts {
		if p.gates != nil && !slices.Contains(p.gates, "stayput.io/placement") {
			continue
		}
		made, err := create(p.pod)(testContext(t), g, g.admin)
		must.Do(t, err)
		if gates := gatesOf(made); slices.Contains(gates, "stayput.io/placement") &&
			!strings.Contains(p.pod, "stayput.io/placement") {
			t.Errorf("%s: gated without a policy: %v", p.name, gates)
		}
	}
}

func TestThePoliciesRefuseWhatTheyShouldAndNothingElse(t *testing.T) {
	g := guardedWith(t, true)
	for _, a := range attempts {
		if a.refusal == "" {
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			// A policy takes effect a second or two after it is applied.
			var err error
			until(t, "the refusal", func(ctx context.Context) bool {
				_, err = a.do(ctx, g, a.as(g))
				return err != nil
			})
			if !refused(err, a.refusal) {
				t.Errorf("%v, want a refusal with %q", err, a.refusal)
			}
		})
	}
	for _, a := range attempts {
		if a.refusal != "" {
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			_, err := a.do(testContext(t), g, a.as(g))
			must.Do(t, err)
		})
	}
}

// heard collects the warnings of an API server.
type heard struct {
	mu       sync.Mutex
	warnings []string
}

func (h *heard) HandleWarningHeader(_ int, _, text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.warnings = append(h.warnings, text)
}

func (h *heard) says(advice string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(h.warnings, func(w string) bool { return strings.Contains(w, advice) })
}

func TestARetentionThatDoesNothingIsWarnedOf(t *testing.T) {
	g := guardedWith(t, true)
	const retain, shared = "stayput.io/retain-ip: 10m", "stayput.io/retain-ip: 10m, stayput.io/identity: db"
	const home = "stayput.io/home: Required"
	const noAddress = "retained for a pod that never comes back: set stayput.io/identity"
	const noNode = "none comes back to its node: use a StatefulSet"
	for _, w := range []struct {
		apiVersion, kind, annotations string
		warned                        string
	}{
		{"apps/v1", "Deployment", retain, noAddress},
		{"batch/v1", "Job", retain, noAddress},
		{"batch/v1", "CronJob", retain, noAddress},
		{"apps.kruise.io/v1beta1", "CloneSet", retain, noAddress},
		{"batch/v1", "CronJob", `io.kubernetes.cri/reserved-ip-duration: "10"`, noAddress},
		{"apps/v1", "Deployment", home, noNode},
		{"batch/v1", "CronJob", home, noNode},
		{"apps/v1", "Deployment", shared + ", " + home, ""},
		{"apps/v1", "Deployment", home + ", stayput.io/pools: blue", ""},
		{"apps/v1", "StatefulSet", home, ""},
		{"apps/v1", "Deployment", shared, ""},
		{"batch/v1", "Job", shared, ""},
		{"batch/v1", "CronJob", "other: annotation", ""},
		{"apps/v1", "StatefulSet", retain, ""},
	} {
		t.Run(w.kind+" with "+w.annotations, func(t *testing.T) {
			until(t, "the answer", func(ctx context.Context) bool { // policies take effect within seconds
				h := &heard{}
				as := rest.CopyConfig(g.admin)
				as.WarningHandler = h
				_, err := create(template(w.apiVersion, w.kind, w.annotations))(ctx, g, as)
				must.Do(t, err)
				return h.says(noAddress) == (w.warned == noAddress) && h.says(noNode) == (w.warned == noNode)
			})
		})
	}
}

// The policy for the controller relies on it.
func TestOnlyTheNodeAffinityOfAPodCanBeChanged(t *testing.T) {
	g := guardedWith(t, true)
	for _, text := range []string{
		`{spec: {affinity: {podAntiAffinity: null}}}`,
		`{spec: {affinity: {podAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, podAffinityTerm: {topologyKey: zone}}]}}}}`,
	} {
		for _, as := range []*rest.Config{g.admin, g.controller} {
			if _, err := merge(podKind, "waiting", text)(testContext(t), g, as); !apierrors.IsInvalid(err) {
				t.Errorf("%s: %v", text, err)
			}
		}
	}
}

// A gateAttempt is a pod, and its gates once it has been created.
type gateAttempt struct {
	name  string
	pod   string
	gates []string
}

// labelled gives an owned pod the label of the pods of a StatefulSet.
func labelled(pod string) string {
	return strings.Replace(pod, "labels: {", "labels: {controller-revision-hash: bad-1, ", 1)
}

func ownedPod(namespace, apiVersion, kind, name, annotations, spec string) string {
	return fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: new-0, namespace: %s, labels: {statefulset.kubernetes.io/pod-name: new-0}, annotations: {%s}, ownerReferences: [
{apiVersion: %s, kind: %s, name: %s, uid: u, controller: true}]}, spec: {%s containers: [
{name: c, image: i, env: [{name: TWICE, value: a}, {name: TWICE, value: b}]}]}}`, namespace, annotations, apiVersion, kind, name, spec)
}

var gateAttempts = func() []gateAttempt {
	const (
		ours     = "stayput.io/placement"
		retain   = "stayput.io/retain-ip: 10m"
		reserved = `io.kubernetes.cri/reserved-ip-duration: "10"`
		pools    = "stayput.io/pools: blue"
		noPools  = `stayput.io/pools: ""`
		theirs   = `ipam.spidernet.io/ippool: "{}"`
	)
	sts := func(name, annotations, spec string) string {
		return ownedPod("guarded", "apps/v1", "StatefulSet", name, annotations, spec)
	}
	return []gateAttempt{
		{"a pod that asks for nothing", sts("web", "", ""), nil},
		{"a pod that asks for its address", sts("web", retain, ""), []string{ours}},
		{"a pod with OpenKruise's annotation", sts("web", reserved, ""), []string{ours}},
		{"a pod with both annotations", sts("web", retain+", "+reserved, ""), []string{ours}},
		{"a pod with other gates",
			sts("web", retain, "schedulingGates: [{name: a/b}, {name: c/d}],"), []string{"a/b", "c/d", ours}},
		{"a pod whose template has the gate",
			sts("web", retain, "schedulingGates: [{name: stayput.io/placement}, {name: a/b}],"), []string{ours, "a/b"}},
		{"a pod with a node", sts("web", retain, "nodeName: node-1,"), nil},
		{"a pod in the host network", sts("web", retain, "hostNetwork: true,"), nil},
		{"a pod of a DaemonSet", ownedPod("guarded", "apps/v1", "DaemonSet", "web", retain, ""), nil},
		{"a pod without an owner", fmt.Sprintf(newPod, retain), []string{ours}},
		{"a pod that only has another annotation of ours", sts("web", "stayput.io/home-wait: 10s", ""), nil},
		{"a pod of the system namespace", ownedPod("stayput-system", "apps/v1", "StatefulSet", "web", retain, ""), nil},

		{"a pod that asks for addresses of pools", sts("web", pools, ""), []string{ours}},
		{"a pod that asks for them, and to keep them", sts("web", retain+", "+pools, ""), []string{ours}},
		{"a pod that asks for them, with other gates",
			sts("web", pools, "schedulingGates: [{name: a/b}],"), []string{"a/b", ours}},
		{"a pod that asks for them, of a recorded workload", sts("db", pools, ""), []string{ours}},
		{"a pod that asks for none", sts("web", noPools, ""), nil},
		{"a pod that asks for them with a node", sts("web", pools, "nodeName: node-1,"), nil},
		{"a pod that asks for them in the host network", sts("web", pools, "hostNetwork: true,"), nil},
		{"a pod of a DaemonSet that asks for them",
			ownedPod("guarded", "apps/v1", "DaemonSet", "web", pools, ""), nil},
		{"a pod of a namespace with pools", ownedPod("pooled", "apps/v1", "StatefulSet", "web", "", ""), []string{ours}},
		{"a pod of a namespace with pools that asks for none",
			ownedPod("pooled", "apps/v1", "StatefulSet", "web", noPools, ""), nil},
		{"a pod of a namespace with pools with a node",
			ownedPod("pooled", "apps/v1", "StatefulSet", "web", "", "nodeName: node-1,"), nil},

		{"a pod that asks in Spiderpool's words", sts("web", theirs, ""), []string{ours}},
		{"a pod that asks for several interfaces", sts("web", `ipam.spidernet.io/ippools: "?"`, ""), []string{ours}},
		{"a pod that asks for a subnet of Spiderpool", sts("web", `ipam.spidernet.io/subnet: "?"`, ""), []string{ours}},
		{"a pod whose words of Spiderpool are empty", sts("web", `ipam.spidernet.io/ippool: ""`, ""), nil},
		{"a pod that asks in Spiderpool's words, and for none", sts("web", theirs+", "+noPools, ""), nil},
		{"a pod of a namespace with Spiderpool's defaults", ownedPod("theirs", "apps/v1", "StatefulSet", "web", "", ""),
			[]string{ours}},
		{"a pod of a namespace with Spiderpool's defaults that asks for none",
			ownedPod("theirs", "apps/v1", "StatefulSet", "web", noPools, ""), nil},
		{"a pod of a namespace with Spiderpool's defaults and none of ours",
			ownedPod("unpooled", "apps/v1", "StatefulSet", "web", "", ""), nil},
		{"a pod of that namespace that asks in Spiderpool's words",
			ownedPod("unpooled", "apps/v1", "StatefulSet", "web", theirs, ""), []string{ours}},

		{"a pod of a recorded workload", sts("db", "", ""), []string{ours}},
		{"a pod of a recorded workload of another group",
			ownedPod("guarded", "apps.kruise.io/v1beta1", "StatefulSet", "queue", "", ""), []string{ours}},
		{"a pod of a recorded workload in the host network", sts("db", "", "hostNetwork: true,"), []string{ours}},
		{"a pod of a recorded workload with a node", sts("db", "", "nodeName: node-1,"), nil},
		{"a pod of a recorded workload with other gates",
			sts("db", "", "schedulingGates: [{name: a/b}],"), []string{"a/b", ours}},
		{"a pod of a recorded workload that asks for its address", sts("db", retain, ""), []string{ours}},
		{"a pod of a workload whose name begins like a recorded one", sts("d", "", ""), nil},
		{"a pod of a workload whose kind ends like a recorded one's",
			ownedPod("guarded", "apps/v1", "Set", "db", "", ""), nil},
		{"a pod of a workload of the same name in another group",
			ownedPod("guarded", "apps.kruise.io/v1beta1", "StatefulSet", "db", "", ""), nil},
		{"a pod of a workload of the same name and another kind",
			ownedPod("guarded", "apps/v1", "ReplicaSet", "db", "", ""), nil},
		{"a pod of a workload of the same name in another namespace",
			ownedPod("elsewhere", "apps/v1", "StatefulSet", "db", "", ""), nil},
		{"a pod of a recorded workload without the label of a StatefulSet's pods",
			strings.Replace(sts("db", "", ""), "statefulset.kubernetes.io/pod-name", "a", 1), nil},
		{"a pod that a recorded workload owns but does not control",
			strings.Replace(sts("db", "", ""), "controller: true", "controller: false", 1), nil},
	}
}()

func gatesOf(pod *unstructured.Unstructured) (names []string) {
	gates, _, _ := unstructured.NestedSlice(pod.Object, "spec", "schedulingGates")
	for _, g := range gates {
		name, _, _ := unstructured.NestedString(g.(map[string]any), "name")
		names = append(names, name)
	}
	return names
}

func TestOnlyPodsThatMayHaveAHomeAreGated(t *testing.T) {
	g := guardedWith(t, true)
	for _, p := range slices.SortedFunc(slices.Values(gateAttempts), func(a, b gateAttempt) int {
		return len(b.gates) - len(a.gates) // first the gated ones, which wait for the policies
	}) {
		gated := slices.Contains(p.gates, "stayput.io/placement")
		if ok := t.Run(p.name, func(t *testing.T) {
			var gates []string
			if gated {
				until(t, "the gate", func(ctx context.Context) bool {
					made, err := create(p.pod)(ctx, g, g.admin)
					must.Do(t, err)
					gates = gatesOf(made)
					return slices.Contains(gates, "stayput.io/placement")
				})
			} else {
				made, err := create(p.pod)(testContext(t), g, g.admin)
				must.Do(t, err)
				gates = gatesOf(made)
			}
			if !slices.Equal(gates, p.gates) {
				t.Errorf("gates %v, want %v", gates, p.gates)
			}
		}); gated && !ok {
			t.FailNow() // the others would wait as long
		}
	}

	// Spiderpool's words count by a right of the controller alone.
	rights, err := manifests(testContext(t), "34-*.yaml")
	must.Do(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		_, err := g.c.Kubectl(ctx, rights, "apply", "--server-side", "-f", "-")
		must.Do(t, err)
	})
	kubectl(t, g.c, "delete", "clusterrolebinding", "stayput-controller-pools-spiderpool")
	for _, pod := range []string{
		ownedPod("guarded", "apps/v1", "StatefulSet", "web", `ipam.spidernet.io/ippool: "{}"`, ""),
		ownedPod("theirs", "apps/v1", "StatefulSet", "web", "", ""),
	} {
		until(t, "Spiderpool's words not to count", func(ctx context.Context) bool {
			made, err := create(pod)(ctx, g, g.admin)
			must.Do(t, err)
			return len(gatesOf(made)) == 0
		})
	}
}

// If the policy's parameter were a custom resource, it would be unknown for 30 s here, and pods would slip through.
func TestPodsAreGatedFromTheAPIServersFirstRequestOn(t *testing.T) {
	g := guardedWith(t, true)
	must.Do(t, g.c.APIServer.Kill())
	must.Do(t, g.c.APIServer.Start(testContext(t)))
	created := 0
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		for _, pod := range []string{
			ownedPod("guarded", "apps/v1", "StatefulSet", "web", "stayput.io/retain-ip: 10m", ""),
			ownedPod("guarded", "apps/v1", "StatefulSet", "db", "", ""),
		} {
			made, err := create(pod)(testContext(t), g, g.admin)
			if err != nil {
				continue // the API server is still starting
			}
			created++
			if !slices.Contains(gatesOf(made), "stayput.io/placement") {
				t.Fatalf("pod %d is not gated: %s", created, pod)
			}
		}
	}
	if created < 10 {
		t.Errorf("only %d pods were created", created)
	}
}

func TestAdmissionAndThePluginAgreeOnEveryValue(t *testing.T) {
	g := guardedWith(t, true)
	many := func(s string, n int) string { return strings.Repeat(s, n) }
	var cases []map[string]string
	add := func(key string, values ...string) {
		for _, v := range values {
			m := map[string]string{key: v}
			if key != retention.AnnotationRetainIP && key != retention.AnnotationReservedIPDuration {
				m[retention.AnnotationRetainIP] = "10m"
			}
			cases = append(cases, m)
		}
	}
	add(retention.AnnotationRetainIP,
		"10m", "720h", "while-owned", "1h30m", "1.5h", ".5h", "1.h", "+10m", "100ms", "1ns", "10us", "10µs", "10μs",
		"0h0m1s", "1h1h", "0000000000000000000000010m",
		"2562047h", "2562047h47m16.854775807s", "9223372036854775807ns", "153722867m", "9223372036s",
		"1.99999999999999999999999999h", "0.00000000000000000001h1ns",
		"1.12345678h", "1.12345678901m", "1.12345678901s", "9999999999ms", "99999999999us", "12345678901ms5m",
		many("1s", 500), many("0", 1000)+"1h",
		"true", "", "0", "+0", "-0", "0s", "-10m", "+-10m", "10", "10 m", " 10m", "10m ", "\n10m", "10m\n", "10M", "1d", "1w",
		"h", ".", ".h", "1.5.5h", "1,5h", "1e3s", "0x10s", "1_000s", "٣m", "10mm", "m10",
		"while-Owned", "While-owned", "while owned", "forever", "0.1ns", "0.0000000000001h",
		"2562048h", "2562047h48m", "9223372036854775808ns", "9223372037s", "153722868m", "12345678h", "9999999999m",
		"99999999999s", "9999999h", "1h12345678h", "9999999999m1ms",
		many("9", 300), many("9", 300)+"h", many("1h", 2000)+"x", "a\"b\\c", "\u2028", many("é", 200))
	add(retention.AnnotationReservedIPDuration,
		"1", "10", "010", "153722867", many("0", 100)+"1", "000153722867",
		"0", "00", "-1", "-0", "+10", "+1", "1.5", "10m", "10x", "", " 10", "10 ", "10\n", "true", "1e3", "1_0", "0x1", "٣",
		"153722868", "999999999", "1000000000", "9223372036854775807", "9223372036854775808", many("9", 300))
	add(retention.AnnotationWhenScaled,
		"Retain", "Release", "Delete", "", "retain", "Keep", "Retain ", "delete", "Retain\n")
	add(retention.AnnotationWhenDeleted, "Retain", "Release", "Delete", "", "release", "RELEASE")
	add(retention.AnnotationWhenMoved, "Retain", "Release", "Delete", "", "move", "Release ")
	add(retention.AnnotationIdentity, "a", "0", "db", "a-b", "a--b", many("a", 63), "9-a",
		"", "a/b", "A", "aB", "-a", "a-", "-", "a.b", "a_b", "a b", "a\n", "\na", many("a", 64), "é", many("a", 62)+"-")
	add(retention.AnnotationWhenInUse, "Wait", "AllocateNew", "", "wait", "Allocate", "Wait ")
	cases = append(cases,
		map[string]string{},
		map[string]string{"other/annotation": "true"},
		map[string]string{"stayput.io/unknown": "true"},
		map[string]string{"stayput.io/unknown": "true", retention.AnnotationRetainIP: "10m"},
		map[string]string{retention.AnnotationRetainIP: "10m", retention.AnnotationReservedIPDuration: "10"},
		map[string]string{retention.AnnotationRetainIP: "true", retention.AnnotationReservedIPDuration: "10"},
		map[string]string{retention.AnnotationRetainIP: "10m", retention.AnnotationReservedIPDuration: "0"},
		map[string]string{retention.AnnotationRetainIP: "while-owned", retention.AnnotationReservedIPDuration: "10"},
		map[string]string{retention.AnnotationReservedIPDuration: "10", retention.AnnotationWhenScaled: "Retain"},
		map[string]string{retention.AnnotationWhenScaled: "Retain"},
		map[string]string{retention.AnnotationWhenDeleted: "Retain"},
		map[string]string{retention.AnnotationWhenMoved: "Retain"},
		map[string]string{retention.AnnotationIdentity: "db"},
		map[string]string{retention.AnnotationWhenInUse: "Wait"},
		map[string]string{retention.AnnotationWhenInUse: "Wait", retention.AnnotationIdentity: "db"},
		map[string]string{retention.AnnotationIdentity: "A"},
	)
	until(t, "the policy", func(ctx context.Context) bool {
		_, err := create(fmt.Sprintf(newPod, `stayput.io/retain-ip: "true"`))(ctx, g, g.admin)
		return err != nil
	})
	accepted, turnedDown := 0, 0
	for _, annotations := range cases {
		_, _, want := retention.Parse(annotations)
		_, got := g.c.Client().CoreV1().Pods("guarded").Create(testContext(t), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "new", Annotations: annotations},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{DryRun: dryRun})
		if got != nil && !refused(got, "stayput-addresses") {
			t.Errorf("%q: %v", annotations, got)
			continue
		}
		if (want == nil) != (got == nil) {
			t.Errorf("%q: the plugin says %v, admission %v", annotations, want, got)
		}
		if got == nil {
			accepted++
			continue
		}
		turnedDown++
		var bad *retention.AnnotationError
		if errors.As(want, &bad) && (!strings.Contains(got.Error(), bad.Key) || !strings.Contains(got.Error(), "expected")) &&
			!overflows(bad.Value) {
			t.Errorf("%q: %v names neither %s nor what is expected", annotations, got, bad.Key)
		}
		if len(got.Error()) > 600 {
			t.Errorf("%q: a message of %d bytes", annotations, len(got.Error()))
		}
	}
	t.Logf("%d accepted, %d refused", accepted, turnedDown)

	// Only the controller reads home-wait and home.
	for value, ok := range map[string]bool{
		"60s": true, "10m": true, "retention": true, "1h30m": true, "+1s": true,
		"": false, "0s": false, "-1s": false, "60": false, "Retention": false, "forever": false, "while-owned": false,
	} {
		_, err := create(fmt.Sprintf(newPod, fmt.Sprintf("stayput.io/home-wait: %q", value)))(testContext(t), g, g.admin)
		invalid := fmt.Sprintf("stayput.io/home-wait: %q is not valid: "+
			"expected a duration such as 60s or 10m, or retention", value)
		if (err == nil) != ok || err != nil && !refused(err, invalid) {
			t.Errorf("home-wait %q: %v", value, err)
		}
	}
	for value, ok := range map[string]bool{"Required": true, "Preferred": true, "": false, "preferred": false, "node node-1": false} {
		asks := fmt.Sprintf("stayput.io/retain-ip: 10m, stayput.io/home: %q", value)
		_, err := create(fmt.Sprintf(newPod, asks))(testContext(t), g, g.admin)
		invalid := fmt.Sprintf("stayput.io/home: %q is not valid: expected Required or Preferred", value)
		if (err == nil) != ok || err != nil && !refused(err, invalid) {
			t.Errorf("home %q: %v", value, err)
		}
	}
}

func TestAdmissionAndTheControllerAgreeOnPools(t *testing.T) {
	g := guardedWith(t, true)
	asks := func(ctx context.Context, value string) error {
		_, err := g.c.Client().CoreV1().Pods("guarded").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "new", Annotations: map[string]string{v1alpha1.AnnotationPools: value}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	until(t, "the policy", func(ctx context.Context) bool { return asks(ctx, "?") != nil })
	many := func(s string, n int) string { return strings.Repeat(s, n) }
	good, bad := 0, 0
	for _, value := range []string{
		"", " ", "blue", "blue-v4,blue-v6,green@net1", " blue , green ", "0", "a.b-c", many("a", 253), "blue@net1,blue",
		"blue@a-b_c.d:", "blue@eth0.100", "blue@" + many("a", 15), "a@b@c", "blue@é", "blue\t,green",
		",", "blue,", ",blue", "blue,,green", "blue green", "Blue", "-blue", "blue-", "blue_4", "blue@", "@net1", "blue@.",
		"blue@..", "blue@a/b", "blue@" + many("a", 16), many("a", 254), "blue,blue", "blue,blue@eth0", "blue@net1,blue@net1",
		"blue;green", "blue@a b", "\"",
	} {
		_, want := rules.ParseWants(value)
		got := asks(testContext(t), value)
		if (want == nil) != (got == nil) || got != nil && !refused(got, "stayput.io/pools: ") {
			t.Errorf("%q: the controller says %v, admission %v", value, want, got)
		}
		if got == nil {
			good++
		} else {
			bad++
		}
	}
	if good < 10 || bad < 10 {
		t.Errorf("%d accepted, %d refused", good, bad)
	}
}

// By these ways the API server takes no annotations at all, today.
func TestNoOtherWayLeadsToTheAddressesOfAPod(t *testing.T) {
	g := guardedWith(t, true)
	for subresource, change := range map[string]string{
		"ephemeralcontainers": `{metadata: {annotations: {` + told + `}}, spec: {ephemeralContainers: [{name: e, image: i}]}}`,
		"resize":              `{metadata: {annotations: {` + told + `}}, spec: {containers: [{name: c, resources: {}}]}}`,
	} {
		is, err := patch(podKind, "late", types.StrategicMergePatchType, change, subresource)(testContext(t), g, g.admin)
		if refused(err, "stayput.io/addresses") {
			continue
		}
		must.Do(t, err)
		if has, ok := is.GetAnnotations()[v1alpha1.AnnotationAddresses]; ok {
			t.Errorf("by %s the pod has the addresses %s", subresource, has)
		}
	}
}

// Where pools are off, the controller may claim no address: then it may give a pod none either, nor may anything else.
func TestWithoutPoolsNothingGivesAPodAddresses(t *testing.T) {
	g := guardedWith(t, true)
	rights, err := manifests(testContext(t), "34-*.yaml")
	must.Do(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		_, err := g.c.Kubectl(ctx, rights, "apply", "--server-side", "-f", "-")
		must.Do(t, err)
		must.Within(t, patience, "the right to claim addresses", func() bool {
			_, err := create(newPodIP("10.6.168.105"))(ctx, g, g.controller)
			return err == nil
		})
	})
	// So does helm upgrade --set pools.enabled=false.
	kubectl(t, g.c, "delete", "clusterrolebinding", "stayput-controller-pools")
	const refusal = "only stayput's controller may write the annotation stayput.io/addresses, and only where"
	tell := merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`)
	until(t, "the refusal", func(ctx context.Context) bool {
		_, err = tell(ctx, g, g.controller)
		return err != nil
	})
	if !refused(err, refusal) {
		t.Errorf("the controller: %v, want a refusal with %q", err, refusal)
	}
	for name, do := range map[string]try{
		"a new pod":          create(fmt.Sprintf(newPod, told)),
		"a pod":              tell,
		"a pod's status":     merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`, "status"),
		"a binding":          bind("unbound", told),
		"an older binding":   create(fmt.Sprintf(newBinding, "unbound", told)),
		"a pod that has any": merge(podKind, "served", `{metadata: {annotations: {`+told+`}}}`),
	} {
		if _, err := do(testContext(t), g, g.admin); !refused(err, refusal) {
			t.Errorf("%s: %v, want a refusal with %q", name, err, refusal)
		}
	}
	if _, err := create(template("apps/v1", "StatefulSet", told))(testContext(t), g, g.admin); !refused(err,
		"stayput.io/addresses is not for pod templates") {
		t.Errorf("a template: %v, want a refusal", err)
	}
}

// overflows reports whether the value would be a Go duration if it were not longer than 292 years. The policy's pattern
// only catches much larger ones; for these, the API server reports an error of its own.
func overflows(value string) bool {
	return slices.Contains([]string{
		"2562048h", "2562047h48m", "9223372036854775808ns", "9223372037s", "153722868m", "9999999h",
	}, value)
}

func TestTheCRDsRefuseWhatMakesNoSense(t *testing.T) {
	g := guardedWith(t, true)
	target := "{apiVersion: apps/v1, kind: StatefulSet, name: new}"
	state := func(target, rest string) string {
		return fmt.Sprintf("{apiVersion: apps.kruise.io/v1alpha1, kind: PersistentPodState, metadata: {name: new}, "+
			"spec: {targetRef: %s%s}}", target, rest)
	}
	preferred := func(weight int) string {
		return fmt.Sprintf(", preferredPersistentTopology: [{weight: %d, preference: {nodeTopologyKeys: [zone]}}]", weight)
	}
	const required = ", requiredPersistentTopology: {nodeTopologyKeys: [zone]}"
	many := ""
	for i := range 65 {
		many += fmt.Sprintf("label-%d: x, ", i)
	}
	newer := func(yaml string) string { return strings.Replace(yaml, "/v1alpha1", "/v1beta1", 1) }
	for _, c := range []struct {
		name, refusal string
		do            try
	}{
		{"weight 0", "weight", create(state(target, preferred(0)))},
		{"weight 1", "", create(state(target, preferred(1)))},
		{"weight 100", "", create(state(target, preferred(100)))},
		{"weight 101", "weight", create(state(target, preferred(101)))},
		{"no target", "targetRef",
			create("{apiVersion: apps.kruise.io/v1alpha1, kind: PersistentPodState, metadata: {name: new}, " +
				"spec: {requiredPersistentTopology: {nodeTopologyKeys: [zone]}}}")},
		{"an empty target", "targetRef.name: Required", create(state("{}", required))},
		{"a target of empty strings", "at least 1 chars", create(state(`{apiVersion: "", kind: "", name: ""}`, required))},
		{"a target without a name", "targetRef.name: Required",
			create(state("{apiVersion: apps/v1, kind: StatefulSet}", required))},
		{"another target", "targetRef is immutable", merge(ppsKind, "web", "{spec: {targetRef: {name: other}}}")},
		{"a Deployment", "no stable names", create(state("{apiVersion: apps/v1, kind: Deployment, name: web}", required))},
		{"a ReplicaSet", "no stable names", create(state("{apiVersion: apps/v1, kind: ReplicaSet, name: web}", required))},
		{"a kind of the same name in another group", "",
			create(state("{apiVersion: example.com/v1, kind: Deployment, name: web}", required))},
		{"no topology", "at least one of", create(state(target, ""))},
		{"an empty list of topologies", "at least one of", create(state(target, ", preferredPersistentTopology: []"))},
		{"a topology without keys", "at least 1 items",
			create(state(target, ", requiredPersistentTopology: {nodeTopologyKeys: []}"))},
		{"keys by both names", "expected either keys",
			create(state(target, ", requiredPersistentTopology: {nodeTopologyKeys: [zone], keys: [zone]}"))},
		{"keys by no name", "expected either keys", create(state(target, ", requiredPersistentTopology: {}"))},
		{"keys by v1beta1's name", "", create(newer(state(target, ", requiredPersistentTopology: {keys: [zone]}")))},
		{"a preference by v1beta1's name", "",
			create(newer(state(target, ", preferredPersistentTopology: [{weight: 1, preference: {keys: [zone]}}]")))},
		{"no keys by v1beta1's name", "at least 1 items",
			create(newer(state(target, ", requiredPersistentTopology: {keys: []}")))},
		{"weight 0 in v1beta1", "weight", create(newer(state(target, preferred(0))))},
		{"another target in v1beta1", "targetRef is immutable",
			merge("PersistentPodState.v1beta1.apps.kruise.io", "web", "{spec: {targetRef: {name: other}}}")},
		{"an unknown retention policy", "persistentPodStateRetentionPolicy",
			create(state(target, required+", persistentPodStateRetentionPolicy: Never"))},
		{"the topology changes", "",
			merge(ppsKind, "web", "{spec: {requiredPersistentTopology: {nodeTopologyKeys: [kubernetes.io/hostname]}}}")},
		{"a RetainedIP moves to another node", "spec.nodeName is immutable",
			merge(retipKind, "web-0.node-1", "{spec: {nodeName: node-2}}")},
		{"a RetainedIP with an unknown phase", "status.phase", merge(retipKind, "web-0.node-1", "{status: {phase: Free}}")},
		{"a pool", "", create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.1-10.7.0.9, 10.7.1.0/24], gateway: 10.7.2.1`))},
		{"a pool of IPv6", "", create(newPool(`mode: Routed, subnet: "fd00:7::/64", addresses: ["fd00:7::1-fd00:7::9"]`))},
		{"a pool without a mode", "spec.mode", create(newPool(`subnet: 10.7.0.0/16`))},
		{"a pool of an unknown mode", "spec.mode", create(newPool(`mode: L3, subnet: 10.7.0.0/16`))},
		{"a pool without a subnet", "spec.subnet", create(newPool(`mode: L2`))},
		{"a pool whose subnet has host bits", "expected a CIDR without host bits", create(newPool(`mode: L2, subnet: 10.7.0.1/16`))},
		{"a pool of IPv4-mapped addresses", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::ffff:10.7.0.0/112"`))},
		{"a pool of them in capitals", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::FFFF:0a07:0/112"`))},
		{"a pool that contains them", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::/64"`))},
		{"a pool of all addresses", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::/0"`))},
		{"a pool with a mapped address", "expected an address, a range",
			create(newPool(`mode: L2, subnet: "fd00:7::/64", addresses: ["::ffff:10.7.0.1"]`))},
		{"a pool with many labels to select", "expected at most 64 labels and 64 expressions",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, nodeSelector: {matchLabels: {` + many + `}}`))},
		{"a RetainedIP of a long name", "Too long", merge(retipKind, "web-0.node-1", `{spec: {podName: `+strings.Repeat("x", 254)+`}}`)},
		{"a RetainedIP with many addresses", "must have at most 256 items",
			merge(retipKind, "web-0.node-1", `{status: {ips: [`+strings.Repeat("10.0.0.1, ", 257)+`]}}`)},
		{"a PersistentPodState with many keys", "must have at most 16 items",
			create(state(target, `, requiredPersistentTopology: {nodeTopologyKeys: [`+strings.Repeat("zone, ", 17)+`]}`))},
		{"a pool with an address outside", "addresses: expected addresses in subnet",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: [10.8.0.1]`))},
		{"a pool with an address of the other family", "addresses: expected addresses in subnet",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: ["fd00::1"]`))},
		{"a pool with no address", "expected an address, a range",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: [web]`))},
		{"a pool whose gateway is outside", "gateway: expected an address in subnet",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, gateway: 10.8.0.1`))},
		{"a routed pool with a gateway", "gateway and routes are for mode L2",
			create(newPool(`mode: Routed, subnet: 10.7.0.0/16, gateway: 10.7.0.1`))},
		{"a pool with a route without a destination", "spec.routes[0].dst",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, routes: [{dst: x, gw: 10.7.0.1}]`))},
		{"a pool moves", "spec.subnet is immutable", merge(poolKind, "blue", `{spec: {subnet: 10.0.0.0/8}}`)},
		{"a pool gets another mode", "spec.mode is immutable", merge(poolKind, "blue", `{spec: {mode: Routed, gateway: null}}`)},
		{"a pool grows", "", merge(poolKind, "blue", `{spec: {addresses: [10.6.0.0/17]}}`)},
		{"a PodIP", "", create(newPodIP("10.6.168.105"))},
		{"a PodIP of IPv6", "", create(newPodIP("fd00-0000-0000-0000-0000-0000-0000-0001"))},
		{"a PodIP of a short IPv6 address", "metadata.name: expected", create(newPodIP("fd00--1"))},
		{"a PodIP with a leading zero", "metadata.name: expected", create(newPodIP("010.6.168.105"))},
		{"a PodIP of a name", "metadata.name: expected", create(newPodIP("web.a"))},
		{"a PodIP whose node has no prefix", "status.podCIDR: expected a CIDR",
			merge(podIPKind, "10.8.168.102", `{status: {podCIDR: 10.244.2.1}}`, "status")},
		{"a PodIP changes its pool", "spec.pool is immutable", merge(podIPKind, "10.6.168.101", `{spec: {pool: green}}`)},
		{"a second PodIPRoll", "metadata.name: expected cluster",
			create(`{apiVersion: stayput.io/v1alpha1, kind: PodIPRoll, metadata: {name: other}, spec: {round: 1, mark: "2026-01-01T00:00:00.000000Z"}}`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.do(testContext(t), g, g.admin)
			switch {
			case c.refusal == "":
				must.Do(t, err)
			case !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.refusal):
				t.Errorf("%v, want a refusal with %q", err, c.refusal)
			}
		})
	}
}

// The manifests of OpenKruise's manual, user-manuals/persistentpodstate, with other images, and one of the version that
// newer releases have.
const kruiseManual = `
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata:
  name: echoserver
  namespace: elsewhere
spec:
  targetRef:
    # Native k8s or kruise StatefulSet
    # only support StatefulSet
    apiVersion: apps.kruise.io/v1beta1
    kind: StatefulSet
    name: echoserver
  # required node affinity, as follows: Pod rebuild will force deployment to the same zone
  requiredPersistentTopology:
    nodeTopologyKeys:
      - failure-domain.beta.kubernetes.io/zone[,other node labels]
  # preferred node affinity, as follows: Pod rebuild will prefer deployment to the same node
  preferredPersistentTopology:
    - preference:
        nodeTopologyKeys:
          - kubernetes.io/hostname[,other node labels]
      # int [1 - 100]
      weight: 100
---
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata:
  name: game
  namespace: elsewhere
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: game}
  persistentPodAnnotations:
  - key: cni.projectcalico.org/podIP
  persistentPodStateRetentionPolicy: WhenScaled
  preferredPersistentTopology:
  - preference: {nodeTopologyKeys: [kubernetes.io/hostname]}
    weight: 100
---
apiVersion: apps.kruise.io/v1beta1
kind: PersistentPodState
metadata:
  name: newer
  namespace: elsewhere
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: newer}
  requiredPersistentTopology: {keys: [topology.kubernetes.io/zone]}
  preferredPersistentTopology:
  - preference: {keys: [kubernetes.io/hostname]}
    weight: 100
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: echoserver
  namespace: elsewhere
  annotations:
    kruise.io/auto-generate-persistent-pod-state: "true"
    kruise.io/preferred-persistent-topology: kubernetes.io/hostname[,other node labels]
    kruise.io/required-persistent-topology: failure-domain.beta.kubernetes.io/zone[,other node labels]
spec:
  serviceName: echoserver
  replicas: 0
  selector: {matchLabels: {app: echoserver}}
  template:
    metadata:
      labels: {app: echoserver}
      annotations:
        io.kubernetes.cri/reserved-ip-duration: "10"
    spec: {containers: [{name: echoserver, image: i}]}
`

func TestTheManifestsOfOpenKruisesManualApply(t *testing.T) {
	g := guardedWith(t, true)
	_, err := g.c.Kubectl(testContext(t), kruiseManual, "apply", "--server-side", "-f", "-")
	must.Do(t, err)
	_, err = g.c.Kubectl(testContext(t), kruiseManual, "apply", "-f", "-") // client-side, as most people do
	must.Do(t, err)
}

func TestKubectlShowsTheColumnsAndDescriptions(t *testing.T) {
	g := guardedWith(t, true)
	fields := func(args ...string) (rows [][]string) {
		for line := range strings.Lines(kubectl(t, g.c, append([]string{"-n", "guarded"}, args...)...)) {
			rows = append(rows, strings.Fields(line))
		}
		return rows
	}
	retips := fields("get", "retip")
	want := [][]string{
		{"NAME", "IP", "NODE", "PHASE", "EXPIRES", "AGE"},
		{"db-9.node-2", "10.244.1.9", "node-1", "Bound"},
		{"web-0.node-1", "10.244.1.5", "node-1", "Retained", "2042-11-21T07:12:55Z"},
		{"web-1.node-2", "10.244.2.5", "node-2", "Bound"},
	}
	for i, row := range want {
		if len(retips) != len(want) || !slices.Equal(retips[i][:len(row)], row) {
			t.Fatalf("get retip: %v, want %v", retips, want)
		}
	}
	wide := kubectl(t, g.c, "get", "retip", "-A", "-o", "wide")
	if !strings.Contains(wide, `["10.244.1.5","fd00::5"]`) || !strings.HasPrefix(wide, "NAMESPACE") {
		t.Errorf("get retip -o wide: %s", wide)
	}
	one := fields("get", "retip", "--field-selector", "spec.nodeName=node-2", "-o", "name")
	if len(one) != 1 || one[0][0] != "retainedip.stayput.io/web-1.node-2" {
		t.Errorf("by node: %v", one)
	}
	pools := fields("get", "pippool")
	if !slices.Equal(pools[0], []string{"NAME", "MODE", "SUBNET", "TOTAL", "USED", "FREE", "AGE"}) ||
		!slices.Equal(pools[1][:3], []string{"blue", "L2", "10.6.0.0/16"}) {
		t.Errorf("get pippool: %v", pools)
	}
	ips := fields("get", "pip", "--field-selector", "spec.pool=blue")
	if len(ips) != 5 || !slices.Equal(ips[0], []string{"NAME", "POOL", "NAMESPACE", "POD", "NODE", "PHASE", "EXPIRES", "AGE"}) ||
		!slices.Equal(ips[2][:6], []string{"10.6.168.102", "blue", "guarded", "web-2", "node-1", "Bound"}) {
		t.Errorf("get pip: %v", ips)
	}
	states := fields("get", "persistentpodstates")
	if !slices.Equal(states[0], []string{"NAME", "TARGET", "PODS", "RECORDED", "AGE"}) || states[1][1] != "web" {
		t.Errorf("get persistentpodstates: %v", states)
	}
	for _, field := range []string{
		"retainedips.spec", "retainedips.spec.release", "retainedips.status.expires", "retainedips.status.ips",
		"persistentpodstates.spec.targetRef", "persistentpodstates.spec.requiredPersistentTopology",
		"persistentpodstates.spec.preferredPersistentTopology.weight",
		"persistentpodstates.spec.persistentPodAnnotations.key",
		"persistentpodstates.spec.persistentPodStateRetentionPolicy", "persistentpodstates.status.podStates",
		"podippools.spec.addresses", "podippools.status.addresses.free", "podips.spec.quarantine.reason",
		"podips.status.phase", "podips.status.podCIDR", "podiprolls.spec.mark", "podipanswers.spec.held.address",
	} {
		text := kubectl(t, g.c, "explain", field)
		if !strings.Contains(text, "DESCRIPTION:") || strings.Contains(text, "<empty>") {
			t.Errorf("explain %s: %s", field, text)
		}
	}
}

// The admission plugins report compile errors only in the status of a policy.
func TestEveryPolicyIsBoundAndFreeOfWarnings(t *testing.T) {
	g := guardedWith(t, true)
	ctx := testContext(t)
	api := g.c.Client().AdmissionregistrationV1()
	ours := metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=stayput"}
	validating, err := api.ValidatingAdmissionPolicies().List(ctx, ours)
	must.Do(t, err)
	mutating, err := api.MutatingAdmissionPolicies().List(ctx, ours)
	must.Do(t, err)
	policies := map[string]bool{}
	for _, p := range validating.Items {
		policies[p.Name] = true
		until(t, "the type check of "+p.Name, func(ctx context.Context) bool {
			now, err := api.ValidatingAdmissionPolicies().Get(ctx, p.Name, metav1.GetOptions{})
			must.Do(t, err)
			if now.Status.TypeChecking == nil {
				return false
			}
			for _, w := range now.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", p.Name, w.FieldRef, w.Warning)
			}
			return true
		})
	}
	for _, p := range mutating.Items {
		policies[p.Name] = true
	}
	want := []string{
		"stayput-addresses", "stayput-advice", "stayput-agent", "stayput-agent-pools", "stayput-annotations",
		"stayput-controller", "stayput-gate-annotated", "stayput-gate-pools", "stayput-gate-recorded", "stayput-nominations",
		"stayput-unique-target", "stayput-users",
	}
	if got := slices.Sorted(maps.Keys(policies)); !slices.Equal(got, want) {
		t.Errorf("policies %v, want %v", got, want)
	}
	for name := range policies {
		_, validating := api.ValidatingAdmissionPolicyBindings().Get(ctx, name, metav1.GetOptions{})
		_, mutating := api.MutatingAdmissionPolicyBindings().Get(ctx, name, metav1.GetOptions{})
		if validating != nil && mutating != nil {
			t.Errorf("no binding of %s: %v, %v", name, validating, mutating)
		}
	}
}
