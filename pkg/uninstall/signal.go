// Package uninstall follows the one object that says whether stayput is installed in the cluster: the ConfigMap
// stayput-installation in its namespace. Its deletion tells the agents and controllers that run to clean up.
//
// # What counts
//
// Promised addresses are freed on this word, so that only a fact counts: the object was seen, and the API server
// says that this very one was deleted, by an event of a watch or by a list without it. Nothing else is a sign of
// anything: no error, no lost right, no object that was never seen, no API server that went back in time because a
// backup of etcd was restored.
//
// One that is there again under another UID is a new installation.
package uninstall

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// Name is the object's.
const Name = "stayput-installation"

// ConfigMaps is its resource.
var ConfigMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}

// State is what is known of an object.
type State int

const (
	// Unknown is before the API server has answered, and where an object was never seen.
	Unknown State = iota
	// Here is an object that was there when the API server last said.
	Here
	// Gone is an object that was deleted.
	Gone
)

// Seen is an object as it was seen.
type Seen struct {
	UID types.UID `json:"uid"`
	// Version is a resource version of the API server at which it was there.
	Version string `json:"version"`
}

// Follower follows one object.
type Follower struct {
	client metadata.ResourceInterface
	name   string
	log    *slog.Logger
	// Changed is called, by Run or Ask, whenever the state changes or another object is seen. It is set before either.
	Changed func(State, Seen)

	mu    sync.Mutex
	state State
	seen  Seen
}

// New is a follower of the installation in a namespace. seen is the object as an earlier process saw it, if it did.
func New(config *rest.Config, namespace string, seen Seen, log *slog.Logger) (*Follower, error) {
	return Of(config, ConfigMaps, namespace, Name, seen, log)
}

// Of is a follower of any object.
func Of(config *rest.Config, resource schema.GroupVersionResource, namespace, name string, seen Seen, log *slog.Logger) (*Follower, error) {
	c, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("API client for %s: %w", config.Host, err)
	}
	f := &Follower{name: name, seen: seen, log: log.With("resource", resource.Resource, "name", name), client: c.Resource(resource)}
	if namespace != "" {
		f.client = c.Resource(resource).Namespace(namespace)
	}
	return f, nil
}

// State is what is known now.
func (f *Follower) State() (State, Seen) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state, f.seen
}

// backoff is between two attempts at following; thousands of agents do it.
func backoff() wait.Backoff {
	return wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 10 * time.Second}
}

const (
	listTimeout = 10 * time.Second
	// watchFor is how long one watch goes on at most. What a watch has missed, the next list tells.
	watchFor = 10 * time.Minute
)

// Run follows the object until ctx is done.
func (f *Follower) Run(ctx context.Context) {
	pause := backoff()
	said := ""
	for ctx.Err() == nil {
		err := f.follow(ctx, func() { pause, said = backoff(), "" })
		if ctx.Err() != nil {
			return
		}
		if err != nil && err.Error() != said {
			said = err.Error()
			f.log.Debug("Cannot follow whether stayput is installed, trying again", "err", err)
		}
		t := time.NewTimer(pause.Step())
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
}

func (f *Follower) selector() string {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, f.name).String()
}

// follow lists and then watches until that ends. The list is consistent: an older one may lack an object that is
// there.
func (f *Follower) follow(ctx context.Context, established func()) error {
	list, err := f.list(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, watchFor+time.Minute)
	defer cancel()
	seconds := int64(watchFor / time.Second)
	w, err := f.client.Watch(ctx, metav1.ListOptions{FieldSelector: f.selector(), ResourceVersion: list.ResourceVersion, AllowWatchBookmarks: true, TimeoutSeconds: &seconds})
	if err != nil {
		return err
	}
	defer w.Stop()
	established()
	for e := range w.ResultChan() {
		switch e.Type {
		case watch.Added, watch.Modified, watch.Deleted:
			o, ok := e.Object.(*metav1.PartialObjectMetadata)
			if !ok || o.Name != f.name {
				continue
			}
			if e.Type != watch.Deleted {
				f.here(o, o.ResourceVersion)
			} else {
				f.deleted(o.UID)
			}
		case watch.Error:
			return apierrors.FromObject(e.Object)
		}
	}
	return nil
}

func (f *Follower) list(ctx context.Context) (*metav1.PartialObjectMetadataList, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	list, err := f.client.List(ctx, metav1.ListOptions{FieldSelector: f.selector()})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if list.Items[i].Name == f.name {
			f.here(&list.Items[i], list.ResourceVersion)
			return list, nil
		}
	}
	f.absent(list.ResourceVersion)
	return list, nil
}

// Ask asks the API server once, for somebody who is about to end.
func (f *Follower) Ask(ctx context.Context) State {
	if _, err := f.list(ctx); err != nil {
		f.log.Debug("Cannot ask whether stayput is installed", "err", err)
	}
	state, _ := f.State()
	return state
}

func (f *Follower) here(o *metav1.PartialObjectMetadata, version string) {
	f.mu.Lock()
	was, seen := f.state, f.seen
	f.state, f.seen = Here, Seen{o.UID, version}
	f.mu.Unlock()
	if was != Here || seen.UID != o.UID {
		f.tell()
	}
}

// deleted is an event of a watch: it is about what was there when the watch began, or has come since.
func (f *Follower) deleted(uid types.UID) {
	f.mu.Lock()
	if f.seen.UID != uid || f.state == Gone {
		f.mu.Unlock()
		return
	}
	f.state = Gone
	f.mu.Unlock()
	f.tell()
}

// absent is a list without the object, at a version of the API server.
func (f *Follower) absent(version string) {
	f.mu.Lock()
	if f.seen.UID == "" || f.state == Gone {
		f.mu.Unlock()
		return
	}
	if c, err := resourceversion.CompareResourceVersion(version, f.seen.Version); err != nil || c < 0 {
		f.log.Warn("The API server went back in time: a backup was restored, in which stayput is not installed", "version", version, "seen", f.seen.Version, "err", err)
		f.state, f.seen = Unknown, Seen{}
	} else {
		f.state = Gone
	}
	f.mu.Unlock()
	f.tell()
}

func (f *Follower) tell() {
	if f.Changed != nil {
		f.Changed(f.State())
	}
}
