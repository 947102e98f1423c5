//go:build mesh

package node

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const (
	istioType   = "istio-cni"
	istioBinary = "/opt/cni/bin/" + istioType
)

// mesh is what Istio's DaemonSet runs on a node: its installer, which chains its plugin and removes it at its end.
type mesh struct {
	t       *testing.T
	n       *lab.Node
	process *lab.Process
}

func newMesh(t *testing.T, n *lab.Node) *mesh {
	t.Helper()
	bin, err := lab.BuildMesh(t.Context()) // make mesh has built it
	must.Do(t, err)
	must.Do(t, n.Install(bin.Installer, "/opt/istio/install-cni"))
	must.Do(t, n.Install(bin.Plugin, "/opt/istio/bin/"+istioType))
	must.Do(t, n.WriteFile("/var/run/secrets/kubernetes.io/serviceaccount/token", []byte("token")))
	for _, dir := range []string{"/host/opt/cni/bin", "/run/istio-cni"} {
		must.Do(t, os.MkdirAll(n.Path(dir), 0o755))
	}
	return &mesh{t: t, n: n}
}

// start starts the installer with its pod's mounts. The lab's pods are in the first of the namespaces that it leaves
// alone, so its plugin does not ask the API server for them.
func (m *mesh) start(namespaces string) {
	m.t.Helper()
	var err error
	m.process, err = m.n.Start("istio", []string{
		"PATH=/usr/bin:/usr/sbin", "MOUNTED_CNI_NET_DIR=" + confDir, "CNI_AGENT_RUN_DIR=/run/istio-cni",
		"REPAIR_ENABLED=false", "SKIP_TLS_VERIFY=true", "KUBERNETES_NODE_NAME=node", "KUBERNETES_SERVICE_HOST=127.0.0.1",
		"KUBERNETES_SERVICE_PORT=443", "EXCLUDE_NAMESPACES=" + namespaces,
	}, "/usr/bin/unshare", "-m", "/bin/sh", "-c",
		"mount --bind /opt/cni/bin /host/opt/cni/bin && mount --bind /opt/istio/bin /opt/cni/bin && "+
			"exec /opt/istio/install-cni --log_output_level=all:info")
	must.Do(m.t, err)
}

// leave ends the installer as an uninstallation or a restart does: it takes its plugin away.
func (m *mesh) leave() {
	m.t.Helper()
	must.Do(m.t, m.process.Signal(syscall.SIGTERM))
	_ = m.process.Wait() // how it says that it was ended
	if _, err := os.Stat(m.n.Path(istioBinary)); !errors.Is(err, os.ErrNotExist) {
		m.t.Fatalf("the mesh has left its plugin: %v", err)
	}
}

// excluded returns which namespaces the mesh leaves alone by a file, and whether its plugin is chained there.
func (m *mesh) excluded(file string) (namespaces []string, chained bool) {
	m.t.Helper()
	var list struct {
		Plugins []struct {
			Type              string
			ExcludeNamespaces []string `json:"exclude_namespaces"`
		}
	}
	data, err := os.ReadFile(m.n.Path(file))
	if errors.Is(err, os.ErrNotExist) {
		return nil, false
	}
	if must.Do(m.t, err); json.Unmarshal(data, &list) != nil {
		return nil, false // being written
	}
	for _, p := range list.Plugins {
		if p.Type == istioType {
			return p.ExcludeNamespaces, true
		}
	}
	return nil, false
}

// until waits until the plugin is chained in a file with these namespaces, or is not if there are none, and the runtime
// has loaded that.
func (m *mesh) until(file string, namespaces ...string) {
	m.t.Helper()
	must.Within(m.t, patience, "the mesh in "+file, func() bool {
		is, chained := m.excluded(file)
		return chained == (len(namespaces) > 0) && slices.Equal(is, namespaces)
	})
	must.Do(m.t, m.n.WaitCNI(testContext(m.t)))
}

func uninstall(t *testing.T, n *lab.Node) {
	t.Helper()
	_, err := n.Run(testContext(t), agentPath, "uninstall")
	must.Do(t, err)
	must.Do(t, n.WaitCNI(testContext(t)))
}

func TestAMeshComesAndGoesBesideStayput(t *testing.T) {
	const ours, too = "default", "default,second"
	for name, test := range map[string]func(*testing.T, *lab.Node, *mesh){
		"it was there before": func(t *testing.T, n *lab.Node, m *mesh) {
			m.start(ours)
			m.until(sourceFile, "default")
			agent := startKeeper(t, n)
			m.until(ownConflist, "default")
			pod := runPod(t, n, web(0))

			// Its installer dies, and has other settings when it is back.
			must.Do(t, m.process.Kill())
			m.start(too)
			m.until(ownConflist, "default", "second")
			deletePod(t, n, pod)
			again := runPod(t, n, web(0))
			sameIP(t, n, again, pod)
			if got, _ := m.excluded(sourceFile); !slices.Equal(got, []string{"default"}) {
				t.Fatalf("the test is wrong: the mesh has changed the source, too: %v", got)
			}

			// It goes; the source still names it.
			m.leave()
			m.until(ownConflist)
			untilCNI(t, n, cniconf.StateActive)
			runPod(t, n, other(0))
			deletePod(t, n, again)
			must.Do(t, os.Remove(n.Path(ownConflist))) // nothing says any more that it was removed on purpose
			must.Within(t, patience, "the file without the mesh, and the node to be degraded", func() bool {
				ready, err := scrape(t, n, "/readyz")
				_, chained := m.excluded(ownConflist)
				return err == nil && exists(n.Path(ownConflist)) && !chained &&
					strings.Contains(ready, "degraded: ") && strings.Contains(ready, "names "+istioType)
			})
			must.Do(t, n.WaitCNI(testContext(t)))
			runPod(t, n, other(1))

			// It comes back just before Stayput is removed.
			must.Do(t, agent.Kill())
			m.start(too)
			m.until(ownConflist, "default", "second")
			uninstall(t, n)
			m.until(sourceFile, "default", "second")
			runPod(t, n, other(2))
		},
		"it comes later": func(t *testing.T, n *lab.Node, m *mesh) {
			agent := startKeeper(t, n)
			pod := runPod(t, n, web(0))
			m.start(ours)
			m.until(ownConflist, "default")
			deletePod(t, n, pod)
			again := runPod(t, n, web(0))
			sameIP(t, n, again, pod)
			for range 2 { // restarts
				m.leave()
				m.until(ownConflist)
				runPod(t, n, other(0))
				m.start(too)
				m.until(ownConflist, "default", "second")
			}
			deletePod(t, n, again)
			must.Do(t, agent.Kill())
			uninstall(t, n)
			m.until(sourceFile, "default", "second")
			runPod(t, n, other(1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := cnis(t)["bridge"].start(t)
			test(t, n, newMesh(t, n))
		})
	}
}
