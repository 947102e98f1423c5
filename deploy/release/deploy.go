package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/stayput/stayput/deploy/release/image"
)

// deploy writes the manifests for users without Helm. A test checks that deploy/ is what the chart renders; with the
// image's digest it would render no other line.
func (r *release) deploy() error {
	manifests, err := filepath.Glob(filepath.Join("deploy", "*.yaml"))
	if err != nil {
		return err
	}
	pinned := 0
	tagged := []byte(image.Repository + ":" + r.version)
	for _, manifest := range manifests {
		data, err := os.ReadFile(manifest)
		if err != nil {
			return err
		}
		pinned += bytes.Count(data, tagged)
		data = bytes.ReplaceAll(data, tagged, []byte(image.Repository+"@"+r.digest.String()))
		if err := r.write(filepath.Base(manifest), data); err != nil {
			return err
		}
	}
	if pinned == 0 {
		return fmt.Errorf("no manifest in deploy/ has the image %s", tagged)
	}
	return nil
}

// chart packages the chart, whose values name the image's digest. Helm takes the times of the files into the archive,
// and that of the archive into what it pushes to a registry.
func (r *release) chart() (err error) {
	dir, err := os.MkdirTemp("", "stayput-chart-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	chart := filepath.Join(dir, "stayput")
	if err := os.CopyFS(chart, os.DirFS(filepath.Join("deploy", "chart"))); err != nil {
		return err
	}
	values := filepath.Join(chart, "values.yaml")
	data, err := os.ReadFile(values)
	if err != nil {
		return err
	}
	none := []byte("\n  digest: \"\"\n")
	if bytes.Count(data, none) != 1 {
		return fmt.Errorf("values.yaml has not one line like %q", none)
	}
	data = bytes.Replace(data, none, []byte("\n  digest: "+r.digest.String()+"\n"), 1)
	if err := os.WriteFile(values, data, 0o644); err != nil {
		return err
	}
	err = filepath.WalkDir(chart, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(path, r.at, r.at))
	})
	if err != nil {
		return err
	}
	if err := tool("helm", "helm", "package", "--destination="+r.absolute(""), chart); err != nil {
		return err
	}
	return os.Chtimes(r.absolute("stayput-"+r.version[1:]+".tgz"), r.at, r.at)
}

// absolute returns the path of a file in DIST for tools, which run elsewhere.
func (r *release) absolute(name string) string {
	path, _ := filepath.Abs(filepath.Join(r.dir, name)) // it fails only without a working directory
	return path
}

// tool runs a program of a module in test/lab/build, which pins it.
func tool(module, name string, args ...string) error {
	args = append([]string{"-C", filepath.Join("test", "lab", "build", module), "tool", name}, args...)
	cmd := exec.Command("go", args...)
	// With the lab's flags: what it has compiled is not compiled again.
	cmd.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0", "GOOS=", "GOARCH=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
}
