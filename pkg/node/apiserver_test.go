package node

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

// cluster is as much of an API server as an agent sees, for what the real one cannot be made to do at a test's
// word: to refuse, to forget, to know no Node. test/cluster has the rest.
type cluster struct {
	t *testing.T
	*httptest.Server
	mu      sync.Mutex
	objects map[objectKey]*v1alpha1.RetainedIP
	events  []event
	version int
	node    types.UID // empty: there is no Node
	// answer, if it returns a status, is what a request gets instead.
	answer  func(*http.Request) *metav1.Status
	watches map[chan metav1.WatchEvent]bool
	// The ConfigMap that says that stayput is installed: its UID, empty where there is none, and who watches it.
	installed types.UID
	followers map[chan metav1.WatchEvent]bool
	drops     func(*v1alpha1.RetainedIP) // takes out of an object what the definition does not have
	asked     []string                   // method and path of every request
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, objects: map[objectKey]*v1alpha1.RetainedIP{}, node: "node-uid", version: 100, watches: map[chan metav1.WatchEvent]bool{}, followers: map[chan metav1.WatchEvent]bool{}}
	mux := http.NewServeMux()
	const all = "/apis/stayput.io/v1alpha1/retainedips"
	const one = "/apis/stayput.io/v1alpha1/namespaces/{ns}/retainedips/{name}"
	mux.HandleFunc("GET "+all, c.list)
	mux.HandleFunc("GET /apis/stayput.io/v1alpha1/namespaces/default/retainedips", c.list)
	mux.HandleFunc("GET "+one, c.get)
	mux.HandleFunc("PATCH "+one, c.apply)
	mux.HandleFunc("DELETE "+one, c.delete)
	mux.HandleFunc("GET /api/v1/nodes/n1", c.getNode)
	mux.HandleFunc("GET /api/v1/namespaces/stayput-system/configmaps", c.installation)
	mux.HandleFunc("POST /apis/events.k8s.io/v1/namespaces/{ns}/events", func(w http.ResponseWriter, r *http.Request) {
		var e event
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
			t.Error(err)
		}
		c.mu.Lock()
		c.events = append(c.events, e)
		c.mu.Unlock()
		fmt.Fprint(w, `{"apiVersion":"events.k8s.io/v1","kind":"Event"}`)
	})
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		c.asked = append(c.asked, r.Method+" "+r.URL.Path)
		answer := c.answer
		c.mu.Unlock()
		if answer != nil {
			if s := answer(r); s != nil {
				refuse(w, s)
				return
			}
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		c.endWatches(nil)
		c.Server.Close()
	})
	return c
}

func refuse(w http.ResponseWriter, s *metav1.Status) {
	s.TypeMeta, s.Status = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, metav1.StatusFailure
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(s.Code))
	json.NewEncoder(w).Encode(s)
}

func say(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

func notFound(resource, name string) *metav1.Status {
	return &metav1.Status{Code: 404, Reason: metav1.StatusReasonNotFound, Details: &metav1.StatusDetails{Kind: resource, Name: name}}
}

func forbidden() *metav1.Status {
	return &metav1.Status{Code: 403, Reason: metav1.StatusReasonForbidden}
}

func keyOf(r *http.Request) objectKey { return objectKey{r.PathValue("ns"), r.PathValue("name")} }

func (c *cluster) list(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("watch") != "" {
		c.watch(w, r)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	l := v1alpha1.RetainedIPList{TypeMeta: metav1.TypeMeta{APIVersion: "stayput.io/v1alpha1", Kind: "RetainedIPList"}}
	l.ResourceVersion = strconv.Itoa(c.version)
	if r.URL.Query().Get("fieldSelector") == "spec.nodeName=n1" {
		for _, o := range c.objects {
			l.Items = append(l.Items, *o)
		}
	}
	say(w, l)
}

func (c *cluster) watch(w http.ResponseWriter, r *http.Request) {
	ch := make(chan metav1.WatchEvent, 100)
	c.mu.Lock()
	c.watches[ch] = true
	c.mu.Unlock()
	serveWatch(w, r, ch)
}

func serveWatch(w http.ResponseWriter, r *http.Request, ch chan metav1.WatchEvent) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e, ok := <-ch:
			if !ok {
				return
			}
			json.NewEncoder(w).Encode(e)
			w.(http.Flusher).Flush()
		}
	}
}

