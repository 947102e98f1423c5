package home

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home/hometest"
)

var noon = hometest.Noon

func notReady(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }

func tainted(n *corev1.Node) {
	n.Spec.Taints = append(n.Spec.Taints,
		corev1.Taint{Key: "dedicated", Value: "batch", Effect: corev1.TaintEffectNoSchedule})
}

func tolerating(p *corev1.Pod) {
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
}

// removedBy has an autoscaler remove a node.
func removedBy(key, value string) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints,
			corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffectNoSchedule})
	}
}

func declaredOff(n *corev1.Node) {
	n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService,
		Effect: corev1.TaintEffectNoExecute})
}

func deleted(n *corev1.Node) {
	at := metav1.NewTime(noon)
	n.DeletionTimestamp = &at
}

// labelledAsNode2 gives a node the host name of another one.
func labelledAsNode2(n *corev1.Node) { n.Labels[corev1.LabelHostname] = "node-2" }

// rejections are by node-1, one a second, the last some time ago.
func rejections(times int, ago time.Duration) (r Rejections) {
	for i := range times {
		r = r.With("node-1", "SysctlForbidden: no", noon.Add(-ago-time.Duration(times-1-i)*time.Second))
	}
	return r
}

func recordWith(required, preferred []string) *Record {
	r := &Record{
		Object: types.NamespacedName{Namespace: "default", Name: "web"},
		State: kruisev1alpha1.PodState{
			NodeName:           "node-1",
			NodeTopologyLabels: map[string]string{corev1.LabelHostname: "node-1", corev1.LabelTopologyZone: "a"},
		},
	}
	if required != nil {
		r.Spec.RequiredPersistentTopology = &kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: required}
	}
	for _, key := range preferred {
		r.Spec.PreferredPersistentTopology = append(r.Spec.PreferredPersistentTopology,
			kruisev1alpha1.PreferredTopologyTerm{Weight: 7,
				Preference: kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{key}}})
	}
	return r
}

