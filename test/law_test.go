// Package test holds what is true of the whole repository.
package test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/must"
)

const module = "github.com/stayput/stayput/"

// rule is what a package may import of this module, and the trees of packages that it must not link, not even through
// others.
type rule struct {
	pkg         string
	uses, never []string
}

// law has a rule for every package; packages without one obey that of their parent. A package imports only what stands
// above it, so that dependencies point one way and no subpackage imports its parent. Tests import what they like.
var law = []rule{
	// What everything rests on. The CNI plugin links it at every start of a pod.
	{pkg: "pkg/retention", never: []string{"k8s.io", "sigs.k8s.io", "github.com", "golang.org/x"}},
	{pkg: "pkg/disk", never: heavy},
	{pkg: "pkg/grants", uses: []string{"pkg/disk"}, never: heavy},
	{pkg: "pkg/ledger", uses: []string{"pkg/retention", "pkg/disk", "pkg/grants"}, never: heavy},
	{pkg: "pkg/atomicfile", never: heavy},
	{pkg: "pkg/netconf", uses: []string{"pkg/retention", "pkg/ledger"}, never: heavy},
	{pkg: "pkg/spool", uses: []string{"pkg/disk", "pkg/ledger"}, never: heavy},
	{pkg: "pkg/link", never: heavy},

	// The API, and the rules that controller and kubectl stayput share: no I/O, no client.
	{pkg: "pkg/api", uses: []string{"pkg/retention"}, never: []string{"sigs.k8s.io/controller-runtime"}},
	{pkg: "pkg/home", uses: []string{"pkg/retention", "pkg/api"}, never: clients},
	{pkg: "pkg/pool", uses: []string{"pkg/retention", "pkg/api"}, never: clients},
	{pkg: "pkg/apiwatch", never: clients},
	{pkg: "pkg/wire", never: clients},
	{pkg: "pkg/apilist", never: clients},
	{pkg: "pkg/installation", uses: []string{"pkg/api", "pkg/apiwatch"}, never: []string{"sigs.k8s.io/controller-runtime"}},
	{
		pkg: "pkg/uninstall", uses: []string{"pkg/api", "pkg/home", "pkg/installation"},
		never: []string{"pkg/ledger", "pkg/disk", "pkg/node", "pkg/placement", "google.golang.org/grpc"},
	},

	// The agent. It runs on every node: it knows few kinds of objects, and does not pay for the others.
	{pkg: "pkg/node/cniconf", uses: []string{"pkg/ledger", "pkg/atomicfile", "pkg/netconf"}, never: clients},
	{pkg: "pkg/node/hostnet", uses: []string{"pkg/ledger", "pkg/link"}, never: clients},
	{pkg: "pkg/node/wake", never: clients},
	{pkg: "pkg/node/apiserver", uses: []string{"pkg/api"}, never: allClients},
	{pkg: "pkg/node/route", uses: []string{"pkg/link", "pkg/node/wake"}, never: clients},
	{pkg: "pkg/node/cri", uses: []string{"pkg/ledger", "pkg/node/cniconf"}, never: allClients},
	{
		pkg: "pkg/node/retainedip",
		uses: []string{
			"pkg/retention", "pkg/ledger", "pkg/spool", "pkg/api", "pkg/node/cniconf", "pkg/apilist",
			"pkg/node/apiserver",
		},
		never: allClients,
	},
	{
		pkg: "pkg/node/podip",
		uses: []string{
			"pkg/retention", "pkg/grants", "pkg/ledger", "pkg/api", "pkg/pool", "pkg/node/route", "pkg/node/cri",
			"pkg/node/hostnet",
			"pkg/node/wake", "pkg/apilist", "pkg/node/apiserver", "pkg/apiwatch", "pkg/wire",
		},
		never: allClients,
	},
	{
		pkg:   "pkg/node/importer",
		uses:  []string{"pkg/retention", "pkg/ledger", "pkg/netconf", "pkg/api", "pkg/node/cri", "pkg/node/hostnet"},
		never: allClients,
	},
	{
		pkg:   "pkg/node/inspect",
		uses:  []string{"pkg/ledger", "pkg/netconf", "pkg/spool", "pkg/api", "pkg/node/cniconf", "pkg/node/cri"},
		never: allClients,
	},
	{
		pkg: "pkg/node",
		uses: []string{
			"pkg/retention", "pkg/grants", "pkg/ledger", "pkg/atomicfile", "pkg/netconf", "pkg/spool", "pkg/api",
			"pkg/installation",
			"pkg/node/route", "pkg/node/cniconf", "pkg/node/cri", "pkg/node/hostnet", "pkg/node/podip",
			"pkg/node/retainedip", "pkg/node/wake", "pkg/node/apiserver",
		},
		never: slices.Concat(allClients, []string{"pkg/home", "pkg/placement"}),
	},

	// The controller. It knows addresses by RetainedIPs and PodIPs only.
	{pkg: "pkg/placement/gate", uses: []string{"pkg/api", "pkg/home"}, never: addresses},
	{
		pkg:   "pkg/placement/cluster",
		uses:  []string{"pkg/api", "pkg/apilist", "pkg/home", "pkg/pool", "pkg/placement/gate"},
		never: addresses,
	},
	{
		pkg:   "pkg/placement/webhook",
		uses:  []string{"pkg/api", "pkg/home", "pkg/placement/gate"},
		never: addresses,
	},
	{pkg: "pkg/placement/calico", uses: []string{"pkg/pool"}, never: addresses},
	{
		pkg: "pkg/placement/podip",
		uses: []string{
			"pkg/retention", "pkg/api", "pkg/apiwatch", "pkg/home", "pkg/pool", "pkg/placement/calico",
			"pkg/placement/cluster", "pkg/placement/gate",
		},
		never: addresses,
	},
	{
		pkg:   "pkg/placement/podstate",
		uses:  []string{"pkg/api", "pkg/home", "pkg/placement/cluster", "pkg/placement/gate"},
		never: addresses,
	},
	{
		pkg: "pkg/placement",
		uses: []string{
			"pkg/api", "pkg/home", "pkg/installation", "pkg/pool", "pkg/placement/cluster", "pkg/placement/gate",
			"pkg/placement/podip", "pkg/placement/podstate", "pkg/placement/webhook",
		},
		never: addresses,
	},

	// kubectl stayput asks the agent of a node, and predicts the controller by pkg/home. It is built for macOS and
	// Windows, too: it links nothing that knows the files of a node.
	{
		pkg:   "pkg/cli",
		uses:  []string{"pkg/retention", "pkg/api", "pkg/home", "pkg/pool", "pkg/installation", "pkg/uninstall"},
		never: []string{"pkg/ledger", "pkg/disk", "pkg/node", "pkg/placement", "google.golang.org/grpc", "github.com/containerd"},
	},

	// What foreign processes call by foreign protocols. Nothing in pkg imports it.
	{
		pkg:   "plugin/ipam",
		uses:  []string{"pkg/retention", "pkg/disk", "pkg/grants", "pkg/ledger", "pkg/link", "pkg/netconf", "pkg/spool"},
		never: heavy,
	},
	{pkg: "plugin/nri", uses: []string{"pkg/ledger"}, never: []string{"k8s.io/client-go"}},

	// The programs.
	{pkg: "cmd/internal/release", never: heavy},
	{pkg: "cmd/internal/program", uses: []string{"cmd/internal/release"}},
	{pkg: "cmd/stayput", uses: []string{"plugin/ipam", "cmd/internal/release"}, never: heavy},
	{
		pkg: "cmd/stayput-agent",
		uses: []string{
			"pkg/ledger", "pkg/api", "pkg/node", "pkg/node/cniconf", "pkg/node/importer",
			"pkg/node/inspect", "plugin/nri", "cmd/internal/program",
		},
		never: allClients,
	},
	{pkg: "cmd/stayput-controller", uses: []string{"pkg/placement", "pkg/uninstall", "cmd/internal/program"}},
	{pkg: "cmd/kubectl-stayput", uses: []string{"pkg/cli", "cmd/internal/program"}},
}

