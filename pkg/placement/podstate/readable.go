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

// The CRD of PersistentPodStates may be missing, since only those who use them need it, or be a newer one of
// OpenKruise, which is read through a webhook that may not answer. The controller then starts without
// PersistentPodStates, as if OpenKruise ran: annotated pods must not wait for that.

// errReadable ends a controller that started without.
var errReadable = errors.New("PersistentPodStates can be read again")

const (
	readTimeout = 10 * time.Second
	// readAgain is how often it checks whether it still has to do without.
	readAgain = 30 * time.Second
)

// readable reports whether PersistentPodStates can be read. An error means that it is not known.
func readable(ctx context.Context, live client.Reader) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	err := live.List(ctx, &kruisev1alpha1.PersistentPodStateList{}, client.Limit(1))
	switch {
	case err == nil:
		return true, nil
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err), apierrors.IsInternalError(err) &&
		strings.Contains(err.Error(), "conversion webhook"):
		return false, nil
	}
	return false, err
}

// without ends the manager once PersistentPodStates can be read, so that the controller starts again.
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
