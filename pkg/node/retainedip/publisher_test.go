package retainedip

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

// publishing is a publisher that runs, and the claims that it was last given.
type publishing struct {
	*Publisher
	t      *testing.T
	claims []Claim
}

func inCluster(t *testing.T, c *nodetest.Cluster, change ...func(*Options)) *publishing {
	t.Helper()
	o := options(t, c.URL)
	for _, change := range change {
		change(&o)
	}
	p := New(o)
	p.backoff.Cap = time.Second // what counts is that it tries again
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		c.EndWatches(nil)
		wg.Wait()
	})
	return &publishing{Publisher: p, t: t}
}

func options(t *testing.T, url string) Options {
	api, err := apiserver.New(&rest.Config{Host: url}, "n1")
	must.Do(t, err)
	return Options{
		API: api, Node: "n1", Release: func(Name, []ledger.Key, func()) {},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Registry: prometheus.NewRegistry(),
	}
}

// bind publishes that a pod has an address that is promised to it.
func (p *publishing) bind(pod string) {
	p.t.Helper()
	c := claimOf(p.t, "pods", pod, ledger.PodInterface, fmt.Sprintf("192.0.2.%d", len(p.claims)+1))
	p.claims = append(p.claims, c)
	p.publish()
}

// retain publishes that the pods have ended.
func (p *publishing) retain() {
	for i, c := range p.claims {
		p.claims[i] = retainedUntil(c, noon, noon.Add(time.Hour))
	}
	p.publish()
}

func (p *publishing) publish() { p.PublishClaims(Promises{Claims: slices.Clone(p.claims)}) }

func TestAnAPIServerThatRefusesIsAskedAgain(t *testing.T) {
	c := nodetest.StartCluster(t)
	c.Answers(func(r *http.Request) *metav1.Status {
		if r.Method == http.MethodPatch {
			return nodetest.Forbidden()
		}
		return nil
	})
	p := inCluster(t, c)
	p.bind("web-0")
	must.Eventually(t, "refused three times", func() bool { return c.Count("PATCH") >= 3 })
	must.Eventually(t, "an Event", func() bool { return c.Count("POST /apis/events.k8s.io/v1/namespaces/default") == 1 })
	if said := p.Trouble(); !strings.Contains(said, "1 RetainedIPs are not up to date") {
		t.Errorf("says %q", said)
	}
	if n := testutil.ToFloat64(p.metrics.writes.WithLabelValues("apply", "forbidden")); n < 2 {
		t.Errorf("counted %v refusals", n)
	}
	c.Answers(nil)
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	must.Eventually(t, "content", func() bool { return p.Trouble() == "" })
}

// Another node's agent may have written an object under a name of this node's.
func TestANameThatAnotherNodesObjectHasIsSaidAndTakenBack(t *testing.T) {
	c := nodetest.StartCluster(t)
	name := v1alpha1.RetainedIPName("web-0", "n1")
	squatter := &v1alpha1.RetainedIP{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "squatter"}}
	squatter.Spec.PodName, squatter.Spec.NodeName = "web-0", "n2"
	c.Put(squatter)
	var mayDelete atomic.Bool
	c.Answers(func(r *http.Request) *metav1.Status {
		is := c.Object("web-0")
		switch {
		case r.Method == http.MethodPatch && is != nil && is.Spec.NodeName == "n2": // it is immutable
			return &metav1.Status{Code: 422, Reason: metav1.StatusReasonInvalid}
		case r.Method == http.MethodDelete && !mayDelete.Load():
			return nodetest.Forbidden()
		}
		return nil
	})
	p := inCluster(t, c)
	p.bind("web-0")
	must.Eventually(t, "an Event", func() bool { return c.Count("POST /apis/events.k8s.io/v1/namespaces/default") == 1 })
	c.Mu.Lock()
	e := c.Events[0]
	c.Mu.Unlock()
	for _, said := range []string{p.Trouble(), e.Note} {
		if !strings.Contains(said, errSquatted.Error()) || !strings.Contains(said, `"n2"`) {
			t.Errorf("says %q", said)
		}
	}
	if e.Reason != string(EventNotPublished) || c.Object("web-0").UID != "squatter" {
		t.Errorf("the Event is %+v", e)
	}
	mayDelete.Store(true)
	must.Eventually(t, "published", func() bool {
		is := c.Object("web-0")
		return is != nil && is.Spec.NodeName == "n1"
	})
	must.Eventually(t, "content", func() bool { return p.Trouble() == "" })
}

