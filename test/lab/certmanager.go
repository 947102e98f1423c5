package lab

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
)

// certManagerComponent is cert-manager, and images of its three programs.
var certManagerComponent = component{
	name: "cert-manager", dir: "build/certmanager", sources: []string{"build/certmanager", "image.go"}, pkg: ".",
	parallel: 2, finish: writeCertManagerImages,
}

// CertManagerNamespace is where [Cluster.InstallCertManager] installs cert-manager.
const CertManagerNamespace = "cert-manager"

// certManagerPrograms are cert-manager's programs, each with an image, by the keys of its chart's values.
var certManagerPrograms = map[string]string{"": "controller", "cainjector": "cainjector", "webhook": "webhook"}

func certManagerImage(program string) string { return "lab.stayput.test/cert-manager-" + program }

func writeCertManagerImages(dir string) error {
	var images []Image
	for _, program := range certManagerPrograms {
		images = append(images, Image{
			Ref: certManagerImage(program) + ":1", Entrypoint: []string{"/certmanager", program},
			Files: map[string]string{"/certmanager": filepath.Join(dir, "certmanager")},
		})
	}
	return WriteImages(filepath.Join(dir, imagesFile), images...)
}

// InstallCertManager installs cert-manager with its own chart, without the check that ends the installation, and waits
// until its programs are Ready. The API server must reach Services.
func (c *Cluster) InstallCertManager(ctx context.Context) error {
	archive, err := BuildCertManager(ctx)
	if err != nil {
		return err
	}
	if err := c.LoadImage(ctx, archive); err != nil {
		return err
	}
	pkg, err := moduleDir(ctx, certManagerComponent.dir, "github.com/cert-manager/cert-manager/pkg/healthz")
	if err != nil {
		return err
	}
	chart := filepath.Join(pkg, "../../deploy/charts/cert-manager") // a release only sets its version
	values := map[string]any{"crds": map[string]any{"enabled": true}, "startupapicheck": map[string]any{"enabled": false}}
	for key, program := range certManagerPrograms {
		of := map[string]any{
			"image":           map[string]any{"repository": certManagerImage(program), "tag": "1", "pullPolicy": "Never"},
			"securityContext": map[string]any{"runAsUser": 1000}, // the lab's images have no user
		}
		if key == "" {
			values = merged(values, of)
		} else {
			values[key] = of
		}
	}
	data, err := json.Marshal(values)
	if err != nil {
		return err
	}
	file := filepath.Join(c.Dir, "cert-manager.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return err
	}
	_, err = c.Helm(ctx, "install", "cert-manager", chart, "--namespace="+CertManagerNamespace, "--create-namespace",
		"--values="+file, "--wait")
	return err
}
