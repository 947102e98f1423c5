package placement

import (
	"context"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

func controlledBy(apiVersion, kind, name string) []metav1.OwnerReference {
	controls := true
	return []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind, Name: name, UID: types.UID("of-" + name),
		Controller: &controls}}
}

// aPod has a node, and asks for its address while owned.
func aPod(name, node string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "pod", Annotations: whileOwned},
		Spec:       corev1.PodSpec{NodeName: node},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func of(apiVersion, kind, name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.OwnerReferences = controlledBy(apiVersion, kind, name) }
}

func labelled(label string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels = map[string]string{label: "0"} }
}

// addressOf is a RetainedIP of a pod on node-1, kept while owned.
func addressOf(pod string, change ...func(*stayputv1alpha1.RetainedIP)) *stayputv1alpha1.RetainedIP {
	ip := owned(stayputv1alpha1.PolicyRelease)
	ip.Name, ip.Spec.PodName = pod+".node-1", pod
	for _, c := range change {
		c(ip)
	}
	return ip
}

func bound(ip *stayputv1alpha1.RetainedIP) {
	ip.Status.Phase, ip.Status.Expires, ip.Status.PodUID = stayputv1alpha1.PhaseBound, nil, "pod"
}

func shared(ip *stayputv1alpha1.RetainedIP) { ip.Spec.Identity = "front" }

func retainedAlways(ip *stayputv1alpha1.RetainedIP) {
	ip.Spec.WhenScaled, ip.Spec.WhenDeleted = stayputv1alpha1.PolicyRetain, stayputv1alpha1.PolicyRetain
}

func stamped(kind, name string) func(*stayputv1alpha1.RetainedIP) {
	return func(ip *stayputv1alpha1.RetainedIP) {
		ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: kind, Name: name,
			UID: "of-" + name}
	}
}

func TestWhatNoWorkloadOwnsIsNotKeptWhileOwned(t *testing.T) {
	ofFront := of("apps/v1", "ReplicaSet", "front-1")
	for name, c := range map[string]struct {
		ip       *stayputv1alpha1.RetainedIP
		pod      *corev1.Pod
		released bool
	}{
		"a bare pod": {addressOf("web-0", bound), aPod("web-0", "node-1"), true},
		"a bare pod that would always keep it": {addressOf("web-0", bound, retainedAlways), aPod("web-0", "node-1"),
			true},
		"a bare pod of a shared identity":         {addressOf("web", bound, shared), aPod("web", "node-1"), true},
		"a bare pod that has one for ten minutes": {addressOf("web-0", bound, tenMinutes), aPod("web-0", "node-1"), false},
		"an orphan": {addressOf("web-0", bound, stamped("StatefulSet", "web")), aPod("web-0", "node-1"), false},
		"an orphan whose object was published again": {addressOf("web-0", bound),
			aPod("web-0", "node-1", labelled(appsv1.PodIndexLabel)), false},
		"an orphan of a shared identity whose object was published again": {addressOf("front-1-a", bound, shared),
			aPod("front-1-a", "node-1", labelled(appsv1.DefaultDeploymentUniqueLabelKey)), false},
		"a pod of a Deployment": {addressOf("front-1-a", bound), aPod("front-1-a", "node-1", ofFront), true},
		"a pod of a DaemonSet":  {addressOf("web", bound), aPod("web", "node-1", of("apps/v1", "DaemonSet", "web")), true},
	} {
		t.Run(name, func(t *testing.T) {
			api := fakeAPI(t, c.ip, c.pod)
			r, said := testReleaser(t, api, nothing)
			got := released(t, r, client.ObjectKeyFromObject(c.ip))
			if (got.Spec.Release != "") != c.released {
				t.Errorf("released %v", got.Spec.Release)
			}
			note := ""
			if len(said.Events) > 0 {
				note = <-said.Events
			}
			if c.released != strings.Contains(note, home.ReasonNotOwned) || !c.released && note != "" {
				t.Errorf("said %q", note)
			}
		})
	}
}

