package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
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
	"github.com/stayput/stayput/pkg/wire"
)

// Pod is what the caches keep of a pod. They have every pod of the cluster, and few pods wait to be placed: of a pod
// that has a node they keep little more than its name, read off the wire without decoding the rest.
//
// It is read-only, and what has no method here is not kept: asking for it panics.
type Pod struct {
	metav1.Object // nil

	name, version, uid, ip      string
	namespace, node, phase      unique.Handle[string]
	labels, annotations, owners unique.Handle[string] // fields of ObjectMeta on the wire; many pods have the same

	created, deleted, started, readied int64 // Unix time in seconds, 0 if that is unknown or has not happened
	ready, sandboxless, hostNetwork    bool

	rejected *corev1.PodStatus // what the kubelet says that did not admit the pod, nil if one did
	waiting  *corev1.Pod       // the pod, as far as the rules ask for it, if it has no node
	tooLong  bool              // what the rules ask for is too long to be kept
}

// The most that is kept of one pod beside its name and its like. Without it, a user who may create pods could fill the
// memory of every controller, and then no pod would be placed.
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
)

// TooLongNote says so for people.
const TooLongNote = "its node affinity, node selector, tolerations and stayput annotations exceed 64 KiB in total, " +
	"which the controller does not cache"

// TooLong reports whether what decides where the pod may go is too long to be kept: its placement must not depend on
// that. Only a pod without a node can be.
func (p *Pod) TooLong() bool { return p.tooLong }

// PodList is a list of Pods.
type PodList struct {
	metav1.ListMeta
	Items []Pod
}

// PodOf returns what the caches keep of a pod.
func PodOf(pod *corev1.Pod) *Pod {
	p := &Pod{}
	message, err := pod.Marshal()
	if err == nil {
		err = p.Unmarshal(message)
	}
	if err != nil {
		panic(err) // a decoded pod can be encoded
	}
	return p
}

// Core returns a copy of the pod with all that is kept.
func (p *Pod) Core() *corev1.Pod {
	if p.waiting != nil {
		return p.waiting.DeepCopy()
	}
	pod := &corev1.Pod{
		ObjectMeta: p.meta(p.labels, p.annotations, p.owners),
		Spec:       corev1.PodSpec{NodeName: p.Node(), HostNetwork: p.hostNetwork},
		Status: corev1.PodStatus{
			Phase: corev1.PodPhase(valueOf(p.phase)), PodIP: p.ip, StartTime: timeAt(p.started),
		},
	}
	pod.Namespace, pod.Name, pod.UID, pod.ResourceVersion = p.GetNamespace(), p.name, p.GetUID(), p.version
	pod.CreationTimestamp, pod.DeletionTimestamp = p.GetCreationTimestamp(), p.GetDeletionTimestamp()
	if p.rejected != nil {
		pod.Status.Reason, pod.Status.Message = p.rejected.Reason, p.rejected.Message
	}
	if p.ready {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if p.readied != 0 {
			pod.Status.Conditions[0].LastTransitionTime = *timeAt(p.readied)
		}
	}
	if p.sandboxless {
		pod.Status.Conditions = append(pod.Status.Conditions,
			corev1.PodCondition{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionFalse})
	}
	return pod
}

// Node returns the name of the pod's node, empty if it has none yet.
func (p *Pod) Node() string { return valueOf(p.node) }

// Ready reports whether the pod has a node and is Ready.
func (p *Pod) Ready() bool { return p.ready }

// Gated reports whether the pod waits for the controller to place it.
func (p *Pod) Gated() bool { return p.waiting != nil && home.Gated(p.waiting) }

// Rejected reports whether the kubelet of the pod's node did not admit it.
func (p *Pod) Rejected() bool { return p.rejected != nil }

