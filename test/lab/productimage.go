package lab

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// ProductImage is the name of this repository's image, without a tag.
const ProductImage = "ghcr.io/stayput/stayput"

// imageKept is how long after its last use an image stays in the cache: about as long as a run of all tests. Every
// change of the product makes a new one.
const imageKept = time.Hour

// BuildImage builds the repository's Dockerfile from a product's binaries, with buildah and without a network, and
// returns a docker-archive of [ProductImage] with the tag, for [Cluster.LoadImage]. The file belongs to the cache, not
// to the caller: other processes that want the same image get the same file.
func BuildImage(ctx context.Context, p Product, tag string) (archive string, err error) {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dockerfile := filepath.Join(root, "Dockerfile")
	programs := []string{p.Plugin, p.Agent, p.Controller}
	h := sha256.New()
	fmt.Fprintln(h, tag)
	for _, file := range append([]string{dockerfile}, programs...) {
		if file == "" {
			return "", errors.New("building the image: the product is not whole, see BuildWholeProduct")
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%d\n%s", len(data), data)
	}
	const prefix = "product-"
	archive = filepath.Join(cache, prefix+hex.EncodeToString(h.Sum(nil))[:16]+".tar")
	unlock, err := lock(cache, "product", "builds the image")
	if err != nil {
		return "", err
	}
	defer unlock()
	now := time.Now()
	if exists(archive) {
		return archive, os.Chtimes(archive, now, now)
	}
	old, _ := filepath.Glob(filepath.Join(cache, prefix+"*.tar"))
	for _, file := range old {
		if info, err := os.Stat(file); err == nil && now.Sub(info.ModTime()) > imageKept {
			_ = os.Remove(file) // the next build tries again
		}
	}
	if err := Need(ctx, "buildah"); err != nil {
		return "", err
	}
	dir, remove, err := TempDir("image")
	if err != nil {
		return "", err
	}
	defer func() { err = cmp.Or(err, remove()) }()
	made, err := buildah(ctx, dir, dockerfile, programs, tag)
	if err != nil {
		return "", err
	}
	// The cache may be on another file system.
	partly := archive + ".tmp"
	if err := copyFile(made, partly); err != nil {
		return "", err
	}
	return archive, os.Rename(partly, archive)
}

// buildah builds the Dockerfile over bin/ with those programs, as left by `make build`, and keeps its state below dir,
// except for a list of digests that it insists on keeping in /var/lib/containers/cache.
func buildah(ctx context.Context, dir, dockerfile string, programs []string, tag string) (archive string, err error) {
	made := filepath.Join(dir, "image.tar")
	sources := filepath.Join(dir, "context")
	tmp := filepath.Join(dir, "tmp")
	for _, d := range []string{filepath.Join(sources, "bin"), tmp} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return "", err
		}
	}
	for _, program := range programs {
		to := filepath.Join(sources, "bin", filepath.Base(program))
		if err := errors.Join(copyFile(program, to), os.Chmod(to, 0o755)); err != nil {
			return "", err
		}
	}
	// The Dockerfile runs nothing, so the isolation that needs no other program is enough. Nothing is pulled either: in
	// its own network namespace buildah has no network.
	cmd := exec.CommandContext(ctx, "buildah", "--root="+filepath.Join(dir, "root"),
		"--runroot="+filepath.Join(dir, "run"), "--storage-driver=vfs",
		"build", "--isolation=chroot", "--pull-never", "--timestamp=0", "--file="+dockerfile, "--build-arg=VERSION="+tag,
		"--tag=docker-archive:"+made+":"+ProductImage+":"+tag, sources)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + tmp}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("buildah: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return made, nil
}
