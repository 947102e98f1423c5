package placement

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ErrRestored is why a controller ends that has seen the API server's resourceVersion go backwards: etcd was restored
// from a backup. Informers resume their watches at versions that are still to come, and hear nothing until then.
var ErrRestored = errors.New("the resourceVersion of the API server went backwards: etcd was restored from a backup")

// restoreInterval is how often the version is read. A restore goes unnoticed if the cluster makes up within this time
// what it has lost since the backup: 10 s of writes, in which the API server was also away.
const restoreInterval = 10 * time.Second

// restoreWatch is a runnable of every replica that fails with [ErrRestored] once the version goes backwards, so that a
// new process reads everything again. An error of the API server is no news.
type restoreWatch struct {
	reader client.Reader // from the API server, not from a cache
	log    logr.Logger
}

// NeedLeaderElection is false: the next leader has caches, too.
func (restoreWatch) NeedLeaderElection() bool { return false }

// Start reads the version until ctx is done.
func (r restoreWatch) Start(ctx context.Context) error {
	tick := time.NewTicker(restoreInterval)
	defer tick.Stop()
	for newest := ""; ; {
		version, err := r.version(ctx)
		if err != nil {
			r.log.V(1).Info("Cannot read the resourceVersion of the API server", "error", err.Error())
		} else if order, err := resourceversion.CompareResourceVersion(version, newest); err == nil && order < 0 {
			return fmt.Errorf("%w: from %s to %s", ErrRestored, newest, version)
		} else {
			newest = version
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// version returns the version of a consistent list: no API server of the cluster has an older one.
func (r restoreWatch) version(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, restoreInterval)
	defer cancel()
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	err := r.reader.List(ctx, nodes, client.Limit(1))
	return nodes.ResourceVersion, err
}
