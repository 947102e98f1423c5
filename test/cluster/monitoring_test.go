package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/monitoring"
	"github.com/stayput/stayput/test/must"
)

// resting lists the counters of rules and dashboards that do not move in a healthy cluster, and the tests that move
// them.
var resting = map[string]string{
	`stayput_agent_errors_total{operation="policy"}`:     "pkg/node.TestADiskThatCannotBeWrittenIsCountedAndWhatWasMissedIsDoneLater",
	`stayput_agent_errors_total{operation="expire"}`:     "pkg/node.TestADiskThatCannotBeWrittenIsCountedAndWhatWasMissedIsDoneLater",
	`stayput_agent_errors_total{operation="spool"}`:      "pkg/node.TestADiskThatCannotBeWrittenIsCountedAndWhatWasMissedIsDoneLater",
	"stayput_agent_reports_lost_total":                   "pkg/node.TestReportsThatTheSpoolCouldNotHoldAreCounted",
	`stayput_agent_errors_total{operation="release"}`:    "pkg/node.TestAReleaseThatTheLedgerCannotCarryOutIsTriedAgain",
	`stayput_agent_errors_total{operation="cni_config"}`: "pkg/node/cniconf.TestADirectoryThatCannotBeWrittenIsReportedAndTriedAgain",
	`stayput_agent_errors_total{operation="peer"}`:       "pkg/node.TestAPodThatNeverGetsItsAddressIsGivenUp",
	"stayput_agent_leftover_namespaces_removed_total":    "pkg/node.TestALeftoverNamespaceIsRemovedWithItsAddress",
	"stayput_agent_queue_dropped_total":                  "pkg/node.TestAFullQueueLeavesThePodToAReconciliation",
	"stayput_agent_events_dropped_total":                 "pkg/node/retainedip.TestEventsThatAreTooManyAreDroppedAndCounted",
	"stayput_agent_pool_failures_total":                  "pkg/node/podip.TestWhatFailsAndWhatIsOwedIsCounted",
	"stayput_verify_failures_total":                      "pkg/node.TestAnAddressThatIsNotConfiguredInItsPodIsReported",
	"stayput_invalid_annotations_total":                  "pkg/node.TestABadAnnotationIsReportedAndSetsNothing",
}

func TestEveryRestingCounterHasATestThatMovesIt(t *testing.T) {
	names := map[string]bool{}
	for _, q := range watched(t) {
		for _, name := range q.Metrics() {
			names[name] = true
		}
	}
	for counter, test := range resting {
		if name, _, _ := strings.Cut(counter, "{"); !names[name] {
			t.Errorf("%s is listed as resting, but no rule or panel uses it", counter)
		}
		dir, function, _ := strings.Cut(test, ".")
		files, err := filepath.Glob(filepath.Join("../..", dir, "*_test.go"))
		must.Do(t, err)
		if !slices.ContainsFunc(files, func(file string) bool {
			source, err := os.ReadFile(file)
			must.Do(t, err)
			return bytes.Contains(source, []byte("\nfunc "+function+"(t *testing.T) {\n"))
		}) {
			t.Errorf("%s: %s does not exist", counter, test)
		}
	}
}

