package cli

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// recorded returns what the pod's PersistentPodState records of it.
func (f *facts) recorded() string {
	if f.state == nil {
		return ""
	}
	of, ok := f.state.Status.PodStates[f.name]
	if !ok {
		return "PersistentPodState " + f.state.Name + " has not recorded the pod: pods are recorded once they are Ready"
	}
	last := fmt.Sprintf("PersistentPodState %s: the pod was last Ready on node %s", f.state.Name, of.NodeName)
	if len(of.NodeTopologyLabels) > 0 {
		last += ", with " + labels.FormatLabels(of.NodeTopologyLabels)
	}
	return last
}

// placement returns how the pod came, or comes, to its node.
func (f *facts) placement() (all []string) {
	p := f.pod
	if p == nil {
		return nil
	}
	if to, ok := p.Annotations[stayputv1alpha1.AnnotationPinned]; ok {
		all = append(all, "Stayput pinned it to its home: "+to)
	}
	reasons := []string{home.ReasonHomeGivenUp, home.ReasonHomeFull, home.ReasonHomeIgnored}
	switch {
	case home.Gated(p):
		gate := "it has the scheduling gate " + stayputv1alpha1.PlacementGate + ", which the controller removes"
		if !home.LastGate(p) {
			gate += " once it is the only one: other gates hold the pod too"
		}
		all = append(all, gate)
		if why := f.leaderless(); why != "" {
			all = append(all, why)
		}
		reasons = slices.Insert(reasons, 0, home.ReasonHomeWait, home.ReasonAddressWait, home.ReasonNotPlaced)
	case f.asksPools != "" && !has(p, stayputv1alpha1.AnnotationAddresses):
		reasons = slices.Insert(reasons, 0, home.ReasonAddressWait)
	case p.Spec.NodeName == "":
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				all = append(all, "the scheduler: "+c.Message)
			}
		}
	}
	for _, r := range reasons {
		if note := f.lastNote(r); note != "" {
			all = append(all, note)
		}
	}
	return all
}

func has(pod *corev1.Pod, annotation string) bool {
	_, ok := pod.Annotations[annotation]
	return ok
}

// lastNote returns what the latest Event with this reason says about the pod.
func (f *facts) lastNote(reason string) string {
	for _, e := range slices.Backward(f.events) {
		if e.Reason == reason && e.InvolvedObject.Kind == "Pod" && e.InvolvedObject.UID == f.pod.UID {
			return e.Message
		}
	}
	return ""
}

// leaderless returns that no controller leads and why, empty if one does or that is not known.
func (f *facts) leaderless() string {
	if f.lease == nil {
		return ""
	}
	if why := staleLease(f.lease, f.now); why != "" {
		return "no controller is the leader, so gated pods wait: " + why
	}
	return ""
}
