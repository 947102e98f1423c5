package uninstall

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// removeFinalizers removes our finalizer from all PodIPs, PodIPPools and SpiderIPPools, until a pass finds none: no
// other program would do so any more, and neither they nor their definitions could be deleted. Otherwise they stay as
// they are, for the next installation, whose controllers put the finalizers back. It returns how many had one, and
// names those that are deleted, but kept by finalizers of others. c must read from the API server, not from a cache.
func removeFinalizers(ctx context.Context, c client.Client) (freed int, held []string, err error) {
	for range mostPasses {
		found := 0
		held = nil
		for kind, list := range map[string]client.ObjectList{"PodIP": &v1alpha1.PodIPList{},
			"PodIPPool": &v1alpha1.PodIPPoolList{}, "SpiderIPPool": &spiderpoolv2beta1.SpiderIPPoolList{}} {
			n, err := removeFinalizersOf(ctx, c, list, func(o client.Object) {
				if by := heldBy(kind, o); by != "" {
					held = append(held, by)
				}
			})
			if found += n; err != nil {
				return freed, held, err
			}
		}
		if found == 0 {
			slices.Sort(held)
			return freed, held, nil
		}
		freed += found
	}
	return freed, held, fmt.Errorf("after %d passes some PodIPs or pools still have our finalizer", mostPasses)
}

// mostPasses bounds the passes if others change PodIPs, or put the finalizer back, all the time.
const mostPasses = 20

// removeFinalizersOf removes it from all objects of a kind that is served, and returns how many had one. It calls
// others for each object that has not.
func removeFinalizersOf(
	ctx context.Context, c client.Client, list client.ObjectList, others func(client.Object),
) (found int, err error) {
	for first := true; first || list.GetContinue() != ""; first = false {
		err := c.List(ctx, list, client.Limit(page), client.Continue(list.GetContinue()))
		if missing(err) {
			return found, nil
		}
		if err != nil {
			return found, fmt.Errorf("listing PodIPs and pools: %w", err)
		}
		var all errgroup.Group
		all.SetLimit(ungaters)
		err = meta.EachListItem(list, func(o runtime.Object) error {
			is := o.(client.Object)
			if !slices.Contains(is.GetFinalizers(), v1alpha1.FinalizerInUse) {
				others(is)
				return nil
			}
			found++
			all.Go(func() error { return unhold(ctx, c, is) })
			return nil
		})
		if err = errors.Join(err, all.Wait()); err != nil {
			return found, err
		}
	}
	return found, nil
}

// unhold takes the finalizer off an object; not if it has changed meanwhile.
func unhold(ctx context.Context, c client.Client, o client.Object) error {
	others := slices.DeleteFunc(slices.Clone(o.GetFinalizers()),
		func(f string) bool { return f == v1alpha1.FinalizerInUse })
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": o.GetUID(), "resourceVersion": o.GetResourceVersion(), "finalizers": others,
	}})
	if err != nil {
		return err
	}
	name := o.GetName()
	err = c.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch))
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing the finalizer %s from %s: %w", v1alpha1.FinalizerInUse, name, err)
	}
	return nil
}
