package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"unique"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// Pod is what the caches keep of a pod: what a decision may depend on. It is read-only, and its ObjectMeta has nothing
// of a pod that no rule reads.
type Pod struct {
	metav1.ObjectMeta // without labels and owners, which GetLabels and GetOwnerReferences return
	controller        unique.Handle[metav1.OwnerReference]
	labels            [len(keptLabels)]string
	labelled          [len(keptLabels)]bool
	node, ip          string
	phase             corev1.PodPhase
	started           *metav1.Time
	ready             *metav1.Time // since when it is, nil if it is not
	sandboxless       bool
	hostNetwork       bool
	rejected          *corev1.PodStatus // what the kubelet says that did not admit the pod, nil if one did
	waiting           *waiting          // nil if the pod has a node
}

// keptLabels are the labels that are kept.
var keptLabels = [...]string{appsv1.PodIndexLabel, gate.ManagedLabel}

// waiting is what is kept of a pod without a node.
type waiting struct {
	gates      []corev1.PodSchedulingGate
	pinned     bool
	preemption *corev1.PreemptionPolicy
	status     corev1.PodStatus
	// where is a PodSpec as a protobuf message, with what says where the pod may go. It is decoded for a decision only:
	// a term of two bytes takes dozens then.
	where []byte
	// tooLong says that where is longer than waitingMost, and is not kept.
	tooLong bool
}

// The most bytes that are kept of one pod beside its name and its like. Without it, a user who may create pods could
// fill the memory of every controller, and then no pod would be placed.
const (
	// waitingMost is for what says where a pod without a node may go, and its own annotations.
	waitingMost = 64 << 10
	// oursMost is for the annotations that stayput reads but [stayputv1alpha1.AnnotationAddresses], which the controller
	// itself writes; othersMost for those that a PersistentPodState may name.
	oursMost, othersMost = 16 << 10, 16 << 10
	// notedMost is for each annotation of [NotedByCalico].
	notedMost = 1 << 10
	// managedMost and messageMost are for one managed field and what the scheduler or a kubelet says.
	managedMost, messageMost = 4 << 10, 1 << 10
	// nameMost is for each string by which an owner is known: longer than any name can be.
	nameMost = 512
	// gatesMost is how many gates are kept.
	gatesMost = 16
)

// TooLongNote says so for people.
const TooLongNote = "its node affinity, node selector, tolerations and stayput annotations exceed 64 KiB in total, " +
	"which the controller does not cache"

// PodList is a list of Pods.
type PodList struct {
	metav1.ListMeta
	Items []Pod
}

// PodOf returns what the caches keep of a pod. It shares nothing large with it.
func PodOf(pod *corev1.Pod) *Pod {
	p := &Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			CreationTimestamp: pod.CreationTimestamp, DeletionTimestamp: pod.DeletionTimestamp,
		},
		node: pod.Spec.NodeName, hostNetwork: pod.Spec.HostNetwork, phase: pod.Status.Phase,
	}
	for i, key := range keptLabels {
		p.labels[i], p.labelled[i] = pod.Labels[key], has(pod.Labels, key)
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		p.controller = unique.Make(OwnerOf(owner))
	}
	if p.node == "" {
		p.keepWaiting(pod)
		return p
	}
	p.keepAnnotations(pod)
	p.ip, p.started = pod.Status.PodIP, pod.Status.StartTime
	// Why a pod failed is kept only if its kubelet did not admit it, which the containers tell.
	if _, rejected := home.Rejected(pod); rejected {
		p.rejected = &corev1.PodStatus{Reason: bounded(pod.Status.Reason), Message: bounded(pod.Status.Message)}
	}
	for _, c := range pod.Status.Conditions {
		switch {
		case c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue:
			p.ready = &metav1.Time{Time: c.LastTransitionTime.Time}
		case c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionFalse:
			p.sandboxless = true
		}
	}
	return p
}

// OwnerOf returns what is kept of an owner. One with a name that is longer than any can be does not exist: it is kept
// under a shorter one that is still too long.
func OwnerOf(owner *metav1.OwnerReference) metav1.OwnerReference {
	kept := metav1.OwnerReference{
		APIVersion: cut(owner.APIVersion), Kind: cut(owner.Kind), Name: cut(owner.Name),
		UID: types.UID(cut(string(owner.UID))),
	}
	if owner.Controller != nil {
		kept.Controller = &isController
	}
	return kept
}

var isController = true

func has(m map[string]string, key string) bool {
	_, ok := m[key]
	return ok
}

func cut(s string) string {
	if len(s) > nameMost {
		return strings.Clone(s[:nameMost])
	}
	return s
}

