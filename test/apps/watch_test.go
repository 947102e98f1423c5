package main

import (
	"errors"
	"testing"
	"time"
)

func TestAnOutageLastsFromSuccessToSuccess(t *testing.T) {
	begin, failed := time.Now(), errors.New("CLUSTERDOWN")
	tries := func(outcomes string) (all []try) {
		for i, c := range outcomes {
			one := try{ended: begin.Add(time.Duration(i) * time.Second)}
			if c == '-' {
				one.err = failed
			}
			all = append(all, one)
		}
		return all
	}
	for _, c := range []struct {
		outcomes string
		want     outage
	}{
		{"++++", outage{}},
		{"+--+-+", outage{longest: 3 * time.Second}},
		{"+-+---+", outage{longest: 4 * time.Second}},
		{"+---+--", outage{4 * time.Second, failed}},
		{"----", outage{3 * time.Second, failed}},
	} {
		if got := outageOf(tries(c.outcomes)); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.outcomes, got, c.want)
		}
	}
	lasts, ended := outage{time.Second, failed}, outage{longest: time.Minute}
	if ended.worse(lasts) != lasts || lasts.worse(ended) != lasts || ended.worse(outage{}) != ended {
		t.Error("a worse outage is one that lasts, and else the longer one")
	}
}
