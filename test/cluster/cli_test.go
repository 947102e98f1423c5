package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	types "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/cli"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// pluginDir returns a directory with the kubectl plugin as people install it: the program, and its link for completion.
// It is removed with the cluster.
func pluginDir(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	dir := filepath.Join(c.Dir, "plugin")
	build.Lock()
	defer build.Unlock()
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	compile := exec.Command("go", "build", "-o", dir+"/", "github.com/stayput/stayput/cmd/kubectl-stayput")
	must.Do(t, says(t, compile).error())
	must.Do(t, os.Symlink("kubectl-stayput", filepath.Join(dir, "kubectl_complete-stayput")))
	return dir
}

var build sync.Mutex

// said is a command's output and exit code.
type said struct {
	out, err string
	code     int
}

func (s said) error() error {
	if s.code == 0 {
		return nil
	}
	return fmt.Errorf("exit code %d: %s", s.code, s.err)
}

func says(t *testing.T, cmd *exec.Cmd) said {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return said{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// plugin runs kubectl with the plugin in its PATH.
func plugin(t *testing.T, c *lab.Cluster, args ...string) said {
	t.Helper()
	return says(t, pluginCommand(t, c, args...))
}

func pluginCommand(t *testing.T, c *lab.Cluster, args ...string) *exec.Cmd {
	t.Helper()
	dir := pluginDir(t, c)
	config, err := c.Kubeconfig()
	must.Do(t, err)
	cmd := exec.CommandContext(testContext(t), c.KubectlPath(), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+config, "HOME="+c.Dir, "PATH="+dir+":"+os.Getenv("PATH"))
	return cmd
}

// stayput runs kubectl stayput in a namespace.
func stayput(t *testing.T, c *lab.Cluster, ns string, args ...string) said {
	t.Helper()
	return plugin(t, c, append([]string{"stayput"}, append(args, "-n", ns)...)...)
}

// anywhere runs kubectl stayput without a namespace besides the arguments.
func anywhere(t *testing.T, c *lab.Cluster, args ...string) said {
	t.Helper()
	return plugin(t, c, append([]string{"stayput"}, args...)...)
}

// works is stayput for commands that must succeed; it returns the output.
func works(t *testing.T, c *lab.Cluster, ns string, args ...string) string {
	t.Helper()
	s := stayput(t, c, ns, args...)
	if s.code != 0 {
		t.Fatalf("kubectl stayput %v: %d %s", args, s.code, s.err)
	}
	return s.out
}

// row returns the line of a table that begins with a word, keyed by the columns of the header.
func row(t *testing.T, table, first string) map[string]string {
	t.Helper()
	lines := strings.Split(strings.TrimRight(table, "\n"), "\n")
	for _, line := range lines[1:] {
		if strings.Fields(line)[0] != first {
			continue
		}
		cells := map[string]string{}
		header := lines[0]
		for i := 0; i < len(header); {
			end := i
			for end < len(header) && !strings.HasPrefix(header[end:], "   ") {
				end++
			}
			next := end
			for next < len(header) && header[next] == ' ' {
				next++
			}
			if next == len(header) {
				cells[header[i:end]] = strings.TrimSpace(line[i:])
			} else {
				cells[header[i:end]] = strings.TrimSpace(line[i:next])
			}
			i = next
		}
		return cells
	}
	t.Fatalf("no line of %s in\n%s", first, table)
	return nil
}

func TestGetListsWhatIsKeptWhereWhyAndUntilWhen(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	if s := stayput(t, c, ns, "get"); s.code != 0 || s.out != "" || !strings.Contains(s.err, ns) {
		t.Errorf("with nothing kept: %+v", s)
	}
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	deploy(t, c, ns, lab.Workload{
		Name: "db", Replicas: 2, Annotations: retain("while-owned", "stayput.io/when-scaled", "Retain"), Node: "node-2",
	})
	web, db := ready(t, c, ns, "web-0"), ready(t, c, ns, "db-1")
	ready(t, c, ns, "db-0")
	shows(t, c, ns, "web-0", "node-1", "bound with its workload", func(r *v1alpha1.RetainedIP) bool {
		return boundTo(web)(r) && r.Spec.Workload != nil
	})
	r := row(t, works(t, c, ns, "get", "web-0"), "web-0")
	if r["IP"] != web.Status.PodIP || r["NODE"] != "node-1" || r["PHASE"] != "Bound" ||
		r["UNTIL"] != "<none>" || r["WHY"] != "10m after the pod stops" {
		t.Errorf("a running pod: %v", r)
	}
	scale(t, c, ns, "db", 1)
	kept := stopped(t, c, web)
	shows(t, c, ns, "db-1", "node-2", "retained", retained)
	all := works(t, c, ns, "get", "-o", "wide")
	if r := row(t, all, "web-0"); r["IP"] != web.Status.PodIP || r["PHASE"] != "Retained" ||
		r["UNTIL"] != kept.Status.Expires || r["LEFT"] == "<none>" ||
		r["WHY"] != "10m after the pod stopped" || r["WORKLOAD"] != "StatefulSet/web" ||
		r["NETWORK"] != kept.Status.Addresses[0].Network || r["POD UID"] != string(web.UID) {
		t.Errorf("a deleted pod: %v", r)
	}
	if r := row(t, all, "db-1"); r["LEFT"] != "29d" || // of the chart's longest retention
		r["WHY"] != "while owned by StatefulSet db, ordinal 1 not wanted, when-scaled is Retain" ||
		r["IP"] != db.Status.PodIP {
		t.Errorf("an unwanted pod: %v", r)
	}
	if r := row(t, all, "db-0"); r["WHY"] != "while owned by StatefulSet db, ordinal 0 wanted" {
		t.Errorf("a wanted pod: %v", r)
	}

	var list struct {
		APIVersion, Kind string
		Items            []v1alpha1.RetainedIP
	}
	must.Do(t, json.Unmarshal([]byte(works(t, c, ns, "get", "web-0", "-o", "json")), &list))
	if list.APIVersion != "v1" || list.Kind != "List" || len(list.Items) != 1 || list.Items[0].Kind != "RetainedIP" ||
		list.Items[0].Status.IPs[0] != web.Status.PodIP {
		t.Errorf("as JSON %+v", list)
	}
	if out := works(t, c, ns, "get", "web-0.node-1", "-o", "name"); out != "retainedip.stayput.io/web-0.node-1\n" {
		t.Errorf("as a name %q", out)
	}
	out := works(t, c, ns, "get", "-A", "-l", "app=web", "-o", "jsonpath={.items[*].spec.podName}")
	if !slices.Contains(strings.Fields(out), "web-0") || strings.Contains(out, "db-") {
		t.Errorf("by label %q", out)
	}
	if s := stayput(t, c, ns, "get", "web-0", "web-7"); s.code != 1 || !strings.Contains(s.err, "web-7") ||
		!strings.Contains(s.out, "web-0") {
		t.Errorf("with the name of a pod for which nothing is kept: %+v", s)
	}
}

func TestReleaseWaitsUntilTheNodeHasFreedTheAddress(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("10m"), Node: "node-1"})
	first := ready(t, c, ns, "web-0")
	ready(t, c, ns, "web-1")
	scale(t, c, ns, "web", 1)
	kept := shows(t, c, ns, "web-1", "node-1", "retained", retained)

	if s := stayput(t, c, ns, "release", "web-0", "--yes"); s.code != 1 || !strings.Contains(s.err, "in use") ||
		!strings.Contains(s.err, "scale StatefulSet web down") {
		t.Errorf("release of a bound address: %+v", s)
	}
	for _, how := range []string{"client", "server"} {
		if out := works(t, c, ns, "release", "web-1", "--dry-run="+how); !strings.Contains(out, "dry run") ||
			!strings.Contains(out, kept.Status.IPs[0]) {
			t.Errorf("--dry-run=%s: %q", how, out)
		}
	}
	if _, there := addressFile(t, c.Node("node-1"), kept); !there {
		t.Fatal("a dry run has released it")
	}
	for _, what := range []string{"web-1", "--all"} {
		if s := stayput(t, c, ns, "release", what); s.code != 1 || !strings.Contains(s.err, "--yes") ||
			strings.Count(s.err, "\n") != 1 {
			t.Errorf("release %s without a terminal: %+v", what, s)
		}
	}
	if r := retainedIP(t, c, ns, "web-1", "node-1"); r == nil || r.Spec.Release {
		t.Fatalf("without consent it is %+v", r)
	}
	out := works(t, c, ns, "release", "web-1", "--yes")
	if out != "retainedip.stayput.io/web-1.node-1 released: "+kept.Status.IPs[0]+" of node node-1\n" {
		t.Errorf("printed %q", out)
	}
	if _, there := addressFile(t, c.Node("node-1"), kept); there {
		t.Errorf("%s is not free after the command", kept.Status.IPs[0])
	}
	if r := retainedIP(t, c, ns, "web-0", "node-1"); r == nil || !boundTo(first)(r) {
		t.Errorf("the other pod's is %+v", r)
	}

	// On a terminal it asks for confirmation and shows progress.
	kept = stopped(t, c, first)
	screen, err := onTerminal(t, c, "Release them? (y/N) ", "n\n", "release", "--all", "-n", ns)
	if err == nil || !strings.Contains(screen, "web-0  "+kept.Status.IPs[0]+"  node node-1") ||
		!strings.Contains(screen, "nothing was changed") {
		t.Errorf("answered no: %v, on the screen is %q", err, screen)
	}
	if r := retainedIP(t, c, ns, "web-0", "node-1"); r == nil || r.Spec.Release {
		t.Fatalf("answered no, it is %+v", r)
	}
	screen, err = onTerminal(t, c, "Release them? (y/N) ", "y\n", "release", "--all", "-n", ns)
	if err != nil || !strings.Contains(screen, "\r1 of 1: waiting until node node-1 has freed "+kept.Status.IPs[0]) ||
		!strings.Contains(screen, "web-0.node-1 released: ") {
		t.Errorf("answered yes: %v, on the screen is %q", err, screen)
	}
	if _, there := addressFile(t, c.Node("node-1"), kept); there {
		t.Errorf("%s is not free after the command", kept.Status.IPs[0])
	}
}

