package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/must"
)

func TestOnlyStayputKeepsTheNodesAndIPsOfTheDemo(t *testing.T) {
	out := &screen{out: t.Output()}
	of, err := demo(t.Context(), out, false)
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

	recording, err := os.ReadFile("../../docs/images/demo.svg")
	must.Do(t, err)
	if got, want := told(linesOf(t, recording)), told(textOf(out.shown)); !slices.Equal(got, want) {
		t.Errorf("docs/images/demo.svg is of another demo: make demo SVG=docs/images/demo.svg\n%q\nwant\n%q", got, want)
	}
}

// told returns the titles of a demo and the first lines of its commands, without what differs from run to run.
func told(lines []string) (all []string) {
	number, node := regexp.MustCompile(`^ *[0-9.]+ s  `), regexp.MustCompile(`node-[0-9]`)
	for _, l := range lines {
		if title := number.ReplaceAllString(l, ""); title != l || strings.HasPrefix(l, indent+"$ ") {
			all = append(all, node.ReplaceAllString(title, "node"))
		}
	}
	return all
}
