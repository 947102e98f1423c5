package main

import (
	"slices"
	"testing"
)

func TestASeedAlwaysGivesTheSameFaults(t *testing.T) {
	draw := func(seed uint64, round int) []step { return drawRound(seed, round, 3, 8, faults) }
	for round := range 3 {
		steps := draw(7, round)
		if !slices.Equal(steps, draw(7, round)) {
			t.Errorf("round %d differs from itself", round)
		}
		if slices.Equal(steps, draw(8, round)) || slices.Equal(steps, draw(7, round+1)) {
			t.Errorf("round %d is the same with another seed, or as the next one", round)
		}
	}
}

func TestEveryFaultHappensAloneAndCombined(t *testing.T) {
	for name, faults := range map[string][]fault{
		"of nodes": faults, "of routed pools": routedFaults, "of Calico": calicoFaults,
	} {
		t.Run(name, func(t *testing.T) { everyFaultHappens(t, faults) })
	}
}

func everyFaultHappens(t *testing.T, faults []fault) {
	seen, joined := map[kind]int{}, map[kind]int{}
	for round := range 100 {
		steps := drawRound(1, round, 3, 8, faults)
		if len(steps) == 0 {
			t.Errorf("round %d is empty", round)
		}
		for i, s := range steps {
			if s.node >= 3 || s.set >= 8 || s.after > longestPause {
				t.Errorf("out of bounds: %+v", s)
			}
			seen[s.kind]++
			if i > 0 && s.after < steps[i-1].lasts {
				joined[s.kind]++
			}
		}
	}
	for _, f := range faults {
		if seen[f.kind] == 0 || joined[f.kind] == 0 || joined[f.kind] == seen[f.kind] {
			t.Errorf("%s: %d times, %d of them while the fault before lasts", f.kind, seen[f.kind], joined[f.kind])
		}
	}
}
