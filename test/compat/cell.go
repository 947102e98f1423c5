package main

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stayput/stayput/test/lab"
)

// cell is a pair of versions to run the scenario on.
type cell struct {
	lab.Versions
	nri string // on or off
}

func (c cell) String() string { return c.Kubernetes + " " + c.Runtime + " nri=" + c.nri }

// matrix pairs versions of Kubernetes with runtimes of their time. containerd before 2 has NRI off unless it is
// configured. docs/networks.md shows it.
var matrix = []cell{
	{lab.Versions{Kubernetes: lab.TestedKubernetes, Runtime: lab.TestedRuntime}, "on"},
	{lab.Versions{Kubernetes: "1.33", Runtime: "containerd-1.7"}, "on"},
	{lab.Versions{Kubernetes: "1.33", Runtime: "containerd-1.7"}, "off"},
	{lab.Versions{Kubernetes: "1.34", Runtime: "containerd-2.0"}, "on"},
	{lab.Versions{Kubernetes: "1.35", Runtime: "containerd-2.2"}, "on"},
	{lab.Versions{Kubernetes: lab.TestedKubernetes, Runtime: "crio"}, "on"},
	{lab.Versions{Kubernetes: "1.37", Runtime: lab.TestedRuntime}, "on"},
}

// choose returns the cells of the matrix that are as wanted. If there are none, it is another cell: both versions are
// to be said then.
func choose(want cell) ([]cell, error) {
	if !slices.Contains([]string{"", "on", "off"}, want.nri) {
		return nil, fmt.Errorf("-nri is on or off, not %q", want.nri)
	}
	if err := want.Check(); err != nil {
		return nil, err
	}
	fits := func(want, is string) bool { return want == "" || want == is }
	var cells []cell
	for _, c := range matrix {
		if fits(want.Kubernetes, c.Kubernetes) && fits(want.Runtime, c.Runtime) && fits(want.nri, c.nri) {
			cells = append(cells, c)
		}
	}
	if len(cells) > 0 {
		return cells, nil
	}
	if want.Kubernetes == "" || want.Runtime == "" {
		return nil, fmt.Errorf("no cell is like that; for one of your own say -k8s and -runtime")
	}
	want.nri = cmp.Or(want.nri, "on")
	return []cell{want}, nil
}