func tenMinutes(ip *stayputv1alpha1.RetainedIP) { ip.Spec.Retention = "10m" }

// A pod that ran for a moment is gone, and maybe its workload too, before its address is published.
func TestWhoOwnedAPodIsKnownWhenItsAddressIsPublished(t *testing.T) {
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "front", UID: "new"}}
	front := func(change ...func(*stayputv1alpha1.RetainedIP)) *stayputv1alpha1.RetainedIP {
		return addressOf("front-1-a", append(change, shared)...)
	}
	ofFront := of("apps/v1", "ReplicaSet", "front-1")
	for name, c := range map[string]struct {
		ip       *stayputv1alpha1.RetainedIP
		ended    *corev1.Pod
		others   []client.Object
		released bool
		workload string
	}{
		"its Deployment is deleted": {front(), aPod("front-1-a", "node-1", ofFront), nil, true, "ReplicaSet front-1"},
		"its Deployment lives": {front(), aPod("front-1-a", "node-1", ofFront), []client.Object{deployment}, false,
			"Deployment front"},
		"its StatefulSet is deleted": {addressOf("web-0"), aPod("web-0", "node-1", of("apps/v1", "StatefulSet", "web")),
			nil, true, "StatefulSet web"},
		"it was a bare pod": {addressOf("web-0", retainedAlways), aPod("web-0", "node-1"), nil, true, ""},
		"it may have been an orphan": {addressOf("web-0"), aPod("web-0", "node-1",
			labelled(appsv1.PodIndexLabel)), nil, false, ""},
		"it may have been an orphan of a shared identity": {front(), aPod("front-1-a", "node-1"), nil, false, ""},
		"it is not known": {front(), nil, nil, false, ""},
		"it is not known, but whose its identity is": {front(), nil, []client.Object{
			addressOf("front-1-b", shared, stamped("Deployment", "front"))}, true, "Deployment front"},
		"and that lives": {front(), nil, []client.Object{
			addressOf("front-1-b", shared, stamped("Deployment", "front")), deployment}, false, "Deployment front"},
		"its identity is of two": {front(), nil, []client.Object{
			addressOf("front-1-b", shared, stamped("Deployment", "front")),
			addressOf("back-1-b", shared, stamped("Deployment", "back"))}, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := testReleaser(t, fakeAPI(t, append(c.others, c.ip)...), nothing)
			if c.ended != nil {
				r.remember(cluster.PodOf(c.ended))
			}
			got := released(t, r, client.ObjectKeyFromObject(c.ip))
			workload := ""
			if w := got.Spec.Workload; w != nil {
				workload = w.Kind + " " + w.Name
			}
			if (got.Spec.Release != "") != c.released || workload != c.workload {
				t.Errorf("released %v, of %q", got.Spec.Release, workload)
			}
		})
	}
}

func TestAReplicaSetThatIsGoneWhileItsPodRunsHidesNoDeployment(t *testing.T) {
	ip := addressOf("front-1-a", shared, bound)
	pod := aPod("front-1-a", "node-1", of("apps/v1", "ReplicaSet", "front-1"))
	r, _ := testReleaser(t, fakeAPI(t, ip, pod), nothing)
	if got := released(t, r, client.ObjectKeyFromObject(ip)); got.Spec.Workload == nil ||
		got.Spec.Workload.Kind != "ReplicaSet" || got.Spec.Release != "" {
		t.Errorf("it is of %+v, released %v", got.Spec.Workload, got.Spec.Release)
	}
}

func TestPodsThatAreThereAtTheStartHaveNoRetainedIPLookedUp(t *testing.T) {
	for first, want := range map[bool]int{true: 0, false: 1} {
		looked := 0
		h := podEvents{handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
			looked++
			return nil
		}), nil}
		h.Create(t.Context(), event.CreateEvent{Object: hometest.Pod(), IsInInitialList: first}, nil)
		if looked != want {
			t.Errorf("in the first list: %v: looked up %d times", first, looked)
		}
	}
}
