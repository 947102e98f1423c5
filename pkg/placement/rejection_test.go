package placement

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// rejecting is a node whose kubelet admits no pod, and a workload's controller that makes the next one at once.
type rejecting struct {
	*placing
	made  int
	heard []string // Events
}

// creates makes the next pod, and returns it when it has left the gate.
func (r *rejecting) creates(t *testing.T, change ...func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	r.made++
	pod := hometest.Pod(append([]func(*corev1.Pod){ownedBySet, func(p *corev1.Pod) {
		p.UID, p.CreationTimestamp = types.UID(fmt.Sprint("uid-", r.made)), metav1.NewTime(r.time)
	}}, change...)...)
	if err := r.client.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	for {
		is := r.looksAt(t, pod)
		r.heard = append(r.heard, r.notes()...)
		if !home.Gated(is) {
			return is
		}
		r.time = r.time.Add(100 * time.Millisecond)
	}
}

// ends has a pod be deleted by its controller after it has come to a node, as the caches show it.
func (r *rejecting) ends(t *testing.T, pod *corev1.Pod, node string, status corev1.PodStatus) {
	t.Helper()
	if err := r.client.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	was := cluster.PodOf(pod)
	pod.Spec.NodeName, pod.Status = node, status
	pod.Status.StartTime = &metav1.Time{Time: r.time}
	is, handler := cluster.PodOf(pod), r.memory.handler()
	handler.OnUpdate(was, is)
	handler.OnDelete(is)
}

var sysctlForbidden = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "SysctlForbidden",
	Message: `Pod was rejected: forbidden sysctl: "kernel.msgmax" not allowlisted`}

func TestAHomeWhoseKubeletRejectsThePodIsGivenUpAfterHomeWait(t *testing.T) {
	prefers := hometest.Annotation(stayputv1alpha1.AnnotationHome, "Preferred")
	shared := hometest.Annotation(stayputv1alpha1.AnnotationIdentity, "front")
	for name, change := range map[string]func(*corev1.Pod){
		"required": func(*corev1.Pod) {}, "preferred": prefers, "of a shared identity": shared,
		"while owned": hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "while-owned"),
	} {
		t.Run(name, func(t *testing.T) {
			kept := keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)
			if name == "of a shared identity" {
				kept.Spec.Identity, kept.Spec.Scheduled = "front", "identity/front"
			}
			r := rejecting{placing: testPlacer(fakeAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"), kept))}
			pod := r.creates(t, change)
			for slices.Contains(drawnTo(pod), "In node-1") {
				r.ends(t, pod, "node-1", sysctlForbidden)
				pod = r.creates(t, change)
			}
			if want := []string{"NotIn node-1"}; !slices.Equal(drawnTo(pod), want) {
				t.Errorf("it goes to %q, not %q", drawnTo(pod), want)
			}
			if took := r.time.Sub(hometest.Noon); took < home.DefaultWait || took > home.DefaultWait+time.Second {
				t.Errorf("given up after %s", took)
			}
			if r.made > 10 {
				t.Errorf("%d pods were made", r.made)
			}
			const says = `its home, node node-1, rejected the pod (SysctlForbidden: forbidden sysctl: "kernel.msgmax" not ` +
				`allowlisted): the pod `
			for _, want := range []string{"Normal WaitingForHome " + says + "waits at most 1s", "Warning HomeGivenUp " + says +
				"goes elsewhere; its address there still expires as scheduled"} {
				if !slices.Contains(r.heard, want) {
					t.Errorf("said %q, not %q", r.heard, want)
				}
			}
		})
	}
}

// drawnTo returns the nodes that a pod requires, rules out or prefers by name.
func drawnTo(pod *corev1.Pod) (names []string) {
	own := home.NodeAffinityOf(pod)
	if own == nil {
		return nil
	}
	var terms []corev1.NodeSelectorTerm
	if required := own.RequiredDuringSchedulingIgnoredDuringExecution; required != nil {
		terms = required.NodeSelectorTerms
	}
	for _, t := range own.PreferredDuringSchedulingIgnoredDuringExecution {
		terms = append(terms, t.Preference)
	}
	for _, t := range terms {
		for _, f := range t.MatchFields {
			names = append(names, string(f.Operator)+" "+strings.Join(f.Values, ","))
		}
	}
	return names
}

func TestAPodThatItsHomeHadAdmittedIsNoRejection(t *testing.T) {
	ran := []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}
	for name, status := range map[string]corev1.PodStatus{
		"failed":    {Phase: corev1.PodFailed, Reason: "Error", ContainerStatuses: ran},
		"evicted":   {Phase: corev1.PodFailed, Reason: "Evicted", ContainerStatuses: ran},
		"shut down": {Phase: corev1.PodFailed, Reason: "Terminated", Message: "Pod was terminated", ContainerStatuses: ran},
		"running":   {Phase: corev1.PodRunning, PodIP: "192.0.2.7"},
	} {
		t.Run(name, func(t *testing.T) {
			r := rejecting{placing: testPlacer(fakeAPI(t, hometest.Node("node-1", "a"),
				keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))}
			r.ends(t, r.creates(t), "node-1", sysctlForbidden)
			r.ends(t, r.creates(t), "node-1", status) // which ends the series
			r.time = r.time.Add(home.DefaultWait)
			at := r.time
			if pod := r.creates(t); r.time != at || !slices.Equal(drawnTo(pod), []string{"In node-1"}) {
				t.Errorf("after %s it goes to %q", r.time.Sub(at), drawnTo(pod))
			}
		})
	}
}

func TestAPodThatWasRejectedLeftNothingWhereItWas(t *testing.T) {
	r := rejecting{placing: testPlacer(fakeAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "a")))}
	r.ends(t, r.creates(t), "node-2", sysctlForbidden)
	if pod := r.creates(t); len(drawnTo(pod)) > 0 {
		t.Errorf("the successor of a pod that never ran goes to %q", drawnTo(pod))
	}
}

// A new process finds pods that were rejected long ago, and so may a label be put on one.
func TestRejectionsOfThePastAreNoSeries(t *testing.T) {
	r := rejecting{placing: testPlacer(fakeAPI(t, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))}
	old := hometest.Pod(func(p *corev1.Pod) {
		p.UID, p.Spec.NodeName, p.Status = "old", "node-1", sysctlForbidden
	})
	handler := r.memory.handler()
	handler.OnAdd(cluster.PodOf(old), true)
	handler.OnUpdate(cluster.PodOf(old), cluster.PodOf(old))
	if pod := r.creates(t); r.time != hometest.Noon || !slices.Equal(drawnTo(pod), []string{"In node-1"}) {
		t.Errorf("after %s it goes to %q", r.time.Sub(hometest.Noon), drawnTo(pod))
	}
}
