package cri

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestWhatTheRuntimeSaysAboutItsCNIConfiguration(t *testing.T) {
	one := 1
	socket := filepath.Join(t.TempDir(), "cri.sock")
	runtime := nodetest.StartRuntime(t, socket)
	c, err := New(socket)
	must.Do(t, err)
	defer c.Close()
	for config, want := range map[string]cniconf.Runtime{
		`{"cni":{"binDirs":["/a","/b"],"confDir":"/c","maxConfNum":1}}`: {ConfDir: "/c", BinDirs: []string{"/a", "/b"},
			MaxConfNum: &one},
		// containerd 1
		`{"cni":{"binDir":"/a","confDir":"/c","maxConfNum":1}}`: {ConfDir: "/c", BinDirs: []string{"/a"},
			MaxConfNum: &one},
		`{"other":1}`: {},
		`{}`:          {},
		`no JSON`:     {},
		``:            {}, // another runtime
	} {
		runtime.SetConfig(config)
		if got, err := c.CNI(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", config, got, err)
		}
	}
	runtime.SetConfig(`{"sandboxImage":"pause","crio":{"default_runtime":"crun"}}`)
	runtime.SetName("cri-o")
	if got, err := c.CNI(t.Context()); err != nil || !reflect.DeepEqual(got, cniconf.Runtime{Name: "cri-o"}) {
		t.Errorf("of CRI-O: %+v, %v", got, err)
	}
	runtime.Fail(nodetest.ErrRuntime)
	if got, err := c.CNI(t.Context()); err == nil {
		t.Errorf("of one that fails: %+v", got)
	}
}

func TestARuntimeThatWasStartedAgainIsNoticedByItsProcess(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cri.sock")
	nodetest.StartRuntime(t, socket)
	for earlier, want := range map[int]int{0: 0, os.Getpid(): 0, 1: 1} {
		c, err := New(socket)
		must.Do(t, err)
		defer c.Close()
		restarts := 0
		c.Restarted = func() { restarts++ }
		c.peerPID.Store(int32(earlier))
		_, err = c.Sandboxes(t.Context())
		must.Do(t, err)
		if restarts != want || c.PID() != os.Getpid() {
			t.Errorf("after process %d: %d restarts, now %d", earlier, restarts, c.PID())
		}
	}
}

func TestARuntimeWithAnotherSocketIsNamed(t *testing.T) {
	dir, err := os.MkdirTemp("", "cri-") // short: a socket's path has 108 bytes
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, os.RemoveAll(dir)) })
	socket := filepath.Join(dir, "run/containerd/containerd.sock")
	c, err := New(socket)
	must.Do(t, err)
	defer c.Close()
	c.root = dir
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Sandboxes(ctx); err == nil || !strings.Contains(err.Error(), socket+" does not exist") {
		t.Errorf("without any: %v", err)
	}
	must.Do(t, os.MkdirAll(filepath.Join(dir, "var/run/crio"), 0o755))
	nodetest.StartRuntime(t, filepath.Join(dir, "var/run/crio/crio.sock"))
	if _, err := c.Sandboxes(ctx); err == nil ||
		!strings.Contains(err.Error(), "but /var/run/crio/crio.sock does: set --cri-socket to that") {
		t.Errorf("with another: %v", err)
	}
	must.Do(t, os.MkdirAll(filepath.Dir(socket), 0o755))
	nodetest.StartRuntime(t, socket)
	if _, err := c.Sandboxes(t.Context()); err != nil {
		t.Errorf("with its own: %v", err)
	}
}
