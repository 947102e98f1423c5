package node

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// kubernetesArgs returns the CNI_ARGS of a pod.
func kubernetesArgs(p lab.Pod) string {
	return fmt.Sprintf("IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_INFRA_CONTAINER_ID=%s;K8S_POD_UID=%s",
		p.Namespace, p.Name, p.ID, p.UID)
}

// withAnnotations returns the configuration that containerd passes to the main plugin of a network for a pod.
func withAnnotations(t *testing.T, w lab.Network, annotations map[string]string) []byte {
	t.Helper()
	var conf map[string]any
	must.Do(t, json.Unmarshal(w.NetConf(), &conf))
	conf["runtimeConfig"] = map[string]any{lab.AnnotationsCapability: annotations}
	data, err := json.Marshal(conf)
	must.Do(t, err)
	return data
}

func TestLateAndRepeatedDelsDoNotTouchTheNewPod(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	n := startStayput(t, w)
	startAgent(t, n)
	old := runPod(t, n, web(0))
	must.Do(t, n.StopPod(testContext(t), old.ID))
	pod := runPod(t, n, web(0))
	sameIP(t, n, pod, old)
	untouched := func(after string) {
		t.Helper()
		if s := state(t, n, pod.IP()); s != pod.ID {
			t.Fatalf("after %s %s is %s, want the new sandbox's", after, pod.IP(), s)
		}
		answers(t, n, pod)
	}
	// From containerd, for kubelet's garbage collection.
	must.Do(t, n.StopPod(testContext(t), old.ID))
	untouched("a second stop")
	must.Do(t, n.RemovePod(testContext(t), old.ID))
	untouched("the removal")
	must.Do(t, n.RemovePod(testContext(t), old.ID))
	untouched("a second removal")
	// From any other runtime, repeatedly.
	for i := range 4 {
		_, err := n.CNI(testContext(t), lab.CNICall{
			Plugin: "bridge", Command: "DEL", ContainerID: old.ID, Args: kubernetesArgs(old),
			Config: withAnnotations(t, w, old.Annotations),
		})
		must.Do(t, err)
		untouched(fmt.Sprintf("DEL number %d", i+1))
	}
	deletePod(t, n, pod)
	wantState(t, n, pod.IP(), retained)
}

// inUse is what a replacement is told beside the old pod.
const inUse = "the predecessor of this pod still has its address"

func TestTheReplacementOfAForceDeletedPodGetsItsAddress(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	n := startStayput(t, w)
	startAgent(t, n)
	old := runPod(t, n, web(0))

	if p, err := n.RunPod(testContext(t), web(0)); err == nil || !strings.Contains(err.Error(), inUse) ||
		!strings.Contains(err.Error(), old.ID) {
		t.Errorf("a replacement beside the old pod: %v, error %v", p.IPs, err)
	}
	// CRI's error is mere text; the plugin's has the code for "try again later".
	netNS, err := n.NewNetNS(testContext(t), "replacement")
	must.Do(t, err)
	out, err := n.CNI(testContext(t), lab.CNICall{
		Plugin: "bridge", Command: "ADD", ContainerID: "replacement", NetNS: netNS, Args: kubernetesArgs(old),
		Config: withAnnotations(t, w, old.Annotations),
	})
	var said struct {
		Code int
		Msg  string
	}
	if err == nil || json.Unmarshal(out, &said) != nil || said.Code != 11 || !strings.Contains(said.Msg, inUse) {
		t.Errorf("ADD of a replacement beside the old pod: %v, %s", err, out)
	}
	// The refused ADD leaves nothing behind, and the old pod is unaffected.
	wantState(t, n, old.IP(), old.ID)
	answers(t, n, old)

	deletePod(t, n, old)
	pod := runPod(t, n, web(0))
	sameIP(t, n, pod, old)
	answers(t, n, pod)
}

// The replacement's sandbox is requested before the old one is stopped.
func TestAWaitingReplacementGetsTheAddressWithoutARetry(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	old := runPod(t, n, web(0))
	pod, err := replaceRunning(t, n, old)
	must.Do(t, err)
	sameIP(t, n, pod, old)
	must.Do(t, n.RemovePod(testContext(t), old.ID))
	answers(t, n, pod)
}

// replaceRunning runs the replacement of web-0 and stops the old one while the plugin waits for that.
func replaceRunning(t *testing.T, n *lab.Node, old lab.Pod) (lab.Pod, error) {
	t.Helper()
	type started struct {
		pod lab.Pod
		err error
	}
	ctx := testContext(t)
	replacement := make(chan started, 1)
	go func() {
		pod, err := n.RunPod(ctx, web(0))
		replacement <- started{pod, err}
	}()
	untilPlugin(t, n)
	must.Do(t, n.StopPod(ctx, old.ID))
	r := <-replacement
	return r.pod, r.err
}

