package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
)

// Level is how a finding is to be taken.
type Level string

// The levels. Fail is what keeps stayput from doing what it promises.
const (
	LevelOK   Level = "OK"
	LevelWarn Level = "WARN"
	LevelFail Level = "FAIL"
)

// Finding is one result of a check.
type Finding struct {
	Level Level `json:"level"`
	// Node is empty for what is about the cluster.
	Node  string `json:"node,omitempty"`
	Check string `json:"check"`
	Text  string `json:"text"`
	// Todo is what to do; empty where nothing needs to be done.
	Todo string `json:"todo,omitempty"`
}

// Report is what check -o json prints.
type Report struct {
	Findings []Finding `json:"findings"`
	OK       int       `json:"ok"`
	Warnings int       `json:"warnings"`
	Failures int       `json:"failures"`
}

func checkCommand(c *cluster) *cobra.Command {
	var d document
	var all bool
	cmd := &cobra.Command{
		Use:   "check [NODE...]",
		Short: "Find out what is wrong with stayput, and what to do about it",
		Long: "Find out what is wrong with stayput, and what to do about it: in the cluster, and on every node or those that are named.\n" +
			"It takes the right to list nodes, and to list pods and create pods/exec in the namespace of stayput, through whose agents\n" +
			"nodes are asked. What else may not be looked at is a warning.\n\n" +
			"The exit code is 1 where a check failed; warnings do not count.",
		ValidArgsFunction: c.complete(clusterObjects("Node"), 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			r, err := runChecks(cmd.Context(), c, args, newProgress(cmd.ErrOrStderr()))
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if d.asked() {
				err = d.print(out, r)
			} else {
				err = r.write(out, all, width(out), painting(out))
			}
			if err == nil && r.Failures > 0 {
				err = fmt.Errorf("%s failed", count(r.Failures, "check"))
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&all, "verbose", "v", false, "say of each node what is in order, not only that all is")
	d.addFlags(cmd)
	return cmd
}

func runChecks(ctx context.Context, c *cluster, args []string, line *progress) (*Report, error) {
	k, err := c.client()
	if err != nil {
		return nil, err
	}
	config, err := c.config()
	if err != nil {
		return nil, err
	}
	reach, err := c.agents()
	if err != nil {
		return nil, err
	}
	defer line.done()

	// 1. The API server's clock, which is the one that all others are held against.
	line.say("asking the API server ...")
	clock, err := serverClock(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("the API server's clock: %w", err)
	}

	// 2. The nodes, all at once.
	all, err := listNodes(ctx, k)
	if err != nil {
		return nil, err
	}
	byName := map[string]*corev1.Node{}
	for i := range all {
		byName[all[i].Name] = &all[i]
	}
	var nodes []*corev1.Node
	if len(args) == 0 {
		for i := range all {
			nodes = append(nodes, &all[i])
		}
	}
	for _, name := range args {
		if byName[name] == nil {
			return nil, fmt.Errorf("NODE: there is no node %q", name)
		}
		nodes = append(nodes, byName[name])
	}
	looks := inspectAll(ctx, reach, nodes, line)

	// 3. What is found.
	r := &Report{Findings: []Finding{}}
	now := time.Now().Add(clock.ahead())
	line.say("looking at the cluster ...")
	r.add(checkCluster(ctx, k, c.home, now)...)
	r.add(compareVersions(looks)...)
	for i, n := range nodes {
		r.add(checkNode(n, looks[i], clock)...)
	}
	return r, nil
}

// looked is how a look into a node ended, and when it began and ended by this machine's clock.
type looked struct {
	node     string
	is       *inspection.Node
	err      error
	from, to time.Time
}

func inspectAll(ctx context.Context, reach Agents, nodes []*corev1.Node, line *progress) []looked {
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

// write prints the findings. Of a node where all is in order, and of what is in order on the others, there is one
// line, unless all are wanted.
func (r *Report) write(w io.Writer, all bool, most int, p paint) error {
	var b strings.Builder
	level := func(l Level) string {
		c := map[Level]colour{LevelOK: green, LevelWarn: yellow, LevelFail: red}[l]
		return p.text(c, string(l)) + strings.Repeat(" ", 4-len(l))
	}
	say := func(f Finding) {
		about := f.Check + ": "
		if f.Node != "" {
			about = f.Node + ": " + about
		}
		fmt.Fprintf(&b, "%s  %s\n", level(f.Level), wrapped(about+f.Text, "      ", most-6))
		if f.Todo != "" {
			fmt.Fprintf(&b, "      %s\n", wrapped("-> "+f.Todo, "         ", most-9))
		}
	}
	var order []string // of a node's checks that are in order
	flush := func(node string) {
		if len(order) > 0 {
			fmt.Fprintf(&b, "%s  %s\n", level(LevelOK), wrapped(node+": "+strings.Join(order, ", "), "      ", most-6))
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
	fmt.Fprintf(&b, "\n%d in order, %s, %s\n", r.OK, count(r.Warnings, "warning"), count(r.Failures, "failure"))
	_, err := io.WriteString(w, b.String())
	return err
}

// askForIt is what to do where the API server refuses.
const askForIt = "ask for that right: docs/operations.md says which ones it takes"

// unseen says that something was not looked at.
func unseen(check string, err error) Finding {
	f := Finding{LevelWarn, "", check, "not looked at: " + err.Error(), "repeat it, and see how the API server is"}
	if apierrors.IsForbidden(err) {
		f.Todo = askForIt
	}
	return f
}

// errRight: the API server refuses what a verb cannot do without.
var errRight = errors.New("it takes the right")

// rightTo names the right that an error is about, where it is about one.
func rightTo(what string, err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	return fmt.Errorf("%w to %s: %w", errRight, what, err)
}

// listNodes lists all of them.
func listNodes(ctx context.Context, k client.Client) ([]corev1.Node, error) {
	var list corev1.NodeList
	if err := k.List(ctx, &list); err != nil {
		return nil, rightTo("list nodes", err)
	}
	return list.Items, nil
}
