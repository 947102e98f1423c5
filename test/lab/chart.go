package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// Release is the chart's release name.
const Release = "stayput"

// Template returns the output of helm template for the repository's chart, released as [Release] into the namespace.
// args are additional flags, such as --set.
func Template(ctx context.Context, namespace string, args ...string) ([]byte, error) {
	chart, err := Chart(ctx)
	if err != nil {
		return nil, err
	}
	return Helm(ctx, append([]string{"template", Release, chart, "--namespace", namespace}, args...)...)
}

// Chart returns the path of the chart.
func Chart(ctx context.Context) (string, error) {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	return filepath.Join(root, "deploy", "chart"), nil
}

// Helm runs helm and returns its standard output. Errors include its standard error.
func Helm(ctx context.Context, args ...string) ([]byte, error) {
	out, _, err := helm(ctx, nil, args...)
	return out, err
}

// Helm runs helm as the cluster's [Admin].
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	out, _, err := c.helm(ctx, args...)
	return string(out), err
}

func (c *Cluster) helm(ctx context.Context, args ...string) (stdout, stderr []byte, err error) {
	file, err := c.Kubeconfig()
	if err != nil {
		return nil, nil, err
	}
	return helm(ctx, []string{"KUBECONFIG=" + file, "HOME=" + c.Dir}, args...)
}

func helm(ctx context.Context, env []string, args ...string) (stdout, stderr []byte, err error) {
	program, err := BuildHelm(ctx)
	if err != nil {
		return nil, nil, err
	}
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &out, &said
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("helm %s: %w\n%s", args[0], err, said.Bytes())
	}
	return out.Bytes(), said.Bytes(), err
}

// WriteChartBefore writes the chart of an earlier version into dir. Its definitions lack a property of RetainedIP and a
// column of both kinds.
func WriteChartBefore(ctx context.Context, dir, version string) error {
	now, err := Chart(ctx)
	if err != nil {
		return err
	}
	if err := os.CopyFS(dir, os.DirFS(now)); err != nil {
		return err
	}
	err = editYAML(filepath.Join(dir, "Chart.yaml"), func(is map[string]any) {
		is["version"], is["appVersion"] = strings.TrimPrefix(version, "v"), version
	})
	for _, file := range []string{"stayput.io_retainedips.yaml", "apps.kruise.io_persistentpodstates.yaml"} {
		err = errors.Join(err, editYAML(filepath.Join(dir, "files", "crds", file), func(is map[string]any) {
			version := is["spec"].(map[string]any)["versions"].([]any)[0].(map[string]any)
			columns := version["additionalPrinterColumns"].([]any)
			version["additionalPrinterColumns"] = columns[:len(columns)-1]
			if fields, ok := version["selectableFields"].([]any); ok {
				version["selectableFields"] = fields[:1] // nodeName
			}
			unstructured.RemoveNestedField(version, "schema", "openAPIV3Schema", "properties", "spec", "properties", "identity")
		}))
	}
	return err
}

func editYAML(file string, edit func(map[string]any)) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var is map[string]any
	if err := yaml.Unmarshal(data, &is); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	edit(is)
	if data, err = yaml.Marshal(is); err != nil {
		return err
	}
	return os.WriteFile(file, append([]byte("---\n"), data...), 0o644)
}
