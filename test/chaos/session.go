package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement"
	"github.com/stayput/stayput/test/lab"
)

// session is a cluster with its workloads, what breaks it and what watches it.
type session struct {
	cluster *lab.Cluster
	client  client.WithWatch
	report  *report
	weather *weather
	lives   *lives
	breaker *breaker
	events  map[types.UID]string // versions of those in the journal
}

// newSession starts a cluster with stayput and the workloads. The caller closes it, also after an error.
func newSession(ctx context.Context, product lab.Product, r *report) (*session, error) {
	s := &session{report: r, weather: &weather{now: r.now}, events: map[types.UID]string{}}
	var err error
	if s.cluster, err = lab.StartCluster(ctx, lab.ClusterOptions{Product: product}); err != nil {
		return s, err
	}
	for _, n := range s.cluster.Nodes {
		if err := n.SetNetworks(ctx, narrow(n)); err != nil {
			return s, err
		}
	}
	err = s.cluster.Install(ctx, lab.InstallOptions{Values: map[string]any{"agent": map[string]any{
		"gracePeriod": gracePeriod.String(), "reconcileInterval": reconcileInterval.String(), "promisedShare": 0.9,
	}}})
	if err != nil {
		return s, err
	}
	s.client, err = client.NewWithWatch(s.cluster.RESTConfig(), client.Options{Scheme: placement.Scheme})
	if err != nil {
		return s, err
	}
	s.lives = newLives(r, s.weather)
	for _, n := range s.cluster.Nodes {
		s.lives.nodes = append(s.lives.nodes, n.Name)
	}
	s.breaker = &breaker{
		cluster: s.cluster, client: s.client, report: r, weather: s.weather, lives: s.lives,
		undos: map[string]int{}, runningOn: s.lives.runningOn,
	}
	for _, n := range s.cluster.Nodes {
		s.breaker.machines = append(s.breaker.machines, &machine{ClusterNode: n, weather: s.weather, down: map[part]int{}})
	}
	return s, s.deploy(ctx)
}

func (s *session) close() error {
	if s.cluster == nil {
		return nil
	}
	return s.cluster.Close()
}

// rangeSize is how many addresses a node has for its pods. It is small, so that an address that is free is soon given
// to another pod.
const rangeSize = 60

// narrow is the network of a node's pods with a small range.
func narrow(n *lab.ClusterNode) lab.Network {
	first := n.Pods.Addr().As4()
	last := first
	first[3], last[3] = 10, 10+rangeSize-1
	return lab.Network{Annotations: true, IPAM: map[string]any{
		"type": "host-local", "routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
		"ranges": []any{[]any{map[string]any{
			"subnet":     n.Pods.String(),
			"rangeStart": netip.AddrFrom4(first).String(), "rangeEnd": netip.AddrFrom4(last).String(),
		}}},
	}}
}

func (s *session) deploy(ctx context.Context) error {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := s.client.Create(ctx, space); err != nil {
		return err
	}
	for _, set := range sets {
		if err := s.client.Create(ctx, set.object()); err != nil {
			return fmt.Errorf("creating %s: %w", set.name, err)
		}
		s.lives.scaled(set, set.replicas)
	}
	return nil
}

// watch starts the observers, which end with ctx; wait waits for that.
func (s *session) watch(ctx context.Context) (wait func()) {
	var all sync.WaitGroup
	here := client.InNamespace(namespace)
	all.Go(func() { follow(ctx, s.client, &corev1.PodList{}, s.lives.seePod, s.lives.gonePod, here) })
	all.Go(func() { follow(ctx, s.client, &corev1.NodeList{}, s.lives.seeNode, s.lives.goneNode) })
	all.Go(func() {
		follow(ctx, s.client, &v1alpha1.RetainedIPList{}, s.lives.seeObject, s.lives.goneObject, here)
	})
	all.Go(func() {
		follow(ctx, s.client, &kruisev1alpha1.PersistentPodStateList{}, s.lives.seeRecord, s.lives.goneRecord, here)
	})
	all.Go(func() {
		follow(ctx, s.client, &corev1.EventList{}, s.seeEvent, func(*corev1.Event) {}, here)
	})
	all.Go(func() {
		for sleep(ctx, time.Second) {
			s.lives.tick()
		}
	})
	for _, n := range s.cluster.Nodes {
		all.Go(func() { s.watchNode(ctx, n) })
	}
	asks := &asker{
		report: s.report, weather: s.weather, lives: s.lives, ask: s.cluster.Control.Get, again: time.Second,
		silent: map[string]time.Time{},
	}
	all.Go(func() { asks.run(ctx) })
	return all.Wait
}