// A Prometheus scrapes a cluster, in which everything happens that stayput counts.
func TestPrometheusFindsEveryWatchedMetricAndItMoves(t *testing.T) {
	alone(t)
	// On stock host-local, so that the agents keep a configuration of their own. With a webhook, for its metric.
	c, err := startProduct(lab.ClusterOptions{Nodes: 2, IPAM: "host-local", APIServerArgs: lab.WebhooksByEndpoint},
		lab.InstallOptions{Values: map[string]any{
			"agent": map[string]any{"gracePeriod": "3s", "reconcileInterval": "2s"},
			"gate":  map[string]any{"mechanism": "Webhook"},
		}}, nil)
	if c != nil {
		must.Close(t, c)
	}
	must.Do(t, err)
	p := startPrometheus(t, c)
	names := map[string]bool{}
	for _, q := range watched(t) {
		for _, name := range q.Metrics() {
			names[name] = true
		}
	}
	// The fifth is on the control plane's node.
	p.until(t, "all targets to be scraped", func() bool { return len(p.query(t, "up == 1")) == 5 })
	instances := map[string][]string{}
	for _, up := range p.query(t, "up") {
		instances[up["job"]] = append(instances[up["job"]], up["instance"])
	}
	for job, want := range map[string][]string{
		"stayput-agent": nodeNames(t, c), "stayput-controller": podNames(t, c, "controller"),
	} {
		if slices.Sort(instances[job]); !slices.Equal(instances[job], want) {
			t.Errorf("%s is scraped from %v, want %v", job, instances[job], want)
		}
	}

	// Each step moves its series.
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("10m")})
	before := places(t, c, ns, "web", 2, nil)
	until(t, "the pods' addresses to be published", func(context.Context) bool {
		return retainedIP(t, c, ns, "web-0", before["web-0"].Spec.NodeName) != nil &&
			retainedIP(t, c, ns, "web-1", before["web-1"].Spec.NodeName) != nil
	})
	deletePods(t, c, ns, "web")
	cameHome(t, before, places(t, c, ns, "web", 2, before))
	p.moved(t, `stayput_restores_total`, `stayput_controller_placements_total{outcome="home"}`,
		`stayput_controller_placements_total{outcome="free"}`,
		`stayput_controller_gate_duration_seconds_count{waited="false"}`,
		`stayput_plugin_duration_seconds_count{command="add",result="restored"}`,
		`stayput_plugin_duration_seconds_count{command="add",result="promised"}`,
		`stayput_plugin_duration_seconds_count{command="del",result="retained"}`)

	scale(t, c, ns, "web", 0) // meanwhile, its home is cordoned
	home := before["web-0"].Spec.NodeName
	until(t, "web-0 to be retained", func(context.Context) bool {
		r := retainedIP(t, c, ns, "web-0", home)
		return r != nil && retained(r)
	})
	kubectl(t, c, "cordon", home)
	scale(t, c, ns, "web", 1)
	p.until(t, "web-0 to wait for its home", func() bool {
		return len(p.query(t, `stayput_controller_gated_pods{waiting="true"} == 1 and ignoring(waiting) `+
			`stayput_controller_waiting_pods == 1`)) == 1 &&
			len(p.query(t, `stayput_controller_oldest_gated_pod_age_seconds{waiting="true"} > 0`)) == 1
	})
	kubectl(t, c, "uncordon", home)
	ready(t, c, ns, "web-0")
	p.moved(t, `stayput_controller_gate_duration_seconds_count{waited="true"}`)

	forbid(t, c, func() { // so that it cannot place a pod
		scale(t, c, ns, "web", 2)
		p.moved(t, `controller_runtime_reconcile_errors_total{job="stayput-controller",controller="placement"}`)
	})
	ready(t, c, ns, "web-1")

	// Two more networks on the first node are small enough to move the remaining series.
	node := c.Nodes[0]
	few := cni{
		node: node.Node, network: "few",
		ipam: `"ranges":[[{"subnet":"10.99.0.0/28"}]],"promisedShare":0.2,"longestRetention":"1h"`,
	}
	short := cni{node: node.Node, network: "short", ipam: `"ranges":[[{"subnet":"10.98.0.0/28"}]]`}
	for _, n := range []cni{few, short} {
		n.cycle(t, "first", ns, "first", "", "") // a counter must be scraped before it can rise
		p.until(t, "network "+n.network+" to be known", func() bool {
			return len(p.query(t, `stayput_retentions_expired_total{network="`+n.network+`"} == 0`)) == 1
		})
	}
	few.cycle(t, "a1", ns, "kept", "10m", "")
	few.cycle(t, "a2", ns, "kept", "10m", "10.99.0.9") // a miss
	few.cycle(t, "b1", ns, "long", "9000h", "")        // shortened
	few.cycle(t, "c1", ns, "late", "10m", "")          // refused
	few.call(t, "ADD", "d1", ns, "leaks", "", "")      // and no DEL
	short.cycle(t, "e1", ns, "short", "1s", "")
	p.moved(t, `stayput_restore_misses_total{network="few",reason="other_requested"}`,
		`stayput_retentions_clamped_total{network="few"}`, `stayput_retentions_refused_total{network="few"}`,
		`stayput_addresses_reclaimed_total{network="few"}`, `stayput_retentions_expired_total{network="short"}`)
	p.until(t, "the limit of promises to be reached", func() bool {
		return len(p.query(t, `stayput_range_promised_addresses{network="few"} == 2 and `+
			`stayput_range_promisable_addresses == 2 and stayput_range_addresses == 13`)) == 1
	})
	setRelease(t, c, shows(t, c, ns, "kept", node.Name, "to be retained", retained))
	p.moved(t, `stayput_retentions_released_total{network="few"}`)

	// A CNI configuration is removed, a record is unreadable, and a runtime stops.
	must.Do(t, os.Remove(node.Path("/etc/cni/net.d/00-stayput.conflist")))
	p.moved(t, `stayput_agent_cni_config_writes_total`)
	p.until(t, "the agents' configurations to be in force", func() bool {
		return len(p.query(t, `stayput_agent_cni_config{state="active"} == 1`)) == 3
	})
	const broken = "/var/lib/stayput/broken-00000000/network"
	must.Do(t, os.MkdirAll(filepath.Dir(node.Path(broken)), 0o755))
	must.Do(t, node.WriteFile(broken, []byte("{")))
	p.moved(t, `stayput_agent_errors_total{operation="network"}`)
	must.Do(t, os.RemoveAll(filepath.Dir(node.Path(broken))))
	must.Do(t, node.StopContainerd())
	p.until(t, "the runtime to be missed", func() bool {
		return len(p.query(t, `stayput_agent_cri_up == 0 and on(instance) stayput_agent_nri_connected == 0`)) == 1
	})
	must.Do(t, node.StartContainerd(testContext(t)))
	p.moved(t, `stayput_agent_nri_connections_total{instance="`+node.Name+`"}`,
		`stayput_agent_errors_total{operation="reconcile",instance="`+node.Name+`"}`)

	// A pool has one address, and two pods ask for it.
	kubectl(t, c, "apply", "--server-side", "-f", "../../deploy/pools-crds.yaml", "-f", "../../deploy/pools.yaml",
		"-f", "../../deploy/pools-gate-policies.yaml")
	if all := p.query(t, `{__name__=~"stayput_(agent|controller)_pool_.*"}`); len(all) > 0 {
		t.Errorf("without a pool there is %v", all)
	}
	apply(t, c, ns, strings.NewReplacer("10.6.168.101-10.6.168.110", "10.6.168.101", "mode: L2", "mode: Routed").
		Replace(pool))
	p.until(t, "the pool to serve", func() bool {
		return len(p.query(t, `stayput_controller_pool_gate_duration_seconds_count{waited="false"} == 0 and `+
			`ignoring(waited) stayput_controller_pool_recalling == 0`)) == 1 &&
			len(p.query(t, `stayput_agent_pool_report_owed == 0`)) == 3
	})
	deploy(t, c, ns, lab.Workload{Name: "pooled", Replicas: 2, Annotations: pools("blue"), Unprobed: true})
	p.until(t, "one of two pods to wait for an address", func() bool {
		return len(p.query(t, `stayput_controller_pool_waiting_pods{pool="blue"} == 1 and on(instance) `+
			`stayput_controller_pool_free_addresses == 0`)) == 1 &&
			len(p.query(t, `stayput_controller_oldest_gated_pod_age_seconds{waiting="address"} > 0`)) == 1
	})
	// The other one may have waited for a moment, as the controller had just listed everything.
	p.moved(t, `stayput_controller_pool_gate_duration_seconds_count`)

	// Every watched metric exists, and every counter among them has risen.
	kinds := p.kinds(t)
	for name := range names {
		if len(p.query(t, `count_over_time(`+name+`[1h])`)) == 0 {
			t.Errorf("%s: Prometheus has never seen it", name)
			continue
		}
		if kind := kinds[name]; kind == "" && name != "up" && name != "ALERTS" && !strings.Contains(name, ":") {
			t.Errorf("%s: unknown type", name)
		} else if why := resting[name]; why == "" && (kind == "counter" || kind == "histogram") {
			p.moved(t, name)
		} else if moved := p.rose(t, name); why != "" && moved {
			t.Logf("%s has moved, although it should take %s", name, why) // a busy machine
		}
	}

	// All rules have been evaluated, and some are about to fire.
	for _, rule := range p.rules(t) {
		if rule.Health != "ok" {
			t.Errorf("alert %s: %s: %s", rule.Name, rule.Health, rule.LastError)
		}
	}
	for _, name := range []string{"StayputRestoreMisses", "StayputRetentionsRefused", "StayputAddressesLeaked"} {
		p.until(t, name+" to be pending or to fire", func() bool {
			return len(p.query(t, `ALERTS{alertname="`+name+`"}`)) > 0
		})
	}
	// Every label value in a query has occurred in a series: after a typo, an alert would never fire, or always.
	asked := map[string]string{}
	for _, query := range watched(t) {
		p.query(t, query.Expr) // it fails if the expression is invalid
		matchers, err := query.Matchers()
		must.Do(t, err)
		for _, m := range matchers {
			asked[m.Series()] = query.Where
		}
	}
	if len(asked) < 50 {
		t.Errorf("only %d label values found: %v", len(asked), asked)
	}
	for series, where := range asked {
		if len(p.query(t, `count_over_time(`+series+`[1h])`)) == 0 {
			t.Errorf("%s: there has never been a series %s", where, series)
		}
	}

	// promtool accepts the metrics as they are served.
	for _, target := range p.targets(t) {
		families := own(p.get(t, target))
		if !strings.Contains(families, "stayput_build_info{") {
			t.Errorf("%s serves no stayput_build_info", target)
		}
		check := exec.Command("promtool", "check", "metrics")
		check.Stdin = strings.NewReader(families)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("the metrics of %s: %v: %s", target, err, out)
		}
	}
}

