package lab

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

const (
	imagesFile = "images.tar"

	// PauseImage is what every sandbox runs. It answers HTTP on :8080 with its host name and addresses, so
	// that a pod can be reached without a container.
	PauseImage = "lab.stayput.test/pause:1"
	// WebImage does the same on :80.
	WebImage = "lab.stayput.test/web:1"
)

// writeImages turns the program in dir into a docker-archive: two images that share one layer.
func writeImages(dir string) error {
	program, err := os.ReadFile(filepath.Join(dir, "podimage"))
	if err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, imagesFile))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := writeArchive(f, program); err != nil {
		return err
	}
	return f.Close()
}

func writeArchive(w io.Writer, program []byte) error {
	var layer bytes.Buffer
	if err := writeTar(&layer, []file{{"podimage", 0o755, program}}); err != nil {
		return err
	}
	const layerName = "layer.tar"
	files := []file{{layerName, 0o644, layer.Bytes()}}

	type entry struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	var manifest []entry
	for _, image := range []struct{ ref, listen string }{{PauseImage, ":8080"}, {WebImage, ":80"}} {
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH,
			"os":           "linux",
			"config":       map[string]any{"Entrypoint": []string{"/podimage", image.listen}},
			"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer.Bytes())}},
		})
		if err != nil {
			return err
		}
		name := digest(config) + ".json"
		files = append(files, file{name, 0o644, config})
		manifest = append(manifest, entry{name, []string{image.ref}, []string{layerName}})
	}
	data, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	return writeTar(w, append(files, file{"manifest.json", 0o644, data}))
}

type file struct {
	name string
	mode int64
	data []byte
}

func writeTar(w io.Writer, files []file) error {
	tw := tar.NewWriter(w)
	for _, f := range files {
		if err := tw.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data))}); err != nil {
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
