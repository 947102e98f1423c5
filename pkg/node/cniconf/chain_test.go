package cniconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/test/must"
)

// What meshes do to the file that comes first, to all files, or to one of their own.
const (
	meshSource = "10-pods.conflist"
	mesh       = `{"type":"istio-cni","ambient_enabled":false}`
	newMesh    = `{"type":"istio-cni","ambient_enabled":true}`
	portmap    = `{"type":"portmap","snat":true}`
	bandwidth  = `{"type":"bandwidth"}`
)

// chained is a configuration of a bridge with these plugins behind it.
func chained(plugins ...string) string {
	const bridge = `{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`
	return `{"cniVersion":"1.0.0","name":"pods","plugins":[` + strings.Join(append([]string{bridge}, plugins...), ",") + `]}`
}

// behind returns the plugins behind the first in a configuration, as chained takes them.
func behind(t *testing.T, data string) (plugins []string) {
	t.Helper()
	var list struct{ Plugins []json.RawMessage }
	must.Do(t, json.Unmarshal([]byte(data), &list))
	for _, p := range list.Plugins[1:] {
		var m any
		must.Do(t, json.Unmarshal(p, &m))
		compact, err := json.Marshal(m)
		must.Do(t, err)
		for _, known := range []string{mesh, newMesh, portmap, bandwidth} {
			var is any
			must.Do(t, json.Unmarshal([]byte(known), &is))
			if same, _ := json.Marshal(is); string(same) == string(compact) {
				compact = []byte(known)
			}
		}
		plugins = append(plugins, string(compact))
	}
	return plugins
}

// edit has another program give a file these plugins behind the first, in its own way of writing.
func (w *confWorld) edit(file string, plugins ...string) {
	w.t.Helper()
	path := filepath.Join(w.conf, file)
	data, err := os.ReadFile(path)
	must.Do(w.t, err)
	var list map[string]any
	must.Do(w.t, json.Unmarshal(data, &list))
	all := list["plugins"].([]any)[:1]
	for _, p := range plugins {
		var m any
		must.Do(w.t, json.Unmarshal([]byte(p), &m))
		all = append(all, m)
	}
	list["plugins"] = all
	data, err = json.Marshal(list)
	must.Do(w.t, err)
	w.write(file, string(data))
}

func TestChainedPluginsAreMergedByWhoChangedThem(t *testing.T) {
	type plugins = []string
	for name, c := range map[string]struct {
		before     plugins // in the source when the agent first wrote
		own, after plugins // in the agent's file and in the source then, nil: unchanged
		want       plugins
	}{
		"nobody changed any":             {plugins{portmap, mesh}, nil, nil, plugins{portmap, mesh}},
		"a mesh comes to the first file": {plugins{portmap}, plugins{portmap, mesh}, nil, plugins{portmap, mesh}},
		"a mesh comes to both": {plugins{portmap}, plugins{portmap, mesh}, plugins{portmap, mesh},
			plugins{portmap, mesh}},
		"a mesh comes to the source":      {plugins{portmap}, nil, plugins{portmap, mesh}, plugins{portmap, mesh}},
		"a mesh goes from the first file": {plugins{mesh, portmap}, plugins{portmap}, nil, plugins{portmap}},
		"a mesh goes from both": {plugins{portmap, mesh}, plugins{portmap}, plugins{portmap},
			plugins{portmap}},
		"a mesh goes from the source": {plugins{portmap, mesh}, nil, plugins{portmap}, plugins{portmap}},
		"new settings in the first file": {plugins{portmap, mesh}, plugins{portmap, newMesh}, nil,
			plugins{portmap, newMesh}},
		"new settings in the source": {plugins{portmap, mesh}, nil, plugins{portmap, newMesh},
			plugins{portmap, newMesh}},
		"other settings in both": {plugins{mesh}, plugins{`{"type":"istio-cni"}`}, plugins{newMesh}, plugins{newMesh}},
		"another place in the first file": {plugins{mesh, portmap}, plugins{portmap, newMesh}, nil,
			plugins{portmap, newMesh}},
		"another place in the source": {plugins{mesh, portmap}, nil, plugins{portmap, mesh}, plugins{portmap, mesh}},
		"a mesh, and a plugin of the source's": {plugins{portmap}, plugins{portmap, mesh}, plugins{portmap, bandwidth},
			plugins{portmap, bandwidth, mesh}},
		"a mesh goes, a plugin comes":       {plugins{mesh}, plugins{}, plugins{mesh, portmap}, plugins{portmap}},
		"a mesh goes, and has new settings": {plugins{mesh}, plugins{}, plugins{newMesh}, plugins{newMesh}},
		"two of a kind": {plugins{portmap, portmap}, plugins{portmap, portmap, mesh}, nil,
			plugins{portmap, portmap, mesh}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.write(meshSource, chained(c.before...))
			w.look(StateActive)
			if c.own != nil {
				w.edit(ConflistName, c.own...)
			}
			if c.after != nil {
				w.write(meshSource, chained(c.after...))
			}
			for range 3 { // what it has decided it stands by, also after a restart
				w.look(StateActive)
				if got := behind(t, w.own()); !slices.Equal(got, c.want) {
					t.Errorf("%v, want %v", got, c.want)
				}
				w.restart()
			}
			written, err := statFile(filepath.Join(w.conf, ConflistName))
			must.Do(t, err)
			w.look(StateActive)
			if now, err := statFile(filepath.Join(w.conf, ConflistName)); err != nil || now != written {
				t.Errorf("it is written again: %v", err)
			}
		})
	}
}

