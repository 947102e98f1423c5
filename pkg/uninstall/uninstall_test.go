package uninstall

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/test/must"
)

const namespace = "stayput-system"

// cluster returns a client of a cluster with these objects, in which f intercepts requests.
func cluster(t *testing.T, f interceptor.Funcs, objects ...client.Object) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	must.Do(t, errors.Join(corev1.AddToScheme(scheme), rbacv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme),
		spiderpoolv2beta1.AddToScheme(scheme)))
	byName := func(o client.Object) []string { return []string{o.GetName()} }
	return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithIndex(&corev1.Pod{}, "spec.nodeName",
			func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} }).
		WithIndex(&corev1.ConfigMap{}, metav1.ObjectNameField, byName).WithInterceptorFuncs(f).Build()
}

// run runs to the end, and returns what was said.
func run(t *testing.T, c client.Client) (said string, err error) {
	t.Helper()
	var all []string
	err = Run(t.Context(), c, namespace, time.Minute, func(line string) { all = append(all, line) })
	return strings.Join(all, "\n"), err
}

func gated(i int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("web-", i), UID: types.UID(fmt.Sprint(i))},
		Spec:       corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: "example.com/a"}, {Name: v1alpha1.PlacementGate}}},
	}
}

func isGated(t *testing.T, c client.Client, name string) bool {
	t.Helper()
	var pod corev1.Pod
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Namespace: "default", Name: name}, &pod))
	if len(pod.Spec.SchedulingGates) == 0 || pod.Spec.SchedulingGates[0].Name != "example.com/a" {
		t.Errorf("%s has the gates %v", name, pod.Spec.SchedulingGates)
	}
	return home.Gated(&pod)
}

func configMap(in, name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: in, Name: name}}
}

func agent(node string, ready corev1.ConditionStatus) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "stayput-agent-" + node, Labels: agentPods},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}},
	}
}

func retained(name, node string, finalizers ...string) *v1alpha1.RetainedIP {
	o := &v1alpha1.RetainedIP{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Finalizers: finalizers},
		Spec: v1alpha1.RetainedIPSpec{NodeName: node}}
	if finalizers != nil {
		now := metav1.Now()
		o.DeletionTimestamp = &now
	}
	return o
}

func permission() *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: home.GatePermission}}
}

func TestTheClusterIsClearedOnceTheAgentsAreToldAndDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cluster(t, interceptor.Funcs{}, permission(), configMap(namespace, installation.ConfigMap),
			configMap("default", home.GatedWorkloads), configMap("default", "theirs"), gated(0), gated(1),
			agent("node-1", corev1.ConditionTrue), agent("node-2", corev1.ConditionFalse),
			retained("web-0", "node-1"), retained("web-1", "node-2"), retained("web-2", "node-3"),
			retained("held", "node-4", "example.com/audit"))
		go func() { // the agent of node-1
			for {
				time.Sleep(3 * time.Second)
				var cm corev1.ConfigMap
				must.Do(t, c.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: installation.ConfigMap}, &cm))
				if cm.Annotations[installation.AnnotationUninstall] == "true" {
					break
				}
			}
			must.Do(t, c.Delete(t.Context(), retained("web-0", "node-1")))
			must.Do(t, c.Status().Update(t.Context(), agent("node-1", corev1.ConditionFalse)))
		}()
		said, err := run(t, c)
		must.Do(t, err)
		if isGated(t, c, "web-0") || isGated(t, c, "web-1") {
			t.Error("a pod is gated")
		}
		for _, want := range []string{"pod/web-0 ungated", "waiting for the agents on: node-1\n",
			"which keep their promises: node-2, node-3\n"} {
			if !strings.Contains(said, want) {
				t.Errorf("it does not say %q: %s", want, said)
			}
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(permission()), permission()); !apierrors.IsNotFound(err) {
			t.Errorf("pods may still be gated: %v", err)
		}
		var all corev1.ConfigMapList
		must.Do(t, c.List(t.Context(), &all))
		if len(all.Items) != 2 {
			t.Errorf("the ConfigMaps are %v", all.Items)
		}
	})
}

