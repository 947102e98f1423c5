package lab

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

const (
	imagesFile = "images.tar"

	// PauseImage is what every sandbox runs. It answers HTTP on a port that no program in a pod wants,
	// with its host name and addresses, so that a pod can be reached without a container.
	PauseImage = "lab.stayput.test/pause:1"
	// WebImage does the same on :80.
	WebImage = "lab.stayput.test/web:1"

	pausePort = 7 // echo
)

// Image is a container image made of files of this machine.
type Image struct {
	Ref        string
	Entrypoint []string
	Files      map[string]string // path in the image -> file of this machine, which is copied with its mode
	Links      map[string]string // path in the image -> target of the symbolic link
}

// writeImages turns the program in dir into a docker-archive: two images that share one layer.
func writeImages(dir string) error {
	files := map[string]string{"/podimage": filepath.Join(dir, "podimage")}
	return WriteImages(filepath.Join(dir, imagesFile),
		Image{Ref: PauseImage, Entrypoint: []string{"/podimage", ":" + strconv.Itoa(pausePort)}, Files: files},
		Image{Ref: WebImage, Entrypoint: []string{"/podimage", ":80"}, Files: files})
}

// WriteImages writes a docker-archive, which [Cluster.LoadImage] takes. Every image has one layer; those with the
// same files share it.
func WriteImages(archive string, images ...Image) error {
	f, err := os.Create(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := writeArchive(f, images); err != nil {
		return err
	}
	return f.Close()
}

// archiveEntry is an image in a docker-archive's manifest.json.
type archiveEntry struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// archiveRefs returns the names of the images in a docker-archive.
func archiveRefs(archive string) (refs []string, err error) {
	f, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	tr := tar.NewReader(f)
	for {
		header, err := tr.Next()
		if err != nil {
			return nil, fmt.Errorf("%s has no manifest.json: %w", archive, err)
		}
		if header.Name != "manifest.json" {
			continue
		}
		var manifest []archiveEntry
		if err := json.NewDecoder(tr).Decode(&manifest); err != nil {
			return nil, fmt.Errorf("the manifest of %s: %w", archive, err)
		}
		for _, image := range manifest {
			refs = append(refs, image.RepoTags...)
		}
		return refs, nil
	}
}

func writeArchive(w io.Writer, images []Image) error {
	var files []file
	var manifest []archiveEntry
	written := map[string]bool{}
	for _, image := range images {
		layer, err := image.layer()
		if err != nil {
			return fmt.Errorf("image %s: %w", image.Ref, err)
		}
		layerName := digest(layer) + ".tar"
		if !written[layerName] {
			written[layerName] = true
			files = append(files, file{name: layerName, mode: 0o644, data: layer})
		}
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH,
			"os":           "linux",
			"config":       map[string]any{"Entrypoint": image.Entrypoint},
			"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
		})
		if err != nil {
			return err
		}
		configName := digest(config) + ".json"
		if !written[configName] {
			written[configName] = true
			files = append(files, file{name: configName, mode: 0o644, data: config})
		}
		manifest = append(manifest, archiveEntry{configName, []string{image.Ref}, []string{layerName}})
	}
	data, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	return writeTar(w, append(files, file{name: "manifest.json", mode: 0o644, data: data}))
}

// layer is a tar of the image's files, the same for the same files.
func (i Image) layer() ([]byte, error) {
	var files []file
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		from := i.Files[name]
		data, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		info, err := os.Stat(from)
		if err != nil {
			return nil, err
		}
		files = append(files, file{name: strings.TrimPrefix(name, "/"), mode: int64(info.Mode().Perm()), data: data})
	}
	for _, name := range slices.Sorted(maps.Keys(i.Links)) {
		files = append(files, file{name: strings.TrimPrefix(name, "/"), mode: 0o777, target: i.Links[name]})
	}
	var layer bytes.Buffer
	err := writeTar(&layer, files)
	return layer.Bytes(), err
}

type file struct {
	name   string
	mode   int64
	data   []byte
	target string // of a symbolic link; "" for a regular file
}

func writeTar(w io.Writer, files []file) error {
	tw := tar.NewWriter(w)
	for _, f := range files {
		header := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data))}
		if f.target != "" {
			header.Typeflag, header.Linkname = tar.TypeSymlink, f.target
		}
		if err := tw.WriteHeader(header); err != nil {
			return fmt.Errorf("archiving %s: %w", f.name, err)
		}
		if _, err := tw.Write(f.data); err != nil {
			return fmt.Errorf("archiving %s: %w", f.name, err)
		}
	}
	return tw.Close()
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
