package calico

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// LabelPool is the label of an IPReservation with the name of the PodIPPool that it is for.
const LabelPool = "stayput.io/pool"

// reservationPrefix begins the names of IPReservations that are for pools. What follows is the name of the pool, whose
// subnet it is, or SinglePrefix and the name of the PodIP of an address.
const (
	reservationPrefix = "stayput-"
	SinglePrefix      = "ip-"
)

// ReserveSettles is how long after the reservation of a subnet an ADD may still be under way that has not seen it: the
// plugin waits for its lock, and then up to 90 s (cni-plugin/pkg/ipamplugin).
const ReserveSettles = 2 * time.Minute

// ipPool is what matters of an IPPool.
type ipPool struct {
	name string
	Spec struct {
		CIDR        netip.Prefix `json:"cidr"`
		BlockSize   int          `json:"blockSize"`
		Disabled    bool         `json:"disabled"`
		AllowedUses []string     `json:"allowedUses"`
	}
}

// size returns the prefix length of the pool's blocks: Calico's defaults are those of its definition of IPPools.
func (p *ipPool) size() int {
	switch {
	case p.Spec.BlockSize != 0:
		return p.Spec.BlockSize
	case p.Spec.CIDR.Addr().Is4():
		return 26
	}
	return 122
}

func (i *IPAM) list(ctx context.Context, gv schema.GroupVersion, kind string) ([]unstructured.Unstructured, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(gv.WithKind(kind + "List"))
	if err := i.client.List(ctx, list); err != nil {
		return nil, fmt.Errorf("listing %ss of %s: %w", kind, gv.Group, err)
	}
	return list.Items, nil
}

func (i *IPAM) ipPools(ctx context.Context, gv schema.GroupVersion) (all []ipPool, err error) {
	items, err := i.list(ctx, gv, "IPPool")
	if err != nil {
		return nil, err
	}
	for n := range items {
		p := ipPool{name: items[n].GetName()}
		if err := decode(&items[n], &p.Spec); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// blockSize returns the prefix length of the block of an address.
func (i *IPAM) blockSize(ctx context.Context, gv schema.GroupVersion, a netip.Addr) (int, error) {
	i.mu.Lock()
	known := i.pools
	i.mu.Unlock()
	find := func(pools []ipPool) int {
		for n := range pools {
			if pools[n].Spec.CIDR.Contains(a) {
				return pools[n].size()
			}
		}
		return 0
	}
	if size := find(known); size != 0 { // it never changes while the pool is used
		return size, nil
	}
	pools, err := i.ipPools(ctx, gv)
	if err != nil {
		return 0, err
	}
	if size := find(pools); size != 0 {
		return size, nil
	}
	return 0, fmt.Errorf("%s is in no IPPool of Calico", a)
}

// Config is what the cluster's Calico says of pools.
type Config struct {
	// Kinds are those of the objects that say it.
	Kinds        []schema.GroupVersionKind
	gv           schema.GroupVersion
	pools        []ipPool
	reservations []unstructured.Unstructured
	strict       bool // strictAffinity: a node assigns addresses of its own blocks only
	cooldown     bool // ipCooldownSeconds: an address that was released stays allocated, to no pod; from Calico 3.33 on
	locked       bool // the datastore is being migrated
}

// Read reads the configuration of Calico.
func (i *IPAM) Read(ctx context.Context) (*Config, error) {
	gv, locked, err := i.discover(ctx)
	if err != nil {
		return nil, err
	}
	i.mu.Lock()
	i.gv, i.locked = gv, locked
	i.mu.Unlock()
	c := &Config{gv: gv, locked: locked}
	if c.pools, err = i.ipPools(ctx, gv); err != nil {
		return nil, err
	}
	if c.reservations, err = i.list(ctx, gv, "IPReservation"); err != nil {
		return nil, err
	}
	kind := "IPAMConfig"
	if gv.Group == "projectcalico.org" {
		kind = "IPAMConfiguration"
	}
	config := object(gv, kind, "default")
	if err := i.client.Get(ctx, client.ObjectKeyFromObject(config), config); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading %s default: %w", kind, err)
	}
	c.strict, _, _ = unstructured.NestedBool(config.Object, "spec", "strictAffinity")
	cooldown, _, _ := unstructured.NestedInt64(config.Object, "spec", "ipCooldownSeconds")
	c.cooldown = cooldown > 0
	for _, kind := range []string{"IPPool", "IPReservation", kind, "ClusterInformation"} {
		c.Kinds = append(c.Kinds, gv.WithKind(kind))
	}
	i.mu.Lock()
	i.pools = c.pools
	i.mu.Unlock()
	return c, nil
}

// Refuses says why a subnet cannot be that of a pool, and what to do; empty if it can.
func (c *Config) Refuses(subnet netip.Prefix) string {
	var in []string
	var of ipPool
	for _, p := range c.pools {
		if p.Spec.CIDR.Overlaps(subnet) {
			in, of = append(in, p.name), p
		}
	}
	slices.Sort(in)
	switch {
	case c.locked:
		return "Calico's datastore is locked (ClusterInformation default, spec.datastoreReady): wait until it is migrated"
	case len(in) == 0:
		return fmt.Sprintf("no IPPool of Calico has %s: use a subnet of one, or create an IPPool", subnet)
	case len(in) > 1:
		return fmt.Sprintf("the IPPools %s of Calico have addresses of %s: use a subnet of one", strings.Join(in, " and "),
			subnet)
	case !of.Spec.CIDR.Contains(subnet.Addr()) || of.Spec.CIDR.Bits() > subnet.Bits():
		return fmt.Sprintf("%s is not within IPPool %s of Calico, %s", subnet, of.name, of.Spec.CIDR)
	case of.Spec.Disabled:
		return fmt.Sprintf("IPPool %s of Calico is disabled (spec.disabled)", of.name)
	case len(of.Spec.AllowedUses) > 0 && !slices.Contains(of.Spec.AllowedUses, "Workload"):
		return fmt.Sprintf("IPPool %s of Calico is not for pods (spec.allowedUses has no Workload)", of.name)
	case subnet.Bits() > of.size():
		return fmt.Sprintf("%s is a part of a block of IPPool %s of Calico: use a subnet of whole blocks, which are /%d",
			subnet, of.name, of.size())
	case c.strict:
		return "Calico's IPAM has strictAffinity, by which a pod cannot take its address to another node: set it to false"
	case c.cooldown:
		return "Calico's IPAM has ipCooldownSeconds, by which no pod can have its address back at once: set it to 0"
	}
	return ""
}

// Reserved returns since when a reservation of this name has been that of a subnet, the zero time if none is.
func (c *Config) Reserved(name string, subnet netip.Prefix) time.Time {
	o := c.reservation(name)
	if o == nil || o.GetDeletionTimestamp() != nil {
		return time.Time{}
	}
	cidrs, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "reservedCIDRs")
	if !slices.Contains(cidrs, subnet.String()) {
		return time.Time{}
	}
	return o.GetCreationTimestamp().Time
}

