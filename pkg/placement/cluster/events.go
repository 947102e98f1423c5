package cluster

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// SayAgainAfter is how long after an Event the controller repeats it if it still holds: the API server forgets an Event
// after an hour.
const SayAgainAfter = 15 * time.Minute

// longestNote is the API's limit: it refuses an Event whose note is longer.
const longestNote = 1024

// Recorder returns a recorder whose Events all reach the API server. The recorder of client-go takes Events that differ
// in their notes alone for one, and only the note of the first is written, so that another reason would stay unsaid.
func Recorder(to events.EventRecorder) events.EventRecorder { return recorder{to} }

type recorder struct{ events.EventRecorder }

// Eventf makes the kind of a note part of the action, by which Events are told apart.
func (r recorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	note = fmt.Sprintf(note, args...)
	if len(note) > longestNote {
		note = strings.ToValidUTF8(note[:longestNote-len("…")], "") + "…"
	}
	r.EventRecorder.Eventf(regarding, related, kind, reason, action+"-"+kindOf(note), "%s", note)
}

// numbers change while the matter is the same: how many pods wait, how long one waits.
var numbers = regexp.MustCompile(`[0-9]+`)

// kindOf returns what notes of one kind have in common.
func kindOf(note string) string {
	sum := fnv.New32a()
	_, _ = sum.Write(numbers.ReplaceAll([]byte(note), nil))
	return fmt.Sprintf("%08x", sum.Sum32())
}

// SayFailureAfter is how long each try to place a gated pod fails until the pod is told why: what lasts a moment, such
// as an API server that restarts, is over by then. LongestRetry is the longest pause between two tries.
const (
	SayFailureAfter = 30 * time.Second
	LongestRetry    = 30 * time.Second
)

// NotPlaced says that a pod cannot be placed.
func NotPlaced(err error) string {
	return fmt.Sprintf("the pod stays gated because placing it failed, retrying: %s", err)
}
