package retainedip

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func policyOf(t *testing.T, retainIP string) retention.Policy {
	t.Helper()
	p, _, err := retention.Parse(map[string]string{retention.AnnotationRetainIP: retainIP})
	must.Do(t, err)
	return p
}

func claimOf(t *testing.T, network, pod, ifname, addr string) Claim {
	t.Helper()
	return Claim{
		Key:   ledger.Key{Network: network, Identity: "pod:default/" + pod, Pod: pod, IfName: ifname},
		Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Phase: PhaseBound, Policy: policyOf(t,
			"10m"), Pod: ledger.Pod{Namespace: "default", Name: pod, UID: "u1"},
	}
}

func retainedUntil(c Claim, since, expires time.Time) Claim {
	c.Phase, c.Since, c.Expires, c.Pod.UID = PhaseRetained, since, expires, ""
	return c
}

func TestAPodWithSeveralNetworksHasOneObject(t *testing.T) {
	web := claimOf(t, "pods", "web-0", "eth0", "192.0.2.7")
	side := claimOf(t, "aside", "web-0", "net1", "198.51.100.7")
	other := claimOf(t, "pods", "web-1", "eth0", "192.0.2.8")
	all := promisedBy([]Claim{side, web, other}, "node-a")
	if len(all) != 2 {
		t.Fatalf("%d objects", len(all))
	}
	p := all[Name{"default", "web-0.node-a"}]
	if !slices.Equal(p.status.IPs, []string{"192.0.2.7", "198.51.100.7"}) || len(p.status.Addresses) != 2 ||
		len(p.claims) != 2 {
		t.Errorf("%+v", p)
	}
	// It is bound while one of them is, and ends with the last.
	p = promisedBy([]Claim{retainedUntil(side, noon, noon.Add(time.Hour)), web}, "node-a")[Name{"default", "web-0.node-a"}]
	if p.status.Phase != v1alpha1.PhaseBound || p.status.Expires != nil {
		t.Errorf("%+v", p.status)
	}
	p = promisedBy([]Claim{retainedUntil(side, noon, noon.Add(time.Hour)), retainedUntil(web, noon.Add(-time.Hour), noon)},
		"node-a")[Name{"default", "web-0.node-a"}]
	if !p.status.Expires.Time.Equal(noon.Add(time.Hour)) || !p.status.Since.Time.Equal(noon) {
		t.Errorf("%+v", p.status)
	}
}

func TestTwoIdentitiesOfOneInterfaceAreOneEntry(t *testing.T) {
	own := retainedUntil(claimOf(t, "pods", "web-0", "eth0", "192.0.2.7"), noon, noon.Add(time.Hour))
	shared := claimOf(t, "pods", "web-0", "eth0", "192.0.2.8")
	shared.Key.Identity, shared.Policy.Identity = "set:default/front", "front"
	p := promisedBy([]Claim{own, shared}, "node-a")[Name{"default", "web-0.node-a"}]
	if len(p.status.Addresses) != 1 || !slices.Equal(p.status.Addresses[0].IPs, []string{"192.0.2.8", "192.0.2.7"}) ||
		p.spec.Identity != "front" {
		t.Errorf("%+v", p)
	}
}

func TestARetentionIsWrittenAsPeopleWriteIt(t *testing.T) {
	for written, shown := range map[string]string{
		"10m": "10m", "720h": "720h", "1h30m": "1h30m", "90s": "1m30s", "30s": "30s", "100ms": "100ms",
		"while-owned": "while-owned", "1h0m5s": "1h0m5s",
	} {
		if got := policyOf(t, written).RetainIP(); got != shown {
			t.Errorf("%s is shown as %s", written, got)
		}
	}
}

func TestAPolicyThatWasPutTogetherAgainHasTheDefaults(t *testing.T) {
	for _, c := range []struct {
		policy retention.Policy
		word   string
	}{
		{retention.Policy{WhileOwned: true}, "Release"},
		{retention.Policy{Retention: policyOf(t, "1h").Retention}, "Retain"},
	} {
		s := specOf(Claim{Policy: c.policy}, "node-a")
		if s.WhenScaled != c.word || s.WhenDeleted != c.word || s.WhenMoved != c.word {
			t.Errorf("%+v", s)
		}
	}
}

