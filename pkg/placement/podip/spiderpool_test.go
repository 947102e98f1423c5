package podip

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/test/must"
)

const ippool = "ipam.spidernet.io/ippool"

// inTheirWords has a pod ask as Spiderpool's pods do.
func inTheirWords(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{ippool: value} }
}

// starting: the pod has no network yet.
func starting(p *corev1.Pod) { p.Status.PodIP, p.Status.PodIPs = "", nil }

func TestPodsThatAskInSpiderpoolsWordsGetTheirAddresses(t *testing.T) {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{"ipam.spidernet.io/default-ipv4-ippool": `["blue"]`}}}
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), space,
		asking("gated", "", inTheirWords(`{"ipv4":["blue"]}`)), asking("default", "", func(p *corev1.Pod) { p.Annotations = nil }),
		asking("bound", "", inTheirWords(`{"ipv4":["blue"]}`), hometest.RanOn("node-1"), starting),
		asking("wild", "", inTheirWords(`{"ipv4":["b*"]}`)), asking("none", ""))
	a.spiderpool = true
	c := control(t, a)
	c.works()
	for name, want := range map[string]int{"gated": 1, "default": 1, "bound": 1, "wild": 0, "none": 0} {
		pod, has := a.pod(t, name)
		if owns, err := c.claimer.asks(t.Context(), pod); len(has) != want || err != nil || owns != (name != "none") {
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
		c := unstarted(t, a)
		if owns, err := c.claimer.asks(t.Context(), theirs); owns || err == nil {
			t.Errorf("before anything is known: owns %t, %v", owns, err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- c.follower.Start(ctx) }()
		works := func() {
			synctest.Wait()
			c.empties()
		}
		works()
		if owns, err := c.claimer.asks(t.Context(), theirs); owns || err != nil {
			t.Errorf("without the right: owns %t, %v", owns, err)
		}
		if _, has := a.pod(t, "web-0"); has != nil {
			t.Errorf("without the right: it has %v", has)
		}
		a.spiderpool = true
		time.Sleep(cluster.LookupEvery)
		works()
		if owns, err := c.claimer.asks(t.Context(), theirs); !owns || err != nil {
			t.Errorf("with the right: owns %t, %v", owns, err)
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

// theirPool makes a SpiderIPPool as the manual of Spiderpool's StatefulSets does.
func theirPool(name string, change ...func(*spiderpoolv2beta1.SpiderIPPool)) *spiderpoolv2beta1.SpiderIPPool {
	o := &spiderpoolv2beta1.SpiderIPPool{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("theirs-" + name), Generation: 1},
		Spec:       spiderpoolv2beta1.SpiderIPPoolSpec{Subnet: "10.6.0.0/16", IPs: []string{"10.6.168.101-10.6.168.110"}},
	}
	for _, c := range change {
		c(o)
	}
	return o
}

func (a *api) theirPool(t *testing.T, name string) *spiderpoolv2beta1.SpiderIPPool {
	t.Helper()
	o := &spiderpoolv2beta1.SpiderIPPool{}
	if err := a.Get(t.Context(), types.NamespacedName{Name: name}, o); err != nil {
		t.Fatal(err)
	}
	return o
}

func (a *api) counted(t *testing.T, name string) string {
	t.Helper()
	is := a.theirPool(t, name).Status
	if is.TotalIPCount == nil || is.AllocatedIPCount == nil {
		return "nothing"
	}
	if is.IPVersion == nil || *is.IPVersion != 4 {
		t.Errorf("the column VERSION of %s shows %v", name, is.IPVersion)
	}
	return fmt.Sprintf("%d of %d", *is.AllocatedIPCount, *is.TotalIPCount)
}

func TestASpiderIPPoolIsServedUntilItsLastAddressIsFree(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), theirPool("test-ippool"),
		asking("test-sts-0", "", inTheirWords(`{"ipv4":["test-ippool"]}`)), asking("ours-0", "test-ippool", made(time.Second)))
	a.spiderpool = true
	c := control(t, a)
	c.works()
	a.consistent(t)
	for _, name := range []string{"test-sts-0", "ours-0"} {
		if _, has := a.pod(t, name); len(has) != 1 || has[0].Pool != "test-ippool" || has[0].Prefix.Bits() != 16 ||
			has[0].Gateway.IsValid() || len(has[0].Routes) > 0 {
			t.Errorf("%s has %v", name, has)
		}
	}
	is := a.theirPool(t, "test-ippool")
	if counts := a.counted(t, "test-ippool"); counts != "2 of 10" ||
		!slices.Contains(is.Finalizers, stayputv1alpha1.FinalizerInUse) {
		t.Errorf("it counts %s, held by %q", counts, is.Finalizers)
	}

	// Deleted, it stays until nobody has an address of it, and gives none.
	if err := a.Delete(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	late := asking("late", "test-ippool", made(time.Minute))
	if err := a.WithWatch.Create(t.Context(), late); err != nil {
		t.Fatal(err)
	}
	c.works()
	if _, has := a.pod(t, "late"); has != nil {
		t.Errorf("a pool that is being deleted has given %v", has)
	}
	a.theirPool(t, "test-ippool")
	for _, name := range []string{"test-sts-0", "ours-0", "late"} {
		pod, _ := a.pod(t, name)
		if err := a.Delete(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	c.works()
	err := a.Get(t.Context(), types.NamespacedName{Name: "test-ippool"}, &spiderpoolv2beta1.SpiderIPPool{})
	if client.IgnoreNotFound(err) != nil || err == nil || len(a.ips(t)) > 0 {
		t.Errorf("the pool: %v; left are %v", err, a.ips(t))
	}
}

func TestASpiderIPPoolThatCannotBeHonouredGivesNothingAndSaysWhy(t *testing.T) {
	yes, six, foreign, given := true, int64(6), "10.7.0.1", `{"10.6.168.101":{"pod":"default/x","podUid":"u"}}`
	selects := &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	type theirs = *spiderpoolv2beta1.SpiderIPPool
	type change = func(theirs)
	for says, test := range map[string]struct {
		change change
		gives  bool
	}{
		"spec.podAffinity is not supported":          {change: func(o theirs) { o.Spec.PodAffinity = selects }},
		"spec.nodeName is not supported":             {change: func(o theirs) { o.Spec.NodeName = []string{"node-1"} }},
		"spec.multusName is not supported":           {change: func(o theirs) { o.Spec.MultusName = []string{"a/b"} }},
		"spec.ips: expected at least one address":    {change: func(o theirs) { o.Spec.IPs = nil }},
		"spec.ipVersion: 6 is not valid":             {change: func(o theirs) { o.Spec.IPVersion = &six }},
		`spec.ips[0]: "web" is not valid: expected`:  {change: func(o theirs) { o.Spec.IPs = []string{"web"} }},
		`spec.excludeIPs[0]: "web" is not valid`:     {change: func(o theirs) { o.Spec.ExcludeIPs = []string{"web"} }},
		`spec.gateway: "10.7.0.1" is not valid`:      {change: func(o theirs) { o.Spec.Gateway = &foreign }},
		"Spiderpool has assigned addresses of it":    {change: func(o theirs) { o.Status.AllocatedIPs = &given }},
		"spec.default is not supported":              {change: func(o theirs) { o.Spec.Default = &yes }, gives: true},
		"there is a PodIPPool of the same name":      {gives: true},
		"it shares addresses with pool another-pool": {gives: true},
	} {
		o := theirPool("theirs")
		if test.change != nil {
			test.change(o)
		}
		objects := []client.Object{hometest.Node("node-1", "a"), o, asking("web-0", "theirs")}
		switch {
		case strings.Contains(says, "PodIPPool"):
			objects = append(objects, aPool("theirs", "10.6.3.1"))
		case strings.Contains(says, "another-pool"):
			objects = append(objects, aPool("another-pool", "10.6.168.110"))
		}
		a := newAPI(t, objects...)
		a.spiderpool = true
		c := control(t, a)
		c.works()
		_, has := a.pod(t, "web-0")
		if (len(has) == 1) != test.gives || test.gives == (len(a.ips(t)) == 0) {
			t.Errorf("%s: it has given %v", says, has)
		}
		notes := c.notes()
		if !slices.ContainsFunc(notes, func(n string) bool {
			return strings.Contains(n, home.ReasonPoolNotServed) && strings.Contains(n, says)
		}) {
			t.Errorf("%s: said %q", says, notes)
		}
		if !test.gives && !slices.ContainsFunc(notes, func(n string) bool {
			return strings.Contains(n, home.ReasonAddressWait) && strings.Contains(n, "pool theirs is invalid: ")
		}) {
			t.Errorf("%s: the pod is told %q", says, notes)
		}
	}
}

// A PodIPPool takes the place of the SpiderIPPool of its name with all addresses, and gives it back.
func TestAPodIPPoolTakesThePlaceOfASpiderIPPool(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), theirPool("theirs"), asking("web-0", "theirs"))
	a.spiderpool = true
	c := control(t, a)
	c.works()
	ours := aPool("theirs", "10.6.168.101-10.6.168.102")
	for _, name := range []string{"web-1", "web-2"} {
		if err := a.WithWatch.Create(t.Context(), asking(name, "theirs", made(time.Second))); err != nil {
			t.Fatal(err)
		}
		if name == "web-1" {
			if err := a.WithWatch.Create(t.Context(), ours); err != nil {
				t.Fatal(err)
			}
		}
		c.works()
	}
	if is := a.theirPool(t, "theirs"); len(is.Finalizers) > 0 {
		t.Errorf("the SpiderIPPool is held by %q", is.Finalizers)
	}
	if ips := a.ips(t); len(ips) != 2 {
		t.Errorf("there are %v", ips)
	}
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(ours), ours); err != nil || ours.Status.Addresses.Used != 2 ||
		ours.Status.Addresses.Total != 2 || len(ours.Finalizers) != 1 {
		t.Errorf("%+v, %v", ours, err)
	}
	ours.Finalizers = nil
	if err := a.WithWatch.Update(t.Context(), ours); err != nil {
		t.Fatal(err)
	}
	if err := a.Delete(t.Context(), ours); err != nil {
		t.Fatal(err)
	}
	c.works()
	a.consistent(t)
	if counts := a.counted(t, "theirs"); counts != "3 of 10" {
		t.Errorf("it counts %s", counts)
	}
}

// A pod that Spiderpool has started runs with an address that it was not told of. It keeps it, whether or not its words
// count yet, and is told once they do.
func TestAnAdoptedAddressIsItsPods(t *testing.T) {
	old := asking("web-0", "", inTheirWords(`{"ipv4":["blue"]}`), hometest.RanOn("node-1"), func(p *corev1.Pod) {
		p.Status.PodIP = "10.6.168.105"
	})
	ip := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.105", UID: "ip",
		Finalizers: []string{stayputv1alpha1.FinalizerInUse}},
		Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeL2, Namespace: "default", PodName: "web-0",
			PodUID: string(old.UID), Interface: "eth0", AdoptedOn: "node-1"}}
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.105-10.6.168.106"), ip, old,
		asking("web-1", "blue", made(time.Second)), asking("web-2", "blue", made(2*time.Second)))
	c := control(t, a)
	c.works()
	if _, has := a.pod(t, "web-0"); has != nil {
		t.Errorf("it is told %v while its words do not count", has)
	}
	if p := c.session.book.Pod(old.UID); p == nil || p.Node != "node-1" {
		t.Errorf("of the pod is known %+v", p)
	}
	for name, want := range map[string]string{"web-1": "10.6.168.106", "web-2": ""} {
		_, has := a.pod(t, name)
		if got := fmt.Sprint(has); want == "" && has != nil || !strings.Contains(got, want) {
			t.Errorf("%s has %s", name, got)
		}
	}
	for _, w := range a.taken() {
		if strings.Contains(w, "update PodIP 10.6.168.105") {
			t.Errorf("it is written: %s", w)
		}
	}
	c.setWords(true)
	c.begins()
	c.works()
	if _, has := a.pod(t, "web-0"); len(has) != 1 || has[0].Prefix.String() != "10.6.168.105/16" {
		t.Errorf("it is told %v", has)
	}
	if is := a.ips(t); len(is) != 2 || is["10.6.168.105"].Spec.AdoptedOn == "" {
		t.Errorf("there are %+v", is)
	}
}

// What is known is put in by watches, in no order.
func TestWhatComesLaterFindsWhatWasThere(t *testing.T) {
	old := asking("web-0", "", inTheirWords(`{"ipv4":["blue"]}`), hometest.RanOn("node-1"))
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.105-10.6.168.106"), theirPool("blue"), old)
	c := control(t, a)
	c.works()
	adopted := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.105", UID: "ip"},
		Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeL2, Namespace: "default", PodName: "web-0",
			PodUID: string(old.UID), Interface: "eth0", AdoptedOn: "node-1"}}
	must.Do(t, a.WithWatch.Create(t.Context(), adopted))
	must.Do(t, c.feeds[1].Add(adopted))
	for len(c.line.now) > 0 {
		if err := c.step(); err != nil {
			t.Fatal(err)
		}
	}
	if c.session.book.Pod(old.UID) == nil {
		t.Error("the pod of an adopted address is not known")
	}
	if err := c.feeds[0].Delete(aPool("blue", "10.6.168.105-10.6.168.106")); err != nil {
		t.Fatal(err)
	}
	if p := c.session.book.Pool("blue"); p == nil || p.Range.Set.Count() != 10 {
		t.Errorf("without the PodIPPool there is %+v", p)
	}
}