// onTerminal runs kubectl stayput on a terminal, answers the question, and returns what is on the screen at the end.
func onTerminal(t *testing.T, c *lab.Cluster, question, answer string, args ...string) (string, error) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	must.Do(t, err)
	defer screen.Close()
	must.Do(t, unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	must.Do(t, err)
	must.Do(t, unix.IoctlSetWinsize(int(screen.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 120}))
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	must.Do(t, err)
	defer tty.Close()

	cmd := pluginCommand(t, c, append([]string{"stayput"}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	must.Do(t, cmd.Start())
	must.Do(t, tty.Close()) // so that the screen reads EOF when the command ends
	var shown []byte
	asked := false
	for b := make([]byte, 1024); ; {
		n, err := screen.Read(b)
		if err != nil {
			break // EIO: the other end is closed
		}
		shown = append(shown, b[:n]...)
		if !asked && bytes.Contains(shown, []byte(question)) {
			asked = true
			_, err := screen.WriteString(answer)
			must.Do(t, err)
		}
	}
	return string(shown), cmd.Wait()
}

func TestEveryVerbPrintsKubectlsFormats(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	stopped(t, c, ready(t, c, ns, "web-0"))
	for _, verb := range []struct {
		args, has string // a key of the document
		formats   []string
	}{
		{"get web-0", "items", []string{"json", "yaml", "wide", "name"}},
		{"why web-0", "ifDeleted", []string{"json", "yaml"}},
		{"release web-0 --dry-run=client", "spec", []string{"json", "yaml", "name"}},
		{"node node-1", "networks", []string{"json", "yaml"}},
		{"check node-1", "findings", []string{"json", "yaml"}},
		{"import openkruise node-1 --dry-run=client", "items", []string{"json", "yaml"}},
	} {
		for _, format := range verb.formats {
			out := works(t, c, ns, append(strings.Fields(verb.args), "-o", format)...)
			var document map[string]json.RawMessage
			var ok bool
			switch format {
			case "json":
				ok = json.Unmarshal([]byte(out), &document) == nil
			case "yaml":
				ok = !strings.HasPrefix(out, "{") && yaml.UnmarshalStrict([]byte(out), &document) == nil
			case "wide":
				ok = row(t, out, "web-0")["WORKLOAD"] == "StatefulSet/web"
			case "name":
				ok = out == "retainedip.stayput.io/web-0.node-1\n"
			}
			if document != nil {
				ok = ok && document[verb.has] != nil
			}
			if !ok {
				t.Errorf("%s -o %s printed\n%s", verb.args, format, out)
			}
		}
	}
	out := works(t, c, ns, "release", "--all", "-l", "app=web", "--yes", "-o", "name")
	if out != "retainedip.stayput.io/web-0.node-1\n" {
		t.Errorf("--all printed %q", out)
	}
}

func TestReleaseReportsAnAddressNotFreedYet(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-1"})
	kept := stopped(t, c, ready(t, c, ns, "web-0"))
	must.Do(t, c.Node("node-1").Agent.Stop(testContext(t)))
	start := once(func() { must.Do(t, c.Node("node-1").Agent.Start(testContext(t))) })
	defer start()
	if s := stayput(t, c, ns, "release", "web-0", "--yes", "--timeout=1s"); s.code != 1 ||
		!strings.Contains(s.err, "node-1 has not freed "+kept.Status.IPs[0]) {
		t.Errorf("%+v", s)
	}

	// Deleting the object meanwhile releases nothing.
	kubectl(t, c, "patch", "retip", "web-0.node-1", "-n", ns, "--type=merge", `-p={"spec":{"release":false}}`)
	waits := make(chan said)
	go func() { waits <- stayput(t, c, ns, "release", "web-0", "--yes") }()
	shows(t, c, ns, "web-0", "node-1", "still to be released", func(r *v1alpha1.RetainedIP) bool { return r.Spec.Release })
	kubectl(t, c, "delete", "retip", "web-0.node-1", "-n", ns)
	if s := <-waits; s.code != 1 || !strings.Contains(s.err, "not known whether the address is free") || s.out != "" {
		t.Errorf("with the object gone and no agent: %+v", s)
	}
	start()
	if r := shows(t, c, ns, "web-0", "node-1", "retained", retained); r.Spec.Release ||
		r.Status.IPs[0] != kept.Status.IPs[0] {
		t.Errorf("the object published again is %+v %+v", r.Spec, r.Status)
	}
	works(t, c, ns, "release", "web-0", "--yes")
	if _, there := addressFile(t, c.Node("node-1"), kept); there {
		t.Errorf("%s is not free after the command", kept.Status.IPs[0])
	}
}

// Its RetainedIPs went with it.
func TestAnAdministratorFreesWhatIsKeptForANamespaceThatIsGone(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	const pod = `
apiVersion: v1
kind: Pod
metadata:
  name: %s
  annotations: {stayput.io/retain-ip: %s, stayput.io/when-deleted: Retain}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: node-1}
  containers:
  - {name: web, image: %q, imagePullPolicy: Never, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}
`
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("while-owned", "stayput.io/when-deleted", "Retain"), Node: "node-1",
	})
	apply(t, c, ns, fmt.Sprintf(pod, "bare", "10m", lab.WebImage))
	apply(t, c, ns, fmt.Sprintf(pod, "unowned", "while-owned", lab.WebImage))
	kept := map[string]*v1alpha1.RetainedIP{}
	for _, name := range []string{"web-0", "bare"} {
		kept[name] = shows(t, c, ns, name, "node-1", "bound", boundTo(ready(t, c, ns, name)))
	}
	ready(t, c, ns, "unowned") // its address goes with it: no pod of its name comes again
	release := []string{"release", "--node=node-1", "--yes"}
	if s := stayput(t, c, ns, release...); s.code != 1 || !strings.Contains(s.err, "the namespace exists") {
		t.Errorf("before it is deleted: %+v", s)
	}
	kubectl(t, c, "delete", "namespace", ns)

	var want []string
	for name, r := range kept {
		if _, there := addressFile(t, c.Node("node-1"), r); !there {
			t.Errorf("%s of %s is free before", r.Status.IPs[0], name)
		}
		want = append(want, fmt.Sprintf("%s/%s released: %s of node node-1", ns, name, r.Status.IPs[0]))
	}
	freed := strings.Split(strings.TrimSpace(works(t, c, ns, release...)), "\n")
	slices.Sort(freed)
	slices.Sort(want)
	if !slices.Equal(freed, want) {
		t.Errorf("printed %q, want %q", freed, want)
	}
	for name, r := range kept {
		if _, there := addressFile(t, c.Node("node-1"), r); there {
			t.Errorf("%s of %s is not free after the command", r.Status.IPs[0], name)
		}
	}
	if s := stayput(t, c, ns, release...); s.code != 0 || s.out != "" || !strings.Contains(s.err, "retains nothing") {
		t.Errorf("a second time: %+v", s)
	}
}

