package lab

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// ProgramImage returns an image of programs of this machine, at their own paths, with the libraries that they need.
func ProgramImage(ctx context.Context, ref string, programs ...string) (Image, error) {
	image := Image{Ref: ref, Files: map[string]string{}, Links: map[string]string{}}
	return image, image.AddPrograms(ctx, programs...)
}

// Busybox returns [BusyboxImage].
func Busybox(ctx context.Context) (Image, error) {
	if err := Need(ctx, "busybox-static"); err != nil {
		return Image{}, err
	}
	return busyboxFiles(ctx)
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

// AddPackages adds the files that Debian packages of this machine have below some folders. Links to files become files.
func (i Image) AddPackages(ctx context.Context, folders []string, packages ...string) error {
	out, err := exec.CommandContext(ctx, "dpkg-query", append([]string{"--listfiles"}, packages...)...).Output()
	if err != nil {
		return fmt.Errorf("image %s: dpkg-query: %w", i.Ref, err)
	}
	for line := range strings.Lines(string(out)) {
		name := strings.TrimSpace(line)
		below := slices.ContainsFunc(folders, func(dir string) bool { return strings.HasPrefix(name, dir+"/") })
		// Some links lead nowhere, to what other packages have.
		if info, err := os.Stat(name); below && err == nil && info.Mode().IsRegular() {
			i.Files[path.Clean(name)] = name
		}
	}
	return nil
}
