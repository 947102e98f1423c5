package cluster

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// deaf keeps all nodes from hearing each other, until the returned function is called. Others on the link, and the
// control plane, hear them all.
func deaf(t *testing.T, c *lab.Cluster) (mend func()) {
	t.Helper()
	return broken(t, func(ctx context.Context, broken bool) error {
		how := "off"
		if broken {
			how = "on"
		}
		for _, n := range c.Nodes {
			if _, err := c.Control.Run(ctx, "/bin/sh", "-c",
				"PATH=/sbin:/usr/sbin:$PATH; ip link set dev "+n.Name+" type bridge_slave isolated "+how); err != nil {
				return err
			}
		}
		return nil
	})
}

// An operator says that a node is off, and it is only cut off from the control plane.
func TestAPodOnANodeWronglySaidToBeOffIsHeardOrTakenDown(t *testing.T) {
	c := withPools(t)
	ns := namespace(t, c)
	witness := machine(t, c, "10.6.0.9")
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: pools("blue"), Unprobed: true})
	first := ready(t, c, ns, "web-0")
	addr := ip(t, first)
	witness.Asks(addr)
	only := func(node string) {
		t.Helper()
		until(t, "it to be configured on "+node+" alone", func(context.Context) bool {
			at := holders(t, c, addr.String())
			return len(at) == 1 && at[0][:len(node)+1] == node+" "
		})
	}
	speaks := func(since time.Time) []string {
		macs := witness.Heard(addr, since)
		slices.Sort(macs)
		return slices.Compact(macs)
	}

	// 1. Its Node is deleted. The new pod hears the old one, and has the address once that is down.
	lost := c.Node(first.Spec.NodeName)
	mend := cutOff(t, lost)
	must.Do(t, c.WaitNotReady(testContext(t), lost))
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns, "--force", "--grace-period=0")
	kubectl(t, c, "delete", "node", lost.Name)
	old := speaks(time.Time{})
	if len(old) != 1 {
		t.Fatalf("%v is that of %v", addr, old)
	}
	saysOf(t, c, ns, "Pod", "web-0", "IPConflict", addr.String(), old[0])
	only(lost.Name)
	if is := speaks(time.Time{}); !slices.Equal(is, old) {
		t.Errorf("while the old pod answers, %v is that of %v, and not of %v alone", addr, is, old)
	}
	mend()
	second := successor(t, c, first)
	if ip(t, second) != addr || second.Spec.NodeName == lost.Name {
		t.Fatalf("the successor has %s on %s", second.Status.PodIP, second.Spec.NodeName)
	}
	only(second.Spec.NodeName)
	// Whoever answered for it never did again once another one had.
	if said := witness.Heard(addr, time.Time{}); len(said) != 2 || said[0] != old[0] {
		t.Errorf("%v was that of %v", addr, said)
	}
	must.Do(t, lost.Kubelet.Stop())
	must.Do(t, lost.Kubelet.Start(testContext(t))) // it registers the node again
	must.Do(t, c.WaitReady(testContext(t), lost))

	// 2. Its Node is tainted, and the new pod cannot hear the old one: both answer, until the node is back.
	lost = c.Node(second.Spec.NodeName)
	hear := deaf(t, c)
	mend = cutOff(t, lost)
	must.Do(t, c.WaitNotReady(testContext(t), lost))
	kubectl(t, c, "taint", "node", lost.Name, "node.kubernetes.io/out-of-service=:NoExecute")
	now := int64(0)
	// It fails if the taint was faster.
	_ = c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-0", metav1.DeleteOptions{GracePeriodSeconds: &now,
		Preconditions: metav1.NewUIDPreconditions(string(second.UID))})
	third := successor(t, c, second)
	if ip(t, third) != addr || third.Spec.NodeName == lost.Name {
		t.Fatalf("the successor has %s on %s", third.Status.PodIP, third.Spec.NodeName)
	}
	both := time.Now()
	until(t, "both to answer", func(context.Context) bool { return len(speaks(both)) == 2 })
	kubectl(t, c, "taint", "node", lost.Name, "node.kubernetes.io/out-of-service-")
	mend()
	only(third.Spec.NodeName)
	one := time.Now()
	until(t, "one to answer", func(context.Context) bool { return len(witness.Heard(addr, one)) > 0 })
	mac := knows(t, witness, addr)
	if is := speaks(one); !slices.Equal(is, []string{mac}) {
		t.Errorf("%v is that of %v", addr, is)
	}
	if is := ready(t, c, ns, "web-0"); is.UID != third.UID {
		t.Errorf("the new pod was replaced by %s on %s", is.UID, is.Spec.NodeName)
	}
	hear()
	must.Do(t, c.WaitReady(testContext(t), lost))
	holdTheirAddresses(t, c, map[string]*corev1.Pod{"web-0": third})
}