var (
	// heavy makes a program slow to start. Of other modules the rest is golang.org/x/sys.
	heavy = []string{
		"net", "net/http", "crypto/tls", "regexp", "text/template", "os/exec",
		"k8s.io", "sigs.k8s.io", "google.golang.org", "github.com", "gopkg.in", "go.yaml.in", "golang.org/x/net",
	}
	clients    = []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime"}
	allClients = []string{
		"sigs.k8s.io/controller-runtime", "k8s.io/client-go/kubernetes", "k8s.io/client-go/informers",
		"k8s.io/client-go/dynamic", "k8s.io/api/core",
	}
	addresses = []string{"pkg/ledger", "pkg/netconf", "pkg/spool", "pkg/node", "plugin"}
)

func TestEveryPackageObeysTheLawOfImports(t *testing.T) {
	used := map[int]bool{}
	for _, p := range packages(t) {
		row := rowOf(p.name)
		if row < 0 {
			t.Errorf("%s has no row", p.name)
			continue
		}
		used[row] = true
		for _, name := range p.imports {
			of := rowOf(name)
			if of >= 0 && of != row && (of > row || !slices.Contains(law[row].uses, law[of].pkg)) {
				t.Errorf("%s imports %s", p.name, name)
			}
		}
		for _, name := range p.links {
			if slices.ContainsFunc(law[row].never, func(tree string) bool { return in(name, tree) }) {
				t.Errorf("%s links %s", p.name, name)
			}
		}
	}
	for i, row := range law {
		if !used[i] {
			t.Errorf("%s has a row, and does not exist", row.pkg)
		}
	}
}

