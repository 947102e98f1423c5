package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/pool"
)

// adoption is an import into pools: for each SpiderIPPool a PodIPPool, because Spiderpool deletes its own when it is
// uninstalled, and a PodIP for each address with which a pod runs.
type adoption struct {
	pools map[string]*pooled
	// What there is.
	pods       map[string]*corev1.Pod // by namespace/name
	uids       map[string]bool
	namespaces map[string]map[string]string // their annotations
	taken      map[netip.Addr]*stayputv1alpha1.PodIP

	items []adopted
}

// pooled is a SpiderIPPool, and what becomes of it.
type pooled struct {
	inspection.ImportPool
	theirs *spiderpoolv2beta1.SpiderIPPool
	spec   stayputv1alpha1.PodIPPoolSpec
}

// adopted is an address, and what becomes of it.
type adopted struct {
	inspection.ImportItem
	ip *stayputv1alpha1.PodIP
}

// importIntoPools plans the import, and carries it out. The addresses come first: a pool would give an address that
// is not taken over by then to another pod.
func importIntoPools(ctx context.Context, k client.Client, act bool) (done *inspection.Import, failed, err error) {
	a, err := planAdoption(ctx, k)
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	if act {
		errs = a.create(ctx, k)
		a.judgePools()
		for _, name := range slices.Sorted(maps.Keys(a.pools)) {
			p := a.pools[name]
			if p.Action != inspection.ActionCreate {
				continue
			}
			o := &stayputv1alpha1.PodIPPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: p.spec}
			if err := k.Create(ctx, o); err != nil {
				errs = append(errs, fmt.Errorf("creating PodIPPool %s: %w", name, err))
				continue
			}
			p.Done = true
		}
	}
	done = a.done()
	for _, name := range slices.Sorted(maps.Keys(a.pools)) {
		done.Pools = append(done.Pools, a.pools[name].ImportPool)
	}
	return done, errors.Join(errs...), nil
}

// create makes the PodIPs, and refuses those that cannot be made.
func (a *adoption) create(ctx context.Context, k client.Client) (errs []error) {
	for i := range a.items {
		item := &a.items[i]
		if item.Action != inspection.ActionAdopt {
			continue
		}
		if err := k.Create(ctx, item.ip); err != nil {
			errs = append(errs, fmt.Errorf("creating PodIP %s: %w", item.ip.Name, err))
			item.Action, item.Why = inspection.ActionRefuse, err.Error()
			continue
		}
		item.Done = true
	}
	return errs
}

// done is what is printed of the addresses.
func (a *adoption) done() *inspection.Import {
	done := &inspection.Import{Items: []inspection.ImportItem{}}
	for _, item := range a.items {
		done.Items = append(done.Items, item.ImportItem)
	}
	return done
}

// planAdoption reads what there is, and says what becomes of it.
func planAdoption(ctx context.Context, k client.Client) (*adoption, error) {
	a := &adoption{pools: map[string]*pooled{}, pods: map[string]*corev1.Pod{}, uids: map[string]bool{},
		namespaces: map[string]map[string]string{}, taken: map[netip.Addr]*stayputv1alpha1.PodIP{}}
	var theirs spiderpoolv2beta1.SpiderIPPoolList
	if err := k.List(ctx, &theirs); err != nil {
		return nil, fmt.Errorf("listing SpiderIPPools: %w", err)
	}
	var ours stayputv1alpha1.PodIPPoolList
	if err := errors.Join(k.List(ctx, &ours), a.readTaken(ctx, k)); err != nil {
		if meta.IsNoMatchError(err) {
			err = fmt.Errorf("PodIPPools are not installed in this cluster: install stayput with pools.enabled (%w)", err)
		}
		return nil, err
	}
	reserved, err := reservedIPs(ctx, k)
	if err != nil {
		return nil, err
	}
	// Pods are listed after their addresses, so that a pod that is missing is gone.
	var endpoints []func()
	err = eachEndpoint(ctx, k, func(ns, name string, e *spiderEndpoint) {
		endpoints = append(endpoints, func() { a.addEndpoint(ns, name, e) })
	})
	if err != nil {
		return nil, err
	}
	if err := a.readPods(ctx, k); err != nil {
		return nil, err
	}
	for i := range theirs.Items {
		there := slices.ContainsFunc(ours.Items, func(o stayputv1alpha1.PodIPPool) bool {
			return o.Name == theirs.Items[i].Name
		})
		a.addPool(&theirs.Items[i], there, reserved)
	}
	for _, add := range endpoints {
		add()
	}
	slices.SortStableFunc(a.items, func(x, y adopted) int {
		if c := strings.Compare(x.Namespace, y.Namespace); c != 0 {
			return c
		}
		return comparePods(x.Pod, y.Pod)
	})
	a.judgePools()
	return a, nil
}

