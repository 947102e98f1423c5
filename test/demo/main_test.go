package main

import "testing"

func TestOnlyStayputKeepsTheNodesAndIPsOfTheDemo(t *testing.T) {
	of, err := demo(t.Context(), &screen{out: t.Output()}, false)
	if err != nil {
		t.Fatal(err)
	}
	without, with := of.without, of.with
	if without.nodes == 0 || without.ips == 0 {
		t.Errorf("without stayput: %v, want losses", without)
	}
	if with.restarts == 0 || with.lost() {
		t.Errorf("with stayput: %v", with)
	}
	if of.pool.nodes != 1 || of.pool.ips > 0 {
		t.Errorf("with a pool: %d nodes and %d IPs lost, want one node", of.pool.nodes, of.pool.ips)
	}
}
