package main

import (
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
)

func TestCellsAreChosenByWhatIsSaid(t *testing.T) {
	for _, c := range []struct {
		kubernetes, runtime, nri, gate string
		cells                          int
	}{
		{"", "", "", "", len(matrix)},
		{"1.33", "", "", "", 2},
		{"1.33", "", "off", "", 1},
		{"", "crio", "", "", 1},
		{"1.35", "", "", "", 2},
		{"", "", "", betaPolicies, 1},
		{"1.33", "crio", "", "", 1}, // not in the matrix
	} {
		cells, err := choose(cell{
			Versions: lab.Versions{Kubernetes: c.kubernetes, Runtime: c.runtime}, nri: c.nri, gate: c.gate,
		})
		if err != nil || len(cells) != c.cells {
			t.Errorf("%+v: %v, %v", c, cells, err)
		}
	}
	for _, c := range []cell{
		{Versions: lab.Versions{Kubernetes: "1.32"}},
		{Versions: lab.Versions{Runtime: "docker"}},
		{Versions: lab.Versions{Kubernetes: "1.35"}, nri: "off"}, // which runtime?
		{nri: "maybe"},
		{gate: "v1alpha1"},
	} {
		if cells, err := choose(c); err == nil {
			t.Errorf("%v: %v", c, cells)
		}
	}
}

func TestTheDocumentsHaveWhatTheScenarioTypes(t *testing.T) {
	lines, err := typed(t.Context(), "README.md", "Use it")
	if err != nil || !strings.Contains(lines, "\nkubectl patch ") {
		t.Errorf("%q, %v", lines, err)
	}
	const remove = "kubectl delete -f deploy/"
	if line, err := mentioned(t.Context(), "docs/operations.md", "Remove", remove); err != nil || line == remove {
		t.Errorf("%q, %v", line, err)
	}
}
