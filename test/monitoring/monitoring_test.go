package monitoring

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
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
	dashboardsDir = "../../deploy/chart/files/dashboards"
)

// alert is an alerting rule, or a recording rule without the name of an alert.
type alert struct {
	Alert, Record       string
	Expr, For           string
	Labels, Annotations map[string]string
}

func alerts(t *testing.T) []alert {
	t.Helper()
	data, err := os.ReadFile(rulesFile)
	must.Do(t, err)
	var file struct {
		Groups []struct {
			Name  string
			Rules []alert
		}
	}
	must.Do(t, yaml.UnmarshalStrict(data, &file, yaml.DisallowUnknownFields))
	var all []alert
	for _, g := range file.Groups {
		all = append(all, slices.DeleteFunc(g.Rules, func(a alert) bool { return a.Record != "" })...)
	}
	if len(all) == 0 {
		t.Fatal("no alerts")
	}
	return all
}

// promtool runs promtool on a file with this content, written as YAML.
func promtool(t *testing.T, content any, verb ...string) (output string, err error) {
	t.Helper()
	data, err := yaml.Marshal(content)
	must.Do(t, err)
	file := filepath.Join(t.TempDir(), "file.yaml")
	must.Do(t, os.WriteFile(file, data, 0o600))
	out, err := exec.Command("promtool", append(verb, file)...).CombinedOutput()
	return string(bytes.TrimSpace(out)), err
}
