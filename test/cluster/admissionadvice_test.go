package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/must"
)

// heard collects the warnings of an API server.
type heard struct {
	mu       sync.Mutex
	warnings []string
}

func (h *heard) HandleWarningHeader(_ int, _, text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.warnings = append(h.warnings, text)
}

func (h *heard) says(advice string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(h.warnings, func(w string) bool { return strings.Contains(w, advice) })
}

// withOwn gives a workload annotations of its own, beside those of its template.
func withOwn(workload, annotations string) string {
	return strings.Replace(workload, "metadata: {name: new}", "metadata: {name: new, annotations: {"+annotations+"}}", 1)
}

// A mistake is an object that people apply, and what is said of it, nothing if it is none.
type mistake struct{ object, says string }

// mistakes are objects that people apply and that do not do what they seem to, and what is said of each.
var mistakes = func() []mistake {
	sts := func(annotations string) string { return template("apps/v1", "StatefulSet", annotations) }
	kind := func(apiVersion, kind, annotations string) string { return template(apiVersion, kind, annotations) }
	const retain, shared = "stayput.io/retain-ip: 10m", "stayput.io/retain-ip: 10m, stayput.io/identity: db"
	const reserved, home = `io.kubernetes.cri/reserved-ip-duration: "10"`, "stayput.io/home: Required"
	const noAddress = "retained for a pod that never comes back: set stayput.io/identity"
	const noNode = "none comes back to its node: use a StatefulSet"
	all := " is unknown and has no effect: expected " + strings.Join(v1alpha1.PodAnnotations, ", ")
	const path = "spec.template.metadata.annotations"
	misspelt := func(key string) string {
		return path + ": " + key + " is unknown and has no effect: expected stayput.io/retain-ip"
	}
	onItself := func(key, kind, path string) string {
		return key + " has no effect in metadata.annotations of a " + kind + ": expected it in " + path
	}
	const asLabel = "stayput.io/retain-ip has no effect as a label: expected it in "
	return []mistake{
		// Keys that nobody reads.
		{sts("stayput.io/retainip: 10m"), misspelt("stayput.io/retainip")},
		{sts("stayput.io/retain_ip: 10m"), misspelt("stayput.io/retain_ip")},
		{sts("stayput.io/retainIP: 10m"), misspelt("stayput.io/retainIP")},
		{sts("stayput.io/Retain-IP: 10m"), misspelt("stayput.io/Retain-IP")},
		{sts("stayputio/retain-ip: 10m"), misspelt("stayputio/retain-ip")},
		{sts("stay-put.io/retain-ip: 10m"), misspelt("stay-put.io/retain-ip")},
		{sts("retain-ip: 10m"), misspelt("retain-ip")},
		{sts(retain + ", stayput.io/homewait: 10m"), "stayput.io/homewait is unknown and has no effect: expected " +
			"stayput.io/home-wait"},
		{sts("stayput.io/retention: 10m"), "stayput.io/retention" + all},
		{sts("stayput.io/pool: blue"), "stayput.io/pool" + all},
		{sts(retain + ", stayput.io/home-await: 10m"), "stayput.io/home-await" + all},
		{sts(retain + ", stayput.io/pinned: node node-1"), "stayput.io/pinned" + all},
		{kind("batch/v1", "CronJob", "stayput.io/retainip: 10m"),
			"spec.jobTemplate.spec.template.metadata.annotations: stayput.io/retainip is unknown"},
		{fmt.Sprintf(newPod, "stayput.io/retainip: 10m"), "metadata.annotations: stayput.io/retainip is unknown"},
		// Known keys where nobody reads them.
		{withOwn(sts(""), retain), onItself("stayput.io/retain-ip", "StatefulSet", path)},
		{withOwn(sts(""), home), onItself("stayput.io/home", "StatefulSet", path)},
		{withOwn(sts(""), "stayput.io/pools: blue"), onItself("stayput.io/pools", "StatefulSet", path)},
		{withOwn(sts(""), reserved), onItself("io.kubernetes.cri/reserved-ip-duration", "StatefulSet", path)},
		{withOwn(sts(retain), "stayput.io/retainip: 10m"), onItself("stayput.io/retainip", "StatefulSet", path)},
		{withOwn(kind("apps/v1", "Deployment", ""), retain), onItself("stayput.io/retain-ip", "Deployment", path)},
		{withOwn(kind("batch/v1", "CronJob", ""), retain),
			onItself("stayput.io/retain-ip", "CronJob", "spec.jobTemplate.spec.template.metadata.annotations")},
		{strings.Replace(kind("batch/v1", "CronJob", ""), "jobTemplate: {", "jobTemplate: {metadata: {annotations: {"+retain+"}}, ", 1),
			"stayput.io/retain-ip has no effect in metadata.annotations of a CronJob"},
		{strings.Replace(sts(""), "labels: {a: b}", "labels: {a: b, stayput.io/retain-ip: 10m}", 1), asLabel + path},
		{strings.Replace(sts(""), "{name: new}", "{name: new, labels: {stayput.io/retain-ip: 10m}}", 1), asLabel + path},
		{"{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/retain-ip: 10m, stayput.io/home: Preferred}}}", ""},
		{"{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/home: Preferred}}}",
			"stayput.io/home has no effect on a namespace"},
		{"{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/retain-ip: 10m, stayput.io/identity: web}}}",
			"stayput.io/identity has no effect on a namespace"},
		// Pods that never come back, by kind.
		{kind("apps/v1", "Deployment", retain), noAddress},
		{kind("apps/v1", "ReplicaSet", retain), noAddress},
		{kind("apps/v1", "DaemonSet", retain), noAddress},
		{kind("v1", "ReplicationController", retain), noAddress},
		{kind("batch/v1", "Job", retain), noAddress},
		{kind("batch/v1", "CronJob", retain), noAddress},
		{kind("apps.kruise.io/v1beta1", "CloneSet", retain), noAddress},
		{kind("batch/v1", "CronJob", reserved), noAddress},
		{kind("apps/v1", "Deployment", home), noNode},
		{kind("apps/v1", "DaemonSet", home), noNode},
		{kind("batch/v1", "CronJob", home), noNode},
		{fmt.Sprintf(newPod, home), noNode},
		{fmt.Sprintf(newPod, "stayput.io/retain-ip: while-owned"), "stayput.io/retain-ip: no workload owns this pod"},
		// An annotation that needs another one.
		{sts("stayput.io/home-wait: 5m"), "stayput.io/home-wait has an effect only on pods that have a home"},
		{kind("apps/v1", "Deployment", "stayput.io/home-wait: 5m"), "only on pods that have a home"},

		{sts(retain), ""},
		{sts(home), ""},
		{sts(home + ", stayput.io/home-wait: 5m"), ""},
		{sts(reserved + ", stayput.io/home-wait: 5m"), ""},
		{withOwn(sts("stayput.io/home-wait: 5m"), `kruise.io/auto-generate-persistent-pod-state: "true"`), ""},
		{kind("apps/v1", "Deployment", shared+", "+home), ""},
		{kind("apps/v1", "Deployment", home+", stayput.io/pools: blue"), ""},
		{kind("apps/v1", "Deployment", shared), ""},
		{kind("apps/v1", "DaemonSet", shared), ""},
		{kind("batch/v1", "Job", shared), ""},
		{kind("batch/v1", "CronJob", "other: annotation"), ""},
		{fmt.Sprintf(newPod, retain), ""},
		{fmt.Sprintf(newPod, "stayput.io/pools: blue"), ""},
		{"{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/pools: blue}}}", ""},
		// What Kubernetes' own controllers make.
		{ownedPod("guarded", "apps/v1", "Job", "web", "stayput.io/retainip: 10m", ""), ""},
		{strings.Replace(kind("apps/v1", "ReplicaSet", retain), "{name: new}", "{name: new, labels: {pod-template-hash: a}}", 1), ""},
		{strings.Replace(fmt.Sprintf(newPod, "stayput.io/retainip: 10m"), "{name: new,",
			"{name: new, labels: {controller-revision-hash: a},", 1), ""},
	}
}()

