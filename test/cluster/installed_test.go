package cluster

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// installed returns the shared cluster with stayput, as Helm installs it on nodes with stock host-local: an agent on
// every node makes stayput the IPAM, and two controllers run on the control plane's node, alone.
func installed(t *testing.T) *lab.Cluster {
	t.Helper()
	return common.get(t, "with stayput", func() (*lab.Cluster, error) {
		return startProduct(audited, lab.InstallOptions{
			Values: map[string]any{"controller": map[string]any{
				"workloadKinds": []any{customKind}, "nominateHomes": true,
			}},
		}, nil)
	})
}

// built is the product under test, compiled once: linking it takes longer than starting a cluster. TestMain calls
// remove.
var built struct {
	sync.Mutex
	product lab.Product
	remove  func() error
}

func buildOnce(ctx context.Context) (lab.Product, error) {
	built.Lock()
	defer built.Unlock()
	if built.product.Agent != "" {
		return built.product, nil
	}
	dir, remove, err := lab.TempDir("product")
	if err != nil {
		return lab.Product{}, err
	}
	product, err := lab.BuildWholeProduct(ctx, dir)
	if err != nil {
		return lab.Product{}, errors.Join(err, remove())
	}
	built.product, built.remove = product, remove
	return product, nil
}

// builtImage returns the product and its image, with the image's tag and archive.
func builtImage(t *testing.T) (product lab.Product, version, archive string) {
	t.Helper()
	product, err := buildOnce(t.Context())
	must.Do(t, err)
	chart, err := lab.Chart(t.Context())
	must.Do(t, err)
	version, err = lab.ChartVersion(chart)
	must.Do(t, err)
	archive, err = lab.BuildImage(t.Context(), product, version)
	must.Do(t, err)
	return product, version, archive
}

// startProduct starts a cluster, prepares it unless prepare is nil, and installs stayput. If that fails after the start,
// it returns the cluster with the error, to be closed.
func startProduct(
	o lab.ClusterOptions, how lab.InstallOptions, prepare func(context.Context, *lab.Cluster) error,
) (*lab.Cluster, error) {
	var err error
	if o.Product, err = buildOnce(context.Background()); err != nil { // without a timeout: it compiles
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := lab.StartCluster(ctx, o)
	if err != nil {
		return nil, err
	}
	if prepare != nil {
		if err := prepare(ctx, c); err != nil {
			return c, err
		}
	}
	return c, c.Install(ctx, how)
}

const versionBefore = "v0.0.9"

// chartBefore creates the chart of an earlier version.
func chartBefore(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must.Do(t, lab.WriteChartBefore(t.Context(), dir, versionBefore))
	return dir
}

// uids returns the names and UIDs of the namespace's RetainedIPs.
func uids(t *testing.T, c *lab.Cluster, ns string) string {
	t.Helper()
	return kubectl(t, c, "get", "retainedips", "-n", ns, "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}{"\n"}{end}`)
}
