package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// app is an application. Its members are the pods of a StatefulSet that has its name, with the label app.
type app struct {
	name     string
	manifest string // in deploy/examples
	anyNode  bool   // its volumes and, with stayput, its addresses follow the members to other nodes
	members  int
	images   func(ctx context.Context, dir string) ([]lab.Image, error) // of files, some of them in dir
	// form makes the members one cluster by their addresses, as a person does once.
	form func(context.Context, *stage, []member) error
	// writes are what clients write to all the time, and write is one try: an error if no member takes it.
	writes []string
	write  func(ctx context.Context, s *stage, members []member, what string) error
	// health is what the members say of their cluster.
	health func(context.Context, *stage, []member) (says string, ok bool)
}

var apps = []app{redis, redisPool, etcd, zookeeper, registry}

// step is an event in the members' lives.
type step struct {
	title string
	// restarts reports whether the step restarts a member.
	restarts func(member) bool
	run      func(context.Context, *stage, app) error
}

func all(member) bool { return true }

var steps = []step{
	{"all pods deleted at once", all, func(ctx context.Context, s *stage, a app) error {
		return s.kubectl(ctx, "delete", "pods", "--selector=app="+a.name, "--wait=false")
	}},
	{"rollout", all, func(ctx context.Context, s *stage, a app) error {
		return s.kubectl(ctx, "rollout", "restart", "statefulset", a.name)
	}},
	{"a node loses power", onOneNode, func(ctx context.Context, s *stage, _ app) error {
		return s.Node(oneNode).Reboot(ctx)
	}},
	{"all nodes lose power", all, func(ctx context.Context, s *stage, _ app) error {
		for _, n := range s.Nodes {
			if err := n.PowerLoss(); err != nil {
				return err
			}
		}
		for _, n := range s.Nodes {
			if err := n.Boot(ctx); err != nil {
				return err
			}
		}
		return nil
	}},
	{"a node is drained", onOneNode, func(ctx context.Context, s *stage, a app) error {
		if err := s.kubectl(ctx, "drain", oneNode, "--pod-selector=app="+a.name, "--timeout=2m"); err != nil {
			return err
		}
		select {
		case <-time.After(maintenance):
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.kubectl(ctx, "uncordon", oneNode)
	}},
}

// lost is the step for applications that may run on any node.
var lost = step{"a node is lost for good", onOtherNode, func(ctx context.Context, s *stage, a app) error {
	if err := s.Node(otherNode).PowerLoss(); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "delete", "node", otherNode); err != nil {
		return err
	}
	moving, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	err := lab.Until(moving, "the pods of "+otherNode+" to run elsewhere", func() (bool, error) {
		members, err := s.membersOf(moving, a)
		return err == nil && len(running(members)) == a.members && !slices.ContainsFunc(members, onOtherNode), err
	})
	if ctx.Err() != nil {
		return err
	}
	// Another machine of that name is there for the next step. What became of the pods is judged as after all steps.
	return s.Node(otherNode).Boot(ctx)
}}

func onOneNode(m member) bool   { return m.node == oneNode }
func onOtherNode(m member) bool { return m.node == otherNode }

const (
	// oneNode is the node that alone loses power, and the one that is drained.
	oneNode = "node-1"
	// otherNode is the one that is lost, since the drained one may have no members any more.
	otherNode = "node-2"
)

const (
	// maintenance is how long a node is away that is drained: longer than pods wait for it, unless they say how long.
	maintenance = 3 * time.Minute
	// startPatience is how long pods may take to run. A rollout that waits for a pod which never is Ready takes it all.
	startPatience = 4 * time.Minute
	// patience is how long an application may take to recover once its pods run: some seconds is what they need.
	patience = time.Minute
	// steady is for how long it must say that it is well. A node of Redis Cluster that has just started takes the others
	// to be where they were, and serves alone, until they have not answered for its cluster-node-timeout of 5 s.
	steady = 20 * time.Second
)

