package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
