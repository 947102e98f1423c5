package placement

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// readySince makes a pod Ready for some time.
func readySince(ago time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: metav1.NewTime(time.Now().Add(-ago))}}
	}
}

func whenMoved(policy string) func(*stayputv1alpha1.RetainedIP) {
	return func(ip *stayputv1alpha1.RetainedIP) { ip.Spec.WhenMoved = policy }
}

func TestTheAddressOnAnEarlierNodeIsReleasedOnceThePodHasTakenRoot(t *testing.T) {
	const release = stayputv1alpha1.PolicyRelease
	onB := func(change ...func(*corev1.Pod)) *corev1.Pod { return aPod("web-0", "node-2", change...) }
	type address = func(*stayputv1alpha1.RetainedIP)
	ofWeb := of("apps/v1", "StatefulSet", "web")
	long := readySince(time.Hour)
	leave, held := []address{whenMoved(release)}, []address{bound}
	onNode2 := func(ip *stayputv1alpha1.RetainedIP) {
		ip.Name, ip.Spec.NodeName, ip.UID = "web-0.node-2", "node-2", "later"
	}
	for name, c := range map[string]struct {
		earlier  []address
		later    []address
		pod      *corev1.Pod
		released bool
	}{
		"it has": {leave, held, onB(ofWeb, long), true},
		"it has, and keeps the address for a time only": {[]address{whenMoved(release), tenMinutes}, []address{bound},
			onB(ofWeb, long), true},
		"the policy is to retain it": {[]address{whenMoved(stayputv1alpha1.PolicyRetain)}, []address{bound},
			onB(ofWeb, long), false},
		"the agent does not publish a policy": {nil, []address{bound}, onB(ofWeb, long), false},
		"not Ready for long":                  {leave, held, onB(ofWeb, readySince(time.Minute)), false},
		"not Ready":                           {leave, held, onB(ofWeb), false},
		"no node yet":                         {leave, held, aPod("web-0", "", ofWeb), false},
		"it is there":                         {leave, held, aPod("web-0", "node-1", ofWeb, long), false},
		"the earlier node has not noticed": {[]address{whenMoved(release), bound}, []address{bound}, onB(ofWeb, long),
			false},
		"the later node has not published": {leave, []address{}, onB(ofWeb, long), false},
		"the later node released": {leave, []address{bound, func(ip *stayputv1alpha1.RetainedIP) {
			ip.Spec.Release = stayputv1alpha1.ReleaseNow
		}}, onB(ofWeb, long), false},
		"the later node has that of a predecessor": {leave, []address{bound,
			func(ip *stayputv1alpha1.RetainedIP) { ip.Status.PodUID = "predecessor" }},
			onB(ofWeb, long), false},
		"of a shared identity": {[]address{whenMoved(release), shared}, []address{bound},
			onB(ofWeb, long), false},
	} {
		t.Run(name, func(t *testing.T) {
			earlier := addressOf("web-0", append(c.earlier, stamped("StatefulSet", "web"))...)
			later := addressOf("web-0", append(c.later, stamped("StatefulSet", "web"), onNode2)...)
			r, said := testReleaser(t, fakeAPI(t, earlier, later, c.pod, statefulSetOf("web", 1, whileOwned)), nothing)
			if got := released(t, r, client.ObjectKeyFromObject(earlier)); (got.Spec.Release != "") != c.released {
				t.Errorf("released %v", got.Spec.Release)
			}
			if got := released(t, r, client.ObjectKeyFromObject(later)); got.Spec.Release != later.Spec.Release {
				t.Error("the later one is released")
			}
			note := ""
			if len(said.Events) > 0 {
				note = <-said.Events
			}
			if want := home.ReasonReleased; c.released != strings.Contains(note, want) ||
				c.released && !strings.Contains(note, "192.0.2.7 on node node-1") {
				t.Errorf("said %q", note)
			}
		})
	}
}

func TestAMovedPodIsLookedAtAgainWhenItWillHaveTakenRoot(t *testing.T) {
	for ready, want := range map[time.Duration]time.Duration{
		time.Minute: rooted - time.Minute, rooted - time.Second: time.Second,
	} {
		pod := aPod("web-0", "node-2", readySince(ready))
		now := pod.Status.Conditions[0].LastTransitionTime.Add(ready)
		r := &releaser{now: func() time.Time { return now }}
		if got := r.untilRooted(pod); got != want {
			t.Errorf("Ready for %s: in %s, not %s", ready, got, want)
		}
	}
}