// refusals are objects of which the API server takes none, and what it says of each.
var refusals = func() (all []mistake) {
	add := func(says string, objects ...string) {
		for _, object := range objects {
			all = append(all, mistake{object, says})
		}
	}
	sts := func(key, value, others string) string {
		return template("apps/v1", "StatefulSet", fmt.Sprintf("%s: %q%s", key, value, others))
	}
	values := func(key, expected string, values ...string) {
		others := ""
		if key != "stayput.io/retain-ip" && key != "io.kubernetes.cri/reserved-ip-duration" {
			others = ", stayput.io/retain-ip: 10m"
		}
		for _, value := range values {
			add(fmt.Sprintf("%s: %q is not valid: expected %s", key, value, expected), sts(key, value, others))
		}
	}
	values("stayput.io/retain-ip", "a duration above 0 in h, m and s of at most 2562047h, such as 10m, or 168h for 7 "+
		"days; while-owned; or none", "10", "10 m", "ten", "-5m", "0", "0s", "1y", "1d", "7d", "while_owned", "While-Owned",
		"", "24H", "99999999h", "10m ")
	values("io.kubernetes.cri/reserved-ip-duration", "a positive whole number of minutes such as 10", "10m", "1.5", "-1",
		"0", "99999999999", "ten")
	values("stayput.io/home-wait", "a duration above 0 in h, m and s such as 60s or 10m, or retention", "0", "forever",
		"-1m", "10")
	values("stayput.io/home", "Required or Preferred", "required", "Always")
	values("stayput.io/when-scaled", "Retain or Release", "keep")
	values("stayput.io/when-deleted", "Retain or Release", "retain")
	values("stayput.io/when-moved", "Retain or Release", "x")
	values("stayput.io/when-in-use", "Wait or AllocateNew", "wait")
	values("stayput.io/identity", "a DNS label: 1 to 63 of a-z, 0-9 and -", "Web_1")
	add("stayput.io/identity: ", sts("stayput.io/identity", strings.Repeat("a", 70), ", stayput.io/retain-ip: 10m"))
	for _, alone := range []string{"when-scaled: Retain", "when-deleted: Retain", "when-moved: Retain", "identity: web",
		"when-in-use: AllocateNew"} {
		add("stayput.io/retain-ip is missing: expected", template("apps/v1", "StatefulSet", "stayput.io/"+alone))
	}
	for _, pools := range []string{"anywhere,,x", "Any_Where", "anywhere@eth012345678901234567", "anywhere,anywhere",
		"@eth0"} {
		add(fmt.Sprintf("stayput.io/pools: %q is not valid: expected names of pools, each once", pools),
			sts("stayput.io/pools", pools, ""))
	}
	add(`stayput.io/pools: "no such" is not valid`,
		`{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/pools: no such}}}`)
	add(`stayput.io/retain-ip: "7d" is not valid`,
		`{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/retain-ip: 7d}}}`)
	add("stayput.io/retain-ip is missing: expected",
		`{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/when-scaled: Retain}}}`)

	// The lists of a pool, by Stayput's definition and Spiderpool's.
	pool := func(mode, lists string) string { return newPool("mode: " + mode + ", subnet: 10.7.0.0/16, " + lists) }
	spider := newSpiderIPPool
	for _, entry := range []string{"10.7.0", "10.7.0.1-10.7.0.3-10.7.0.5", "10.7.0.1/33", "web", ""} {
		list := fmt.Sprintf("[%q]", entry)
		add("expected an address, a range", pool("L2", "addresses: "+list), pool("L2", "excludedAddresses: "+list),
			spider("subnet: 10.7.0.0/16, ips: "+list), spider("subnet: 10.7.0.0/16, ips: [10.7.0.1], excludeIPs: "+list))
	}
	add("addresses: expected addresses in subnet", pool("L2", "addresses: [10.8.0.1]"))
	add("ips: expected addresses in subnet", spider("subnet: 10.6.0.0/16, ips: [10.7.0.1]"),
		spider("subnet: 10.6.0.0/16, ips: [10.6.255.0-10.7.0.1]"))
	add("gateway: expected an address in subnet", pool("L2", "gateway: 10.8.0.1"),
		spider("subnet: 10.6.0.0/16, ips: [10.6.0.9], gateway: 10.7.0.1"),
		spider("subnet: 10.6.0.0/16, ips: [10.6.0.9], gateway: web"))
	for _, subnet := range []string{"10.7.0.0", "10.7.0.1/16", "10.7.0.0/33", "fd00::1/64"} {
		add("expected a CIDR without host bits", newPool(fmt.Sprintf("mode: L2, subnet: %q", subnet)),
			spider(fmt.Sprintf("subnet: %q", subnet)))
	}
	add("gateway and routes are for mode L2", pool("Routed", "gateway: 10.7.0.1"))
	add("spec.mode", newPool("subnet: 10.7.0.0/16"), newPool("mode: l2, subnet: 10.7.0.0/16"))
	add("spec.allocation", pool("L2", "allocation: off"), pool("L2", "allocation: \"off\""))
	add("metadata.name", strings.Replace(pool("L2", ""), "{name: new}", "{name: Blue}", 1))
	return all
}()

