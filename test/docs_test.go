package test

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/must"
)

var (
	testName = regexp.MustCompile(`\bTest[A-Z]\w*`)
	testFunc = regexp.MustCompile(`(?m)^func (Test[A-Z]\w*)\(`)
	quoted   = regexp.MustCompile("`([^`\n]+)`")
	inTree   = regexp.MustCompile(`^(cmd|deploy|docs|pkg|plugin|test)/[\w./-]+$`)
)

// document is a Markdown file, by its path from the root of the tree.
type document struct {
	path, text string
}

func documents(t *testing.T) []document {
	t.Helper()
	var all []document
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		paths, err := fs.Glob(os.DirFS(".."), pattern)
		must.Do(t, err)
		for _, p := range paths {
			all = append(all, document{p, read(t, p)})
		}
	}
	if len(all) < 10 {
		t.Fatalf("only %d documents", len(all))
	}
	return all
}

// spans are the code spans of a document.
func (d document) spans() []string {
	var all []string
	for i, part := range strings.Split(d.text, "```") {
		if i%2 == 0 {
			for _, found := range quoted.FindAllStringSubmatch(part, -1) {
				all = append(all, found[1])
			}
		}
	}
	return all
}

// commands are what a reader may type: the lines of the fenced blocks without a language, and the code spans.
// Continued lines are one.
func (d document) commands() []string {
	all := d.spans()
	for i, part := range strings.Split(d.text, "```") {
		block, isPlain := strings.CutPrefix(part, "\n")
		if i%2 == 1 && isPlain {
			all = append(all, strings.Split(strings.ReplaceAll(block, "\\\n", " "), "\n")...)
		}
	}
	for i, line := range all {
		line, _, _ = strings.Cut(line, " # ")
		all[i] = strings.TrimPrefix(strings.TrimSpace(line), "$ ")
	}
	return all
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", name))
	must.Do(t, err)
	return string(data)
}

func exists(name string) bool {
	_, err := os.Stat(filepath.Join("..", name))
	return err == nil
}

// sources is the text of all files below the folders whose names match, by path.
func sources(t *testing.T, match func(name string) bool, folders ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, folder := range folders {
		must.Do(t, filepath.WalkDir(filepath.Join("..", folder), func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !match(name) {
				return err
			}
			data, err := os.ReadFile(name)
			all[strings.TrimPrefix(name, "../")] = string(data)
			return err
		}))
	}
	return all
}

func text(files map[string]string) string {
	return strings.Join(slices.Collect(maps.Values(files)), "\n")
}

func isTest(name string) bool    { return strings.HasSuffix(name, "_test.go") }
func isProduct(name string) bool { return strings.HasSuffix(name, ".go") && !isTest(name) }

// testsByFolder are the tests of the tree, each with the folders that have one of that name.
func testsByFolder(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for name, text := range sources(t, isTest, "cmd", "pkg", "plugin", "test") {
		for _, found := range testFunc.FindAllStringSubmatch(text, -1) {
			all[found[1]] = append(all[found[1]], path.Dir(name))
		}
	}
	return all
}

func TestDocumentsNameTestsAndFilesThatExist(t *testing.T) {
	tests := testsByFolder(t)
	for _, d := range documents(t) {
		for _, name := range testName.FindAllString(d.text, -1) {
			if tests[name] == nil {
				t.Errorf("%s: no test %s", d.path, name)
			}
		}
		for _, command := range d.commands() {
			for word := range strings.FieldsSeq(command) {
				if word = strings.TrimSuffix(word, "..."); inTree.MatchString(word) && !exists(word) {
					t.Errorf("%s: no file %s", d.path, word)
				}
			}
		}
	}
}

