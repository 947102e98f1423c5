package cluster

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/cli"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// fails waits until a check of node-2 fails with this text and advice.
func fails(t *testing.T, c *lab.Cluster, check, text, todo string) {
	t.Helper()
	finds(t, c, cli.LevelFail, check, text, todo)
}

// finds waits until a check of node-2 finds this.
func finds(t *testing.T, c *lab.Cluster, level cli.Level, check, text, todo string) {
	t.Helper()
	var r cli.Report
	defer func() {
		if t.Failed() {
			t.Logf("check says %+v", r)
		}
	}()
	until(t, fmt.Sprintf("a finding %s of %s", level, check), func(context.Context) bool {
		var code int
		r, code = checked(t, c, "node-2")
		return (code == 1) == (level == cli.LevelFail) && slices.ContainsFunc(r.Findings, func(f cli.Finding) bool {
			return f.Node == "node-2" && f.Check == check && f.Level == level && strings.Contains(f.Text, text) &&
				strings.Contains(f.Todo, todo)
		})
	})
}

// readyzSays waits until /readyz of a node's agent has a line with this prefix.
func readyzSays(t *testing.T, n *lab.ClusterNode, line string) {
	t.Helper()
	until(t, "/readyz to say "+line, func(context.Context) bool {
		return strings.Contains(ask(t, n, "/readyz"), "\n"+line)
	})
}

// nodeSays waits for an Event about node-2.
func nodeSays(t *testing.T, c *lab.Cluster, reason, message string) {
	t.Helper()
	until(t, fmt.Sprintf("the Event %s: %s", reason, message), func(context.Context) bool {
		return strings.Contains(kubectl(t, c, "get", "events", "-n", "default", "-o", "jsonpath={.items[*].message}",
			"--field-selector", "involvedObject.kind=Node,involvedObject.name=node-2,reason="+reason), message)
	})
}

// anHourAhead returns the URL of a proxy of the API server whose clock is an hour ahead.
func anHourAhead(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	config := c.RESTConfig()
	transport, err := rest.TransportFor(config)
	must.Do(t, err)
	target, err := url.Parse(config.Host)
	must.Do(t, err)
	server := httptest.NewServer(&httputil.ReverseProxy{
		Transport: transport,
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		ModifyResponse: func(r *http.Response) error {
			at, err := http.ParseTime(r.Header.Get("Date"))
			if err != nil {
				return nil // an answer to an upgrade has none
			}
			r.Header.Set("Date", at.Add(time.Hour).UTC().Format(http.TimeFormat))
			return nil
		},
	})
	t.Cleanup(server.Close)
	return server.URL
}

func TestCheckNamesTheMissingRight(t *testing.T) {
	c := installed(t)
	if s := anywhere(t, c, "check", "--as=looker"); s.code != 1 || s.out != "" ||
		!strings.Contains(s.err, "missing permission to list nodes: ") {
		t.Errorf("without any right: %+v", s)
	}
	kubectl(t, c, "create", "clusterrole", "looker", "--verb=list", "--resource=nodes,pods")
	defer kubectl(t, c, "delete", "clusterrole", "looker")
	kubectl(t, c, "create", "clusterrolebinding", "looker", "--clusterrole=looker", "--user=looker")
	defer kubectl(t, c, "delete", "clusterrolebinding", "looker")
	var r cli.Report
	defer func() {
		if t.Failed() {
			t.Logf("check says %+v", r)
		}
	}()
	until(t, "check to name the right that inspecting nodes needs", func(context.Context) bool {
		var code int
		r, code = checked(t, c, "node-1", "--as=looker")
		return code == 1 && slices.ContainsFunc(r.Findings, func(f cli.Finding) bool {
			return f.Check == "agent" && f.Level == cli.LevelFail &&
				strings.Contains(f.Text, "missing permission to create pods/exec in namespace stayput-system") &&
				strings.Contains(f.Todo, "request that permission")
		}) && level(r, "", "definitions") == cli.LevelWarn
	})
}

