package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

// place is a pod's node and address.
type place struct {
	uid      types.UID
	node, ip string
}

// follower tracks which pods of a namespace are Ready.
type follower struct {
	events <-chan podEvent
	ready  map[string]place
}

func (w *world) follow(ctx context.Context, namespace string) (*follower, error) {
	events, err := w.watchPods(ctx, namespace)
	return &follower{events, map[string]place{}}, err
}

// until reads events until ok, and returns when the last of them arrived.
func (f *follower) until(ctx context.Context, what string, ok func() bool) (time.Time, error) {
	e, err := await(ctx, what, f.events, func(e podEvent) bool {
		if e.kind != watch.Deleted && lab.Ready(e.pod) {
			f.ready[e.pod.Name] = place{e.pod.UID, e.pod.Spec.NodeName, e.pod.Status.PodIP}
		} else if f.ready[e.pod.Name].uid == e.pod.UID {
			delete(f.ready, e.pod.Name)
		}
		return ok()
	})
	return e.at, err
}

// allReady waits until n pods are Ready, none of them one of before.
func (f *follower) allReady(ctx context.Context, n int, before map[string]place) (time.Time, error) {
	return f.until(ctx, fmt.Sprintf("%d pods to be Ready", n), func() bool {
		if len(f.ready) != n {
			return false
		}
		for name, p := range f.ready {
			if before[name].uid == p.uid {
				return false
			}
		}
		return true
	})
}

// published waits until the RetainedIPs of a namespace match reality: bound by the Ready pods, with their addresses.
func (w *world) published(ctx context.Context, namespace string, ready map[string]place) error {
	return until(ctx, "the RetainedIPs of namespace "+namespace, func() (bool, error) {
		var list stayputv1alpha1.RetainedIPList
		if err := w.client.List(ctx, &list, client.InNamespace(namespace)); err != nil {
			return false, err
		}
		right := 0
		for _, r := range list.Items {
			p, ok := ready[r.Spec.PodName]
			if ok && r.Spec.NodeName == p.node && r.Status.Phase == stayputv1alpha1.PhaseBound &&
				len(r.Status.IPs) > 0 && r.Status.IPs[0] == p.ip && r.Status.PodUID == string(p.uid) {
				right++
			}
		}
		return right == len(ready), nil
	})
}

// deleteAll deletes pods at once with one call each, as kubectl delete does.
func (w *world) deleteAll(ctx context.Context, namespace string, pods map[string]place) error {
	var names []string
	for name := range pods {
		names = append(names, name)
	}
	return parallel(ctx, len(names), len(names), func(ctx context.Context, _, i int) error {
		return w.client.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: names[i]}})
	})
}

// kept counts the pods on the same node as before, with the same address, and with both.
func kept(before, after map[string]place) (nodes, ips, both int) {
	count := func(n *int, is bool) {
		if is {
			*n++
		}
	}
	for name, b := range before {
		a := after[name]
		count(&nodes, a.node == b.node)
		count(&ips, a.ip == b.ip)
		count(&both, a.node == b.node && a.ip == b.ip)
	}
	return nodes, ips, both
}
