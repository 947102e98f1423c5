package retainedip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// eventSink sends what is not ordinary as Events of Kubernetes: bounded, at a bounded pace, and never in the
// way of the objects. An Event is a courtesy; the log has everything.
type eventSink struct {
	client  *apiserver.Client
	node    string
	metrics *metrics
	log     *slog.Logger
	uidOf   func(Name) types.UID // of a RetainedIP, empty if that is not known to be there

	c     chan *event
	limit *rate.Limiter
	// recent are the Events of the last repeatAfter: the same again, as at every restart for a pod with a bad
	// annotation, is no news.
	recent map[string]time.Time
}

const (
	eventsQueued = 256
	// eventsPerSecond after a first eventsBurst of them.
	eventsPerSecond, eventsBurst = 5, 50
	// eventAge is how old an Event may become while the API server is away.
	eventAge    = 10 * time.Minute
	repeatAfter = time.Hour
	// longestNote is the API's limit.
	longestNote = 1024
)

// What the agent reports beside the plugin's own events.
const (
	EventExpired           ledger.EventReason = "IPExpired"
	EventReleased          ledger.EventReason = "IPReleased"
	EventReclaimed         ledger.EventReason = "IPReclaimed"
	EventInvalidAnnotation ledger.EventReason = "InvalidAnnotation"
	EventNotConfigured     ledger.EventReason = "IPNotConfigured"
	EventNotPublished      ledger.EventReason = "RetainedIPRefused"
	// EventAnnotationsUnknown is about the node: its pods' annotations reach neither plugin nor agent.
	EventAnnotationsUnknown ledger.EventReason = "AnnotationsUnknown"
)

const (
	normal  = "Normal"
	warning = "Warning"
)

// eventKinds are the reasons that become Events, with their type and the API's word for what was being done. A restore
// is no Event, since users expect it: it has a metric and a line in the log.
var eventKinds = map[ledger.EventReason]struct{ kind, action string }{
	ledger.EventNotRestored:      {warning, "Restoring"},
	ledger.EventRefused:          {warning, "Retaining"},
	ledger.EventNamespaceRefused: {warning, "Retaining"},
	ledger.EventClamped:          {normal, "Retaining"},
	ledger.EventConflict:         {warning, "Starting"},
	EventInvalidAnnotation:       {warning, "Retaining"},
	EventNotConfigured:           {warning, "Verifying"},
	EventNotPublished:            {warning, "Publishing"},
	EventAnnotationsUnknown:      {warning, "Retaining"},
	EventExpired:                 {normal, "Expiring"},
	EventReleased:                {normal, "Releasing"},
	EventReclaimed:               {warning, "Reclaiming"},
	cniconf.EventConfigured:      {normal, "Configuring"},
	cniconf.EventNotConfigured:   {warning, "Configuring"},
}

// event is an Event of events.k8s.io/v1. The type in k8s.io/api would link a hundred others.
type event struct {
	APIVersion          string            `json:"apiVersion"`
	Kind                string            `json:"kind"`
	Metadata            metav1.ObjectMeta `json:"metadata"`
	EventTime           metav1.MicroTime  `json:"eventTime"`
	Type                string            `json:"type"`
	Reason              string            `json:"reason"`
	Action              string            `json:"action"`
	Note                string            `json:"note"`
	Regarding           objectReference   `json:"regarding"`
	ReportingController string            `json:"reportingController"`
	ReportingInstance   string            `json:"reportingInstance"`
}

type objectReference struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Namespace  string    `json:"namespace,omitempty"`
	Name       string    `json:"name"`
	UID        types.UID `json:"uid,omitempty"`
}

func newEventSink(client *apiserver.Client, node string, m *metrics, log *slog.Logger,
	uidOf func(Name) types.UID) *eventSink {
	return &eventSink{
		client: client, node: node, metrics: m, log: log, uidOf: uidOf, c: make(chan *event, eventsQueued),
		limit: rate.NewLimiter(eventsPerSecond, eventsBurst), recent: map[string]time.Time{},
	}
}

