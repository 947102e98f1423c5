package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/stayput/stayput/deploy/release/image"
)

// ProductImage is the name of this repository's image, without a tag.
const ProductImage = image.Repository

// imageKept is how long after its last use an image stays in the cache: about as long as a run of all tests. Every
// change of the product makes a new one.
const imageKept = time.Hour

// BuildImage writes the image of a product's programs, as it is released, to a docker-archive of [ProductImage] with
// the tag, for [Cluster.LoadImage]. The file belongs to the cache, not to the caller: other processes get the same file
// for the same image.
func BuildImage(p Product, tag string) (archive string, err error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(p.Plugin)
	programs, err := image.New(dir, runtime.GOARCH, tag, time.Unix(0, 0))
	if err != nil {
		return "", fmt.Errorf("building the image of a product, see BuildWholeProduct: %w", err)
	}
	digest, err := programs.Digest()
	if err != nil {
		return "", err
	}
	const prefix = "product-"
	archive = filepath.Join(cache, prefix+digest.Hex[:16]+".tar")
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
	partly := archive + ".tmp"
	if err := image.WriteArchive(partly, ProductImage+":"+tag, programs); err != nil {
		return "", err
	}
	return archive, os.Rename(partly, archive)
}