// An object may be as large as the API server stores, whoever wrote it.
func TestWhatIsKeptOfAnObjectIsBounded(t *testing.T) {
	c := nodetest.StartCluster(t)
	long := strings.Repeat("x", 100<<10)
	name := v1alpha1.RetainedIPName("web-0", "n1")
	r := &v1alpha1.RetainedIP{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "u",
		Annotations: map[string]string{"example.com/notes": long},
		Labels:      map[string]string{"x": long}, Finalizers: []string{long}}}
	r.Spec = v1alpha1.RetainedIPSpec{NodeName: "n1", PodName: "web-0", Identity: long, Retention: long}
	r.Status.PodUID = long
	for range 10000 {
		r.OwnerReferences = append(r.OwnerReferences, metav1.OwnerReference{Kind: "Node", Name: "n1", UID: "node-uid"})
		r.Status.IPs = append(r.Status.IPs, "192.0.2.1")
		r.Status.Addresses = append(r.Status.Addresses, v1alpha1.NetworkAddresses{Network: "pods"})
	}
	r.Status.Addresses[0].IPs = append(slices.Clone(r.Status.IPs), long)
	r.Status.Addresses[1].Network = long
	c.Put(r)
	p := New(options(t, c.URL))
	list, err := listWatch{p}.List(metav1.ListOptions{Limit: 500, ResourceVersion: "0"})
	must.Do(t, err)
	items := list.(*v1alpha1.RetainedIPList).Items
	if len(items) != 1 {
		t.Fatalf("%d objects", len(items))
	}
	b, err := json.Marshal(items)
	must.Do(t, err)
	if len(b) > 64<<10 {
		t.Errorf("of an object are kept %d KiB", len(b)>>10)
	}

	// It is nobody's, or written again.
	running := inCluster(t, c)
	running.bind("web-0")
	must.Eventually(t, "written", func() bool { return c.Object("web-0").Spec.Identity == "" })
	must.Eventually(t, "content", func() bool { return running.Trouble() == "" })
}

func TestWhileTheAPIServerIsAwayNothingIsWritten(t *testing.T) {
	c := nodetest.StartCluster(t)
	away := func(*http.Request) *metav1.Status {
		return &metav1.Status{Code: 503, Reason: metav1.StatusReasonServiceUnavailable}
	}
	c.Answers(away)
	p := inCluster(t, c)
	up := func() bool { return testutil.ToFloat64(p.metrics.up) == 1 }
	stays := func(writes int) {
		t.Helper()
		asked := c.Count("GET /apis/stayput.io")
		must.Eventually(t, "asked several times", func() bool { return c.Count("GET /apis/stayput.io") >= asked+4 })
		if n := c.Count("PATCH"); n != writes {
			t.Errorf("%d writes, not %d", n, writes)
		}
		if said := p.Trouble(); !strings.Contains(said, "RetainedIPs") || up() {
			t.Errorf("says %q", said)
		}
	}
	p.bind("web-0")
	stays(0)
	c.Answers(nil)
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	must.Eventually(t, "up", up)

	// One that is tried again and one that is new must wait as well.
	c.Answers(func(r *http.Request) *metav1.Status {
		if r.Method == http.MethodPatch {
			return nodetest.Forbidden()
		}
		return nil
	})
	p.bind("web-1")
	must.Eventually(t, "refused", func() bool { return c.Count("PATCH") == 2 })
	c.Answers(away)
	c.EndWatches(nil)
	must.Eventually(t, "down", func() bool { return !up() })
	p.bind("web-2")
	stays(c.Count("PATCH"))
	c.Answers(nil)
	must.Eventually(t, "published", func() bool { return c.Object("web-1") != nil && c.Object("web-2") != nil })
}

func TestAWatchThatIsTooOldIsBegunAnew(t *testing.T) {
	c := nodetest.StartCluster(t)
	p := inCluster(t, c)
	p.bind("web-0")
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	was := c.Object("web-0")
	c.Mu.Lock()
	delete(c.Objects, nodetest.Name{Namespace: was.Namespace, Name: was.Name}) // and nobody says so
	c.Version += 1000
	c.Mu.Unlock()
	must.Eventually(t, "watched", func() bool { c.Mu.Lock(); defer c.Mu.Unlock(); return len(c.Watches) == 1 })
	c.EndWatches(&metav1.Status{Code: 410, Reason: metav1.StatusReasonExpired})
	must.Eventually(t, "published again", func() bool {
		return c.Object("web-0") != nil &&
			c.Object("web-0").UID != was.UID
	})
}