func newSpiderIPPool(spec string) string {
	return "{apiVersion: spiderpool.spidernet.io/v2beta1, kind: SpiderIPPool, metadata: {name: new}, spec: {" + spec + "}}"
}

// poolMistakes are pools that the API server takes, and what it warns of.
var poolMistakes = []mistake{
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.1-10.7.0.9, 10.7.0.5]"),
		"10.7.0.5 is in the list more than once"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.1-10.7.0.9, 10.7.0.9-10.7.0.12]"),
		"10.7.0.9-10.7.0.12 is in the list more than once"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.1.3, 10.7.1.0/24]"), "10.7.1.3 is in the list more than once"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.1.0/24, 10.7.1.128/25]"), "10.7.1.128/25 is in the list"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.1.0/24, 10.7.0.1-10.7.1.0]"), "10.7.1.0/24 is in the list"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.1, 10.7.0.1]"), "10.7.0.1 is in the list more than once"},
	{newPool("mode: Routed, subnet: 10.0.0.0/8"), "10.0.0.0/8 has more than a million addresses"},
	{newPool("mode: Routed, subnet: 0.0.0.0/0, addresses: [10.0.0.0/8, 172.30.0.0/24]"),
		"10.0.0.0/8 has more than a million addresses"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.9-10.7.0.1]"), "10.7.0.9-10.7.0.1 has no address"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.10-10.7.0.9]"), "expected a range from its lowest"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.1.0-10.7.0.255]"), "expected a range from its lowest"},
	{newSpiderIPPool("subnet: 10.7.0.0/16, ips: [10.7.0.9-10.7.0.1]"), "10.7.0.9-10.7.0.1 has no address"},
	{newSpiderIPPool("subnet: 10.7.0.0/16, ips: [10.7.0.1-10.7.0.9, 10.7.0.5]"), "10.7.0.5 is in the list more than once"},
	{newSpiderIPPool("subnet: 10.7.0.0/16"), "spec.ips: expected at least one address"},
	{newPool("mode: L2, subnet: 10.7.0.0/16, gatway: 10.7.0.1"), `unknown field "spec.gatway"`},

	{newPool("mode: L2, subnet: 10.7.0.0/16"), ""},
	{newPool("mode: Routed, subnet: 10.0.0.0/8, addresses: [10.7.0.0/16, 10.8.0.1-10.8.0.9, 10.8.0.10, 10.8.1.10]"), ""},
	{newPool(`mode: Routed, subnet: "fd00:7::/64"`), ""},
	{newPool(`mode: Routed, subnet: "fd00:7::/64", addresses: ["fd00:7::a-fd00:7::f", "fd00:7::1:0/112"]`), ""},
	{newSpiderIPPool("subnet: 10.7.0.0/16, ips: [10.7.0.1-10.7.0.9, 10.7.0.11]"), ""},
	{newPool("mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.9-10.7.0.10, 10.7.0.99-10.7.0.100]"), ""},
}