func TestDecisions(t *testing.T) {
	healthy := hometest.Nodes{hometest.Node("node-1", "a"), hometest.Node("node-2", "a"), hometest.Node("node-3", "b")}
	with := func(change ...func(*corev1.Node)) hometest.Nodes {
		return hometest.Nodes{hometest.Node("node-1", "a", change...), hometest.Node("node-2", "a"),
			hometest.Node("node-3", "b")}
	}
	byName1 := &Record{ByName: true, Spec: recordWith([]string{corev1.LabelHostname}, nil).Spec,
		State: kruisev1alpha1.PodState{NodeName: "node-1"}}
	for _, c := range []struct {
		name      string
		s         Situation
		outcome   Outcome
		node      string
		nominate  string
		lost      string
		required  []string
		without   []string
		preferred int
		retry     time.Duration
		says      string
	}{
		{name: "a pod without a home goes anywhere", s: Situation{Nodes: healthy}, outcome: OutcomeFree},
		{name: "a healthy home takes its pod", s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}},
			outcome: OutcomeHome, node: "node-1"},
		{name: "a cordoned home is waited for",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"}}, outcome: OutcomeWait,
			retry: 50 * time.Second, says: "is cordoned"},
		{name: "a tolerated cordon is no reason to wait",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(func(p *corev1.Pod) {
					p.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists}}
				})}, outcome: OutcomeHome, node: "node-1"},
		{name: "a home that is not Ready is waited for",
			s: Situation{Nodes: with(notReady), Address: Address{Node: "node-1"}}, outcome: OutcomeWait, retry: 50 * time.Second,
			says: "is not Ready"},
		{name: "a tainted home is waited for", s: Situation{Nodes: with(tainted), Address: Address{Node: "node-1"}},
			outcome: OutcomeWait, retry: 50 * time.Second, says: "dedicated=batch:NoSchedule"},
		{name: "a wait ends",
			s: Situation{
				Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"}, Now: noon.Add(50 * time.Second),
			},
			outcome: OutcomeElsewhere, says: "is cordoned"},
		{name: "a wait does not end early",
			s: Situation{
				Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"}, Now: noon.Add(50*time.Second - 1),
			},
			outcome: OutcomeWait, retry: 1},
		{name: "home-wait of the template",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "5m"))}, outcome: OutcomeWait,
			retry: 290 * time.Second},
		{name: "home-wait of zero does not wait",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "0s"))}, outcome: OutcomeElsewhere},
		{name: "home-wait as long as the address is kept",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1", Until: noon.Add(time.Hour)},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: OutcomeWait,
			retry: time.Hour},
		{name: "home-wait as long as an address without an end",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: OutcomeWait},
		{name: "a home-wait that cannot be read is the default, and said",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "soon"))}, outcome: OutcomeWait,
			retry: 50 * time.Second, says: `"soon" is not valid: expected a duration`},
		{name: "a guess is waited for until it is known",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1", Guess: noon.Add(7 * time.Second)},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: OutcomeWait,
			retry: 7 * time.Second},
		{name: "a home that is being deleted is not waited for",
			s: Situation{Nodes: with(hometest.Cordoned, deleted), Address: Address{Node: "node-1"}}, outcome: OutcomeElsewhere,
			says: "is being deleted"},
		{name: "nor one that cluster-autoscaler removes",
			s: Situation{Nodes: with(removedBy("ToBeDeletedByClusterAutoscaler", "1790000000")),
				Address: Address{Node: "node-1"}}, outcome: OutcomeElsewhere, says: "is being removed by cluster-autoscaler"},
		{name: "nor one that Karpenter removes",
			s:       Situation{Nodes: with(removedBy("karpenter.sh/disrupted", "")), Address: Address{Node: "node-1"}},
			outcome: OutcomeElsewhere, says: "is being removed by Karpenter"},
		{name: "nor one that an older Karpenter removes, whatever the pod tolerates",
			s: Situation{Nodes: with(removedBy("karpenter.sh/disruption", "disrupting")), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(tolerating)}, outcome: OutcomeElsewhere, says: "is being removed by Karpenter"},
		{name: "nor one that an operator has declared off, whatever the pod tolerates",
			s: Situation{Nodes: with(notReady, declaredOff), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(tolerating)},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "is out of service"},
		{name: "which is as any taint once the node is back",
			s:       Situation{Nodes: with(declaredOff), Address: Address{Node: "node-1"}},
			outcome: OutcomeWait, retry: 50 * time.Second, says: "has the taint node.kubernetes.io/out-of-service"},
		{name: "a home that an autoscaler only considers to remove takes its pod",
			s: Situation{Nodes: with(func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: "DeletionCandidateOfClusterAutoscaler",
					Effect: corev1.TaintEffectPreferNoSchedule}}
			}), Address: Address{Node: "node-1"}}, outcome: OutcomeHome, node: "node-1"},
		{name: "a deleted home is not waited for, and the scheduler kept from it, which may not know yet",
			s:       Situation{Nodes: healthy[1:], Address: Address{Node: "node-1"}},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "no longer exists"},
		{name: "but not again once it found no other node",
			s:       Situation{Nodes: healthy[1:], Address: Address{Node: "node-1"}, GivenUp: true},
			outcome: OutcomeElsewhere, says: "no longer exists"},
		{name: "a zone whose recorded node is deleted keeps the pod off that",
			s:       Situation{Nodes: healthy[1:], Record: recordWith([]string{corev1.LabelTopologyZone}, nil)},
			outcome: OutcomeHome, required: []string{"topology.kubernetes.io/zone=a"}, without: []string{"node-1"}},
		{name: "a home that the pod's own selector excludes is reported, not enforced",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Pod: hometest.Pod(func(p *corev1.Pod) {
				p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "node-2"}
			})}, outcome: OutcomeElsewhere, says: "node selector"},
		{name: "a pod whose predecessor waited in vain goes free",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, GivenUp: true}, outcome: OutcomeElsewhere,
			nominate: "node-1", preferred: 1, says: "no room"},
		{name: "and so does one of a recorded place",
			s:       Situation{Nodes: healthy, Record: recordWith([]string{corev1.LabelTopologyZone}, nil), GivenUp: true},
			outcome: OutcomeElsewhere, preferred: 1, says: "no room"},
		{name: "a pod that prefers its home is drawn there and held nowhere",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeHome, nominate: "node-1", preferred: 1},
		{name: "what its record requires still is",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Record: recordWith([]string{corev1.LabelTopologyZone}, nil),
				Pod:    hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeHome, nominate: "node-1", preferred: 1, required: []string{"topology.kubernetes.io/zone=a"}},
		{name: "without an address it is drawn to the node that its record prefers",
			s: Situation{Nodes: healthy, Record: recordWith(nil, []string{corev1.LabelHostname}),
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeHome, nominate: "node-1", preferred: 1},
		{name: "and nominated for none that cannot take it",
			s: Situation{Nodes: with(hometest.Cordoned), Record: recordWith(nil, []string{corev1.LabelHostname}),
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeHome, preferred: 1},
		{name: "nor for one of a zone that it prefers",
			s: Situation{Nodes: healthy, Record: recordWith(nil, []string{corev1.LabelTopologyZone}),
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeHome, preferred: 1},
		{name: "it waits like others for a home that cannot take it now",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeWait, retry: 50 * time.Second, says: "is cordoned"},
		{name: "one that never preempts is not nominated: the scheduler would not take that back",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"), func(p *corev1.Pod) {
					never := corev1.PreemptNever
					p.Spec.PreemptionPolicy = &never
				})}, outcome: OutcomeHome, preferred: 1},
		{name: "neither required nor preferred is required, and said",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "preferred"))},
			outcome: OutcomeHome, node: "node-1", says: `"preferred" is not valid: expected Required or Preferred`},
		{name: "a home that vanished while it was waited for is said to be lost",
			s: Situation{Nodes: healthy, Waited: "node node-1"}, outcome: OutcomeFree, lost: "node node-1"},
		{name: "and so it is if an older home is left",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-2"}, Waited: "node node-1"},
			outcome: OutcomeHome, node: "node-2", lost: "node node-1"},
		{name: "a home that is back is not lost",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Waited: "node node-1"},
			outcome: OutcomeHome, node: "node-1"},

		{name: "what is preferred holds nobody up",
			s:       Situation{Nodes: with(hometest.Cordoned), Record: recordWith(nil, []string{corev1.LabelHostname})},
			outcome: OutcomeHome, preferred: 1},
		{name: "a required host", s: Situation{Nodes: healthy, Record: recordWith([]string{corev1.LabelHostname}, nil)},
			outcome: OutcomeHome, required: []string{"kubernetes.io/hostname=node-1"}},
		{name: "a required host that is cordoned",
			s:       Situation{Nodes: with(hometest.Cordoned), Record: recordWith([]string{corev1.LabelHostname}, nil)},
			outcome: OutcomeWait, retry: 50 * time.Second, says: "is cordoned"},
		{name: "a required host that is gone",
			s: Situation{Nodes: healthy[1:],
				Record: recordWith([]string{corev1.LabelHostname}, []string{corev1.LabelTopologyZone})}, outcome: OutcomeElsewhere,
			preferred: 1, without: []string{"node-1"}, says: "no longer exist"},
		{name: "a required zone takes another node of it",
			s:       Situation{Nodes: with(hometest.Cordoned), Record: recordWith([]string{corev1.LabelTopologyZone}, nil)},
			outcome: OutcomeHome, required: []string{"topology.kubernetes.io/zone=a"}},
		{name: "a label that the node lacked requires nothing",
			s: Situation{Nodes: healthy, Record: recordWith([]string{"rack"}, []string{"rack"})}, outcome: OutcomeFree},
		{name: "address and record together",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Record: recordWith([]string{corev1.LabelTopologyZone}, []string{corev1.LabelHostname})},
			outcome: OutcomeHome, node: "node-1", preferred: 1},
		{name: "the address wins over a record of another place",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-3"},
				Record: recordWith([]string{corev1.LabelTopologyZone}, nil)},
			outcome: OutcomeHome, node: "node-3", says: "using the node of the IP"},

		{name: "a recorded node is a home by its name, whatever its labels are",
			s:       Situation{Nodes: with(labelledAsNode2), Record: byName1},
			outcome: OutcomeHome, node: "node-1"},
		{name: "it is waited for",
			s: Situation{Nodes: with(hometest.Cordoned), Record: byName1}, outcome: OutcomeWait, retry: 50 * time.Second,
			says: "is cordoned"},
		{name: "and not once it is gone", s: Situation{Nodes: healthy[1:], Record: byName1},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "no longer exists"},
		{name: "a pod that prefers it is drawn there",
			s: Situation{Nodes: with(labelledAsNode2), Record: byName1,
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeHome, nominate: "node-1", preferred: 1},
		{name: "and waits for nothing",
			s: Situation{Nodes: with(hometest.Cordoned), Record: byName1,
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeElsewhere, says: "is cordoned"},

		{name: "a home whose kubelet rejected the pod pauses",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(1, time.Second/2)},
			outcome: OutcomeWait, retry: time.Second / 2, says: "rejected the pod (SysctlForbidden: no)"},
		{name: "is tried again",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(1, time.Second)},
			outcome: OutcomeHome, node: "node-1"},
		{name: "pauses longer each time",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(5, 6*time.Second)},
			outcome: OutcomeWait, retry: 10 * time.Second, says: "SysctlForbidden"},
		{name: "and no longer than home-wait since the first",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(7, 30*time.Second)},
			// the first was a second before each further one
			outcome: OutcomeWait, retry: 24 * time.Second, says: "SysctlForbidden"},
		{name: "then it is given up, and the scheduler kept from it",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(7, 54*time.Second)},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "rejected the pod (SysctlForbidden: no)"},
		{name: "so it is by a pod that prefers it",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(7, 54*time.Second),
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "rejected the pod"},
		{name: "and, if the node is only recorded, at once",
			s: Situation{Nodes: healthy, Record: byName1, Rejections: rejections(1, 0),
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred"))},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "rejected the pod"},
		{name: "a recorded node is given up too",
			s:       Situation{Nodes: healthy, Record: byName1, Rejections: rejections(7, 54*time.Second)},
			outcome: OutcomeElsewhere, without: []string{"node-1"}, says: "rejected the pod"},
		{name: "a pod that waits as long as its address is kept tries again and again",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Rejections: rejections(90, 20*time.Second),
				Pod: hometest.Pod(hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))},
			outcome: OutcomeWait, retry: 40 * time.Second, says: "rejected the pod"},
		{name: "another node of the zone takes the pod at once",
			s: Situation{Nodes: healthy, Record: recordWith([]string{corev1.LabelTopologyZone}, nil),
				Rejections: rejections(1, 0)},
			outcome: OutcomeHome, required: []string{"topology.kubernetes.io/zone=a"}, without: []string{"node-1"}},
		{name: "a zone that rejects the pod on each node pauses",
			s: Situation{Nodes: healthy, Record: recordWith([]string{corev1.LabelTopologyZone}, nil),
				Rejections: rejections(1, 0).With("node-2", "OutOfcpu", noon)},
			outcome: OutcomeWait, retry: 2 * time.Second, says: "rejected the pod (OutOfcpu)"},
		{name: "a home is not given up because another node rejected the pod",
			s: Situation{Nodes: with(hometest.Cordoned), Address: Address{Node: "node-1"},
				Rejections: Rejections{}.With("node-2", "OutOfcpu", noon.Add(-time.Hour))},
			outcome: OutcomeWait, retry: 50 * time.Second, says: "is cordoned"},
		{name: "a pod without a home is the scheduler's alone",
			s: Situation{Nodes: healthy, Rejections: rejections(7, time.Hour)}, outcome: OutcomeFree},

		{name: "an ungated pod is not ours until the scheduler has spoken",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Pinned, func(p *corev1.Pod) { p.Status.Conditions = nil }), Now: noon.Add(time.Hour)},
			outcome: OutcomeFree},
		{name: "a full home is waited for",
			s:       Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Pod: hometest.Pod(hometest.Pinned)},
			outcome: OutcomeWait, retry: 50 * time.Second, says: "no room"},
		{name: "a home that stays full is given up",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Pod: hometest.Pod(hometest.Pinned),
				Now: noon.Add(50 * time.Second)}, outcome: OutcomeEvict, says: "no room"},
		{name: "the wait begins when nothing else holds the pod, or when the scheduler first finds no room",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"},
				Pod: hometest.Pod(hometest.Pinned, func(p *corev1.Pod) {
					p.CreationTimestamp = metav1.NewTime(noon.Add(-time.Hour))
				}), Since: noon.Add(-59 * time.Second)}, outcome: OutcomeWait, retry: time.Second, says: "no room"},
		{name: "a pod for which the scheduler makes room is never evicted",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Now: noon.Add(time.Hour),
				Pod: hometest.Pod(hometest.Pinned, func(p *corev1.Pod) { p.Status.NominatedNodeName = "node-1" })},
			outcome: OutcomeFree},
		{name: "nor one that no node would take",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Now: noon.Add(time.Hour),
				Pod: hometest.Pod(hometest.Pinned, hometest.Refused(`0/3 nodes are available: persistentvolumeclaim "data-web-0" `+
					`not found. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.`))},
			outcome: OutcomeFree},
		{name: "one whose volume is on another node is",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Now: noon.Add(time.Hour),
				Pod: hometest.Pod(hometest.Pinned, hometest.Refused(`0/3 nodes are available: node(s) didn't satisfy plugin(s) `+
					`[NodeAffinity VolumeBinding] simultaneously.`))},
			outcome: OutcomeEvict, says: "VolumeBinding"},
		{name: "and one of which another scheduler speaks",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1"}, Now: noon.Add(time.Hour),
				Pod: hometest.Pod(hometest.Pinned, hometest.Refused("all nodes are unavailable"))},
			outcome: OutcomeEvict, says: "all nodes are unavailable"},
		{name: "a pod whose home is removed while it waits for room there waits no longer",
			s:       Situation{Nodes: with(removedBy("karpenter.sh/disrupted", "")), Pod: hometest.Pod(hometest.Pinned)},
			outcome: OutcomeEvict, says: "is being removed by Karpenter"},
		{name: "the wait for room as long as the address is kept",
			s: Situation{Nodes: healthy, Address: Address{Node: "node-1", Until: noon.Add(time.Hour)},
				Pod: hometest.Pod(hometest.Pinned, hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))},
			outcome: OutcomeWait, retry: time.Hour},
		{name: "a pod that is not pinned is never evicted",
			s: Situation{Nodes: healthy,
				Pod: hometest.Pod(hometest.Pinned, func(p *corev1.Pod) { delete(p.Annotations, stayputv1alpha1.AnnotationPinned) }),
				Now: noon.Add(time.Hour)}, outcome: OutcomeFree},
		{name: "nor one whose template was copied from a pod that was",
			s:       Situation{Nodes: healthy, Pod: hometest.Pod(hometest.Pinned, hometest.Copied), Now: noon.Add(time.Hour)},
			outcome: OutcomeFree},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.s.Now.IsZero() {
				c.s.Now = noon
			}
			if c.s.Pod == nil {
				c.s.Pod = hometest.Pod()
			}
			d := Decide(c.s)
			var required []string
			for _, r := range d.Affinity.Required {
				required = append(required, r.Key+"="+strings.Join(r.Values, ","))
			}
			if d.Outcome != c.outcome || d.Affinity.Node != c.node || d.Nominate != c.nominate ||
				d.Lost != c.lost || !slices.Equal(required, c.required) || !slices.Equal(d.Affinity.Without, c.without) ||
				len(d.Affinity.Preferred) != c.preferred || d.Retry != c.retry {
				t.Errorf("decided %+v", d)
			}
			if said := d.Reason + " " + strings.Join(d.Notes, " "); !strings.Contains(said, c.says) {
				t.Errorf("said %q, not %q", said, c.says)
			}
		})
	}
}

