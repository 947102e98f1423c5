package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/cli"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

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
		r["UNTIL"] != kept.Status.Expires.UTC().Format(time.RFC3339) || r["LEFT"] == "<none>" ||
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
	if r := retainedIP(t, c, ns, "web-1", "node-1"); r == nil || r.Spec.Release != "" {
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
	if r := retainedIP(t, c, ns, "web-0", "node-1"); r == nil || r.Spec.Release != "" {
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
	kubectl(t, c, "patch", "retip", "web-0.node-1", "-n", ns, "--type=merge", `-p={"spec":{"release":null}}`)
	waits := make(chan said)
	go func() { waits <- stayput(t, c, ns, "release", "web-0", "--yes") }()
	shows(t, c, ns, "web-0", "node-1", "still to be released", func(r *v1alpha1.RetainedIP) bool {
		return r.Spec.Release != ""
	})
	kubectl(t, c, "delete", "retip", "web-0.node-1", "-n", ns)
	if s := <-waits; s.code != 1 || !strings.Contains(s.err, "unknown whether the address is free") || s.out != "" {
		t.Errorf("with the object gone and no agent: %+v", s)
	}
	start()
	if r := shows(t, c, ns, "web-0", "node-1", "retained", retained); r.Spec.Release != "" ||
		r.Status.IPs[0] != kept.Status.IPs[0] {
		t.Errorf("the object published again is %+v %+v", r.Spec, r.Status)
	}
	// A release is bound to the version that was shown, and the controller writes once more.
	shows(t, c, ns, "web-0", "node-1", "known to the controller", func(r *v1alpha1.RetainedIP) bool {
		return r.Spec.Workload != nil && r.Spec.Scheduled != ""
	})
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
	if s.code != 0 || !strings.Contains(s.out, kept.Status.IPs[0]+" is retained for pod:"+ns+"/web-1") ||
		!strings.Contains(s.out, web.Status.PodIP+" is bound to sandbox ") {
		t.Errorf("%+v", s)
	}
	t.Logf("\n%s", s.out)
	s = anywhere(t, c, "node", "node-9")
	if s.code != 1 || !strings.Contains(s.err, `node "node-9" does not exist`) {
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

	// Each pod of the name is told of, and in between, that the last one waited.
	s = story(t, c, ns, "web-0")
	var scheduled, killed, others int
	for _, e := range s.Events {
		switch {
		case e.Reason == "Scheduled" && strings.HasSuffix(e.Note, " to "+pod.Spec.NodeName):
			scheduled++
		case e.Reason == "Killing":
			killed++
		case e.Reason == "Started":
			others++
		}
	}
	if scheduled != 3 || killed != 2 || others > 0 {
		t.Errorf("what happened is %+v", s.Events)
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
		!strings.Contains(strings.Join(s.IfDeleted.Lines, " "), "does not want a pod with this ordinal") ||
		!strings.Contains(strings.Join(s.IfDeleted.Lines, " "), kept.Status.Expires.UTC().Format(time.RFC3339)) ||
		len(s.Kept) != 1 ||
		!strings.Contains(s.Kept[0].Ledger[0], "retained for pod:"+ns+"/web-0") {
		t.Errorf("%+v", s)
	}
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	if s := story(t, c, ns, "web-0"); !strings.Contains(strings.Join(s.IfDeleted.Lines, " "), "No known workload") {
		t.Errorf("without its workload: %+v", s.IfDeleted)
	}
	if s := anywhere(t, c, "why", "web-1", "-n", ns); s.code != 1 ||
		!strings.Contains(s.err, "pod web-1 in namespace "+ns+" does not exist") {
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
