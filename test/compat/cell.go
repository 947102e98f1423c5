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
	nri  string // on or off
	gate string // what gates pods: policies, betaPolicies or webhook; "" is what the version has by itself
	// next is the Kubernetes that the control plane is upgraded to near the end, which has policies; "" is none.
	next string
}

// What gates pods. Before 1.36 an API server has the policies only as v1beta1, and only if it is told to, from 1.34 on.
const (
	policies     = "v1"
	betaPolicies = "v1beta1"
	webhook      = "webhook"
)

func (c cell) String() string {
	return c.Kubernetes + " " + c.Runtime + " nri=" + c.nri + " gate=" + c.gatedBy()
}

func (c cell) gatedBy() string {
	switch {
	case c.gate != "":
		return c.gate
	case c.Kubernetes >= "1.36":
		return policies
	default:
		return webhook
	}
}

func (c cell) apiServerArgs() []string {
	args := slices.Clone(lab.WebhooksByEndpoint)
	if c.gatedBy() == betaPolicies {
		args = append(args, lab.BetaPolicies...)
	}
	if c.next != "" {
		args = append(args, "--endpoint-reconciler-type=lease") // the controllers ask each API server by its endpoint
	}
	return args
}

// matrix pairs versions of Kubernetes with runtimes of their time. containerd before 2 has NRI off unless it is
// configured. docs/networks.md shows it.
var matrix = []cell{
	{lab.Versions{Kubernetes: lab.TestedKubernetes, Runtime: lab.TestedRuntime}, "on", policies, ""},
	{lab.Versions{Kubernetes: "1.36", Runtime: lab.TestedRuntime}, "on", policies, ""},
	{lab.Versions{Kubernetes: "1.36", Runtime: "crio"}, "on", policies, ""},
	{lab.Versions{Kubernetes: "1.35", Runtime: "containerd-2.2"}, "on", betaPolicies, ""},
	{lab.Versions{Kubernetes: "1.35", Runtime: "containerd-2.2"}, "on", webhook, "1.36"},
	{lab.Versions{Kubernetes: "1.34", Runtime: "containerd-2.0"}, "on", webhook, ""},
	{lab.Versions{Kubernetes: "1.33", Runtime: "containerd-1.7"}, "on", webhook, ""},
	{lab.Versions{Kubernetes: "1.33", Runtime: "containerd-1.7"}, "off", webhook, ""},
}

// choose returns the cells of the matrix that are as wanted. If there are none, it is another cell: both versions are
// to be said then.
func choose(want cell) ([]cell, error) {
	if !slices.Contains([]string{"", "on", "off"}, want.nri) {
		return nil, fmt.Errorf("-nri is on or off, not %q", want.nri)
	}
	if !slices.Contains([]string{"", policies, betaPolicies, webhook}, want.gate) {
		return nil, fmt.Errorf("-gate is %s, %s or %s, not %q", policies, betaPolicies, webhook, want.gate)
	}
	if err := want.Check(); err != nil {
		return nil, err
	}
	fits := func(want, is string) bool { return want == "" || want == is }
	var cells []cell
	for _, c := range matrix {
		if fits(want.Kubernetes, c.Kubernetes) && fits(want.Runtime, c.Runtime) && fits(want.nri, c.nri) &&
			fits(want.gate, c.gate) {
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
