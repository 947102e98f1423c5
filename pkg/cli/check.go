package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
)

// Level is how bad a finding is.
type Level string

// The levels. Fail is what keeps Stayput from doing what it promises.
const (
	LevelOK   Level = "OK"
	LevelWarn Level = "WARN"
	LevelFail Level = "FAIL"
)

// Finding is one result of a check.
type Finding struct {
	Level Level `json:"level"`
	// Node is empty if the finding is about the cluster.
	Node  string `json:"node,omitempty"`
	Check string `json:"check"`
	Text  string `json:"text"`
	// Todo is what to do; empty if nothing needs to be done.
	Todo string `json:"todo,omitempty"`
}

// Report is what check -o json prints.
type Report struct {
	Findings []Finding `json:"findings"`
	OK       int       `json:"ok"`
	Warnings int       `json:"warnings"`
	Failures int       `json:"failures"`
	// Install is the command that installs Stayput in a cluster without it, empty if it is not asked for.
	Install string `json:"install,omitempty"`
}

func checkCommand(s *settings) *cobra.Command {
	var format documentFormat
	var verbose, preflight bool
	cmd := &cobra.Command{
		Use:   "check [NODE...]",
		Short: "Check Stayput for problems, and say how to fix them",
		Long: `Check the cluster and its nodes, or only the named nodes, for problems with Stayput,
and say how to fix them.

This requires permission to list nodes, and to list pods and create pods/exec in
Stayput's namespace: the nodes are checked through their agents. Anything else that
cannot be read is reported as a warning. With permission to create pods in the
namespace default, a dry run tests whether new pods are gated.

With --preflight, report before installation what would work in this cluster: the
versions, how pods would be gated, the network and each node's container runtime, as
far as the API server knows; and print the command that installs Stayput. This
requires permission to list nodes; with permission to list DaemonSets and to get
ConfigMaps it reports more. It queries no agent.

The exit code is 1 if a check failed. Warnings do not count.`,
		Example: `  kubectl stayput check
  kubectl stayput check node-1 --verbose
  kubectl stayput check --preflight`,
		ValidArgsFunction: s.complete(clusterObjects("Node"), 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.connect()
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			run := runChecks
			write := func(r *Report) error { return r.write(out, verbose, width(out)) }
			if preflight {
				run = runPreflight
				write = func(r *Report) error { return r.writePreflight(out, width(out)) }
			}
			r, err := run(cmd.Context(), c, args, newProgress(cmd.ErrOrStderr()))
			if err != nil {
				return err
			}
			err = format.print(out, r, func() error { return write(r) })
			if err == nil && r.Failures > 0 {
				err = fmt.Errorf("%s failed", count(r.Failures, "check", "checks"))
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&verbose, "verbose", false, "Also print the checks that passed on each node")
	cmd.Flags().BoolVar(&preflight, "preflight", false,
		"Report what would work in this cluster before Stayput is installed")
	format.addFlags(cmd)
	return cmd
}

func runChecks(ctx context.Context, c *cluster, args []string, line *progress) (*Report, error) {
	defer line.done()

	// 1. The API server's clock, to which all others are compared.
	line.say("querying the API server ...")
	clock, err := serverClock(ctx, c.config)
	if err != nil {
		return nil, fmt.Errorf("getting the time of the API server: %w", err)
	}

	// 2. The nodes.
	nodes, err := nodesNamed(ctx, c, args)
	if err != nil {
		return nil, err
	}
	is, err := howInstalled(ctx, c, c.installation)
	if errors.Is(err, ErrNotInstalled) {
		return nil, err
	}
	r := &Report{Findings: []Finding{}}
	if err != nil {
		r.add((&findings{check: "agents"}).unread(err)...)
	}
	var looks []looked
	if !is.nodesOnly {
		looks = inspectAll(ctx, c.agents, nodes, line)
	}

	// 3. The findings.
	now := time.Now().Add(clock.ahead())
	line.say("checking the cluster ...")
	r.add(checkCluster(ctx, c, c.installation, now, is)...)
	if is.nodesOnly {
		r.add(finding("agents", LevelOK,
			"no agents are installed (agent.enabled is false): pods keep their nodes, not their addresses", "")...)
		return r, nil
	}
	r.add(compareVersions(looks)...)
	for i := range nodes {
		r.add(checkNode(&nodes[i], looks[i], clock)...)
	}
	return r, nil
}

// looked is what a node answered, and when it was asked and answered by this machine's clock.
type looked struct {
	node     string
	is       *inspection.Node
	err      error
	from, to time.Time
}

func inspectAll(ctx context.Context, reach Agents, nodes []corev1.Node, line *progress) []looked {
	all := make([]looked, len(nodes))
	names := make([]string, len(nodes))
	for i, n := range nodes {
		names[i] = n.Name
	}
	askAll(ctx, names, line, func(ctx context.Context, i int) {
		l := looked{node: names[i], from: time.Now()}
		l.is, l.err = inspect(ctx, reach, l.node)
		l.to = time.Now()
		all[i] = l
	})
	return all
}

func (r *Report) add(all ...Finding) {
	for _, f := range all {
		switch f.Level {
		case LevelOK:
			r.OK++
		case LevelWarn:
			r.Warnings++
		case LevelFail:
			r.Failures++
		}
		r.Findings = append(r.Findings, f)
	}
}

// write prints the findings. What is in order on a node is one line, unless all of it is wanted.
func (r *Report) write(w io.Writer, all bool, most int) error {
	var b strings.Builder
	say := func(f Finding) {
		about := f.Check + ": "
		if f.Node != "" {
			about = f.Node + ": " + about
		}
		fmt.Fprintf(&b, "%-4s  %s\n", f.Level, wrapped(about+f.Text, "      ", most-6))
		if f.Todo != "" {
			fmt.Fprintf(&b, "      %s\n", wrapped("-> "+f.Todo, "         ", most-9))
		}
	}
	var order []string // of a node's checks that are in order
	flush := func(node string) {
		if len(order) > 0 {
			fmt.Fprintf(&b, "%-4s  %s\n", LevelOK, wrapped(node+": "+strings.Join(order, ", "), "      ", most-6))
		}
		order = nil
	}
	node := ""
	for _, f := range r.Findings {
		if f.Node != node {
			flush(node)
			node = f.Node
		}
		if f.Level == LevelOK && f.Node != "" && !all {
			order = append(order, f.Check)
			continue
		}
		say(f)
	}
	flush(node)
	fmt.Fprintf(&b, "\n%d in order, %s, %s\n", r.OK,
		count(r.Warnings, "warning", "warnings"), count(r.Failures, "failure", "failures"))
	_, err := io.WriteString(w, b.String())
	return err
}

// findings are those of one check.
type findings struct {
	check string
	all   []Finding
}

func (f *findings) add(level Level, text, todo string) {
	f.all = append(f.all, Finding{Level: level, Check: f.check, Text: text, Todo: todo})
}

func (f *findings) fail(text, todo string) { f.add(LevelFail, text, todo) }
func (f *findings) warn(text, todo string) { f.add(LevelWarn, text, todo) }

// finding returns the one finding of a check.
func finding(check string, level Level, text, todo string) []Finding {
	return []Finding{{Level: level, Check: check, Text: text, Todo: todo}}
}

// onNode says that the findings are about a node.
func onNode(node string, all []Finding) []Finding {
	for i := range all {
		all[i].Node = node
	}
	return all
}

// orOK returns the findings. If there are none, it is that all is in order.
func (f *findings) orOK(text string) []Finding {
	if len(f.all) == 0 {
		f.add(LevelOK, text, "")
	}
	return f.all
}

// askForIt is what to do if the API server refuses.
const askForIt = "request that permission: docs/operations.md lists the required permissions"

// unread adds that something could not be read, and returns the findings.
func (f *findings) unread(err error) []Finding {
	todo := "try again, and check the health of the API server"
	if apierrors.IsForbidden(err) {
		todo = askForIt
	}
	f.warn("not checked: "+err.Error(), todo)
	return f.all
}

// nodesNamed returns the nodes with these names, or all without names.
func nodesNamed(ctx context.Context, k client.Client, names []string) ([]corev1.Node, error) {
	var list corev1.NodeList
	if err := k.List(ctx, &list); err != nil {
		return nil, rightTo("list nodes", err)
	}
	if len(names) == 0 {
		return list.Items, nil
	}
	var named []corev1.Node
	for _, name := range names {
		i := slices.IndexFunc(list.Items, func(n corev1.Node) bool { return n.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("NODE: node %q does not exist", name)
		}
		named = append(named, list.Items[i])
	}
	return named, nil
}
