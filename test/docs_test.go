package test

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	testName = regexp.MustCompile(`\bTest[A-Z]\w*`)
	testFunc = regexp.MustCompile(`(?m)^func (Test[A-Z]\w*)\(`)
	quoted   = regexp.MustCompile("`([^`]+)`")
	inTree   = regexp.MustCompile(`^(cmd|deploy|docs|pkg|plugin|test)/[\w./-]+$`)
)

// testsByFolder are the tests of the tree, each with the folders that have one of that name.
func testsByFolder(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		data, err := os.ReadFile(path)
		for _, found := range testFunc.FindAllStringSubmatch(string(data), -1) {
			all[found[1]] = append(all[found[1]], strings.TrimPrefix(filepath.Dir(path), "../"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// documents are the paths of all of them, from the root of the tree.
func documents(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		found, err := fs.Glob(os.DirFS(".."), pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("no documents %s: %v", pattern, err)
		}
		all = append(all, found...)
	}
	return all
}

func exists(path string) bool {
	_, err := os.Stat(filepath.Join("..", path))
	return err == nil
}

func TestWhatTheDocumentsNameIsThere(t *testing.T) {
	tests := testsByFolder(t)
	for _, document := range documents(t) {
		data, err := os.ReadFile(filepath.Join("..", document))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range testName.FindAllString(string(data), -1) {
			if tests[name] == nil {
				t.Errorf("%s names the test %s, which is not there", document, name)
			}
		}
		for _, word := range quoted.FindAllStringSubmatch(string(data), -1) {
			if inTree.MatchString(word[1]) && !exists(word[1]) {
				t.Errorf("%s names %s, which is not there", document, word[1])
			}
		}
	}
}

// In the tables of the guarantees the last column names what shows each: a test of the folder that is said, a story, or
// a file.
func TestEveryGuaranteeIsShownByATestThatIsThere(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "docs/guarantees.md"))
	if err != nil {
		t.Fatal(err)
	}
	guarantees, _, ok := strings.Cut(string(data), "\n## Limits\n")
	if !ok {
		t.Fatal("docs/guarantees.md has no section Limits")
	}
	tests, shown := testsByFolder(t), map[string]bool{}
	for line := range strings.Lines(guarantees) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.Trim(cells[0], "- ") == "" && strings.Trim(cells[len(cells)-1], "- ") == "" ||
			strings.TrimSpace(cells[len(cells)-1]) == "test" {
			continue // no row, or the head of the table
		}
		if len(cells) != 2 {
			t.Errorf("a row of %d columns: %s", len(cells), line)
			continue
		}
		by := quoted.FindAllStringSubmatchIndex(cells[1], -1)
		if len(by) == 0 {
			t.Errorf("nothing shows that it holds: %s", line)
		}
		for _, at := range by {
			name := cells[1][at[2]:at[3]]
			switch folder := "test/cluster"; {
			case testName.MatchString(name):
				if strings.Contains(cells[1][:at[2]], "node:") {
					folder = "test/node"
				}
				if !slices.Contains(tests[name], folder) {
					t.Errorf("%s is not in %s: %s", name, folder, line)
				}
			case !strings.Contains(name, "/"):
				if story := "test/script/testdata/stories/" + name + ".txtar"; !exists(story) {
					t.Errorf("there is no %s: %s", story, line)
				}
			case !exists(name):
				t.Errorf("there is no %s: %s", name, line)
			}
			shown[name] = true
		}
	}
	if len(shown) < 30 {
		t.Errorf("the guarantees are shown by only %q", slices.Sorted(maps.Keys(shown)))
	}
}
