package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// The images that [sig-apps] StatefulSet and pod networking of Kubernetes' tests run, and what they expect in them.
var (
	agnhostImages = []string{
		"registry.k8s.io/e2e-test-images/agnhost:2.66.1",
		"registry.k8s.io/e2e-test-images/agnhost:2.55",
	}
	upstreamPauseImage = "registry.k8s.io/pause:3.10.2"
)

// BusyboxImage is one of these images, the busybox of Kubernetes' tests.
const BusyboxImage = "registry.k8s.io/e2e-test-images/busybox:1.37.0-2"

// writeConformanceImages makes the images from the program agnhost in dir and from this machine's packages.
func writeConformanceImages(dir string) error {
	ctx := context.Background()
	busybox, err := busyboxFiles(ctx)
	if err != nil {
		return err
	}
	porter, err := moduleDir(ctx, "build/kubernetes", "k8s.io/kubernetes/test/images/agnhost/porter")
	if err != nil {
		return err
	}
	agnhost := Image{
		Entrypoint: []string{"/agnhost"},
		Files: map[string]string{
			"/agnhost":       filepath.Join(dir, "agnhost"),
			"/localhost.crt": filepath.Join(porter, "localhost.crt"),
			"/localhost.key": filepath.Join(porter, "localhost.key"),
			"/bin/busybox":   busybox.Files["/bin/busybox"],
			"/tmp/.keep":     os.DevNull,
			"/uploads/.keep": os.DevNull,
		},
		Links: maps.Clone(busybox.Links),
	}
	agnhost.Links["/agnhost-2"] = "agnhost"
	// busybox's shell would prefer its own nc, which does not know the flags that the tests use.
	for name, from := range map[string]string{"/bin/sh": "dash", "/bin/nc": "nc.openbsd", "/usr/bin/curl": "curl"} {
		delete(agnhost.Links, name)
		program, err := exec.LookPath(from)
		if err != nil {
			return err
		}
		if program, err = filepath.EvalSymlinks(program); err != nil {
			return err
		}
		agnhost.Files[name] = program
		if err := addLibraries(ctx, agnhost.Files, program); err != nil {
			return err
		}
	}
	images := []Image{busybox, {
		Ref: upstreamPauseImage, Entrypoint: []string{"/agnhost", "pause"},
		Files: map[string]string{"/agnhost": agnhost.Files["/agnhost"]},
	}}
	for _, ref := range agnhostImages {
		agnhost.Ref = ref
		images = append(images, agnhost)
	}
	return WriteImages(filepath.Join(dir, imagesFile), images...)
}

// busyboxFiles is an image of the static busybox, with a link for each of its programs.
func busyboxFiles(ctx context.Context) (Image, error) {
	program, err := exec.LookPath("busybox")
	if err != nil {
		return Image{}, err
	}
	list, err := exec.CommandContext(ctx, program, "--list").Output()
	if err != nil {
		return Image{}, err
	}
	image := Image{
		Ref: BusyboxImage, Entrypoint: []string{"/bin/sh"},
		Files: map[string]string{"/bin/busybox": program, "/tmp/.keep": os.DevNull}, Links: map[string]string{},
	}
	for name := range strings.FieldsSeq(string(list)) {
		if name != "busybox" { // it lists itself
			image.Links["/bin/"+name] = "busybox"
		}
	}
	return image, nil
}

// addLibraries adds the shared libraries of a program, and its loader, under their own paths.
func addLibraries(ctx context.Context, files map[string]string, program string) error {
	out, err := exec.CommandContext(ctx, "ldd", program).Output()
	if err != nil {
		return fmt.Errorf("ldd %s: %w", program, err)
	}
	for line := range strings.Lines(string(out)) {
		for field := range strings.FieldsSeq(line) {
			if path.IsAbs(field) {
				files[field] = field
			}
		}
	}
	return nil
}

// moduleDir is the folder of a package that a component is made of. dir is the component's, below test/lab.
func moduleDir(ctx context.Context, dir, pkg string) (string, error) {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", pkg)
	cmd.Dir = filepath.Join(root, "test", "lab", dir)
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return "", fmt.Errorf("go list %s: %w: %s", pkg, err, exit.Stderr)
	}
	return string(bytes.TrimSpace(out)), err
}
