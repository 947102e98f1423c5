package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/pool"
)

const (
	// singlesMost is how many addresses may be reserved one by one: Calico reads all reservations at each start of a pod.
	singlesMost = 100
	// confirmsWithin is how long the controller may take to find out that no other pod can get an address: two minutes
	// after it was reserved none can.
	confirmsWithin = 4 * time.Minute
)

// calicoImport is an import of addresses that Calico's IPAM has given to the pods of StatefulSets. Its PodIPs count
// once the controller has confirmed them by their status. It deletes those of pods that have lost their addresses.
type calicoImport struct {
	adoption
	into    []string                // pools, one for each family
	subnets map[string]netip.Prefix // of all pools
	ipPools []netip.Prefix          // of Calico
}

// setsNamed reads arguments such as statefulset/web.
func setsNamed(args []string) (names []string, err error) {
	for _, arg := range args {
		kind, name, _ := strings.Cut(strings.ToLower(arg), "/")
		if !slices.Contains([]string{"statefulset", "statefulsets", "sts"}, kind) || name == "" {
			return nil, fmt.Errorf("STATEFULSET: %q is not valid: expected statefulset/NAME. Pods of other workloads do not "+
				"come back under their names, so that no address can be theirs", arg)
		}
		names = append(names, name)
	}
	if names == nil {
		return nil, errors.New("STATEFULSET: expected statefulset/NAME")
	}
	return names, nil
}

// importFromCalico plans the import and, if it is to act, carries it out and waits until it counts.
func importFromCalico(ctx context.Context, c *cluster, sets, into []string, act bool, line *progress) (
	done *inspection.Import, failed, err error) {
	i := calicoImport{into: into, subnets: map[string]netip.Prefix{}}
	i.taken = map[netip.Addr]*stayputv1alpha1.PodIP{}
	if err := errors.Join(i.readPools(ctx, c), i.readTaken(ctx, c)); err != nil {
		return nil, nil, err
	}
	if err := i.addSets(ctx, c, sets); err != nil {
		return nil, nil, err
	}
	if act {
		failed = errors.Join(append(i.create(ctx, c), i.await(ctx, c, line))...)
	}
	return i.done(), failed, nil
}

func (i *calicoImport) readPools(ctx context.Context, k client.Client) error {
	all, err := pools(ctx, k)
	if err != nil {
		return err
	}
	lacks := map[string]string{}
	for n := range all {
		p := &all[n]
		i.subnets[p.Name], _ = netip.ParsePrefix(p.Spec.Subnet)
		ready := meta.FindStatusCondition(p.Status.Conditions, stayputv1alpha1.ConditionReady)
		switch {
		case p.Spec.Mode != stayputv1alpha1.ModeCalico:
			lacks[p.Name] = fmt.Sprintf("is of mode %s, not Calico", p.Spec.Mode)
		case ready == nil:
			lacks[p.Name] = "is not ready: no controller has reconciled it"
		case ready.Status != metav1.ConditionTrue:
			lacks[p.Name] = "is not ready: " + ready.Message
		}
	}
	for _, name := range i.into {
		subnet, exists := i.subnets[name]
		switch first := i.target(subnet.Addr()); {
		case !exists:
			return fmt.Errorf("--into: PodIPPool %s does not exist", name)
		case lacks[name] != "":
			return fmt.Errorf("--into: PodIPPool %s %s", name, lacks[name])
		case first != name:
			return fmt.Errorf("--into: PodIPPools %s and %s have addresses of the same family", first, name)
		}
	}
	theirs, err := ipPools(ctx, k)
	if err != nil || theirs == nil {
		return err
	}
	for n := range theirs.Items {
		cidr, _, _ := unstructured.NestedString(theirs.Items[n].Object, "spec", "cidr")
		disabled, _, _ := unstructured.NestedBool(theirs.Items[n].Object, "spec", "disabled")
		if p, err := netip.ParsePrefix(cidr); err == nil && !disabled {
			i.ipPools = append(i.ipPools, p)
		}
	}
	return nil
}

// target returns the pool that an address is to be of, empty if there is none for its family.
func (i *calicoImport) target(a netip.Addr) string {
	n := slices.IndexFunc(i.into, func(name string) bool { return i.subnets[name].Addr().Is4() == a.Is4() })
	if n < 0 {
		return ""
	}
	return i.into[n]
}

// poolOf returns the pool whose subnet has an address, empty if none has.
func (i *calicoImport) poolOf(a netip.Addr) string {
	for name, subnet := range i.subnets {
		if subnet.Contains(a) {
			return name
		}
	}
	return ""
}

