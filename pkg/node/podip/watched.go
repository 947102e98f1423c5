package podip

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Every node's agent reads all routed PodIPs, and every event of them, and needs six strings of each. The client
// library reads an event six times, this twice.

// watchedPodIP is a PodIP as far as routes depend on it, or the error of a watch.
type watchedPodIP struct {
	Metadata struct {
		Name            string `json:"name"`
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec struct {
		Mode   v1alpha1.PodIPPoolMode `json:"mode"`
		PodUID string                 `json:"podUID"`
	} `json:"spec"`
	Status json.RawMessage `json:"status"` // a string in an error
	// Of an error.
	Message string              `json:"message"`
	Reason  metav1.StatusReason `json:"reason"`
	Code    int32               `json:"code"`
}

// watchedStatus is the status of a watchedPodIP.
type watchedStatus struct {
	Phase    v1alpha1.PodIPPhase `json:"phase"`
	PodUID   string              `json:"podUID"`
	NodeName string              `json:"nodeName"`
	PodCIDR  string              `json:"podCIDR"`
}

func (o *watchedPodIP) podIP() (*v1alpha1.PodIP, error) {
	var s watchedStatus
	if len(o.Status) > 0 {
		if err := json.Unmarshal(o.Status, &s); err != nil {
			return nil, fmt.Errorf("the status of PodIP %s: %w", o.Metadata.Name, err)
		}
	}
	return &v1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{Name: o.Metadata.Name, ResourceVersion: o.Metadata.ResourceVersion},
		Spec:       v1alpha1.PodIPSpec{Mode: o.Spec.Mode, PodUID: o.Spec.PodUID},
		Status:     v1alpha1.PodIPStatus{Phase: s.Phase, PodUID: s.PodUID, NodeName: s.NodeName, PodCIDR: s.PodCIDR},
	}, nil
}

// podIPEvents reads the events of a watch. It implements [watch.Decoder].
type podIPEvents struct {
	body   io.ReadCloser
	events *json.Decoder
}

// newPodIPWatch returns the watch whose events body has.
func newPodIPWatch(body io.ReadCloser) watch.Interface {
	return watch.NewStreamWatcher(&podIPEvents{body, json.NewDecoder(body)},
		apierrors.NewClientErrorReporter(http.StatusInternalServerError, http.MethodGet, "ClientWatchDecoding"))
}

func (d *podIPEvents) Close() { d.body.Close() }

func (d *podIPEvents) Decode() (watch.EventType, runtime.Object, error) {
	var e struct {
		Type   watch.EventType `json:"type"`
		Object watchedPodIP    `json:"object"`
	}
	if err := d.events.Decode(&e); err != nil {
		return "", nil, err
	}
	if o := &e.Object; e.Type == watch.Error {
		return e.Type, &metav1.Status{
			Status: metav1.StatusFailure, Message: o.Message, Reason: o.Reason, Code: o.Code,
		}, nil
	}
	ip, err := e.Object.podIP()
	if err != nil {
		return "", nil, err
	}
	return e.Type, ip, nil
}
