package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// report is what happened: on the screen faults and violations, in the journal also what became of each pod. Its
// methods may be called concurrently.
type report struct {
	screen, journal io.Writer
	now             func() time.Time
	start           time.Time
	replay          string   // how to repeat the run
	tables          []string // of the summary
	// alarm is called with the number of each violation, if it is not nil.
	alarm func(number int, text string)

	mu         sync.Mutex
	counts     map[string]map[string]int // table -> row -> how often
	violations []string
	told       map[string]bool
}

// The tables of the summary.
const (
	tableFaults  = "faults"
	tableSkipped = "faults that found nothing to break"
	tableReturns = "returns due"
	tableExcused = "returns not due"
	tableProbes  = "probes"
	tableLooks   = "looks"

	tablePods    = "pods of pools"
	tableLost    = "pods of lost nodes that came to another one"
	tableAsked   = "asks"
	tableUnheard = "asks without an answer"
)

func newReport(screen, journal io.Writer, replay string) *report {
	return &report{
		screen: screen, journal: journal, now: time.Now, start: time.Now(), replay: replay,
		counts: map[string]map[string]int{}, told: map[string]bool{},
		tables: []string{tableFaults, tableSkipped, tableReturns, tableExcused, tableProbes, tableLooks},
	}
}

func (r *report) line(w io.Writer, format string, args ...any) {
	now := r.now()
	text := fmt.Sprintf("%s %7.1fs  %s\n", now.UTC().Format("15:04:05.000"), now.Sub(r.start).Seconds(),
		fmt.Sprintf(format, args...))
	_, _ = io.WriteString(w, text)
	if w != r.journal {
		_, _ = io.WriteString(r.journal, text)
	}
}

// say writes to screen and journal.
func (r *report) say(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.line(r.screen, format, args...)
}

// note writes to the journal.
func (r *report) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.line(r.journal, format, args...)
}

func (r *report) count(table, row string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts[table] == nil {
		r.counts[table] = map[string]int{}
	}
	r.counts[table][row]++
}

// violation reports a broken promise, once for each subject.
func (r *report) violation(subject, format string, args ...any) {
	r.mu.Lock()
	if r.told[subject] {
		r.mu.Unlock()
		return
	}
	r.told[subject] = true
	text := fmt.Sprintf(format, args...)
	r.violations = append(r.violations, text)
	number := len(r.violations)
	r.line(r.screen, "VIOLATION %d: %s (%s)", number, text, r.replay)
	r.mu.Unlock()
	if r.alarm != nil {
		r.alarm(number, text)
	}
}

// failed returns the number of violations.
func (r *report) failed() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.violations)
}

// summary returns the tables, and the violations.
func (r *report) summary() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, table := range r.tables {
		rows := r.counts[table]
		sum := 0
		for _, n := range rows {
			sum += n
		}
		fmt.Fprintf(&b, "%6d %s\n", sum, table)
		for _, row := range slices.Sorted(maps.Keys(rows)) {
			fmt.Fprintf(&b, "       %6d %s\n", rows[row], row)
		}
	}
	fmt.Fprintf(&b, "%6d violations\n", len(r.violations))
	for i, v := range r.violations {
		fmt.Fprintf(&b, "       %d. %s\n", i+1, v)
	}
	return b.String()
}