// tell is called with the lock.
func (c *cluster) tell(kind string, v any) {
	raw, err := json.Marshal(v)
	check(c.t, err)
	for ch := range c.watches {
		e := metav1.WatchEvent{Type: kind}
		e.Object.Raw = raw
		ch <- e
	}
}

// endWatches ends every watch, with an error if there is one to say.
func (c *cluster) endWatches(s *metav1.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s != nil {
		s.TypeMeta, s.Status = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, metav1.StatusFailure
		c.tell("ERROR", s)
	}
	for ch := range c.watches {
		close(ch)
	}
	clear(c.watches)
	for ch := range c.followers {
		close(ch)
	}
	clear(c.followers)
}

func (c *cluster) get(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o := c.objects[keyOf(r)]; o != nil {
		say(w, o)
		return
	}
	refuse(w, notFound("retainedips", keyOf(r).name))
}

func (c *cluster) apply(w http.ResponseWriter, r *http.Request) {
	var o v1alpha1.RetainedIP
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		c.t.Error(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.objects[keyOf(r)]
	if was == nil && (o.UID != "" || o.ResourceVersion != "") || was != nil && o.ResourceVersion != "" && o.ResourceVersion != was.ResourceVersion {
		refuse(w, &metav1.Status{Code: 409, Reason: metav1.StatusReasonConflict})
		return
	}
	kind := "ADDED"
	o.UID = types.UID(fmt.Sprint("uid-", c.version+1))
	if was != nil {
		kind, o.UID, o.Spec.Release = "MODIFIED", was.UID, was.Spec.Release
	}
	if c.drops != nil {
		c.drops(&o)
	}
	c.putLocked(kind, &o)
	say(w, o)
}

func (c *cluster) putLocked(kind string, o *v1alpha1.RetainedIP) {
	c.version++
	o.TypeMeta = metav1.TypeMeta{APIVersion: "stayput.io/v1alpha1", Kind: "RetainedIP"}
	o.ResourceVersion = strconv.Itoa(c.version)
	c.objects[objectKey{o.Namespace, o.Name}] = o
	c.tell(kind, o)
}

func (c *cluster) put(o *v1alpha1.RetainedIP) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kind := "ADDED"
	if c.objects[objectKey{o.Namespace, o.Name}] != nil {
		kind = "MODIFIED"
	}
	c.putLocked(kind, o)
}

func (c *cluster) delete(w http.ResponseWriter, r *http.Request) {
	var o metav1.DeleteOptions
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		c.t.Error(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.objects[keyOf(r)]
	switch {
	case was == nil:
		refuse(w, notFound("retainedips", keyOf(r).name))
	case o.Preconditions == nil || *o.Preconditions.UID != was.UID || o.Preconditions.ResourceVersion != nil && *o.Preconditions.ResourceVersion != was.ResourceVersion:
		refuse(w, &metav1.Status{Code: 409, Reason: metav1.StatusReasonConflict})
	default:
		c.removeLocked(keyOf(r))
		say(w, metav1.Status{Status: metav1.StatusSuccess})
	}
}

func (c *cluster) removeLocked(key objectKey) {
	c.version++
	o := c.objects[key]
	o.ResourceVersion = strconv.Itoa(c.version)
	delete(c.objects, key)
	c.tell("DELETED", o)
}

func (c *cluster) getNode(w http.ResponseWriter, _ *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.node == "" {
		refuse(w, notFound("nodes", "n1"))
		return
	}
	say(w, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: c.node}})
}

