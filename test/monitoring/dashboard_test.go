package monitoring

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/must"
)

func dashboards(t *testing.T) map[string]*Dashboard {
	t.Helper()
	all, err := ReadDashboards(dashboardsDir)
	must.Do(t, err)
	return all
}

func dashboardQueries(t *testing.T) (all []Query) {
	t.Helper()
	for _, d := range dashboards(t) {
		all = append(all, d.Queries()...)
	}
	return all
}

func TestPromtoolAcceptsEveryDashboardQuery(t *testing.T) {
	var rules []any
	queries := dashboardQueries(t)
	for i, q := range queries {
		if strings.Contains(q.Expr, "$") {
			t.Errorf("%s: unknown variable: %s", q.Where, q.Expr)
		}
		rules = append(rules, map[string]any{"record": fmt.Sprintf("query:%d", i), "expr": q.Expr})
	}
	if len(rules) < 20 {
		t.Fatalf("only %d queries were found", len(rules))
	}
	groups := map[string]any{"groups": []any{map[string]any{"name": "dashboards", "rules": rules}}}
	if out, err := promtool(t, groups, "check", "rules"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	// A query that does not parse proves that promtool checks them.
	rules[0].(map[string]any)["expr"] = "sum by (le (up)"
	if out, err := promtool(t, groups, "check", "rules"); err == nil {
		t.Errorf("promtool accepts an invalid query: %s", out)
	}
}

func TestDashboardsAreWellFormed(t *testing.T) {
	all := dashboards(t)
	if len(all) != 2 || all["overview.json"].UID == all["debug.json"].UID {
		t.Fatalf("want an overview and a dashboard for debugging: %v", all)
	}
	for _, d := range all {
		wellFormed(t, d)
	}
}

func wellFormed(t *testing.T, d *Dashboard) {
	t.Helper()
	if d.UID == "" || d.Title == "" || d.SchemaVersion < 39 {
		t.Errorf("uid %q, title %q, schemaVersion %d", d.UID, d.Title, d.SchemaVersion)
	}
	kinds := map[string]string{}
	for _, v := range d.Templating.List {
		kinds[v.Name] = v.Type
	}
	if kinds["datasource"] != "datasource" || kinds["cluster"] != "query" || kinds["node"] != "query" ||
		kinds["network"] != "query" {
		t.Errorf("variables: %v", kinds)
	}
	ids := map[int]bool{}
	taken := map[[2]int]string{}
	for _, p := range d.Panels {
		if p.ID == 0 || ids[p.ID] || p.Title == "" {
			t.Errorf("panel %q: id %d is missing or a duplicate", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("panel %q overlaps %q or exceeds the grid", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 || p.Datasource == nil || p.Datasource.UID != "${datasource}" {
			t.Errorf("panel %q: want queries of the selected data source", p.Title)
		}
	}
}

// The overview is as large for a thousand nodes as for three, and each metric is of the chosen cluster.
func TestTheOverviewNamesNoNodesAndEveryQueryItsCluster(t *testing.T) {
	all := dashboards(t)
	for _, p := range all["overview.json"].Panels {
		for _, target := range p.Targets {
			if strings.Contains(target.LegendFormat, "instance") {
				t.Errorf("panel %q has a series for each node: %s", p.Title, target.Expr)
			}
		}
	}
	for _, d := range all {
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				names := len(metricUses.FindAllString(target.Expr, -1))
				if names == 0 || strings.Count(target.Expr, `cluster=~"$cluster"`) != names {
					t.Errorf("%s, panel %q: not all metrics are of the cluster: %s", d.Title, p.Title, target.Expr)
				}
			}
		}
	}
}

// metricUses matches the beginning of each selector.
var metricUses = regexp.MustCompile(`\b(cluster:stayput_[a-z_]+:[a-z]+[0-9]+[a-z]|stayput_[a-z_]+|up|ALERTS|` +
	`leader_election_master_status|(controller_runtime|workqueue|rest_client|process)_[a-z_]+)\{`)

// Metric names are found without a parser; this covers the pitfalls.
func TestMetricsFindsTheNamesInAnExpression(t *testing.T) {
	for expr, want := range map[string][]string{
		`up{job="a_b"} == 0`: {"up"},
		`sum by (instance, le) (rate(x_bucket{result!~"in_use|error"}[15m])) > 1`:              {"x_bucket"},
		`time() - a_seconds > 300 and on (node) b or vector(0) unless ignoring(x) c{y="}"}`:    {"a_seconds", "b", "c"},
		`histogram_quantile(0.9, sum(rate(h_bucket[5m])) without (pod)) / (d * 1e3) offset 5m`: {"h_bucket", "d"},
	} {
		got := Query{"", expr}.Metrics()
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", expr, got, want)
		}
	}
}

func TestMatchersFindsTheConditionsInAnExpression(t *testing.T) {
	got, err := Query{"", `sum by (a) (rate(x_bucket{result!~"in_use|error",le="+Inf", node=~".*"}[15m])) / on (b) ` +
		`y{z!="}{"} > c`}.Matchers()
	must.Do(t, err)
	want := []Matcher{{"x_bucket", "result", "in_use", false}, {"x_bucket", "result", "error", false},
		{"x_bucket", "le", "+Inf", false},
		{"x_bucket", "node", ".*", true}, {"y", "z", "}{", false}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got, want := want[1].Series(), `x_bucket{result="error"}`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := want[3].Series(), `x_bucket{node=~".*",node!=""}`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for _, expr := range []string{`{a="b"}`, `x{a='b'}`, `x{a="b"} + {c="d"}`} {
		if got, err := (Query{"", expr}).Matchers(); err == nil {
			t.Errorf("%s: %+v", expr, got)
		}
	}
}

func TestRulesAndDashboardsNameOnlyKnownMetrics(t *testing.T) {
	known := regexp.MustCompile(`^(stayput_[a-z_]+|cluster:stayput_slo_[a-z_]+:[a-z]+[0-9]+[a-z]|up|ALERTS|leader_election_master_status|(controller_runtime|workqueue|rest_client|process)_[a-z_]+)$`)
	rules, err := RuleQueries(rulesFile)
	must.Do(t, err)
	for _, q := range append(rules, dashboardQueries(t)...) {
		names := q.Metrics()
		if len(names) == 0 {
			t.Errorf("%s names no metric: %s", q.Where, q.Expr)
		}
		for _, n := range names {
			if !known.MatchString(n) {
				t.Errorf("%s: %s is not a metric of Stayput's programs", q.Where, n)
			}
		}
	}
}