func (c *Config) reservation(name string) *unstructured.Unstructured {
	i := slices.IndexFunc(c.reservations, func(o unstructured.Unstructured) bool {
		return o.GetName() == reservationPrefix+name
	})
	if i < 0 {
		return nil
	}
	return &c.reservations[i]
}

// Reservations returns the names of the reservations that are for pools.
func (c *Config) Reservations() (names []string) {
	for n := range c.reservations {
		name, ours := strings.CutPrefix(c.reservations[n].GetName(), reservationPrefix)
		if ours && c.reservations[n].GetLabels()[LabelPool] != "" {
			names = append(names, name)
		}
	}
	return names
}

// Reserve reserves a subnet for a pool, under a name. A reservation of the name that says something else is replaced,
// so that its time tells when this subnet was reserved.
func (i *IPAM) Reserve(ctx context.Context, c *Config, name, pool string, subnet netip.Prefix) error {
	if c.reservation(name) != nil {
		if err := i.Unreserve(ctx, c, name); err != nil {
			return err
		}
	}
	o := object(c.gv, "IPReservation", reservationPrefix+name)
	o.SetLabels(map[string]string{LabelPool: pool, "app.kubernetes.io/managed-by": "stayput"})
	if err := unstructured.SetNestedStringSlice(o.Object, []string{subnet.String()}, "spec", "reservedCIDRs"); err != nil {
		return err
	}
	if err := i.client.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("reserving %s for pool %s: %w", subnet, pool, err)
	}
	return nil
}

// Unreserve takes the reservation of a name back.
func (i *IPAM) Unreserve(ctx context.Context, c *Config, name string) error {
	err := i.client.Delete(ctx, object(c.gv, "IPReservation", reservationPrefix+name))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting IPReservation %s: %w", reservationPrefix+name, err)
	}
	return nil
}
