package lab

import (
	"context"
	"fmt"
	"path/filepath"
)

// ProgramImage returns an image of programs of this machine, at their own paths, with the libraries that they need.
func ProgramImage(ctx context.Context, ref string, programs ...string) (Image, error) {
	image := Image{Ref: ref, Files: map[string]string{}, Links: map[string]string{}}
	return image, image.AddPrograms(ctx, programs...)
}

// EtcdImage returns an image of the lab's etcd, which needs no libraries.
func EtcdImage(ctx context.Context, ref string) (Image, error) {
	bin, err := BuildCluster(ctx)
	return Image{Ref: ref, Files: map[string]string{"/usr/local/bin/etcd": filepath.Join(bin.Etcd, "etcd")}}, err
}

// AddPrograms adds programs of this machine, or libraries, with the libraries that they need.
func (i Image) AddPrograms(ctx context.Context, programs ...string) error {
	for _, program := range programs {
		i.Files[program] = program
		if err := addLibraries(ctx, i.Files, program); err != nil {
			return fmt.Errorf("image %s: %w", i.Ref, err)
		}
	}
	return nil
}
