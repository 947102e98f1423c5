package cli

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// execute runs the command without a cluster.
func execute(t *testing.T, args ...string) error {
	t.Helper()
	cmd := New(Options{Version: "v1"})
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetIn(&out)
	cmd.SetArgs(append(args, "--kubeconfig=/nonexistent/kubeconfig"))
	return cmd.ExecuteContext(t.Context())
}

func TestABadArgumentIsNamed(t *testing.T) {
	for _, test := range []struct{ args, says string }{
		{"get deployment/web", "POD: \"deployment/web\" is not valid: expected the name of a pod, a RetainedIP or a PodIP"},
		{"get pod/", "POD: \"pod/\" is not valid"},
		{"get web-0 -A", "POD: names cannot be combined with --all-namespaces"},
		{"get web-0 -l app=web", "POD: names cannot be combined"},
		{"get -o xml", "--output: unable to match a printer suitable for the output format \"xml\""},
		{"release", "POD: expected names of pods, RetainedIPs or PodIPs, --all, or --node"},
		{"release web-0 --all", "POD: names cannot be combined with --all"},
		{"release web-0 -l app=web", "--selector: can only be used with --all"},
		{"release web-0 --dry-run=yes", "--dry-run: \"yes\" is not valid: expected none, client or server"},
		{"release web-0 --timeout=0s", "--timeout: 0s is not valid: expected more than 0"},
		{"release web-0 -o wide", "--output:"},
		{"node", "NODE: got 0 arguments: expected the name of a node"},
		{"node a b", "NODE: got 2 arguments"},
		{"node a -o wide", "--output: \"wide\" is not valid: expected json or yaml"},
		{"why", "POD: got 0 arguments: expected the name of a pod"},
		{"why web-0 -o name", "--output: \"name\" is not valid: expected json or yaml"},
		{"import", "SOURCE: \"\" is not valid: expected openkruise, spiderpool or calico"},
		{"import flannel", "SOURCE: \"flannel\" is not valid: expected openkruise, spiderpool or calico"},
		{"import calico --into=blue", "STATEFULSET: expected statefulset/NAME"},
		{"import calico deployment/web --into=blue", "STATEFULSET: \"deployment/web\" is not valid: expected statefulset/NAME"},
		{"import calico sts/web", "--into: expected pools with the source calico and with no other"},
		{"import calico sts/web --into=blue --retain-ip=1h", "--into: expected pools"},
		{"import openkruise --into=blue", "--into: expected pools with the source calico and with no other"},
		{"import spiderpool --retain-ip=true", "--retain-ip: annotation stayput.io/retain-ip: \"true\" is not valid"},
		{"import spiderpool --dry-run=server", "--dry-run: \"server\" is not valid: expected none or client"},
		{"check -o wide", "--output: \"wide\" is not valid: expected json or yaml"},
	} {
		if err := execute(t, strings.Fields(test.args)...); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: error %v, expected %q", test.args, err, test.says)
		}
	}
}

func TestInspectGetsTheFlagsOfTheAgent(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "other", Args: []string{"--state-dir=/elsewhere"}},
		{Name: "agent", Command: []string{"/stayput-agent", "--listen=[$(HOST_IP)]:9463"}, Args: []string{
			"--install-cni", "--node-name=$(NODE_NAME)", "--state-dir=/var/lib/stayput",
		}, Env: []corev1.EnvVar{{Name: "HOST_IP", ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.hostIP"},
		}}}},
	}}, Status: corev1.PodStatus{HostIP: "10.0.0.1"}}
	if flags := daemonFlags(pod); !slices.Equal(flags,
		[]string{"--listen=[10.0.0.1]:9463", "--install-cni", "--state-dir=/var/lib/stayput"}) {
		t.Errorf("the flags are %q", flags)
	}
}

func TestTextIsWrappedBetweenWords(t *testing.T) {
	if got := wrapped("one two  three four-and-a-long-word five", "  ",
		10); got != "one two\n  three\n  four-and-a-long-word\n  five" {
		t.Errorf("wrapped is %q", got)
	}
}

func TestAProgressLineIsNotWrittenToAFile(t *testing.T) {
	var b bytes.Buffer
	p := newProgress(&b)
	p.say("half of it")
	p.done()
	if b.Len() > 0 {
		t.Errorf("written is %q", b.String())
	}
}

func TestTheFormatsAreCompleted(t *testing.T) {
	for verb, want := range map[string]string{"get": "jsonpath", "release": "jsonpath", "why": "yaml", "check": "yaml"} {
		cmd := New(Options{Version: "v1"})
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs([]string{"__complete", verb, "-o", ""})
		if err := cmd.ExecuteContext(t.Context()); err != nil || !slices.Contains(strings.Fields(out.String()), want) ||
			(verb == "get") != slices.Contains(strings.Fields(out.String()), "wide") {
			t.Errorf("%s: %v, printed %q", verb, err, out.String())
		}
	}
}

func TestANodeThatDoesNotExistIsKnownForCertain(t *testing.T) {
	node := aNode("node-1")
	k := aCluster(nothing, &node)
	if nodeMissing(t.Context(), k, "node-1") || !nodeMissing(t.Context(), k, "nosuch") ||
		nodeMissing(t.Context(), forbids(k, "Node"), "nosuch") {
		t.Error("a Node is missing that is there or cannot be read, or is not that does not exist")
	}
}
