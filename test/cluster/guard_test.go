package cluster

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

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
	c, err := lab.StartCluster(ctx, lab.ClusterOptions{
		Nodes: 2, APIServerArgs: audited.APIServerArgs,
		ControlFiles: map[string][]byte{auditPolicyFile: []byte(readsPolicy)},
	})
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
metadata: {name: pooled, annotations: {stayput.io/pools: blue}, labels: {stayput.io/default-pools: "", team: a}}
---
apiVersion: v1
kind: Namespace
metadata: {name: theirs, labels: {stayput.io/default-pools: ""}, annotations: {ipam.spidernet.io/default-ipv6-ippool: '["blue"]'}}
---
apiVersion: v1
kind: Namespace
metadata: {name: unpooled, annotations: {ipam.spidernet.io/default-ipv4-ippool: '["blue"]', stayput.io/pools: ""}}
---
apiVersion: v1
kind: Namespace
metadata:
  name: retaining
  labels: {stayput.io/default-retention: ""}
  annotations: {stayput.io/retain-ip: 1h, stayput.io/home: Preferred, stayput.io/unknown: a}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: stayput-gated-workloads, namespace: guarded, labels: {stayput.io/gated-workloads: ""}}
data: {workloads: "\nStatefulSet.apps.db\nStatefulSet.apps.kruise.io.queue\n"}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: guarded}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: labelled, namespace: theirs, labels: {stayput.io/gated-workloads: ""}}
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
metadata: {name: default, namespace: retaining}
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
metadata: {name: 10.6.168.108}
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-5, podUID: found, interface: eth0, adoptedOn: node-2}
---
apiVersion: stayput.io/v1alpha1
kind: PodIP
metadata: {name: 10.6.168.109}
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-6, podUID: own, interface: eth0, adoptedOn: node-1}
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
kind: PodIPAudit
metadata: {name: cluster}
spec: {epoch: "2026-01-01T00:00:00.000001Z", phase: Settled, mark: "2026-01-01T00:00:00.000000Z"}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPReport
metadata: {name: node-1}
spec: {epoch: "2026-01-01T00:00:00.000001Z"}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPReport
metadata: {name: node-2}
spec: {epoch: "2026-01-01T00:00:00.000001Z"}
---
apiVersion: stayput.io/v1alpha1
kind: RetainedIP
metadata: {name: web-0.node-1, namespace: guarded}
spec: {nodeName: node-1, podName: web-0, retention: 10m, release: Now, workload: {apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}}
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
metadata: {name: web-7.node-1, namespace: elsewhere, ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]}
spec: {nodeName: node-1, podName: web-7, retention: 10m}
status: {phase: Bound, ips: [10.244.1.7]}
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
