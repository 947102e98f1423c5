// Package image makes the image with the three programs and nothing else: no shell, no loader, no certificates, no
// users. From the same programs it makes the same image, byte by byte, wherever it runs.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Repository is the image's name in the manifests, without a tag.
const Repository = "ghcr.io/stayput/stayput"

// Programs are what the image consists of, in its root.
var Programs = []string{"stayput", "stayput-agent", "stayput-controller"}

// labels are the same for image and index, where they are annotations.
func labels(version string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       "stayput",
		"org.opencontainers.image.description": "A stateful pod comes back as it was, on the same node, with the same IP",
		"org.opencontainers.image.source":      "https://github.com/stayput/stayput",
		"org.opencontainers.image.licenses":    "Apache-2.0",
		"org.opencontainers.image.version":     version,
	}
}

// New returns the image of the programs in dir, which were built for the architecture, as Go names it.
func New(dir, arch, version string, created time.Time) (v1.Image, error) {
	programs, err := layer(dir)
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.Append(img, mutate.Addendum{
		Layer: programs, History: v1.History{Created: v1.Time{Time: created}, CreatedBy: "make release"},
	})
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, v1.Time{Time: created}
	config.Config.Labels = labels(version)
	return mutate.ConfigFile(img, config)
}

func layer(dir string) (v1.Layer, error) {
	var content bytes.Buffer
	w := tar.NewWriter(&content)
	for _, program := range Programs {
		data, err := os.ReadFile(filepath.Join(dir, program))
		if err != nil {
			return nil, err
		}
		header := &tar.Header{Name: program, Mode: 0o755, Size: int64(len(data)), Format: tar.FormatUSTAR}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

// WriteArchive writes an image to a file that docker load, podman load and ctr images import read.
func WriteArchive(file, ref string, img v1.Image) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return err
	}
	return tarball.WriteToFile(file, tag, img)
}

// WriteLayout writes a new OCI image layout with an index of the images, by architecture, and returns its digest.
func WriteLayout(dir, version string, images map[string]v1.Image) (v1.Hash, error) {
	if _, err := os.Stat(dir); err == nil {
		return v1.Hash{}, fmt.Errorf("%s exists", dir)
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range slices.Sorted(maps.Keys(images)) {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: images[arch], Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	index = mutate.Annotations(index, labels(version)).(v1.ImageIndex)
	to, err := layout.Write(dir, empty.Index)
	if err != nil {
		return v1.Hash{}, err
	}
	ref := map[string]string{"org.opencontainers.image.ref.name": version}
	if err := to.AppendIndex(index, layout.WithAnnotations(ref)); err != nil {
		return v1.Hash{}, err
	}
	return index.Digest()
}
