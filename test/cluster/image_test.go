package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// unpack returns the files of a tar archive by path.
func unpack(t *testing.T, archive io.Reader) map[string]*unpacked {
	t.Helper()
	files := map[string]*unpacked{}
	for r := tar.NewReader(archive); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must.Do(t, err)
		data, err := io.ReadAll(r)
		must.Do(t, err)
		files[path.Clean("/"+h.Name)] = &unpacked{h, data}
	}
}

type unpacked struct {
	*tar.Header
	data []byte
}

// This is the image that the tests install. Without shell, loader, certificates and user database, nothing in it can be
// out of date or help an intruder.
func TestTheImageHasOnlyTheThreeStaticPrograms(t *testing.T) {
	built, version, archive := builtImage(t)
	f, err := os.Open(archive)
	must.Do(t, err)
	defer f.Close()
	parts := unpack(t, f)

	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	must.Do(t, json.Unmarshal(parts["/manifest.json"].data, &manifest))
	if len(manifest) != 1 || len(manifest[0].RepoTags) != 1 || manifest[0].RepoTags[0] != lab.ProductImage+":"+version {
		t.Fatalf("the images %+v", manifest)
	}
	var image struct {
		Config struct {
			Entrypoint, Cmd []string
			User            string
			Labels          map[string]string
		}
	}
	must.Do(t, json.Unmarshal(parts["/"+manifest[0].Config].data, &image))
	if c := image.Config; len(c.Entrypoint)+len(c.Cmd) > 0 || c.User != "" ||
		c.Labels["org.opencontainers.image.version"] != version {
		t.Errorf("the configuration of the image is %+v", c)
	}

	programs := map[string]string{
		"/stayput": built.Plugin, "/stayput-agent": built.Agent, "/stayput-controller": built.Controller,
	}
	for _, layer := range manifest[0].Layers {
		content, err := gzip.NewReader(bytes.NewReader(parts[path.Clean("/"+layer)].data))
		must.Do(t, err)
		for name, file := range unpack(t, content) {
			program, ok := programs[name]
			if !ok {
				t.Errorf("unexpected file %s in the image", name)
				continue
			}
			delete(programs, name)
			if file.Typeflag != tar.TypeReg || file.Mode&0o7777 != 0o755 || file.Uid != 0 || file.Gid != 0 {
				t.Errorf("%s has type %c, mode %o and owner %d:%d", name, file.Typeflag, file.Mode, file.Uid, file.Gid)
			}
			want, err := os.ReadFile(program)
			must.Do(t, err)
			if !bytes.Equal(file.data, want) {
				t.Errorf("%s is not what was built", name)
			}
			static(t, name, file.data)
		}
	}
	for name := range programs {
		t.Errorf("%s is missing", name)
	}
}

// static fails the test for a program that needs a loader or a library.
func static(t *testing.T, name string, program []byte) {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(program))
	must.Do(t, err)
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("%s has a segment %v", name, p.Type)
		}
	}
	if libraries, err := f.ImportedLibraries(); len(libraries) > 0 {
		t.Errorf("%s needs %v, %v", name, libraries, err)
	}
}
