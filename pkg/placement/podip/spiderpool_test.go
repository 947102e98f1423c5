package podip

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

const ippool = "ipam.spidernet.io/ippool"

// inTheirWords has a pod ask as Spiderpool's pods do.
func inTheirWords(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{ippool: value} }
}

func TestPodsThatAskInSpiderpoolsWordsGetTheirAddresses(t *testing.T) {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{"ipam.spidernet.io/default-ipv4-ippool": `["blue"]`}}}
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), space,
		asking("gated", "", inTheirWords(`{"ipv4":["blue"]}`)), asking("default", "", func(p *corev1.Pod) { p.Annotations = nil }),
		asking("bound", "", inTheirWords(`{"ipv4":["blue"]}`), hometest.RanOn("node-1")),
		asking("wild", "", inTheirWords(`{"ipv4":["b*"]}`)), asking("none", ""))
	a.spiderpool = true
	c := control(t, a)
	c.works()
	for name, want := range map[string]int{"gated": 1, "default": 1, "bound": 1, "wild": 0, "none": 0} {
		pod, has := a.pod(t, name)
		if owns, known := c.Owns(pod); len(has) != want || !known || owns != (name != "none") {
			t.Errorf("%s has %v, owned %t", name, has, owns)
		}
	}
	if notes := c.notes(); !slices.ContainsFunc(notes, func(n string) bool {
		return strings.Contains(n, home.ReasonInvalidAnnotation) && strings.Contains(n, "annotation "+ippool) &&
			strings.Contains(n, `wildcards such as "b*" are not supported`)
	}) {
		t.Errorf("said %q", notes)
	}
	for _, name := range []string{"gated", "wild"} {
		if pod, _ := a.pod(t, name); home.Gated(pod) != (name == "wild") {
			t.Errorf("%s: gated %t", name, home.Gated(pod))
		}
	}
}

// While Spiderpool gives the addresses itself, its words are not ours to read.
func TestSpiderpoolsWordsCountWithTheRightToReadItsPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		theirs := asking("web-0", "", inTheirWords(`{"ipv4":["blue"]}`))
		a := newAPI(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
			aPool("blue", "10.6.168.101-10.6.168.110"), theirs)
		c := newController(a, a, a, informers{}, Options{Workloads: serves(a, "PodIPPool"),
			Uninstalling: func() bool { return false }})
		line := &line{}
		c.now, c.queue = func() time.Time { return a.now }, line
		if owns, known := c.Owns(theirs); owns || known {
			t.Errorf("before anything is known: owns %t, known %t", owns, known)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- c.Start(ctx) }()
		works := func() {
			synctest.Wait()
			for len(line.now) > 0 {
				k := line.now[0]
				line.now = line.now[1:]
				if _, err := c.Reconcile(ctx, k); err != nil {
					t.Error(err)
				}
			}
		}
		works()
		if owns, known := c.Owns(theirs); owns || !known {
			t.Errorf("without the right: owns %t, known %t", owns, known)
		}
		if _, has := a.pod(t, "web-0"); has != nil {
			t.Errorf("without the right: it has %v", has)
		}
		a.spiderpool = true
		time.Sleep(cluster.LookupEvery)
		works()
		if owns, known := c.Owns(theirs); !owns || !known {
			t.Errorf("with the right: owns %t, known %t", owns, known)
		}
		if _, has := a.pod(t, "web-0"); len(has) != 1 {
			t.Errorf("with the right: it has %v", has)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