// object returns the RetainedIP of a pod as it is now; nil: there is none.
func (c *cluster) object(pod string) *v1alpha1.RetainedIP {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o := c.objects[objectKey{"default", v1alpha1.RetainedIPName(pod, "n1")}]; o != nil {
		return o.DeepCopy()
	}
	return nil
}

func (c *cluster) count(what string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.asked {
		if strings.HasPrefix(a, what) {
			n++
		}
	}
	return n
}

func (c *cluster) answers(f func(*http.Request) *metav1.Status) {
	c.mu.Lock()
	c.answer = f
	c.mu.Unlock()
}

// inCluster gives the world's agent the API side and runs that, and its inotify.
func (w *world) inCluster(c *cluster) *Agent {
	w.t.Helper()
	a := w.a
	p, err := newAPIServer(&rest.Config{Host: c.URL}, "n1", a.o.GracePeriod, newAPIMetrics(prometheus.NewRegistry()), a.log)
	check(w.t, err)
	p.release = a.release
	p.backoff.Cap = time.Second // what counts is that it tries again
	a.api, a.o.Publisher = p, publishers{w.said, p}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { p.run(ctx) })
	wg.Go(func() { a.watch.run(ctx) })
	w.t.Cleanup(func() {
		cancel()
		c.endWatches(nil)
		wg.Wait()
	})
	return a
}

// promises makes a pod whose address is promised.
func (w *world) promises(id, pod string, annotations map[string]string) Sandbox {
	w.t.Helper()
	s := w.sandbox(id, pod, annotations)
	policy, _, err := ledger.ParseAnnotations(annotations)
	check(w.t, err)
	w.addOn(w.ledger, s, "eth0", &policy)
	w.runs(s)
	return s
}

func TestAnAPIServerThatRefusesIsAskedAgain(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	c.answers(func(r *http.Request) *metav1.Status {
		if r.Method == http.MethodPatch {
			return forbidden()
		}
		return nil
	})
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "refused three times", func() bool { return c.count("PATCH") >= 3 })
	if said := a.api.said(); !strings.Contains(said, "1 RetainedIPs are not up to date") {
		t.Errorf("says %q", said)
	}
	if n := testutil.ToFloat64(a.api.metrics.writes.WithLabelValues("apply", "forbidden")); n < 2 {
		t.Errorf("counted %v refusals", n)
	}
	c.answers(nil)
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	eventually(t, "content", func() bool { return a.api.said() == "" })
}

func TestWhileTheAPIServerIsAwayNothingIsWritten(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	away := func(*http.Request) *metav1.Status {
		return &metav1.Status{Code: 503, Reason: metav1.StatusReasonServiceUnavailable}
	}
	c.answers(away)
	a := w.inCluster(c)
	up := func() bool { return testutil.ToFloat64(a.api.metrics.up) == 1 }
	stays := func(writes int) {
		t.Helper()
		asked := c.count("GET /apis/stayput.io")
		eventually(t, "asked several times", func() bool { return c.count("GET /apis/stayput.io") >= asked+4 })
		if n := c.count("PATCH"); n != writes {
			t.Errorf("%d writes, not %d", n, writes)
		}
		if said := a.api.said(); !strings.Contains(said, "RetainedIPs") || up() {
			t.Errorf("says %q", said)
		}
	}
	w.promises("c1", "web-0", ten)
	a.refresh()
	stays(0)
	c.answers(nil)
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	eventually(t, "up", up)

	// One that is tried again and one that is new must wait as well.
	c.answers(func(r *http.Request) *metav1.Status {
		if r.Method == http.MethodPatch {
			return forbidden()
		}
		return nil
	})
	w.promises("c2", "web-1", ten)
	a.refresh()
	eventually(t, "refused", func() bool { return c.count("PATCH") == 2 })
	c.answers(away)
	c.endWatches(nil)
	eventually(t, "down", func() bool { return !up() })
	w.promises("c3", "web-2", ten)
	a.refresh()
	stays(c.count("PATCH"))
	c.answers(nil)
	eventually(t, "published", func() bool { return c.object("web-1") != nil && c.object("web-2") != nil })
}

