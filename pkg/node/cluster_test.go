package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/nodetest"
)

// inCluster gives the world's agent the API side and runs that, and its inotify.
func (w *world) inCluster(c *nodetest.Cluster) *Agent {
	w.t.Helper()
	a := w.a
	api, err := apiserver.New(&rest.Config{Host: c.URL}, "n1")
	check(w.t, err)
	p := retainedip.New(retainedip.Options{
		API: api, Node: "n1", NamespaceGrace: a.o.GracePeriod, Release: a.book.release, Log: a.log,
		Registry: prometheus.NewRegistry(),
	})
	a.api, a.book.news.publisher = p, publishers{w.said, p}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	wg.Go(func() { a.watch.run(ctx) })
	w.t.Cleanup(func() {
		cancel()
		c.EndWatches(nil)
		wg.Wait()
	})
	return a
}

// promises makes a pod whose address is promised.
func (w *world) promises(id, pod string, annotations map[string]string) Sandbox {
	w.t.Helper()
	s := w.sandbox(id, pod, annotations)
	policy, _, err := retention.Parse(annotations)
	check(w.t, err)
	w.addOn(w.ledger, s, "eth0", &policy)
	w.runs(s)
	return s
}

func TestAnObjectIsDeletedOnceItsNetworkHasBeenReconciled(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	ghost := &v1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "ghost.n1", UID: "ghost"},
		Spec:       v1alpha1.RetainedIPSpec{NodeName: "n1", PodName: "ghost", Retention: "10m"},
		Status: v1alpha1.RetainedIPStatus{
			Phase: v1alpha1.PhaseRetained, IPs: []string{"192.0.2.77"},
			Addresses: []v1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0", IPs: []string{"192.0.2.77"}}},
		},
	}
	unseen := ghost.DeepCopy()
	unseen.Name, unseen.UID, unseen.Spec.PodName, unseen.Status.Addresses[0].Network = "unseen.n1", "unseen", "unseen",
		"unseen"
	c.Put(ghost)
	c.Put(unseen)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	a.book.refresh()
	eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	if c.Object("ghost") == nil {
		t.Fatal("deleted before the runtime was asked")
	}
	eventually(t, "the agreement to hold", func() bool { // making the network's directory may void the first
		check(t, w.reconcile())
		a.book.refresh()
		a.book.agreed.mu.Lock()
		defer a.book.agreed.mu.Unlock()
		return len(a.book.agreed.dirs) == 1
	})
	eventually(t, "deleted", func() bool { return c.Object("ghost") == nil })
	if c.Object("unseen") == nil || c.Object("web-0") == nil {
		t.Error("another one was deleted, too")
	}
}

func TestAStateDirectoryThatIsWipedDeletesNoObject(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	a := w.inCluster(c)
	w.promises("c1", "web-0", ten)
	settled := func() bool {
		check(t, w.reconcile())
		a.book.refresh()
		return slices.Contains(a.book.published.Settled, "pods")
	}
	eventually(t, "settled", settled)
	eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	was := c.Object("web-0")

	entries, err := filepath.Glob(filepath.Join(a.o.StateDir, "pods-*"))
	check(t, err)
	check(t, os.RemoveAll(entries[0]))
	eventually(t, "noticed", func() bool {
		a.book.agreed.mu.Lock()
		defer a.book.agreed.mu.Unlock()
		return a.book.agreed.dirs == nil
	})
	a.book.refresh()
	w.promises("c2", "web-1", ten) // the next ADD makes the ledger again: it knows the address of web-0, but no promise
	a.book.refresh()
	eventually(t, "the other published", func() bool { return c.Object("web-1") != nil })
	if is := c.Object("web-0"); is == nil || is.UID != was.UID {
		t.Fatalf("the object is %+v", is)
	}
	eventually(t, "settled", settled)
	if !slices.ContainsFunc(a.book.published.Claims, func(c retainedip.Claim) bool { return c.Key.Pod == "web-0" }) {
		t.Fatal("the promise was not made again")
	}
	w.promises("c3", "web-2", ten)
	a.book.refresh()
	eventually(t, "the third published", func() bool { return c.Object("web-2") != nil })
	if is := c.Object("web-0"); is == nil || is.UID != was.UID {
		t.Errorf("the object is %+v", is)
	}
}

func TestAReleaseThatTheLedgerCannotCarryOutIsTriedAgain(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	a := w.inCluster(c)
	s := w.promises("c1", "web-0", ten)
	w.del(s)
	a.book.refresh()
	eventually(t, "published", func() bool { return c.Object("web-0") != nil })
	claims, err := filepath.Glob(filepath.Join(a.o.StateDir, "pods-*", "network"))
	check(t, err)
	description, err := os.ReadFile(claims[0])
	check(t, err)
	w.corrupt()
	o := c.Object("web-0")
	o.Spec.Release = v1alpha1.ReleaseNow
	c.Put(o)
	eventually(t, "asked", func() bool {
		a.book.releases.mu.Lock()
		defer a.book.releases.mu.Unlock()
		return len(a.book.releases.asked) == 1
	})
	if !a.book.endReleased() {
		t.Error("it need not be tried again")
	}
	if n := testutil.ToFloat64(a.metrics.releaseErrors); n != 1 {
		t.Errorf("counted %v", n)
	}
	if c.Object("web-0") == nil {
		t.Error("the object was deleted")
	}
	check(t, os.WriteFile(claims[0], description, 0o644))
	if a.book.endReleased() {
		t.Error("it must be tried again")
	}
	a.book.refresh()
	eventually(t, "deleted", func() bool { return c.Object("web-0") == nil })
	w.wantSaid(retainedip.EventReleased)
}
