package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stayput/stayput/test/bench/internal/table"
)

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
func measured(unit string, of statistic, samples ...[]float64) table.Figure {
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
	return table.Figure{
		Value: of(samples...), Unit: unit, N: len(samples[0]),
		Spread: (values[rounds*975/1000] - values[rounds*25/1000]) / 2,
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
