package placement

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/home/hometest"
)

func TestEveryPodIsTriedThoughSomeCannotBeLetGo(t *testing.T) {
	var pods []*corev1.Pod
	for i := range 10 * ungaters {
		pods = append(pods, hometest.Pod(func(p *corev1.Pod) { p.Name = fmt.Sprint("web-", i) }))
	}
	var mu sync.Mutex
	tried := map[string]int{}
	err := ungate(pods, func(pod *corev1.Pod) error {
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
		if tried[pod.Name] != 1 {
			t.Errorf("%s was tried %d times", pod.Name, tried[pod.Name])
		}
	}
	if err := ungate(nil, nil); err != nil {
		t.Error(err)
	}
}

func TestTheDeletionOfTheGateBindingAloneCountsForAWhile(t *testing.T) {
	m, d := (*departure)(nil), &departure{}
	if m.leaving() || d.ungatedLately(time.Now()) {
		t.Error("it leaves without a sign")
	}
	d.ungated = time.Now()
	if !d.ungatedLately(d.ungated.Add(gatesAlone-1)) || d.ungatedLately(d.ungated.Add(gatesAlone)) {
		t.Errorf("it does not count for %v", gatesAlone)
	}
}
