package monitoring

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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

// Every alert has one history in which it fires at the given time, and one in which it is quiet then.
func TestAlertsFireOnlyWhenTheyShould(t *testing.T) {
	rules, err := filepath.Abs(rulesFile)
	must.Do(t, err)
	all := alerts(t)
	for name := range cases {
		if !slices.ContainsFunc(all, func(a alert) bool { return a.Alert == name }) {
			t.Errorf("there is no alert %s", name)
		}
	}
	for _, a := range all {
		t.Run(a.Alert, func(t *testing.T) {
			c, ok := cases[a.Alert]
			if !ok {
				t.Fatal("no case")
			}
			says := c.says
			if says == "" && !strings.Contains(a.Annotations["description"], "{{") {
				says = a.Annotations["description"]
			}
			labels := map[string]string{"severity": a.Labels["severity"]}
			maps.Copy(labels, c.labels)
			fires := map[string]any{
				"exp_labels": labels,
				"exp_annotations": map[string]string{
					"summary": a.Annotations["summary"], "runbook_url": a.Annotations["runbook_url"], "description": says,
				},
			}
			test := func(name string, series []string, expected ...any) map[string]any {
				input := []any{}
				for _, s := range series {
					selector, values, _ := strings.Cut(s, " = ")
					input = append(input, map[string]any{"series": selector, "values": values})
				}
				return map[string]any{"name": name, "interval": "1m", "input_series": input, "alert_rule_test": []any{
					map[string]any{"eval_time": c.after, "alertname": a.Alert, "exp_alerts": append([]any{}, expected...)},
				}}
			}
			out, err := promtool(t, map[string]any{
				"rule_files": []string{rules}, "evaluation_interval": "1m",
				"tests": []any{test("fires", c.fires, fires), test("is quiet", c.quiet)},
			}, "test", "rules")
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}