// A mesh that was removed from the first file alone is still in the source, and comes back from there by its installer
// only.
func TestAMeshThatIsInstalledAgainIsChainedAgain(t *testing.T) {
	w := newConfWorld(t)
	w.write(meshSource, chained(portmap, mesh))
	w.look(StateActive)
	w.edit(ConflistName, portmap)
	w.look(StateActive)
	w.edit(ConflistName, portmap, newMesh)
	w.look(StateActive)
	if got := behind(t, w.own()); !slices.Equal(got, []string{portmap, newMesh}) {
		t.Errorf("%v", got)
	}
}

func (w *confWorld) install(programs ...string) {
	w.t.Helper()
	for _, name := range programs {
		must.Do(w.t, os.WriteFile(filepath.Join(w.bins, name), []byte("#!/bin/sh\n"), 0o755))
	}
}

// settle makes the directory of plugins one that nobody has changed for a while.
func (w *confWorld) settle() {
	w.t.Helper()
	then := time.Now().Add(-lasting)
	must.Do(w.t, os.Chtimes(w.bins, then, then))
}

func TestAPluginThatTheRuntimeDoesNotHaveIsNotNamed(t *testing.T) {
	w := newConfWorld(t)
	w.runtime.BinDirs = []string{w.bins}
	w.install("bridge", "portmap")
	w.write(meshSource, chained(mesh, portmap))
	named := func(want ...string) {
		t.Helper()
		s := w.look(StateActive)
		if got := behind(t, w.own()); !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
		degraded := strings.HasPrefix(w.k.Line(), Degraded) && strings.Contains(w.k.Line(),
			"10-pods.conflist names istio-cni")
		missing := !slices.Contains(want, mesh)
		if missing != degraded || missing != (s.Problem != "") {
			t.Errorf("/readyz: %s", w.k.Line())
		}
		if metric := testutil.ToFloat64(w.k.metrics.incomplete) == 1; metric != missing {
			t.Errorf("stayput_agent_cni_config_incomplete: %v with %v", metric, want)
		}
	}
	named(portmap) // a removal of the mesh left it in the source, and somebody removed our file
	w.wantSaid(EventNotConfigured)
	w.restart()
	named(portmap)
	w.install("istio-cni")
	named(mesh, portmap)
	w.wantSaid(EventNotConfigured, EventNotConfigured, EventConfigured)

	// An installer replaces it: for that moment the pods fail that would start past the mesh.
	w.remove(w.bins, "istio-cni")
	w.look(StateActive)
	named(mesh, portmap)
	if again := w.k.observe(t.Context()); again <= 0 || again > lasting {
		t.Errorf("it looks again after %s", again)
	}
	w.settle()
	named(portmap)

	// Whether the runtime has it elsewhere is not known.
	w.runtime.BinDirs = append(w.runtime.BinDirs, "/opt/other/bin")
	w.seesNode()
	must.Do(t, os.MkdirAll(filepath.Join(w.dir, "/opt/other/bin"), 0o755))
	named(portmap)
	must.Do(t, os.WriteFile(filepath.Join(w.dir, "/opt/other/bin/istio-cni"), nil, 0o755))
	named(mesh, portmap)
	must.Do(t, os.RemoveAll(filepath.Join(w.dir, "/opt/other/bin")))
	w.runtime.BinDirs = nil
	w.restart()
	named(mesh, portmap)
}

