package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	rules "github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

func TestAdmissionAndThePluginAgreeOnEveryValue(t *testing.T) {
	g := guardedWith(t, true)
	many := func(s string, n int) string { return strings.Repeat(s, n) }
	var cases []map[string]string
	add := func(key string, values ...string) {
		for _, v := range values {
			m := map[string]string{key: v}
			if key != retention.AnnotationRetainIP && key != retention.AnnotationReservedIPDuration {
				m[retention.AnnotationRetainIP] = "10m"
			}
			cases = append(cases, m)
		}
	}
	add(retention.AnnotationRetainIP,
		"10m", "720h", "while-owned", "none", "None",
		"1h30m", "1.5h", ".5h", "1.h", "+10m", "100ms", "1ns", "10us", "10µs", "10μs",
		"0h0m1s", "1h1h", "0000000000000000000000010m",
		"2562047h", "2562047h47m16.854775807s", "9223372036854775807ns", "153722867m", "9223372036s",
		"1.99999999999999999999999999h", "0.00000000000000000001h1ns",
		"1.12345678h", "1.12345678901m", "1.12345678901s", "9999999999ms", "99999999999us", "12345678901ms5m",
		many("1s", 500), many("0", 1000)+"1h",
		"true", "", "0", "+0", "-0", "0s", "-10m", "+-10m", "10", "10 m", " 10m", "10m ", "\n10m", "10m\n", "10M", "1d", "1w",
		"h", ".", ".h", "1.5.5h", "1,5h", "1e3s", "0x10s", "1_000s", "٣m", "10mm", "m10",
		"while-Owned", "While-owned", "while owned", "forever", "0.1ns", "0.0000000000001h",
		"2562048h", "2562047h48m", "9223372036854775808ns", "9223372037s", "153722868m", "12345678h", "9999999999m",
		"99999999999s", "9999999h", "1h12345678h", "9999999999m1ms",
		many("9", 300), many("9", 300)+"h", many("1h", 2000)+"x", "a\"b\\c", "\u2028", many("é", 200))
	add(retention.AnnotationReservedIPDuration,
		"1", "10", "010", "153722867", many("0", 100)+"1", "000153722867",
		"0", "00", "-1", "-0", "+10", "+1", "1.5", "10m", "10x", "", " 10", "10 ", "10\n", "true", "1e3", "1_0", "0x1", "٣",
		"153722868", "999999999", "1000000000", "9223372036854775807", "9223372036854775808", many("9", 300))
	add(retention.AnnotationWhenScaled,
		"Retain", "Release", "Delete", "", "retain", "Keep", "Retain ", "delete", "Retain\n")
	add(retention.AnnotationWhenDeleted, "Retain", "Release", "Delete", "", "release", "RELEASE")
	add(retention.AnnotationWhenMoved, "Retain", "Release", "Delete", "", "move", "Release ")
	add(retention.AnnotationIdentity, "a", "0", "db", "a-b", "a--b", many("a", 63), "9-a",
		"", "a/b", "A", "aB", "-a", "a-", "-", "a.b", "a_b", "a b", "a\n", "\na", many("a", 64), "é", many("a", 62)+"-")
	add(retention.AnnotationWhenInUse, "Wait", "AllocateNew", "", "wait", "Allocate", "Wait ")
	cases = append(cases,
		map[string]string{},
		map[string]string{"other/annotation": "true"},
		map[string]string{"stayput.io/unknown": "true"},
		map[string]string{"stayput.io/unknown": "true", retention.AnnotationRetainIP: "10m"},
		map[string]string{retention.AnnotationRetainIP: "10m", retention.AnnotationReservedIPDuration: "10"},
		map[string]string{retention.AnnotationRetainIP: "true", retention.AnnotationReservedIPDuration: "10"},
		map[string]string{retention.AnnotationRetainIP: "10m", retention.AnnotationReservedIPDuration: "0"},
		map[string]string{retention.AnnotationRetainIP: "while-owned", retention.AnnotationReservedIPDuration: "10"},
		map[string]string{retention.AnnotationReservedIPDuration: "10", retention.AnnotationWhenScaled: "Retain"},
		map[string]string{retention.AnnotationRetainIP: "none", retention.AnnotationWhenScaled: "Retain"},
		map[string]string{retention.AnnotationRetainIP: "none", retention.AnnotationReservedIPDuration: "0"},
		map[string]string{retention.AnnotationWhenScaled: "Retain"},
		map[string]string{retention.AnnotationWhenDeleted: "Retain"},
		map[string]string{retention.AnnotationWhenMoved: "Retain"},
		map[string]string{retention.AnnotationIdentity: "db"},
		map[string]string{retention.AnnotationWhenInUse: "Wait"},
		map[string]string{retention.AnnotationWhenInUse: "Wait", retention.AnnotationIdentity: "db"},
		map[string]string{retention.AnnotationIdentity: "A"},
	)
	until(t, "the policy", func(ctx context.Context) bool {
		_, err := create(fmt.Sprintf(newPod, `stayput.io/retain-ip: "true"`))(ctx, g, g.admin)
		return err != nil
	})
	accepted, turnedDown := 0, 0
	for _, annotations := range cases {
		_, _, want := retention.Parse(annotations)
		_, got := g.c.Client().CoreV1().Pods("guarded").Create(testContext(t), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "new", Annotations: annotations},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{DryRun: dryRun})
		if got != nil && !refused(got, "stayput-addresses") {
			t.Errorf("%q: %v", annotations, got)
			continue
		}
		if (want == nil) != (got == nil) {
			t.Errorf("%q: the plugin says %v, admission %v", annotations, want, got)
		}
		if got == nil {
			accepted++
			continue
		}
		turnedDown++
		var bad *retention.AnnotationError
		if errors.As(want, &bad) && (!strings.Contains(got.Error(), bad.Key) || !strings.Contains(got.Error(), "expected")) &&
			!overflows(bad.Value) {
			t.Errorf("%q: %v names neither %s nor what is expected", annotations, got, bad.Key)
		}
		if len(got.Error()) > 600 {
			t.Errorf("%q: a message of %d bytes", annotations, len(got.Error()))
		}
	}
	t.Logf("%d accepted, %d refused", accepted, turnedDown)

	// Only the controller reads home-wait and home.
	for value, ok := range map[string]bool{
		"60s": true, "10m": true, "retention": true, "1h30m": true, "+1s": true,
		"": false, "0s": false, "-1s": false, "60": false, "Retention": false, "forever": false, "while-owned": false,
	} {
		_, err := create(fmt.Sprintf(newPod, fmt.Sprintf("stayput.io/home-wait: %q", value)))(testContext(t), g, g.admin)
		invalid := fmt.Sprintf("stayput.io/home-wait: %q is not valid: "+
			"expected a duration above 0 in h, m and s such as 60s or 10m, or retention", value)
		if (err == nil) != ok || err != nil && !refused(err, invalid) {
			t.Errorf("home-wait %q: %v", value, err)
		}
	}
	for value, ok := range map[string]bool{"Required": true, "Preferred": true, "": false, "preferred": false, "node node-1": false} {
		asks := fmt.Sprintf("stayput.io/retain-ip: 10m, stayput.io/home: %q", value)
		_, err := create(fmt.Sprintf(newPod, asks))(testContext(t), g, g.admin)
		invalid := fmt.Sprintf("stayput.io/home: %q is not valid: expected Required or Preferred", value)
		if (err == nil) != ok || err != nil && !refused(err, invalid) {
			t.Errorf("home %q: %v", value, err)
		}
	}
}

