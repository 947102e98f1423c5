//go:build calico

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// calicoAPI is where Calico keeps its objects, as its manifests install it.
const calicoAPI = "/apis/crd.projectcalico.org/v1/"

// withCalico returns a cluster of its own whose pods have their addresses of Calico's IPAM.
func withCalico(t *testing.T, o lab.CalicoOptions) *lab.Cluster {
	t.Helper()
	c := ownCluster(t, &lab.ClusterOptions{Calico: &o})
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range c.Nodes {
				t.Log(network(n))
			}
			c.WriteLogs(t.Output())
		}
	})
	return c
}

// asksFor returns the annotation by which Calico gives a pod these addresses.
func asksFor(addrs ...netip.Addr) map[string]string {
	list, err := json.Marshal(addrs)
	if err != nil {
		panic(err) // only addresses
	}
	return map[string]string{"cni.projectcalico.org/ipAddrs": string(list)}
}

// ipamBlock is an IPAMBlock of Calico's.
type ipamBlock struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata"`
	Spec            struct {
		CIDR              netip.Prefix     `json:"cidr"`
		Affinity          *string          `json:"affinity,omitempty"`
		AffinityClaimTime *metav1.Time     `json:"affinityClaimTime,omitempty"`
		StrictAffinity    bool             `json:"strictAffinity"`
		Allocations       []*int           `json:"allocations"`
		Unallocated       []int            `json:"unallocated"`
		Attributes        []ipamAttributes `json:"attributes"`
		// A float64 does not hold these numbers.
		SequenceNumber              uint64            `json:"sequenceNumber"`
		SequenceNumberForAllocation map[string]uint64 `json:"sequenceNumberForAllocation,omitempty"`
		Deleted                     bool              `json:"deleted"`
	} `json:"spec"`
}

// ipamAttributes say whose the addresses are that name them.
type ipamAttributes struct {
	Handle    string            `json:"handle_id,omitempty"`
	Secondary map[string]string `json:"secondary,omitempty"`
}

func (a ipamAttributes) String() string {
	return a.Secondary["namespace"] + "/" + a.Secondary["pod"] + " on " + a.Secondary["node"]
}

// blocks returns Calico's blocks.
func blocks(t *testing.T, c *lab.Cluster) []ipamBlock {
	t.Helper()
	var list struct{ Items []ipamBlock }
	data, err := c.Client().CoreV1().RESTClient().Get().AbsPath(calicoAPI, "ipamblocks").DoRaw(testContext(t))
	must.Do(t, err)
	must.Do(t, json.Unmarshal(data, &list))
	return list.Items
}

// blockOf returns the block that an address is in, nil if there is none.
func blockOf(t *testing.T, c *lab.Cluster, addr netip.Addr) *ipamBlock {
	t.Helper()
	for _, b := range blocks(t, c) {
		if b.Spec.CIDR.Contains(addr) {
			b.APIVersion, b.Kind = "crd.projectcalico.org/v1", "IPAMBlock"
			return &b
		}
	}
	return nil
}

// holder says who has an address by Calico's blocks, as "namespace/pod on node"; empty if it is free.
func holder(t *testing.T, c *lab.Cluster, addr netip.Addr) string {
	t.Helper()
	if b := blockOf(t, c, addr); b != nil {
		if a := b.of(addr); a != nil {
			return a.String()
		}
	}
	return ""
}

// isHeldBy waits until an address is a pod's by Calico's blocks.
func isHeldBy(t *testing.T, c *lab.Cluster, addr netip.Addr, pod *corev1.Pod) {
	t.Helper()
	want := pod.Namespace + "/" + pod.Name + " on " + pod.Spec.NodeName
	until(t, addr.String()+" to be held by "+want, func(context.Context) bool { return holder(t, c, addr) == want })
}

func (b *ipamBlock) ordinal(addr netip.Addr) int {
	n, first := addr.As16(), b.Spec.CIDR.Addr().As16()
	return int(n[15]) - int(first[15]) // blocks have at most 256 addresses here
}