func (p *Pod) GetNamespace() string                 { return valueOf(p.namespace) }
func (p *Pod) GetName() string                      { return p.name }
func (p *Pod) GetUID() types.UID                    { return types.UID(p.uid) }
func (p *Pod) GetResourceVersion() string           { return p.version }
func (p *Pod) GetDeletionTimestamp() *metav1.Time   { return timeAt(p.deleted) }
func (p *Pod) GetLabels() map[string]string         { return p.meta(p.labels).Labels }
func (p *Pod) GetAnnotations() map[string]string    { return p.meta(p.annotations).Annotations }
func (p *Pod) GetObjectKind() schema.ObjectKind     { return schema.EmptyObjectKind }
func (l *PodList) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

func (p *Pod) GetCreationTimestamp() metav1.Time {
	if at := timeAt(p.created); at != nil {
		return *at
	}
	return metav1.Time{}
}

func (p *Pod) GetOwnerReferences() []metav1.OwnerReference {
	return p.meta(p.owners).OwnerReferences
}

// DeepCopyObject returns a copy, which shares what is never changed.
func (p *Pod) DeepCopyObject() runtime.Object {
	copied := *p
	return &copied
}

// DeepCopyObject returns a copy, whose Pods share what is never changed.
func (l *PodList) DeepCopyObject() runtime.Object {
	return &PodList{ListMeta: *l.ListMeta.DeepCopy(), Items: append([]Pod(nil), l.Items...)}
}

// AnnotationsEqual reports whether two Pods have the same annotations, as far as they are kept.
func (p *Pod) AnnotationsEqual(q *Pod) bool { return p.annotations == q.annotations }

// meta decodes fields of ObjectMeta.
func (p *Pod) meta(fields ...unique.Handle[string]) (m metav1.ObjectMeta) {
	var message []byte
	for _, f := range fields {
		message = append(message, valueOf(f)...)
	}
	if err := m.Unmarshal(message); err != nil {
		panic(err) // they were decoded before
	}
	return m
}

// UnmarshalJSON reads a pod as kubectl prints it.
func (p *Pod) UnmarshalJSON(text []byte) error {
	var core corev1.Pod
	if err := json.Unmarshal(text, &core); err != nil {
		return err
	}
	*p = *PodOf(&core)
	return nil
}

