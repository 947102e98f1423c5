package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestWriteReplacesTheWholeFile(t *testing.T) {
	for _, must := range []bool{false, true} {
		dir := t.TempDir()
		path := filepath.Join(dir, "f")
		if err := os.WriteFile(path, []byte("what was there before"), 0o600); err != nil {
			t.Fatal(err)
		}
		f := File{Path: path, Mode: 0o751, MustExist: must, Accept: func(temp string) error {
			if b, err := os.ReadFile(temp); string(b) != "new" {
				t.Errorf("Accept is given %q, %v", b, err)
			}
			return nil
		}}
		if err := f.Write(strings.NewReader("new")); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		info, statErr := os.Stat(path)
		if string(b) != "new" || err != nil || statErr != nil || info.Mode().Perm() != 0o751 {
			t.Errorf("%q, %v, mode %v", b, err, info.Mode())
		}
		if got := names(t, dir); !slices.Equal(got, []string{"f"}) {
			t.Errorf("it left %v", got)
		}
	}
}

func TestARefusedOrFailedWriteLeavesEverythingAsItWas(t *testing.T) {
	dir := t.TempDir()
	refusal := errors.New("no good")
	for name, c := range map[string]struct {
		file File
		want error
	}{
		"refused":     {File{Path: filepath.Join(dir, "f"), Accept: func(string) error { return refusal }}, refusal},
		"removed":     {File{Path: filepath.Join(dir, "f"), MustExist: true}, fs.ErrNotExist},
		"a directory": {File{Path: filepath.Join(dir, "none", "f")}, fs.ErrNotExist},
	} {
		err := c.file.Write(strings.NewReader("new"))
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.file.Path) ||
			strings.Contains(err.Error(), TempPrefix) {
			t.Errorf("%s: %v", name, err)
		}
		if got := names(t, dir); len(got) != 0 {
			t.Errorf("%s: it left %v", name, got)
		}
	}
}

func TestSweepRemovesTemporaryFilesOnly(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"f", TempPrefix + "123", ".stayput"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Sweep(dir); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, dir), []string{".stayput", "f"}; !slices.Equal(got, want) {
		t.Errorf("left %v, want %v", got, want)
	}
}
