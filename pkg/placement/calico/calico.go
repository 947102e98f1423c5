// Package calico speaks to Calico's IPAM by its objects in the API server, for pools of mode Calico: it reserves their
// subnets, and tells who has an address.
//
// The objects are those of Calico 3.31: libcalico-go/lib/backend/model/block.go and lib/ipam/ipam_block.go say what
// their fields mean. They are in the API group crd.projectcalico.org or, where Calico uses native definitions, in
// projectcalico.org, with the same fields.
//
//	calico.go  who has an address, and how it is freed
//	pools.go   whether a subnet can be a pool's, and its reservation
package calico

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/pool"
)

// AnnotationAddresses asks Calico's CNI plugin for addresses: a list of one of each family, in JSON.
const AnnotationAddresses = "cni.projectcalico.org/ipAddrs"

// ErrNotServed says that the cluster has no Calico IPAM in this API server: Calico is not installed, or its datastore
// is an etcd of its own.
var ErrNotServed = errors.New("the API server serves no IPAMBlocks of Calico")

// ErrLocked says that Calico's objects are being moved to the other API group: who has an address is not known until
// one of the groups says that it is ready.
var ErrLocked = errors.New("Calico's datastore is locked")

// groups are where Calico's objects may be. If both are served, the second one is a view of the first, or the first one
// is what an upgrade has left: see [IPAM.discover].
var groups = []schema.GroupVersion{
	{Group: "crd.projectcalico.org", Version: "v1"}, {Group: "projectcalico.org", Version: "v3"},
}

// IPAM is Calico's IPAM. Its methods read past all caches, and are safe for concurrent use. Their errors mean that
// nothing is known.
type IPAM struct {
	client client.Client
	// serves reports whether the API server serves a kind: the error is ErrNotServed of package cluster if it does not.
	serves func(schema.GroupVersionKind) (bool, error)
	now    func() time.Time

	mu     sync.Mutex
	gv     schema.GroupVersion
	locked bool
	pools  []ipPool // as they were read last
}

// New returns the IPAM of a cluster. The client must not read from a cache. serves asks the API server.
func New(live client.Client, serves func(schema.GroupVersionKind) (bool, error), now func() time.Time) *IPAM {
	return &IPAM{client: live, serves: serves, now: now}
}

// ErrUnread says that the API group is not known: [IPAM.Read] has not succeeded yet.
var ErrUnread = errors.New("Calico's configuration has not been read yet")

// group returns the API group of the objects, as it was read last.
func (i *IPAM) group() (schema.GroupVersion, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.gv.Empty():
		return i.gv, ErrUnread
	case i.locked:
		return i.gv, ErrLocked
	}
	return i.gv, nil
}

// discover finds the API group of the objects. An upgrade of Calico may move them to the other one
// (kube-controllers/pkg/controllers/migration, from Calico 3.32 on): it locks both groups, copies the objects, and
// unlocks the second one. The first one stays locked until it is deleted, object by object. So of two groups that are
// served, the one counts that says it is ready; if none does, the datastore is locked.
func (i *IPAM) discover(ctx context.Context) (gv schema.GroupVersion, locked bool, err error) {
	var silent bool
	for _, group := range groups {
		served, err := i.serves(group.WithKind("IPAMBlock"))
		if err != nil {
			return gv, false, fmt.Errorf("looking for Calico's IPAM: %w", err)
		}
		if !served {
			continue
		}
		ready, says, err := i.ready(ctx, group)
		if err != nil || ready {
			return group, false, err
		}
		if silent = gv.Empty() && !says; gv.Empty() {
			gv = group
		}
	}
	if gv.Empty() {
		return gv, false, ErrNotServed
	}
	return gv, !silent, nil
}

// ready reports whether Calico may be used, by an API group that has its objects, and whether that group says so.
func (i *IPAM) ready(ctx context.Context, gv schema.GroupVersion) (is, says bool, err error) {
	info := object(gv, "ClusterInformation", "default")
	if err := i.client.Get(ctx, client.ObjectKeyFromObject(info), info); client.IgnoreNotFound(err) != nil {
		return false, false, fmt.Errorf("reading ClusterInformation default: %w", err)
	}
	is, says, _ = unstructured.NestedBool(info.Object, "spec", "datastoreReady")
	return is, says, nil
}

