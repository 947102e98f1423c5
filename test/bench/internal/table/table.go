// Package table holds what the benchmarks share: sections, the run of a program, and the table that it prints.
package table

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// Section measures some rows on a bench of type B.
type Section[B any] struct {
	Name, About string
	Measure     func(context.Context, B) ([]Row, error)
}

// Names returns the names of the sections.
func Names[B any](sections []Section[B]) []string {
	names := make([]string, len(sections))
	for i, s := range sections {
		names[i] = s.Name
	}
	return names
}

// Run calls measure with a context that ends on SIGINT and SIGTERM, and returns the exit code. It requires root; why
// completes the sentence "it …: run it as root".
func Run(why string, measure func(context.Context) error) int {
	if os.Geteuid() != 0 {
		fmt.Fprintf(os.Stderr, "bench: it %s: run it as root\n", why)
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := measure(ctx)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "bench: interrupted, cleaned up")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// Row is a line of the table.
type Row struct {
	What, Against string
	Goal          Goal
	Figure        Figure
	Detail        string
}

// Figure is a measured value.
type Figure struct {
	Value  float64
	Spread float64 // half the value's 95 % interval, by resampling, 0 if it is unknown
	Unit   string  // empty: a ratio
	N      int
}

// Goal is a figure's target. The zero value is none: the figure is for information.
type Goal struct {
	sense string // <, <= or >=
	value float64
}

// Below is the goal of a figure that must be less than v.
func Below(v float64) Goal { return Goal{"<", v} }

// AtMost is the goal of a figure that must not exceed v.
func AtMost(v float64) Goal { return Goal{"<=", v} }

// AtLeast is the goal of a figure that must reach v.
func AtLeast(v float64) Goal { return Goal{">=", v} }

func (g Goal) reachedBy(v float64) bool {
	switch g.sense {
	case "<":
		return v < g.value
	case "<=":
		return v <= g.value
	default:
		return v >= g.value
	}
}

// Print prints the table; nothing without rows.
func Print(w io.Writer, rows []Row) {
	if len(rows) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tAGAINST\tTARGET\tFIGURE\tREACHED\tN\tDETAIL")
	for _, r := range rows {
		target, reached := "-", "-"
		if r.Goal.sense != "" {
			target, reached = fmt.Sprintf("%s %.4g%s", r.Goal.sense, r.Goal.value, r.Figure.Unit), "MISSED"
			if r.Goal.reachedBy(r.Figure.Value) {
				reached = "yes"
			}
		}
		value := fmt.Sprintf("%.3g", r.Figure.Value)
		if r.Figure.Spread > 0 || r.Figure.Unit == "" {
			value = fmt.Sprintf("%.3f", r.Figure.Value)
		}
		if r.Figure.Spread > 0 {
			value += fmt.Sprintf(" ±%.3f", r.Figure.Spread)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s%s\t%s\t%d\t%s\n",
			r.What, r.Against, target, value, r.Figure.Unit, reached, r.Figure.N, r.Detail)
	}
	_ = t.Flush()
}

// Machine returns the kernel, the number of CPUs and the load, for the head of the table.
func Machine() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // never fails
	return fmt.Sprintf("Linux %s, %d CPUs, load %s", unix.ByteSliceToString(u.Release[:]), cpus(), Load())
}

// Load returns the machine's load averages: a quiet machine gives better figures.
func Load() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(data))[:3], " ")
}

func cpus() int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return 0
	}
	return set.Count()
}
