package installation_test

import (
	"log/slog"
	"net/http"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

// follow follows the installation of a cluster, and returns once the API server has answered.
func follow(t *testing.T, c *nodetest.Cluster) *installation.Follower {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	f, err := installation.New(&rest.Config{Host: c.URL}, "stayput-system", log)
	must.Do(t, err)
	go f.Run(t.Context())
	<-f.Asked()
	return f
}

// becomes waits until changes have led to this.
func becomes(t *testing.T, f *installation.Follower, want installation.State) {
	t.Helper()
	for f.State() != want {
		select {
		case <-f.Changed():
		case <-t.Context().Done():
			t.Fatalf("the state is %+v, want %+v", f.State(), want)
		}
	}
}

func TestWhatTheConfigMapSaysIsFollowed(t *testing.T) {
	c := nodetest.StartCluster(t)
	f := follow(t, c)
	if is := f.State(); is != (installation.State{}) {
		t.Errorf("without a ConfigMap the state is %+v", is)
	}
	c.Install("first")
	becomes(t, f, installation.State{Known: true})
	c.SetPools(true)
	becomes(t, f, installation.State{Known: true, Pools: "true"})
	c.SetRouted(true)
	becomes(t, f, installation.State{Known: true, Pools: "true", Routed: true})
	c.Uninstall()
	becomes(t, f, installation.State{Known: true, Pools: "true", Routed: true, Uninstalling: true})
	c.KeepInstalled()
	becomes(t, f, installation.State{Known: true, Pools: "true", Routed: true})
}

func TestAnUninstallationThatBeganBeforeIsKnownFromTheStart(t *testing.T) {
	c := nodetest.StartCluster(t)
	c.Install("first")
	c.Uninstall()
	if f := follow(t, c); !f.State().Uninstalling {
		t.Errorf("the state is %+v", f.State())
	}
}

// What it said last stands, in both directions.
func TestNothingButTheConfigMapSaysThatStayputIsUninstalled(t *testing.T) {
	refuse := func(s metav1.Status) func(*nodetest.Cluster) {
		return func(c *nodetest.Cluster) {
			c.Answers(func(*http.Request) *metav1.Status { again := s; return &again })
		}
	}
	for name, happens := range map[string]func(*nodetest.Cluster){
		"it is deleted":               (*nodetest.Cluster).Prune,
		"the API server was restored": func(c *nodetest.Cluster) { c.Prune(); c.Mu.Lock(); c.Version = 5; c.Mu.Unlock() },
		"rights are lost":             refuse(*nodetest.Forbidden()),
		"it is not authenticated":     refuse(metav1.Status{Code: 401}),
		"nothing is found":            refuse(*nodetest.NotFound("configmaps", installation.ConfigMap)),
		"the API server fails":        refuse(metav1.Status{Code: 500}),
	} {
		for _, uninstalling := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := nodetest.StartCluster(t)
				c.Install("first")
				if uninstalling {
					c.Uninstall()
				}
				f := follow(t, c)
				want := f.State()
				lists := c.Count("GET /api/v1/namespaces/stayput-system/configmaps")
				happens(c)
				must.Eventually(t, "another look", func() bool {
					c.EndWatches(nil)
					return c.Count("GET /api/v1/namespaces/stayput-system/configmaps") > lists
				})
				if is := f.State(); is != want || is.Uninstalling != uninstalling {
					t.Errorf("the state is %+v, was %+v", is, want)
				}
				c.Answers(nil)
				c.Install("second")
				becomes(t, f, installation.State{Known: true})
			})
		}
	}
}
