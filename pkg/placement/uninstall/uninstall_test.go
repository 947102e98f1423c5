package uninstall

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/uninstall"
)

func TestEveryPodIsUngatedAlthoughOneFails(t *testing.T) {
	var pods []corev1.Pod
	for i := range 10 * ungaters {
		pods = append(pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("web-", i)},
			Spec:       corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: v1alpha1.PlacementGate}}},
		})
	}
	pods = append(pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "free"}})
	var mu sync.Mutex
	tried := map[string]int{}
	found, err := ungate(pods, home.Gated, func(pod *corev1.Pod) error {
		mu.Lock()
		defer mu.Unlock()
		tried[pod.Name]++
		if pod.Name == "web-7" {
			return errors.New("no right")
		}
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "default/web-7: no right") {
		t.Errorf("the error is %v", err)
	}
	for _, pod := range pods {
		want := 1
		if pod.Name == "free" {
			want = 0
		}
		if tried[pod.Name] != want {
			t.Errorf("%s was tried %d times", pod.Name, tried[pod.Name])
		}
	}
	if found != 10*ungaters {
		t.Errorf("found %d gated pods", found)
	}
	if found, err := ungate(nil, home.Gated, nil); found != 0 || err != nil {
		t.Error(found, err)
	}
}

func TestADeletedGateBindingAloneCountsForAWhile(t *testing.T) {
	now := time.Now()
	if begun(uninstall.Status{}, uninstall.Status{State: uninstall.Present, Since: now}, now) {
		t.Error("begun without a signal")
	}
	deleted := uninstall.Status{State: uninstall.Deleted, Since: now}
	if !begun(uninstall.Status{}, deleted, now.Add(bindingAlone-1)) ||
		begun(uninstall.Status{}, deleted, now.Add(bindingAlone)) {
		t.Errorf("it does not count for %v", bindingAlone)
	}
	if !begun(deleted, uninstall.Status{}, now.Add(time.Hour)) {
		t.Error("a deleted installation counts for a while only")
	}
}