func TestCompletionOffersPodsAndNodes(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("10m"), Node: "node-1"})
	ready(t, c, ns, "web-0")
	ready(t, c, ns, "web-1")
	scale(t, c, ns, "web", 1)
	shows(t, c, ns, "web-1", "node-1", "retained", retained)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"get", "w"}, "web-0 web-1 :4"},
		{[]string{"get", "web-0", ""}, "web-1 :4"},
		{[]string{"release", ""}, "web-1 :4"},
		{[]string{"node", "node-"}, "node-1 node-2 node-3 :4"},
	} {
		line := append([]string{"__complete", "stayput", "-n", ns}, test.args...)
		s := plugin(t, c, line...)
		var got []string
		for f := range strings.Lines(s.out) {
			word, _, _ := strings.Cut(strings.TrimSpace(f), "\t")
			got = append(got, word)
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%v is completed by %q, want %q (%s)", test.args, got, test.want, s.err)
		}
	}
}

func TestNodeShowsTheLedger(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("10m"), Node: "node-1"})
	web := ready(t, c, ns, "web-0")
	ready(t, c, ns, "web-1")
	scale(t, c, ns, "web", 1)
	kept := shows(t, c, ns, "web-1", "node-1", "retained", retained)

	s := anywhere(t, c, "node", "node-1", "-o", "json")
	var n inspection.Node
	if err := json.Unmarshal([]byte(s.out), &n); err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	states := map[string]inspection.State{}
	for _, a := range n.Networks[0].Addresses {
		states[a.IP.String()] = a.State
	}
	if states[web.Status.PodIP] != inspection.Bound || states[kept.Status.IPs[0]] != inspection.Retained {
		t.Errorf("the addresses are %v", states)
	}
	if set := n.Networks[0].RangeSets[0]; set.Promised < 2 || set.PromiseLimit != set.Size/2 {
		t.Errorf("the range set is %+v", set)
	}
	if len(n.Networks[0].Violations) > 0 || len(n.Networks[0].Leaks) > 0 || len(n.Networks[0].Doubled) > 0 ||
		n.Runtime.Error != "" || n.Agent.NRI != "connected" {
		t.Errorf("a healthy node is %+v", n)
	}
	s = anywhere(t, c, "node", "node-1")
	if s.code != 0 || !strings.Contains(s.out, "R retained") ||
		!strings.Contains(s.out, "B bound, and kept after its pod stops") || strings.Contains(s.out, "\x1b") {
		t.Errorf("%+v", s)
	}
	t.Logf("\n%s", s.out)
	s = anywhere(t, c, "node", "node-9")
	if s.code != 1 || !strings.Contains(s.err, "no agent of Stayput runs on the node") {
		t.Errorf("a node that does not exist: %+v", s)
	}
}

