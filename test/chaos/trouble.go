package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/test/lab"
)

// strike is what can happen to pods of routed pools, and of Calico's.
func (s *routed) strike(ctx context.Context, step step) (what string, heal func(context.Context) error, err error) {
	b, m := s.breaker, s.breaker.machines[step.node]
	short, cancel := context.WithTimeout(ctx, striking)
	defer cancel()
	switch step.kind {
	case deletePods, forceDeletePods:
		names := s.tenants.names(workloads[step.set])
		if len(names) == 0 {
			return "", nil, nothing("%s has no pods", workloads[step.set])
		}
		if err := b.unserved(); err != nil {
			return "", nil, err
		}
		what, err = b.deleteSome(short, names, step.kind == forceDeletePods, rand.New(rand.NewPCG(step.pick, 0)))
	case loseNode, dropNode:
		return s.loseNode(ctx, m, step.kind == dropNode)
	case killFlanneld:
		return "flanneld of " + m.Name, nil, killed(m.Flanneld)
	case killProxy:
		return "kube-proxy of " + m.Name, nil, endProxy(short, m)
	case stopFlanneld:
		heal, err = m.take(flanneld, "flanneld is away", m.Flanneld.Kill)
		return "flanneld of " + m.Name, heal, err
	case newLease:
		if err := b.unserved(); err != nil {
			return "", nil, err
		}
		heal, err = m.take(flanneld, "its lease is made again", func() error { return m.Lease(short) })
		return "the lease of " + m.Name, heal, err
	case loseRoutes:
		return "routes of " + m.Name, nil, s.loseRoutes(short, m)
	case cutNode, killFelix, stopFelix, killCollector, stopCollector, deleteReservation, touchBlocks:
		return s.strikeCalico(short, step, m)
	default:
		return b.strike(ctx, step)
	}
	return what, nil, err
}

// killed kills a program that is started again.
func killed(s *lab.Service) error {
	p := s.Process()
	if p == nil {
		return nothing("it does not run")
	}
	return p.Kill()
}

// endProxy kills kube-proxy, and takes its rules along. At every other start on what an earlier one has left by
// nftables, kube-proxy 1.36.3 with nft 1.0.6 empties its map of Services, and no agent there reaches the API server.
func endProxy(ctx context.Context, m *machine) error {
	if err := killed(m.Proxy); err != nil {
		return err
	}
	_, err := m.Run(ctx, "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; "+
		"nft delete table ip kube-proxy; nft delete table ip6 kube-proxy; true") // there are none by iptables
	return err
}

// loseRoutes takes flannel's device and its routes from a node, and kills flanneld, which makes them again.
func (s *routed) loseRoutes(ctx context.Context, m *machine) error {
	if m.Pid() == 0 {
		return nothing("%s is down", m.Name)
	}
	var all []string
	for _, n := range append(s.cluster.Nodes, s.cluster.ControlNode) {
		if n.Name != m.Name {
			all = append(all, "ip route del "+n.Pods.String())
		}
	}
	script := "PATH=/sbin:/usr/sbin:$PATH; ip link del flannel.1; " + strings.Join(all, "; ") + "; true" // some have gone
	if _, err := m.Run(ctx, "/bin/sh", "-c", script); err != nil {
		return err
	}
	return killed(m.Flanneld)
}

// outOfService is an operator's word that a node is off.
var outOfService = corev1.Taint{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute}

// loseNode switches a node off, and says so, or deletes its Node. It comes back once its pods are elsewhere.
func (s *routed) loseNode(ctx context.Context, m *machine, drop bool) (
	what string, heal func(context.Context) error, err error) {
	boot, err := m.take(power, "switched off", m.PowerLoss)
	if err != nil {
		return m.Name, boot, err
	}
	declare := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, healing)
		defer cancel()
		return lab.Until(ctx, "the end of "+m.Name+" to be declared", func() (bool, error) {
			err := s.taint(ctx, m.Name, true)
			if drop {
				err = s.cluster.Client().CoreV1().Nodes().Delete(ctx, m.Name, metav1.DeleteOptions{})
			}
			err = client.IgnoreNotFound(err)
			return err == nil, err
		})
	}
	forgive := s.breaker.undo("take the taint from "+m.Name, func(ctx context.Context) error {
		return client.IgnoreNotFound(s.taint(ctx, m.Name, false))
	})
	back := s.weather.begins(deletedNode(m.Name), "declared out of service, or deleted")
	heal = func(ctx context.Context) error {
		defer back()
		left, cancel := context.WithTimeout(ctx, healing)
		defer cancel()
		err := lab.Until(left, "the pods of "+m.Name+" to be elsewhere", func() (bool, error) {
			here, err := s.cluster.Client().CoreV1().Pods(namespace).List(left, metav1.ListOptions{
				LabelSelector: "app!=" + clientsLabel, FieldSelector: "spec.nodeName=" + m.Name,
			})
			return err == nil && len(here.Items) == 0, err
		})
		if err != nil {
			return err
		}
		if err := boot(ctx); err != nil {
			return err
		}
		return forgive(ctx)
	}
	return m.Name, heal, declare(ctx)
}

// taint says that a node is off, or takes it back.
func (s *routed) taint(ctx context.Context, node string, off bool) error {
	nodes := s.cluster.Client().CoreV1().Nodes()
	n, err := nodes.Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	var taints []corev1.Taint
	for _, t := range n.Spec.Taints {
		if t.Key != outOfService.Key {
			taints = append(taints, t)
		}
	}
	if off {
		taints = append(taints, outOfService)
	}
	n.Spec.Taints = taints
	if _, err := nodes.Update(ctx, n, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("tainting %s: %w", node, err)
	}
	return nil
}
