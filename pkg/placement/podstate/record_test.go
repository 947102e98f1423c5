package podstate

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

const (
	hostname = corev1.LabelHostname
	zone     = corev1.LabelTopologyZone
)

// zonedNodes are a and b, in zones of their own, and c without one.
var zonedNodes = hometest.Nodes{labelledNode("a", "east"), labelledNode("b", "west"), labelledNode("c", "")}

func labelledNode(name, zoneOf string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels: map[string]string{hostname: "host-" + name, "other": "x"}}}
	if zoneOf != "" {
		n.Labels[zone] = zoneOf
	}
	return n
}

// podOn is a pod of the workload web with UID uid.
func podOn(uid, name, node string, is bool) corev1.Pod {
	yes := true
	status := corev1.ConditionFalse
	if is {
		status = corev1.ConditionTrue
	}
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name,
			Annotations: map[string]string{"keep": "v-" + name, "drop": "x"}, OwnerReferences: []metav1.OwnerReference{
				{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: types.UID(uid), Controller: &yes},
			}},
		Spec:   corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}},
	}
}

// cached returns pods as the cache has them.
func cached(pods ...corev1.Pod) []cluster.Pod {
	kept := make([]cluster.Pod, len(pods))
	for i := range pods {
		kept[i] = *cluster.PodOf(&pods[i])
	}
	return kept
}

func terminating(pod corev1.Pod) corev1.Pod {
	pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	return pod
}

func web(replicas int32) *home.Workload {
	return &home.Workload{
		Ref: home.Ref{Group: "apps", Kind: "StatefulSet", Namespace: "ns", Name: "web"}, APIVersion: "apps/v1", UID: "1",
		Replicas: replicas,
	}
}

func states(nodeOf map[string]string) map[string]kruisev1alpha1.PodState {
	all := map[string]kruisev1alpha1.PodState{}
	for pod, node := range nodeOf {
		all[pod] = kruisev1alpha1.PodState{NodeName: node, NodeTopologyLabels: map[string]string{hostname: "host-" + node}}
	}
	return all
}

func nodesOf(all map[string]kruisev1alpha1.PodState) map[string]string {
	nodes := map[string]string{}
	for pod, state := range all {
		nodes[pod] = state.NodeName
	}
	return nodes
}

var byHostname = kruisev1alpha1.PersistentPodStateSpec{
	PreferredPersistentTopology: []kruisev1alpha1.PreferredTopologyTerm{{Weight: 100,
		Preference: kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{hostname}}}},
}

