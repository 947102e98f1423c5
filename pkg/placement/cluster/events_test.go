package cluster

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
)

// sink stands for the API server.
type sink struct{ notes *[]string }

func (s sink) Create(_ context.Context, e *eventsv1.Event) (*eventsv1.Event, error) {
	*s.notes = append(*s.notes, e.Note)
	return e, nil
}

func (s sink) Update(_ context.Context, e *eventsv1.Event) (*eventsv1.Event, error) { return e, nil }

func (s sink) Patch(_ context.Context, e *eventsv1.Event, _ []byte) (*eventsv1.Event, error) {
	return e, nil
}

func TestAnotherReasonReachesTheAPIServer(t *testing.T) {
	const full, disabled = "pool blue has no free address, of 3, and 1 pod has waited longer", "pool blue is disabled"
	for name, c := range map[string]struct {
		notes []string
		want  int
	}{
		"another reason":            {[]string{full, disabled}, 2},
		"the same with more pods":   {[]string{full, strings.Replace(full, "1 pod", "12 pod", 1)}, 1},
		"the same, and another one": {[]string{full, full, disabled, full}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var said []string
				broadcaster := events.NewBroadcaster(sink{&said})
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
					t.Fatal(err)
				}
				to := Recorder(broadcaster.NewRecorder(scheme.Scheme, "stayput-controller"))
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0", UID: "1"}}
				for _, note := range c.notes {
					to.Eventf(pod, nil, corev1.EventTypeWarning, "WaitingForAddress", "Placing", "%s", note)
					synctest.Wait()
				}
				broadcaster.Shutdown()
				synctest.Wait()
				if len(said) != c.want || c.want == 2 && !slices.Contains(said, disabled) {
					t.Errorf("the API server was told %q", said)
				}
			})
		})
	}
}

func TestANoteIsNotLongerThanTheAPITakes(t *testing.T) {
	to := events.NewFakeRecorder(1)
	Recorder(to).Eventf(&corev1.Pod{}, nil, corev1.EventTypeWarning, "A", "B", "%s", strings.Repeat("ä%", 1000))
	if is := strings.TrimPrefix(<-to.Events, "Warning A "); len(is) > 1024 || len(is) < 1000 ||
		!strings.HasSuffix(is, "%…") &&
			!strings.HasSuffix(is, "ä…") {
		t.Errorf("%d bytes: %q", len(is), is)
	}
}