func TestTheSourceGetsWhatWasChainedToOurs(t *testing.T) {
	type plugins = []string
	for name, c := range map[string]struct{ before, own, after plugins }{
		"a mesh that came later":      {plugins{portmap}, plugins{portmap, mesh}, plugins{portmap, mesh}},
		"a mesh that went":            {plugins{mesh, portmap}, plugins{portmap}, plugins{portmap}},
		"a mesh with other settings":  {plugins{mesh}, plugins{newMesh}, plugins{newMesh}},
		"nothing":                     {plugins{portmap}, plugins{portmap}, plugins{portmap}},
		"a program that is not there": {plugins{`{"type":"gone"}`, portmap}, nil, plugins{portmap}},
	} {
		for _, file := range []string{meshSource, "10-pods.conf"} {
			if file != meshSource && name != "a mesh that came later" {
				continue
			}
			t.Run(name+" in "+file, func(t *testing.T) {
				w := newConfWorld(t)
				w.runtime.BinDirs = []string{w.bins}
				w.install("istio-cni", "portmap", "bridge")
				source := chained(c.before...)
				if file != meshSource {
					source = `{"cniVersion":"1.0.0","name":"pods","type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`
				}
				w.write(file, source)
				must.Do(t, os.Chmod(filepath.Join(w.conf, file), 0o600))
				w.look(StateActive)
				if c.own != nil {
					w.edit(ConflistName, c.own...)
					w.look(StateActive)
				}
				for range 2 {
					_, err := RemoveConflist(w.conf, "")
					must.Do(t, err)
				}
				if got := list(t, w.conf); !slices.Equal(got, []string{meshSource}) {
					t.Fatalf("there are %v", got)
				}
				data, err := os.ReadFile(filepath.Join(w.conf, meshSource))
				must.Do(t, err)
				if got := behind(t, string(data)); !slices.Equal(got, c.after) || strings.Contains(string(data), "stayput") {
					t.Errorf("the source is %s", data)
				}
				if name == "nothing" && string(data) != source {
					t.Errorf("the source was written again: %s", data)
				}
				info, err := os.Stat(filepath.Join(w.conf, meshSource))
				if must.Do(t, err); info.Mode().Perm() != 0o600 {
					t.Errorf("its mode is %o", info.Mode().Perm())
				}
				if removed, err := RemovePlugin(w.conf, w.bins, ""); !removed || err != nil {
					t.Errorf("the plugin: %v, %v", removed, err)
				}
			})
		}
	}
}

// Its installer chains a mesh again, and Stayput is removed before the agent has seen that.
func TestTheSourceGetsAMeshThatWasChainedAgainJustBefore(t *testing.T) {
	w := newConfWorld(t)
	w.runtime.BinDirs = []string{w.bins}
	w.install("bridge", "portmap")
	w.write(meshSource, chained(mesh, portmap))
	w.look(StateActive)
	if got := behind(t, w.own()); !slices.Equal(got, []string{portmap}) {
		t.Fatalf("without the mesh's program: %v", got)
	}
	w.install("istio-cni")
	w.edit(ConflistName, portmap, newMesh)
	_, err := RemoveConflist(w.conf, "")
	must.Do(t, err)
	data, err := os.ReadFile(filepath.Join(w.conf, meshSource))
	must.Do(t, err)
	if got := behind(t, string(data)); !slices.Contains(got, newMesh) || len(got) != 2 {
		t.Errorf("pods start past the mesh: %v", got)
	}
}

// istio's istioOwnedCNIConfig and cilium's chainingTarget make such copies.
func TestACopyOfOurFileIsNeitherASourceNorInItsWay(t *testing.T) {
	for _, file := range []string{"02-istio-cni.conflist", "00-istio-cni.conflist"} {
		t.Run(file, func(t *testing.T) {
			w := newConfWorld(t)
			w.write(meshSource, chained(portmap))
			w.look(StateActive)
			w.write(file, w.own())
			w.edit(file, portmap, mesh)
			want := func(want ...string) {
				t.Helper()
				for range 2 {
					w.look(StateActive)
					if got := behind(t, w.own()); !slices.Equal(got, want) {
						t.Errorf("%v, want %v", got, want)
					}
					w.restart()
				}
			}
			want(portmap, mesh)
			w.edit(file, portmap, newMesh)
			want(portmap, newMesh)
			w.write(file, w.own()) // made again
			want(portmap, newMesh)
			// The source changes: the copy is no reason to stay.
			w.write(meshSource, chained(bandwidth))
			want(bandwidth, newMesh)

			_, err := RemoveConflist(w.conf, "")
			must.Do(t, err)
			data, err := os.ReadFile(filepath.Join(w.conf, file))
			must.Do(t, err)
			if strings.Contains(string(data), "stayput.io/derived") || strings.Contains(string(data), `"stayput"`) {
				t.Errorf("the copy is %s", data)
			}
			if removed, err := RemovePlugin(w.conf, w.bins, ""); !removed || err != nil {
				t.Errorf("the plugin: %v, %v", removed, err)
			}
		})
	}
}

