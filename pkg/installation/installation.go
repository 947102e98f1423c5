// Package installation follows the ConfigMap stayput-installation, which tells agents and controllers that Stayput is
// being uninstalled, and agents whether the cluster has pools.
//
// Agents free promised addresses at its word, so only what it says counts. If it is gone, the API server does not
// answer, or a right is lost, what it said last stands.
package installation

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
)

const (
	// ConfigMap is the name of the ConfigMap in Stayput's namespace.
	ConfigMap = "stayput-installation"
	// AnnotationUninstall on the ConfigMap, with the value "true", says that Stayput is being uninstalled: agents put
	// their nodes back, and controllers neither gate pods nor keep them waiting. Nothing else says so.
	AnnotationUninstall = "stayput.io/uninstall"
)

// State is what the ConfigMap said when it was last observed.
type State struct {
	// Known is false until the ConfigMap was observed.
	Known bool
	// Uninstalling reports whether it has AnnotationUninstall.
	Uninstalling bool
	// Pools is what it says of the cluster's pools, [v1alpha1.AnnotationPools], empty if there are none.
	Pools string
	// Routed reports whether it says that some of them are of mode Routed.
	Routed bool
}

// Follower follows the ConfigMap. Its methods may be called from any goroutine.
type Follower struct {
	client  metadata.ResourceInterface
	log     *slog.Logger
	asked   chan struct{} // closed once the API server has answered
	changed chan struct{}

	mu    sync.Mutex
	state State
}

// New returns a Follower of the installation in a namespace.
func New(config *rest.Config, namespace string, log *slog.Logger) (*Follower, error) {
	c, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("API client for %s: %w", config.Host, err)
	}
	return &Follower{
		client: c.Resource(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}).Namespace(namespace),
		log:    log, asked: make(chan struct{}), changed: make(chan struct{}, 1),
	}, nil
}

// State returns the state as it is known now.
func (f *Follower) State() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

// Asked returns a channel that is closed once the API server has said for the first time what the ConfigMap says, or
// that there is none.
func (f *Follower) Asked() <-chan struct{} { return f.asked }

// Changed returns a channel that delivers once after one or more changes of State. It has one reader at a time.
func (f *Follower) Changed() <-chan struct{} { return f.changed }

const listTimeout = 10 * time.Second

// Run follows the ConfigMap until ctx is done. It may be called once.
func (f *Follower) Run(ctx context.Context) {
	logged := ""
	var answered sync.Once
	loop := apiwatch.Loop{
		What: ConfigMap,
		List: func(ctx context.Context, _ apiwatch.Cycle) (string, error) {
			version, err := f.list(ctx)
			if err == nil {
				answered.Do(func() { close(f.asked) })
			}
			return version, err
		},
		Watch: f.watch,
		Event: func(e watch.Event) error {
			if o, ok := e.Object.(*metav1.PartialObjectMetadata); ok && e.Type != watch.Deleted {
				f.observe(o)
			}
			return nil
		},
		Note: func(err error) {
			if err == nil {
				logged = ""
			} else if err.Error() != logged {
				logged = err.Error()
				f.log.Debug("Cannot follow the installation, retrying", "configmap", ConfigMap, "err", err)
			}
		},
	}
	loop.Run(ctx)
}

var selector = fields.OneTermEqualSelector(metav1.ObjectNameField, ConfigMap).String()

func (f *Follower) watch(ctx context.Context, version string) (watch.Interface, error) {
	seconds := int64(apiwatch.Timeout / time.Second)
	return f.client.Watch(ctx, metav1.ListOptions{
		FieldSelector: selector, ResourceVersion: version, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	})
}

func (f *Follower) list(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	list, err := f.client.List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return "", err
	}
	for i := range list.Items {
		f.observe(&list.Items[i])
	}
	return list.ResourceVersion, nil
}

// observe takes over what the ConfigMap says.
func (f *Follower) observe(o *metav1.PartialObjectMetadata) {
	if o.Name != ConfigMap {
		return
	}
	state := State{
		Known:        true,
		Uninstalling: o.Annotations[AnnotationUninstall] == "true",
		Pools:        o.Annotations[v1alpha1.AnnotationPools],
		Routed:       o.Annotations[v1alpha1.AnnotationRoutedPools] == "true",
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == state {
		return
	}
	f.state = state
	select {
	case f.changed <- struct{}{}:
	default:
	}
}