func TestAnAPIServerThatWentBackInTimeIsListedAnew(t *testing.T) {
	c := nodetest.StartCluster(t)
	p := inCluster(t, c)
	p.bind("web-0")
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	must.Eventually(t, "watched", func() bool { c.Mu.Lock(); defer c.Mu.Unlock(); return len(c.Watches) == 1 })
	c.Put(c.Object("web-0")) // the watch has seen a version after the list's
	seen := c.Object("web-0").ResourceVersion
	must.Eventually(t, "seen", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		o := p.objects[Name{"default", "web-0.n1"}]
		return o != nil && o.version == seen
	})
	c.Mu.Lock()
	clear(c.Objects)
	c.Version = 7
	c.Mu.Unlock()
	c.EndWatches(nil)
	must.Eventually(t, "published again", func() bool { return c.Object("web-0") != nil })
}

func TestANamespaceThatIsGoneEndsWhatItsWorkloadsOwned(t *testing.T) {
	for policy, ends := range map[string]bool{"while-owned": true, "10m": false} {
		c := nodetest.StartCluster(t)
		c.Answers(func(r *http.Request) *metav1.Status {
			if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "web-0") {
				return nodetest.NotFound("namespaces", "default")
			}
			return nil
		})
		p := inCluster(t, c)
		var asked atomic.Int32
		p.o.Release = func(_ Name, _ []ledger.Key, done func()) { asked.Add(1); done() }
		claim := retainedUntil(claimOf(t, "pods", "web-0", "eth0", "192.0.2.1"), noon, noon.Add(time.Hour))
		claim.Policy = policyOf(t, policy)
		p.claims = []Claim{claim}
		p.publish()
		if ends {
			must.Eventually(t, "released", func() bool { return asked.Load() > 0 })
			continue
		}
		must.Eventually(t, "refused twice", func() bool { return c.Count("PATCH") >= 2 })
		must.Eventually(t, "back in the queue", func() bool { return p.queue.NumRequeues(Name{"default", "web-0.n1"}) >= 2 })
		if said := p.Trouble(); said != "" {
			t.Errorf("says %q", said)
		}
		if n := asked.Load(); n != 0 {
			t.Errorf("%s: released %d times", policy, n)
		}
	}
}

// lines are those of a log.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, string(line))
	return len(line), nil
}

// with returns the lines with a text.
func (l *lines) with(text string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(l.all), func(line string) bool { return !strings.Contains(line, text) })
}

