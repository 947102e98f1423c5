package cluster

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// runningPod is the i-th pod of a StatefulSet as the API server sends it.
func runningPod(i int) *corev1.Pod {
	yes, at := true, metav1.NewTime(hometest.Noon.Local())
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprint("web-", i), GenerateName: "web-", UID: types.UID(fmt.Sprint("uid-", i)),
			ResourceVersion: fmt.Sprint(1000 + i), CreationTimestamp: at,
			Labels:      map[string]string{"app": "web", appsv1.PodIndexLabel: fmt.Sprint(i), gate.ManagedLabel: "true"},
			Annotations: map[string]string{stayputv1alpha1.AnnotationRetainIP: "10m", "other": "x"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "of-web",
				Controller: &yes}},
			Finalizers: []string{"example.com/hold"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet", Time: &at,
				FieldsV1: metav1.NewFieldsV1(`{"f:status":{"f:podIP":{}}}`)}},
		},
		Spec: corev1.PodSpec{
			NodeName: "node-1", Containers: []corev1.Container{{Name: "web", Image: "web:1"}},
			Tolerations: []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "192.0.2.7", HostIP: "192.0.2.1", StartTime: &at,
			Conditions: []corev1.PodCondition{
				{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: at},
				{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: at},
			},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "web", Ready: true, ContainerID: "containerd://0"}},
		},
	}
}

func TestOfAPodWithANodeItIsKeptWhoseItIsAndWhereItRuns(t *testing.T) {
	at := metav1.NewTime(hometest.Noon.Local())
	want := func(change ...func(*corev1.Pod)) *corev1.Pod {
		all := runningPod(3)
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: all.Namespace, Name: all.Name, UID: all.UID, ResourceVersion: all.ResourceVersion,
				CreationTimestamp: all.CreationTimestamp, Annotations: all.Annotations, OwnerReferences: all.OwnerReferences,
				Labels: map[string]string{appsv1.PodIndexLabel: "3", gate.ManagedLabel: "true"},
			},
			Spec: corev1.PodSpec{NodeName: "node-1"},
			Status: corev1.PodStatus{
				Phase: corev1.PodRunning, PodIP: "192.0.2.7", StartTime: &at,
				Conditions: []corev1.PodCondition{
					{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: at},
				},
			},
		}
		for _, c := range change {
			c(pod)
		}
		return pod
	}
	of := func(kind, version string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.OwnerReferences[0].Kind, p.OwnerReferences[0].APIVersion = kind, version }
	}
	oursOnly := func(p *corev1.Pod) { delete(p.Annotations, "other") }
	deployed := of("ReplicaSet", "apps/v1")
	told := func(p *corev1.Pod) {
		deployed(p)
		p.Annotations = map[string]string{"cni.projectcalico.org/podIP": "192.0.2.7/32",
			"cni.projectcalico.org/podIPs": "192.0.2.7/32", stayputv1alpha1.AnnotationAddresses: "[]"}
	}
	for name, c := range map[string]struct{ change, kept func(*corev1.Pod) }{
		"of a StatefulSet": {func(*corev1.Pod) {}, func(*corev1.Pod) {}},
		"not Ready": {func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionFalse },
			func(p *corev1.Pod) { p.Status.Conditions = nil }},
		"without a sandbox": {
			func(p *corev1.Pod) {
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReadyToStartContainers,
					Status: corev1.ConditionFalse, LastTransitionTime: at}}
			},
			func(p *corev1.Pod) {
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReadyToStartContainers,
					Status: corev1.ConditionFalse}}
			}},
		"being deleted": {func(p *corev1.Pod) { p.DeletionTimestamp = &at },
			func(p *corev1.Pod) { p.DeletionTimestamp = &at }},
		"on its node's network": {func(p *corev1.Pod) { p.Spec.HostNetwork = true },
			func(p *corev1.Pod) { p.Spec.HostNetwork = true }},
		"rejected by its kubelet": {
			func(p *corev1.Pod) {
				p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfcpu", Message: strings.Repeat("x",
					messageMost+1),
					StartTime: &at}
			},
			func(p *corev1.Pod) {
				p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfcpu", Message: strings.Repeat("x", messageMost),
					StartTime: &at}
			}},
		"evicted after it ran": {
			func(p *corev1.Pod) {
				p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", ContainerStatuses: []corev1.ContainerStatus{
					{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}}
			},
			func(p *corev1.Pod) { p.Status = corev1.PodStatus{Phase: corev1.PodFailed} }},
		"without an IP yet": {func(p *corev1.Pod) { p.Status = corev1.PodStatus{} },
			func(p *corev1.Pod) { p.Status = corev1.PodStatus{} }},
		"of a kind that is configured":                          {of("Game", "example.com/v1"), of("Game", "example.com/v1")},
		"of a Deployment":                                       {deployed, func(p *corev1.Pod) { deployed(p); oursOnly(p) }},
		"of one, with addresses that Calico's plugin has noted": {told, told},
		"with what it has noted of others": {
			func(p *corev1.Pod) { told(p); delete(p.Annotations, stayputv1alpha1.AnnotationAddresses) },
			func(p *corev1.Pod) { deployed(p); p.Annotations = nil }},
		"of a Job": {of("Job", "batch/v1"), func(p *corev1.Pod) { of("Job", "batch/v1")(p); oursOnly(p) }},
		"without an owner": {func(p *corev1.Pod) { p.OwnerReferences = nil },
			func(p *corev1.Pod) { p.OwnerReferences = nil; oursOnly(p) }},
	} {
		sent := runningPod(3)
		c.change(sent)
		if is, want := PodOf(sent).Core(), want(c.kept); !equality.Semantic.DeepEqual(is, want) {
			t.Errorf("%s:\n%+v, want\n%+v", name, is, want)
		}
	}
}