// story returns the report of why about a pod.
func story(t *testing.T, c *lab.Cluster, ns, pod string) cli.Story {
	t.Helper()
	s := anywhere(t, c, "why", pod, "-n", ns, "-o", "json")
	var is cli.Story
	if err := json.Unmarshal([]byte(s.out), &is); err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	return is
}

func TestWhatWhyPredictsForADeletedPodComesTrue(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait", "5m")})
	pod := ready(t, c, ns, "web-0")
	shows(t, c, ns, "web-0", pod.Spec.NodeName, "bound with its workload", func(r *v1alpha1.RetainedIP) bool {
		return boundTo(pod)(r) && r.Spec.Workload != nil
	})

	s := story(t, c, ns, "web-0")
	if s.IfDeleted.Outcome != "home" || s.IfDeleted.Node != pod.Spec.NodeName ||
		!slices.Equal(s.IfDeleted.IPs, []string{pod.Status.PodIP}) || len(s.Unknown) > 0 {
		t.Errorf("a running pod: %+v", s)
	}
	if s.Workload != "StatefulSet/web" || len(s.Kept) != 1 || len(s.Kept[0].Ledger) != 1 ||
		!strings.Contains(s.Kept[0].Ledger[0], "bound to sandbox") {
		t.Errorf("a running pod: %+v", s)
	}
	text := anywhere(t, c, "why", "web-0", "-n", ns)
	if !strings.Contains(text.out, "Node: "+pod.Spec.NodeName+", and no other") ||
		!strings.Contains(text.out, "IP: "+pod.Status.PodIP+", kept for 10m") {
		t.Errorf("in words: %+v", text)
	}
	t.Logf("\n%s", text.out)
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns)
	again := successor(t, c, pod)
	if again.Spec.NodeName != s.IfDeleted.Node || again.Status.PodIP != s.IfDeleted.IPs[0] {
		t.Errorf("predicted %+v, but it came to %s with %s", s.IfDeleted, again.Spec.NodeName, again.Status.PodIP)
	}

	// With its home cordoned, it has to wait.
	kubectl(t, c, "cordon", pod.Spec.NodeName)
	uncordoned := false
	uncordon := func() {
		if !uncordoned {
			uncordoned = true
			kubectl(t, c, "uncordon", pod.Spec.NodeName)
		}
	}
	defer uncordon()
	if s := story(t, c, ns, "web-0"); s.IfDeleted.Outcome != "wait" ||
		!strings.Contains(strings.Join(s.IfDeleted.Lines, " "), "is cordoned") ||
		!strings.Contains(strings.Join(s.IfDeleted.Lines, " "), "at most 5m") {
		t.Errorf("with its home cordoned: %+v", s.IfDeleted)
	}
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns)
	until(t, "the Event that it waits", func(context.Context) bool {
		p := getPod(t, c, ns, "web-0")
		return p != nil && p.UID != again.UID && len(p.Spec.SchedulingGates) > 0 &&
			saysOf(t, c, ns, "Pod", "web-0", "WaitingForHome") != ""
	})
	s = story(t, c, ns, "web-0")
	if !strings.Contains(s.State, "gated") || !strings.Contains(strings.Join(s.Placement, " "), "is cordoned") ||
		s.IfDeleted.Outcome != "wait" ||
		!slices.ContainsFunc(s.Events, func(e cli.Told) bool { return e.Reason == "WaitingForHome" }) {
		t.Errorf("a waiting pod: %+v", s)
	}
	text = anywhere(t, c, "why", "web-0", "-n", ns)
	t.Logf("\n%s", text.out)
	uncordon()
	ready(t, c, ns, "web-0")

	// There is a line for each of its lives, and in between, that it waited.
	s = story(t, c, ns, "web-0")
	started := func(e cli.Told) bool { return e.Reason == "Started" }
	if len(s.Lives) != 3 || !s.Lives[2].Present || slices.ContainsFunc(s.Events, started) {
		t.Errorf("the lives are %+v, with %+v", s.Lives, s.Events)
	}
	for _, l := range s.Lives {
		if l.Node != pod.Spec.NodeName || l.From == nil || (l.To == nil || l.State != "stopped") != l.Present {
			t.Errorf("a life is %+v", l)
		}
	}
	t.Logf("\n%s", anywhere(t, c, "why", "web-0", "-n", ns).out)
}