// addSets says what becomes of the addresses of the pods of StatefulSets.
func (i *calicoImport) addSets(ctx context.Context, c *cluster, sets []string) error {
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.InNamespace(c.namespace)); err != nil {
		return err
	}
	slices.SortFunc(pods.Items, func(x, y corev1.Pod) int { return comparePods(x.Name, y.Name) })
	found := map[string]bool{}
	for n := range pods.Items {
		owner := metav1.GetControllerOf(&pods.Items[n])
		if owner != nil && owner.Kind == "StatefulSet" && slices.Contains(sets, owner.Name) {
			found[owner.Name] = true
			i.addPod(&pods.Items[n], owner.Name)
		}
	}
	for _, name := range sets {
		if !found[name] {
			return fmt.Errorf("StatefulSet %s/%s has no pods", c.namespace, name)
		}
	}
	singles := 0
	for a, p := range i.taken {
		if p.Spec.Mode == stayputv1alpha1.ModeCalico && i.poolOf(a) == "" {
			singles++
		}
	}
	if singles > singlesMost {
		return fmt.Errorf("%d addresses would be reserved one by one, which slows down each start of a pod: expected at "+
			"most %d. Import fewer at a time, and give up those that need not be kept", singles, singlesMost)
	}
	return nil
}

// addPod says what becomes of the addresses of a pod: all are taken over, or none is.
func (i *calicoImport) addPod(pod *corev1.Pod, set string) {
	item := adopted{ImportItem: inspection.ImportItem{Namespace: pod.Namespace, Pod: pod.Name, Node: pod.Spec.NodeName,
		Interface: pool.DefaultInterface, IPs: []netip.Addr{}, Action: inspection.ActionRefuse}}
	for _, ip := range pod.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			item.IPs = append(item.IPs, a)
		}
	}
	of, _, numbered := home.SplitOrdinal(pod.Name)
	_, told := pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	switch {
	case told:
		item.Action, item.Why = inspection.ActionNone, "it has addresses of pools already"
	case pod.Spec.HostNetwork:
		item.Why = "it has the addresses of its node (hostNetwork)"
	case pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning || len(item.IPs) == 0:
		item.Why = "it does not run: import again once it does"
	case !numbered || of != set:
		item.Why = "no pod of this name will be created again"
	}
	for _, a := range item.IPs {
		if item.Why == "" {
			i.judgeOne(&item, pod, a)
		}
	}
	if item.Why != "" {
		i.items = append(i.items, item)
		return
	}
	for _, a := range item.IPs {
		one := item
		one.Pool, one.IPs, one.Action = i.target(a), []netip.Addr{a}, inspection.ActionAdopt
		one.ip = podIPOf(pod, &one, stayputv1alpha1.ModeCalico)
		one.Retention = one.ip.Spec.Retention
		i.taken[a] = one.ip
		i.items = append(i.items, one)
	}
}

// judgeOne says why an address of a pod is not taken over, if it is not.
func (i *calicoImport) judgeOne(item *adopted, pod *corev1.Pod, a netip.Addr) {
	switch p, in, to := i.taken[a], i.poolOf(a), i.target(a); {
	case p != nil && p.Spec.PodUID == string(pod.UID):
		item.Action, item.Why = inspection.ActionNone, "already taken over"
	case p != nil:
		item.Why = fmt.Sprintf("%s belongs to pod %s/%s", a, p.Spec.Namespace, p.Spec.PodName)
	case to == "":
		item.Why = fmt.Sprintf("--into names no pool of the family of %s, without which the next pod would be", a)
	case in != "" && in != to:
		item.Why = fmt.Sprintf("%s is in the subnet of PodIPPool %s", a, in)
	case !slices.ContainsFunc(i.ipPools, func(p netip.Prefix) bool { return p.Contains(a) }):
		item.Why = fmt.Sprintf("%s is in no IPPool of Calico, or in one that is disabled", a)
	}
}

// await waits until the controller has confirmed the PodIPs that were made, and refuses those that it has deleted.
func (i *calicoImport) await(ctx context.Context, k client.Client, line *progress) error {
	left := 0
	err := wait.PollUntilContextTimeout(ctx, time.Second, confirmsWithin, true, func(ctx context.Context) (bool, error) {
		left = 0
		for n := range i.items {
			item := &i.items[n]
			if item.Action != inspection.ActionAdopt {
				continue
			}
			var is stayputv1alpha1.PodIP
			err := k.Get(ctx, client.ObjectKeyFromObject(item.ip), &is) // after an error it is read again
			same := err == nil && is.UID == item.ip.UID
			item.Done = same && is.Status.Phase == stayputv1alpha1.PodIPBound && is.Status.PodUID == is.Spec.PodUID
			if apierrors.IsNotFound(err) || err == nil && !same {
				item.Action, item.Why = inspection.ActionRefuse, "the pod has ended or has another address by now"
			} else if !item.Done {
				left++
			}
		}
		line.say("waiting until no other pod can get the addresses, about two minutes: %d left ...", left)
		return left == 0, nil
	})
	if err != nil {
		err = fmt.Errorf("%s not kept yet, and will be once kubectl get podips shows Bound; if that takes longer, see the "+
			"controller's log: %w", count(left, "address is", "addresses are"), err)
	}
	return err
}