// put queues an Event, or drops it if too many are waiting.
func (s *eventSink) put(e ledger.Event) {
	ev := s.make(e)
	if ev == nil {
		return
	}
	select {
	case s.c <- ev:
	default:
		s.metrics.eventsDropped.Inc()
	}
}

// make returns the Event for e: about the pod if its UID is known, else about its RetainedIP, else about the node.
// It is nil if e is none.
func (s *eventSink) make(e ledger.Event) *event {
	kind, ok := eventKinds[e.Reason]
	if !ok {
		return nil
	}
	namespace, pod := e.Pod.Namespace, e.Pod.Name
	if pod == "" && e.Key.Pod != "" {
		namespace, pod = e.Key.Namespace(), e.Key.Pod
	}
	var about objectReference
	switch {
	case pod == "":
		namespace = metav1.NamespaceDefault // which has the Events of objects without a namespace
		about = objectReference{APIVersion: "v1", Kind: "Node", Name: s.node}
	case e.Pod.UID != "":
		about = objectReference{APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: pod, UID: types.UID(e.Pod.UID)}
	default:
		key := Name{namespace, v1alpha1.RetainedIPName(pod, s.node)}
		about = objectReference{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "RetainedIP", Namespace: namespace,
			Name: key.Name, UID: s.uidOf(key)}
	}
	at := e.Time
	if at.IsZero() {
		at = time.Now()
	}
	note := e.Message
	if len(note) > longestNote {
		note = note[:longestNote-3] + "..."
	}
	suffix := fmt.Sprintf(".%x", at.UnixNano())
	return &event{
		APIVersion: "events.k8s.io/v1", Kind: "Event",
		Metadata:  metav1.ObjectMeta{Namespace: namespace, Name: about.Name[:min(len(about.Name), 253-len(suffix))] + suffix},
		EventTime: metav1.NewMicroTime(at), Type: kind.kind, Reason: string(e.Reason), Action: kind.action, Note: note,
		Regarding: about, ReportingController: v1alpha1.AgentFieldManager, ReportingInstance: s.node,
	}
}

func (s *eventSink) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-s.c:
			if s.repeats(e) || s.limit.Wait(ctx) != nil {
				continue
			}
			s.deliver(ctx, e)
		}
	}
}

// repeats reports whether the same Event was sent within repeatAfter.
func (s *eventSink) repeats(e *event) bool {
	now := time.Now()
	for what, at := range s.recent {
		if now.Sub(at) > repeatAfter {
			delete(s.recent, what)
		}
	}
	what := e.Regarding.Namespace + "/" + e.Regarding.Name + " " + string(e.Regarding.UID) + " " + e.Reason + " " + e.Note
	if _, ok := s.recent[what]; ok {
		return true
	}
	if len(s.recent) < eventsQueued {
		s.recent[what] = now
	}
	return false
}

// deliver tries until the Event is there, is refused, or is too old.
func (s *eventSink) deliver(ctx context.Context, e *event) {
	for wait := time.Second; ; wait = min(2*wait, 10*time.Second) {
		err := s.post(ctx, e)
		var answer apierrors.APIStatus
		switch {
		case err == nil, apierrors.IsAlreadyExists(err):
			s.metrics.eventsSent.Inc()
			return
		case errors.As(err, &answer) && answer.Status().Code < 500 && !apierrors.IsTooManyRequests(err) &&
			!apierrors.IsUnauthorized(err),
			time.Since(e.EventTime.Time) > eventAge, ctx.Err() != nil:
			s.metrics.eventsDropped.Inc()
			about := e.Regarding.Kind + " " + e.Regarding.Namespace + "/" + e.Regarding.Name
			s.log.Warn("Dropped an Event", "reason", e.Reason, "about", about, "err", err)
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
	}
}

func (s *eventSink) post(ctx context.Context, e *event) error {
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	return s.client.Post().AbsPath("/apis/events.k8s.io/v1/namespaces", e.Metadata.Namespace, "events").
		Body(body).Do(ctx).Error()
}