// Nothing of the installation is there any more, but what a deletion without an uninstallation has left.
func TestWhatAMereDeletionHasLeftIsCleared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cluster(t, interceptor.Funcs{}, gated(0), configMap("default", home.GatedWorkloads),
			&v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.6.0.1", Finalizers: []string{v1alpha1.FinalizerInUse}}},
			retained("web-0", "node-1"))
		said, err := run(t, c)
		must.Do(t, err)
		var ip v1alpha1.PodIP
		must.Do(t, c.Get(t.Context(), types.NamespacedName{Name: "10.6.0.1"}, &ip))
		if isGated(t, c, "web-0") || len(ip.Finalizers) > 0 || !strings.Contains(said, "keep their promises: node-1\n") ||
			!strings.Contains(said, "not found") {
			t.Errorf("the PodIP has %v, and it says %s", ip.Finalizers, said)
		}
	})
}

func TestAnAgentThatIsNotDoneIsNamedAtTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cluster(t, interceptor.Funcs{}, configMap(namespace, installation.ConfigMap),
			agent("node-1", corev1.ConditionTrue))
		if said, err := run(t, c); !errors.Is(err, ErrNotComplete) || !strings.Contains(err.Error(), "node-1") ||
			!strings.Contains(said, "to keep Stayput instead") {
			t.Errorf("the error is %v, and it says %s", err, said)
		}
	})
}

// What cannot be told is not taken for done.
func TestWithoutTheRightToTellNothingElseIsDone(t *testing.T) {
	for name, f := range map[string]interceptor.Funcs{
		"to delete the permission": {Delete: func(context.Context, client.WithWatch, client.Object,
			...client.DeleteOption) error {
			return apierrors.NewForbidden(schema.GroupResource{}, "", nil)
		}},
		"to annotate": {Patch: func(context.Context, client.WithWatch, client.Object, client.Patch,
			...client.PatchOption) error {
			return apierrors.NewForbidden(schema.GroupResource{}, "", nil)
		}},
	} {
		c := cluster(t, f, configMap(namespace, installation.ConfigMap), gated(0))
		if _, err := run(t, c); !apierrors.IsForbidden(err) || !isGated(t, c, "web-0") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryPodIsUngatedAlthoughOneFails(t *testing.T) {
	var pods []client.Object
	for i := range 3 * writers {
		pods = append(pods, gated(i))
	}
	c := cluster(t, interceptor.Funcs{Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch,
		options ...client.PatchOption) error {
		if o.GetName() == "web-7" {
			return errors.New("no right")
		}
		return c.Patch(ctx, o, p, options...)
	}}, pods...)
	said := 0
	found, err := Ungate(t.Context(), c, func(string) { said++ })
	if err == nil || !strings.Contains(err.Error(), "default/web-7: no right") || found != len(pods) || said != found-1 {
		t.Errorf("found %d, said %d: %v", found, said, err)
	}
	for _, pod := range pods {
		if name := pod.GetName(); isGated(t, c, name) != (name == "web-7") {
			t.Errorf("%s is gated: %v", name, isGated(t, c, name))
		}
	}
}

// A controller ungates pods meanwhile, and a workload replaces them.
func TestAPodThatSomebodyElseUngatesIsNoError(t *testing.T) {
	for _, refused := range []error{
		apierrors.NewConflict(schema.GroupResource{}, "web-0", nil), apierrors.NewNotFound(schema.GroupResource{}, "web-0"),
	} {
		c := cluster(t, interceptor.Funcs{Patch: func(context.Context, client.WithWatch, client.Object, client.Patch,
			...client.PatchOption) error {
			return refused
		}}, gated(0))
		if found, err := Ungate(t.Context(), c, func(string) {}); found != 1 || err != nil {
			t.Errorf("%v: found %d, %v", refused, found, err)
		}
	}
}

// A template with our gate, whose pods are created all the time: a policy added none of these gates.
func TestPodsGatedByHandAreNotUngatedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		created := 0
		c := cluster(t, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, l client.ObjectList,
			options ...client.ListOption) error {
			if _, pods := l.(*corev1.PodList); pods {
				created++
				must.Do(t, c.Create(ctx, gated(created)))
			}
			return c.List(ctx, l, options...)
		}})
		said, err := run(t, c)
		if err != nil || !strings.Contains(said, "remove it from their pod templates") {
			t.Errorf("%v: %s", err, said)
		}
	})
}

