package cri

import (
	"path/filepath"
	"reflect"
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
	runtime.Fail(nodetest.ErrRuntime)
	if got, err := c.CNI(t.Context()); err == nil {
		t.Errorf("of one that fails: %+v", got)
	}
}