// answer returns what the API server answers to one object: the warnings and the error.
func answer(ctx context.Context, g *guard, object string) (warnings []string, err error) {
	h := &heard{}
	as := rest.CopyConfig(g.admin)
	as.WarningHandler = h
	_, err = create(object)(ctx, g, as)
	return h.warnings, err
}

func TestALikelyMistakeIsWarnedOf(t *testing.T) {
	g := guardedWith(t, true)
	warnings := func(ctx context.Context, object string) []string {
		is, err := answer(ctx, g, object)
		must.Do(t, err)
		return slices.DeleteFunc(is, func(w string) bool {
			return !strings.Contains(w, "stayput-advice") && !strings.Contains(w, "unknown field")
		})
	}
	until(t, "the policy", func(ctx context.Context) bool { return len(warnings(ctx, mistakes[0].object)) > 0 })
	for _, m := range slices.Concat(mistakes, poolMistakes) {
		is := warnings(testContext(t), m.object)
		if (len(is) == 0) != (m.says == "") || len(is) > 0 && !strings.Contains(is[0], m.says) {
			t.Errorf("%s\nis warned of by %q\nwant %q", m.object, is, m.says)
		}
	}
}

func TestAMistakeThatIsNoMatterOfTasteIsRefused(t *testing.T) {
	g := guardedWith(t, true)
	until(t, "the policy", func(ctx context.Context) bool {
		_, err := answer(ctx, g, refusals[0].object)
		return err != nil
	})
	for _, m := range refusals {
		if _, err := answer(testContext(t), g, m.object); err == nil || !strings.Contains(err.Error(), m.says) {
			t.Errorf("%s\nis answered by %v\nwant %q", m.object, err, m.says)
		}
	}
}
