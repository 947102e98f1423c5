package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"text/tabwriter"
	"time"
)

// row is one line of the table.
type row struct {
	what, against string
	goal          goal
	figure        figure
	detail        string
}

// figure is what was measured.
type figure struct {
	value  float64
	spread float64 // half of the interval that holds the value with 95 %, by resampling; 0: not known
	unit   string  // empty: a ratio
	n      int
}

// goal is what to reach; without a sense the figure is for information.
type goal struct {
	sense string // <, <= or >=
	value float64
}

func below(v float64) goal   { return goal{"<", v} }
func atMost(v float64) goal  { return goal{"<=", v} }
func atLeast(v float64) goal { return goal{">=", v} }

func (g goal) reachedBy(v float64) bool {
	switch g.sense {
	case "<":
		return v < g.value
	case "<=":
		return v <= g.value
	default:
		return v >= g.value
	}
}

// statistic makes one number of the samples of one or more contestants.
type statistic func(samples ...[]float64) float64

func quantile(q float64) statistic {
	return func(samples ...[]float64) float64 {
		s := slices.Sorted(slices.Values(samples[0]))
		at := q * float64(len(s)-1)
		i := int(at)
		if i+1 == len(s) {
			return s[i]
		}
		return s[i] + (at-float64(i))*(s[i+1]-s[i])
	}
}

func median(samples ...[]float64) float64 { return quantile(0.5)(samples...) }

// ratio is of the medians of two contestants.
func ratio(samples ...[]float64) float64 { return median(samples[0]) / median(samples[1]) }

// measured is the statistic of the samples, with its spread.
func measured(unit string, of statistic, samples ...[]float64) figure {
	const rounds = 1000
	values := make([]float64, rounds)
	drawn := make([][]float64, len(samples))
	for i, s := range samples {
		drawn[i] = make([]float64, len(s))
	}
	for r := range values {
		for i, s := range samples {
			for j := range drawn[i] {
				drawn[i][j] = s[rand.IntN(len(s))]
			}
		}
		values[r] = of(drawn...)
	}
	slices.Sort(values)
	return figure{
		value: of(samples...), unit: unit, n: len(samples[0]),
		spread: (values[rounds*975/1000] - values[rounds*25/1000]) / 2,
	}
}

// ms are durations in milliseconds.
func ms(durations []time.Duration) []float64 {
	s := make([]float64, len(durations))
	for i, d := range durations {
		s[i] = d.Seconds() * 1e3
	}
	return s
}

// extent prints the least and the greatest of the samples, with their median.
func extent(format string, s []float64) string {
	return fmt.Sprintf(format+" ["+format+" "+format+"]", median(s), slices.Min(s), slices.Max(s))
}

// print prints the table.
func print(w io.Writer, rows []row) {
	if len(rows) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tAGAINST\tTARGET\tFIGURE\tREACHED\tN\tDETAIL")
	for _, r := range rows {
		target, reached := "-", "-"
		if r.goal.sense != "" {
			target, reached = fmt.Sprintf("%s %.4g%s", r.goal.sense, r.goal.value, r.figure.unit), "MISSED"
			if r.goal.reachedBy(r.figure.value) {
				reached = "yes"
			}
		}
		value := fmt.Sprintf("%.3g", r.figure.value)
		if r.figure.spread > 0 || r.figure.unit == "" {
			value = fmt.Sprintf("%.3f", r.figure.value)
		}
		if r.figure.spread > 0 {
			value += fmt.Sprintf(" ±%.3f", r.figure.spread)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s%s\t%s\t%d\t%s\n", r.what, r.against, target, value, r.figure.unit, reached, r.figure.n,
			r.detail)
	}
	_ = t.Flush()
}
