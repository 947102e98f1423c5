// Release makes what a release publishes from the programs that `make release` has built into DIST/bin/OS/ARCH: the
// image, the manifests and the chart with its digest, the archives of kubectl-stayput with the manifest of krew, bills
// of materials, checksums and notes. The same commit makes the same files, byte by byte.
//
//	main.go     the order of these
//	archive.go  .tar.gz and .zip
//	kubectl.go  kubectl-stayput and krew
//	deploy.go   manifests and chart
//	bom.go      bills of materials
//	notes.go    what has changed
package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/stayput/stayput/deploy/release/image"
)

func main() {
	r := release{}
	flag.StringVar(&r.version, "version", "", "the version of the programs, with its v")
	seconds := flag.Int64("epoch", 0, "the time of all files, in seconds since 1970")
	flag.BoolVar(&r.tagged, "tagged", false, "it is published: CHANGELOG.md must have a section of its version")
	archive := flag.String("archive", "", "only write image.tar beside the programs: the image, by this name")
	flag.Parse()
	r.dir, r.at = flag.Arg(0), time.Unix(*seconds, 0).UTC()
	do := r.make
	if *archive != "" {
		do = func() error { return r.archive(*archive) }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// release is what is being made.
type release struct {
	dir     string // DIST
	version string
	tagged  bool
	at      time.Time
	digest  v1.Hash // of the image's index
}

// nodeArchs are the architectures of the image.
var nodeArchs = []string{"amd64", "arm64"}

func (r *release) make() error {
	steps := []func() error{r.image, r.deploy, r.chart, r.kubectl, r.boms, r.notes, r.sums}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// bin is where the programs of a platform are.
func (r *release) bin(os, arch string) string { return filepath.Join(r.dir, "bin", os, arch) }

// digestFile has the digest of the image, for those who sign it.
const digestFile = "digest"

func (r *release) image() (err error) {
	images := map[string]v1.Image{}
	for _, arch := range nodeArchs {
		if images[arch], err = image.New(r.bin("linux", arch), arch, r.version, r.at); err != nil {
			return err
		}
	}
	if r.digest, err = image.WriteLayout(filepath.Join(r.dir, "image"), r.version, images); err != nil {
		return err
	}
	return r.write(digestFile, []byte(r.digest.String()+"\n"))
}

// archive writes the image of the programs of this machine's architecture.
func (r *release) archive(ref string) error {
	img, err := image.New(r.dir, runtime.GOARCH, r.version, r.at)
	if err != nil {
		return err
	}
	return image.WriteArchive(filepath.Join(r.dir, "image.tar"), ref, img)
}

func (r *release) write(name string, data []byte) error {
	return os.WriteFile(filepath.Join(r.dir, name), data, 0o644)
}

// sums writes the checksums of all files that people download, as sha256sum does.
func (r *release) sums() error {
	entries, err := os.ReadDir(r.dir) // sorted by name
	if err != nil {
		return err
	}
	var sums []byte
	for _, e := range entries {
		if !e.Type().IsRegular() || e.Name() == digestFile || e.Name() == notesFile {
			continue
		}
		data, err := os.ReadFile(filepath.Join(r.dir, e.Name()))
		if err != nil {
			return err
		}
		sums = fmt.Appendf(sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return r.write("SHA256SUMS", sums)
}