func TestWhyKnowsADeletedPod(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m"), Node: "node-2"})
	pod := ready(t, c, ns, "web-0")
	kept := stopped(t, c, pod)
	until(t, "the pod to be gone", func(context.Context) bool { return getPod(t, c, ns, "web-0") == nil })
	s := story(t, c, ns, "web-0")
	if s.IfDeleted.Outcome != "none" ||
		!strings.Contains(strings.Join(s.IfDeleted.Lines, " "), "does not want a pod of this ordinal") ||
		!strings.Contains(strings.Join(s.IfDeleted.Lines, " "), kept.Status.Expires) || len(s.Kept) != 1 ||
		!strings.Contains(s.Kept[0].Ledger[0], "retained for pod:"+ns+"/web-0") {
		t.Errorf("%+v", s)
	}
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	if s := story(t, c, ns, "web-0"); !strings.Contains(strings.Join(s.IfDeleted.Lines, " "), "No workload is known") {
		t.Errorf("without its workload: %+v", s.IfDeleted)
	}
	if s := anywhere(t, c, "why", "web-1", "-n", ns); s.code != 1 || !strings.Contains(s.err, "there is no pod web-1") {
		t.Errorf("an unknown pod: %+v", s)
	}
}

func TestWhySaysWhyNothingIsPromised(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 1})
	ready(t, c, ns, "plain-0")
	s := story(t, c, ns, "plain-0")
	if len(s.Promise) != 1 || !strings.Contains(s.Promise[0], "no annotation stayput.io/retain-ip") ||
		s.IfDeleted.Outcome != "free" {
		t.Errorf("%+v", s)
	}
}

