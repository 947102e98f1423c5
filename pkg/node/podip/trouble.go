package podip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/stayput/stayput/pkg/apiwatch"
)

// troubles is what does not work now, by part of the work. Its methods may be called with any lock held.
type troubles struct {
	log    *slog.Logger
	failed func(part string) // counts a failure

	mu  sync.Mutex
	now map[string]string // the last error of each part
}

// follow runs a loop until ctx is done, and notes how it goes as that part of the work.
func (t *troubles) follow(ctx context.Context, part string, loop apiwatch.Loop) {
	loop.Note = func(err error) { t.note(part, err) }
	loop.Run(ctx)
}

// note keeps for /readyz how a part of the work went, and logs what is new. A nil err ends the trouble.
func (t *troubles) note(part string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		delete(t.now, part)
		return
	}
	if errors.Is(err, context.Canceled) {
		return
	}
	t.failed(part)
	if t.now[part] != err.Error() {
		t.log.Warn("Pool operation failed, retrying", "part", part, "err", err)
	}
	t.now[part] = err.Error()
}

// clear ends all of it.
func (t *troubles) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.now)
}

// String is three of the errors, for people; empty if all works.
func (t *troubles) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, part := range slices.Sorted(maps.Keys(t.now)) {
		if said := t.now[part]; !slices.Contains(all, said) {
			all = append(all, said)
		}
	}
	if len(all) > 3 {
		all = append(all[:3], fmt.Sprintf("and %d more", len(all)-3))
	}
	return strings.Join(all, "; ")
}