func TestTheHomeIsWhereThePodWasLast(t *testing.T) {
	at := func(node string, phase stayputv1alpha1.Phase, since time.Duration,
		expires *metav1.Time) *stayputv1alpha1.RetainedIP {
		when := metav1.NewTime(noon.Add(since))
		return &stayputv1alpha1.RetainedIP{
			Spec:   stayputv1alpha1.RetainedIPSpec{NodeName: node},
			Status: stayputv1alpha1.RetainedIPStatus{Phase: phase, Since: &when, Expires: expires},
		}
	}
	old := at("node-1", stayputv1alpha1.PhaseRetained, -time.Hour, nil)
	released := at("node-2", stayputv1alpha1.PhaseRetained, -time.Minute, nil)
	released.Spec.Release = stayputv1alpha1.ReleaseNow
	expired := at("node-3", stayputv1alpha1.PhaseRetained, -time.Minute, &metav1.Time{Time: noon})
	stale := at("node-4", stayputv1alpha1.PhaseBound, -time.Minute, nil) // down, so it does not report the pod's end
	// A node that lost its power came back, and noticed the end of the pod only then.
	lastBound := func(at time.Duration, r *stayputv1alpha1.RetainedIP) *stayputv1alpha1.RetainedIP {
		when := metav1.NewTime(noon.Add(at))
		r = r.DeepCopy()
		r.Status.LastBoundTime = &when
		return r
	}
	back := at("node-5", stayputv1alpha1.PhaseRetained, -time.Second, nil)
	type kept = []*stayputv1alpha1.RetainedIP
	for _, c := range []struct {
		name  string
		kept  kept
		last  Ended
		home  string
		guess bool
	}{
		{"nowhere", nil, Ended{}, "", false},
		{"what is released or expired is no home", kept{old, released, expired}, Ended{}, "node-1", false},
		{"unless it was seen, the newest, whatever its phase", kept{stale, old}, Ended{}, "node-4", false},
		{"where it was bound last, though another node noticed its end later",
			kept{lastBound(-2*time.Hour, back), lastBound(-time.Hour, stale)}, Ended{}, "node-4", false},
		{"where it was bound last, though it still seems to run elsewhere",
			kept{lastBound(-time.Hour, back), lastBound(-2*time.Hour, stale)}, Ended{}, "node-5", false},
		{"a node that does not say when it was bound last says when its phase began",
			kept{lastBound(-30*time.Second, back), stale}, Ended{}, "node-5", false},
		{"and may have been the last", kept{lastBound(-2*time.Minute, back), stale}, Ended{}, "node-4", false},
		{"not where it will be bound", kept{lastBound(-time.Hour, back), lastBound(time.Hour, stale)}, Ended{}, "node-5",
			false},
		{"unless the clocks just differ", kept{lastBound(-time.Hour, back), lastBound(time.Second, stale)}, Ended{},
			"node-4", false},
		{"where it was seen, though another node says so later", kept{back, stale}, Ended{Node: "node-4", At: noon}, "node-4",
			false},
		{"where it was seen, however long ago", kept{back, stale}, Ended{Node: "node-4", At: noon.Add(-time.Hour)}, "node-4",
			false},
		{"where it was seen, though that is not published yet", kept{back}, Ended{Node: "node-4", At: noon, Fresh: true},
			"node-4", true},
		{"where it was seen, if nobody keeps anything", nil, Ended{Node: "node-4", At: noon}, "node-4", true},
		{"not where it was seen for so long that what is kept there would be published", kept{back},
			Ended{Node: "node-4", At: noon}, "node-5", false},
		{"not where it was seen if nothing of it was published in time", kept{back},
			Ended{Node: "node-4", At: noon.Add(-Publishing), Fresh: true}, "node-5", false},
		{"not where it was seen if that was released", kept{released, back}, Ended{Node: "node-2", At: noon, Fresh: true},
			"node-5", false},
		{"nor if that has expired, and nobody else keeps anything", kept{expired},
			Ended{Node: "node-3", At: noon, Fresh: true}, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := AddressOf(hometest.Pod(), c.kept, c.last, hometest.Nodes{hometest.Node("node-4", "a")}, noon)
			if a.Node != c.home || a.Guess.IsZero() == c.guess {
				t.Errorf("home %q, a guess until %v, not %q", a.Node, a.Guess, c.home)
			}
		})
	}

	for _, c := range []struct {
		name     string
		kept     kept
		vanished *stayputv1alpha1.RetainedIP
		after    time.Duration
		node     func(*corev1.Node)
		home     string
	}{
		{"a node whose object vanished keeps it", nil, stale, 0, func(*corev1.Node) {}, "node-4"},
		{"and is newer than others", kept{old}, stale, 0, func(*corev1.Node) {}, "node-4"},
		{"or older", kept{back}, stale, 0, func(*corev1.Node) {}, "node-5"},
		{"it would have published it again by now", nil, stale, Publishing, func(*corev1.Node) {}, ""},
		{"while it is not Ready it publishes nothing", nil, stale, time.Hour, notReady, "node-4"},
		{"it needs a moment when it is back", nil, stale, time.Hour, func(n *corev1.Node) {
			n.Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(time.Hour - Publishing/2))
		}, "node-4"},
		{"what has expired is kept nowhere", nil, expired, 0, notReady, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			nodes := hometest.Nodes{hometest.Node("node-4", "a", c.node), hometest.Node("node-3", "a", c.node)}
			gone := Ended{Vanished: []Vanished{{c.vanished, noon}}}
			if a := AddressOf(hometest.Pod(), c.kept, gone, nodes, noon.Add(c.after)); a.Node != c.home {
				t.Errorf("home %q, not %q", a.Node, c.home)
			}
		})
	}
	down := hometest.Nodes{hometest.Node("node-4", "a", notReady)}
	a := AddressOf(hometest.Pod(), nil, Ended{Node: "node-4", At: noon.Add(-time.Hour)}, down, noon)
	if a.Node != "node-4" || !a.Until.Equal(noon.Add(10*time.Minute-10*time.Second)) {
		t.Errorf("of a node that is down since the pod was deleted: %+v", a)
	}

	running := hometest.Pod(hometest.RanOn("node-4"))
	nodes := []corev1.Node{*hometest.Node("node-4", "a"), *hometest.Node("node-5", "a")}
	if d, node := Foresee(noon, running, kept{back, stale}, nil, nodes); node != "node-4" {
		t.Errorf("foreseen for a pod that runs on node-4: %q, %+v", node, d)
	}
	noted := old.DeepCopy()
	noted.Spec.PodName, noted.Spec.Scheduled = "web-0", "pod/web-0"
	nodes = append(nodes, *hometest.Node("node-1", "a"))
	if d, node := Foresee(noon, hometest.Pod(), kept{back, noted}, nil, nodes); node != "node-1" {
		t.Errorf("foreseen for a pod that nobody saw on the node that kept an address last: %q, %+v", node, d)
	}
}