func TestAWatchThatIsTooOldIsBegunAnew(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	was := c.object("web-0")
	c.mu.Lock()
	delete(c.objects, objectKey{was.Namespace, was.Name}) // and nobody says so
	c.version += 1000
	c.mu.Unlock()
	eventually(t, "watched", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.watches) == 1 })
	c.endWatches(&metav1.Status{Code: 410, Reason: metav1.StatusReasonExpired})
	eventually(t, "published again", func() bool { return c.object("web-0") != nil && c.object("web-0").UID != was.UID })
}

func TestAnAPIServerThatWentBackInTimeIsListedAnew(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	eventually(t, "watched", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.watches) == 1 })
	c.put(c.object("web-0")) // the watch has seen a version after the list's
	seen := c.object("web-0").ResourceVersion
	eventually(t, "seen", func() bool {
		a.api.mu.Lock()
		defer a.api.mu.Unlock()
		o := a.api.objects[objectKey{"default", "web-0.n1"}]
		return o != nil && o.version == seen
	})
	c.mu.Lock()
	clear(c.objects)
	c.version = 7
	c.mu.Unlock()
	c.endWatches(nil)
	eventually(t, "published again", func() bool { return c.object("web-0") != nil })
}

func TestAnObjectIsDeletedOnceItsNetworkHasBeenReconciled(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	ghost := &v1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "ghost.n1", UID: "ghost"},
		Spec:       v1alpha1.RetainedIPSpec{NodeName: "n1", PodName: "ghost", Retention: "10m"},
		Status: v1alpha1.RetainedIPStatus{
			Phase: v1alpha1.PhaseRetained, IPs: []string{"192.0.2.77"},
			Addresses: []v1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0", IPs: []string{"192.0.2.77"}}},
		},
	}
	unseen := ghost.DeepCopy()
	unseen.Name, unseen.UID, unseen.Spec.PodName, unseen.Status.Addresses[0].Network = "unseen.n1", "unseen", "unseen", "unseen"
	c.put(ghost)
	c.put(unseen)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	if c.object("ghost") == nil {
		t.Fatal("deleted before the runtime was asked")
	}
	eventually(t, "the agreement to hold", func() bool { // making the network's directory may void the first
		check(t, w.reconcile())
		a.refresh()
		a.agreed.mu.Lock()
		defer a.agreed.mu.Unlock()
		return len(a.agreed.dirs) == 1
	})
	eventually(t, "deleted", func() bool { return c.object("ghost") == nil })
	if c.object("unseen") == nil || c.object("web-0") == nil {
		t.Error("another one was deleted, too")
	}
}

func TestAStateDirectoryThatIsWipedDeletesNoObject(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	settled := func() bool {
		check(t, w.reconcile())
		a.refresh()
		return slices.Contains(a.published.Settled, "pods")
	}
	eventually(t, "settled", settled)
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	was := c.object("web-0")

	entries, err := filepath.Glob(filepath.Join(a.o.StateDir, "pods-*"))
	check(t, err)
	check(t, os.RemoveAll(entries[0]))
	eventually(t, "noticed", func() bool { a.agreed.mu.Lock(); defer a.agreed.mu.Unlock(); return a.agreed.dirs == nil })
	a.refresh()
	w.promises("c2", "web-1", ten) // the next ADD makes the ledger anew: it knows the address of web-0, but no promise
	a.refresh()
	eventually(t, "the other published", func() bool { return c.object("web-1") != nil })
	if is := c.object("web-0"); is == nil || is.UID != was.UID {
		t.Fatalf("the object is %+v", is)
	}
	eventually(t, "settled", settled)
	if !slices.ContainsFunc(a.published.Claims, func(c Claim) bool { return c.Key.Pod == "web-0" }) {
		t.Fatal("the promise was not made again")
	}
	w.promises("c3", "web-2", ten)
	a.refresh()
	eventually(t, "the third published", func() bool { return c.object("web-2") != nil })
	if is := c.object("web-0"); is == nil || is.UID != was.UID {
		t.Errorf("the object is %+v", is)
	}
}

