//go:build openkruise

package cluster

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// advanced is the resource of Advanced StatefulSets.
const advanced = "statefulset.v1beta1.apps.kruise.io"

// The steps share one cluster, and run in this order.
func TestStayputBesideARunningOpenKruise(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	_, err := lab.BuildOpenKruise(t.Context()) // without a timeout: it compiles
	must.Do(t, err)
	_, err = c.InstallOpenKruise(testContext(t))
	must.Do(t, err)
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	must.Do(t, c.LoadNextWebImage(testContext(t)))
	for _, step := range []struct {
		name string
		run  func(*testing.T, *lab.Cluster, string)
	}{
		{"pods of an Advanced StatefulSet come home", advancedComeHome},
		{"a reserved ordinal keeps its address for when it is back", ordinalsReserved},
		{"a PersistentPodState is OpenKruise's", servedByOpenKruise},
		{"addresses of a CloneSet end with it", cloneSetEnds},
		{"check is content", func(t *testing.T, c *lab.Cluster, _ string) {
			if r, code := checked(t, c); code != 0 || r.Warnings+r.Failures != 0 {
				t.Errorf("%d %+v", code, r)
			}
		}},
	} {
		t.Run(step.name, func(t *testing.T) { step.run(t, c, namespace(t, c)) })
	}
}

// echoserver is the manifest of OpenKruise's manual as it is there: an Advanced StatefulSet.
func echoserver(t *testing.T) string {
	t.Helper()
	manifest, err := os.ReadFile("../demo/echoserver.yaml")
	must.Do(t, err)
	return strings.NewReplacer(
		"apiVersion: apps/v1", "apiVersion: apps.kruise.io/v1beta1",
		"image: cilium/echoserver:latest", "image: "+lab.WebImage,
		"imagePullPolicy: IfNotPresent", "imagePullPolicy: Never",
		// OpenKruise wants it of pods that it updates in place.
		"    spec:\n", "    spec:\n      readinessGates: [{conditionType: InPlaceUpdateReady}]\n",
		"  serviceName: echoserver\n", "  serviceName: echoserver\n"+
			"  updateStrategy: {rollingUpdate: {podUpdatePolicy: InPlaceIfPossible}}\n",
	).Replace(string(manifest))
}

// started applies the manifest, with its pods on two nodes only, and returns them.
func started(t *testing.T, c *lab.Cluster, ns string) map[string]*corev1.Pod {
	t.Helper()
	kubectl(t, c, "cordon", "node-3")
	defer kubectl(t, c, "uncordon", "node-3")
	apply(t, c, ns, echoserver(t))
	pods := places(t, c, ns, "echoserver", 2, nil)
	comesTo(t, c, ns, "echoserver", "to record both", func(s *kruisev1alpha1.PersistentPodState) bool {
		return len(s.Status.PodStates) == 2
	})
	return pods
}

// patchAdvanced changes the Advanced StatefulSet's spec.
func patchAdvanced(t *testing.T, c *lab.Cluster, ns, kind, patch string) {
	t.Helper()
	kubectl(t, c, "patch", advanced, "echoserver", "-n", ns, "--type="+kind, "-p", patch)
}

