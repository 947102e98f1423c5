package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// poolsWanted is what to do if pools are there without what they take.
const poolsWanted = "set pools.enabled in the Helm chart, or apply deploy/pools.yaml"

// pools returns the PodIPPools; none if the cluster does not know them.
func pools(ctx context.Context, k client.Client) ([]stayputv1alpha1.PodIPPool, error) {
	var list stayputv1alpha1.PodIPPoolList
	if err := k.List(ctx, &list); err != nil && !meta.IsNoMatchError(err) {
		return nil, rightTo("list podippools", err)
	}
	return list.Items, nil
}

// podIPs returns the PodIPs of the pods of a namespace, or of all if it is empty, sorted as people look for them; none
// if the cluster does not know them.
func podIPs(ctx context.Context, k client.Client, namespace string) ([]stayputv1alpha1.PodIP, error) {
	var list stayputv1alpha1.PodIPList
	if err := k.List(ctx, &list); err != nil {
		if meta.IsNoMatchError(err) {
			return nil, nil
		}
		return nil, rightTo("list podips", err)
	}
	all := slices.DeleteFunc(list.Items, func(p stayputv1alpha1.PodIP) bool {
		return namespace != "" && p.Spec.Namespace != namespace
	})
	for i := range all {
		all[i].SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind("PodIP"))
	}
	slices.SortFunc(all, func(a, b stayputv1alpha1.PodIP) int {
		return cmp.Or(strings.Compare(a.Spec.Namespace, b.Spec.Namespace), comparePods(a.Spec.PodName, b.Spec.PodName),
			strings.Compare(a.Spec.Interface, b.Spec.Interface), strings.Compare(a.Name, b.Name))
	})
	return all, nil
}

// addressIn returns the address of a PodIP as people write it.
func addressIn(p *stayputv1alpha1.PodIP) string {
	a, err := stayputv1alpha1.ParsePodIPName(p.Name)
	if err != nil {
		return p.Name
	}
	return a.String()
}

// checkPools checks the pools, if there are any.
func checkPools(ctx context.Context, k client.Client, now time.Time) []Finding {
	f := findings{check: "pools"}
	all, err := pools(ctx, k)
	if err != nil {
		f.unread(err)
		return f.all
	}
	if len(all) == 0 {
		return nil
	}
	var used, total int64
	for i := range all {
		p := &all[i]
		used, total = used+p.Status.Addresses.Used, total+p.Status.Addresses.Total
		f.pool(p, now)
	}
	f.recall(ctx, k)
	ips, err := podIPs(ctx, k, "")
	if err != nil {
		f.unread(err)
	}
	for i := range ips {
		if p := &ips[i]; p.Spec.Quarantine != nil {
			f.warn(fmt.Sprintf("%s of pool %s is in quarantine since %s: %s", addressIn(p), p.Spec.Pool,
				p.Spec.Quarantine.Since.UTC().Format(time.RFC3339), p.Spec.Quarantine.Reason),
				"kubectl describe podip "+p.Name+" says what is known of it")
		}
	}
	return f.orOK(fmt.Sprintf("%s, %d of %d addresses are somebody's", count(len(all), "pool", "pools"), used, total))
}

// poolSlack is how long the controller may take to look at a pool.
const poolSlack = 30 * time.Second

// pool adds what is wrong with a pool.
func (f *findings) pool(p *stayputv1alpha1.PodIPPool, now time.Time) {
	about := "PodIPPool " + p.Name + ": "
	ready := meta.FindStatusCondition(p.Status.Conditions, stayputv1alpha1.ConditionReady)
	switch {
	case ready == nil && now.Sub(p.CreationTimestamp.Time) > poolSlack:
		f.fail(about+"no controller has looked at it", "see whether a controller leads, and its log. "+
			"It must have its rights: "+poolsWanted)
	case ready != nil && ready.Status == metav1.ConditionFalse && ready.Reason == "Invalid":
		f.fail(about+ready.Message, "change the pool")
	case ready != nil && ready.Status == metav1.ConditionFalse:
		f.warn(about+"gives no addresses: "+ready.Message, "nothing, if that is meant")
	}
	for kind, todo := range map[string]string{
		stayputv1alpha1.ConditionOverlaps: "take the addresses out of one of them: what overlaps can be given twice",
		stayputv1alpha1.ConditionExhausted: "add addresses, or release retained ones (kubectl stayput release): " +
			"the pods go as soon as there are some",
	} {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status == metav1.ConditionTrue {
			f.warn(about+c.Message, todo)
		}
	}
}

// recall adds that no addresses are given until all nodes have said which ones they have.
func (f *findings) recall(ctx context.Context, k client.Client) {
	var roll stayputv1alpha1.PodIPRoll
	err := k.Get(ctx, client.ObjectKey{Name: stayputv1alpha1.PodIPRollName}, &roll)
	if client.IgnoreNotFound(err) != nil {
		f.unread(rightTo("get podiprolls", err))
		return
	}
	if err != nil || !roll.Spec.Recalling {
		return
	}
	var nodes metav1.PartialObjectMetadataList
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	var answers stayputv1alpha1.PodIPAnswerList
	if err := errors.Join(k.List(ctx, &nodes), k.List(ctx, &answers)); err != nil {
		f.unread(err)
		return
	}
	silent := map[string]bool{}
	for i := range nodes.Items {
		silent[nodes.Items[i].Name] = true
	}
	for _, a := range answers.Items {
		if a.Spec.Round >= roll.Spec.Epoch {
			delete(silent, a.Name)
		}
	}
	names := slices.Sorted(maps.Keys(silent))
	f.fail("no pool gives addresses until every node has said which ones it has, as after a restore of etcd; not yet: "+
		orNone(strings.Join(firstOf(names, 5), ", ")),
		"bring these nodes back. Of one that is surely off, delete the Node or taint it "+
			"node.kubernetes.io/out-of-service:NoExecute")
}