func nodeNames(t *testing.T, c *lab.Cluster) (names []string) {
	t.Helper()
	list, err := c.Client().CoreV1().Nodes().List(testContext(t), metav1.ListOptions{})
	must.Do(t, err)
	for _, n := range list.Items {
		names = append(names, n.Name)
	}
	return names
}

// podNames returns the pods of a component of stayput.
func podNames(t *testing.T, c *lab.Cluster, component string) (names []string) {
	t.Helper()
	list, err := c.Client().CoreV1().Pods(lab.SystemNamespace).List(testContext(t),
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	must.Do(t, err)
	for _, pod := range list.Items {
		names = append(names, pod.Name)
	}
	return names
}

// watched returns all queries of rules and dashboards.
func watched(t *testing.T) []monitoring.Query {
	t.Helper()
	rules, err := monitoring.RuleQueries("../../deploy/chart/files/rules.yaml")
	must.Do(t, err)
	dashboards, err := monitoring.ReadDashboards("../../deploy/chart/files/dashboards")
	must.Do(t, err)
	for _, d := range dashboards {
		rules = append(rules, d.Queries()...)
	}
	return rules
}

// forbid calls do while the controller has no rights; its open watches go on.
func forbid(t *testing.T, c *lab.Cluster, do func()) {
	t.Helper()
	bindings := c.Client().RbacV1().ClusterRoleBindings()
	binding, err := bindings.Get(testContext(t), lab.ControllerAccount, metav1.GetOptions{})
	must.Do(t, err)
	must.Do(t, bindings.Delete(testContext(t), binding.Name, metav1.DeleteOptions{}))
	until(t, "the controller's rights to be gone", func(ctx context.Context) bool {
		review, err := c.Client().AuthorizationV1().SubjectAccessReviews().Create(ctx,
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User:               "system:serviceaccount:" + lab.SystemNamespace + ":" + lab.ControllerAccount,
				ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "patch", Resource: "pods"},
			}}, metav1.CreateOptions{})
		return err == nil && !review.Status.Allowed
	})
	do()
	binding.UID, binding.ResourceVersion = "", ""
	_, err = bindings.Create(testContext(t), binding, metav1.CreateOptions{})
	must.Do(t, err)
}