// byName are the functions of the controller that change or delete an object whatever has become of it, with the
// object. All others name its uid or resourceVersion, as package placement promises.
var byName = map[string]string{
	"pkg/placement/calico Unreserve":   "IPReservation of its own",
	"pkg/placement/podip tell":         "annotation of the installation",
	"pkg/placement/podip label":        "label of a namespace",
	"pkg/placement/podstate say":       "ConfigMap of its own",
	"pkg/placement/podstate Reconcile": "binding of its own",
	"pkg/placement/webhook trust":      "caBundle of the webhook",
}

func TestTheControllerChangesOnlyTheObjectThatItDecidedOn(t *testing.T) {
	unused := maps.Clone(byName)
	written := 0
	for name, file := range parsed(t, "pkg/placement") {
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !changes(f) {
				continue
			}
			written++
			function := path.Dir(name) + " " + f.Name.Name
			if _, ok := byName[function]; !ok && !namesItsObject(f) {
				t.Errorf("%s: %s names neither uid nor resourceVersion of what it writes", name, f.Name.Name)
			}
			delete(unused, function)
		}
	}
	if len(unused) > 0 || written < 10 {
		t.Errorf("of %d functions that write, none is %v", written, unused)
	}
}

// changes reports whether a function changes or deletes an object, by controller-runtime's client. An update replaces
// the version that was read.
func changes(f *ast.FuncDecl) (found bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 || types.ExprString(call.Args[0]) != "ctx" {
			return true
		}
		method, ok := call.Fun.(*ast.SelectorExpr)
		if ok && !strings.HasSuffix(types.ExprString(method.X), "EventHandler") {
			found = found || slices.Contains([]string{"Apply", "Patch", "Delete"}, method.Sel.Name)
		}
		return true
	})
	return found
}

// namesItsObject reports whether the code of a function, comments aside, has a uid or a version.
func namesItsObject(f *ast.FuncDecl) (found bool) {
	words := []string{"UID", "GetUID", "WithUID", `"uid"`, `"/metadata/uid"`, "ResourceVersion", `"resourceVersion"`,
		"MergeFromWithOptimisticLock"}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			found = found || slices.Contains(words, n.Name)
		case *ast.BasicLit:
			found = found || slices.Contains(words, n.Value)
		}
		return true
	})
	return found
}