// of returns whose an address is, nil if it is free.
func (b *ipamBlock) of(addr netip.Addr) *ipamAttributes {
	if at := b.Spec.Allocations[b.ordinal(addr)]; at != nil {
		return &b.Spec.Attributes[*at]
	}
	return nil
}

// free frees an address in the block as Calico does, for put to write.
func (b *ipamBlock) free(addr netip.Addr) {
	s, n := &b.Spec, b.ordinal(addr)
	at := *s.Allocations[n]
	s.Allocations[n] = nil
	s.Unallocated = append(s.Unallocated, n)
	delete(s.SequenceNumberForAllocation, fmt.Sprint(n))
	s.SequenceNumber++
	if slices.ContainsFunc(s.Allocations, func(a *int) bool { return a != nil && *a == at }) {
		return // the handle has other addresses
	}
	s.Attributes = slices.Delete(s.Attributes, at, at+1)
	for _, a := range s.Allocations {
		if a != nil && *a > at {
			*a--
		}
	}
}

// allocate has an address of the block allocated as Calico does, for put to write.
func (b *ipamBlock) allocate(addr netip.Addr, to ipamAttributes) {
	s, n, at := &b.Spec, b.ordinal(addr), len(b.Spec.Attributes)
	s.Allocations[n], s.Attributes = &at, append(s.Attributes, to)
	s.Unallocated = slices.DeleteFunc(s.Unallocated, func(free int) bool { return free == n })
	if s.SequenceNumberForAllocation == nil {
		s.SequenceNumberForAllocation = map[string]uint64{}
	}
	s.SequenceNumberForAllocation[fmt.Sprint(n)] = s.SequenceNumber
	s.SequenceNumber++
}

// put writes a block, unless it has changed.
func (b *ipamBlock) put(ctx context.Context, c *lab.Cluster) error {
	body, err := json.Marshal(b)
	if err != nil {
		return err
	}
	return c.Client().CoreV1().RESTClient().Put().AbsPath(calicoAPI, "ipamblocks", b.Metadata.Name).
		SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
}

// ipamHandle returns the metadata of an IPAMHandle, nil if there is none.
func ipamHandle(t *testing.T, c *lab.Cluster, name string) *metav1.ObjectMeta {
	t.Helper()
	data, err := c.Client().CoreV1().RESTClient().Get().AbsPath(calicoAPI, "ipamhandles", name).DoRaw(testContext(t))
	if apierrors.IsNotFound(err) {
		return nil
	}
	must.Do(t, err)
	var is struct{ Metadata metav1.ObjectMeta }
	must.Do(t, json.Unmarshal(data, &is))
	return &is.Metadata
}

// deleteHandle deletes an IPAMHandle, unless it is another one by now or has changed.
func deleteHandle(ctx context.Context, c *lab.Cluster, name string, uid types.UID, version string) error {
	return c.Client().CoreV1().RESTClient().Delete().AbsPath(calicoAPI, "ipamhandles", name).
		Body(&metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}}).
		Do(ctx).Error()
}

// freeByHand frees an address as calicoctl ipam release does: whoever has it.
func freeByHand(t *testing.T, c *lab.Cluster, addr netip.Addr) {
	t.Helper()
	b := blockOf(t, c, addr)
	handle := b.of(addr).Handle
	b.free(addr)
	must.Do(t, b.put(testContext(t), c))
	is := ipamHandle(t, c, handle)
	must.Do(t, deleteHandle(testContext(t), c, handle, is.UID, is.ResourceVersion))
}

// forceDelete deletes a pod at once, whatever its kubelet does.
func forceDelete(t *testing.T, c *lab.Cluster, pod *corev1.Pod) {
	t.Helper()
	kubectl(t, c, "delete", "pod", pod.Name, "-n", pod.Namespace, "--force", "--grace-period=0")
}

// stays checks that something remains true for a time.
func stays(t *testing.T, what string, d time.Duration, ok func() bool) {
	t.Helper()
	for began := time.Now(); time.Since(began) < d; time.Sleep(time.Second) {
		if !ok() {
			t.Fatalf("after %v no longer: %s", time.Since(began).Round(time.Second), what)
		}
	}
}
