package placement

import (
	"testing"
	"unsafe"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/must"
)

func TestTheCacheKeepsOfARetainedIPWhatTheRulesAskForAndEqualTextsOnce(t *testing.T) {
	strip := retainedIPStripper()
	stripped := func() *stayputv1alpha1.RetainedIP {
		ip := owned(stayputv1alpha1.PolicyRelease)
		ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web",
			UID: string([]byte("of-web"))}
		ip.Spec.PodName = string([]byte(ip.Spec.PodName))
		want := ip.DeepCopy()
		ip.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "stayput-agent"}}
		ip.OwnerReferences = []metav1.OwnerReference{{Kind: "Node", Name: "node-1"}}
		ip.Status.Addresses = []stayputv1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0", IPs: ip.Status.IPs}}
		is, err := strip(ip)
		must.Do(t, err)
		if !equality.Semantic.DeepEqual(is, want) {
			t.Errorf("%+v, want\n%+v", is, want)
		}
		return is.(*stayputv1alpha1.RetainedIP)
	}
	a, b := stripped(), stripped()
	if unsafe.StringData(a.Spec.Workload.UID) != unsafe.StringData(b.Spec.Workload.UID) ||
		unsafe.StringData(a.Spec.PodName) != unsafe.StringData(a.Name) {
		t.Error("two hold the same text twice")
	}
}
