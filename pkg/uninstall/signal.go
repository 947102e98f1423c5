// Package uninstall holds the signal that stayput is being uninstalled: the deletion of the ConfigMap
// stayput-installation from Stayput's namespace. Agents and controllers that see it clean up.
//
// Promised addresses are freed on this signal, so only a fact counts: the object was observed, and the API server
// reports that this very object was deleted, in a watch event or by a list that lacks it. An error, a lost right,
// an object never observed, or an API server restored from an older backup is no signal. An object of the same name
// under another UID is a new installation.
package uninstall

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
)

const (
	// ConfigMap is the name of the ConfigMap whose deletion is the signal.
	ConfigMap = "stayput-installation"
	// AnnotationConfirmed on the ConfigMap, with the value "true", says that its deletion is meant: promises end at once.
	AnnotationConfirmed = "stayput.io/uninstall"
)

var configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}

// State is what is known of an object.
type State int

const (
	// Unknown is the state until the API server has answered, and of an object never observed.
	Unknown State = iota
	// Present is the state of an object that existed when the API server last answered.
	Present
	// Deleted is the state of an object that was observed and then deleted.
	Deleted
)

// Object is an object as last observed.
type Object struct {
	UID types.UID `json:"uid"`
	// Version is a resource version of the API server at which the object existed.
	Version string `json:"version"`
	// Confirmed reports whether it had AnnotationConfirmed.
	Confirmed bool `json:"confirmed,omitempty"`
	// Pools is what it said of the cluster's pools, [v1alpha1.AnnotationPools], empty if there are none.
	Pools string `json:"-"`
	// Routed reports whether it said that some of them are of mode Routed.
	Routed bool `json:"-"`
}

// Status is an object's state.
type Status struct {
	State  State
	Object Object    // zero if it was never observed
	Since  time.Time // when State was observed to change, or Object.UID; zero if neither did
}

// Signal observes one object. Its methods may be called from any goroutine.
type Signal struct {
	client  metadata.ResourceInterface
	name    string
	log     *slog.Logger
	changed chan struct{}

	mu     sync.Mutex
	status Status
}

// NewSignal returns a Signal for the installation in a namespace. known is the object as an earlier process observed
// it; zero if none did.
func NewSignal(config *rest.Config, namespace string, known Object, log *slog.Logger) (*Signal, error) {
	return NewSignalFor(config, configMaps, namespace, ConfigMap, known, log)
}

// NewSignalFor returns a Signal for any object. namespace is empty for a cluster-scoped one.
func NewSignalFor(
	config *rest.Config, resource schema.GroupVersionResource, namespace, name string, known Object, log *slog.Logger,
) (*Signal, error) {
	c, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("API client for %s: %w", config.Host, err)
	}
	s := &Signal{
		client: c.Resource(resource), name: name, log: log.With("resource", resource.Resource, "name", name),
		changed: make(chan struct{}, 1), status: Status{Object: known},
	}
	if namespace != "" {
		s.client = c.Resource(resource).Namespace(namespace)
	}
	return s, nil
}

// Status returns the status as it is known now.
func (s *Signal) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// Changed returns a channel that delivers once after one or more changes of Status().State, of the object's UID or
// of its Pools and Routed. It has one reader at a time.
func (s *Signal) Changed() <-chan struct{} { return s.changed }

const listTimeout = 10 * time.Second

// Run observes the object until ctx is done.
func (s *Signal) Run(ctx context.Context) {
	logged := ""
	loop := apiwatch.Loop{
		What:  s.name,
		List:  func(ctx context.Context, _ apiwatch.Cycle) (string, error) { return s.list(ctx) },
		Watch: s.watch, Event: s.event,
		Note: func(err error) {
			if err == nil {
				logged = ""
			} else if err.Error() != logged {
				logged = err.Error()
				s.log.Debug("Cannot watch for the uninstallation, retrying", "err", err)
			}
		},
	}
	loop.Run(ctx)
}

func (s *Signal) selector() string {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, s.name).String()
}

func (s *Signal) watch(ctx context.Context, version string) (watch.Interface, error) {
	seconds := int64(apiwatch.Timeout / time.Second)
	return s.client.Watch(ctx, metav1.ListOptions{
		FieldSelector: s.selector(), ResourceVersion: version, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	})
}

// event takes over what has happened to the object.
func (s *Signal) event(e watch.Event) error {
	o, ok := e.Object.(*metav1.PartialObjectMetadata)
	switch {
	case !ok || o.Name != s.name:
	case e.Type == watch.Deleted:
		s.deleted(o.UID)
	default:
		s.present(objectOf(o, o.ResourceVersion))
	}
	return nil
}

// list lists once and returns the list's resource version. The list is consistent (no resourceVersion is asked for):
// one from the API server's cache may lack an object that exists.
func (s *Signal) list(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	list, err := s.client.List(ctx, metav1.ListOptions{FieldSelector: s.selector()})
	if err != nil {
		return "", err
	}
	for i := range list.Items {
		if o := &list.Items[i]; o.Name == s.name {
			s.present(objectOf(o, list.ResourceVersion))
			return list.ResourceVersion, nil
		}
	}
	s.absent(list.ResourceVersion)
	return list.ResourceVersion, nil
}

// Ask asks the API server once, for a process that is about to end, and returns the status that results. An error
// leaves it as it was.
func (s *Signal) Ask(ctx context.Context) Status {
	if _, err := s.list(ctx); err != nil {
		s.log.Debug("Cannot determine whether stayput is installed", "err", err)
	}
	return s.Status()
}

func objectOf(o *metav1.PartialObjectMetadata, version string) Object {
	return Object{UID: o.UID, Version: version, Confirmed: o.Annotations[AnnotationConfirmed] == "true",
		Pools:  o.Annotations[v1alpha1.AnnotationPools],
		Routed: o.Annotations[v1alpha1.AnnotationRoutedPools] == "true"}
}

// present notes that the object exists.
func (s *Signal) present(o Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State != Present || s.status.Object.UID != o.UID {
		s.setLocked(Present, o)
	}
	if s.status.Object.Pools != o.Pools || s.status.Object.Routed != o.Routed {
		s.wake()
	}
	s.status.Object = o
}

// deleted notes a watch event, which is about an object that existed when the watch began or has come since.
func (s *Signal) deleted(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Object.UID == uid && s.status.State != Deleted {
		s.setLocked(Deleted, s.status.Object)
	}
}

// absent notes a list without the object, and the list's resource version.
func (s *Signal) absent(version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.status.Object
	if known.UID == "" || s.status.State == Deleted {
		return
	}
	if c, err := resourceversion.CompareResourceVersion(version, known.Version); err != nil || c < 0 {
		s.log.Warn("The API server was restored from a backup without this object, so its absence is not taken for an "+
			"uninstallation",
			"version", version, "known", known.Version, "err", err)
		s.setLocked(Unknown, Object{})
		return
	}
	s.setLocked(Deleted, known)
}

func (s *Signal) setLocked(state State, o Object) {
	s.status = Status{State: state, Object: o, Since: time.Now()}
	s.wake()
}

func (s *Signal) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}