// keepAnnotations keeps, of a pod that has a node, the annotations that stayput reads and, if it may come back under
// its name, those that a PersistentPodState may name.
func (p *Pod) keepAnnotations(pod *corev1.Pod) {
	_, told := pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	owner := metav1.GetControllerOf(p)
	comesBack := owner != nil && keepsNames(owner.APIVersion, owner.Kind)
	left := map[bool]int{true: oursMost, false: othersMost}
	for _, key := range slices.Sorted(maps.Keys(pod.Annotations)) {
		value, ours := pod.Annotations[key], readOfAll(key)
		size := len(key) + len(value)
		switch {
		case key == stayputv1alpha1.AnnotationAddresses:
		case slices.Contains(notes, key):
			if size > notedMost || !comesBack && !told {
				continue
			}
		case !ours && !comesBack, size > left[ours]:
			continue
		default:
			left[ours] -= size
		}
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, key, value)
	}
	if !told { // else no other pod has the same
		p.Annotations = alike.one(p.Annotations)
	}
}

// keepWaiting keeps what the placement of a pod without a node depends on, but nothing that says where it may go if
// that is too long.
func (p *Pod) keepWaiting(pod *corev1.Pod) {
	w := &waiting{gates: pod.Spec.SchedulingGates, pinned: home.Pinned(pod), preemption: pod.Spec.PreemptionPolicy,
		status: corev1.PodStatus{Reason: cut(pod.Status.Reason), NominatedNodeName: cut(pod.Status.NominatedNodeName)}}
	p.waiting = w
	p.ManagedFields = slices.Clone(home.PinnedBy(pod))
	for i := range p.ManagedFields {
		if f := &p.ManagedFields[i]; f.Size() > managedMost {
			*f = home.PinnedField
		}
	}
	if len(w.gates) > gatesMost { // whether ours is one of them, and the last one, is all that matters then
		w.gates = w.gates[:1:1]
		if home.Gated(pod) {
			w.gates = append(w.gates, corev1.PodSchedulingGate{Name: stayputv1alpha1.PlacementGate})
		}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			c.Message = bounded(c.Message)
			w.status.Conditions = append(w.status.Conditions, c)
		}
	}
	size, asks := 0, false
	for key, value := range pod.Annotations {
		if readOfAll(key) {
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, key, value)
			size += len(key) + len(value)
			asks = asks || key == stayputv1alpha1.AnnotationPools || strings.HasPrefix(key, spiderpoolPrefix)
		}
	}
	where := corev1.PodSpec{NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations}
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil {
		where.Affinity = &corev1.Affinity{NodeAffinity: a.NodeAffinity}
	}
	if w.tooLong = size+where.Size() > waitingMost; !w.tooLong {
		w.where = encode(&where)
		return
	}
	addresses, told := pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	p.Annotations = nil
	if told {
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, stayputv1alpha1.AnnotationAddresses, addresses)
	}
	if asks { // it must not be taken for a pod that asks for none
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, stayputv1alpha1.AnnotationPools, "(too long)")
	}
}

// bounded returns the beginning of what a component says of a pod.
func bounded(message string) string {
	return strings.ToValidUTF8(strings.Clone(message[:min(len(message), messageMost)]), "")
}

func encode(spec *corev1.PodSpec) []byte {
	message, err := spec.Marshal()
	if err != nil {
		panic(err) // what was decoded can be encoded
	}
	return message
}

// Core returns a copy of the pod with all that is kept.
func (p *Pod) Core() *corev1.Pod {
	pod := p.Brief()
	if p.waiting != nil && len(p.waiting.where) > 0 {
		var where corev1.PodSpec
		if err := where.Unmarshal(p.waiting.where); err != nil {
			panic(err) // encode made it
		}
		pod.Spec.Affinity, pod.Spec.NodeSelector, pod.Spec.Tolerations = where.Affinity, where.NodeSelector, where.Tolerations
	}
	return pod
}

// Brief returns the same as Core but node affinity, node selector and tolerations, which may be large.
func (p *Pod) Brief() *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: *p.ObjectMeta.DeepCopy(),
		Spec:       corev1.PodSpec{NodeName: p.node, HostNetwork: p.hostNetwork},
	}
	pod.Labels, pod.OwnerReferences = p.GetLabels(), p.GetOwnerReferences()
	if w := p.waiting; w != nil {
		pod.Spec.SchedulingGates, pod.Spec.PreemptionPolicy = slices.Clone(w.gates), w.preemption
		w.status.DeepCopyInto(&pod.Status)
		pod.Status.Phase = p.phase
		return pod
	}
	pod.Status = corev1.PodStatus{Phase: p.phase, PodIP: p.ip, StartTime: p.started.DeepCopy()}
	if p.rejected != nil {
		pod.Status.Reason, pod.Status.Message = p.rejected.Reason, p.rejected.Message
	}
	if p.ready != nil {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: *p.ready}}
	}
	if p.sandboxless {
		pod.Status.Conditions = append(pod.Status.Conditions,
			corev1.PodCondition{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionFalse})
	}
	return pod
}