func TestAnAddressOfASilentNodeIsKeptFromThePodsCreationOn(t *testing.T) {
	silent := &stayputv1alpha1.RetainedIP{
		Spec:   stayputv1alpha1.RetainedIPSpec{Retention: "10m"},
		Status: stayputv1alpha1.RetainedIPStatus{Phase: stayputv1alpha1.PhaseBound},
	}
	if until := keptFor(silent, hometest.Pod()); !until.Equal(noon.Add(10*time.Minute - 10*time.Second)) {
		t.Errorf("until %s", until)
	}
	silent.Spec.Retention = stayputv1alpha1.RetentionWhileOwned
	if until := keptFor(silent, hometest.Pod()); !until.IsZero() {
		t.Errorf("while owned until %s", until)
	}
	silent.Status.Phase, silent.Status.Expires = stayputv1alpha1.PhaseRetained, &metav1.Time{Time: noon}
	if until := keptFor(silent, hometest.Pod()); !until.Equal(noon) {
		t.Errorf("retained until %s", until)
	}
}

func TestAPodThatSaysTooMuchOfItsNodesIsNotHeldAtItsHome(t *testing.T) {
	terms := func(n, values int) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			selector := &corev1.NodeSelector{}
			for range n {
				selector.NodeSelectorTerms = append(selector.NodeSelectorTerms, corev1.NodeSelectorTerm{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpNotIn,
						Values: slices.Repeat([]string{"b"}, values)}}})
			}
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: selector}}
		}
	}
	for name, c := range map[string]struct {
		pod  func(*corev1.Pod)
		says string
	}{
		"as much as it may": {terms(100, 9), ""},
		"too many terms":    {terms(101, 1), "101 terms of node affinity, more than 100"},
		"too many values": {terms(1, 1000), "1001 requirements and values of node affinity, node selectors and " +
			"tolerations, more than 1000"},
		"preferred, as well": {func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: make([]corev1.PreferredSchedulingTerm, 101)}}
		}, "101 terms"},
		"too many tolerations": {func(p *corev1.Pod) { p.Spec.Tolerations = make([]corev1.Toleration, 1001) },
			"1001 requirements"},
	} {
		d := Decide(Situation{Now: noon, Pod: hometest.Pod(c.pod), Nodes: hometest.Nodes{hometest.Node("node-1", "a")},
			Address: Address{Node: "node-1"}})
		said := strings.Join(d.Notes, " ")
		if (d.Outcome == OutcomeFree && d.Affinity.Empty()) != (c.says != "") || !strings.Contains(said, c.says) {
			t.Errorf("%s: %s, says %q", name, d.Outcome, said)
		}
	}
}

// However many nodes there are, a pod's own affinity is parsed once.
func TestADecisionParsesThePodsAffinityOnce(t *testing.T) {
	affinity := func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpIn,
					Values: slices.Repeat([]string{"b"}, 900)}}}}}}}
	}
	pod, node := hometest.Pod(affinity), hometest.Node("node-1", "a")
	p := placing{pod: candidateOf(pod)}
	parsing := testing.AllocsPerRun(10, func() { candidateOf(pod) })
	if each := testing.AllocsPerRun(10, func() { p.obstacle(&Decision{}, node) }); each >= parsing {
		t.Errorf("%v allocations for a node, %v to parse the affinity", each, parsing)
	}
}