func TestARecordFollowsThePodWhereItIsReadyAndStaysMeanwhile(t *testing.T) {
	whenDeleted := byHostname
	whenDeleted.PersistentPodStateRetentionPolicy = kruisev1alpha1.RetentionWhenDeleted
	for name, c := range map[string]struct {
		spec     kruisev1alpha1.PersistentPodStateSpec
		w        *home.Workload
		was      map[string]string // nodes by pod
		pods     []corev1.Pod
		want     map[string]string
		moved    []string
		complete bool
	}{
		"Ready": {byHostname, web(2), nil,
			[]corev1.Pod{podOn("1", "web-0", "a", true), podOn("1", "web-1", "b", true)},
			map[string]string{"web-0": "a", "web-1": "b"}, nil, true},
		"never Ready": {byHostname, web(1), nil, []corev1.Pod{podOn("1", "web-0", "a", false)}, nil, nil, false},
		"not Ready any more": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{podOn("1", "web-0", "a", false)}, map[string]string{"web-0": "a"}, nil, true},
		"not Ready elsewhere": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{podOn("1", "web-0", "b", false)}, map[string]string{"web-0": "a"}, nil, true},
		"Ready elsewhere": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{podOn("1", "web-0", "b", true)}, map[string]string{"web-0": "b"}, []string{"web-0 from a"}, true},
		"terminating": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{terminating(podOn("1", "web-0", "b", true))}, map[string]string{"web-0": "a"}, nil, true},
		"gone": {byHostname, web(1), map[string]string{"web-0": "a"}, nil, map[string]string{"web-0": "a"},
			nil, true},
		"without a node": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{podOn("1", "web-0", "", false)}, map[string]string{"web-0": "a"}, nil, true},
		"a node not in the cache yet": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{podOn("1", "web-0", "new", true)}, map[string]string{"web-0": "a"}, nil, true},
		"of a namesake": {byHostname, web(1), nil, []corev1.Pod{podOn("another", "web-0", "a", true)}, nil, nil,
			false},
		"of a namesake, recorded": {byHostname, web(1), map[string]string{"web-0": "a"},
			[]corev1.Pod{podOn("another", "web-0", "b", true)}, map[string]string{"web-0": "a"}, nil, true},
		"scaled down, still there": {byHostname, web(0), map[string]string{"web-0": "a"},
			[]corev1.Pod{terminating(podOn("1", "web-0", "a", true))}, map[string]string{"web-0": "a"}, nil, true},
		"scaled down, gone": {byHostname, web(1), map[string]string{"web-0": "a", "web-4": "b"},
			[]corev1.Pod{podOn("1", "web-0", "a", true)}, map[string]string{"web-0": "a"}, nil, true},
		"scaled down, kept until the workload is deleted": {whenDeleted, web(1),
			map[string]string{"web-0": "a", "web-4": "b"},
			[]corev1.Pod{podOn("1", "web-0", "a", true)}, map[string]string{"web-0": "a", "web-4": "b"}, nil, true},
		"names without ordinals, one missing": {byHostname, web(2), map[string]string{"x": "a", "y": "b"},
			[]corev1.Pod{podOn("1", "x", "a", true)}, map[string]string{"x": "a", "y": "b"}, nil, true},
		"names without ordinals, replaced": {byHostname, web(2), map[string]string{"x": "a", "y": "b"},
			[]corev1.Pod{podOn("1", "x", "a", true), podOn("1", "z", "c", true)}, map[string]string{"x": "a", "z": "c"}, nil,
			true},
	} {
		t.Run(name, func(t *testing.T) {
			v := recordPods(&c.spec, c.w, states(c.was), cached(c.pods...), zonedNodes)
			if got := nodesOf(v.states); !equality.Semantic.DeepEqual(got, c.want) {
				t.Errorf("recorded: %v, want %v", got, c.want)
			}
			var moved []string
			for _, m := range v.moved {
				moved = append(moved, m.pod.GetName()+" from "+m.from)
			}
			if !slices.Equal(moved, c.moved) {
				t.Errorf("moved: %v, want %v", moved, c.moved)
			}
			if (v.recorded.reason == "") != c.complete {
				t.Errorf("all recorded: %v, want %v", v.recorded, c.complete)
			}
		})
	}
}

func TestANodeThatIsNotInTheCacheYetIsLookedForAgain(t *testing.T) {
	v := recordPods(&byHostname, web(1), nil, cached(podOn("1", "web-0", "new", true)), zonedNodes)
	if v.retry == 0 {
		t.Error("nothing would make the controller look again")
	}
}

func TestTheRecordHasTheKeysThatTheSpecNames(t *testing.T) {
	spec := kruisev1alpha1.PersistentPodStateSpec{
		RequiredPersistentTopology:  &kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{zone}},
		PreferredPersistentTopology: byHostname.PreferredPersistentTopology,
		PersistentPodAnnotations:    []kruisev1alpha1.PersistentPodAnnotation{{Key: "keep"}, {Key: "absent"}},
	}
	pods := []corev1.Pod{podOn("1", "web-0", "a", true), podOn("1", "web-1", "c", true), podOn("1", "web-2", "b", true)}
	v := recordPods(&spec, web(3), nil, cached(pods...), zonedNodes)
	want := map[string]kruisev1alpha1.PodState{
		"web-0": {NodeName: "a", NodeTopologyLabels: map[string]string{zone: "east", hostname: "host-a"},
			Annotations: map[string]string{"keep": "v-web-0"}},
		"web-1": {NodeName: "c", NodeTopologyLabels: map[string]string{hostname: "host-c"},
			Annotations: map[string]string{"keep": "v-web-1"}},
		"web-2": {NodeName: "b", NodeTopologyLabels: map[string]string{zone: "west", hostname: "host-b"},
			Annotations: map[string]string{"keep": "v-web-2"}},
	}
	if !reflect.DeepEqual(v.states, want) {
		t.Errorf("recorded %v, want %v", v.states, want)
	}

	// Without the required key and the annotations, for pods that are Ready, not Ready and gone.
	v = recordPods(&byHostname, web(3), v.states, cached(pods[0], podOn("1", "web-1", "c", false)), zonedNodes)
	want = map[string]kruisev1alpha1.PodState{
		"web-0": {NodeName: "a", NodeTopologyLabels: map[string]string{hostname: "host-a"}},
		"web-1": {NodeName: "c", NodeTopologyLabels: map[string]string{hostname: "host-c"}},
		"web-2": {NodeName: "b", NodeTopologyLabels: map[string]string{hostname: "host-b"}},
	}
	if !reflect.DeepEqual(v.states, want) {
		t.Errorf("recorded %v, want %v", v.states, want)
	}
}