// In the tables of the guarantees the last column names what proves each row: a test in the folder given or beside the
// code, a story, or a file.
func TestEveryGuaranteeIsProvedByATestThatExists(t *testing.T) {
	guarantees, _, ok := strings.Cut(read(t, "docs/guarantees.md"), "\n## Limits\n")
	if !ok {
		t.Fatal("docs/guarantees.md has no section Limits")
	}
	tests, shown := testsByFolder(t), map[string]bool{}
	for line := range strings.Lines(guarantees) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		isRow := strings.HasPrefix(line, "|") && strings.Trim(line, "|- \n") != ""
		if !isRow || strings.TrimSpace(cells[len(cells)-1]) == "test" {
			continue // or the head of the table
		}
		if len(cells) != 2 {
			t.Errorf("a row of %d columns: %s", len(cells), line)
			continue
		}
		by := quoted.FindAllStringSubmatchIndex(cells[1], -1)
		if len(by) == 0 {
			t.Errorf("no test: %s", line)
		}
		for _, at := range by {
			name := cells[1][at[2]:at[3]]
			switch folder := "test/cluster"; {
			case testName.MatchString(name):
				if strings.Contains(cells[1][:at[2]], "node:") {
					folder = "test/node"
				}
				besideTheCode := func(f string) bool { return !strings.HasPrefix(f, "test/") }
				if !slices.Contains(tests[name], folder) && !slices.ContainsFunc(tests[name], besideTheCode) {
					t.Errorf("%s is not in %s: %s", name, folder, line)
				}
			case !strings.Contains(name, "/"):
				if !exists(story(name)) {
					t.Errorf("no %s: %s", story(name), line)
				}
			case !exists(name):
				t.Errorf("no %s: %s", name, line)
			}
			shown[name] = true
		}
	}
	if len(shown) < 30 {
		t.Errorf("the guarantees are proved only by %q", slices.Sorted(maps.Keys(shown)))
	}
}

func story(name string) string { return "test/script/testdata/stories/" + name + ".txtar" }

// A code span of many words joined by hyphens is the name of a story.
func TestDocumentsNameStoriesThatExist(t *testing.T) {
	name := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+){5,}$`)
	for _, d := range documents(t) {
		for _, span := range d.spans() {
			if name.MatchString(span) && !exists(story(span)) {
				t.Errorf("%s: no %s", d.path, story(span))
			}
		}
	}
}

// anchors are GitHub's, of the headings of a document.
func anchors(text string) map[string]bool {
	all, code := map[string]bool{}, false
	drop := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "```") {
			code = !code
		}
		if heading := strings.TrimLeft(line, "#"); !code && heading != line {
			all[strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), ""), " ", "-")] = true
		}
	}
	return all
}