func advancedComeHome(t *testing.T, c *lab.Cluster, ns string) {
	pods := started(t, c, ns)
	deletePods(t, c, ns, "echoserver")
	pods = comeHome(t, c, ns, "echoserver", pods)

	// A rollout that OpenKruise cannot do in place.
	patchAdvanced(t, c, ns, "json",
		`[{"op": "add", "path": "/spec/template/spec/containers/0/env", "value": [{"name": "A", "value": "b"}]}]`)
	pods = comeHome(t, c, ns, "echoserver", pods)

	// In place the pod stays, with another image.
	patchAdvanced(t, c, ns, "json",
		`[{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "`+lab.NextWebImage+`"}]`)
	for name, was := range pods {
		until(t, name+" to have the next image", func(ctx context.Context) bool {
			pod, err := c.Client().CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
			return err == nil && lab.Ready(pod) && pod.Spec.Containers[0].Image == lab.NextWebImage &&
				pod.Status.ContainerStatuses[0].RestartCount > 0
		})
		if is := getPod(t, c, ns, name); is.UID != was.UID || is.Status.PodIP != was.Status.PodIP {
			t.Errorf("%s was %s with %s and is %s with %s", name, was.UID, was.Status.PodIP, is.UID, is.Status.PodIP)
		}
	}

	for _, replicas := range []int{1, 0} {
		patchAdvanced(t, c, ns, "merge", fmt.Sprintf(`{"spec": {"replicas": %d}}`, replicas))
		for i := replicas; i < 2; i++ {
			pod := pods[fmt.Sprintf("echoserver-%d", i)]
			shows(t, c, ns, pod.Name, pod.Spec.NodeName, "retained", retained)
		}
		patchAdvanced(t, c, ns, "merge", `{"spec": {"replicas": 2}}`)
		again := map[string]*corev1.Pod{}
		for i := replicas; i < 2; i++ {
			again[fmt.Sprintf("echoserver-%d", i)] = pods[fmt.Sprintf("echoserver-%d", i)]
		}
		is := places(t, c, ns, "echoserver", 2, again)
		cameHome(t, pods, is)
		pods = is
	}
}

func ordinalsReserved(t *testing.T, c *lab.Cluster, ns string) {
	pods := started(t, c, ns)
	first := pods["echoserver-0"]
	patchAdvanced(t, c, ns, "merge", `{"spec": {"reserveOrdinals": [0]}}`)
	ready(t, c, ns, "echoserver-2")
	shows(t, c, ns, first.Name, first.Spec.NodeName, "retained", retained)
	patchAdvanced(t, c, ns, "merge", `{"spec": {"reserveOrdinals": []}}`)
	cameHome(t, map[string]*corev1.Pod{first.Name: first}, map[string]*corev1.Pod{first.Name: successor(t, c, first)})
}

// servedByOpenKruise has pods that want their node alone: Stayput generates the object, OpenKruise serves it.
func servedByOpenKruise(t *testing.T, c *lab.Cluster, ns string) {
	before := tilted(t, c, ns, lab.Workload{Name: "node", Replicas: 4,
		Annotations: map[string]string{v1alpha1.AnnotationHome: "Required"}})
	s := comesTo(t, c, ns, "node", "to record all pods", func(s *kruisev1alpha1.PersistentPodState) bool {
		return len(s.Status.PodStates) == 4
	})
	if len(s.Status.Conditions) > 0 || s.Labels[v1alpha1.LabelGenerated] != v1alpha1.GeneratedByHome {
		t.Errorf("not generated by Stayput and served by OpenKruise: %v, %+v", s.Labels, s.Status)
	}
	deletePods(t, c, ns, "node")
	sameNodes(t, before, places(t, c, ns, "node", 4, before))
	kubectl(t, c, "delete", "statefulset", "node", "-n", ns)
	untilDeleted(t, c, ns, "node")
}

// cloneSetEnds has pods of a shared identity, whose addresses are theirs while the CloneSet exists.
func cloneSetEnds(t *testing.T, c *lab.Cluster, ns string) {
	apply(t, c, ns, fmt.Sprintf(`
apiVersion: apps.kruise.io/v1alpha1
kind: CloneSet
metadata: {name: front}
spec:
  replicas: 2
  selector: {matchLabels: {app: front}}
  template:
    metadata:
      labels: {app: front}
      annotations: {%s: while-owned, %s: front}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: web, image: %s, imagePullPolicy: Never}]
`, retainIP, v1alpha1.AnnotationIdentity, lab.WebImage))
	pods := deployed(t, c, ns, "front", 2, nil)
	for _, pod := range pods {
		shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound, with its CloneSet", func(r *v1alpha1.RetainedIP) bool {
			return bound(r) && r.Spec.Workload != nil && r.Spec.Workload.Kind == "CloneSet"
		})
	}
	kubectl(t, c, "delete", "cloneset", "front", "-n", ns)
	become(t, c, ns, pods, false)
}