// checked returns the report of check and its exit code.
func checked(t *testing.T, c *lab.Cluster, nodes ...string) (r cli.Report, code int) {
	t.Helper()
	s := anywhere(t, c, append([]string{"check", "-o", "json"}, nodes...)...)
	if err := json.Unmarshal([]byte(s.out), &r); err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	return r, s.code
}

// level returns the worst level of a check's findings about a node, or about the cluster if node is empty.
func level(r cli.Report, node, check string) cli.Level {
	is := cli.Level("")
	for _, f := range r.Findings {
		if f.Node == node && f.Check == check && is != cli.LevelFail && (is != cli.LevelWarn || f.Level == cli.LevelFail) {
			is = f.Level
		}
	}
	return is
}

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
		!strings.Contains(s.err, "missing right to list nodes: ") {
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
				strings.Contains(f.Text, "missing right to create pods/exec in namespace stayput-system") &&
				strings.Contains(f.Todo, "ask for that right")
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
	fails(t, c, "CNI configuration", "Calico keeps addresses in its own IPAM", "see docs/networks.md")
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
	defer os.Remove(filepath.Join(binary, "in-the-way"))
	must.Do(t, os.WriteFile(filepath.Join(binary, "in-the-way"), nil, 0o600)) // so that a rename cannot replace it
	fails(t, c, "plugin", "/opt/cni/bin/stayput: ", "the agent replaces it by itself; its log says why if it does not")
	readyzSays(t, node, "cni: degraded: no-plugin: ")
	nodeSays(t, c, "CNINotConfigured", "no-plugin: ")
	must.Do(t, os.RemoveAll(binary))
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
	if s := anywhere(t, c, "check", "node-9"); s.code != 1 || !strings.Contains(s.err, `no node "node-9"`) {
		t.Errorf("a node that does not exist: %+v", s)
	}
}

// imported returns what import reports for a pod, and the exit code. Without --yes it is a dry run.
func imported(t *testing.T, c *lab.Cluster, pod string, args ...string) (inspection.ImportItem, int) {
	t.Helper()
	if !slices.Contains(args, "--yes") {
		args = append(args, "--dry-run=client")
	}
	s := anywhere(t, c, append([]string{"import", "-o", "json"}, args...)...)
	var is inspection.Import
	if err := json.Unmarshal([]byte(s.out), &is); err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	for _, i := range is.Items {
		if i.Pod == pod {
			return i, s.code
		}
	}
	t.Fatalf("no report for %s: %+v", pod, s)
	return inspection.ImportItem{}, 0
}

// served starts a pod on a node, from which stayput learns the network's ranges.
func served(t *testing.T, c *lab.Cluster, ns, node string) {
	t.Helper()
	deploy(t, c, ns, lab.Workload{Name: "first", Replicas: 1, Node: node})
	ready(t, c, ns, "first-0")
}

