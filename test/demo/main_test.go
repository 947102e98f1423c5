package main

import "testing"

func TestOnlyStayputKeepsTheNodesAndIPsOfTheDemo(t *testing.T) {
	without, with, err := demo(t.Context(), &screen{out: t.Output()}, false)
	if err != nil {
		t.Fatal(err)
	}
	if without.nodes == 0 || without.ips == 0 {
		t.Errorf("without stayput: %v, want losses", without)
	}
	if with.restarts == 0 || with.lost() {
		t.Errorf("with stayput: %v", with)
	}
}
