package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/lab"
)

const (
	// resting bounds how long a healed cluster may take to have all its pods Ready.
	resting = 6 * time.Minute
	// clearing bounds how long it may then take until nothing is left over: the agents' grace period, which counts from
	// when a leak is seen, and some reconciliations.
	clearing = 5 * time.Minute
	// gracePeriod and reconcileInterval are the agents'.
	gracePeriod, reconcileInterval = time.Minute, 20 * time.Second
)

// rest waits until the healed cluster is at rest and checks that nothing is left over; then that all pods, ended at
// once, come home.
func (s *session) rest(ctx context.Context) error {
	s.report.say("everything is healed: coming to rest")
	if err := s.settle(ctx, s.breaker.whole); err != nil {
		return err
	}
	if err := s.clear(ctx); err != nil {
		return err
	}
	if err := s.muster(ctx); err != nil {
		return err
	}
	if err := s.settle(ctx, s.breaker.whole); err != nil {
		return err
	}
	return s.clear(ctx)
}

// settle waits until the cluster is whole, and every pod Ready. One that does not come to rest is a violation.
func (s *session) settle(ctx context.Context, whole func(context.Context) (why string, err error)) error {
	why, since, start := "", time.Time{}, time.Now()
	for time.Since(start) < resting {
		is, err := whole(ctx)
		switch {
		case err != nil:
			why, since = err.Error(), time.Time{}
		case is != "":
			why, since = is, time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) > settled:
			return nil
		}
		if !sleep(ctx, time.Second) {
			return ctx.Err()
		}
	}
	s.report.violation("unrest", "healed %s ago, the cluster is not at rest: %s", resting, why)
	return nil
}

// clear waits until nothing is left over. What still is after a while is a violation.
func (s *session) clear(ctx context.Context) error {
	start := time.Now()
	for {
		all, err := s.leftovers(ctx)
		if err == nil && len(all) == 0 {
			s.report.say("nothing is left over, after %.0fs", time.Since(start).Seconds())
			return nil
		}
		if time.Since(start) > clearing {
			if err != nil {
				return fmt.Errorf("looking for leftovers: %w", err)
			}
			for _, what := range all {
				s.report.violation("left over "+what, "at rest for %s, and still: %s", clearing, what)
			}
			return nil
		}
		if !sleep(ctx, 2*time.Second) {
			return ctx.Err()
		}
	}
}