// reserve writes a reservation as OpenKruise's host-local does, whose source is not available as a Go module: with
// types.IPConfig of the CNI library, in directories without permissions.
func reserve(t *testing.T, n *lab.ClusterNode, ns, pod, container, ip string, released *time.Time) {
	t.Helper()
	file := n.Path("/var/lib/cni/networks/reserved/" + ns + "/" + pod)
	must.Do(t, os.MkdirAll(filepath.Dir(file), os.ModeDir))
	t.Cleanup(func() { must.Do(t, os.RemoveAll(n.Path("/var/lib/cni/networks/reserved"))) })
	reserved := struct {
		ContainerID string          `json:"containerId"`
		IfName      string          `json:"ifName"`
		IPConf      *types.IPConfig `json:"IPConf"`
		Duration    time.Duration   `json:"duration"` // minutes
		ReleaseTime *time.Time      `json:"releaseTime,omitempty"`
	}{
		ContainerID: container,
		IfName:      "eth0",
		IPConf: &types.IPConfig{
			Address: net.IPNet{IP: net.ParseIP(ip), Mask: net.CIDRMask(24, 32)},
			Gateway: net.ParseIP("10.244.3.1"),
		},
		Duration:    10,
		ReleaseTime: released,
	}
	b, err := json.Marshal(reserved)
	must.Do(t, err)
	must.Do(t, os.WriteFile(file, b, 0o644))
}

func TestImportKeepsTheReservationsOfOpenKruisesHostLocal(t *testing.T) {
	c := installed(t)
	node := c.Node("node-3")
	ns := namespace(t, c)
	served(t, c, ns, "node-3")
	now := time.Now()
	// A deleted pod whose address file is still bound to its old container; one whose file is gone, too; one whose
	// time is over; and one outside of every ledger's ranges.
	bound := node.Path("/var/lib/cni/networks/pods/10.244.3.200")
	must.Do(t, os.WriteFile(bound, []byte("0123456789abcdef\r\neth0"), 0o600))
	reserve(t, node, ns, "web-0", "0123456789abcdef", "10.244.3.200", &now)
	reserve(t, node, ns, "web-1", "fedcba9876543210", "10.244.3.201", &now)
	old := now.Add(-time.Hour)
	reserve(t, node, ns, "web-2", "fedcba9876543211", "10.244.3.202", &old)
	reserve(t, node, ns, "web-3", "fedcba9876543212", "10.99.0.1", &now)

	for pod, want := range map[string]inspection.Action{
		"web-0": inspection.ActionRetain, "web-1": inspection.ActionRetain, "web-2": inspection.ActionNone,
		"web-3": inspection.ActionRefuse,
	} {
		i, code := imported(t, c, pod, "openkruise", "node-3")
		if i.Action != want || i.Done || code != 0 {
			t.Errorf("the plan for %s is %+v (%d)", pod, i, code)
		}
		if warns := strings.Contains(i.Why, "the pod is not brought to it"); warns != (want == inspection.ActionRetain) {
			t.Errorf("the plan for %s says %q", pod, i.Why)
		}
	}
	if b, err := os.ReadFile(bound); err != nil || string(b) != "0123456789abcdef\r\neth0" {
		t.Fatalf("a plan has changed the file: %q, %v", b, err)
	}
	if i, code := imported(t, c, "web-0", "openkruise", "node-3", "--yes"); !i.Done || code != 1 { // web-3 is refused
		t.Errorf("done is %+v (%d)", i, code)
	}
	for pod, ip := range map[string]string{"web-0": "10.244.3.200", "web-1": "10.244.3.201"} {
		r := shows(t, c, ns, pod, "node-3", "retained", retained)
		if r.Status.IPs[0] != ip || r.Spec.Retention != "10m" || r.Spec.Scheduled != "" {
			t.Errorf("for %s is kept %+v %+v", pod, r.Spec, r.Status)
		}
		if i, _ := imported(t, c, pod, "openkruise", "node-3", "--yes"); i.Action != inspection.ActionNone ||
			!strings.Contains(i.Why, "already") {
			t.Errorf("a second time: %+v", i)
		}
	}
	if r, code := checked(t, c, "node-3"); code != 0 || level(r, "node-3", "ledger") != cli.LevelOK {
		t.Errorf("check says %+v", r)
	}

	// They have their addresses again there, though the node alone says that they were there.
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 2, Annotations: map[string]string{"io.kubernetes.cri/reserved-ip-duration": "10"},
		Node: "node-3",
	})
	for pod, ip := range map[string]string{"web-0": "10.244.3.200", "web-1": "10.244.3.201"} {
		if p := ready(t, c, ns, pod); p.Spec.NodeName != "node-3" || p.Status.PodIP != ip {
			t.Errorf("%s came to %s with %s", pod, p.Spec.NodeName, p.Status.PodIP)
		}
	}
}

