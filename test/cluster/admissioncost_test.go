package cluster

import (
	"context"
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stayput/stayput/test/must"
)

// readsPolicy has the audit log name who reads single ConfigMaps and namespaces: the API server, too, by requests to
// itself.
const readsPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, verbs: [get], resources: [{group: "", resources: [configmaps, namespaces]}]}
- {level: None}
`

// What a policy needs for a pod, the API server has in its caches. What it does not find there it may ask of itself.
func TestPoliciesCostAPodNoRequests(t *testing.T) {
	g := guardedWith(t, true)
	until(t, "pods to be gated", func(ctx context.Context) bool {
		pod, err := create(ownedPod("guarded", "apps/v1", "StatefulSet", "db", "", ""))(ctx, g, g.admin)
		must.Do(t, err)
		return gatesOf(pod) != nil
	})
	namespaces := []string{"guarded", "elsewhere", "pooled"}
	for range 20 {
		for _, namespace := range namespaces {
			_, err := create(ownedPod(namespace, "apps/v1", "StatefulSet", "web", "", ""))(testContext(t), g, g.admin)
			must.Do(t, err)
		}
	}
	if _, err := get(cmKind, "elsewhere/last")(testContext(t), g, g.admin); !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	var all []request
	until(t, "the audit log to have the last request", func(context.Context) bool {
		all = requests(t, g.c)
		return slices.ContainsFunc(all, func(r request) bool { return r.ObjectRef.Name == "last" })
	})
	made := map[string]int{}
	for _, r := range all {
		if r.User.Username == "system:apiserver" && slices.Contains(namespaces, r.ObjectRef.Namespace) {
			made[r.String()+" in "+r.ObjectRef.Namespace]++
		}
	}
	// One that a cache does not have yet, at the start of the namespace, is no cost of a pod.
	for request, n := range made {
		if n > 2 {
			t.Errorf("the API server asked itself %d times for 20 pods of each namespace: %s", n, request)
		}
	}
}
