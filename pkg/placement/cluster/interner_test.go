package cluster

import "testing"

func TestTheInternerForgetsBeforeItGrowsWithoutBound(t *testing.T) {
	var i Interner
	for n := range internedMost + 10 {
		i.One(string(rune(n)) + "x")
	}
	if len(i.all) > internedMost {
		t.Errorf("it holds %d texts", len(i.all))
	}
}
