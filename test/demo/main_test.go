package main

import "testing"

func TestWithStayputTheDemosPodsKeepTheNodesAndIPsThatTheyLoseWithoutIt(t *testing.T) {
	without, with, err := demo(t.Context(), &screen{out: t.Output()}, false)
	if err != nil {
		t.Fatal(err)
	}
	if without.nodes == 0 || without.ips == 0 {
		t.Errorf("without stayput: %v: it shows nothing that stayput keeps more", without)
	}
	if with.restarts == 0 || with.lost() {
		t.Errorf("with stayput: %v", with)
	}
}
