// Package monitoring reads the Prometheus and Grafana files in deploy/chart/files. Its tests check the rules and the
// dashboards with the real promtool; test/cluster checks that a real Prometheus on a real cluster finds the metrics
// that they name.
package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Query is an expression of a rule or of a dashboard, without Grafana's variables.
type Query struct {
	Where, Expr string
}

// Panel is a panel of a dashboard.
type Panel struct {
	ID          int
	Type, Title string
	GridPos     struct{ X, Y, W, H int }
	Datasource  *struct{ Type, UID string }
	Targets     []struct{ RefID, Expr, LegendFormat string }
	Panels      []Panel // of a collapsed row
}

// Dashboard is the tested part of Grafana's model.
type Dashboard struct {
	UID, Title    string
	SchemaVersion int
	Panels        []Panel
	Templating    struct {
		List []struct {
			Name, Type, Definition string
			Query                  any
		}
	}
}

// ReadDashboards reads the dashboards in a directory, by the names of their files.
func ReadDashboards(dir string) (map[string]*Dashboard, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := map[string]*Dashboard{}
	for _, f := range files {
		data, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return nil, err
		}
		d := &Dashboard{}
		if err := json.Unmarshal(data, d); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		all[f.Name()] = d
	}
	return all, nil
}

// variables replaces Grafana's variables by a selection of everything.
var variables = strings.NewReplacer("$__rate_interval", "5m", "$__interval", "1m", "$__range", "6h", "$node", ".*",
	"$network", ".*", "$cluster", ".*")

// Queries returns the queries of all panels and variables.
func (d *Dashboard) Queries() (all []Query) {
	for _, p := range d.Panels {
		for _, t := range p.Targets {
			all = append(all, Query{fmt.Sprintf("%s, panel %q, %s", d.Title, p.Title, t.RefID), variables.Replace(t.Expr)})
		}
	}
	for _, v := range d.Templating.List {
		if inner, ok := strings.CutPrefix(v.Definition, "label_values("); ok {
			inner = inner[:strings.LastIndex(inner, ",")]
			all = append(all, Query{d.Title + ", variable " + v.Name, variables.Replace(inner)})
		}
	}
	return all
}

// RuleQueries returns the expressions of rules.yaml.
func RuleQueries(file string) (all []Query, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var rules struct {
		Groups []struct {
			Rules []struct{ Alert, Record, Expr string }
		}
	}
	if err := yaml.Unmarshal(data, &rules); err != nil {
		return nil, err
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			all = append(all, Query{r.Alert + r.Record, r.Expr})
		}
	}
	return all, nil
}

var (
	quoted   = regexp.MustCompile(`"(\\.|[^"\\])*"|'(\\.|[^'\\])*'`)
	matchers = regexp.MustCompile(`\{[^}]*\}|\[[^\]]*\]`)
	grouping = regexp.MustCompile(`\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)`)
	// A name followed by a parenthesis is a function.
	name     = regexp.MustCompile(`\b[a-zA-Z_:][a-zA-Z0-9_:]*\b(\s*\()?`)
	keywords = []string{
		"and", "or", "unless", "bool", "offset", "inf", "nan", "by", "without", "on", "ignoring", "group_left", "group_right",
	}
)

// Matcher is a selector's condition on a label of a metric.
type Matcher struct {
	Metric, Label string
	Value         string
	// Pattern reports that the value is a regular expression; a mere choice of words becomes one Matcher each.
	Pattern bool
}

// Series returns a selector that matches only if a series has the label with such a value.
func (m Matcher) Series() string {
	if m.Pattern {
		return fmt.Sprintf(`%s{%s=~%q,%[2]s!=""}`, m.Metric, m.Label, m.Value)
	}
	return fmt.Sprintf(`%s{%s=%q}`, m.Metric, m.Label, m.Value)
}

var (
	selector = regexp.MustCompile(`([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{((?:[^{}"']|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')*)\}`)
	matcher  = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:\\.|[^"\\])*")`)
	words    = regexp.MustCompile(`^[a-zA-Z0-9_ -]+(\|[a-zA-Z0-9_ -]+)*$`)
)

// Matchers returns the label conditions of an expression's selectors, negated or not: either way the value should be a
// possible one. A selector without a metric, and a string in single quotes, are errors.
func (q Query) Matchers() (all []Matcher, err error) {
	rest := q.Expr
	for _, s := range selector.FindAllStringSubmatch(q.Expr, -1) {
		rest = strings.Replace(rest, s[0], s[1], 1)
		left := s[2]
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			left = strings.Replace(left, m[0], "", 1)
			value, err := strconv.Unquote(m[3])
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", q.Where, m[3], err)
			}
			values, pattern := []string{value}, strings.HasSuffix(m[2], "~")
			if pattern && words.MatchString(value) {
				values, pattern = strings.Split(value, "|"), false
			}
			for _, v := range values {
				all = append(all, Matcher{Metric: s[1], Label: m[1], Value: v, Pattern: pattern})
			}
		}
		if left = strings.Trim(left, ", "); left != "" {
			return nil, fmt.Errorf("%s: want matchers, got %s", q.Where, left)
		}
	}
	if strings.ContainsAny(rest, "{}") {
		return nil, fmt.Errorf("%s: want selectors that begin with a metric: %s", q.Where, q.Expr)
	}
	return all, nil
}

// Metrics returns the metric names in an expression.
func (q Query) Metrics() (names []string) {
	expr := grouping.ReplaceAllString(matchers.ReplaceAllString(quoted.ReplaceAllString(q.Expr, `""`), ""), "")
	for _, n := range name.FindAllString(expr, -1) {
		if !strings.HasSuffix(n, "(") && !slices.Contains(keywords, strings.ToLower(n)) && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names
}
