package monitoring

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/lab"
)

func TestMain(m *testing.M) {
	if err := lab.Need(context.Background(), "prometheus"); err != nil {
		fmt.Fprintln(os.Stderr, "test/monitoring:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

const (
	rulesFile     = "../../deploy/chart/files/rules.yaml"
	dashboardFile = "../../deploy/chart/files/dashboard.json"
)

// alert is an alerting rule.
type alert struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func alerts(t *testing.T) []alert {
	t.Helper()
	data, err := os.ReadFile(rulesFile)
	check(t, err)
	var file struct {
		Groups []struct {
			Name  string
			Rules []alert
		}
	}
	check(t, yaml.UnmarshalStrict(data, &file, yaml.DisallowUnknownFields))
	var all []alert
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("no alerts")
	}
	return all
}

// promtool runs promtool on a file of this content, which is written as YAML.
func promtool(t *testing.T, content any, verb ...string) (output string, err error) {
	t.Helper()
	data, err := yaml.Marshal(content)
	check(t, err)
	file := filepath.Join(t.TempDir(), "file.yaml")
	check(t, os.WriteFile(file, data, 0o600))
	out, err := exec.Command("promtool", append(verb, file)...).CombinedOutput()
	return string(bytes.TrimSpace(out)), err
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
