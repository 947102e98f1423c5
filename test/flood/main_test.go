//go:build floods

package flood

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// patience bounds a hanging step; it measures nothing.
const patience = 5 * time.Minute

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// installed starts a cluster with stayput, by these values beside the lab's.
func installed(t *testing.T, o lab.ClusterOptions, values map[string]any) *lab.Cluster {
	t.Helper()
	dir, remove, err := lab.TempDir("product")
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, remove()) })
	o.Product, err = lab.BuildWholeProduct(t.Context(), dir) // may take as long as the compiler
	must.Do(t, err)
	c, err := lab.StartCluster(testContext(t), o)
	must.Do(t, err)
	must.Close(t, c)
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: values}))
	return c
}

// outlived checks that each controller that there is lives on while flood runs, and is ready after it.
func outlived(t *testing.T, c *lab.Cluster, flood func(controllers []corev1.Pod)) {
	t.Helper()
	before, err := c.Controllers.Pods(testContext(t))
	must.Do(t, err)
	if len(before) == 0 {
		t.Fatal("no controllers")
	}
	flood(before)
	must.Do(t, c.Controllers.WaitReady(testContext(t)))
	after, err := c.Controllers.Pods(testContext(t))
	must.Do(t, err)
	for i, pod := range after {
		is, was := pod.Status.ContainerStatuses[0], before[i].Status.ContainerStatuses[0]
		if is.ContainerID != was.ContainerID {
			t.Errorf("%s did not outlive it: %+v", pod.Name, is.LastTerminationState.Terminated)
			continue
		}
		_, id, _ := strings.Cut(is.ContainerID, "://")
		peak, limit := memory(t, id)
		if limit != pod.Spec.Containers[0].Resources.Limits.Memory().Value() {
			t.Errorf("%s has a limit of %d MiB", pod.Name, limit>>20)
		}
		t.Logf("%s had at most %d of %d MiB", pod.Name, peak>>20, limit>>20)
	}
}

// memory returns how much memory a container had at most, and its limit, of cgroup v1 or v2.
func memory(t *testing.T, id string) (peak, limit int64) {
	t.Helper()
	must.Do(t, filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() || d.Name() != id {
			return nil // a cgroup may go away while it is looked at
		}
		for name, to := range map[string]*int64{
			"memory.max_usage_in_bytes": &peak, "memory.limit_in_bytes": &limit, "memory.peak": &peak, "memory.max": &limit,
		} {
			if data, err := os.ReadFile(filepath.Join(path, name)); err == nil {
				*to, err = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
				must.Do(t, err)
			}
		}
		return nil
	}))
	return peak, limit
}
