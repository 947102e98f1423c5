package podstate

import (
	"context"
	"errors"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
)

// The definition of PersistentPodStates may be missing, since it is for those who use them, or be OpenKruise's, whose
// newer one is read through a webhook that may not answer. Then a controller that begins does without
// PersistentPodStates, as where OpenKruise runs: pods that ask for their addresses must not wait for that.

// errReadable ends a controller that did without.
var errReadable = errors.New("PersistentPodStates can be read now")

const (
	readTimeout = 10 * time.Second
	// readAgain is how often one that does without looks whether it still has to.
	readAgain = 30 * time.Second
)

// readable says whether PersistentPodStates can be read. An error is unknown.
func readable(ctx context.Context, live client.Reader) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	err := live.List(ctx, &kruisev1alpha1.PersistentPodStateList{}, client.Limit(1))
	switch {
	case err == nil:
		return true, nil
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err), apierrors.IsInternalError(err) && strings.Contains(err.Error(), "conversion webhook"):
		return false, nil
	}
	return false, err
}

// without waits until PersistentPodStates can be read, and then has the controller begin anew.
type without struct{ live client.Reader }

func (without) NeedLeaderElection() bool { return false }

func (w without) Start(ctx context.Context) error {
	tick := time.NewTicker(readAgain)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if ok, err := readable(ctx, w.live); err == nil && ok {
				return errReadable
			}
		}
	}
}
