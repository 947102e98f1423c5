package placement

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/uninstall"
)

// The bindings of the policies that gate pods, see deploy.
const (
	gateAnnotatedBinding = "stayput-gate-annotated"
	gateRecordedBinding  = "stayput-gate-recorded"
)

var gateBindings = schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "mutatingadmissionpolicybindings"}

// departure has every replica, whether it leads or not, let all gated pods go as soon as stayput is uninstalled:
// nobody else will, and the rights to do it go with the same command, half a second later.
//
// The sign is the deletion of the ConfigMap stayput-installation, and for a while that of a gate binding, which
// comes first in what is installed: by that time the rights are sure to be there. Somebody who only switches the
// gates off costs the pods that wait at that moment their place.
type departure struct {
	cached client.Reader
	client client.Client // reads from the API server
	memory *memory
	log    logr.Logger

	installed, gates *uninstall.Follower
	changed          chan struct{}

	mu      sync.Mutex
	ungated time.Time // when the gate binding was seen to be deleted; zero: it was not
}

const (
	// gatesAlone is how long the deletion of the gate binding counts for an uninstallation.
	gatesAlone = 10 * time.Second
	// ungateEvery is how often the pods are looked at while stayput is being uninstalled.
	ungateEvery = 50 * time.Millisecond
	// lastWords is how long a replica that is told to end while stayput is uninstalled goes on letting pods go.
	lastWords = 20 * time.Second
)

func newDeparture(mgr ctrl.Manager, namespace string, m *memory) (*departure, error) {
	config := rest.CopyConfig(mgr.GetConfig())
	live, err := client.New(config, client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient()})
	if err != nil {
		return nil, err
	}
	log := mgr.GetLogger().WithName("departure")
	d := &departure{cached: mgr.GetCache(), client: live, memory: m, log: log, changed: make(chan struct{}, 1)}
	slogger := slog.New(logr.ToSlogHandler(log))
	if d.installed, err = uninstall.New(config, namespace, uninstall.Seen{}, slogger); err != nil {
		return nil, err
	}
	if d.gates, err = uninstall.Of(config, gateBindings, "", gateAnnotatedBinding, uninstall.Seen{}, slogger); err != nil {
		return nil, err
	}
	d.installed.Changed = func(uninstall.State, uninstall.Seen) { d.wake() }
	d.gates.Changed = func(s uninstall.State, _ uninstall.Seen) {
		d.mu.Lock()
		d.ungated = time.Time{}
		if s == uninstall.Gone {
			d.ungated = time.Now()
		}
		d.mu.Unlock()
		d.wake()
	}
	return d, nil
}

func (d *departure) wake() {
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

// leaving says whether stayput is being uninstalled.
func (d *departure) leaving() bool {
	if d == nil {
		return false
	}
	if state, _ := d.installed.State(); state == uninstall.Gone {
		return true
	}
	return d.ungatedLately(time.Now())
}

// ungatedLately says whether the gate binding was deleted so short a time ago that it counts.
func (d *departure) ungatedLately(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.ungated.IsZero() && now.Sub(d.ungated) < gatesAlone
}

// NeedLeaderElection is false: a replica that does not lead has the same rights, and is as quick.
func (d *departure) NeedLeaderElection() bool { return false }

// Start follows the signs until ctx ends.
func (d *departure) Start(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { d.installed.Run(ctx) })
	wg.Go(func() { d.gates.Run(ctx) })
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-d.changed:
			if d.leaving() {
				d.leave(ctx)
			}
		}
	}
	wg.Wait()
	d.end(ctx)
	return nil
}

// leave lets pods go for as long as stayput is being uninstalled.
func (d *departure) leave(ctx context.Context) {
	d.log.Info("stayput is being uninstalled: every gated pod is let go")
	tick := time.NewTicker(ungateEvery)
	defer tick.Stop()
	said := ""
	swept := false
	for d.leaving() && ctx.Err() == nil {
		n, err := d.pass(ctx)
		if err != nil && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			d.log.Error(err, "Cannot let every pod go, trying again")
		}
		if state, _ := d.installed.State(); n == 0 && err == nil && !swept && state == uninstall.Gone {
			swept = true
			if err := removeGatedWorkloads(ctx, d.client); err != nil && ctx.Err() == nil {
				d.log.Info("Cannot delete what says which recorded pods are gated", "err", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	if ctx.Err() == nil {
		d.log.Info("stayput is still installed: pods are placed again")
	}
}

// pass lets go whom the cache knows to be gated.
func (d *departure) pass(ctx context.Context) (n int, err error) {
	var all corev1.PodList
	if err := d.cached.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return 0, fmt.Errorf("listing pods: %w", err)
	}
	var waiting []*corev1.Pod
	for i := range all.Items {
		if pod := &all.Items[i]; gated(pod) && !d.memory.wasUngated(pod) {
			waiting = append(waiting, pod)
		}
	}
	return len(waiting), ungate(waiting, func(pod *corev1.Pod) error {
		err := client.IgnoreNotFound(removeGate(ctx, d.client, pod))
		if err == nil {
			d.memory.ungatedPod(pod)
			d.log.Info("Let go", "pod", pod.Namespace+"/"+pod.Name)
		}
		if apierrors.IsInvalid(err) || apierrors.IsConflict(err) {
			return nil // another replica was quicker, or the cache is about to hear of it
		}
		return err
	})
}

// end is for a replica that is told to end in the same moment: it may have heard of that first.
func (d *departure) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
	defer cancel()
	if state, seen := d.installed.State(); !d.leaving() && (state != uninstall.Here || seen.UID == "" || d.installed.Ask(ctx) != uninstall.Gone) {
		return
	}
	if err := UngateAll(ctx, d.client, io.Discard); err != nil && !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
		d.log.Error(err, "Cannot let every gated pod go: run stayput-controller ungate --all")
	}
}

// removeGatedWorkloads deletes the ConfigMaps by which recorded pods are gated.
func removeGatedWorkloads(ctx context.Context, c client.Client) error {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	if err := c.List(ctx, &list, client.MatchingFields{metav1.ObjectNameField: gatedWorkloads}); err != nil {
		return fmt.Errorf("listing the ConfigMaps %s: %w", gatedWorkloads, err)
	}
	var errs []error
	for i := range list.Items {
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: list.Items[i].Namespace, Name: list.Items[i].Name}}
		if err := client.IgnoreNotFound(c.Delete(ctx, o)); err != nil {
			errs = append(errs, fmt.Errorf("deleting ConfigMap %s/%s: %w", o.Namespace, o.Name, err))
		}
	}
	return errors.Join(errs...)
}
