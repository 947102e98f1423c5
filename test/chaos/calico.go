package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/test/lab"
)

// calicos is Calico alone, with its own IPAM: one pool is a whole IPPool, the other one a part of that which ordinary
// pods have addresses of. Its controllers free what they take for leaked after 40 to 60 s, so that nodes which are cut
// off live to see it.
var calicos = network{
	says: "Calico with VXLAN and its own IPAM",
	options: lab.ClusterOptions{Calico: &lab.CalicoOptions{LeakGracePeriod: 40 * time.Second, Objects: `
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: default-ipv4-ippool}
spec: {cidr: 10.244.0.0/16, blockSize: 26, vxlanMode: Always, ipipMode: Never, natOutgoing: true, nodeSelector: all(),
  allowedUses: [Workload, Tunnel]}
---
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: far}
spec: {cidr: 10.50.0.0/24, blockSize: 26, vxlanMode: Always, ipipMode: Never, natOutgoing: true, nodeSelector: all(),
  allowedUses: [Workload]}
`}},
	values: map[string]any{
		"pools": map[string]any{"enabled": true, "calico": true}, "agent": map[string]any{"enabled": false},
	},
	pools: `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: far}
spec: {mode: Calico, subnet: 10.50.0.0/24}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: near}
spec: {mode: Calico, subnet: 10.244.200.0/24}
`,
	faults: calicoFaults,
}

// settling is how long a pool gives nothing after its reservation was deleted: it is found out, made again, and has to
// be older than any ADD that is under way.
const settling = calico.ReserveSettles + 30*time.Second

// strikeCalico is what can happen to Calico.
func (s *routed) strikeCalico(ctx context.Context, step step, m *machine) (
	what string, heal func(context.Context) error, err error) {
	b, controllers := s.breaker, s.cluster.CalicoControllers
	switch step.kind {
	case cutNode:
		heal, err = m.take(uplink, "cut off", func() error { return m.CutOff(ctx, true) })
		return m.Name, heal, err
	case killFelix:
		return "Felix of " + m.Name, nil, killed(m.Felix)
	case stopFelix:
		heal, err = m.take(felix, "Felix is away", m.Felix.Kill)
		return "Felix of " + m.Name, heal, err
	case killCollector:
		return "kube-controllers", nil, killed(controllers)
	case stopCollector:
		return "kube-controllers", b.undo("start Calico's controllers", keptUp(controllers)), controllers.Kill()
	case deleteReservation:
		if err := b.unserved(); err != nil {
			return "", nil, err
		}
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(calicoKind("IPReservation"))
		o.SetName("stayput-" + workloads[step.set])
		s.weather.strikes(theController, "a reservation was deleted", settling)
		return o.GetName(), nil, client.IgnoreNotFound(s.client.Delete(ctx, o))
	case touchBlocks:
		if err := b.unserved(); err != nil {
			return "", nil, err
		}
		return "each", nil, s.touch(ctx, step)
	}
	return "", nil, fmt.Errorf("unknown kind of fault %q", step.kind)
}

func calicoKind(kind string) schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "crd.projectcalico.org", Version: "v1", Kind: kind}
}

// touch writes something that means nothing into each block, so that writes which are under way are too late.
func (s *routed) touch(ctx context.Context, step step) error {
	blocks := &unstructured.UnstructuredList{}
	blocks.SetGroupVersionKind(calicoKind("IPAMBlockList"))
	if err := s.client.List(ctx, blocks); err != nil {
		return err
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"chaos/touched":"%d.%d"}}}`, step.round, step.number)
	var errs []error
	for i := range blocks.Items {
		err := s.client.Patch(ctx, &blocks.Items[i], client.RawPatch(types.MergePatchType, patch))
		errs = append(errs, client.IgnoreNotFound(err))
	}
	return errors.Join(errs...)
}

// misallocated returns what Calico's blocks have besides the addresses of the pods that have them, and what they lack.
func (s *routed) misallocated(ctx context.Context, of map[netip.Addr]string) (wrong []string, err error) {
	ipam := calico.New(s.client, func(gvk schema.GroupVersionKind) (bool, error) {
		return gvk.Group == calicoKind("").Group, nil
	}, time.Now)
	if _, err := ipam.Read(ctx); err != nil {
		return nil, err
	}
	has := map[netip.Addr]string{}
	for _, subnet := range []string{"10.50.0.0/24", "10.244.200.0/24"} {
		all, err := ipam.Allocated(ctx, netip.MustParsePrefix(subnet))
		if err != nil {
			return nil, err
		}
		for a, is := range all {
			has[a] = is.Namespace + "/" + is.Pod + " on " + is.Node
		}
	}
	return unlike(of, has), nil
}

// unlike returns where two lists of who has an address differ.
func unlike(pods, blocks map[netip.Addr]string) (wrong []string) {
	both := maps.Clone(pods)
	maps.Copy(both, blocks)
	for _, a := range slices.SortedFunc(maps.Keys(both), netip.Addr.Compare) {
		if pods[a] != blocks[a] {
			wrong = append(wrong, fmt.Sprintf("%s is that of %q, by Calico's blocks that of %q", a, pods[a], blocks[a]))
		}
	}
	return wrong
}
