package cli

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/retention"
)

// spiderEndpoint has the fields of a SpiderEndpoint that matter (spidernet-io/spiderpool,
// pkg/k8s/apis/spiderpool.spidernet.io/v2beta1/spiderendpoint_types.go). Its name is the pod's.
type spiderEndpoint struct {
	Status struct {
		Current struct {
			UID  string `json:"uid"`
			Node string `json:"node"`
			IPs  []struct {
				Interface string `json:"interface"`
				IPv4      string `json:"ipv4"`
				IPv6      string `json:"ipv6"`
				IPv4Pool  string `json:"ipv4Pool"`
				IPv6Pool  string `json:"ipv6Pool"`
			} `json:"ips"`
		} `json:"current"`
		OwnerControllerType string `json:"ownerControllerType"`
		OwnerControllerName string `json:"ownerControllerName"`
	} `json:"status"`
}

// spiderEndpoints returns the items for what Spiderpool keeps. Those that cannot be taken over are refused and say why.
func spiderEndpoints(ctx context.Context, k client.Client, retain string) ([]inspection.ImportItem, error) {
	var all []inspection.ImportItem
	err := eachEndpoint(ctx, k, func(ns, name string, e *spiderEndpoint) {
		asked := templateOrPod(ctx, k, ns, name, e.Status.OwnerControllerType, e.Status.OwnerControllerName)
		all = append(all, itemsOf(ns, name, e, asked, retain)...)
	})
	return all, err
}

// eachEndpoint calls do with each SpiderEndpoint.
func eachEndpoint(ctx context.Context, k client.Client, do func(ns, name string, e *spiderEndpoint)) error {
	var list unstructured.UnstructuredList
	list.SetGroupVersionKind(spiderpoolv2beta1.SchemeGroupVersion.WithKind("SpiderEndpointList"))
	if err := k.List(ctx, &list); err != nil {
		if meta.IsNoMatchError(err) {
			return fmt.Errorf("Spiderpool is not installed in this cluster: "+
				"spiderpool.spidernet.io/v2beta1 has no SpiderEndpoints (%w)", err)
		}
		return err
	}
	for i := range list.Items {
		o := &list.Items[i]
		var e spiderEndpoint
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &e); err != nil {
			return fmt.Errorf("SpiderEndpoint %s/%s: %w", o.GetNamespace(), o.GetName(), err)
		}
		do(o.GetNamespace(), o.GetName(), &e)
	}
	return nil
}

// templateOrPod returns the annotations that a new pod of the name would have, as far as that is known.
func templateOrPod(ctx context.Context, k client.Client, ns, pod, kind, name string) map[string]string {
	if kind == "StatefulSet" {
		o := object("apps/v1", kind)
		if k.Get(ctx, types.NamespacedName{Namespace: ns, Name: name}, o) == nil {
			annotations, _, _ := unstructured.NestedStringMap(o.Object, "spec", "template", "metadata", "annotations")
			return annotations
		}
	}
	var p corev1.Pod
	if k.Get(ctx, types.NamespacedName{Namespace: ns, Name: pod}, &p) == nil {
		return p.Annotations
	}
	return nil
}

// itemsOf returns the promises of a SpiderEndpoint, one for each interface.
func itemsOf(ns, pod string, e *spiderEndpoint, annotations map[string]string, retain string) (
	all []inspection.ImportItem) {
	policy, asks, err := retention.Parse(annotations)
	for _, ip := range e.Status.Current.IPs {
		item := inspection.ImportItem{
			Namespace: ns, Pod: pod, Node: e.Status.Current.Node,
			Interface: ip.Interface, Retention: retain, IPs: []netip.Addr{},
		}
		refuse := func(format string, args ...any) {
			if item.Action == "" {
				item.Action, item.Why = inspection.ActionRefuse, fmt.Sprintf(format, args...)
			}
		}
		for _, word := range []string{ip.IPv4, ip.IPv6} {
			if word == "" {
				continue
			}
			// It has a prefix length, as in the pool.
			p, err := netip.ParsePrefix(word)
			if err != nil {
				refuse("its address %q is not valid: expected an address such as 10.6.0.10/16", word)
				continue
			}
			item.IPs = append(item.IPs, p.Addr().Unmap())
		}
		switch {
		case err != nil:
			refuse("%v", err)
		case asks && policy.Identity != "":
			refuse("it has the shared identity %s: its pods get their promises when they start", policy.Identity)
		case asks && policy.WhileOwned:
			item.Retention = stayputv1alpha1.RetentionWhileOwned
		case asks:
			item.Retention = policy.Duration().String()
		}
		if _, _, numbered := home.SplitOrdinal(pod); e.Status.OwnerControllerType != "StatefulSet" || !numbered {
			refuse("it belongs to a %s: no pod of this name will be created again", e.Status.OwnerControllerType)
		}
		if item.Node == "" {
			refuse("it has no node")
		}
		all = append(all, item)
	}
	return all
}