func TestANamespaceThatIsGoneEndsWhatItsWorkloadsOwned(t *testing.T) {
	for policy, ends := range map[string]bool{"while-owned": true, "10m": false} {
		w, c := newWorld(t), startCluster(t)
		c.answers(func(r *http.Request) *metav1.Status {
			if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "web-0") {
				return notFound("namespaces", "default")
			}
			return nil
		})
		a := w.inCluster(c)
		a.api.grace = 0
		s := w.promises("c1", "web-0", map[string]string{ledger.AnnotationRetainIP: policy})
		w.del(s)
		a.refresh()
		if !ends {
			eventually(t, "refused twice", func() bool { return c.count("PATCH") >= 2 })
			eventually(t, "back in the queue", func() bool { return a.api.queue.NumRequeues(objectKey{"default", "web-0.n1"}) >= 2 })
			if said := a.api.said(); said != "" {
				t.Errorf("says %q", said)
			}
			a.endReleased()
			a.refresh()
			if len(a.published.Claims) != 1 {
				t.Errorf("%s: claims %v", policy, a.published.Claims)
			}
			continue
		}
		eventually(t, "released", func() bool { a.endReleased(); a.refresh(); return len(a.published.Claims) == 0 })
	}
}

func TestObjectsWaitForTheirNode(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	c.node = ""
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "asked for the Node", func() bool { return c.count("GET /api/v1/nodes/n1") > 0 })
	eventually(t, "said so", func() bool { return strings.Contains(a.api.said(), "Node n1") })
	if n := c.count("PATCH"); n != 0 {
		t.Errorf("%d writes", n)
	}
	c.mu.Lock()
	c.node = "second"
	c.mu.Unlock()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	if o := c.object("web-0").OwnerReferences; len(o) != 1 || o[0].UID != "second" {
		t.Errorf("owners %+v", o)
	}
	// The Node goes, and takes the object with it.
	c.mu.Lock()
	c.node = "third"
	c.removeLocked(objectKey{"default", "web-0.n1"})
	c.mu.Unlock()
	eventually(t, "published for the third", func() bool { return c.object("web-0") != nil && c.object("web-0").OwnerReferences[0].UID == "third" })
}

func TestAReleaseThatTheLedgerCannotCarryOutIsTriedAgain(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	a := w.inCluster(c)
	s := w.promises("c1", "web-0", ten)
	w.del(s)
	a.refresh()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	claims, err := filepath.Glob(filepath.Join(a.o.StateDir, "pods-*", "network"))
	check(t, err)
	description, err := os.ReadFile(claims[0])
	check(t, err)
	w.corrupt()
	o := c.object("web-0")
	o.Spec.Release = true
	c.put(o)
	eventually(t, "asked", func() bool { a.releases.mu.Lock(); defer a.releases.mu.Unlock(); return len(a.releases.asked) == 1 })
	if !a.endReleased() {
		t.Error("it need not be tried again")
	}
	if n := testutil.ToFloat64(a.metrics.releaseErrors); n != 1 {
		t.Errorf("counted %v", n)
	}
	if c.object("web-0") == nil {
		t.Error("the object was deleted")
	}
	check(t, os.WriteFile(claims[0], description, 0o644))
	if a.endReleased() {
		t.Error("it must be tried again")
	}
	a.refresh()
	eventually(t, "deleted", func() bool { return c.object("web-0") == nil })
	w.wantSaid(EventReleased)
}

func TestSomebodyWhoWritesAgainstTheAgentDoesNotKeepItBusy(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	var first time.Time
	for i := range paceBurst + 2 {
		eventually(t, "corrected", func() bool { o := c.object("web-0"); return o != nil && o.Spec.PodName == "web-0" })
		if i == 0 {
			first = time.Now()
		}
		o := c.object("web-0")
		o.Spec.PodName = "mine"
		c.put(o)
	}
	if took := time.Since(first); took < paceEvery {
		t.Errorf("%d writes within %s", paceBurst+2, took)
	}
}

