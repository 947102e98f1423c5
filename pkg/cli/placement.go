package cli

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

func (f *facts) recorded() string {
	if f.state == nil {
		return ""
	}
	of, there := f.state.Status.PodStates[f.name]
	if !there {
		return fmt.Sprintf("PersistentPodState %s has nothing of this pod: it records pods once they are Ready", f.state.Name)
	}
	is := fmt.Sprintf("PersistentPodState %s: it was Ready on node %s last", f.state.Name, of.NodeName)
	if len(of.NodeTopologyLabels) > 0 {
		is += ", with " + metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: of.NodeTopologyLabels})
	}
	return is
}

func (f *facts) placement() (say []string) {
	p := f.pod
	if p == nil {
		return nil
	}
	if to, pinned := p.Annotations[stayputv1alpha1.AnnotationHome]; pinned {
		say = append(say, "stayput required its home of it: "+to)
	}
	switch {
	case home.Gated(p):
		say = append(say, "it has the scheduling gate "+stayputv1alpha1.PlacementGate+", which the controller takes off")
		if why, ok := f.lastSaid(home.ReasonHomeWait); ok {
			say = append(say, why)
		}
		if why := f.leaderless(); why != "" {
			say = append(say, why)
		}
	case p.Spec.NodeName == "":
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				say = append(say, "the scheduler says: "+c.Message)
			}
		}
	}
	for _, r := range []string{home.ReasonHomeGivenUp, home.ReasonHomeFull, home.ReasonHomeIgnored} {
		if why, ok := f.lastSaid(r); ok {
			say = append(say, why)
		}
	}
	return say
}

// lastSaid is the latest Event with a reason about the pod.
func (f *facts) lastSaid(reason string) (string, bool) {
	for i := len(f.events) - 1; i >= 0; i-- {
		if e := f.events[i]; e.Reason == reason && e.InvolvedObject.Kind == "Pod" && (f.pod == nil || e.InvolvedObject.UID == f.pod.UID) {
			return e.Message, true
		}
	}
	return "", false
}

// leaderless says that no controller leads, or nothing.
func (f *facts) leaderless() string {
	if f.lease == nil {
		return ""
	}
	if why := staleLease(f.lease, f.now); why != "" {
		return "no controller leads, so that gated pods wait: " + why
	}
	return ""
}
