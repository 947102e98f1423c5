package monitoring

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/must"
)

func TestPromtoolAcceptsTheRules(t *testing.T) {
	if out, err := exec.Command("promtool", "check", "rules", "--lint=all", "--lint-fatal",
		rulesFile).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestEveryAlertHasSeverityTextAndRunbook(t *testing.T) {
	seen := map[string]bool{}
	for _, a := range alerts(t) {
		if seen[a.Alert] {
			t.Errorf("%s is a duplicate", a.Alert)
		}
		seen[a.Alert] = true
		if !strings.HasPrefix(a.Alert, "Stayput") {
			t.Errorf("%s: want a name that begins with the product's", a.Alert)
		}
		if s := a.Labels["severity"]; !slices.Contains([]string{"critical", "warning", "info"}, s) {
			t.Errorf("%s: severity %q", a.Alert, s)
		}
		if a.Annotations["summary"] == "" || a.Annotations["description"] == "" ||
			strings.Contains(a.Annotations["summary"], "{{") {
			t.Errorf("%s: want a description and a summary without variables: %v", a.Alert, a.Annotations)
		}
		if got, want := a.Annotations["runbook_url"],
			"https://github.com/stayput/stayput/blob/main/docs/runbooks.md#"+strings.ToLower(a.Alert); got != want {
			t.Errorf("%s: runbook_url %s, want %s", a.Alert, got, want)
		}
	}
}

func TestAlertsAndRunbooksMatch(t *testing.T) {
	runbooks, err := os.ReadFile("../../docs/runbooks.md")
	must.Do(t, err)
	var headings, names []string
	for line := range strings.Lines(string(runbooks)) {
		if name, ok := strings.CutPrefix(line, "## "); ok {
			headings = append(headings, strings.TrimSpace(name))
		}
	}
	for _, a := range alerts(t) {
		names = append(names, a.Alert)
	}
	slices.Sort(headings)
	slices.Sort(names)
	if !slices.Equal(headings, names) {
		t.Errorf("docs/runbooks.md has the headings %q, but the alerts are %q", headings, names)
	}
}

var (
	valueVariable = regexp.MustCompile(`{{ \$value[^}]*}}`)
	labelVariable = regexp.MustCompile(`{{ \$labels\.(\w+) }}`)
)

// expected is the alert as promtool expects it.
func (a alert) expected(labels map[string]string, value string) map[string]any {
	all := map[string]string{"severity": a.Labels["severity"]}
	maps.Copy(all, labels)
	says := valueVariable.ReplaceAllString(a.Annotations["description"], value)
	says = labelVariable.ReplaceAllStringFunc(says, func(v string) string {
		return labels[labelVariable.FindStringSubmatch(v)[1]]
	})
	return map[string]any{"exp_labels": all, "exp_annotations": map[string]string{
		"summary": a.Annotations["summary"], "runbook_url": a.Annotations["runbook_url"], "description": says,
	}}
}

// history is a test of promtool: at the given time these alerts fire, by name, and those without a value are quiet.
func history(name, at string, series []string, fire map[string][]any) map[string]any {
	input, want := []any{}, []any{}
	for _, s := range series {
		selector, values, _ := strings.Cut(s, " = ")
		input = append(input, map[string]any{"series": selector, "values": values})
	}
	for _, alert := range slices.Sorted(maps.Keys(fire)) {
		want = append(want, map[string]any{
			"eval_time": at, "alertname": alert, "exp_alerts": append([]any{}, fire[alert]...),
		})
	}
	return map[string]any{"name": name, "interval": "1m", "input_series": input, "alert_rule_test": want}
}

func testRules(t *testing.T, tests []any) {
	t.Helper()
	rules, err := filepath.Abs(rulesFile)
	must.Do(t, err)
	if out, err := promtool(t, map[string]any{
		"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": tests,
	}, "test", "rules"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// in returns these series of a cluster.
func in(cluster string, series []string) (all []string) {
	for _, s := range series {
		all = append(all, strings.Replace(s, "{", `{cluster="`+cluster+`",`, 1))
	}
	return all
}

// Every alert has a history of its cause, in which it fires at the given time and no other alert does, and one of what
// is no cause. If both happen in clusters with one Prometheus, it fires for the first, and is quiet for the second.
func TestAlertsFireForTheirCauseAndNoOther(t *testing.T) {
	all := alerts(t)
	for name := range cases {
		if !slices.ContainsFunc(all, func(a alert) bool { return a.Alert == name }) {
			t.Errorf("there is no alert %s", name)
		}
	}
	var tests []any
	for _, a := range all {
		c, ok := cases[a.Alert]
		if !ok {
			t.Errorf("no case of %s", a.Alert)
			continue
		}
		fire := map[string][]any{}
		for _, other := range all {
			if !slices.Contains(c.also, other.Alert) {
				fire[other.Alert] = nil
			}
		}
		fire[a.Alert] = []any{a.expected(c.labels, c.value)}
		ofCluster := map[string]string{"cluster": "a"}
		maps.Copy(ofCluster, c.labels)
		tests = append(tests, history(a.Alert+" fires", c.after, c.fires, fire),
			history(a.Alert+" fires in one of two clusters", c.after, append(in("a", c.fires), in("b", c.quiet)...),
				map[string][]any{a.Alert: {a.expected(ofCluster, c.value)}}))
	}
	testRules(t, tests)
}

// An API server that is away for 20 minutes is one page for 40 nodes, and one notice that says why.
func TestAnOutageOfTheAPIServerIsOnePage(t *testing.T) {
	var series []string
	for i := range 40 {
		node := fmt.Sprintf(`{instance="node-%d"`, i)
		series = append(series,
			"up"+node+`,job="stayput-agent"} = 1x40`,
			"stayput_build_info"+node+`,component="agent",version="v1.0.0"} = 1x40`,
			"stayput_agent_nri_connected"+node+"} = 1x40", "stayput_agent_cri_up"+node+"} = 1x40",
			"stayput_agent_api_up"+node+"} = 1x9 0x30",
			"stayput_agent_api_writes_total"+node+`,verb="apply",result="unreachable"} = 0x9 1+4x30`,
			"stayput_agent_pool_failures_total"+node+`,part="watch"} = 0x9 1+6x30`,
			"stayput_agent_pool_failures_total"+node+`,part="pod"} = 0x9 1+2x30`,
			"stayput_agent_pool_report_owed"+node+"} = 0x40",
		)
	}
	for _, controller := range []string{"controller-1", "controller-2"} { // they restart, and wait for the lease
		series = append(series,
			`up{instance="`+controller+`",job="stayput-controller"} = 1x9 0 1 1 0 1 1 0 1 1 0 1 1 0 1 1 0 1x20`,
			`stayput_build_info{instance="`+controller+`",component="controller",version="v1.0.0"} = 1x40`)
	}
	series = append(series, `stayput_controller_gated_pods{instance="controller-1",waiting="false"} = 0x9 stale`)
	fire := map[string][]any{}
	for _, a := range alerts(t) {
		switch fire[a.Alert] = nil; a.Alert {
		case "StayputNoControllerLeads":
			fire[a.Alert] = []any{a.expected(nil, "")}
		case "StayputAPIServerUnreachable":
			fire[a.Alert] = []any{a.expected(nil, "40")}
		}
	}
	testRules(t, []any{history("outage", "31m", series, fire)})
}

// A cluster whose nodes have no agents, since agent.enabled is false, does not miss them. Nor does one in which all
// agents are updated, each down for two minutes and one after the other.
func TestNoAlertFiresForAgentsThatAreNotWantedOrComeBackSoon(t *testing.T) {
	nodeOnly := []string{
		`up{instance="controller-1",job="stayput-controller"} = 1x430`,
		`stayput_build_info{instance="controller-1",component="controller",version="v1.0.0"} = 1x430`,
		`stayput_controller_gated_pods{instance="controller-1",waiting="false"} = 0x430`,
	}
	rollout := slices.Clone(nodeOnly)
	for i := range 20 {
		rollout = append(rollout, fmt.Sprintf(`up{instance="node-%d",job="stayput-agent"} = 1x%d 0 0 1x%d`, i, 2*i+1, 60-2*i),
			fmt.Sprintf(`stayput_agent_api_up{instance="node-%d"} = 1x%d 0 0 1x%d`, i, 2*i+1, 60-2*i),
			fmt.Sprintf(`stayput_build_info{instance="node-%d",component="agent",version="v1.0.0"} = 1x60`, i))
	}
	quiet := map[string][]any{}
	for _, a := range alerts(t) {
		quiet[a.Alert] = nil
	}
	testRules(t, []any{history("node-only", "7h", nodeOnly, quiet), history("rollout", "35m", rollout, quiet)})
}

// Clusters that share a Prometheus are told apart by every aggregation, and none hides that a series of another one is
// absent.
func TestRulesTellClustersApart(t *testing.T) {
	aggregation := regexp.MustCompile(`\b(sum|count|min|max|avg|topk|group)\b\s*(by \(cluster[,)])?`)
	rules, err := RuleQueries(rulesFile)
	must.Do(t, err)
	for _, q := range rules {
		found := aggregation.FindAllStringSubmatch(q.Expr, -1)
		if len(found) == 0 {
			t.Errorf("%s aggregates nothing: one alert for each instance: %s", q.Where, q.Expr)
		}
		for _, f := range found {
			if f[2] == "" {
				t.Errorf("%s: want %s by (cluster, …): %s", q.Where, f[1], q.Expr)
			}
		}
		if strings.Contains(q.Expr, "absent(") {
			t.Errorf("%s: absent() knows no clusters: %s", q.Where, q.Expr)
		}
		for _, f := range regexp.MustCompile(`\b(on|ignoring) \([^)]*\)`).FindAllString(q.Expr, -1) {
			if !strings.HasPrefix(f, "on (cluster") {
				t.Errorf("%s: want on (cluster, …), got %s", q.Where, f)
			}
		}
	}
}

// Only what is lost is reported at once.
func TestAlertsWaitUnlessSomethingIsLost(t *testing.T) {
	for _, a := range alerts(t) {
		lost := a.Alert == "StayputRestoreMisses" || a.Alert == "StayputAddressNotConfigured"
		if lost != (a.For == "") {
			t.Errorf("%s: for %q", a.Alert, a.For)
		}
	}
}

// Alerts that documentation tells how to keep quiet are there, and so are those that keep them quiet.
func TestInhibitionsNameAlerts(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	must.Do(t, err)
	_, example, _ := strings.Cut(string(text), "```yaml\ninhibit_rules:\n")
	example, _, _ = strings.Cut(example, "```")
	var rules []struct {
		SourceMatchers []string `json:"source_matchers"`
		TargetMatchers []string `json:"target_matchers"`
		Equal          []string `json:"equal"`
	}
	must.Do(t, yaml.UnmarshalStrict([]byte(example), &rules))
	names := map[string]bool{}
	for _, a := range alerts(t) {
		names[a.Alert] = true
	}
	if len(rules) < 5 {
		t.Errorf("only %d inhibitions", len(rules))
	}
	for _, r := range rules {
		if !slices.Contains(r.Equal, "cluster") || len(r.SourceMatchers) != 1 || len(r.TargetMatchers) != 1 {
			t.Errorf("want one source and targets in the same cluster: %+v", r)
		}
		for _, m := range append(r.SourceMatchers, r.TargetMatchers...) {
			for _, name := range regexp.MustCompile(`\bStayput\w+`).FindAllString(m, -1) {
				if !names[name] {
					t.Errorf("there is no alert %s: %s", name, m)
				}
			}
		}
	}
}
