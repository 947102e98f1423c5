package cniconf

import (
	"regexp"
	"slices"
	"testing"

	"github.com/stayput/stayput/test/monitoring"
	"github.com/stayput/stayput/test/must"
)

// The alert is the only one that judges a word which another program chose. A state that it does not know is not good.
func TestTheAlertFiresInEveryStateThatIsNotGood(t *testing.T) {
	rules, err := monitoring.RuleQueries("../../../deploy/chart/files/rules.yaml")
	must.Do(t, err)
	i := slices.IndexFunc(rules, func(q monitoring.Query) bool { return q.Where == "StayputCNIConfigurationNotOurs" })
	if i < 0 {
		t.Fatal("there is no such alert")
	}
	m := regexp.MustCompile(`^count by \(cluster, state\) \(min_over_time\(stayput_agent_cni_config\{state!~"([^"]+)"\}\[15m\]\) == 1\)$`).FindStringSubmatch(rules[i].Expr)
	if m == nil {
		t.Fatalf("its expression is none that this test can read: %s", rules[i].Expr)
	}
	exempt := regexp.MustCompile(`^(?:` + m[1] + `)$`)
	for _, s := range append(slices.Clone(states), "", "unheard-of") {
		// Without a network no pod starts that could miss its address, and the node is NotReady.
		if quiet := s.Good() || s == StateNone; exempt.MatchString(string(s)) != quiet {
			t.Errorf("state %q: quiet %v, want %v", s, !quiet, quiet)
		}
	}
}