// seeEvent writes what the product says into the journal.
func (s *session) seeEvent(e *corev1.Event) {
	if strings.HasPrefix(e.ReportingController, "stayput") && s.events[e.UID] != e.ResourceVersion {
		s.events[e.UID] = e.ResourceVersion
		s.report.note("Event %s about %s %s: %s", e.Reason, e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Message)
	}
}

// watchNode looks at a node's addresses every second.
func (s *session) watchNode(ctx context.Context, n *lab.ClusterNode) {
	a := newAddresses(n.Name, s.report)
	a.released = func(p promise) time.Time {
		if s.lives.isOver() && p.retention == 0 {
			return s.report.now()
		}
		return s.lives.releasedAt(p.pod, n.Name)
	}
	a.certain = func() bool { return s.weather.calm(theServer) }
	for sleep(ctx, time.Second) {
		v, err := look(n)
		if err != nil {
			if n.Pid() != 0 {
				s.report.count(tableLooks, "failed")
				s.report.note("cannot look at %s: %v", n.Name, err)
			}
			continue
		}
		s.report.count(tableLooks, "at "+n.Name)
		a.judge(v)
	}
}

// run breaks the cluster in rounds until the time is over, and checks after each what is left.
func (s *session) run(ctx context.Context, seed uint64, length time.Duration) error {
	observing, stop := context.WithCancel(ctx)
	wait := s.watch(observing)
	defer wait()
	defer stop()
	s.report.say("%d workloads start", len(sets))
	if err := s.settle(ctx, s.breaker.whole); err != nil {
		return err
	}
	end := time.Now().Add(length)
	for round := 1; time.Now().Before(end); round++ {
		for _, step := range drawRound(seed, round, len(s.breaker.machines), len(sets), faults) {
			if !sleep(ctx, step.after) || time.Now().After(end) {
				break
			}
			s.breaker.begin(ctx, step, s.breaker.strike)
		}
		if err := errors.Join(s.breaker.wait(), ctx.Err()); err != nil {
			return err
		}
		if err := s.rest(ctx); err != nil {
			return err
		}
	}
	return s.end(ctx)
}

// picture writes the state of the cluster to a file.
func (s *session) picture(file string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, args := range []string{
		"nodes -o wide", "pods -A -o wide", "retainedips -A -o wide", "persistentpodstates -A -o yaml",
		"pods -n " + namespace + " -o yaml", "retainedips -A -o yaml", "events -A --sort-by=.metadata.creationTimestamp",
	} {
		out, err := s.cluster.Kubectl(ctx, "", append([]string{"get", "--request-timeout=5s"}, strings.Fields(args)...)...)
		fmt.Fprintf(f, "--- %s\n%s", args, out)
		if err != nil {
			fmt.Fprintln(f, err)
		}
	}
	for _, n := range s.cluster.Nodes {
		v, err := look(n)
		fmt.Fprintf(f, "--- addresses of %s, error: %v\n", n.Name, err)
		for ip, is := range v.book {
			fmt.Fprintf(f, "%s: %s; configured in %v\n", ip, says(is, true), v.configured[ip])
		}
		list, err := s.breaker.sandboxes(ctx, n)
		fmt.Fprintf(f, "--- sandboxes of %s, error: %v\n", n.Name, err)
		for id, is := range list {
			fmt.Fprintln(f, id, is.Metadata, is.State)
		}
	}
	return nil
}

// keepLogs links the logs of all programs into a folder, as they appear, until ctx ends: the kubelet deletes those of a
// pod with the pod.
func (s *session) keepLogs(ctx context.Context, dir string) {
	for {
		for _, n := range append(s.cluster.Nodes, s.cluster.ControlNode) {
			own, _ := filepath.Glob(n.LogFile("*"))
			pods, _ := filepath.Glob(n.Path("/var/log/pods/" + lab.SystemNamespace + "_*/*/*.log"))
			for _, file := range append(own, pods...) {
				link(file, filepath.Join(dir, n.Name))
			}
		}
		if !sleep(ctx, time.Second) {
			return
		}
	}
}

// link links a log into a folder under a name that a rotated or later one of the same name does not have.
func link(file, dir string) {
	var is syscall.Stat_t
	if err := syscall.Stat(file, &is); err != nil {
		return // deleted meanwhile
	}
	// For a pod the last three elements tell which: namespace_name_uid/container/restarts.log.
	parts := strings.Split(file, string(filepath.Separator))
	name := strings.Join(parts[len(parts)-3:], ".")
	if strings.HasSuffix(filepath.Dir(file), "/log") {
		name = parts[len(parts)-1]
	}
	if os.MkdirAll(dir, 0o755) == nil {
		_ = os.Link(file, filepath.Join(dir, fmt.Sprintf("%s.%d", name, is.Ino))) // it is there already
	}
}