func TestAnExpiryMovesByTwoSecondsOrNotAtAll(t *testing.T) {
	in := func(s time.Duration) *metav1.Time {
		return &metav1.Time{Time: noon.Add(10*time.Minute + s*time.Second)}
	}
	was := v1alpha1.RetainedIPStatus{Phase: v1alpha1.PhaseRetained, PodUID: "u1", Since: &metav1.Time{Time: noon},
		Expires: in(0)}
	for expires, shown := range map[*metav1.Time]*metav1.Time{in(1): in(0), in(-1): in(0), in(2): in(2), nil: nil} {
		is := v1alpha1.RetainedIPStatus{Phase: v1alpha1.PhaseRetained, Since: &metav1.Time{Time: noon}, Expires: expires}
		if got := after(was, is); !got.Expires.Equal(shown) || got.PodUID != "u1" {
			t.Errorf("%s becomes %+v", expires, got)
		}
	}
}

func TestWhenAnAddressWasBoundLastIsPublished(t *testing.T) {
	web, side := claimOf(t, "pods", "web-0", "eth0", "192.0.2.7"), claimOf(t, "aside", "web-0", "net1", "198.51.100.7")
	web.Bound, side.Bound = noon.Add(time.Second), noon
	is := statusOf([]Claim{web, side})
	if at := web.Bound; !is.LastBoundTime.Time.Equal(at) || !is.Since.Time.Equal(at) {
		t.Errorf("bound at %s, since %s", is.LastBoundTime, is.Since)
	}
	hour := noon.Add(time.Hour)
	is = statusOf([]Claim{retainedUntil(web, hour, time.Time{}), retainedUntil(side, hour, time.Time{})})
	if !is.LastBoundTime.Time.Equal(web.Bound) || !is.Since.Time.Equal(hour) {
		t.Errorf("bound at %s, since %s", is.LastBoundTime, is.Since)
	}
}

func TestWhatTheLedgerLostTheObjectStillSays(t *testing.T) {
	at := func(when time.Time) *metav1.Time { return &metav1.Time{Time: when} }
	hour := at(noon.Add(time.Hour))
	is := v1alpha1.RetainedIPStatus{Phase: v1alpha1.PhaseRetained, Since: hour}
	for what, was := range map[string]v1alpha1.RetainedIPStatus{
		"what it said":          {Phase: v1alpha1.PhaseRetained, LastBoundTime: at(noon)},
		"what it said of a pod": {Phase: v1alpha1.PhaseBound, Since: hour, LastBoundTime: at(noon)},
	} {
		if got := after(was, is); got.LastBoundTime == nil || !got.LastBoundTime.Time.Equal(noon) || got.Since != hour {
			t.Errorf("%s: %+v", what, got)
		}
	}
	was := v1alpha1.RetainedIPStatus{Phase: v1alpha1.PhaseRetained, Since: at(noon)}
	if got := after(was, is); got.LastBoundTime != nil {
		t.Errorf("that it was retained does not say when it was bound: %+v", got)
	}
	is.LastBoundTime = hour
	was.LastBoundTime = at(noon.Add(10000 * time.Hour)) // by a clock that was wrong then
	if got := after(was, is); !got.LastBoundTime.Equal(hour) {
		t.Errorf("the ledger is the authority: %+v", got)
	}
}

