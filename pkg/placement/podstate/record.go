package podstate

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// tooManyPods is the number of records from which only the nodes' names are kept: an object of 5,000 full ones does not
// fit into etcd. The labels for the affinity of a pod are then those of its node: see home.Record.
const tooManyPods = 3000

// verdict is what the status of an object should say.
type verdict struct {
	states map[string]kruisev1alpha1.PodState
	pods   *int32
	// conflict is the object that is obeyed instead, if any.
	conflict string
	// recorded is why some pod is not recorded, degraded what is wrong. Empty: all is well.
	recorded, degraded finding

	of    *home.Workload
	moved []move
	retry time.Duration // zero for when something changes
}

// finding is the reason of a condition or an Event.
type finding struct{ reason, message string }

// move is a pod that is Ready elsewhere than recorded.
type move struct {
	pod  *cluster.Pod
	from string
}

// nodePause is when to try again for a node that is not in the cache yet.
const nodePause = 2 * time.Second

// recordPods returns what is recorded of a workload's pods, given what was. A pod is recorded on the node where it is
// Ready. Until then, and when it is gone, its record stays for as long as the retention policy says.
func recordPods(spec *kruisev1alpha1.PersistentPodStateSpec, w *home.Workload, was map[string]kruisev1alpha1.PodState,
	pods []cluster.Pod, nodes home.Nodes) verdict {
	v := verdict{of: w, pods: &w.Replicas, states: make(map[string]kruisev1alpha1.PodState, len(was))}
	topology, annotations := keysOf(spec)
	there := make(map[string]bool, len(pods))
	for i := range pods {
		pod := &pods[i]
		if owner := metav1.GetControllerOf(pod); owner == nil || owner.UID != w.UID {
			continue // of a workload that had this name before
		}
		there[pod.GetName()] = true
		if !podReady(pod) || pod.Node() == "" {
			continue
		}
		node := nodes.Node(pod.Node())
		if node == nil {
			v.retry = nodePause
			continue
		}
		v.states[pod.GetName()] = kruisev1alpha1.PodState{
			NodeName: node.Name, NodeTopologyLabels: pick(node.Labels, topology),
			Annotations: home.BoundRecorded(pod.GetAnnotations(), annotations),
		}
		if from := was[pod.GetName()].NodeName; from != "" && from != node.Name {
			v.moved = append(v.moved, move{pod, from})
		}
	}
	for name, state := range was {
		if _, ok := v.states[name]; ok || !there[name] && !keepsRecord(spec, w, name, len(there)) {
			continue
		}
		state.NodeTopologyLabels, state.Annotations = pick(state.NodeTopologyLabels, topology),
			home.BoundRecorded(state.Annotations, annotations)
		v.states[name] = state
	}
	for _, a := range spec.PersistentPodAnnotations {
		if !home.Recordable(a.Key) {
			v.degraded = finding{reasonNotRecordable, notRecordable(a.Key)}
		}
	}
	recorded := 0
	for name := range v.states {
		if wanted, numbered := w.Wants(name); wanted || !numbered {
			recorded++
		}
	}
	if recorded < int(w.Replicas) {
		v.recorded = finding{reasonPodsNotReady, "some pods are not recorded yet: a pod is recorded once it is Ready"}
	}
	if len(v.states) >= tooManyPods {
		for name, state := range v.states {
			v.states[name] = kruisev1alpha1.PodState{NodeName: state.NodeName}
		}
		v.degraded = finding{reasonTooManyPods,
			fmt.Sprintf("with %d or more pods only the node name of each pod is recorded, because of etcd's size limit: pods "+
				"come back by the labels that their node has then, without their annotations", tooManyPods)}
	}
	return v
}

// notRecordable says that an annotation is not passed on.
func notRecordable(key string) string {
	return fmt.Sprintf("annotation %s is not passed on to the successors of pods: "+
		"it requests or assigns addresses", key)
}

// keepsRecord reports whether the record of a pod that is gone stays. live is how many pods exist: if names do not tell
// which pods are wanted, a gone one is not wanted once as many as the replicas exist.
func keepsRecord(spec *kruisev1alpha1.PersistentPodStateSpec, w *home.Workload, name string, live int) bool {
	if spec.PersistentPodStateRetentionPolicy == kruisev1alpha1.RetentionWhenDeleted {
		return true
	}
	wanted, numbered := w.Wants(name)
	return wanted || !numbered && live < int(w.Replicas)
}

// keysOf returns the keys of the node labels and of the pod annotations that a spec names.
func keysOf(spec *kruisev1alpha1.PersistentPodStateSpec) (topology, annotations []string) {
	if spec.RequiredPersistentTopology != nil {
		topology = append(topology, spec.RequiredPersistentTopology.Labels()...)
	}
	for _, term := range spec.PreferredPersistentTopology {
		topology = append(topology, term.Preference.Labels()...)
	}
	for _, a := range spec.PersistentPodAnnotations {
		if home.Recordable(a.Key) {
			annotations = append(annotations, a.Key)
		}
	}
	return topology, annotations
}

func pick(from map[string]string, keys []string) map[string]string {
	var picked map[string]string
	for _, k := range keys {
		if v, ok := from[k]; ok {
			if picked == nil {
				picked = map[string]string{}
			}
			picked[k] = v
		}
	}
	return picked
}