// own returns the metric families of stayput itself, without those of libraries.
func own(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if name := strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE "); strings.HasPrefix(name, "stayput_") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// cni is a network of a node whose plugin a test calls as a runtime would, for pods that do not exist.
type cni struct {
	node          *lab.Node
	network, ipam string
}

func (n cni) call(t *testing.T, verb, ctr, namespace, pod, retain, ip string) {
	t.Helper()
	annotations := map[string]string{}
	if retain != "" {
		annotations[retainIP] = retain
	}
	notes, err := json.Marshal(annotations)
	must.Do(t, err)
	args := "IgnoreUnknown=1;K8S_POD_NAMESPACE=" + namespace + ";K8S_POD_NAME=" + pod
	if ip != "" {
		args += ";IP=" + ip
	}
	// The netns does not exist, as of a container that died: its address is not in use.
	env := []string{
		"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + ctr, "CNI_IFNAME=eth0", "CNI_NETNS=/run/netns/" + ctr,
		"CNI_PATH=/opt/cni/bin", "CNI_ARGS=" + args,
	}
	stdin := fmt.Sprintf(`{"cniVersion":"1.0.0","name":%q,"type":"bridge","ipam":{"type":"stayput",%s},`+
		`"runtimeConfig":{"io.kubernetes.cri.pod-annotations":%s}}`, n.network, n.ipam, notes)
	_, err = n.node.RunInput(testContext(t), env, []byte(stdin), "/opt/cni/bin/stayput")
	must.Do(t, err)
}

// cycle starts and ends a container.
func (n cni) cycle(t *testing.T, ctr, namespace, pod, retain, ip string) {
	t.Helper()
	n.call(t, "ADD", ctr, namespace, pod, retain, ip)
	n.call(t, "DEL", ctr, namespace, pod, retain, ip)
}