func TestImportPromisesARunningPodItsAddress(t *testing.T) {
	c := installed(t)
	node := c.Node("node-3")
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Node: "node-3"})
	pod := ready(t, c, ns, "web-0")
	// The patched host-local leaves the previous container in the address file after a restore.
	address := node.Path("/var/lib/cni/networks/pods/" + pod.Status.PodIP)
	must.Do(t, os.Remove(address)) // the ledger does not notice a file changed in place
	must.Do(t, os.WriteFile(address, []byte("0123456789abcdee\r\neth0"), 0o600))
	id := sandbox(t, c, pod).ID
	reserve(t, node, ns, "web-0", id, pod.Status.PodIP, nil)
	if i, code := imported(t, c, "web-0", "openkruise", "node-3"); i.Action != inspection.ActionBind || code != 0 {
		t.Errorf("the plan is %+v (%d)", i, code)
	}
	if i, code := imported(t, c, "web-0", "openkruise", "node-3", "--yes"); !i.Done || code != 0 {
		t.Errorf("done is %+v (%d)", i, code)
	}
	if b, err := os.ReadFile(address); err != nil || string(b) != id+"\r\neth0" {
		t.Errorf("the address file says %q, %v", b, err)
	}
	shows(t, c, ns, "web-0", "node-3", "bound to the pod", boundTo(pod))
	if answer, err := node.Get(testContext(t), ip(t, pod)); err != nil || answer.Name != pod.Name {
		t.Errorf("the pod answers %v, %v", answer, err)
	}
	if r, code := checked(t, c, "node-3"); code != 0 || level(r, "node-3", "ledger") != cli.LevelOK {
		t.Errorf("check says %+v", r)
	}
	stopped(t, c, pod)
}

// The part of Spiderpool's definition that import reads; the lab has no Spiderpool.
const spiderEndpointCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: spiderendpoints.spiderpool.spidernet.io}
spec:
  group: spiderpool.spidernet.io
  scope: Namespaced
  names: {kind: SpiderEndpoint, listKind: SpiderEndpointList, plural: spiderendpoints, singular: spiderendpoint, shortNames: [se]}
  versions:
  - name: v2beta1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          status: {type: object, x-kubernetes-preserve-unknown-fields: true}
`

func spiderEndpoint(pod, node, ip, owner string) string {
	return fmt.Sprintf(`
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderEndpoint
metadata: {name: %s}
status:
  ownerControllerType: %s
  ownerControllerName: web
  current: {uid: a-uid, node: %s, ips: [{interface: eth0, ipv4: %s/16, ipv4Pool: pool, vlan: 0}]}
`, pod, owner, node, ip)
}

func TestImportKeepsTheAddressesOfSpiderEndpoints(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	if s := anywhere(t, c, "import", "spiderpool", "--yes"); s.code != 1 ||
		!strings.Contains(s.err, "Spiderpool is not in this cluster") {
		t.Errorf("without Spiderpool: %+v", s)
	}
	served(t, c, ns, "node-3")
	apply(t, c, ns, spiderEndpointCRD)
	atEnd(t, c, "delete", "crd", "spiderendpoints.spiderpool.spidernet.io")
	must.Do(t, c.WaitForCRDs(testContext(t)))
	apply(t, c, ns, spiderEndpoint("web-0", "node-3", "10.244.3.210", "StatefulSet"))
	apply(t, c, ns, spiderEndpoint("web-1", "node-3", "10.6.0.10", "StatefulSet"))
	apply(t, c, ns, spiderEndpoint("web-5f7d-x2", "node-3", "10.244.3.211", "Deployment"))
	deploy(t, c, ns, lab.Workload{Name: "web", Node: "node-3"})

	for pod, why := range map[string]string{
		"web-1": "in the ranges of none", "web-5f7d-x2": "no pod of this name comes again",
	} {
		if i, _ := imported(t, c, pod, "spiderpool"); i.Action != inspection.ActionRefuse || !strings.Contains(i.Why, why) {
			t.Errorf("%s: %+v", pod, i)
		}
	}
	if i, _ := imported(t, c, "web-0", "spiderpool", "--yes", "--retain-ip=20m"); i.Action != inspection.ActionRetain ||
		!i.Done || i.Network != "pods" {
		t.Errorf("%+v", i)
	}
	r := shows(t, c, ns, "web-0", "node-3", "retained", retained)
	if r.Status.IPs[0] != "10.244.3.210" || r.Spec.Retention != "20m" {
		t.Errorf("kept is %+v %+v", r.Spec, r.Status)
	}
	works(t, c, ns, "release", "web-0", "--yes")
}
