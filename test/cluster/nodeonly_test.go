package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// The nodes' network is stock host-local; that of any other CNI plugin would be left alone as well.
func TestPodsKeepTheirNodesWithoutAgents(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: map[string]any{
		"agent": map[string]any{"enabled": false}, "controller": map[string]any{"nominateHomes": true},
	}}))
	ctx := testContext(t)
	sets, err := c.Client().AppsV1().DaemonSets(lab.SystemNamespace).List(ctx, metav1.ListOptions{})
	must.Do(t, err)
	if len(sets.Items) > 0 {
		t.Errorf("DaemonSets run: %v", sets.Items)
	}

	ns := namespace(t, c)
	for _, how := range []string{"Required", "Preferred"} {
		name := strings.ToLower(how)
		before := tilted(t, c, ns, lab.Workload{
			Name: name, Replicas: 6, Annotations: map[string]string{"stayput.io/home": how},
		})
		for range 2 {
			recorded(t, c, ns, name, before)
			deletePods(t, c, ns, name)
			after := places(t, c, ns, name, 6, before)
			for pod, was := range before {
				is := after[pod]
				if was.Spec.NodeName != is.Spec.NodeName {
					t.Errorf("%s was on %s and is on %s", pod, was.Spec.NodeName, is.Spec.NodeName)
				}
				affinity := is.Spec.Affinity.NodeAffinity
				if held := affinity.RequiredDuringSchedulingIgnoredDuringExecution != nil; held != (how == "Required") {
					t.Errorf("%s is held at its node: %v", pod, held)
				}
			}
			before = after
		}
	}

	// Without the annotation its record goes, and pods start anywhere.
	kubectl(t, c, "patch", "statefulset", "required", "-n", ns, "--type=merge", "-p",
		`{"spec": {"template": {"metadata": {"annotations": {"stayput.io/home": null}}}}}`)
	until(t, "the record to go", func(ctx context.Context) bool {
		_, err := c.Kubectl(ctx, "", "get", "persistentpodstate", "required", "-n", ns)
		return err != nil && strings.Contains(err.Error(), "NotFound")
	})

	// A retention would do nothing here, and whoever asks for one is told.
	h := &heard{}
	as := rest.CopyConfig(c.RESTConfig())
	as.WarningHandler = h
	client, err := kubernetes.NewForConfig(as)
	must.Do(t, err)
	kept := lab.Workload{Name: "kept", Replicas: 1, Annotations: retain("10m")}
	_, err = client.AppsV1().StatefulSets(ns).Create(ctx, kept.StatefulSet(ns), metav1.CreateOptions{})
	must.Do(t, err)
	if !h.says("set stayput.io/home instead of stayput.io/retain-ip") {
		t.Errorf("it warns of %q", h.warnings)
	}
	if pod := ready(t, c, ns, "kept-0"); pod.Spec.Affinity != nil {
		t.Errorf("it has the affinity %+v", pod.Spec.Affinity)
	}

	r, code := checked(t, c)
	if code != 0 || r.Warnings+r.Failures != 0 {
		t.Errorf("%d %+v", code, r)
	}
	said, err := c.Uninstall(testContext(t))
	must.Do(t, err)
	t.Log(said)
	deletePods(t, c, ns, "preferred")
	for i := range 6 {
		ready(t, c, ns, fmt.Sprintf("preferred-%d", i))
	}
}
