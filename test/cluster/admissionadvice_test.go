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

// mistakes are objects that people apply and that do not do what they seem to, and what is said of each.
var mistakes = func() []struct{ object, says string } {
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
	return []struct{ object, says string }{
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
		{"{apiVersion: v1, kind: Namespace, metadata: {name: new, annotations: {stayput.io/retain-ip: 10m}}}",
			"stayput.io/retain-ip has no effect on a namespace"},
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

func TestALikelyMistakeIsWarnedOf(t *testing.T) {
	g := guardedWith(t, true)
	warnings := func(ctx context.Context, object string) []string {
		h := &heard{}
		as := rest.CopyConfig(g.admin)
		as.WarningHandler = h
		_, err := create(object)(ctx, g, as)
		must.Do(t, err)
		return slices.DeleteFunc(h.warnings, func(w string) bool { return !strings.Contains(w, "stayput-advice") })
	}
	until(t, "the policy", func(ctx context.Context) bool { return len(warnings(ctx, mistakes[0].object)) > 0 })
	for _, m := range mistakes {
		is := warnings(testContext(t), m.object)
		if (len(is) == 0) != (m.says == "") || len(is) > 0 && !strings.Contains(is[0], m.says) {
			t.Errorf("%s\nis warned of by %q\nwant %q", m.object, is, m.says)
		}
	}
}
