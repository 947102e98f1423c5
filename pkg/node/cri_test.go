package node

import (
	"reflect"
	"testing"

	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/internal/nodetest"
)

func TestWhatTheRuntimeSaysAboutItsCNIConfiguration(t *testing.T) {
	one := 1
	w := newWorld(t)
	for config, want := range map[string]cniconf.Runtime{
		`{"cni":{"binDirs":["/a","/b"],"confDir":"/c","maxConfNum":1}}`: {ConfDir: "/c", BinDirs: []string{"/a", "/b"}, MaxConfNum: &one},
		`{"cni":{"binDir":"/a","confDir":"/c","maxConfNum":1}}`:         {ConfDir: "/c", BinDirs: []string{"/a"}, MaxConfNum: &one}, // containerd 1
		`{"other":1}`: {},
		`{}`:          {},
		`no JSON`:     {},
		``:            {}, // another runtime
	} {
		w.runtime.SetConfig(config)
		if got, err := w.a.cri.cni(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", config, got, err)
		}
	}
	w.runtime.Fail(nodetest.ErrRuntime)
	if got, err := w.a.cri.cni(t.Context()); err == nil {
		t.Errorf("of one that fails: %+v", got)
	}
}