func TestTheAgentsOverviewNamesEveryLoop(t *testing.T) {
	overview := read(t, "pkg/node/agent.go")
	overview, _, _ = strings.Cut(overview, "\npackage node")
	found := 0
	for name, file := range parsed(t, "pkg/node") {
		pkg := path.Base(path.Dir(name))
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv == nil || f.Name.Name != "Run" || pkg == "node" {
				continue
			}
			if found++; !strings.Contains(overview, "\n//\t"+pkg+" ") {
				t.Errorf("pkg/node/agent.go says nothing of package %s, which has a loop", pkg)
			}
		}
	}
	if found < 4 {
		t.Errorf("only %d loops", found)
	}
}

var (
	buildTags = regexp.MustCompile(`(?m)^//go:build (.+)$`)
	testedBy  = regexp.MustCompile(`\) test .*-tags (\S+)(?:[ \t]+-run '?([\w|]+)'?)?[ \t]+\./(test/\w+)` +
		`(?:[ \t]+-run '?([\w|]+)'?)?`)
)

// A test with a build tag runs by a target of the Makefile only.
func TestEveryTaggedTestRunsByATargetOfMake(t *testing.T) {
	targets := testedBy.FindAllStringSubmatch(strings.ReplaceAll(read(t, "Makefile"), "\\\n", ""), -1)
	found := 0
	for name, text := range sources(t, isTest, "test") {
		tags := buildTags.FindStringSubmatch(text)
		if tags == nil {
			continue
		}
		for _, test := range testFunc.FindAllStringSubmatch(text, -1) {
			if test[1] == "TestMain" {
				continue
			}
			found++
			if !slices.ContainsFunc(targets, func(target []string) bool {
				runs, err := regexp.MatchString(target[2]+target[4], test[1])
				must.Do(t, err)
				return runs && target[3] == path.Dir(name) && slices.Contains(strings.Split(tags[1], " || "), target[1])
			}) {
				t.Errorf("no target of make runs %s of %s", test[1], name)
			}
		}
	}
	if found < 20 {
		t.Errorf("only %d tests with tags", found)
	}
}

// parsed returns the files of a tree, without tests.
func parsed(t *testing.T, tree string) map[string]*ast.File {
	t.Helper()
	all := map[string]*ast.File{}
	for name, text := range sources(t, isProduct, tree) {
		file, err := parser.ParseFile(token.NewFileSet(), name, text, 0)
		must.Do(t, err)
		all[name] = file
	}
	return all
}

// rowOf returns the row of a package: its own, or else that of the nearest package above it; -1 if there is none.
func rowOf(pkg string) int {
	for ; pkg != "."; pkg = path.Dir(pkg) {
		if i := slices.IndexFunc(law, func(row rule) bool { return row.pkg == pkg }); i >= 0 {
			return i
		}
	}
	return -1
}

// in reports whether a package is that of the tree, or below it. Of the standard library it must be that itself.
func in(pkg, tree string) bool {
	top, _, _ := strings.Cut(tree, "/")
	ours := slices.Contains([]string{"cmd", "pkg", "plugin"}, top)
	return pkg == tree || (ours || strings.Contains(top, ".")) && strings.HasPrefix(pkg, tree+"/")
}

// pkg is a package of this module. Names of those are without the module's.
type pkg struct {
	name           string
	imports, links []string
}

// packages returns the packages that the programs are made of.
func packages(t *testing.T) (all []pkg) {
	t.Helper()
	cmd := exec.Command("go", "list", "-f", `{{.ImportPath}};{{join .Imports " "}};{{join .Deps " "}}`,
		"./cmd/...", "./pkg/...", "./plugin/...")
	cmd.Dir = ".."
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	must.Do(t, err)
	for line := range strings.Lines(strings.ReplaceAll(string(out), module, "")) {
		f := strings.Split(strings.TrimSpace(line), ";")
		if strings.HasSuffix(f[0], "test") { // for tests
			continue
		}
		all = append(all, pkg{f[0], strings.Fields(f[1]), strings.Fields(f[2])})
	}
	return all
}
