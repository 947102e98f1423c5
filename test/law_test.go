// Package test holds what is true of the whole repository.
package test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

const module = "github.com/stayput/stayput"

// imports are all packages that the packages matching pattern link, themselves included.
func imports(t *testing.T, format, pattern string) []string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-f", format, pattern)
	cmd.Dir = ".."
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %s: %v", pattern, err)
	}
	return strings.Fields(string(out))
}

// in says whether a package is one of these, or below one.
func in(pkg string, trees ...string) bool {
	return slices.ContainsFunc(trees, func(tree string) bool { return pkg == tree || strings.HasPrefix(pkg, tree+"/") })
}

// forbid fails the test where a package that matches pattern links one of the trees or packages.
func forbid(t *testing.T, pattern string, trees []string, exactly ...string) {
	t.Helper()
	pkgs := imports(t, "{{.ImportPath}}", pattern)
	if len(pkgs) == 0 {
		t.Fatalf("%s: no such package", pattern)
	}
	for _, p := range pkgs {
		if in(p, trees...) || slices.Contains(exactly, p) {
			t.Errorf("%s links %s", pattern, p)
		}
	}
}

func TestTheCNIPluginLinksNothingThatMakesItsStartSlow(t *testing.T) {
	slow := []string{
		"k8s.io", "sigs.k8s.io", "google.golang.org", "github.com/containerd", "github.com/prometheus",
		"github.com/containernetworking", "github.com/spf13", "github.com/vishvananda", "net/http", "crypto/tls",
		module + "/plugin/nri", module + "/pkg/node",
	}
	for _, pattern := range []string{"./cmd/stayput", "./plugin/ipam", "./pkg/netconf"} {
		forbid(t, pattern, slow, "net", "regexp", "text/template", "os/exec")
	}
}

// The plugin links both. The spool carries the ledger's events.
func TestTheLedgerAndTheSpoolNeedTheStandardLibraryAndSystemCallsOnly(t *testing.T) {
	for pkg, allowed := range map[string][]string{
		"pkg/ledger": {module + "/pkg/ledger"},
		"pkg/spool":  {module + "/pkg/ledger", module + "/pkg/spool"},
	} {
		for _, p := range imports(t, "{{if not .Standard}}{{.ImportPath}}{{end}}", "./"+pkg) {
			if !in(p, append(allowed, "golang.org/x/sys")...) {
				t.Errorf("%s links %s", pkg, p)
			}
		}
		forbid(t, "./"+pkg, nil, "net", "net/http", "regexp", "os/exec")
	}
}

func TestNothingInPkgImportsAPlugin(t *testing.T) {
	forbid(t, "./pkg/...", []string{module + "/plugin", module + "/cmd", module + "/test"})
}

func TestThePluginsKeepApart(t *testing.T) {
	for _, rule := range []struct {
		pkg   string
		trees []string
	}{
		{"plugin/nri", []string{"k8s.io/client-go", module + "/plugin/ipam"}},
		{"pkg/placement", []string{module + "/pkg/ledger", module + "/plugin"}},
		{"pkg/home", []string{
			"sigs.k8s.io/controller-runtime", "k8s.io/client-go", module + "/pkg/ledger", module + "/pkg/placement", module + "/plugin",
		}},
		{"pkg/cli", []string{module + "/pkg/node", module + "/pkg/placement", module + "/plugin", "google.golang.org/grpc", "github.com/containerd"}},
		{"pkg/api", []string{module + "/pkg/ledger", module + "/pkg/node", module + "/pkg/placement"}},
	} {
		forbid(t, "./"+rule.pkg+"/...", rule.trees)
	}
	for _, below := range []string{"cniconf", "cri", "hostnet", "importer", "inspect", "retainedip"} {
		forbid(t, "./pkg/node/"+below, nil, module+"/pkg/node")
	}
	for _, below := range []string{"podstate", "cluster", "gate", "uninstall"} {
		forbid(t, "./pkg/placement/"+below, nil, module+"/pkg/placement")
	}
}

// An agent runs on every node: it knows one kind of object and does not pay for the others.
func TestTheAgentLinksNoClientForAllOfKubernetes(t *testing.T) {
	forbid(t, "./cmd/stayput-agent", []string{
		"sigs.k8s.io/controller-runtime", "k8s.io/client-go/kubernetes", "k8s.io/client-go/informers", "k8s.io/client-go/dynamic", "k8s.io/api/core",
		module + "/pkg/placement",
	})
}

// pkg/ledger imports nothing, and pkg/placement not pkg/ledger: the words of both are compared here.
func TestTheNodeAndTheClusterReadTheSameAnnotations(t *testing.T) {
	for node, cluster := range map[string]string{
		ledger.AnnotationRetainIP:           v1alpha1.AnnotationRetainIP,
		ledger.AnnotationWhenScaled:         v1alpha1.AnnotationWhenScaled,
		ledger.AnnotationWhenDeleted:        v1alpha1.AnnotationWhenDeleted,
		ledger.AnnotationIdentity:           v1alpha1.AnnotationIdentity,
		ledger.AnnotationWhenInUse:          v1alpha1.AnnotationWhenInUse,
		ledger.AnnotationReservedIPDuration: v1alpha1.AnnotationReservedIPDuration,
	} {
		if node != cluster {
			t.Errorf("%s is %s in the API", node, cluster)
		}
	}
}