func TestOfAPodWithoutANodeItIsKeptWhatItsPlacementDependsOn(t *testing.T) {
	conditions := []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		Message: "0/3 nodes", LastTransitionTime: metav1.NewTime(hometest.Noon.Local()),
	}}
	sent := hometest.Pod(hometest.Pinned, func(p *corev1.Pod) {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "other"}, {Name: stayputv1alpha1.PlacementGate}}
		p.Spec.NodeSelector = map[string]string{"disk": "ssd"}
		p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
		p.Status.NominatedNodeName, p.Status.Conditions = "node-2", conditions
		p.CreationTimestamp = metav1.NewTime(p.CreationTimestamp.Local())
		p.ManagedFields[0].Time = &p.CreationTimestamp
	})
	want := sent.DeepCopy()
	sent.Spec.Containers = []corev1.Container{{Name: "web"}}
	sent.ManagedFields = append(sent.ManagedFields, metav1.ManagedFieldsEntry{Manager: "kubectl"})
	is := PodOf(sent)
	if !equality.Semantic.DeepEqual(is.Core(), want) || !is.Gated() || is.Node() != "" {
		t.Errorf("%+v, want\n%+v", is.Core(), want)
	}
	is.Core().Annotations["changed"] = "by its reader"
	if !equality.Semantic.DeepEqual(is.Core(), want) {
		t.Error("a reader changed it")
	}
}

func TestOwnersAndReadinessAreReadWithoutACopy(t *testing.T) {
	is := PodOf(runningPod(0))
	ref, uid, ok := home.OwnerOf(is)
	if want := (home.Ref{Group: "apps", Kind: "StatefulSet", Namespace: "default", Name: "web"}); ref != want ||
		uid != "of-web" || !ok || !is.Ready() || is.Gated() || is.Node() != "node-1" {
		t.Errorf("%v %s, Ready %v on %s", ref, uid, is.Ready(), is.Node())
	}
	if !is.GetCreationTimestamp().Time.Equal(hometest.Noon) || is.GetDeletionTimestamp() != nil {
		t.Errorf("created %s, deleted %s", is.GetCreationTimestamp(), is.GetDeletionTimestamp())
	}
	if at := new(Pod).GetCreationTimestamp(); !at.IsZero() || time.Since(at.Time) < 0 {
		t.Errorf("an unknown creation is at %s", at)
	}
}

func TestAPodWithANodeTakesAQuarterOfThePodItIs(t *testing.T) {
	const pods = 5000
	heap := func(make func(i int) any) uint64 {
		kept := [pods]any{}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for i := range kept {
			kept[i] = make(i % 20)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(&kept)
		return (after.HeapAlloc - before.HeapAlloc) / pods
	}
	slim := heap(func(i int) any { return PodOf(runningPod(i)) })
	whole := heap(func(i int) any { return runningPod(i) })
	if t.Logf("%d bytes of %d", slim, whole); slim > whole/4 {
		t.Errorf("it takes %d bytes of the %d of the pod", slim, whole)
	}
}

// kept returns how many bytes are kept of a pod.
func kept(p *Pod) int {
	size := p.Brief().Size()
	if p.waiting != nil {
		size += len(p.waiting.where)
	}
	return size
}

// Decoded, such a pod takes dozens of times the bytes that the API server stores of it.
func TestTheCacheDoesNotDecodeWhereAWaitingPodMayGo(t *testing.T) {
	terms := make([]corev1.NodeSelectorTerm, 32_000)
	pod := hometest.Pod(func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms}}}
	})
	is := PodOf(pod)
	if size := kept(is); is.TooLong() || size > 65<<10 {
		t.Errorf("%d bytes are kept, too long %t", size, is.TooLong())
	}
	of := is.Core().Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if len(of.NodeSelectorTerms) != len(terms) {
		t.Errorf("a decision sees %d terms", len(of.NodeSelectorTerms))
	}
	if is.Brief().Spec.Affinity != nil {
		t.Error("what needs no affinity decodes it")
	}
}