func TestCheckFindsNothingWrongWithAHealthyCluster(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: retain("10m")})
	for i := range 3 {
		ready(t, c, ns, fmt.Sprintf("web-%d", i))
	}
	r, code := checked(t, c)
	if code != 0 || r.Warnings+r.Failures != 0 || r.OK < 4+3*5 {
		t.Errorf("%d %+v", code, r)
	}
	for _, n := range c.Nodes {
		for _, what := range []string{"agent", "CNI configuration", "plugin", "ledger", "clock"} {
			if level(r, n.Name, what) != cli.LevelOK {
				t.Errorf("%s of %s: %q", what, n.Name, level(r, n.Name, what))
			}
		}
	}
	s := anywhere(t, c, "check")
	if s.code != 0 || !strings.Contains(s.out, "node-1: agent, CNI configuration, plugin, ledger, clock") ||
		!strings.Contains(s.out, "0 failures") {
		t.Errorf("%+v", s)
	}
	t.Logf("\n%s", s.out)
}

func TestCheckReportsWhatIsWrongAndWhatToDo(t *testing.T) {
	c := installed(t)
	node := c.Node("node-2")

	// An agent that is down.
	must.Do(t, node.Agent.Stop(testContext(t)))
	r, code := checked(t, c)
	if code != 1 || level(r, "node-2", "agent") != cli.LevelFail || level(r, "node-1", "agent") != cli.LevelOK ||
		level(r, "node-3", "ledger") != cli.LevelOK {
		t.Errorf("with an agent down: %d %+v", code, r)
	}
	must.Do(t, node.Agent.Start(testContext(t)))
	until(t, "the agent to be healthy again", func(context.Context) bool {
		r, code := checked(t, c, "node-2")
		return code == 0 && r.Warnings == 0
	})

	// An empty address file, and one of an unknown sandbox.
	networks := node.Path("/var/lib/cni/networks/pods")
	for name, content := range map[string]string{"10.244.2.240": "", "10.244.2.241": "0123456789ab\r\neth0"} {
		file := filepath.Join(networks, name)
		must.Do(t, os.WriteFile(file, []byte(content), 0o600))
		defer func() { must.Do(t, os.Remove(file)) }()
	}
	r, code = checked(t, c, "node-2")
	text := ""
	for _, f := range r.Findings {
		text += f.Text + " " + f.Todo + "\n"
	}
	if code != 0 || level(r, "node-2", "ledger") != cli.LevelWarn || !strings.Contains(text, "10.244.2.240") ||
		!strings.Contains(text, "10.244.2.241") || !strings.Contains(text, "reclaims them") {
		t.Errorf("with a leak: %d %+v", code, r)
	}

	// A configuration that sorts before ours.
	foreign := node.Path("/etc/cni/net.d/00-foreign.conflist")
	must.Do(t, os.WriteFile(foreign, []byte(`{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.9.0.0/24"}}]}`), 0o600))
	defer os.Remove(foreign)
	if r, code := checked(t, c, "node-2"); code != 1 || level(r, "node-2", "CNI configuration") != cli.LevelFail {
		t.Errorf("with another configuration: %d %+v", code, r)
	}
	must.Do(t, os.Remove(foreign))

	// A network that stayput does not support, instead of ours.
	inOrder := func() {
		t.Helper()
		until(t, "node-2 to be in order again", func(context.Context) bool {
			r, code := checked(t, c, "node-2")
			return code == 0 && level(r, "node-2", "agent") == cli.LevelOK &&
				level(r, "node-2", "CNI configuration") == cli.LevelOK && level(r, "node-2", "plugin") == cli.LevelOK
		})
	}
	calico := node.Path("/etc/cni/net.d/05-calico.conflist")
	const theirs = `{"cniVersion":"0.3.1","name":"k8s-pod-network",` +
		`"plugins":[{"type":"calico","ipam":{"type":"calico-ipam"}}]}`
	must.Do(t, os.WriteFile(calico, []byte(theirs), 0o600))
	defer os.Remove(calico)
	fails(t, c, "CNI configuration", "Calico manages addresses in its own IPAM", "see docs/networks.md")
	readyzSays(t, node, "cni: degraded: unsupported: 05-calico.conflist: calico: ")
	nodeSays(t, c, "CNINotConfigured", "unsupported: 05-calico.conflist")
	must.Do(t, os.Remove(calico))
	inOrder()
	readyzSays(t, node, "cni: active: 00-stayput.conflist")

	// The source of the agent's file is removed: only the running agent knows that it existed.
	source := node.Path("/etc/cni/net.d/10-pods.conflist")
	aside := source + ".aside"
	must.Do(t, os.Rename(source, aside))
	comesBack := once(func() { must.Do(t, os.Rename(aside, source)) })
	defer comesBack()
	until(t, "check to say that the agent holds its file", func(context.Context) bool {
		r, code := checked(t, c, "node-2")
		return code == 0 && level(r, "node-2", "CNI configuration") == cli.LevelWarn
	})
	comesBack()
	inOrder()

	// Another program replaces the plugin: the agent restores its own. If it cannot, it says so.
	binary := node.Path("/opt/cni/bin/stayput")
	ours, err := os.ReadFile(binary)
	must.Do(t, err)
	_, err = node.Run(testContext(t), "/usr/bin/cp", "--remove-destination", "-L", "/opt/cni/bin/host-local",
		"/opt/cni/bin/stayput")
	must.Do(t, err)
	until(t, "the agent to restore its plugin", func(context.Context) bool {
		is, err := os.ReadFile(binary)
		return err == nil && bytes.Equal(is, ours)
	})
	inOrder()
	must.Do(t, os.Remove(binary))
	must.Do(t, os.Mkdir(binary, 0o755))
	unblock := once(func() { must.Do(t, os.RemoveAll(binary)) }) // until then no pod of the node starts
	defer unblock()
	must.Do(t, os.WriteFile(filepath.Join(binary, "in-the-way"), nil, 0o600)) // so that a rename cannot replace it
	fails(t, c, "plugin", "/opt/cni/bin/stayput: ", "the agent replaces it; if not, its log says why")
	readyzSays(t, node, "cni: degraded: no-plugin: ")
	nodeSays(t, c, "CNINotConfigured", "no-plugin: ")
	unblock()
	inOrder()

	// A runtime without NRI.
	config := node.Path("/etc/containerd/config.toml")
	with, err := os.ReadFile(config)
	must.Do(t, err)
	without := bytes.Replace(with, []byte("  disable = false\n"), []byte("  disable = true\n"), 1)
	if bytes.Equal(with, without) {
		t.Fatalf("NRI is not configured in\n%s", with)
	}
	must.Do(t, os.WriteFile(config, without, 0o644))
	restore := once(func() {
		must.Do(t, os.WriteFile(config, with, 0o644))
		must.Do(t, node.RestartContainerd(testContext(t)))
	})
	defer restore()
	must.Do(t, node.RestartContainerd(testContext(t)))
	finds(t, c, cli.LevelWarn, "agent", "NRI is degraded: not connected", "enable NRI in the runtime's configuration")
	restore()
	inOrder()

	// A clock that is behind. A node's clock is the machine's and cannot be set, so the API server's seems an hour ahead.
	if r, code := checked(t, c, "node-2", "--server="+anHourAhead(t, c)); code != 1 ||
		level(r, "node-2", "clock") != cli.LevelFail || level(r, "node-2", "agent") != cli.LevelOK {
		t.Errorf("with a clock that is behind: %d %+v", code, r)
	}

	// No controller.
	must.Do(t, c.Controllers.Stop(testContext(t)))
	start := onceStarted(t, c)
	defer start()
	until(t, "check to see no leader", func(context.Context) bool {
		r, code = checked(t, c, "node-1")
		return code == 1 && level(r, "", "controller") == cli.LevelFail
	})
	start()
	until(t, "check to see a leader", func(context.Context) bool {
		r, code = checked(t, c, "node-1")
		return code == 0
	})
	if s := anywhere(t, c, "check", "node-9"); s.code != 1 || !strings.Contains(s.err, `node "node-9" does not exist`) {
		t.Errorf("a node that does not exist: %+v", s)
	}
}
