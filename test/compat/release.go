package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
)

// published is a release in a registry. The nodes find it there by the name that its manifests have.
type published struct {
	dist, keys string // folders
	digest     string // of the image
}

// registryHost is that of the manifests' image.
const registryHost = "ghcr.io"

func newPublished(dist, dir string) (*published, error) {
	dist, err := filepath.Abs(dist)
	if err != nil {
		return nil, err
	}
	digest, err := os.ReadFile(filepath.Join(dist, "digest"))
	if err != nil {
		return nil, fmt.Errorf("%w: run make release", err)
	}
	return &published{dist: dist, keys: dir, digest: strings.TrimSpace(string(digest))}, nil
}

// product are its programs for this machine.
func (p *published) product() lab.Product {
	program := func(name string) string { return filepath.Join(p.dist, "bin", "linux", "amd64", name) }
	return lab.Product{
		Plugin: program("stayput"), Agent: program("stayput-agent"), Controller: program("stayput-controller"),
		Kubectl: program("kubectl-stayput"),
	}
}

// publish pushes the release as make publish does, signed with a key of its own and without a transparency log, and
// verifies the signatures; with another key it cannot.
func (s *stage) publish(ctx context.Context) error {
	p := s.products.published
	address, err := s.StartRegistry(ctx, registryHost)
	if err != nil {
		return err
	}
	for _, name := range []string{"cosign", "other"} {
		if _, err := cosign(ctx, "generate-key-pair", "--output-key-prefix="+filepath.Join(p.keys, name)); err != nil {
			return err
		}
	}
	registry := address + "/stayput"
	root, err := repository(ctx)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "make", "publish", "REGISTRY="+registry, "DIST="+p.dist, "HELM_FLAGS=--plain-http",
		"COSIGN_FLAGS=--yes --use-signing-config=false --tlog-upload=false --key="+filepath.Join(p.keys, "cosign.key"))
	cmd.Dir = root
	cmd.Env = append(os.Environ(), noPassword, "MAKEFLAGS=", "MAKEOVERRIDES=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make publish: %w\n%s", err, out)
	}
	chart, err := chartDigest(ctx, address)
	if err != nil {
		return err
	}
	refs := []string{registry + "/stayput@" + p.digest, registry + "/charts/stayput@" + chart}
	for _, ref := range refs {
		if err := p.verified(ctx, "verify", ref); err != nil {
			return err
		}
	}
	sums := filepath.Join(p.dist, "SHA256SUMS")
	if err := p.verified(ctx, "verify-blob", "--bundle="+sums+".sigstore.json", sums); err != nil {
		return err
	}
	s.Published = "oci://" + registry + "/charts/stayput"
	s.note = p.digest
	return nil
}

// verified returns an error unless cosign accepts something with the public key, and with no other.
func (p *published) verified(ctx context.Context, args ...string) error {
	with := func(key string) error {
		all := append([]string{args[0], "--insecure-ignore-tlog=true", "--key=" + filepath.Join(p.keys, key)}, args[1:]...)
		_, err := cosign(ctx, all...)
		return err
	}
	if err := with("cosign.pub"); err != nil {
		return err
	}
	if with("other.pub") == nil {
		return fmt.Errorf("cosign %s accepts a key that has signed nothing", strings.Join(args, " "))
	}
	return nil
}

const noPassword = "COSIGN_PASSWORD="

// cosign runs the program as make publish does.
func cosign(ctx context.Context, args ...string) ([]byte, error) {
	root, err := repository(ctx)
	if err != nil {
		return nil, err
	}
	args = append([]string{"-C", filepath.Join(root, "test", "lab", "build", "cosign"), "tool", "cosign"}, args...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0", noPassword)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("cosign %s: %w\n%s", strings.Join(args[4:], " "), err, out)
	}
	return out, err
}

// chartDigest asks the registry for the digest of the chart's only version.
func chartDigest(ctx context.Context, address string) (string, error) {
	chart, err := lab.Chart(ctx)
	if err != nil {
		return "", err
	}
	version, err := lab.ChartVersion(chart)
	if err != nil {
		return "", err
	}
	url := "http://" + address + "/v2/stayput/charts/stayput/manifests/" + strings.TrimPrefix(version, "v")
	request, err := http.NewRequestWithContext(ctx, http.MethodHead, url, nil)
	if err != nil {
		return "", err
	}
	request.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	digest := response.Header.Get("Docker-Content-Digest")
	if digest == "" {
		return "", errors.New(url + ": " + response.Status)
	}
	return digest, nil
}

// pulled returns an error unless every pod of Stayput runs the published image, by its digest: no such image was loaded
// into a node.
func (s *stage) pulled(ctx context.Context) error {
	p := s.products.published
	if p == nil {
		return nil
	}
	pods, err := s.Client().CoreV1().Pods(lab.SystemNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	want := lab.ProductImage + "@" + p.digest
	found := 0
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp != nil {
			continue // of the version before
		}
		for _, c := range pod.Status.ContainerStatuses {
			if c.Image != want && c.ImageID != want {
				return fmt.Errorf("%s runs %s, %s, and not %s", pod.Name, c.Image, c.ImageID, want)
			}
			found++
		}
	}
	if found == 0 {
		return errors.New("no pod of Stayput has a container")
	}
	log, err := os.ReadFile(s.Control.LogFile("registry"))
	if err != nil {
		return err
	}
	if !bytes.Contains(log, []byte("containerd/")) || !bytes.Contains(log, []byte(p.digest)) {
		return errors.New("no containerd has asked the registry for the image")
	}
	return nil
}

// installPublished installs the published chart where nothing is left of the steps before, and removes it.
func (s *stage) installPublished(ctx context.Context) error {
	if err := s.Install(ctx, lab.InstallOptions{Values: s.values()}); err != nil {
		return err
	}
	if err := s.pulled(ctx); err != nil {
		return err
	}
	if err := s.gatesSoon(ctx); err != nil {
		return err
	}
	if err := s.template(ctx, `{"metadata":{"annotations":{"stayput.io/retain-ip":"10m"}}}`); err != nil {
		return err
	}
	if err := s.deletion(ctx); err != nil {
		return err
	}
	return s.removalByHelm(ctx)
}
