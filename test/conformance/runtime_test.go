//go:build conformance

package conformance

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const (
	agentPath   = "/opt/stayput/stayput-agent"
	critestPath = "/opt/conformance/critest"

	// These are critest's web server images; the lab's own stands in for them.
	nginxImage   = "registry.k8s.io/e2e-test-images/nginx:1.14-2"
	httpdImage   = "registry.k8s.io/e2e-test-images/httpd:2.4.39-4"
	hostNetImage = "gcr.io/k8s-staging-cri-tools/hostnet-nginx-" + runtime.GOARCH + ":latest"
)

// sandboxes are all critest tests of pod sandboxes and their network.
var sandboxes = withPrefix("[k8s.io] ",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support running PodSandbox "+
		"[Conformance]",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support stopping PodSandbox "+
		"[Conformance]",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support removing PodSandbox "+
		"[Conformance]",
	"PodSandbox runtime should support basic operations on PodSandbox runtime should support preserving PodSandbox "+
		"attributes [Conformance]",
	"PodSandbox runtime should support sysctls should support safe sysctls",
	"PodSandbox runtime should support sysctls should support unsafe sysctls",
	"Idempotence StopPodSandbox should not return an error if not found",
	"Idempotence StopPodSandbox should not return an error if already stopped",
	"Idempotence RemovePodSandbox should not return an error if not found",
	"Networking runtime should support networking runtime should support DNS config [Conformance]",
	"Networking runtime should support networking runtime should support set hostname [Conformance]",
	"Networking runtime should support networking runtime should support port mapping with only container port "+
		"[Conformance]",
	"Networking runtime should support networking runtime should support port mapping with host port and container port "+
		"[Conformance]",
	"Multiple Containers [Conformance] when running multiple containers in a pod should support network",
	"Security Context NamespaceOption runtime should support HostNetwork is true",
	"Security Context NamespaceOption runtime should support HostNetwork is false",
	"Streaming runtime should support streaming interfaces runtime should support portforward [Conformance]",
	"Streaming runtime should support streaming interfaces runtime should support portforward in host network",
)

func TestTheRuntimeConformsWithStayputAsItsIPAM(t *testing.T) {
	product, tests := build(t)
	must.Do(t, lab.Need(t.Context(), "nftables")) // for portmap
	n, err := lab.StartNode(testContext(t, patience), lab.NodeOptions{
		Networks: []lab.Network{}, CNIPlugins: []string{product.Plugin}, Idle: true,
	})
	must.Do(t, err)
	must.Close(t, n)
	must.Do(t, n.WriteFile("/etc/cni/net.d/10-pods.conflist", conflist(t)))
	must.Do(t, n.StartContainerd(testContext(t, patience)))
	loadImages(t, n, product, tests)
	must.Do(t, n.Install(product.Agent, agentPath))
	_, err = n.Start("agent", nil, agentPath, "--log-level=debug")
	must.Do(t, err)
	must.Within(t, patience, "the agent to be connected", func() bool { return connected(testContext(t, patience), n) })

	must.Do(t, n.Install(tests.Critest, critestPath))
	const images = "/opt/conformance/images.yaml"
	must.Do(t, n.WriteFile(images, []byte("defaultTestContainerImage: "+lab.BusyboxImage+"\n")))
	runSuite(t, n, 15*time.Minute, sandboxes, critestPath, "-test-images-file="+images)

	if !connected(testContext(t, patience), n) {
		t.Error("the agent is no longer connected")
	}
	holds(t, n)
	nothingIsLeft(t, n)
}

// conflist returns the configuration of a stayput network with host ports.
func conflist(t *testing.T) []byte {
	t.Helper()
	data, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "pods", "plugins": []any{
			map[string]any{
				"type": "bridge", "bridge": "br-pods", "isGateway": true, "hairpinMode": true,
				"ipam":         lab.RangeIPAM("stayput", "10.88.0.0/24"),
				"capabilities": map[string]any{lab.AnnotationsCapability: true},
			},
			map[string]any{"type": "portmap", "backend": "nftables", "capabilities": map[string]any{"portMappings": true}},
		},
	})
	must.Do(t, err)
	return data
}

// loadImages loads the images that critest would pull.
func loadImages(t *testing.T, n *lab.Node, product lab.Product, tests lab.ConformanceBin) {
	t.Helper()
	bin, err := lab.Build(t.Context())
	must.Do(t, err)
	servers := filepath.Join(filepath.Dir(product.Plugin), "servers.tar") // removed with the product
	server := map[string]string{"/podimage": filepath.Join(filepath.Dir(bin.Images), "podimage")}
	must.Do(t, lab.WriteImages(servers,
		lab.Image{Ref: nginxImage, Entrypoint: []string{"/podimage", ":80"}, Files: server},
		lab.Image{Ref: httpdImage, Entrypoint: []string{"/podimage", ":80"}, Files: server},
		lab.Image{Ref: hostNetImage, Entrypoint: []string{"/podimage", ":12003"}, Files: server},
	))
	for _, archive := range []string{tests.Images, servers} {
		const inside = "/var/tmp/images.tar"
		must.Do(t, n.Install(archive, inside))
		_, err := n.Run(testContext(t, patience), "/opt/lab/containerd/ctr", "-n", "k8s.io", "images", "import", inside)
		must.Do(t, err)
	}
}

// connected reports whether the agent is connected to NRI and CRI.
func connected(ctx context.Context, n *lab.Node) bool {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return n.Dial(ctx, network, address)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9463/readyz", nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return err == nil && strings.Contains(string(body), "nri: connected\ncri: ok\n")
}

// nothingIsLeft checks that stayput assigned addresses and that none is still in use or retained.
func nothingIsLeft(t *testing.T, n *lab.Node) {
	t.Helper()
	const dir = "/var/lib/cni/networks/pods"
	files, err := os.ReadDir(n.Path(dir))
	must.Do(t, err)
	used := false
	for _, f := range files {
		used = used || strings.HasPrefix(f.Name(), "last_reserved_ip.")
		if _, err := netip.ParseAddr(f.Name()); err != nil {
			continue
		}
		data, err := os.ReadFile(n.Path(path.Join(dir, f.Name())))
		t.Errorf("address %s is still taken: %q, %v", f.Name(), data, err)
	}
	if !used {
		t.Errorf("no address was ever assigned: %v", files)
	}
}