func TestAnOwnerIsKeptToTheLengthThatANameCanHave(t *testing.T) {
	long, yes := strings.Repeat("x", 1<<20), true
	for _, node := range []string{"", "node-1"} {
		is := PodOf(hometest.Pod(func(p *corev1.Pod) {
			p.Spec.NodeName = node
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: long, Kind: long, Name: long, UID: types.UID(long),
				Controller: &yes}}
		}))
		if owner := metav1.GetControllerOf(is); kept(is) > 4<<10 || owner == nil || len(owner.Name) <= 253 {
			t.Errorf("on node %q %d bytes are kept, with owner %v", node, kept(is), owner != nil)
		}
	}
}

// What is kept of a pod is bounded, whatever its author writes.
func TestTheCacheKeepsLittleOfTheLongestPods(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	pod := func(change ...func(*corev1.Pod)) *corev1.Pod {
		return hometest.Pod(append([]func(*corev1.Pod){func(p *corev1.Pod) {
			p.Labels, p.Finalizers = map[string]string{"a": long}, []string{long}
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "A", Name: long}}
			p.Annotations["example.com/a"] = long
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{
					{PodAffinityTerm: corev1.PodAffinityTerm{TopologyKey: long}}}}}
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Message: long}}
		}}, change...)...)
	}
	selector := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"a": long} }
	for name, c := range map[string]struct {
		pod     *corev1.Pod
		tooLong bool
		most    int
	}{
		"what no rule reads": {pod(), false, 4 << 10},
		"a node selector":    {pod(selector), true, 4 << 10},
		"a node affinity": {pod(func(p *corev1.Pod) {
			p.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
					NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: long}}}}}}
		}), true, 4 << 10},
		"gates": {pod(func(p *corev1.Pod) {
			for range 20_000 {
				p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "example.com/other"})
			}
		}), false, 4 << 10},
		"an annotation of ours": {pod(func(p *corev1.Pod) { p.Annotations["stayput.io/a"] = long }), true, 4 << 10},
		"what other pods' fields are": {pod(hometest.Pinned, func(p *corev1.Pod) {
			p.ManagedFields[0].FieldsV1 = metav1.NewFieldsV1(`{"f:requiredDuringSchedulingIgnoredDuringExecution":"` + long + `"}`)
		}), false, 4 << 10},
	} {
		is := PodOf(c.pod)
		if size := kept(is); size > c.most || is.TooLong() != c.tooLong {
			t.Errorf("%s: %d bytes are kept, too long %t", name, size, is.TooLong())
		}
		if core := is.Core(); home.Gated(core) != home.Gated(c.pod) || home.LastGate(core) != home.LastGate(c.pod) ||
			home.Pinned(core) != home.Pinned(c.pod) || is.GetUID() != c.pod.UID {
			t.Errorf("%s: it is no longer known what waits: %+v", name, core)
		}
	}
	running := pod(selector, func(p *corev1.Pod) {
		p.Spec.SchedulingGates, p.Spec.NodeName = nil, "node-1"
		yes := true
		p.OwnerReferences = append(p.OwnerReferences, metav1.OwnerReference{APIVersion: "apps/v1", Kind: "StatefulSet",
			Name: "web", Controller: &yes})
		for i := range 1000 {
			p.Annotations[fmt.Sprintf("example.com/%d", i)] = long[:500]
			p.Annotations[fmt.Sprintf("stayput.io/%d", i)] = long[:500]
		}
		p.Annotations[stayputv1alpha1.AnnotationAddresses] = long[:20_000]
	})
	is := PodOf(running)
	if size := kept(is); size > 60<<10 {
		t.Errorf("of a pod with a node %d bytes are kept", size)
	}
	if len(is.GetAnnotations()[stayputv1alpha1.AnnotationAddresses]) != 20_000 || len(is.GetOwnerReferences()) != 1 {
		t.Error("it is not kept which addresses it has, or whose it is")
	}
	asks := PodOf(pod(selector, hometest.Annotation(stayputv1alpha1.AnnotationPools, "blue")))
	if asks.GetAnnotations()[stayputv1alpha1.AnnotationPools] == "" ||
		asks.Core().Annotations[stayputv1alpha1.AnnotationPools] == "" {
		t.Error("one that asks for addresses is taken for one that does not")
	}
}
