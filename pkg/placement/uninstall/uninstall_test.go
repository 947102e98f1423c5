package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
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
	"github.com/stayput/stayput/pkg/uninstall"
	"github.com/stayput/stayput/test/must"
)

func TestEveryPodIsUngatedAlthoughOneFails(t *testing.T) {
	var pods []corev1.Pod
	for i := range 10 * ungaters {
		pods = append(pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("web-", i)},
			Spec:       corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: v1alpha1.PlacementGate}}},
		})
	}
	pods = append(pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "free"}})
	var mu sync.Mutex
	tried := map[string]int{}
	found, err := ungate(pods, home.Gated, func(pod *corev1.Pod) error {
		mu.Lock()
		defer mu.Unlock()
		tried[pod.Name]++
		if pod.Name == "web-7" {
			return errors.New("no right")
		}
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "default/web-7: no right") {
		t.Errorf("the error is %v", err)
	}
	for _, pod := range pods {
		want := 1
		if pod.Name == "free" {
			want = 0
		}
		if tried[pod.Name] != want {
			t.Errorf("%s was tried %d times", pod.Name, tried[pod.Name])
		}
	}
	if found != 10*ungaters {
		t.Errorf("found %d gated pods", found)
	}
	if found, err := ungate(nil, home.Gated, nil); found != 0 || err != nil {
		t.Error(found, err)
	}
}

// The controllers ungate pods while the hook of an uninstallation does.
func TestAPodThatSomebodyElseUngatesIsNoError(t *testing.T) {
	gated := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0", UID: "1"},
		Spec:       corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: v1alpha1.PlacementGate}}},
	}
	refused := apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "patch", schema.GroupResource{
		Resource: "pods"}, gated.Name, "", 0, true)
	var elsewhere bool // somebody else has ungated it by the time of the patch
	patches := 0
	unscheduled := func(client.Object) []string { return []string{""} }
	patch := func(
		ctx context.Context, c client.WithWatch, _ client.Object, _ client.Patch, _ ...client.PatchOption,
	) error {
		patches++
		if elsewhere {
			free := gated.DeepCopy()
			must.Do(t, c.Get(ctx, client.ObjectKeyFromObject(gated), free))
			free.Spec.SchedulingGates = nil
			must.Do(t, c.Update(ctx, free))
		}
		return refused
	}
	c := fake.NewClientBuilder().WithObjects(gated).WithIndex(&corev1.Pod{}, "spec.nodeName", unscheduled).
		WithInterceptorFuncs(interceptor.Funcs{Patch: patch}).Build()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := UngateAll(ctx, c, io.Discard); !apierrors.IsInvalid(err) || patches != 2 {
		t.Errorf("a pod that stays gated: %d patches, %v", patches, err)
	}
	elsewhere = true
	if err := UngateAll(ctx, c, io.Discard); err != nil {
		t.Error(err)
	}
}

// A template with our gate, whose pods are created all the time: a policy added none of these gates.
func TestPodsGatedByHandAreNotUngatedForEver(t *testing.T) {
	defer func(was time.Duration) { inForce = was }(inForce)
	inForce = 50 * time.Millisecond
	gated := func(i int) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("web-", i), UID: types.UID(fmt.Sprint(i))},
			Spec:       corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: v1alpha1.PlacementGate}}},
		}
	}
	created := 1
	list := func(ctx context.Context, c client.WithWatch, l client.ObjectList, options ...client.ListOption) error {
		if err := c.Create(ctx, gated(created)); err != nil {
			return err
		}
		created++
		return c.List(ctx, l, options...)
	}
	unscheduled := func(client.Object) []string { return []string{""} }
	c := fake.NewClientBuilder().WithObjects(gated(0)).WithIndex(&corev1.Pod{}, "spec.nodeName", unscheduled).
		WithInterceptorFuncs(interceptor.Funcs{List: list}).Build()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out strings.Builder
	if err := UngateAll(ctx, c, &out); err != nil {
		t.Fatal(err)
	}
	// Those of the last two lists are left, of pods to try again and of what is left.
	want := fmt.Sprintf("%d have been ungated, 2 remain, for example default/web-", created-2)
	if !strings.Contains(out.String(), want) || strings.Contains(out.String(), "no pod is gated") {
		t.Errorf("it does not say %q: %s", want, out.String())
	}
}