// untilPlugin waits until the plugin runs.
func untilPlugin(t *testing.T, n *lab.Node) {
	t.Helper()
	must.Within(t, patience, "the plugin to run", func() bool {
		processes, err := n.Processes()
		must.Do(t, err)
		for _, comm := range processes {
			if comm == "stayput" {
				return true
			}
		}
		return false
	})
}

func TestAReplacementWithAllocateNewKeepsItsNewAddress(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	spec := web(0)
	spec.Annotations[retention.AnnotationWhenInUse] = "AllocateNew"
	old := runPod(t, n, spec)
	fresh := runPod(t, n, spec)
	distinct(t, old, fresh)
	deletePod(t, n, old)
	wantState(t, n, old.IP(), free)
	answers(t, n, fresh)
	deletePod(t, n, fresh)
	wantState(t, n, fresh.IP(), retained)
	distinct(t, fresh, runPod(t, n, other(1)))
	sameIP(t, n, runPod(t, n, spec), fresh)
}

func TestABadAnnotationIsAClearErrorAndLeavesNothing(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	runPod(t, n, other(1)) // the bridge plugin cannot use a bridge without any successful ADD
	for key, value := range map[string]string{
		retention.AnnotationRetainIP:           "true",
		retention.AnnotationReservedIPDuration: "10m",
	} {
		_, err := n.RunPod(testContext(t), lab.PodSpec{Name: "web-0", Annotations: map[string]string{key: value}})
		if err == nil {
			t.Fatalf("%s: %q was accepted", key, value)
		}
		for _, want := range []string{"annotation " + key, fmt.Sprintf("%q", value), "is not valid", "expected"} {
			// CRI quotes the plugin's message.
			if !strings.Contains(strings.ReplaceAll(err.Error(), `\"`, `"`), want) {
				t.Errorf("the error does not say %s: %v", want, err)
			}
		}
	}
	pod := runPod(t, n, web(0))
	wantIP(t, pod.IP(), "10.88.0.3")
	pods, err := n.Pods(testContext(t))
	must.Do(t, err)
	if len(pods) != 2 {
		t.Errorf("%d sandboxes are left, want those of the two good pods", len(pods))
	}
}

func TestARetainedAddressGoesToNoOtherPod(t *testing.T) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/29")) // five addresses
	startAgent(t, n)
	pod := runPod(t, n, web(0))
	deletePod(t, n, pod)
	for i := range 4 {
		distinct(t, pod, runPod(t, n, other(i)))
	}
	shared := lab.PodSpec{Name: "web-5f9c-x", Annotations: maps.Clone(asking("10m"))}
	shared.Annotations[retention.AnnotationIdentity] = "web-0"
	elsewhere := web(0)
	elsewhere.Namespace = "elsewhere"
	for _, spec := range []lab.PodSpec{other(9), web(1), shared, elsewhere} {
		if p, err := n.RunPod(testContext(t), spec); err == nil ||
			!strings.Contains(err.Error(), "no IP addresses available") {
			t.Errorf("%s in a range without a free address: %v, error %v", spec.Name, p.IPs, err)
		}
	}
	sameIP(t, n, runPod(t, n, web(0)), pod)
}

// containerd 2.4 never calls GC, and the bridge plugin 1.9 does not pass it on. Other runtimes, such as CRI-O, call it
// with the attachments that they know.
func TestGCLeavesRunningPodsAndRetainedAddresses(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	w.CNIVersion = "1.1.0"
	n := startStayput(t, w)
	startAgent(t, n)
	gone, pod, leaked := runPod(t, n, web(0)), runPod(t, n, web(1)), runPod(t, n, other(1))
	deletePod(t, n, gone)
	collect := func(valid any) {
		t.Helper()
		var conf map[string]any
		must.Do(t, json.Unmarshal(w.NetConf(), &conf))
		if valid != "missing" {
			conf["cni.dev/valid-attachments"] = valid
		}
		data, err := json.Marshal(conf)
		must.Do(t, err)
		_, err = n.CNI(testContext(t), lab.CNICall{Plugin: "stayput", Command: "GC", Config: data})
		must.Do(t, err)
	}
	collect("missing")
	wantState(t, n, leaked.IP(), leaked.ID)
	if _, err := n.CNI(testContext(t), lab.CNICall{Plugin: "bridge", Command: "GC", Config: w.NetConf()}); err != nil {
		t.Errorf("GC of the main plugin: %v", err)
	}
	wantState(t, n, leaked.IP(), leaked.ID)
	collect([]any{map[string]any{"containerID": pod.ID, "ifname": "eth0"}})
	wantState(t, n, leaked.IP(), free)
	wantState(t, n, pod.IP(), pod.ID)
	wantState(t, n, gone.IP(), retained)
	answers(t, n, pod)
	sameIP(t, n, runPod(t, n, web(0)), gone)
}