// acts plays the steps with each application, and returns what became of each.
func (s *stage) acts(ctx context.Context, apps []app) (map[string]tally, error) {
	of := map[string]tally{}
	for _, a := range apps {
		t := tally{}
		formed := false
		played := steps
		if a.anyNode {
			played = append(slices.Clone(steps), lost)
		}
		for _, st := range played {
			if !strings.Contains(st.title, s.step) {
				continue
			}
			if !formed {
				if err := s.deploy(ctx, a); err != nil {
					return of, fmt.Errorf("%s: %w", a.name, err)
				}
			}
			r, err := s.play(ctx, a, st)
			if err != nil {
				return of, fmt.Errorf("%s: %s: %w", a.name, st.title, err)
			}
			fmt.Fprintf(s.out, "  %-14s  %-24s  %s\n", a.name, st.title, r)
			t.steps++
			t.lost += r.restarted - r.kept
			// What is broken is not mended but made again for the next step.
			if formed = r.recovered; !formed {
				t.broken++
				if err := s.clear(ctx, a); err != nil {
					return of, fmt.Errorf("%s: %w", a.name, err)
				}
			}
		}
		if formed {
			if err := s.clear(ctx, a); err != nil {
				return of, fmt.Errorf("%s: %w", a.name, err)
			}
		}
		of[a.name] = t
	}
	return of, nil
}

// result is a step's effect.
type result struct {
	restarted, kept int // members, and how many of these have their address again
	says            string
	recovered       bool
	writes          outage
}

func (r result) String() string {
	return fmt.Sprintf("%d of %d addresses kept; %s; %v", r.kept, r.restarted, r.says, r.writes)
}

// play runs one step and waits until the application has recovered, or for its patience.
func (s *stage) play(ctx context.Context, a app, st step) (r result, err error) {
	before, err := s.membersOf(ctx, a)
	if err != nil {
		return r, err
	}
	if !slices.ContainsFunc(before, st.restarts) {
		return r, errors.New("it would restart no member")
	}
	w := s.watch(ctx, a)
	defer w.end()
	if err := w.writtenSince(ctx, time.Now()); err != nil {
		return r, err
	}
	if err := st.run(ctx, s, a); err != nil {
		return r, err
	}
	r.says, err = s.recovers(ctx, a, st, before, w)
	if r.recovered = err == nil; ctx.Err() != nil {
		return r, err
	}
	r.writes = w.end()
	after, err := s.membersOf(ctx, a)
	if err != nil {
		return r, err
	}
	for _, was := range before {
		if !st.restarts(was) {
			continue
		}
		r.restarted++
		for _, is := range after {
			if is.name == was.name && is.ip == was.ip {
				r.kept++
			}
		}
	}
	return r, nil
}

// recovers waits until the pods run again, their application is as before, and its clients write. It returns what the
// members said last.
func (s *stage) recovers(ctx context.Context, a app, st step, before []member, w *watch) (says string, err error) {
	starting, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	err = lab.Until(starting, "the pods of "+a.name, func() (bool, error) {
		after, err := s.membersOf(starting, a)
		return err == nil && restarted(before, after, st.restarts), err
	})
	if err != nil {
		return "not all pods run again", err
	}
	waiting, cancel := context.WithTimeout(ctx, patience+steady)
	defer cancel()
	var well time.Time // since when
	err = lab.Until(waiting, a.name+" to recover", func() (bool, error) {
		members, err := s.membersOf(waiting, a)
		if err != nil {
			return false, err
		}
		var ok bool
		if says, ok = a.health(ctx, s, members); !ok {
			well = time.Time{}
			return false, nil
		}
		if well.IsZero() {
			well = time.Now()
		}
		return time.Since(well) >= steady, nil
	})
	if err != nil {
		return says, err
	}
	return says, w.writtenSince(waiting, time.Now())
}

// restarted reports whether all members run, those that the step restarts as other containers.
func restarted(before, after []member, restarts func(member) bool) bool {
	runs := map[string]member{}
	for _, m := range after {
		runs[m.name] = m
	}
	for _, was := range before {
		if is := runs[was.name]; !is.runs || restarts(was) && is.container == was.container {
			return false
		}
	}
	return true
}