func (p *Pod) GetLabels() (all map[string]string) {
	for i, key := range keptLabels {
		if p.labelled[i] {
			if all == nil {
				all = map[string]string{}
			}
			all[key] = p.labels[i]
		}
	}
	return all
}

// GetOwnerReferences returns the pod's controller, if it has one.
func (p *Pod) GetOwnerReferences() []metav1.OwnerReference {
	if p.controller == (unique.Handle[metav1.OwnerReference]{}) {
		return nil
	}
	return []metav1.OwnerReference{p.controller.Value()}
}

// Node returns the name of the pod's node, empty if it has none yet.
func (p *Pod) Node() string { return p.node }

// Ready reports whether the pod has a node and is Ready.
func (p *Pod) Ready() bool { return p.ready != nil }

// Gated reports whether the pod waits for the controller to place it.
func (p *Pod) Gated() bool {
	return p.waiting != nil && slices.ContainsFunc(p.waiting.gates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == stayputv1alpha1.PlacementGate
	})
}

// Rejected reports whether the kubelet of the pod's node did not admit it.
func (p *Pod) Rejected() bool { return p.rejected != nil }

// Pinned reports whether the pod has no node, and the controller narrowed its node affinity to its home.
func (p *Pod) Pinned() bool { return p.waiting != nil && p.waiting.pinned }

// TooLong reports whether what decides where the pod may go is too long to be kept: its placement must not depend on
// that. Only a pod without a node can be.
func (p *Pod) TooLong() bool { return p.waiting != nil && p.waiting.tooLong }

// AnnotationsEqual reports whether two Pods have the same annotations, as far as they are kept.
func (p *Pod) AnnotationsEqual(q *Pod) bool { return maps.Equal(p.Annotations, q.Annotations) }

func (p *Pod) GetObjectKind() schema.ObjectKind     { return schema.EmptyObjectKind }
func (l *PodList) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns a copy, which shares what is never changed.
func (p *Pod) DeepCopyObject() runtime.Object {
	copied := *p
	return &copied
}

// DeepCopyObject returns a copy, whose Pods share what is never changed.
func (l *PodList) DeepCopyObject() runtime.Object {
	return &PodList{ListMeta: *l.ListMeta.DeepCopy(), Items: slices.Clone(l.Items)}
}

// alike has annotations that many pods have, so that they are in memory once.
var alike annotationSets

type annotationSets struct {
	mu  sync.Mutex
	all map[string]map[string]string
}

// alikeMost is how many sets of annotations are kept, alikeLongest how long they are at most in bytes.
const alikeMost, alikeLongest = 10_000, 512

// one returns a set that equals the given one, and must not be changed.
func (s *annotationSets) one(annotations map[string]string) map[string]string {
	var key strings.Builder
	for _, k := range slices.Sorted(maps.Keys(annotations)) {
		fmt.Fprintf(&key, "%q%q", k, annotations[k])
		if key.Len() > alikeLongest {
			return annotations
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.all[key.String()]; ok {
		return known
	}
	if s.all == nil || len(s.all) >= alikeMost {
		s.all = map[string]map[string]string{}
	}
	s.all[key.String()] = annotations
	return annotations
}

// notes are the annotations in which Calico's CNI plugin notes the addresses that it has given a pod.
var notes = []string{"cni.projectcalico.org/podIP", "cni.projectcalico.org/podIPs"}

// NotedByCalico reports whether Calico's CNI plugin has noted on a pod, by these annotations, that it has addresses. It
// does before an ADD succeeds, and takes that back before a DEL releases them: libcalico-go/lib/backend/k8s/resources/
// workloadendpoint.go. An ADD of such a pod releases them first. What is kept of a pod tells it if the pod was told
// addresses of pools.
func NotedByCalico(annotations map[string]string) bool {
	return slices.ContainsFunc(notes, func(key string) bool { return annotations[key] != "" })
}

// readOfAll reports whether an annotation is read of every object.
func readOfAll(annotation string) bool {
	return strings.HasPrefix(annotation, annotationPrefix) || strings.HasPrefix(annotation, spiderpoolPrefix) ||
		annotation == stayputv1alpha1.AnnotationReservedIPDuration
}

const (
	annotationPrefix = "stayput.io/"
	spiderpoolPrefix = "ipam.spidernet.io/" // by these, too, pods ask for addresses of pools
)

// keepsNames reports whether the pods of a controller may come back under their name. Of kinds that are not known
// here, they may.
func keepsNames(apiVersion, kind string) bool {
	switch apiVersion {
	case appsv1.SchemeGroupVersion.String():
		return kind == "StatefulSet"
	case batchv1.SchemeGroupVersion.String(), corev1.SchemeGroupVersion.String():
		return false // Jobs; ReplicationControllers and Nodes
	}
	return true
}
