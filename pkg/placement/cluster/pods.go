package cluster

import (
	"context"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/apilist"
)

// Pods reads pods past the caches. It decodes one pod at a time, also of a list: decoded, a pod may take thirty times
// the bytes that the API server stores of it, and a page of them all that the controller has.
type Pods struct{ api rest.Interface }

// NewPods returns what reads pods by this client.
func NewPods(config *rest.Config, by *http.Client) (*Pods, error) {
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.ContentType, config.NegotiatedSerializer = runtime.ContentTypeProtobuf, scheme.Codecs.WithoutConversion()
	api, err := rest.RESTClientForConfigAndClient(config, by)
	return &Pods{api}, err
}

// Each calls each for the pods that options select, as they are now, and returns the list's version. After an error
// they were not all.
func (p *Pods) Each(ctx context.Context, options metav1.ListOptions, each func(*corev1.Pod) error) (string, error) {
	return p.list(ctx, "application/json", options, each)
}

// EachMetadata is Each for pods of which only the metadata is read.
func (p *Pods) EachMetadata(ctx context.Context, options metav1.ListOptions, each func(*corev1.Pod) error) error {
	_, err := p.list(ctx, "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", options, each)
	return err
}

func (p *Pods) list(ctx context.Context, accept string, options metav1.ListOptions, each func(*corev1.Pod) error) (
	string, error) {
	body, err := p.api.Get().Resource("pods").VersionedParams(&options, scheme.ParameterCodec).
		SetHeader("Accept", accept).Stream(ctx)
	if err != nil {
		return "", fmt.Errorf("listing pods: %w", err)
	}
	defer body.Close()
	version, err := apilist.Read(body, each)
	if err != nil {
		return "", fmt.Errorf("listing pods: %w", err)
	}
	return version, nil
}

// ListWatch lists Pods by a label selector, and watches pods by it.
func (p *Pods) ListWatch(selector string) toolscache.ListerWatcher {
	return listWatch{&toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			all := &metainternalversion.List{}
			version, err := p.Each(ctx, metav1.ListOptions{LabelSelector: selector}, func(pod *corev1.Pod) error {
				all.Items = append(all.Items, PodOf(pod))
				return nil
			})
			all.ResourceVersion = version
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.LabelSelector, options.Watch = selector, true
			return p.api.Get().Resource("pods").VersionedParams(&options, scheme.ParameterCodec).Watch(ctx)
		},
	}}
}

type listWatch struct{ *toolscache.ListWatch }

// IsWatchListSemanticsUnSupported makes a reflector list: not every API server begins a watch with every object.
func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

// Keep is the transform of informers: it makes a pod a Pod.
func Keep(o any) (any, error) {
	if pod, ok := o.(*corev1.Pod); ok {
		return PodOf(pod), nil
	}
	return o, nil
}

// PodNamed returns the pod of a name, nil if there is none: from the cache or, since a pod may lack the labels by which
// the caches have it, from the API server, unless live is nil.
func PodNamed(ctx context.Context, cache, live client.Reader, key types.NamespacedName) (*Pod, error) {
	cached := &Pod{}
	err := cache.Get(ctx, key, cached, client.UnsafeDisableDeepCopy)
	switch {
	case err == nil:
		return cached, nil
	case !apierrors.IsNotFound(err):
		return nil, err
	case live == nil:
		return nil, nil
	}
	pod := &corev1.Pod{}
	if err := live.Get(ctx, key, pod); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return PodOf(pod), nil
}
