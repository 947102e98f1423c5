// Package uninstall is the cluster's part of an uninstallation: every replica of the controller ungates all gated pods
// as soon as stayput is uninstalled ([Uninstaller]), and a Job or a person makes that happen in order ([Run]).
package uninstall

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/uninstall"
)

// Memory knows the pods that were ungated though the cache still shows their gate.
type Memory interface {
	WasUngated(*corev1.Pod) bool
	Ungated(*corev1.Pod)
}

// Uninstaller ungates all pods while stayput is being uninstalled. Every replica does it, because the rights go with
// the same kubectl delete, half a second later.
//
// The signal is the deletion of the ConfigMap stayput-installation. The deletion of a gate binding counts too, for
// bindingAlone: it is the first object of the installation to go, when the rights are sure to be there. An
// administrator who only deletes the binding costs the pods that wait at that moment their place. It does not count
// while a webhook gates pods, which takes the policies' place then.
type Uninstaller struct {
	cache  client.Reader
	live   client.Client // reads from the API server
	memory Memory
	hooked func() bool // whether a webhook gates pods
	log    logr.Logger
	again  chan struct{}

	installation, binding *uninstall.Signal
}

const (
	bindingAlone = 10 * time.Second
	// RecheckAfter is how soon a loop that Begun has stopped asks again.
	RecheckAfter = bindingAlone
	// ungateEvery is the pause between two passes over the cached pods.
	ungateEvery = 50 * time.Millisecond
	// lastWords bounds the ungating by a replica that was told to end. Kubernetes kills it after 30 s.
	lastWords = 20 * time.Second
)

// New returns an Uninstaller, to be added to mgr, for stayput in a namespace. hooked reports whether a webhook gates
// pods.
func New(mgr ctrl.Manager, namespace string, memory Memory, hooked func() bool) (*Uninstaller, error) {
	config := mgr.GetConfig()
	live, err := client.New(config, client.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient(),
	})
	if err != nil {
		return nil, err
	}
	u := &Uninstaller{cache: mgr.GetCache(), live: live, memory: memory, hooked: hooked,
		log:   mgr.GetLogger().WithName("uninstall"),
		again: make(chan struct{}, 1)}
	log := slog.New(logr.ToSlogHandler(u.log))
	if u.installation, err = uninstall.NewSignal(config, namespace, uninstall.Object{}, log); err != nil {
		return nil, err
	}
	kind, err := policyBindings(mgr.GetRESTMapper())
	if err != nil {
		return nil, err
	}
	bindings := kind.GroupVersion().WithResource("mutatingadmissionpolicybindings")
	u.binding, err = uninstall.NewSignalFor(config, bindings, "", home.PolicyGateAnnotated, uninstall.Object{}, log)
	if err != nil {
		return nil, err
	}
	return u, nil
}

// Begun reports whether stayput is being uninstalled.
func (u *Uninstaller) Begun() bool {
	binding := u.binding.Status()
	if u.hooked() {
		binding = uninstall.Status{}
	}
	return begun(u.installation.Status(), binding, time.Now())
}

// Again returns a channel that delivers once after stayput turned out, once or more often, to be still installed: the
// lists of gated workloads are gone. It has one reader at a time.
func (u *Uninstaller) Again() <-chan struct{} { return u.again }

func begun(installation, binding uninstall.Status, now time.Time) bool {
	return installation.State == uninstall.Deleted ||
		binding.State == uninstall.Deleted && now.Sub(binding.Since) < bindingAlone
}

// NeedLeaderElection returns false: a replica that does not lead has the same rights, and is as quick.
func (u *Uninstaller) NeedLeaderElection() bool { return false }

// Start runs until ctx is done, and then on for at most lastWords if stayput is being uninstalled.
func (u *Uninstaller) Start(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { u.installation.Run(ctx) })
	wg.Go(func() { u.binding.Run(ctx) })
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			continue
		case <-u.installation.Changed():
		case <-u.binding.Changed():
		}
		if u.Begun() {
			u.ungate(ctx)
		}
	}
	wg.Wait()
	u.finish(ctx)
	return nil
}

// ungate ungates pods until stayput turns out to be installed, or ctx is done.
func (u *Uninstaller) ungate(ctx context.Context) {
	u.log.Info("Uninstalling: ungating every pod")
	tick := time.NewTicker(ungateEvery)
	defer tick.Stop()
	logged, swept, start := "", false, time.Now()
	for u.Begun() && ctx.Err() == nil {
		found, err := u.pass(ctx)
		if err != nil && ctx.Err() == nil && err.Error() != logged {
			logged = err.Error()
			u.log.Error(err, "Cannot ungate every pod, retrying")
		}
		// Pods that are created with the gate all the time keep nothing else from its end.
		done := found == 0 && err == nil || time.Since(start) > settled*inForce
		if done && !swept && u.installation.Status().State == uninstall.Deleted {
			swept = true
			if err := deleteGatedWorkloads(ctx, u.live); err != nil && ctx.Err() == nil {
				u.log.Info("Cannot delete the lists of gated workloads", "err", err)
			}
			if _, _, err := removeFinalizers(ctx, u.live); err != nil && ctx.Err() == nil {
				u.log.Info("Cannot remove the finalizers from PodIPs and PodIPPools", "err", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	if ctx.Err() == nil {
		u.log.Info("Uninstallation was canceled, placing pods again")
		select {
		case u.again <- struct{}{}:
		default:
		}
	}
}

// pass ungates the pods that the cache shows to be gated.
func (u *Uninstaller) pass(ctx context.Context) (found int, err error) {
	var all cluster.PodList
	if err := u.cache.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return 0, fmt.Errorf("listing pods: %w", err)
	}
	var gated []corev1.Pod
	for i := range all.Items {
		if all.Items[i].Gated() {
			gated = append(gated, *all.Items[i].Core())
		}
	}
	left := func(pod *corev1.Pod) bool { return !u.memory.WasUngated(pod) }
	return ungate(gated, left, func(pod *corev1.Pod) error {
		err := client.IgnoreNotFound(gate.Remove(ctx, u.live, pod))
		switch {
		case err == nil:
			u.memory.Ungated(pod)
			u.log.Info("Ungated pod", "pod", pod.Namespace+"/"+pod.Name)
		case apierrors.IsInvalid(err), apierrors.IsConflict(err):
			err = nil // another replica was quicker, and the cache is about to show it
		}
		return err
	})
}

// finish is for a replica that is told to end as part of the uninstallation, perhaps before it sees the signal.
func (u *Uninstaller) finish(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
	defer cancel()
	if !u.Begun() {
		if u.installation.Status().State != uninstall.Present || u.installation.Ask(ctx).State != uninstall.Deleted {
			return
		}
	}
	err := UngateAll(ctx, u.live, io.Discard)
	if err != nil && !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
		u.log.Error(err, "Cannot ungate every pod: run stayput-controller ungate --all")
	}
}