func TestAdmissionAndTheControllerAgreeOnPools(t *testing.T) {
	g := guardedWith(t, true)
	asks := func(ctx context.Context, value string) error {
		_, err := g.c.Client().CoreV1().Pods("guarded").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "new", Annotations: map[string]string{v1alpha1.AnnotationPools: value}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	until(t, "the policy", func(ctx context.Context) bool { return asks(ctx, "?") != nil })
	many := func(s string, n int) string { return strings.Repeat(s, n) }
	good, bad := 0, 0
	for _, value := range []string{
		"", " ", "blue", "blue-v4,blue-v6,green@net1", " blue , green ", "0", "a.b-c", many("a", 253), "blue@net1,blue",
		"blue@a-b_c.d:", "blue@eth0.100", "blue@" + many("a", 15), "a@b@c", "blue@é", "blue\t,green",
		",", "blue,", ",blue", "blue,,green", "blue green", "Blue", "-blue", "blue-", "blue_4", "blue@", "@net1", "blue@.",
		"blue@..", "blue@a/b", "blue@" + many("a", 16), many("a", 254), "blue,blue", "blue,blue@eth0", "blue@net1,blue@net1",
		"blue;green", "blue@a b", "\"",
	} {
		_, want := rules.ParseWants(value)
		got := asks(testContext(t), value)
		if (want == nil) != (got == nil) || got != nil && !refused(got, "stayput.io/pools: ") {
			t.Errorf("%q: the controller says %v, admission %v", value, want, got)
		}
		if got == nil {
			good++
		} else {
			bad++
		}
	}
	if good < 10 || bad < 10 {
		t.Errorf("%d accepted, %d refused", good, bad)
	}
}

// By these ways the API server takes no annotations at all, today.
func TestNoOtherWayLeadsToTheAddressesOfAPod(t *testing.T) {
	g := guardedWith(t, true)
	for subresource, change := range map[string]string{
		"ephemeralcontainers": `{metadata: {annotations: {` + told + `}}, spec: {ephemeralContainers: [{name: e, image: i}]}}`,
		"resize":              `{metadata: {annotations: {` + told + `}}, spec: {containers: [{name: c, resources: {}}]}}`,
	} {
		is, err := patch(podKind, "late", types.StrategicMergePatchType, change, subresource)(testContext(t), g, g.admin)
		if refused(err, "stayput.io/addresses") {
			continue
		}
		must.Do(t, err)
		if has, ok := is.GetAnnotations()[v1alpha1.AnnotationAddresses]; ok {
			t.Errorf("by %s the pod has the addresses %s", subresource, has)
		}
	}
}

// Where pools are off, the controller may claim no address: then it may give a pod none either, nor may anything else.
func TestWithoutPoolsNothingGivesAPodAddresses(t *testing.T) {
	g := guardedWith(t, true)
	rights, err := manifests(testContext(t), "34-*.yaml")
	must.Do(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		_, err := g.c.Kubectl(ctx, rights, "apply", "--server-side", "-f", "-")
		must.Do(t, err)
		must.Within(t, patience, "the right to claim addresses", func() bool {
			_, err := create(newPodIP("10.6.168.105"))(ctx, g, g.controller)
			return err == nil
		})
	})
	// So does helm upgrade --set pools.enabled=false.
	kubectl(t, g.c, "delete", "clusterrolebinding", "stayput-controller-pools")
	const refusal = "only Stayput's controller may write the annotation stayput.io/addresses, and only where"
	tell := merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`)
	until(t, "the refusal", func(ctx context.Context) bool {
		_, err = tell(ctx, g, g.controller)
		return err != nil
	})
	if !refused(err, refusal) {
		t.Errorf("the controller: %v, want a refusal with %q", err, refusal)
	}
	for name, do := range map[string]try{
		"a new pod":          create(fmt.Sprintf(newPod, told)),
		"a pod":              tell,
		"a pod's status":     merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`, "status"),
		"a binding":          bind("unbound", told),
		"an older binding":   create(fmt.Sprintf(newBinding, "unbound", told)),
		"a pod that has any": merge(podKind, "served", `{metadata: {annotations: {`+told+`}}}`),
	} {
		if _, err := do(testContext(t), g, g.admin); !refused(err, refusal) {
			t.Errorf("%s: %v, want a refusal with %q", name, err, refusal)
		}
	}
	if _, err := create(template("apps/v1", "StatefulSet", told))(testContext(t), g, g.admin); !refused(err,
		"stayput.io/addresses is not for pod templates") {
		t.Errorf("a template: %v, want a refusal", err)
	}
}
