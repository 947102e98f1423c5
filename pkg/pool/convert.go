package pool

import (
	"net/netip"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/retention"
)

// This file reads and writes objects of the API. What a Book keeps of them is parsed once: an address as a
// [netip.Addr], a retention as a duration.

// PodIPOf reads a PodIP. Its address is kept for longest at most; zero is no limit. An error says that its name is no
// address, which its definition does not allow.
func PodIPOf(o *v1alpha1.PodIP, longest time.Duration) (PodIP, error) {
	a, err := v1alpha1.ParsePodIPName(o.Name)
	if err != nil {
		return PodIP{}, err
	}
	p := PodIP{
		Addr: a, UID: string(o.UID), Version: o.ResourceVersion, Created: o.CreationTimestamp.Time,
		Pool: o.Spec.Pool, Mode: o.Spec.Mode, Namespace: o.Spec.Namespace, PodName: o.Spec.PodName,
		Identity: o.Spec.Identity, PodUID: UID(o.Spec.PodUID), Network: o.Spec.Network, Interface: o.Spec.Interface,
		Keep:      KeepOf(retention.Recorded(o.Spec.Retention, o.Spec.WhenScaled, o.Spec.WhenDeleted), longest),
		Release:   o.Spec.Release != "",
		AdoptedOn: o.Spec.AdoptedOn,
		Held:      slices.Contains(o.Finalizers, v1alpha1.FinalizerInUse),
		Deleting:  o.DeletionTimestamp != nil,
		Phase:     o.Status.Phase, StatusUID: UID(o.Status.PodUID), Node: o.Status.NodeName,
		Conflict: o.Status.Conflict,
	}
	p.PodCIDR, _ = netip.ParsePrefix(o.Status.PodCIDR) // what cannot be read is written again
	if o.Status.Since != nil {
		p.Since = o.Status.Since.Time
	}
	if w := o.Spec.Workload; w != nil {
		p.Workload = *w
	}
	return p, nil
}

// Spec returns the spec of the object.
func (p *PodIP) Spec() v1alpha1.PodIPSpec {
	spec := v1alpha1.PodIPSpec{
		Pool: p.Pool, Mode: p.Mode, Namespace: p.Namespace, PodName: p.PodName,
		PodUID: string(p.PodUID), Identity: p.Identity, Network: p.Network, Interface: p.Interface, AdoptedOn: p.AdoptedOn,
	}
	if p.Release {
		spec.Release = v1alpha1.ReleaseNow
	}
	spec.Retention, spec.WhenScaled, spec.WhenDeleted = p.Keep.words()
	if w := p.Workload; w != (Workload{}) {
		spec.Workload = &w
	}
	return spec
}

// KeepOf returns how long a policy keeps addresses that may be kept for longest; zero is no limit.
func KeepOf(p retention.Policy, longest time.Duration) Keep {
	p, _ = p.Clamp(longest)
	return Keep{For: p.Duration(), WhileOwned: p.WhileOwned,
		Scaled: p.WhenScaled == retention.Release, Deleted: p.WhenDeleted == retention.Release}
}

// words returns how an object of the API records k.
func (k Keep) words() (retention, whenScaled, whenDeleted string) {
	word := func(release bool) string {
		if release {
			return v1alpha1.PolicyRelease
		}
		return v1alpha1.PolicyRetain
	}
	switch {
	case k.WhileOwned:
		retention = v1alpha1.RetentionWhileOwned
	case k.For > 0:
		retention = k.For.String()
	default:
		return "", "", ""
	}
	return retention, word(k.Scaled), word(k.Deleted)
}

// ReportOf reads a report. Addresses are kept for longest at most; zero is no limit.
func ReportOf(o *v1alpha1.PodIPReport, longest time.Duration) Report {
	a := Report{Node: o.Name, Epoch: v1alpha1.EpochOf(&o.Spec.Epoch), CannotServe: o.Spec.CannotServe}
	for _, h := range o.Spec.Held {
		addr, err := netip.ParseAddr(h.Address)
		if err != nil {
			a.Epoch = 0 // what else it says is not to be trusted: the node has not answered
			continue
		}
		a.Held = append(a.Held, Held{
			Addr: addr, UID: UID(h.PodUID), Namespace: h.Namespace, PodName: h.PodName, Identity: h.Identity,
			Pool: h.Pool, Mode: h.Mode, Network: h.Network, Interface: h.Interface,
			Keep:    KeepOf(retention.Recorded(h.Retention, h.WhenScaled, h.WhenDeleted), longest),
			Running: h.Running,
		})
	}
	return a
}

// AuditOf reads an audit.
func AuditOf(o *v1alpha1.PodIPAudit) Audit {
	epoch := v1alpha1.EpochOf
	return Audit{Version: o.ResourceVersion, Epoch: epoch(o.Spec.Epoch),
		Recalling: o.Spec.Phase != v1alpha1.PodIPAuditSettled, Term: epoch(o.Spec.Term), Mark: o.Spec.Mark.Time,
		Marks: o.Spec.Marks}
}

// Object returns the object of an audit.
func (r *Audit) Object() *v1alpha1.PodIPAudit {
	optional := func(epoch int64) *metav1.MicroTime {
		if epoch == 0 {
			return nil
		}
		t := v1alpha1.EpochTime(epoch)
		return &t
	}
	o := &v1alpha1.PodIPAudit{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.PodIPAuditName, ResourceVersion: r.Version},
		Spec: v1alpha1.PodIPAuditSpec{Epoch: optional(r.Epoch), Term: optional(r.Term),
			Phase: v1alpha1.PodIPAuditSettled, Mark: metav1.NewMicroTime(r.Mark), Marks: r.Marks},
	}
	if r.Recalling {
		o.Spec.Phase = v1alpha1.PodIPAuditRecalling
	}
	return o
}