func TestLinksBetweenDocumentsResolve(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	reached := map[string]bool{"README.md": true}
	for _, d := range documents(t) {
		for _, found := range link.FindAllStringSubmatch(d.text, -1) {
			target, anchor, hasAnchor := strings.Cut(found[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			name := d.path
			if target != "" {
				name = path.Join(path.Dir(d.path), target)
			}
			reached[name] = true
			switch {
			case !exists(name):
				t.Errorf("%s links to %s, which does not exist", d.path, found[1])
			case hasAnchor && !anchors(read(t, name))[anchor]:
				t.Errorf("%s links to %s, which has no such heading", d.path, found[1])
			}
		}
	}
	for _, d := range documents(t) {
		if !reached[d.path] {
			t.Errorf("no document links to %s", d.path)
		}
	}
}

var (
	makeTarget = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
	ourVerb    = regexp.MustCompile(`(?m)^\s*Use:\s+"([a-z]+)`)
	longFlag   = regexp.MustCompile(`(?:^|\s)--([a-z][a-z-]*)`)
)

// What others define: kubectl's flag sets for kubectl stayput, and Helm.
var (
	kubectlFlags = []string{"dry-run", "show-managed-fields", "namespace", "kubeconfig", "context"}
	helmFlags    = []string{"api-versions", "force-conflicts", "kube-version", "no-hooks"}
)

func TestDocumentsShowCommandsThatExist(t *testing.T) {
	targets := map[string]bool{}
	for _, found := range makeTarget.FindAllStringSubmatch(read(t, "Makefile"), -1) {
		targets[found[1]] = true
	}
	// The folders where each program's verbs and flags are defined.
	programs := map[string][]string{
		"/stayput-agent":      {"cmd/stayput-agent", "cmd/internal"},
		"/stayput-controller": {"cmd/stayput-controller", "cmd/internal"},
		"/kubectl stayput":    {"pkg/cli"},
	}
	all := text(sources(t, isProduct, "cmd", "pkg/cli"))
	checked := 0
	for _, d := range documents(t) {
		for _, command := range d.commands() {
			if words := strings.Fields(command); len(words) > 1 && words[0] == "make" {
				checked++
				if !targets[words[1]] {
					t.Errorf("%s: no target for %q", d.path, command)
				}
			}
			if alone := longFlag.FindStringSubmatch(command); alone != nil && strings.HasPrefix(command, "--") {
				checked++
				if !strings.Contains(all, `"`+alone[1]+`"`) && !slices.Contains(append(helmFlags, kubectlFlags...), alone[1]) {
					t.Errorf("%s: no program has the flag %q", d.path, command)
				}
			}
			for program, folders := range programs {
				_, args, ok := strings.Cut("/"+command, program+" ")
				if !ok {
					continue
				}
				checked++
				own := text(sources(t, isProduct, folders...))
				var verbs []string
				for _, found := range ourVerb.FindAllStringSubmatch(own, -1) {
					verbs = append(verbs, found[1])
				}
				verb, _, _ := strings.Cut(args, " ")
				if !strings.HasPrefix(verb, "-") && !slices.Contains(verbs, verb) {
					t.Errorf("%s: %s has no verb %s: %q", d.path, program, verb, command)
				}
				for _, flag := range longFlag.FindAllStringSubmatch(args, -1) {
					theirs := program == "/kubectl stayput" && slices.Contains(kubectlFlags, flag[1])
					if !theirs && !strings.Contains(own, `"`+flag[1]+`"`) {
						t.Errorf("%s: %s has no flag --%s: %q", d.path, program, flag[1], command)
					}
				}
			}
		}
	}
	if checked < 30 {
		t.Errorf("only %d commands were found", checked)
	}
}

func TestDocumentsNameHelmValuesThatExist(t *testing.T) {
	var values map[string]any
	must.Do(t, yaml.Unmarshal([]byte(read(t, "deploy/chart/values.yaml")), &values))
	const sections = `agent|apiServer|controller|crds|gate|image|monitoring|namespace|pools|uninstall`
	word := regexp.MustCompile(`(?:^|[\s,])((?:` + sections + `)\.[a-zA-Z.]+)`)
	checked := 0
	for _, d := range documents(t) {
		for _, command := range d.commands() {
			for _, found := range word.FindAllStringSubmatch(command, -1) {
				checked++
				var at any = values
				for key := range strings.SplitSeq(found[1], ".") {
					m, _ := at.(map[string]any)
					next, ok := m[key]
					if open, isMap := at.(map[string]any); !ok && !(isMap && len(open) == 0) { // {} takes any key
						t.Errorf("%s: no value %s in deploy/chart/values.yaml", d.path, found[1])
						break
					}
					at = next
				}
			}
		}
	}
	if checked < 15 {
		t.Errorf("only %d values were found", checked)
	}
}

func TestDocumentsNameMetricsReasonsAndAnnotationsThatExist(t *testing.T) {
	product := text(sources(t, isProduct, "cmd", "pkg", "plugin"))
	chart := text(sources(t, func(string) bool { return true }, "deploy/chart/templates"))
	// Not ours: kubelet's and the scheduler's.
	theirs := []string{"ContainerCreating", "FailedCreatePodSandBox", "PodReadyToStartContainers", "SchedulingGated"}
	metric := regexp.MustCompile(`^stayput_[a-z_]+`)
	reason := regexp.MustCompile(`^([A-Z]+[a-z]+){2,}$`)
	key := regexp.MustCompile(`^(?:[a-z]+\.)?(?:stayput\.io|kruise\.io|kubernetes\.cri)/[a-z-]+`)
	checked := 0
	for _, d := range documents(t) {
		for _, span := range d.spans() {
			for _, kind := range []*regexp.Regexp{metric, reason, key} {
				name := kind.FindString(span)
				if name == "" || slices.Contains(theirs, name) || testName.MatchString(name) {
					continue
				}
				checked++
				if !strings.Contains(product, `"`+name+`"`) && !strings.Contains(chart, name) {
					t.Errorf("%s: the product has no %s", d.path, name)
				}
			}
		}
	}
	if checked < 60 {
		t.Errorf("only %d names were found", checked)
	}
}

// The index of symptoms is complete: it has every alert, and every reason of an Event or condition that says that
// something is wrong.
func TestTheSymptomsHaveEveryAlertAndReason(t *testing.T) {
	symptoms := read(t, "docs/symptoms.md")
	fine := []string{"AllRecorded", "AsExpected", "Obeyed"} // of conditions
	internal := []string{"IPPooled", "IPRestored"}          // of events that do not become Events
	reason := regexp.MustCompile(`(?:EventReason|[rR]eason\w+)\s+= "([A-Z]\w+)"`)
	reasons := reason.FindAllStringSubmatch(text(sources(t, isProduct, "pkg")), -1)
	for _, found := range reasons {
		if !slices.Contains(slices.Concat(fine, internal), found[1]) && !strings.Contains(symptoms, "`"+found[1]+"`") {
			t.Errorf("docs/symptoms.md does not have %s", found[1])
		}
	}
	alert := regexp.MustCompile(`(?m)^ *- alert: (\w+)$`)
	alerts := alert.FindAllStringSubmatch(read(t, "deploy/chart/files/rules.yaml"), -1)
	for _, found := range alerts {
		if link := "[" + found[1] + "](runbooks.md#" + strings.ToLower(found[1]) + ")"; !strings.Contains(symptoms, link) {
			t.Errorf("docs/symptoms.md does not have %s", link)
		}
	}
	if len(reasons) < 40 || len(alerts) < 40 {
		t.Errorf("only %d reasons and %d alerts were found", len(reasons), len(alerts))
	}
}

func TestDocumentsHaveNoConflictMarkers(t *testing.T) {
	marker := regexp.MustCompile(`(?m)^(<<<<<<<|>>>>>>>) `)
	for _, d := range documents(t) {
		if marker.MatchString(d.text) {
			t.Errorf("%s has the marks of a merge", d.path)
		}
	}
}

func TestDocumentsHaveLinesOfAtMost120Columns(t *testing.T) {
	for _, d := range documents(t) {
		number := 0
		for line := range strings.Lines(d.text) {
			number++
			line = strings.TrimSuffix(line, "\n")
			if len([]rune(line)) > 120 && !strings.HasPrefix(line, "|") && !strings.Contains(line, "](") {
				t.Errorf("%s:%d has %d columns", d.path, number, len([]rune(line)))
			}
		}
	}
}

// The layout names every package of the product, or a folder of packages that belong together.
func TestTheLayoutNamesEveryPackage(t *testing.T) {
	_, layout, _ := strings.Cut(read(t, "docs/development.md"), "\n## Packages\n")
	layout, _, ok := strings.Cut(layout, "\n## ")
	if !ok {
		t.Fatal("docs/development.md has no section Packages")
	}
	var named []string
	for line := range strings.Lines(layout) {
		if name, _, _ := strings.Cut(strings.TrimSpace(line), " "); inTree.MatchString(name + "/.") {
			named = append(named, name)
			if !exists(name) {
				t.Errorf("docs/development.md: no %s", name)
			}
		}
	}
	folders := map[string]bool{}
	for name := range sources(t, isProduct, "cmd", "pkg", "plugin") {
		folders[path.Dir(name)] = true
	}
	for folder := range folders {
		// Only cmd and pkg/api stand for the packages below them as well.
		if strings.HasSuffix(folder, "test") {
			continue // helpers of tests
		}
		if !slices.Contains(named, folder) && !strings.HasPrefix(folder, "cmd/") && !strings.HasPrefix(folder, "pkg/api/") {
			t.Errorf("docs/development.md does not name %s", folder)
		}
	}
}