func object(gv schema.GroupVersion, kind, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(gv.WithKind(kind))
	o.SetName(name)
	return o
}

// block is what matters of the spec of an IPAMBlock.
type block struct {
	CIDR        netip.Prefix `json:"cidr"`
	Allocations []*int       `json:"allocations"` // an index into Attributes for each address, nil if it is free
	Attributes  []struct {
		Handle    string            `json:"handle_id"`
		Secondary map[string]string `json:"secondary"`
	} `json:"attributes"`
	Deleted bool `json:"deleted"`
}

func blockOf(o *unstructured.Unstructured) (b block, err error) { return b, decode(o, &b) }

// decode reads what matters of the spec of an object.
func decode(o *unstructured.Unstructured, spec any) error {
	text, err := json.Marshal(o.Object["spec"])
	if err == nil {
		err = json.Unmarshal(text, spec)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}

// allocation returns who has the address at an ordinal of the block, of this version.
func (b *block) allocation(ordinal int, version string, at time.Time) (a pool.Allocation, err error) {
	a.At = at
	if ordinal >= len(b.Allocations) {
		return a, fmt.Errorf("IPAMBlock %s has %d addresses, not more than %d", b.CIDR, len(b.Allocations), ordinal)
	}
	index := b.Allocations[ordinal]
	if index == nil {
		return a, nil
	}
	if *index < 0 || *index >= len(b.Attributes) {
		return a, fmt.Errorf("IPAMBlock %s has no attributes %d", b.CIDR, *index)
	}
	is := b.Attributes[*index]
	a.Version, a.Handle = version, is.Handle
	if a.Handle == "" { // addresses may be allocated without a handle
		a.Handle = "none"
	}
	a.Namespace, a.Pod, a.Node = is.Secondary["namespace"], is.Secondary["pod"], is.Secondary["node"]
	return a, nil
}

// Observe returns who has an address of a range. Without a block no one has.
func (i *IPAM) Observe(ctx context.Context, a netip.Addr) (pool.Allocation, error) {
	_, is, err := i.observe(ctx, a)
	return is, err
}

func (i *IPAM) observe(ctx context.Context, a netip.Addr) (*unstructured.Unstructured, pool.Allocation, error) {
	gv, err := i.group()
	if err != nil {
		return nil, pool.Allocation{}, err
	}
	size, err := i.blockSize(ctx, gv, a)
	if err != nil {
		return nil, pool.Allocation{}, err
	}
	at := i.now() // before it is read
	o := object(gv, "IPAMBlock", nameOf(netip.PrefixFrom(a, size).Masked()))
	switch err := i.client.Get(ctx, client.ObjectKeyFromObject(o), o); {
	// That the definition of blocks is gone says nothing of the block.
	case apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		return nil, pool.Allocation{At: at}, nil
	case err != nil:
		return nil, pool.Allocation{}, fmt.Errorf("reading IPAMBlock %s: %w", o.GetName(), err)
	}
	b, err := blockOf(o)
	if err != nil || b.Deleted {
		return nil, pool.Allocation{At: at}, err
	}
	is, err := b.allocation(ordinal(b.CIDR, a), o.GetResourceVersion(), at)
	return o, is, err
}

// ordinal returns the place of an address in a block, which has at most 2^31 addresses.
func ordinal(in netip.Prefix, a netip.Addr) int {
	first, is := in.Addr().AsSlice(), a.AsSlice()
	n := 0
	for i := range is {
		n = n<<8 + int(is[i]) - int(first[i])
	}
	return n
}

// nameOf returns the name of the IPAMBlock of a CIDR (libcalico-go/lib/names/cidr.go).
func nameOf(p netip.Prefix) string {
	return strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(p.String())
}

// Allocated returns the addresses of a prefix that pods have, or anything else.
func (i *IPAM) Allocated(ctx context.Context, in netip.Prefix) (map[netip.Addr]pool.Allocation, error) {
	gv, err := i.group()
	if err != nil {
		return nil, err
	}
	at := i.now()
	items, err := i.list(ctx, gv, "IPAMBlock")
	if err != nil {
		return nil, err
	}
	all := map[netip.Addr]pool.Allocation{}
	for n := range items {
		o := &items[n]
		b, err := blockOf(o)
		if err != nil {
			return nil, err
		}
		if b.Deleted || !in.Overlaps(b.CIDR) {
			continue
		}
		a := b.CIDR.Addr()
		for ordinal := range b.Allocations {
			is, err := b.allocation(ordinal, o.GetResourceVersion(), at)
			if err != nil {
				return nil, err
			}
			if is.Handle != "" && in.Contains(a) {
				all[a] = is
			}
			a = a.Next()
		}
	}
	return all, nil
}

// Free frees an address. It fails with a conflict if anything of its block has changed since it was observed. What is
// left of the handle is no proof that an address is in use, and Calico ends such handles itself: if it cannot be
// deleted, that is no error.
func (i *IPAM) Free(ctx context.Context, a netip.Addr, was pool.Allocation) error {
	o, is, err := i.observe(ctx, a)
	if err != nil {
		return err
	}
	if o == nil || is.Handle != was.Handle || is.Version != was.Version {
		return apierrors.NewConflict(schema.GroupResource{Resource: "ipamblocks"}, a.String(), pool.ErrStale)
	}
	b, err := blockOf(o)
	if err != nil {
		return err
	}
	gv := o.GroupVersionKind().GroupVersion()
	if ready, says, err := i.ready(ctx, gv); err != nil || says && !ready { // a copy of the block would keep the address
		return errors.Join(ErrLocked, err)
	}
	n := ordinal(b.CIDR, a)
	if err := release(o, n); err != nil {
		return fmt.Errorf("IPAMBlock %s: %w", o.GetName(), err)
	}
	if err := i.client.Update(ctx, o); err != nil {
		return fmt.Errorf("freeing %s in IPAMBlock %s: %w", a, o.GetName(), err)
	}
	handle := object(gv, "IPAMHandle", strings.ToLower(was.Handle))
	if err := i.client.Get(ctx, client.ObjectKeyFromObject(handle), handle); err != nil {
		return nil
	}
	blocks, _, _ := unstructured.NestedMap(handle.Object, "spec", "block")
	if len(blocks) > 1 { // it has addresses of another family, too
		return nil
	}
	uid, version := handle.GetUID(), handle.GetResourceVersion()
	_ = i.client.Delete(ctx, handle, client.Preconditions{UID: &uid, ResourceVersion: &version})
	return nil
}

// release frees the address at an ordinal, as libcalico-go's allocationBlock.release does. Of the block nothing else
// changes: fields that this package does not know stay as they are.
func release(o *unstructured.Unstructured, ordinal int) error {
	spec, ok := o.Object["spec"].(map[string]any)
	if !ok {
		return errors.New("it has no spec")
	}
	allocations, _ := spec["allocations"].([]any)
	attributes, _ := spec["attributes"].([]any)
	if ordinal >= len(allocations) {
		return fmt.Errorf("it has %d addresses", len(allocations))
	}
	index, ok := allocations[ordinal].(int64)
	if !ok || index < 0 || int(index) >= len(attributes) {
		return fmt.Errorf("its allocation %d has no attributes", ordinal)
	}
	allocations[ordinal] = nil
	if !slices.Contains(allocations, any(index)) { // nothing else has these attributes
		attributes = slices.Delete(attributes, int(index), int(index)+1)
		for n, other := range allocations {
			if i, ok := other.(int64); ok && i > index {
				allocations[n] = i - 1
			}
		}
	}
	unallocated, _ := spec["unallocated"].([]any)
	spec["allocations"], spec["attributes"] = allocations, attributes
	spec["unallocated"] = append(unallocated, int64(ordinal))
	if numbers, ok := spec["sequenceNumberForAllocation"].(map[string]any); ok {
		delete(numbers, strconv.Itoa(ordinal))
	}
	// It counts the writes of the block, and may be above what a float64 holds.
	if n, ok := spec["sequenceNumber"].(int64); ok {
		spec["sequenceNumber"] = n + 1
	}
	return nil
}
