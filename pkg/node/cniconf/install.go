package cniconf

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/netconf"
)

// PluginName is the file name of the plugin, which is its type in a CNI configuration.
const PluginName = netconf.Type

// pluginPackage is the main package of the plugin, which identifies its binary.
const pluginPackage = "github.com/stayput/stayput/cmd/stayput"

// PluginStatus describes the plugin's binary.
type PluginStatus struct {
	Path      string `json:"path"`
	Installed bool   `json:"installed"`
	Version   string `json:"version,omitempty"`
	// Problem is why the binary is missing, cannot be run, or is not the agent's own.
	Problem string `json:"problem,omitempty"`
}

// inspectPlugin describes the binary without running it.
func inspectPlugin(binDir string) PluginStatus {
	s := PluginStatus{Path: filepath.Join(binDir, PluginName)}
	info, err := buildinfo.ReadFile(s.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.Problem = "not installed"
	case err != nil:
		s.Problem = err.Error()
	case info.Path != pluginPackage:
		s.Problem = "not Stayput's plugin: " + info.Path
	default:
		s.Installed, s.Version = true, info.Main.Version
		if s.Version == "" {
			s.Version = "(devel)"
		}
	}
	return s
}

// installer keeps the plugin's binary in place.
type installer struct {
	source, dir string
	tried       fileID    // the binary that was last run
	answered    error     // what became of that
	same        [2]fileID // source and target when their content was last the same
}

// fileID tells one content of a file from another without reading it.
type fileID struct {
	dev, ino  uint64
	size      int64
	mod, chng unix.Timespec
}

func statFile(path string) (fileID, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fileID{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return fileID{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

func (i *installer) target() string { return filepath.Join(i.dir, PluginName) }

// pluginState is what is known of the binary that is in place.
type pluginState int

const (
	pluginUnknown pluginState = iota
	pluginRuns
	pluginFails // it is missing, or cannot be run
)

// ensure puts the binary in place unless it is there already, and tries it first: the old one may be running meanwhile.
// With an error an older one may still run.
func (i *installer) ensure(ctx context.Context) (pluginState, error) {
	err := i.install(ctx)
	state, runErr := i.try(ctx)
	return state, errors.Join(err, runErr)
}

func (i *installer) install(ctx context.Context) error {
	from, err := statFile(i.source)
	if err != nil {
		return err
	}
	if to, err := statFile(i.target()); err == nil && i.same == [2]fileID{from, to} {
		return nil
	}
	if err := i.replace(ctx); err != nil {
		return err
	}
	to, err := statFile(i.target())
	if err == nil {
		i.same = [2]fileID{from, to}
	}
	return err
}

// replace copies the source unless the target has its content.
func (i *installer) replace(ctx context.Context) error {
	want, err := digest(i.source)
	is, isErr := digest(i.target())
	if err = errors.Join(err, ignoreMissing(isErr)); err != nil {
		return err
	}
	if is == want {
		info, err := os.Stat(i.target())
		if err != nil || info.Mode().Perm() == 0o755 {
			return err
		}
		return os.Chmod(i.target(), 0o755)
	}
	if info, err := buildinfo.ReadFile(i.source); err != nil || info.Path != pluginPackage {
		return fmt.Errorf("%s is not Stayput's plugin", i.source)
	}
	source, err := os.Open(i.source)
	if err != nil {
		return err
	}
	defer source.Close()
	return atomicfile.File{Path: i.target(), Mode: 0o755, Accept: func(temp string) error {
		return answersVersion(ctx, temp)
	}}.Write(source)
}

// digest tells one content of a file from another.
func digest(path string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return [sha256.Size]byte(h.Sum(nil)), err
}

// try runs the binary once for each content.
func (i *installer) try(ctx context.Context) (pluginState, error) {
	id, err := statFile(i.target())
	if errors.Is(err, fs.ErrNotExist) {
		return pluginFails, err
	}
	if err != nil {
		return pluginUnknown, err
	}
	if id != i.tried {
		err := answersVersion(ctx, i.target())
		if err != nil {
			err = fmt.Errorf("%s: %w", i.target(), err)
		}
		if errors.Is(err, errNoAnswer) {
			return pluginUnknown, err
		}
		i.tried, i.answered = id, err
	}
	if i.answered != nil {
		// The reason may lie outside of the file, such as a mount with noexec: try again next time.
		i.tried = fileID{}
		return pluginFails, i.answered
	}
	return pluginRuns, nil
}

// errNoAnswer says that it is not known whether the plugin runs.
var errNoAnswer = errors.New("no response")

const versionTimeout = 30 * time.Second

// answersVersion runs a plugin's VERSION command, again while a process that was forked meanwhile has the file open for
// writing until its exec.
func answersVersion(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	for {
		err := askVersion(ctx, path)
		if !errors.Is(err, syscall.ETXTBSY) {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func askVersion(ctx context.Context, path string) error {
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = []string{"CNI_COMMAND=VERSION"}
	cmd.Stdin = strings.NewReader(`{"cniVersion":"1.0.0"}`)
	out, err := cmd.Output()
	var exit *exec.ExitError
	var answer struct{ SupportedVersions []string }
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("VERSION failed: %w", errNoAnswer)
	case errors.As(err, &exit) && exit.Exited(), errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist),
		errors.Is(err, syscall.ENOEXEC):
		return fmt.Errorf("cannot be executed: %w", cause(err))
	case err != nil: // killed, or the machine is out of processes or memory
		return fmt.Errorf("VERSION failed: %w: %w", errNoAnswer, cause(err))
	case json.Unmarshal(out, &answer) != nil || len(answer.SupportedVersions) == 0:
		return fmt.Errorf("VERSION returned %.64q: expected the supported versions", out)
	}
	return nil
}

// cause returns the system's error number in err, or err if there is none.
func cause(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}