// UnmarshalJSON reads a list of pods.
func (l *PodList) UnmarshalJSON(text []byte) error {
	var list struct {
		metav1.ListMeta `json:"metadata"`
		Items           []Pod `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	l.ListMeta, l.Items = list.ListMeta, list.Items
	return nil
}

// Reset empties the pod, for Unmarshal.
func (p *Pod) Reset() { *p = Pod{} }

// Reset empties the list, for Unmarshal.
func (l *PodList) Reset() { *l = PodList{} }

// Unmarshal reads a list of pods off the wire.
func (l *PodList) Unmarshal(message []byte) error {
	return wire.Each(message, func(f wire.Field) error {
		switch f.Number {
		case 1: // metadata
			return l.ListMeta.Unmarshal(f.Bytes)
		case 2: // items
			l.Items = append(l.Items, Pod{})
			return l.Items[len(l.Items)-1].Unmarshal(f.Bytes)
		}
		return nil
	})
}

// Unmarshal reads a pod off the wire. The field numbers are those of k8s.io/api/core/v1/generated.proto.
func (p *Pod) Unmarshal(message []byte) error {
	var meta, spec, status []byte
	err := wire.Each(message, func(f wire.Field) error {
		switch f.Number {
		case 1:
			meta = f.Bytes
		case 2:
			spec = f.Bytes
		case 3:
			status = f.Bytes
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := wire.Each(spec, func(f wire.Field) error {
		switch f.Number {
		case 10:
			p.node = unique.Make(string(f.Bytes))
		case 11:
			p.hostNetwork = f.Varint != 0
		}
		return nil
	}); err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	if err := p.readMeta(meta); err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	if p.Node() == "" {
		p.waiting, p.tooLong, err = waitingPod(message)
		return err
	}
	if err := p.readStatus(status); err != nil {
		return fmt.Errorf("status: %w", err)
	}
	return nil
}

// waitingPod decodes a pod without a node and strips it of what no rule asks for, and of all that decides where it may
// go if that is too long.
func waitingPod(message []byte) (_ *corev1.Pod, tooLong bool, _ error) {
	var pod corev1.Pod
	if err := pod.Unmarshal(message); err != nil {
		return nil, false, err
	}
	meta := metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
		CreationTimestamp: pod.CreationTimestamp, DeletionTimestamp: pod.DeletionTimestamp,
		ManagedFields: slices.Clone(home.PinnedBy(&pod)),
	}
	for i := range meta.ManagedFields {
		if f := &meta.ManagedFields[i]; f.Size() > managedMost {
			*f = home.PinnedField
		}
	}
	if value, ok := pod.Labels[appsv1.PodIndexLabel]; ok {
		meta.Labels = map[string]string{appsv1.PodIndexLabel: value}
	}
	if owner := metav1.GetControllerOf(&pod); owner != nil {
		meta.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	for key, value := range pod.Annotations {
		if readOfAll(key) {
			metav1.SetMetaDataAnnotation(&meta, key, value)
		}
	}
	pod.ObjectMeta = meta
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: a.NodeAffinity}
	} else {
		pod.Spec.Affinity = nil
	}
	pod.Spec = corev1.PodSpec{
		HostNetwork: pod.Spec.HostNetwork, SchedulingGates: pod.Spec.SchedulingGates, Affinity: pod.Spec.Affinity,
		NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations,
		PreemptionPolicy: pod.Spec.PreemptionPolicy,
	}
	status := corev1.PodStatus{
		Phase: pod.Status.Phase, Reason: pod.Status.Reason, NominatedNodeName: pod.Status.NominatedNodeName,
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			c.Message = bounded(c.Message)
			status.Conditions = append(status.Conditions, c)
		}
	}
	pod.Status = status
	if tooLong = pod.Size() > waitingMost; !tooLong {
		return &pod, false, nil
	}
	gates := pod.Spec.SchedulingGates
	if len(gates) > 2 { // whether ours is one of them, and the last one, is all that matters
		gates = gates[:1:1]
		if home.Gated(&pod) {
			gates = append(gates[:1:1], corev1.PodSchedulingGate{Name: stayputv1alpha1.PlacementGate})
		}
	}
	addresses, has := pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	asks := false
	for key := range pod.Annotations {
		asks = asks || key == stayputv1alpha1.AnnotationPools || strings.HasPrefix(key, spiderpoolPrefix)
	}
	pod.Spec, pod.Annotations = corev1.PodSpec{HostNetwork: pod.Spec.HostNetwork, SchedulingGates: gates}, nil
	if has {
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, stayputv1alpha1.AnnotationAddresses, addresses)
	}
	if asks { // it must not be taken for a pod that asks for none
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, stayputv1alpha1.AnnotationPools, "(too long)")
	}
	return &pod, true, nil
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

// readMeta reads ObjectMeta. Of the labels only the ordinal is kept, and of a pod that never comes back under its name
// only the annotations that stayput reads: no PersistentPodState can name others.
func (p *Pod) readMeta(message []byte) error {
	const labels, annotations, owners = 11, 12, 13
	var ordinal, ours, all, noted, by []byte
	comesBack, told := false, false
	left := map[bool]int{true: oursMost, false: othersMost}
	err := wire.Each(message, func(f wire.Field) error {
		switch f.Number {
		case 1:
			p.name = string(f.Bytes)
		case 3:
			p.namespace = unique.Make(string(f.Bytes))
		case 5:
			p.uid = string(f.Bytes)
		case 6:
			p.version = string(f.Bytes)
		case 8, 9:
			at, err := secondsOf(f.Bytes)
			if f.Number == 8 {
				p.created = at
			} else {
				p.deleted = at
			}
			return err
		case labels, annotations:
			key, err := keyOf(f.Bytes)
			mine := readOfAll(key)
			switch {
			case f.Number == labels && key == appsv1.PodIndexLabel:
				ordinal = append(ordinal, f.Whole...)
			case f.Number != annotations:
			case slices.Contains(notes, key) && len(f.Whole) <= notedMost:
				noted = append(noted, f.Whole...)
			case key != stayputv1alpha1.AnnotationAddresses && len(f.Whole) > left[mine]:
			default:
				if key != stayputv1alpha1.AnnotationAddresses {
					left[mine] -= len(f.Whole)
				} else {
					told = true
				}
				if all = append(all, f.Whole...); mine {
					ours = append(ours, f.Whole...)
				}
			}
			return err
		case owners:
			var owner metav1.OwnerReference
			if err := owner.Unmarshal(f.Bytes); err != nil {
				return err
			}
			if owner.Controller != nil && *owner.Controller {
				by = append(by, f.Whole...)
				comesBack = comesBack || keepsNames(owner.APIVersion, owner.Kind)
			}
		}
		return nil
	})
	if !comesBack {
		all = ours
	}
	if comesBack || told {
		all = append(all, noted...)
	}
	p.labels, p.annotations, p.owners = unique.Make(string(ordinal)), unique.Make(string(all)), unique.Make(string(by))
	return err
}

// keyOf returns the key of an entry of a map.
func keyOf(entry []byte) (key string, err error) {
	err = wire.Each(entry, func(f wire.Field) error {
		if f.Number == 1 {
			key = string(f.Bytes)
		}
		return nil
	})
	return key, err
}

// readOfAll reports whether an annotation is read of every object.
func readOfAll(annotation string) bool {
	return strings.HasPrefix(annotation, annotationPrefix) || strings.HasPrefix(annotation, spiderpoolPrefix) ||
		annotation == stayputv1alpha1.AnnotationReservedIPDuration || annotation == metav1.InitialEventsAnnotationKey
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

// readStatus reads PodStatus. Why a pod failed is kept only if its kubelet did not admit it, which the containers tell.
func (p *Pod) readStatus(message []byte) error {
	if err := p.readStatusFields(message); err != nil || valueOf(p.phase) != string(corev1.PodFailed) {
		return err
	}
	var failed corev1.Pod
	if err := failed.Status.Unmarshal(message); err != nil {
		return err
	}
	if _, ok := home.Rejected(&failed); ok {
		s := failed.Status
		p.rejected = &corev1.PodStatus{Reason: bounded(s.Reason), Message: bounded(s.Message)}
	}
	return nil
}

// bounded returns the beginning of what a component says of a pod.
func bounded(message string) string {
	return strings.ToValidUTF8(strings.Clone(message[:min(len(message), messageMost)]), "")
}

func (p *Pod) readStatusFields(message []byte) error {
	return wire.Each(message, func(f wire.Field) (err error) {
		switch f.Number {
		case 1:
			p.phase = unique.Make(string(f.Bytes))
		case 2: // a condition
			var kind, is string
			var since int64
			err = wire.Each(f.Bytes, func(f wire.Field) (err error) {
				switch f.Number {
				case 1:
					kind = string(f.Bytes)
				case 2:
					is = string(f.Bytes)
				case 4:
					since, err = secondsOf(f.Bytes)
				}
				return err
			})
			switch {
			case kind == string(corev1.PodReady) && is == string(corev1.ConditionTrue):
				p.ready, p.readied = true, since
			case kind == string(corev1.PodReadyToStartContainers) && is == string(corev1.ConditionFalse):
				p.sandboxless = true
			}
		case 6:
			p.ip = string(f.Bytes)
		case 7:
			p.started, err = secondsOf(f.Bytes)
		}
		return err
	})
}

// secondsOf returns a metav1.Time in Unix time.
func secondsOf(message []byte) (at int64, err error) {
	err = wire.Each(message, func(f wire.Field) error {
		if f.Number == 1 {
			at = int64(f.Varint)
		}
		return nil
	})
	return at, err
}

func timeAt(seconds int64) *metav1.Time {
	if seconds == 0 {
		return nil
	}
	return &metav1.Time{Time: time.Unix(seconds, 0)}
}

func valueOf(h unique.Handle[string]) string {
	if h == (unique.Handle[string]{}) {
		return ""
	}
	return h.Value()
}