// What a pod was told at its start may be another pod's when the next one starts.
func TestAnnotationsThatTellAPodItsAddressesAreNotRecorded(t *testing.T) {
	spec := byHostname
	pod := podOn("1", "web-0", "a", true)
	was := map[string]kruisev1alpha1.PodState{"web-1": {NodeName: "a", Annotations: map[string]string{"keep": "w"}}}
	pod.Annotations = map[string]string{"keep": "v"}
	for _, key := range []string{"keep", "stayput.io/addresses", "stayput.io/identity", "ipam.spidernet.io/ippool",
		"io.kubernetes.cri/reserved-ip-duration", "cni.projectcalico.org/podIP"} {
		spec.PersistentPodAnnotations = append(spec.PersistentPodAnnotations,
			kruisev1alpha1.PersistentPodAnnotation{Key: key})
		if key != "keep" {
			pod.Annotations[key] = "192.0.2.1"
			was["web-1"].Annotations[key] = "192.0.2.1" // as a former version recorded
		}
	}
	v := recordPods(&spec, web(2), was, cached(pod), zonedNodes)
	for name, want := range map[string]string{"web-0": "v", "web-1": "w"} {
		if is := v.states[name].Annotations; !reflect.DeepEqual(is, map[string]string{"keep": want}) {
			t.Errorf("of %s is recorded %v", name, is)
		}
	}
	if v.degraded.reason != reasonNotRecordable {
		t.Errorf("its object says %+v", v.degraded)
	}
}

func TestFromThreeThousandPodsOnOnlyNodesAreRecorded(t *testing.T) {
	for _, n := range []int{tooManyPods - 1, tooManyPods} {
		var pods []corev1.Pod
		for i := range n {
			pods = append(pods, podOn("1", fmt.Sprintf("web-%d", i), "a", true))
		}
		v := recordPods(&byHostname, web(int32(n)), nil, cached(pods...), zonedNodes)
		one, tooMany := v.states["web-7"], n >= tooManyPods
		if len(v.states) != n || one.NodeName != "a" || (one.NodeTopologyLabels == nil) != tooMany ||
			(v.degraded.reason == reasonTooManyPods) != tooMany {
			t.Errorf("%d pods: %d recorded, such as %v, %v", n, len(v.states), one, v.degraded)
		}
	}
}

func in(key, value string) []corev1.NodeSelectorRequirement {
	return []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}}
}

func TestAPodOfThousandsComesHomeByTheLabelsOfItsNode(t *testing.T) {
	spec := kruisev1alpha1.PersistentPodStateSpec{
		RequiredPersistentTopology:  &kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{zone, "absent"}},
		PreferredPersistentTopology: byHostname.PreferredPersistentTopology,
	}
	var pods []corev1.Pod
	for i := range tooManyPods {
		pods = append(pods, podOn("1", fmt.Sprintf("web-%d", i), "node-1", true))
	}
	nodes := hometest.Nodes{hometest.Node("node-1", "a"), hometest.Node("node-2", "b")}
	v := recordPods(&spec, web(tooManyPods), nil, cached(pods...), nodes)
	s := home.Situation{Now: hometest.Noon, Nodes: nodes, Pod: hometest.Pod(),
		Record: &home.Record{Spec: spec, State: v.states["web-7"]}}
	if len(s.Record.State.NodeTopologyLabels) > 0 {
		t.Fatal("the labels are recorded: the test shows nothing")
	}

	d := home.Decide(s)
	placed := d.Affinity.Merge(nil)
	required := placed.RequiredDuringSchedulingIgnoredDuringExecution
	preferred := placed.PreferredDuringSchedulingIgnoredDuringExecution
	if d.Outcome != home.OutcomeHome || required == nil || len(required.NodeSelectorTerms) != 1 || len(preferred) != 1 ||
		!equality.Semantic.DeepEqual(required.NodeSelectorTerms[0].MatchExpressions, in(zone, "a")) ||
		!equality.Semantic.DeepEqual(preferred[0].Preference.MatchExpressions, in(hostname, "node-1")) {
		t.Errorf("decided %+v, by %+v", d, placed)
	}

	hometest.Cordoned(nodes[0])
	if d := home.Decide(s); d.Outcome != home.OutcomeWait || !strings.Contains(d.Reason, "is cordoned") {
		t.Errorf("its node is cordoned: decided %+v", d)
	}
	s.Nodes = nodes[1:]
	if d := home.Decide(s); d.Outcome != home.OutcomeElsewhere || d.Home != "node node-1" ||
		d.Reason != "no longer exists" {
		t.Errorf("its node is gone: decided %+v", d)
	}
}