// readTaken reads which addresses have PodIPs.
func (a *adoption) readTaken(ctx context.Context, k client.Client) error {
	var ips stayputv1alpha1.PodIPList
	err := k.List(ctx, &ips)
	for i := range ips.Items {
		if addr, err := stayputv1alpha1.ParsePodIPName(ips.Items[i].Name); err == nil {
			a.taken[addr] = &ips.Items[i]
		}
	}
	return err
}

func (a *adoption) readPods(ctx context.Context, k client.Client) error {
	var pods corev1.PodList
	var namespaces corev1.NamespaceList
	if err := errors.Join(k.List(ctx, &pods), k.List(ctx, &namespaces)); err != nil {
		return err
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		a.pods[pod.Namespace+"/"+pod.Name], a.uids[string(pod.UID)] = pod, true
	}
	for i := range namespaces.Items {
		a.namespaces[namespaces.Items[i].Name] = namespaces.Items[i].Annotations
	}
	return nil
}

// reservedIPs returns the addresses that Spiderpool gives to no pod, even if a pool of its has them.
func reservedIPs(ctx context.Context, k client.Client) (all []string, err error) {
	var list unstructured.UnstructuredList
	list.SetGroupVersionKind(spiderpoolv2beta1.SchemeGroupVersion.WithKind("SpiderReservedIPList"))
	if err := k.List(ctx, &list); err != nil {
		if meta.IsNoMatchError(err) {
			return nil, nil
		}
		return nil, err
	}
	for i := range list.Items {
		ips, _, err := unstructured.NestedStringSlice(list.Items[i].Object, "spec", "ips")
		if err != nil {
			return nil, fmt.Errorf("SpiderReservedIP %s: %w", list.Items[i].GetName(), err)
		}
		all = append(all, ips...)
	}
	return all, nil
}

// addPool says what becomes of a SpiderIPPool, as far as that does not depend on its addresses.
func (a *adoption) addPool(o *spiderpoolv2beta1.SpiderIPPool, there bool, reserved []string) {
	p := &pooled{ImportPool: inspection.ImportPool{Name: o.Name, Subnet: o.Spec.Subnet, Action: inspection.ActionCreate},
		theirs: o}
	a.pools[o.Name] = p
	var err error
	if p.spec, err = o.PodIPPoolSpec(); err == nil {
		p.spec.ExcludedAddresses = slices.Concat(p.spec.ExcludedAddresses, reserved)
		_, err = pool.Parse(p.spec)
	}
	switch {
	case there:
		p.Action, p.Why = inspection.ActionNone, "a PodIPPool of this name already exists"
	case err != nil:
		p.Action, p.Why = inspection.ActionRefuse, err.Error()
	case o.Spec.Default != nil && *o.Spec.Default:
		p.Why = "spec.default is not supported: only pods that request the pool get its addresses"
	}
}

// addEndpoint says what becomes of the addresses of a SpiderEndpoint.
func (a *adoption) addEndpoint(ns, name string, e *spiderEndpoint) {
	for _, ip := range e.Status.Current.IPs {
		for _, of := range []struct{ text, pool string }{{ip.IPv4, ip.IPv4Pool}, {ip.IPv6, ip.IPv6Pool}} {
			if of.text == "" {
				continue
			}
			item := adopted{ImportItem: inspection.ImportItem{Namespace: ns, Pod: name, Interface: ip.Interface, Pool: of.pool,
				Node: e.Status.Current.Node, IPs: []netip.Addr{}, Action: inspection.ActionAdopt}}
			a.judge(&item, of.text, e)
			a.items = append(a.items, item)
		}
	}
}

