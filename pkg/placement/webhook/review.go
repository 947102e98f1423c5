package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Any machine that reaches the port can send requests, and what the API server sends of a pod is not validated yet. A
// request without credentials must not cost a replica, which also places pods, more memory than these, in bytes.
const (
	// bodyMost is for one request: more than the API server accepts of a pod.
	bodyMost = 4 << 20
	// bodySmall is what any number of requests may send at a time, more than most pods have. Only largeBodies at a time
	// may send more.
	bodySmall   = 16 << 10
	largeBodies = 2
	// listMost is for a list that decides, each: hundreds of owners or gates.
	listMost = 64 << 10
)

var errBusy = errors.New("too many large requests at a time")

// review is what decides of an AdmissionReview. All else is skipped as it is read: a pod decoded as a whole is up to
// 300 times as large as its JSON.
type review struct {
	release func() // by which another large request may be read
	Request *struct {
		UID       types.UID
		Namespace string
		Object    struct {
			Metadata struct {
				Labels          present
				Annotations     written
				OwnerReferences list[metav1.OwnerReference]
			}
			Spec struct {
				NodeName        string
				Affinity        affinity
				SchedulingGates list[corev1.PodSchedulingGate]
			}
		}
	}
}

// present says that a field is there, and not null. What it holds is skipped.
type present bool

// UnmarshalJSON implements [json.Unmarshaler].
func (p *present) UnmarshalJSON(data []byte) error {
	*p = string(data) != "null"
	return nil
}

// list is a list of no more than listMost bytes.
type list[T any] []T

// UnmarshalJSON implements [json.Unmarshaler].
func (l *list[T]) UnmarshalJSON(data []byte) error {
	if len(data) > listMost {
		return fmt.Errorf("a list of %d bytes: expected at most %d", len(data), listMost)
	}
	return json.Unmarshal(data, (*[]T)(l))
}

// gateable reports whether the pod can be gated and is not: a gated pod with a node is invalid, and DaemonSets pin
// their pods anyway.
func (r *review) gateable() bool {
	spec, owner := &r.Request.Object.Spec, r.owner()
	return spec.NodeName == "" && !slices.Contains(spec.SchedulingGates, placement) &&
		(owner == nil || owner.Kind != "DaemonSet")
}

// owner returns what controls the pod, nil if nothing does.
func (r *review) owner() *metav1.OwnerReference {
	return metav1.GetControllerOfNoCopy(&metav1.ObjectMeta{OwnerReferences: r.Request.Object.Metadata.OwnerReferences})
}

// reader reads reviews within the bounds above. Its zero value lets no large one in.
type reader struct{ large chan struct{} }

func newReader() reader { return reader{make(chan struct{}, largeBodies)} }

// read returns the review in a request or, with an error, the status to answer with. The caller releases the review
// once it is answered, also after an error: until then it may keep as much as was read.
func (a reader) read(ctx context.Context, w http.ResponseWriter, r *http.Request) (*review, int, error) {
	of := &review{release: func() {}}
	body := http.MaxBytesReader(w, r.Body, bodyMost)
	var b bytes.Buffer
	switch _, err := io.CopyN(&b, body, bodySmall); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return of, http.StatusBadRequest, fmt.Errorf("reading the request: %w", err)
	default:
		select {
		case a.large <- struct{}{}:
			of.release = func() { <-a.large }
		case <-ctx.Done():
			return of, http.StatusServiceUnavailable, errBusy
		}
		if _, err := b.ReadFrom(body); err != nil {
			return of, http.StatusBadRequest, fmt.Errorf("reading the request: %w", err)
		}
	}
	if err := json.Unmarshal(b.Bytes(), of); err != nil {
		return of, http.StatusBadRequest, fmt.Errorf("reading the AdmissionReview: %w", err)
	}
	if of.Request == nil {
		return of, http.StatusBadRequest, errors.New("reading the AdmissionReview: request is missing")
	}
	return of, http.StatusOK, nil
}