func TestAnEventIsAboutThePodWhereItsUIDIsKnown(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	eventually(t, "known", func() bool { return a.api.uidOf(objectKey{"default", "web-0.n1"}) != "" })
	key := ledger.Key{Network: "pods", Identity: "pod:default/web-0", Pod: "web-0", IfName: "eth0"}
	for _, e := range []ledger.Event{
		{Reason: ledger.EventRestored, Key: key, Time: noon, Message: "ordinary"},
		{Reason: ledger.EventNotRestored, Key: key, Pod: ledger.Pod{Namespace: "default", Name: "web-0", UID: "u1"}, Time: noon, Message: "why"},
		{Reason: ledger.EventNotRestored, Key: key, Pod: ledger.Pod{Namespace: "default", Name: "web-0", UID: "u1"}, Time: noon, Message: "why"},
		{Reason: EventExpired, Key: key, Time: noon, Message: "over"},
		{Reason: EventReclaimed, Key: ledger.Key{Network: "pods"}, Time: noon, Message: strings.Repeat("x", 2000)},
	} {
		a.publish(e)
	}
	eventually(t, "sent", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.events) == 3 })
	about := map[string]objectReference{}
	for _, e := range c.events {
		about[e.Reason] = e.Regarding
		if e.EventTime.IsZero() || e.Action == "" || e.ReportingInstance != "n1" || e.ReportingController != "stayput-agent" || len(e.Note) > longestNote {
			t.Errorf("%+v", e)
		}
	}
	want := map[string]objectReference{
		"IPNotRestored": {APIVersion: "v1", Kind: "Pod", Namespace: "default", Name: "web-0", UID: "u1"},
		"IPExpired":     {APIVersion: "stayput.io/v1alpha1", Kind: "RetainedIP", Namespace: "default", Name: "web-0.n1", UID: c.object("web-0").UID},
		"IPReclaimed":   {APIVersion: "v1", Kind: "Node", Name: "n1"},
	}
	if !maps.Equal(about, want) {
		t.Errorf("about %+v", about)
	}
}

func TestEventsThatAreTooManyAreDroppedAndCounted(t *testing.T) {
	p, err := newAPIServer(&rest.Config{Host: "http://192.0.2.1"}, "n1", 0, newAPIMetrics(prometheus.NewRegistry()), newWorld(t).a.log)
	check(t, err)
	for i := range eventsQueued + 10 {
		p.PublishEvent(ledger.Event{Reason: EventExpired, Key: ledger.Key{Identity: "pod:default/web", Pod: fmt.Sprint("web-", i)}, Time: noon})
	}
	if n := testutil.ToFloat64(p.metrics.eventsDropped); n != 10 {
		t.Errorf("%v dropped", n)
	}
}

func TestADefinitionThatLacksAFieldIsWrittenToOnce(t *testing.T) {
	w, c := newWorld(t), startCluster(t)
	c.drops = func(r *v1alpha1.RetainedIP) { r.Spec.WhenDeleted, r.Status.PodUID, r.Status.Addresses = "", "", nil }
	a := w.inCluster(c)
	s := w.promises("c1", "web-0", ten)
	a.refresh()
	eventually(t, "published", func() bool { return c.object("web-0") != nil })
	for range 3 { // whatever makes it look again
		seen := c.object("web-0")
		c.put(seen)
		a.refresh()
		c.endWatches(nil)
		eventually(t, "seen", func() bool {
			a.api.mu.Lock()
			defer a.api.mu.Unlock()
			o := a.api.objects[objectKey{"default", "web-0.n1"}]
			return a.api.queue.Len() == 0 && o != nil && o.version != seen.ResourceVersion
		})
	}
	if n := c.count("PATCH"); n > 4 {
		t.Errorf("%d writes of what never changed", n)
	}
	w.del(s)
	a.refresh()
	eventually(t, "told of the next state", func() bool { return c.object("web-0").Status.Phase == v1alpha1.PhaseRetained })
}
