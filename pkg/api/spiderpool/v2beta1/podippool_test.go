package v2beta1

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

func TestASpiderIPPoolInOurWords(t *testing.T) {
	yes, v4, gateway := true, int64(4), "10.6.0.1"
	selects := func(key, value string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: key, Operator: metav1.LabelSelectorOpIn, Values: []string{value}}}}
	}
	p := SpiderIPPool{Spec: SpiderIPPoolSpec{
		IPVersion: &v4, Subnet: "10.6.0.0/16", IPs: []string{"10.6.168.101-10.6.168.110"}, ExcludeIPs: []string{"10.6.168.103"},
		Gateway: &gateway, Routes: []Route{{Dst: "10.9.0.0/16", Gw: "10.6.0.2"}}, NamespaceAffinity: selects("x", "y"),
		NamespaceName: []string{"prod"}, NodeAffinity: selects("zone", "a"), Disable: &yes, Default: &yes,
	}}
	is, err := p.PodIPPoolSpec()
	want := stayputv1alpha1.PodIPPoolSpec{
		Mode: stayputv1alpha1.ModeL2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.168.101-10.6.168.110"},
		ExcludedAddresses: []string{"10.6.168.103"}, Gateway: "10.6.0.1",
		Routes: []stayputv1alpha1.PodIPRoute{{Destination: "10.9.0.0/16", Gateway: "10.6.0.2"},
			{Destination: "0.0.0.0/0", Gateway: "10.6.0.1"}},
		NamespaceSelector: selects("kubernetes.io/metadata.name", "prod"), NodeSelector: selects("zone", "a"),
		Allocation: stayputv1alpha1.AllocationDisabled,
	}
	if err != nil || !reflect.DeepEqual(is, want) {
		t.Errorf("%+v, %v", is, err)
	}
	gateway, p.Spec.Subnet, p.Spec.IPVersion, p.Spec.NamespaceName = "fd00::1", "fd00::/64", nil, nil
	is, err = p.PodIPPoolSpec()
	if err != nil || is.Routes[1].Destination != "::/0" || !reflect.DeepEqual(is.NamespaceSelector, selects("x", "y")) {
		t.Errorf("%+v, %v", is, err)
	}
	for text, given := range map[string]bool{"": false, "{}": false, " null ": false, `{"10.6.0.1":{}}`: true} {
		if p.Status.AllocatedIPs = &text; p.GivenBySpiderpool() != given {
			t.Errorf("%q: given %t", text, !given)
		}
	}
}

// One that does not decode gives nothing and says why. The others of the list do.
func TestASpiderIPPoolThatDoesNotDecodeHidesNoOther(t *testing.T) {
	var list SpiderIPPoolList
	err := json.Unmarshal([]byte(`{"items":[
		{"metadata":{"name":"bad","uid":"1"},"spec":{"subnet":"10.6.0.0/16","ips":"10.6.0.1"}},
		{"metadata":{"name":"worse","uid":"2"},"spec":{"subnet":"10.6.0.0/16","ips":["10.6.0.1"]},"status":{"allocatedIPs":7}},
		{"metadata":{"name":"good","uid":"3"},"spec":{"subnet":"10.6.0.0/16","ips":["10.6.0.2"]}}]}`), &list)
	if err != nil || len(list.Items) != 3 {
		t.Fatalf("%d were read, %v", len(list.Items), err)
	}
	for i, want := range []string{"ips", "allocatedIPs", ""} {
		p := &list.Items[i]
		spec, err := p.PodIPPoolSpec()
		if p.Name == "" || p.UID == "" || (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want an error about %q", p.Name, spec, err, want)
		}
	}
}