// Nothing of ours keeps a PodIP or a pool, or their definitions, from being deleted; what others put there stays.
func TestFinalizersOfPoolsAreTakenOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		named := func(name string, finalizers ...string) metav1.ObjectMeta {
			return metav1.ObjectMeta{Name: name, Finalizers: finalizers}
		}
		conflicts := 3
		c := cluster(t, interceptor.Funcs{Patch: func(ctx context.Context, c client.WithWatch, o client.Object,
			p client.Patch, options ...client.PatchOption) error {
			if conflicts--; conflicts >= 0 {
				return apierrors.NewConflict(schema.GroupResource{}, o.GetName(), nil)
			}
			return c.Patch(ctx, o, p, options...)
		}},
			&v1alpha1.PodIP{ObjectMeta: named("10.6.0.1", v1alpha1.FinalizerInUse)},
			&v1alpha1.PodIP{ObjectMeta: named("10.6.0.2", "example.com/a", v1alpha1.FinalizerInUse, "example.com/b")},
			&v1alpha1.PodIP{ObjectMeta: named("10.6.0.3")},
			&v1alpha1.PodIPPool{ObjectMeta: named("blue", v1alpha1.FinalizerInUse)},
			&spiderpoolv2beta1.SpiderIPPool{ObjectMeta: named("theirs", v1alpha1.FinalizerInUse, "spiderpool.spidernet.io")})
		must.Do(t, c.Delete(t.Context(), &v1alpha1.PodIP{ObjectMeta: named("10.6.0.2")}))
		r := &removal{Client: c}
		found, err := r.removeFinalizers(t.Context())
		for must.Do(t, err); found > 0; must.Do(t, err) {
			found, err = r.removeFinalizers(t.Context())
		}
		for _, o := range []struct {
			client.Object
			want []string
		}{
			{&v1alpha1.PodIP{ObjectMeta: named("10.6.0.1")}, nil},
			{&v1alpha1.PodIP{ObjectMeta: named("10.6.0.2")}, []string{"example.com/a", "example.com/b"}},
			{&v1alpha1.PodIP{ObjectMeta: named("10.6.0.3")}, nil},
			{&v1alpha1.PodIPPool{ObjectMeta: named("blue")}, nil},
			{&spiderpoolv2beta1.SpiderIPPool{ObjectMeta: named("theirs")}, []string{"spiderpool.spidernet.io"}},
		} {
			must.Do(t, c.Get(t.Context(), client.ObjectKeyFromObject(o), o.Object))
			if !slices.Equal(o.GetFinalizers(), o.want) {
				t.Errorf("%s has %v, want %v", o.GetName(), o.GetFinalizers(), o.want)
			}
		}
	})
}

// Without pools there is nothing to do.
func TestPoolsThatAreNotServedHaveNoFinalizers(t *testing.T) {
	c := cluster(t, interceptor.Funcs{List: func(context.Context, client.WithWatch, client.ObjectList,
		...client.ListOption) error {
		return &meta.NoKindMatchError{}
	}})
	if found, err := (&removal{Client: c}).removeFinalizers(t.Context()); found != 0 || err != nil {
		t.Error(found, err)
	}
}
