package podip

import (
	"encoding/json"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Every node's agent gets every event of a routed PodIP, and needs five strings of it. The client library's decoder
// reads each event six times, this one twice.

// watchedPodIP is an event of a watch of PodIPs, as far as routes depend on it.
type watchedPodIP struct {
	Type   watch.EventType `json:"type"`
	Object struct {
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
	} `json:"object"`
}

// watchedStatus is the status of a watchedPodIP.
type watchedStatus struct {
	Phase    v1alpha1.PodIPPhase `json:"phase"`
	PodUID   string              `json:"podUID"`
	NodeName string              `json:"nodeName"`
	PodCIDR  string              `json:"podCIDR"`
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
	var e watchedPodIP
	if err := d.events.Decode(&e); err != nil {
		return "", nil, err
	}
	o := &e.Object
	if e.Type == watch.Error {
		return e.Type, &metav1.Status{
			Status: metav1.StatusFailure, Message: o.Message, Reason: o.Reason, Code: o.Code,
		}, nil
	}
	var s watchedStatus
	if len(o.Status) > 0 {
		if err := json.Unmarshal(o.Status, &s); err != nil {
			return "", nil, err
		}
	}
	return e.Type, &v1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{Name: o.Metadata.Name, ResourceVersion: o.Metadata.ResourceVersion},
		Spec:       v1alpha1.PodIPSpec{Mode: o.Spec.Mode, PodUID: o.Spec.PodUID},
		Status:     v1alpha1.PodIPStatus{Phase: s.Phase, PodUID: s.PodUID, NodeName: s.NodeName, PodCIDR: s.PodCIDR},
	}, nil
}