func TestObjectsWaitForTheirNode(t *testing.T) {
	c := nodetest.StartCluster(t)
	c.Node = ""
	var log lines
	p := inCluster(t, c, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	p.bind("web-0")
	p.bind("web-1")
	must.Eventually(t, "asked for the Node", func() bool { return c.Count("GET /api/v1/nodes/n1") > 0 })
	must.Eventually(t, "said so", func() bool { return strings.Contains(p.Trouble(), "does not exist: Node n1") })
	for _, pod := range []string{"web-0", "web-1"} {
		must.Eventually(t, pod+" tried again", func() bool { return p.queue.NumRequeues(Name{"default", pod + ".n1"}) >= 2 })
	}
	if said := log.with("Node"); len(said) != 1 {
		t.Errorf("the log says %q", said)
	}
	if n := c.Count("PATCH"); n != 0 {
		t.Errorf("%d writes", n)
	}
	c.Mu.Lock()
	c.Node = "second"
	c.Mu.Unlock()
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	if o := c.Object("web-0").OwnerReferences; len(o) != 1 || o[0].UID != "second" {
		t.Errorf("owners %+v", o)
	}
	// The Node goes, and takes the object with it.
	c.Mu.Lock()
	c.Node = "third"
	c.RemoveLocked(nodetest.Name{Namespace: "default", Name: "web-0.n1"})
	c.Mu.Unlock()
	must.Eventually(t, "published for the third", func() bool {
		return c.Object("web-0") != nil &&
			c.Object("web-0").OwnerReferences[0].UID == "third"
	})
}

func TestSomebodyWhoWritesAgainstTheAgentDoesNotKeepItBusy(t *testing.T) {
	c := nodetest.StartCluster(t)
	p := inCluster(t, c)
	p.bind("web-0")
	var first time.Time
	for i := range paceBurst + 2 {
		must.Eventually(t, "corrected", func() bool { o := c.Object("web-0"); return o != nil && o.Spec.PodName == "web-0" })
		if i == 0 {
			first = time.Now()
		}
		o := c.Object("web-0")
		o.Spec.PodName = "mine"
		c.Put(o)
	}
	if took := time.Since(first); took < paceEvery {
		t.Errorf("%d writes within %s", paceBurst+2, took)
	}
}

func TestAnEventIsAboutThePodWhereItsUIDIsKnown(t *testing.T) {
	c := nodetest.StartCluster(t)
	p := inCluster(t, c)
	p.bind("web-0")
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	must.Eventually(t, "known", func() bool { return p.uidOf(Name{"default", "web-0.n1"}) != "" })
	key := ledger.Key{Network: "pods", Identity: "pod:default/web-0", Pod: "web-0", IfName: "eth0"}
	for _, e := range []ledger.Event{
		{Reason: ledger.EventRestored, Key: key, Time: noon, Message: "ordinary"},
		{Reason: ledger.EventNotRestored, Key: key, Pod: ledger.Pod{Namespace: "default", Name: "web-0", UID: "u1"},
			Time: noon, Message: "why"},
		{Reason: ledger.EventNotRestored, Key: key, Pod: ledger.Pod{Namespace: "default", Name: "web-0", UID: "u1"},
			Time: noon, Message: "why"},
		{Reason: EventExpired, Key: key, Time: noon, Message: "over"},
		{Reason: EventReclaimed, Key: ledger.Key{Network: "pods"}, Time: noon, Message: strings.Repeat("x", 2000)},
	} {
		p.PublishEvent(e)
	}
	must.Eventually(t, "sent", func() bool { c.Mu.Lock(); defer c.Mu.Unlock(); return len(c.Events) == 3 })
	about := map[string]nodetest.Reference{}
	for _, e := range c.Events {
		about[e.Reason] = e.Regarding
		if e.EventTime.IsZero() || e.Action == "" || e.ReportingInstance != "n1" ||
			e.ReportingController != "stayput-agent" || len(e.Note) > longestNote {
			t.Errorf("%+v", e)
		}
	}
	want := map[string]nodetest.Reference{
		"IPNotRestored": {APIVersion: "v1", Kind: "Pod", Namespace: "default", Name: "web-0", UID: "u1"},
		"IPExpired": {APIVersion: "stayput.io/v1alpha1", Kind: "RetainedIP", Namespace: "default", Name: "web-0.n1",
			UID: c.Object("web-0").UID},
		"IPReclaimed": {APIVersion: "v1", Kind: "Node", Name: "n1"},
	}
	if !maps.Equal(about, want) {
		t.Errorf("about %+v", about)
	}
}

func TestEventsThatAreTooManyAreDroppedAndCounted(t *testing.T) {
	p := New(options(t, "http://192.0.2.1"))
	for i := range eventsQueued + 10 {
		p.PublishEvent(ledger.Event{Reason: EventExpired, Key: ledger.Key{Identity: "pod:default/web",
			Pod: fmt.Sprint("web-", i)}, Time: noon})
	}
	if n := testutil.ToFloat64(p.metrics.eventsDropped); n != 10 {
		t.Errorf("%v dropped", n)
	}
}

func TestADefinitionThatLacksAFieldIsWrittenToOnce(t *testing.T) {
	c := nodetest.StartCluster(t)
	c.Drops = func(r *v1alpha1.RetainedIP) { r.Spec.WhenDeleted, r.Status.PodUID, r.Status.Addresses = "", "", nil }
	p := inCluster(t, c)
	p.bind("web-0")
	must.Eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	for range 3 { // whatever makes it look again
		seen := c.Object("web-0")
		c.Put(seen)
		p.publish()
		c.EndWatches(nil)
		must.Eventually(t, "seen", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			o := p.objects[Name{"default", "web-0.n1"}]
			return p.queue.Len() == 0 && o != nil && o.version != seen.ResourceVersion
		})
	}
	if n := c.Count("PATCH"); n > 4 {
		t.Errorf("%d writes of what never changed", n)
	}
	p.retain()
	must.Eventually(t, "told of the next state",
		func() bool { return c.Object("web-0").Status.Phase == v1alpha1.PhaseRetained })
}
