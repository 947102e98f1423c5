package v2beta1

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// UnmarshalJSON reads a SpiderIPPool. Spiderpool's own definition, of whatever version, may allow what this one does
// not know: then the others of a list are to be read nevertheless.
func (p *SpiderIPPool) UnmarshalJSON(data []byte) error {
	type plain SpiderIPPool // without this method
	err := json.Unmarshal(data, (*plain)(p))
	if err == nil {
		return nil
	}
	is := metav1.PartialObjectMetadata{}
	if json.Unmarshal(data, &is) != nil {
		return err
	}
	*p = SpiderIPPool{TypeMeta: is.TypeMeta, ObjectMeta: is.ObjectMeta, Unreadable: err.Error()}
	return nil
}

// PodIPPoolSpec returns the PodIPPool that gives the same addresses to the same pods. The error names every field that
// is not supported, or without which there is none: then nothing may be given.
func (p *SpiderIPPool) PodIPPoolSpec() (stayputv1alpha1.PodIPPoolSpec, error) {
	if p.Unreadable != "" {
		return stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeL2}, errors.New(p.Unreadable)
	}
	is := stayputv1alpha1.PodIPPoolSpec{
		Mode: stayputv1alpha1.ModeL2, Subnet: p.Spec.Subnet, Addresses: p.Spec.IPs, ExcludedAddresses: p.Spec.ExcludeIPs,
		NamespaceSelector: p.Spec.NamespaceAffinity, NodeSelector: p.Spec.NodeAffinity,
	}
	if p.Spec.Disable != nil && *p.Spec.Disable {
		is.Allocation = stayputv1alpha1.AllocationDisabled
	}
	if names := p.Spec.NamespaceName; len(names) > 0 {
		is.NamespaceSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
			Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpIn, Values: names,
		}}}
	}
	for _, r := range p.Spec.Routes {
		is.Routes = append(is.Routes, stayputv1alpha1.PodIPRoute{Destination: r.Dst, Gateway: r.Gw})
	}
	subnet, _ := netip.ParsePrefix(p.Spec.Subnet)
	if p.Spec.Gateway != nil && *p.Spec.Gateway != "" {
		is.Gateway = *p.Spec.Gateway
		everywhere := "::/0"
		if subnet.Addr().Is4() {
			everywhere = "0.0.0.0/0"
		}
		is.Routes = append(is.Routes, stayputv1alpha1.PodIPRoute{Destination: everywhere, Gateway: is.Gateway})
	}
	var errs []error
	wrong := func(is bool, what string) {
		if is {
			errs = append(errs, errors.New(what))
		}
	}
	wrong(p.Spec.PodAffinity != nil, "spec.podAffinity is not supported: expected an annotation on these pods")
	wrong(len(p.Spec.NodeName) > 0, "spec.nodeName is not supported: expected spec.nodeAffinity")
	wrong(len(p.Spec.MultusName) > 0, "spec.multusName is not supported: expected pods that ask for the pool")
	wrong(len(p.Spec.IPs) == 0, "spec.ips: expected at least one address")
	if v := p.Spec.IPVersion; v != nil && subnet.IsValid() && (*v == 4) != subnet.Addr().Is4() {
		errs = append(errs, fmt.Errorf("spec.ipVersion: %d is not valid: expected the family of spec.subnet", *v))
	}
	return is, errors.Join(errs...)
}

// GivenBySpiderpool reports whether Spiderpool has given addresses of the pool to pods.
func (p *SpiderIPPool) GivenBySpiderpool() bool {
	text := p.Status.AllocatedIPs
	return text != nil && strings.Trim(*text, "{} \n\t") != "" && strings.TrimSpace(*text) != "null"
}