// leftovers returns what should not be in a cluster at rest.
func (s *session) leftovers(ctx context.Context) (all []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, striking)
	defer cancel()
	pods, err := s.cluster.Client().CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	uids, nodes := map[string]bool{}, map[string]string{}
	for _, p := range pods.Items {
		uids[string(p.UID)], nodes[p.Name] = true, p.Spec.NodeName
		if gated(&p) {
			all = append(all, "pod "+p.Name+" is gated")
		}
	}
	var objects v1alpha1.RetainedIPList
	if err := s.client.List(ctx, &objects, client.InNamespace(namespace)); err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, n := range s.cluster.Nodes {
		v, err := look(n)
		if err != nil {
			return nil, fmt.Errorf("looking at %s: %w", n.Name, err)
		}
		list, err := s.breaker.sandboxes(ctx, n)
		if err != nil {
			return nil, fmt.Errorf("listing the sandboxes of %s: %w", n.Name, err)
		}
		sandboxes := map[string]sandbox{}
		for id, is := range list {
			sandboxes[id] = sandbox{is.State == runtimeapi.PodSandboxState_SANDBOX_READY, is.Metadata.Uid}
		}
		for _, what := range unexplained(v, sandboxes, func(uid string) bool { return uids[uid] }, s.wants) {
			all = append(all, n.Name+": "+what)
		}
		for _, bad := range v.bad {
			all = append(all, n.Name+": "+bad)
		}
		for _, is := range v.book {
			if is.Key != nil && is.Policy.Retains() {
				files[v1alpha1.RetainedIPName(is.Key.Pod, n.Name)] += fmt.Sprint(is.Addr, " ", is.State)
			}
		}
	}
	published := map[string]string{}
	for _, r := range objects.Items {
		published[r.Name] = strings.Join(r.Status.IPs, ",") + " " + string(r.Status.Phase)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if published[name] != files[name] {
			all = append(all, fmt.Sprintf("RetainedIP %s says %q, the node %q", name, published[name], files[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(published)) {
		if files[name] == "" {
			all = append(all, fmt.Sprintf("RetainedIP %s says %q, the node nothing", name, published[name]))
		}
	}
	return append(all, s.misrecorded(nodes)...), nil
}

// misrecorded returns the pods of which a PersistentPodState has another node than they are on.
func (s *session) misrecorded(nodes map[string]string) (all []string) {
	if s.lives.isOver() {
		return nil
	}
	for pod, node := range nodes {
		if set, _ := setNamed(pod); set == nil || !set.recorded {
			continue
		}
		if is := s.lives.recordOf(pod); is != node {
			all = append(all, fmt.Sprintf("pod %s is on %s and recorded on %q", pod, node, is))
		}
	}
	return all
}

// wants reports whether a promise still has somebody to keep it for.
func (s *session) wants(k ledger.Key) bool {
	kind, name, _ := strings.Cut(k.Identity, ":")
	name = strings.TrimPrefix(name, namespace+"/")
	if kind == "set" {
		return !s.lives.isOver()
	}
	set, ordinal := setNamed(name)
	if set == nil {
		return false
	}
	if s.lives.isOver() {
		return set.retention() != forever // it runs on
	}
	return ordinal < set.replicas
}

// muster ends all pods that have a home at once, in a cluster at rest: each has to come home.
func (s *session) muster(ctx context.Context) error {
	s.report.say("all pods are ended at once, and have to come home")
	for _, set := range sets {
		var err error
		switch {
		case set.identity != "":
			err = s.musterShared(ctx, set)
		case set.comesHome():
			err = s.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(namespace), client.MatchingLabels{"app": set.name})
		}
		if err != nil {
			return fmt.Errorf("ending the pods of %s: %w", set.name, err)
		}
	}
	return nil
}

// musterShared scales a workload with a shared identity to zero and back: its pods have no names to go by, but the
// addresses are all that were kept.
func (s *session) musterShared(ctx context.Context, set *workload) error {
	if err := s.breaker.setScale(ctx, set, 0); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, resting)
	defer cancel()
	err := lab.Until(waiting, "the addresses of "+set.name+" to be retained", func() (bool, error) {
		return s.allRetained(waiting, set)
	})
	if err != nil {
		return err
	}
	kept := s.keptFor(set)
	if err := s.breaker.setScale(ctx, set, set.replicas); err != nil {
		return err
	}
	if err := s.settle(ctx, s.breaker.whole); err != nil {
		return err
	}
	for _, name := range s.lives.pods(set) {
		pod, _ := s.lives.pod(name)
		if _, ok := kept[pod.ip.String()]; !ok {
			s.report.violation("return of "+pod.uid, "%s took none of the addresses kept for %s: %v", &pod, set.identity, kept)
		} else {
			s.report.count(tableReturns, "home")
		}
	}
	return nil
}

// allRetained reports whether a shared identity has no bound address, and all RetainedIPs say so.
func (s *session) allRetained(ctx context.Context, set *workload) (bool, error) {
	for _, state := range s.keptFor(set) {
		if state != ledger.StateRetained {
			return false, nil
		}
	}
	var objects v1alpha1.RetainedIPList
	if err := s.client.List(ctx, &objects, client.InNamespace(namespace)); err != nil {
		return false, err
	}
	for _, r := range objects.Items {
		if r.Spec.Identity == set.identity && r.Status.Phase != v1alpha1.PhaseRetained {
			return false, nil
		}
	}
	return len(s.lives.pods(set)) == 0, nil
}

// keptFor returns the addresses of a shared identity on all nodes.
func (s *session) keptFor(set *workload) map[string]ledger.State {
	kept := map[string]ledger.State{}
	for _, n := range s.cluster.Nodes {
		v, err := look(n)
		if err != nil {
			continue
		}
		for ip, is := range v.book {
			if is.Key != nil && is.Key.Identity == "set:"+namespace+"/"+set.identity {
				kept[ip.String()] = is.State
			}
		}
	}
	return kept
}

// end deletes the workloads, and checks that their addresses go as promised.
func (s *session) end(ctx context.Context) error {
	s.report.say("the workloads are deleted")
	s.lives.end()
	for _, set := range sets {
		err := s.client.Delete(ctx, set.object(), client.PropagationPolicy(metav1.DeletePropagationForeground))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting %s: %w", set.name, err)
		}
	}
	return s.clear(ctx)
}