// The API server keeps an object that its agent has deleted, for a finalizer that is not ours.
func TestAForeignFinalizerHoldsUpNoUninstallation(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	const theirs = "example.com/audit"
	now := metav1.Now()
	at := func(name string, finalizers ...string) metav1.ObjectMeta {
		o := metav1.ObjectMeta{Namespace: "default", Name: name, Finalizers: finalizers}
		if finalizers != nil {
			o.DeletionTimestamp = &now
		}
		return o
	}
	agent := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "stayput-system", Name: "stayput-agent-x", Labels: agentPods},
		Spec:       corev1.PodSpec{NodeName: "node-1"},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	held := &v1alpha1.RetainedIP{ObjectMeta: at("web-0", theirs), Spec: v1alpha1.RetainedIPSpec{NodeName: "node-1"}}
	wait := func(objects ...client.Object) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		var out strings.Builder
		c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(append(objects, agent.DeepCopy())...).Build()
		err := waitForAgents(ctx, c, "stayput-system", func(format string, args ...any) {
			fmt.Fprintf(&out, format+"\n", args...)
		})
		var after v1alpha1.RetainedIP
		must.Do(t, c.Get(t.Context(), client.ObjectKeyFromObject(held), &after))
		if !slices.Equal(after.Finalizers, []string{theirs}) {
			t.Errorf("its finalizers are %v", after.Finalizers)
		}
		return out.String(), err
	}
	out, err := wait(held.DeepCopy())
	if err != nil || !strings.Contains(out, "RetainedIP default/web-0") || !strings.Contains(out, theirs) {
		t.Errorf("%v: %s", err, out)
	}
	busy := &v1alpha1.RetainedIP{ObjectMeta: at("web-1"), Spec: v1alpha1.RetainedIPSpec{NodeName: "node-1"}}
	if _, err := wait(held.DeepCopy(), busy); !errors.Is(err, ErrNotClean) {
		t.Errorf("an agent that has not deleted all RetainedIPs of its node is not waited for: %v", err)
	}
	alone := held.DeepCopy()
	alone.Name, alone.Spec.NodeName = "web-2", "node-2"
	if out, err := wait(held.DeepCopy(), alone); err != nil || !strings.Contains(out, "keep their promises: node-2\n") {
		t.Errorf("a node without an agent is not named: %v: %s", err, out)
	}
}

// Nothing of ours keeps a PodIP or a pool, or their definitions, from being deleted; what others put there stays.
func TestFinalizersOfPoolsAreTakenOff(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(v1alpha1.AddToScheme(scheme), spiderpoolv2beta1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	named := func(name string, finalizers ...string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Finalizers: finalizers}
	}
	conflicts := 3
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&v1alpha1.PodIP{ObjectMeta: named("10.6.0.1", v1alpha1.FinalizerInUse)},
		&v1alpha1.PodIP{ObjectMeta: named("10.6.0.2", "example.com/a", v1alpha1.FinalizerInUse, "example.com/b")},
		&v1alpha1.PodIP{ObjectMeta: named("10.6.0.3")},
		&v1alpha1.PodIPPool{ObjectMeta: named("blue", v1alpha1.FinalizerInUse)},
		&spiderpoolv2beta1.SpiderIPPool{ObjectMeta: named("theirs", v1alpha1.FinalizerInUse, "spiderpool.spidernet.io")},
	).WithInterceptorFuncs(interceptor.Funcs{Patch: func(ctx context.Context, c client.WithWatch, o client.Object,
		p client.Patch, options ...client.PatchOption) error {
		if conflicts--; conflicts >= 0 {
			return apierrors.NewConflict(schema.GroupResource{}, o.GetName(), nil)
		}
		return c.Patch(ctx, o, p, options...)
	}}).Build()
	held := []string{"PodIP 10.6.0.2 (example.com/a, example.com/b)"}
	must.Do(t, c.Delete(t.Context(), &v1alpha1.PodIP{ObjectMeta: named("10.6.0.2")}))
	if _, by, err := removeFinalizers(t.Context(), c); err != nil || !slices.Equal(by, held) {
		t.Fatal(by, err)
	}
	for name, want := range map[string][]string{"10.6.0.1": nil, "10.6.0.2": {"example.com/a", "example.com/b"},
		"10.6.0.3": nil} {
		var o v1alpha1.PodIP
		if err := c.Get(t.Context(), types.NamespacedName{Name: name}, &o); err != nil || !slices.Equal(o.Finalizers, want) {
			t.Errorf("%s has %v, want %v: %v", name, o.Finalizers, want, err)
		}
	}
	var o v1alpha1.PodIPPool
	if err := c.Get(t.Context(), types.NamespacedName{Name: "blue"}, &o); err != nil || len(o.Finalizers) > 0 {
		t.Errorf("the pool has %v: %v", o.Finalizers, err)
	}
	var theirs spiderpoolv2beta1.SpiderIPPool
	if err := c.Get(t.Context(), types.NamespacedName{Name: "theirs"}, &theirs); err != nil ||
		!slices.Equal(theirs.Finalizers, []string{"spiderpool.spidernet.io"}) {
		t.Errorf("the SpiderIPPool has %v: %v", theirs.Finalizers, err)
	}
	if freed, _, err := removeFinalizers(t.Context(), c); freed != 0 || err != nil {
		t.Error(freed, err)
	}
}

// Without pools there is nothing to do.
func TestPoolsThatAreNotServedHaveNoFinalizers(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	none := fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{List: func(context.Context,
		client.WithWatch, client.ObjectList, ...client.ListOption) error {
		return &meta.NoKindMatchError{}
	}}).Build()
	if freed, _, err := removeFinalizers(t.Context(), none); freed != 0 || err != nil {
		t.Error(freed, err)
	}
}

func TestADeletedGateBindingAloneCountsForAWhile(t *testing.T) {
	now := time.Now()
	if begun(uninstall.Status{}, uninstall.Status{State: uninstall.Present, Since: now}, now) {
		t.Error("begun without a signal")
	}
	deleted := uninstall.Status{State: uninstall.Deleted, Since: now}
	if !begun(uninstall.Status{}, deleted, now.Add(bindingAlone-1)) ||
		begun(uninstall.Status{}, deleted, now.Add(bindingAlone)) {
		t.Errorf("it does not count for %v", bindingAlone)
	}
	if !begun(deleted, uninstall.Status{}, now.Add(time.Hour)) {
		t.Error("a deleted installation counts for a while only")
	}
}