// What a source keeps from others, its copy keeps too.
func TestTheFileIsNotReadableByMoreThanItsSource(t *testing.T) {
	for source, want := range map[os.FileMode]os.FileMode{0o600: 0o600, 0o640: 0o640, 0o644: 0o644, 0o777: 0o644} {
		w := newConfWorld(t)
		w.write(meshSource, bridgeConf)
		must.Do(t, os.Chmod(filepath.Join(w.conf, meshSource), source))
		has := func(want os.FileMode) {
			t.Helper()
			w.look(StateActive)
			info, err := os.Stat(filepath.Join(w.conf, ConflistName))
			if must.Do(t, err); info.Mode().Perm() != want {
				t.Errorf("of a source with %o it is %o, want %o", source, info.Mode().Perm(), want)
			}
		}
		has(want)
		w.edit(ConflistName, mesh)
		theirs := w.own()
		must.Do(t, os.Chmod(filepath.Join(w.conf, ConflistName), 0o666))
		has(want)
		if w.own() != theirs { // some programs tell by the bytes whether they have to write again
			t.Errorf("it was\n%s\nand is\n%s", theirs, w.own())
		}
		must.Do(t, os.Chmod(filepath.Join(w.conf, ConflistName), 0o400)) // another program's choice
		has(0o400)
		must.Do(t, os.Chmod(filepath.Join(w.conf, ConflistName), 0o644))
		must.Do(t, os.Chmod(filepath.Join(w.conf, meshSource), 0o600))
		has(0o600)
	}
}

// By another name, or in another directory, nothing says that an address is a running pod's.
func TestANetworkKeepsItsNameAndDirectoryWhileItsAddressesAreInUse(t *testing.T) {
	conf := func(name, dataDir, subnet string) string {
		return fmt.Sprintf(`{"cniVersion":"1.0.0","name":%q,"plugins":[{"type":"bridge","ipam":{"type":"host-local","dataDir":%q,"subnet":%q}}]}`,
			name, dataDir, subnet)
	}
	used := []Occupied{{Name: "pods", DataDir: "/d/", Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.7")}}}
	for name, c := range map[string]struct {
		after  string
		keeps  bool
		before func(*confWorld)
	}{
		"another name":                  {conf("new", "/d", "10.1.0.0/24"), true, nil},
		"another directory":             {conf("pods", "/e", "10.1.0.0/24"), true, nil},
		"another name, other addresses": {conf("new", "/d", "10.2.0.0/24"), false, nil},
		"our file was removed meanwhile": {conf("new", "/d", "10.1.0.0/24"), true,
			func(w *confWorld) { w.remove(w.conf, ConflistName) }},
		"flannel, whose ranges only an ADD knows": {`{"cniVersion":"1.0.0","name":"new","plugins":[{"type":"flannel"}]}`, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.write(meshSource, conf("pods", "/d", "10.1.0.0/24"))
			w.look(StateActive)
			w.networks = used
			w.write(meshSource, c.after)
			if c.before != nil {
				c.before(w)
			}
			is := func(keeps bool) {
				t.Helper()
				s := w.look(StateActive)
				own := Dir{}.Conf(File{Name: ConflistName, Data: []byte(w.own())}).network()
				if (own.Name == "pods" && own.DataDir == "/d") != keeps ||
					keeps != strings.Contains(s.Message, "with the network pods in /d as long as addresses of it are in use") {
					t.Errorf("%s in %s: %s", own.Name, own.DataDir, s.Message)
				}
			}
			is(c.keeps)
			w.restart()
			is(c.keeps)
			if c.keeps && len(w.said) < 2 {
				t.Errorf("it said %v", w.said)
			}
			w.networks = nil
			is(false)
		})
	}
}

func TestWithoutTheLedgersWordANetworkStaysAsItIs(t *testing.T) {
	w := newConfWorld(t)
	w.networksErr = errors.New("input/output error")
	w.write(meshSource, bridgeConf)
	if s := w.look(StateError); !strings.Contains(s.Message, "input/output error") || w.own() != "" {
		t.Errorf("%+v", s)
	}
	w.networksErr = nil
	w.look(StateActive)
	before := w.own()
	w.networksErr = errors.New("input/output error")
	w.write(meshSource, strings.Replace(bridgeConf, `"pods"`, `"new"`, 1))
	w.look(StateActive)
	if is := (Dir{}).Conf(File{Name: ConflistName, Data: []byte(w.own())}); is.Network != "pods" {
		t.Errorf("it was\n%s\nand is\n%s", before, w.own())
	}
}

// Linkerd's installer writes in place when it removes its plugin.
func TestAFileThatAnotherProgramIsWritingIsNoConflict(t *testing.T) {
	w := newConfWorld(t)
	w.write(meshSource, chained(mesh))
	w.look(StateActive)
	whole := w.own()
	w.write(ConflistName, whole[:len(whole)/2])
	w.look(StateBroken)
	w.write(ConflistName, whole)
	w.edit(ConflistName)
	w.look(StateActive)
	if got := behind(t, w.own()); len(got) > 0 {
		t.Errorf("%v", got)
	}
	w.wantSaid(EventConfigured)
}
