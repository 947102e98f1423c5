package cluster

import (
	"context"
	"errors"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	archive, err = lab.BuildImage(product, version)
	must.Do(t, err)
	return product, version, archive
}

// startProduct starts a cluster, prepares it unless prepare is nil, and installs stayput. If that fails after the
// start, it returns the cluster with the error, to be closed.
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

// logIfFailed writes the logs of a cluster to the test's output when the test ends, if it has failed.
func logIfFailed(t *testing.T, c *lab.Cluster) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			c.WriteLogs(t.Output())
		}
	})
}

// kubectl runs kubectl and returns its output.
func kubectl(t *testing.T, c *lab.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(testContext(t), "", args...)
	must.Do(t, err)
	return out
}

// atEnd runs kubectl when the test ends.
func atEnd(t *testing.T, c *lab.Cluster, args ...string) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Kubectl(ctx, "", args...)
		must.Do(t, err)
	})
}

// apply applies YAML in a namespace.
func apply(t *testing.T, c *lab.Cluster, namespace, yaml string) {
	t.Helper()
	_, err := c.Kubectl(testContext(t), yaml, "apply", "--server-side", "-n", namespace, "-f", "-")
	must.Do(t, err)
}

// namespace creates a namespace for one test, ready for pods, and deletes it without waiting, unless the test did.
func namespace(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	ctx := testContext(t)
	made, err := c.Client().CoreV1().Namespaces().Create(ctx, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	must.Do(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		now := int64(0)
		// With hundreds of pods it can take longer than the API server's limit for a request.
		for ctx.Err() == nil {
			err = c.Client().CoreV1().Pods(made.Name).DeleteCollection(ctx,
				metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
			if !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) {
				break
			}
		}
		must.Do(t, err)
		err = c.Client().CoreV1().Namespaces().Delete(ctx, made.Name, metav1.DeleteOptions{})
		if !apierrors.IsNotFound(err) {
			must.Do(t, err)
		}
	})
	until(t, "the service account of the namespace", func(ctx context.Context) bool {
		_, err := c.Client().CoreV1().ServiceAccounts(made.Name).Get(ctx, "default", metav1.GetOptions{})
		return err == nil
	})
	return made.Name
}

// ownCluster returns a cluster without stayput for one test, which would disturb others in a shared one.
func ownCluster(t *testing.T, o *lab.ClusterOptions) *lab.Cluster {
	t.Helper()
	if o.Product == (lab.Product{}) {
		var err error
		o.Product, err = buildOnce(t.Context())
		must.Do(t, err)
	}
	c, err := lab.StartCluster(testContext(t), *o)
	must.Do(t, err)
	must.Close(t, c)
	return c
}

var poolsOn = map[string]any{"pools": map[string]any{"enabled": true}}

// withPools returns the cluster of tests of pools, whose pods are on the nodes' own link, by macvlan. They run one
// after the other, in any order. A test restores what it breaks; its pods and pool blue are deleted when it ends.
func withPools(t *testing.T) *lab.Cluster {
	t.Helper()
	inTurn(t)
	c := pooled.get(t, "with pools", func() (*lab.Cluster, error) {
		return startProduct(lab.ClusterOptions{}, lab.InstallOptions{Values: poolsOn}, byMacvlan)
	})
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Kubectl(ctx, "", "delete", "podippool", "blue", "--ignore-not-found")
		must.Do(t, err)
	})
	return c
}

// ownPools is withPools for one test alone.
func ownPools(t *testing.T) *lab.Cluster {
	t.Helper()
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	return c
}

// onOneLink starts a cluster in which the nodes' pods are on the nodes' own link.
func onOneLink(t *testing.T, o lab.ClusterOptions) *lab.Cluster {
	t.Helper()
	c := ownCluster(t, &o)
	must.Do(t, byMacvlan(testContext(t), c))
	return c
}

func byMacvlan(ctx context.Context, c *lab.Cluster) error {
	for _, n := range c.Nodes {
		err := n.SetNetworks(ctx, lab.Network{
			Type: "macvlan", Annotations: true, IPAM: lab.RangeIPAM("host-local", n.Pods.String()),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// broken breaks something until the returned function is called, or the test ends.
func broken(t *testing.T, set func(ctx context.Context, broken bool) error) (mend func()) {
	t.Helper()
	do := func(broken bool) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		must.Do(t, set(ctx, broken))
	}
	do(true)
	mend = once(func() { do(false) })
	t.Cleanup(mend)
	return mend
}

// cutOff cuts a node off from the control plane alone, until the returned function is called.
func cutOff(t *testing.T, n *lab.ClusterNode) (mend func()) {
	t.Helper()
	return broken(t, n.CutOff)
}

// onceStarted returns a function that starts the controllers again at its first call.
func onceStarted(t *testing.T, c *lab.Cluster) func() {
	return once(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		must.Do(t, c.Controllers.Start(ctx))
	})
}
