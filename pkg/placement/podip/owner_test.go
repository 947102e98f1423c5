package podip

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/test/must"
)

// ofSet has a pod name a ReplicaSet as its controller, by a UID that need not be the one's of that name.
func ofSet(name, uid string) func(*corev1.Pod) {
	yes := true
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: name,
			UID:        types.UID(uid),
			Controller: &yes}}
	}
}

func replicaSet(namespace, name, uid, deployment string) *appsv1.ReplicaSet {
	yes := true
	return &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(uid),
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: deployment,
			UID: types.UID("uid-of-" + deployment), Controller: &yes}}}}
}

// A pod's author chooses the UID in its owner reference. That of another namespace's ReplicaSet makes nothing of that
// namespace the author's: an address that is kept while its Deployment exists stays.
func TestAForgedOwnerReferenceEndsNoPromiseOfAnotherWorkload(t *testing.T) {
	for name, forged := range map[string]*corev1.Pod{
		"of another namespace, with a ReplicaSet of its own": asking("thief", "blue", ofSet("x-1", "uid-of-set"),
			func(p *corev1.Pod) { p.Namespace = "other" }),
		"of another namespace, with a ReplicaSet of the same name": asking("thief", "blue", ofSet("shop-abc", "uid-of-set"),
			func(p *corev1.Pod) { p.Namespace = "other" }),
		"of the same namespace, with another ReplicaSet": asking("thief", "blue", ofSet("x-1", "uid-of-set")),
	} {
		t.Run(name, func(t *testing.T) {
			forged := forged.DeepCopy()
			forged.Annotations[stayputv1alpha1.AnnotationRetainIP] = "1h"
			forged.Annotations[stayputv1alpha1.AnnotationIdentity] = "y"
			pod := func(name string) *corev1.Pod {
				return asking(name, "blue", ofSet("shop-abc", "uid-of-set"),
					hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "while-owned"),
					hometest.Annotation(stayputv1alpha1.AnnotationIdentity, "shop"))
			}
			a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"),
				&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
				&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}},
				&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "shop", UID: "uid-of-shop"}},
				replicaSet("default", "shop-abc", "uid-of-set", "shop"), replicaSet("default", "x-1", "uid-of-x", "x"),
				replicaSet("other", "x-1", "uid-of-other-x", "x"), replicaSet("other", "shop-abc", "uid-of-other-shop", "y"),
				pod("shop-abc-1"))
			c := control(t, a)
			c.works()
			first := bound(t, a, "shop-abc-1", "node-1")
			a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(first.UID), "node-1")
			c.works()
			c = control(t, a) // another replica leads, which knows of no owner yet
			c.works()
			must.Do(t, a.WithWatch.Create(t.Context(), forged))
			must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(forged), forged))
			claim, err := c.claimer.Claim(t.Context(), cluster.PodOf(forged))
			must.Do(t, err)
			claim.Drop()
			// A rollout by Recreate: the next pod has the address.
			ends := func(name string) {
				p := bound(t, a, name, "node-1")
				a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(p.UID), "node-1")
				c.works()
				must.Do(t, a.Delete(t.Context(), p))
				a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(p.UID), "node-1")
				c.works()
			}
			ends("shop-abc-1")
			must.Do(t, a.WithWatch.Create(t.Context(), pod("shop-abc-2")))
			c.works()
			if w := a.ips(t)["10.6.168.101"].Spec.Workload; w == nil || w.Name != "shop" {
				t.Errorf("the address belongs to %+v", w)
			}
			ends("shop-abc-2")
			a.now = a.now.Add(10 * time.Second)
			c.works()
			if _, kept := a.ips(t)["10.6.168.101"]; !kept {
				t.Error("the Deployment exists, and its address is free")
			}
		})
	}
}