func TestAReleaseIsForWhatTheObjectShowed(t *testing.T) {
	status := func(phase v1alpha1.Phase, uid, ip string) v1alpha1.RetainedIPStatus {
		return v1alpha1.RetainedIPStatus{Phase: phase, PodUID: uid, IPs: []string{ip}}
	}
	const bound, retained = v1alpha1.PhaseBound, v1alpha1.PhaseRetained
	for _, c := range []struct {
		what      string
		shown, is v1alpha1.RetainedIPStatus
		want      request
	}{
		{"a retained address", status(retained, "u1", "a"), status(retained, "u1", "a"), requestHolds},
		{"a running pod's", status(bound, "u1", "a"), status(bound, "u1", "a"), requestHolds},
		{"of a pod that has stopped since", status(bound, "u1", "a"), status(retained, "u1", "a"), requestHolds},
		{"of a pod that has come back since", status(retained, "u1", "a"), status(bound, "u1", "a"), requestIsOver},
		{"of a predecessor", status(bound, "u1", "a"), status(bound, "u2", "a"), requestIsOver},
		{"of another address", status(retained, "u1", "a"), status(retained, "u1", "b"), requestIsOver},
		{"of nobody knows whom", status(bound, "u1", "a"), status(bound, "", "a"), requestIsUnclear},
		{"without a status", v1alpha1.RetainedIPStatus{}, status(retained, "u1", "a"), requestIsOver},
	} {
		if got := (&promised{status: c.is}).releaseOf(&object{status: c.shown}); got != c.want {
			t.Errorf("%s: %d, want %d", c.what, got, c.want)
		}
	}
}

// A field that slim, objectOf or sameStatus does not know would be unbounded, or never be written.
func TestNoFieldOfAnObjectIsForgotten(t *testing.T) {
	var r v1alpha1.RetainedIP
	must.Fill(t, &r.Spec, 1)
	must.Fill(t, &r.Status, 1)
	want := r.DeepCopy()
	want.Spec.Release, want.Spec.Workload, want.Spec.Scheduled = "", nil, ""
	if _, o := objectOf(&r); o.spec != want.Spec || !reflect.DeepEqual(o.status, want.Status) {
		t.Errorf("kept of\n%+v\nis\n%+v %+v", want, o.spec, o.status)
	}
	differ := func(a, b reflect.Value, same func() bool) {
		for i := range a.NumField() {
			was := reflect.ValueOf(a.Field(i).Interface())
			a.Field(i).Set(b.Field(i))
			if same() {
				t.Errorf("a change of %s.%s is not seen", a.Type().Name(), a.Type().Field(i).Name)
			}
			a.Field(i).Set(was)
		}
	}
	is, other := want.Status.DeepCopy(), v1alpha1.RetainedIPStatus{}
	must.Fill(t, &other, 7)
	same := func() bool { return sameStatus(want.Status, *is) }
	if !same() {
		t.Error("a copy differs")
	}
	differ(reflect.ValueOf(is).Elem(), reflect.ValueOf(other), same)
	differ(reflect.ValueOf(&is.Addresses[0]).Elem(), reflect.ValueOf(other.Addresses[0]), same)
}

func TestEveryFieldThatIsKeptOfAnObjectIsBounded(t *testing.T) {
	var r v1alpha1.RetainedIP
	must.Fill(t, &r.Spec, 1)
	must.Fill(t, &r.Status, 1)
	for i := range texts(reflect.ValueOf(&r.Spec).Elem(), reflect.ValueOf(&r.Status).Elem()) {
		large := r.DeepCopy()
		long := texts(reflect.ValueOf(&large.Spec).Elem(), reflect.ValueOf(&large.Status).Elem())[i]
		was := long.String()
		long.SetString(strings.Repeat("x", 1<<20))
		_, o := objectOf(large)
		for _, is := range texts(reflect.ValueOf(&o.spec).Elem(), reflect.ValueOf(&o.status).Elem()) {
			if is.Len() > longestValue {
				t.Errorf("%s is kept with %d bytes", was, is.Len())
			}
		}
	}
}

// texts returns all strings in values, however deep.
func texts(values ...reflect.Value) (all []reflect.Value) {
	for _, v := range values {
		switch v.Kind() {
		case reflect.String:
			all = append(all, v)
		case reflect.Pointer:
			if !v.IsNil() {
				all = append(all, texts(v.Elem())...)
			}
		case reflect.Slice:
			for i := range v.Len() {
				all = append(all, texts(v.Index(i))...)
			}
		case reflect.Struct:
			for i := range v.NumField() {
				if v.Type().Field(i).IsExported() {
					all = append(all, texts(v.Field(i))...)
				}
			}
		}
	}
	return all
}
