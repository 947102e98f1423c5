package cluster

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/test/must"
)

// What is not selected is not sent: the API server spends nothing on the other pods of the cluster.
func TestPodsAreListedAndWatchedByTheirLabel(t *testing.T) {
	const selector = "a,!b"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if is := r.URL.Query().Get("labelSelector"); r.URL.Path != "/api/v1/pods" || is != selector {
			t.Errorf("%s by %q", r.URL.Path, is)
		}
		pod := hometest.Pod()
		pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") == "" {
			if accept := r.Header.Get("Accept"); accept != "application/json" {
				t.Errorf("a list as %s, which is not read pod by pod", accept)
			}
			must.Do(t, json.NewEncoder(w).Encode(corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "7"},
				Items: []corev1.Pod{*pod}}))
			return
		}
		if !strings.Contains(r.Header.Get("Accept"), "protobuf") {
			t.Errorf("a watch as %s", r.Header.Get("Accept"))
		}
		raw, err := json.Marshal(pod)
		must.Do(t, err)
		must.Do(t, json.NewEncoder(w).Encode(map[string]any{"type": watch.Added, "object": json.RawMessage(raw)}))
	}))
	defer server.Close()
	pods, err := NewPods(&rest.Config{Host: server.URL}, server.Client())
	must.Do(t, err)
	lw := toolscache.ToListerWatcherWithContext(pods.ListWatch(selector))
	list, err := lw.ListWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "0", Limit: 500})
	must.Do(t, err)
	if got := list.(interface{ GetResourceVersion() string }).GetResourceVersion(); got != "7" {
		t.Errorf("version %q", got)
	}
	events, err := lw.WatchWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "7"})
	must.Do(t, err)
	defer events.Stop()
	if e := <-events.ResultChan(); e.Type != watch.Added || e.Object.(*corev1.Pod).Name != "web-0" {
		t.Errorf("%+v", e)
	}
	if kept, err := Keep(hometest.Pod()); err != nil || kept.(*Pod).Name != "web-0" {
		t.Errorf("%+v, %v", kept, err)
	}
}
