//go:build long

package cluster

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// Without --bump-revision a watch that goes on from before is silent until versions have caught up. Kubelets are
// restarted, as etcd's manual says; controllers and agents notice by themselves.
func TestPodsComeHomeAfterARestoreThatSetsVersionsBack(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 4, Annotations: retain("10m")})
	backup := t.TempDir() + "/etcd.db"
	must.Do(t, c.SaveEtcd(testContext(t), backup))
	const lost = 3000 // versions, more than the cluster makes up for in the course of the test
	kubectl(t, c, "create", "configmap", "busy", "-n", ns)
	for i := range lost {
		patch := fmt.Appendf(nil, `{"data":{"i":"%d"}}`, i)
		_, err := c.Client().CoreV1().ConfigMaps(ns).Patch(testContext(t), "busy", types.MergePatchType, patch,
			metav1.PatchOptions{})
		must.Do(t, err)
	}
	must.Do(t, c.APIServer.Kill())
	must.Do(t, c.RestoreEtcd(testContext(t), backup))
	for _, n := range c.Nodes {
		must.Do(t, n.Kubelet.Kill())
		must.Do(t, n.Kubelet.Start(testContext(t)))
		must.Do(t, c.WaitReady(testContext(t), n))
	}
	deletePods(t, c, ns, "web")
	comeHome(t, c, ns, "web", before)
}
