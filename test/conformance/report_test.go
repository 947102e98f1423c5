//go:build conformance

package conformance

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// report is the part of a suite's JSON report that matters here.
type report []struct {
	SpecialSuiteFailureReasons []string
	SpecReports                []spec
}

type spec struct {
	ContainerHierarchyTexts    []string
	LeafNodeText, LeafNodeType string
	State                      string
	RunTime                    time.Duration
	Failure                    struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
	CapturedGinkgoWriterOutput, CapturedStdOutErr string
}

// name returns what --ginkgo.focus matches and the suites print.
func (s spec) name() string {
	return strings.TrimSpace(strings.Join(append(slices.Clone(s.ContainerHierarchyTexts), s.LeafNodeText), " "))
}

// runSuite runs a Ginkgo suite, a program on a machine of the lab, and fails the test unless exactly the named tests
// ran and passed.
func runSuite(t *testing.T, machine *lab.Node, patience time.Duration, tests []string, argv ...string) {
	t.Helper()
	var focus []string
	for _, name := range tests {
		focus = append(focus, regexp.QuoteMeta(name))
	}
	const inside = "/var/tmp/report.json"
	argv = append(argv,
		"-ginkgo.focus="+strings.Join(focus, "|"), "-ginkgo.json-report="+inside, "-ginkgo.no-color", "-ginkgo.v",
		"-ginkgo.timeout="+patience.String(),
	)
	p, err := machine.Start("suite", nil, argv...)
	must.Do(t, err)
	ctx := testContext(t, patience+time.Minute) // the suite's own timeout reports more
	select {
	case <-p.Done():
	case <-ctx.Done():
		must.Do(t, p.Kill())
	}
	suiteErr := p.Wait()
	if ctx.Err() != nil {
		suiteErr = fmt.Errorf("killed: %w", ctx.Err())
	}
	data, err := os.ReadFile(machine.Path(inside))
	var suites report
	if err == nil {
		err = json.Unmarshal(data, &suites)
	}
	if err != nil || suiteErr != nil {
		log, _ := os.ReadFile(p.Log)
		t.Errorf("the suite ended with %v, reading its report with %v:\n%s", suiteErr, err, log[max(0, len(log)-16<<10):])
	}
	for _, wrong := range judge(suites, tests) {
		t.Error(wrong)
	}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			if s.LeafNodeType == "It" && s.State == "passed" {
				t.Logf("passed in %5.1f s: %s", s.RunTime.Seconds(), s.name())
			}
		}
	}
}

// judge returns a report's failures, given that exactly these tests should have passed.
func judge(suites report, tests []string) (wrong []string) {
	missing := map[string]bool{}
	for _, name := range tests {
		missing[name] = true
	}
	for _, suite := range suites {
		wrong = append(wrong, suite.SpecialSuiteFailureReasons...)
		for _, s := range suite.SpecReports {
			test := s.LeafNodeType == "It" // not a node that runs before or after all tests
			named := missing[s.name()]
			switch {
			case s.State == "skipped" && !named:
				continue
			case s.State != "passed":
				wrong = append(wrong, fmt.Sprintf("%s %s is %s: %s\n%s:%d\n%s%s", s.LeafNodeType, s.name(), s.State,
					s.Failure.Message,
					s.Failure.Location.FileName, s.Failure.Location.LineNumber, s.CapturedGinkgoWriterOutput, s.CapturedStdOutErr))
			case test && !named:
				wrong = append(wrong, s.name()+" is not named, or ran twice")
			}
			if test {
				delete(missing, s.name())
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		wrong = append(wrong, name+" did not run")
	}
	return wrong
}

func TestAReportMustListExactlyTheNamedTests(t *testing.T) {
	const before, after = `[{"SpecReports": [
		{"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"},
		{"ContainerHierarchyTexts": ["a"], "LeafNodeType": "It", "LeafNodeText": "other", "State": "skipped"},
		`, `
		{"LeafNodeType": "ReportAfterSuite", "State": "passed"}]}]`
	const one = `{"ContainerHierarchyTexts": ["a"], "LeafNodeType": "It", "LeafNodeText": "one", "State": "passed"},`
	const two = `{"ContainerHierarchyTexts": ["a", "b"], "LeafNodeType": "It", "LeafNodeText": "two", "State": "passed"},`
	for name, c := range map[string]struct{ report, wrong string }{
		"both":             {before + one + two + after, ""},
		"one only":         {before + one + after, "a b two did not run"},
		"none":             {before + after, "a b two did not run"},
		"no suite":         {`[]`, "a one did not run"},
		"one failed":       {before + strings.Replace(one, "passed", "failed", 1) + two + after, "It a one is failed"},
		"one skipped":      {before + strings.Replace(one, "passed", "skipped", 1) + two + after, "It a one is skipped"},
		"one was pending":  {before + strings.Replace(one, "passed", "pending", 1) + two + after, "It a one is pending"},
		"another ran, too": {before + one + two + strings.Replace(one, "one", "three", 1) + after, "a three is not named"},
		"one ran twice":    {before + one + one + two + after, "a one is not named, or ran twice"},
		"the suite failed": {strings.Replace(before+one+two+after, `Suite", "State": "passed"`, `Suite", "State": "panicked"`,
			1), "is panicked"},
		"it took too long": {strings.Replace(before+one+two+after, `{"Spec`,
			`{"SpecialSuiteFailureReasons": ["Suite Timeout Elapsed"], "Spec`, 1), "Elapsed"},
	} {
		var suites report
		must.Do(t, json.Unmarshal([]byte(c.report), &suites))
		wrong := strings.Join(judge(suites, []string{"a one", "a b two"}), "\n")
		if (wrong == "") != (c.wrong == "") || !strings.Contains(wrong, c.wrong) {
			t.Errorf("%s: %q is wrong, want %q", name, wrong, c.wrong)
		}
	}
}
