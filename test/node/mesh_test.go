//go:build mesh

package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// A mesh is what a service mesh's DaemonSet runs on a node: its installer, which chains its plugin and removes it at
// its end.
type mesh struct {
	t       *testing.T
	n       *lab.Node
	plugin  string // its type
	process *lab.Process
	// allFiles is set if the plugin is chained in every file, not only in the one that comes first.
	allFiles bool
	first    []string // its settings
	later    []string // other ones
	// of returns the settings that the plugin has in a file.
	of func(plugin json.RawMessage) ([]string, error)
	// command returns the environment and the last command of its pod, for some settings.
	command func(settings []string) (env []string, command string)
	mounts  string   // of its pod, besides the directories of plugins and configurations
	asked   askedFor // by its plugin
}

// askedFor are the pods that a plugin has asked the API server for.
type askedFor struct {
	sync.Mutex
	pods []string
}

// serve answers for every pod of the lab that it is an ordinary one.
func (a *askedFor) serve(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	a.Lock()
	a.pods = append(a.pods, name)
	a.Unlock()
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %q, "namespace": "default"}}`, name)
}

// take returns the pods that were asked for since the last call.
func (a *askedFor) take() []string {
	a.Lock()
	defer a.Unlock()
	pods := a.pods
	a.pods = nil
	return pods
}

// istio is Istio. The lab's pods are in the first of the namespaces that it leaves alone, so its plugin does not ask
// the API server for them.
func istio(t *testing.T, n *lab.Node) *mesh {
	t.Helper()
	bin, err := lab.BuildIstio(t.Context()) // make mesh has built it
	must.Do(t, err)
	must.Do(t, n.Install(bin.Installer, "/opt/mesh/install-cni"))
	must.Do(t, n.Install(bin.Plugin, "/opt/mesh/bin/istio-cni"))
	must.Do(t, os.MkdirAll(n.Path("/run/istio-cni"), 0o755))
	return &mesh{
		plugin: "istio-cni", first: []string{"default"}, later: []string{"default", "second"},
		of: func(plugin json.RawMessage) ([]string, error) {
			var p struct {
				Namespaces []string `json:"exclude_namespaces"`
			}
			return p.Namespaces, json.Unmarshal(plugin, &p)
		},
		command: func(namespaces []string) ([]string, string) {
			return []string{
				"MOUNTED_CNI_NET_DIR=/host" + confDir, "CNI_AGENT_RUN_DIR=/run/istio-cni", "REPAIR_ENABLED=false",
				"SKIP_TLS_VERIFY=true", "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=443",
				"EXCLUDE_NAMESPACES=" + strings.Join(namespaces, ","),
			}, "/opt/mesh/install-cni --log_output_level=all:info"
		},
	}
}

// linkerd is Linkerd, with an API server that its plugin asks for each pod. As in its pod, a file is written elsewhere
// and copied to the node's disk.
func linkerd(t *testing.T, n *lab.Node) *mesh {
	t.Helper()
	bin, err := lab.BuildLinkerd(t.Context()) // make mesh has built it
	must.Do(t, err)
	must.Do(t, n.Install(bin.Installer, "/linkerd/install-cni.sh"))
	must.Do(t, n.Install(bin.Filter, "/linkerd/filter.jq"))
	must.Do(t, n.Install(bin.Plugin, "/opt/mesh/bin/linkerd-cni"))
	m := &mesh{
		plugin: "linkerd-cni", allFiles: true, mounts: "mount -t tmpfs tmpfs /tmp",
		first: []string{"4567"}, later: []string{"4567", "4568"},
		of: func(plugin json.RawMessage) ([]string, error) {
			var p struct {
				Linkerd struct {
					Ports []string `json:"outbound-ports-to-ignore"`
				}
			}
			return p.Linkerd.Ports, json.Unmarshal(plugin, &p)
		},
	}
	listener, err := n.Listen(testContext(t), "tcp", "[::1]:0")
	must.Do(t, err)
	server := httptest.NewUnstartedServer(http.HandlerFunc(m.asked.serve))
	must.Do(t, server.Listener.Close())
	server.Listener = listener
	server.Start()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(listener.Addr().String())
	must.Do(t, err)
	m.command = func(ports []string) ([]string, string) {
		list, err := json.Marshal(ports)
		must.Do(t, err)
		return []string{
			"CNI_NETWORK_CONFIG=" + fmt.Sprintf(`{"name": "linkerd-cni", "type": "linkerd-cni", "log_level": "info",
				"kubernetes": {"kubeconfig": "__KUBECONFIG_FILEPATH__"},
				"linkerd": {"incoming-proxy-port": 4143, "outgoing-proxy-port": 4140, "proxy-uid": 2102,
					"outbound-ports-to-ignore": %s}}`, list),
			"KUBERNETES_SERVICE_PROTOCOL=http", "KUBERNETES_SERVICE_HOST=::1", "KUBERNETES_SERVICE_PORT=" + port,
			"SKIP_TLS_VERIFY=true",
		}, "/usr/bin/bash /linkerd/install-cni.sh"
	}
	return m
}

// newMesh puts a mesh's programs on a node.
func newMesh(t *testing.T, n *lab.Node, of func(*testing.T, *lab.Node) *mesh) *mesh {
	t.Helper()
	m := of(t, n)
	m.t, m.n = t, n
	must.Do(t, n.WriteFile("/var/run/secrets/kubernetes.io/serviceaccount/token", []byte("token")))
	for _, dir := range []string{"/host/opt/cni/bin", "/host" + confDir} {
		must.Do(t, os.MkdirAll(n.Path(dir), 0o755))
	}
	return m
}

// start starts the installer with its pod's mounts.
func (m *mesh) start(settings []string) {
	m.t.Helper()
	env, command := m.command(settings)
	mounts := []string{
		"mount --bind " + confDir + " /host" + confDir, "mount --bind /opt/cni/bin /host/opt/cni/bin",
		"mount --bind /opt/mesh/bin /opt/cni/bin",
	}
	if m.mounts != "" {
		mounts = append(mounts, m.mounts)
	}
	var err error
	m.process, err = m.n.Start(m.plugin, append(env, "PATH=/usr/bin:/usr/sbin", "KUBERNETES_NODE_NAME=node"),
		"/usr/bin/unshare", "-m", "/bin/sh", "-c", strings.Join(append(mounts, "exec "+command), " && "))
	must.Do(m.t, err)
}

// kill kills the installer and what it has started.
func (m *mesh) kill() {
	m.t.Helper()
	must.Do(m.t, syscall.Kill(-m.process.Pid, syscall.SIGKILL))
	_ = m.process.Wait() // how it says that it was killed
}

// leave ends the installer as an uninstallation or a restart does: it takes its plugin away.
func (m *mesh) leave() {
	m.t.Helper()
	must.Do(m.t, m.process.Signal(syscall.SIGTERM))
	_ = m.process.Wait()                              // how it says that it was ended
	_ = syscall.Kill(-m.process.Pid, syscall.SIGKILL) // what it has left, as with its pod
	if _, err := os.Stat(m.n.Path("/opt/cni/bin/" + m.plugin)); !errors.Is(err, os.ErrNotExist) {
		m.t.Fatalf("the mesh has left its plugin: %v", err)
	}
}

// in returns the mesh's settings in a file, and whether its plugin is chained there.
func (m *mesh) in(file string) (settings []string, chained bool) {
	m.t.Helper()
	var list struct{ Plugins []json.RawMessage }
	data, err := os.ReadFile(m.n.Path(file))
	if errors.Is(err, os.ErrNotExist) {
		return nil, false
	}
	if must.Do(m.t, err); json.Unmarshal(data, &list) != nil {
		return nil, false // being written
	}
	for _, plugin := range list.Plugins {
		var p struct{ Type string }
		must.Do(m.t, json.Unmarshal(plugin, &p))
		if p.Type == m.plugin {
			settings, err := m.of(plugin)
			must.Do(m.t, err)
			return settings, true
		}
	}
	return nil, false
}

// until waits until the plugin is chained in a file with these settings, or is not if there are none, and the runtime
// has loaded that.
func (m *mesh) until(file string, settings []string) {
	m.t.Helper()
	must.Within(m.t, patience, fmt.Sprintf("%s in %s with %v", m.plugin, file, settings), func() bool {
		is, chained := m.in(file)
		return chained == (len(settings) > 0) && slices.Equal(is, settings)
	})
	must.Do(m.t, m.n.WaitCNI(testContext(m.t)))
}

// untilAll is until, for both files if the mesh writes both.
func (m *mesh) untilAll(settings []string) {
	m.t.Helper()
	if m.allFiles {
		m.until(sourceFile, settings)
	}
	m.until(ownConflist, settings)
}

// runs runs a pod, and fails the test if the mesh's plugin was run for it or not against the word of chained. Istio's
// asks for no pod.
func (m *mesh) runs(spec lab.PodSpec, chained bool) lab.Pod {
	m.t.Helper()
	m.asked.take()
	pod := runPod(m.t, m.n, spec)
	if asked := m.asked.take(); m.plugin == "linkerd-cni" && slices.Contains(asked, spec.Name) != chained {
		m.t.Errorf("the mesh's plugin asked for %v at the start of %s", asked, spec.Name)
	}
	return pod
}

func uninstall(t *testing.T, n *lab.Node) {
	t.Helper()
	_, err := n.Run(testContext(t), agentPath, "uninstall")
	must.Do(t, err)
	must.Do(t, n.WaitCNI(testContext(t)))
}

func TestAMeshComesAndGoesBesideStayput(t *testing.T) {
	for name, of := range map[string]func(*testing.T, *lab.Node) *mesh{"istio": istio, "linkerd": linkerd} {
		for when, test := range map[string]func(*testing.T, *lab.Node, *mesh){
			"it was there before": meshBefore, "it comes later": meshLater,
		} {
			t.Run(name+": "+when, func(t *testing.T) {
				t.Parallel()
				n := cnis(t)["bridge"].start(t)
				test(t, n, newMesh(t, n, of))
			})
		}
	}
}

func meshBefore(t *testing.T, n *lab.Node, m *mesh) {
	m.start(m.first)
	m.until(sourceFile, m.first)
	agent := startKeeper(t, n)
	m.until(ownConflist, m.first)
	pod := m.runs(web(0), true)

	// Its installer dies, and has other settings when it is back.
	m.kill()
	m.start(m.later)
	m.untilAll(m.later)
	deletePod(t, n, pod)
	again := m.runs(web(0), true)
	sameIP(t, n, again, pod)

	// It goes.
	m.leave()
	m.until(ownConflist, nil)
	untilCNI(t, n, cniconf.StateActive)
	m.runs(other(0), false)
	deletePod(t, n, again)
	if !m.allFiles {
		sourceNamesWhatIsGone(t, n, m)
	}
	m.runs(other(1), false)

	// It comes back just before Stayput is removed.
	must.Do(t, agent.Kill())
	m.start(m.later)
	m.untilAll(m.later)
	uninstall(t, n)
	m.until(sourceFile, m.later)
	m.runs(other(2), true)
}

// sourceNamesWhatIsGone removes the agent's file once the mesh has gone, but for the source. Nothing says any more that
// it went on purpose.
func sourceNamesWhatIsGone(t *testing.T, n *lab.Node, m *mesh) {
	t.Helper()
	if got, _ := m.in(sourceFile); !slices.Equal(got, m.first) {
		t.Fatalf("the test is wrong: the mesh has changed the source, too: %v", got)
	}
	must.Do(t, os.Remove(n.Path(ownConflist)))
	must.Within(t, patience, "the file without the mesh, and the node to be degraded", func() bool {
		ready, err := scrape(t, n, "/readyz")
		_, chained := m.in(ownConflist)
		return err == nil && exists(n.Path(ownConflist)) && !chained &&
			strings.Contains(ready, "degraded: ") && strings.Contains(ready, "names "+m.plugin)
	})
	must.Do(t, n.WaitCNI(testContext(t)))
}

func meshLater(t *testing.T, n *lab.Node, m *mesh) {
	agent := startKeeper(t, n)
	pod := m.runs(web(0), false)
	m.start(m.first)
	m.untilAll(m.first)
	deletePod(t, n, pod)
	again := m.runs(web(0), true)
	sameIP(t, n, again, pod)
	for range 2 { // restarts
		m.leave()
		m.until(ownConflist, nil)
		m.runs(other(0), false)
		m.start(m.later)
		m.untilAll(m.later)
	}
	deletePod(t, n, again)
	must.Do(t, agent.Kill())
	uninstall(t, n)
	m.until(sourceFile, m.later)
	m.runs(other(1), true)
}