// judge says what becomes of an address.
func (a *adoption) judge(item *adopted, text string, e *spiderEndpoint) {
	end := func(action inspection.Action, format string, args ...any) {
		item.Action, item.Why = action, fmt.Sprintf(format, args...)
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		end(inspection.ActionRefuse, "its address %q is not valid: expected an address such as 10.6.0.10/16", text)
		return
	}
	addr := prefix.Addr().Unmap()
	item.IPs = []netip.Addr{addr}
	pod, of, p := a.pods[item.Namespace+"/"+item.Pod], a.pools[item.Pool], a.taken[addr]
	switch {
	case pod == nil || string(pod.UID) != e.Status.Current.UID:
		end(inspection.ActionNone, "the pod does not exist: no pod has the address")
	case pod.Spec.NodeName == "":
		end(inspection.ActionNone, "the pod has no node yet: no pod has the address")
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		end(inspection.ActionNone, "the pod has terminated: no pod has the address")
	case p != nil && p.Spec.PodUID == string(pod.UID):
		end(inspection.ActionNone, "already taken over")
	case p != nil:
		end(inspection.ActionRefuse, "the address belongs to pod %s/%s", p.Spec.Namespace, p.Spec.PodName)
	case of == nil:
		end(inspection.ActionRefuse, "SpiderIPPool %s does not exist", orNone(item.Pool))
	case of.Action == inspection.ActionRefuse:
		end(inspection.ActionRefuse, "its pool is refused: %s", of.Why)
	}
	if item.Action != inspection.ActionAdopt {
		return
	}
	wants, err := pool.Asks(pod.Annotations, a.namespaces[item.Namespace], true)
	if err != nil {
		item.Why = err.Error()
	} else if !slices.ContainsFunc(wants, func(w pool.Want) bool {
		return w.Interface == item.Interface && slices.Contains(w.Pools, item.Pool)
	}) {
		item.Why = "the pod does not request this pool: its successor will get another address"
	}
	item.ip = podIPOf(pod, item, stayputv1alpha1.ModeL2)
	item.Retention = item.ip.Spec.Retention
	a.taken[addr] = item.ip
}

// podIPOf returns the PodIP of an address with which a pod runs. How long it is kept the controller will know better,
// once it has told the pod of it, or its successor.
func podIPOf(pod *corev1.Pod, item *adopted, mode stayputv1alpha1.PodIPPoolMode) *stayputv1alpha1.PodIP {
	ip := &stayputv1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPName(item.IPs[0]),
			Finalizers: []string{stayputv1alpha1.FinalizerInUse}},
		Spec: stayputv1alpha1.PodIPSpec{
			Pool: item.Pool, Mode: mode, Namespace: pod.Namespace, PodName: pod.Name, PodUID: string(pod.UID),
			Identity: pod.Annotations[stayputv1alpha1.AnnotationIdentity], Interface: item.Interface,
			AdoptedOn: pod.Spec.NodeName,
		},
	}
	owner := metav1.GetControllerOf(pod)
	if set, _, numbered := home.SplitOrdinal(pod.Name); owner != nil && numbered && set == owner.Name {
		ip.Spec.Retention = stayputv1alpha1.RetentionWhileOwned
		ip.Spec.WhenScaled, ip.Spec.WhenDeleted = stayputv1alpha1.PolicyRelease, stayputv1alpha1.PolicyRelease
		ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: owner.APIVersion, Kind: owner.Kind,
			Name: owner.Name, UID: string(owner.UID)}
	}
	return ip
}

// judgePools refuses the pools that would give away an address with which a pod runs.
func (a *adoption) judgePools() {
	for _, name := range slices.Sorted(maps.Keys(a.pools)) {
		p := a.pools[name]
		if p.Action != inspection.ActionCreate {
			continue
		}
		for _, item := range a.items {
			if item.Pool == name && item.Action == inspection.ActionRefuse {
				p.Action, p.Why = inspection.ActionRefuse, fmt.Sprintf("an address of pod %s/%s cannot be taken over",
					item.Namespace, item.Pod)
			}
		}
		if text := p.theirs.Status.AllocatedIPs; text != nil && p.Action == inspection.ActionCreate {
			p.judgeAllocated(*text, a)
		}
	}
}

// judgeAllocated refuses a pool if Spiderpool has given an address of it to a pod that exists, and no SpiderEndpoint
// says so.
func (p *pooled) judgeAllocated(text string, a *adoption) {
	var allocated map[string]struct {
		Pod string `json:"pod"`
		UID string `json:"podUid"`
	}
	if text == "" {
		return
	}
	if err := json.Unmarshal([]byte(text), &allocated); err != nil {
		p.Action, p.Why = inspection.ActionRefuse, "status.allocatedIPs: "+err.Error()
		return
	}
	for _, ip := range slices.Sorted(maps.Keys(allocated)) {
		addr, err := netip.ParseAddr(ip)
		if of := allocated[ip]; err != nil || a.uids[of.UID] && a.taken[addr.Unmap()] == nil {
			p.Action, p.Why = inspection.ActionRefuse, fmt.Sprintf("Spiderpool has assigned %s to pod %s, "+
				"but no SpiderEndpoint has it", ip, of.Pod)
			return
		}
	}
}
