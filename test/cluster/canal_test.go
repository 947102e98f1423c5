//go:build calico

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// Calico's programs take long to build: make calico runs this test, make test does not.

const (
	calicosFile = "/etc/cni/net.d/10-canal.conflist"
	agentsFile  = "/etc/cni/net.d/00-stayput.conflist"
)

// webDenied lets nobody ask the pods of web; friendAllowed lets friend.
const (
	webDenied = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]}
`
	friendAllowed = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friend}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress: [{from: [{podSelector: {matchLabels: {app: friend}}}]}]
`
)

// On canal flanneld routes, Calico's plugin connects the pods, with host-local, and Felix enforces their policies.
func TestPodsOfCanalKeepTheirAddressesUnderTheirPolicies(t *testing.T) {
	c := ownCluster(t, &lab.ClusterOptions{Flannel: &lab.FlannelOptions{Backend: "vxlan", Calico: true}})
	ns := namespace(t, c)
	kept := retain("1h")
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: kept})
	deploy(t, c, ns, lab.Workload{Name: "friend", Replicas: 1, Annotations: kept})
	deploy(t, c, ns, lab.Workload{Name: "stranger", Replicas: 1})
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 3})
	web, plain := places(t, c, ns, "web", 3, nil), places(t, c, ns, "plain", 3, nil)
	friend, stranger := places(t, c, ns, "friend", 1, nil), places(t, c, ns, "stranger", 1, nil)
	p := policed{t, c, ns}
	p.ask(friend, web, "yes")
	p.ask(stranger, web, "yes")
	files := map[string]string{}
	for _, n := range c.Nodes {
		files[n.Name] = file(t, n, calicosFile)
	}
	apply(t, c, ns, webDenied)
	p.ask(friend, web, "no")
	p.ask(stranger, web, "no")
	intruders := p.watch(stranger["stranger-0"], web)

	// The agents take over under running pods and policies.
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	for _, pods := range []map[string]*corev1.Pod{web, plain, friend, stranger} {
		untouched(t, c, pods)
	}
	promised(t, c, web)
	promised(t, c, friend)
	for _, n := range c.Nodes {
		taken := file(t, n, agentsFile)
		if !strings.Contains(taken, n.Pods.String()) || strings.Contains(taken, "usePodCidr") {
			t.Errorf("the podCIDR %s of %s is not in what the agent has written:\n%s", n.Pods, n.Name, taken)
		}
	}

	// 1. Nobody may ask the pods, and so nobody may ask those that follow them.
	web = p.again("web", web)
	p.refused(friend, web)

	// 2. One may, and so it may ask those that follow, and so may the one that follows it.
	apply(t, c, ns, friendAllowed)
	p.ask(friend, web, "yes")
	web = p.again("web", web)
	p.ask(friend, web, "yes")
	friend = p.again("friend", friend)
	p.ask(friend, web, "yes")

	// 3. No longer.
	kubectl(t, c, "delete", "networkpolicy", "friend", "-n", ns)
	p.ask(friend, web, "no")
	web = p.again("web", web)
	p.refused(friend, web)
	apply(t, c, ns, friendAllowed)
	p.ask(friend, web, "yes")

	// Ordinary pods come and go as before.
	deletePods(t, c, ns, "plain")
	plain = places(t, c, ns, "plain", 3, plain)
	p.ask(stranger, plain, "yes")
	unique(t, c)
	intruders()

	// The way back.
	_, err := c.Uninstall(testContext(t))
	must.Do(t, err)
	for _, pods := range []map[string]*corev1.Pod{web, plain, friend, stranger} {
		untouched(t, c, pods)
	}
	for _, n := range c.Nodes {
		hostLocalAlone(t, c, n)
		if is := file(t, n, calicosFile); is != files[n.Name] {
			t.Errorf("%s of %s was %s and is %s", calicosFile, n.Name, files[n.Name], is)
		}
	}
	deletePods(t, c, ns, "web")
	web = places(t, c, ns, "web", 3, web)
	p.ask(friend, web, "yes")
	p.ask(stranger, web, "no")
	unique(t, c)
	for _, n := range c.Nodes {
		hostLocalAlone(t, c, n)
	}
}

func file(t *testing.T, n *lab.ClusterNode, name string) string {
	t.Helper()
	data, err := os.ReadFile(n.Path(name))
	must.Do(t, err)
	return string(data)
}

// policed are pods in a namespace, to which its policies apply.
type policed struct {
	t  *testing.T
	c  *lab.Cluster
	ns string
}

// asks reports whether one pod is answered by another.
func (p policed) asks(ctx context.Context, from lab.Pod, node *lab.ClusterNode, to *corev1.Pod) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	answer, err := node.GetFrom(ctx, from, netip.MustParseAddr(to.Status.PodIP))
	return err == nil && answer.Name == to.Name
}

// ask waits until each pod is answered by each of the others, or by none.
func (p policed) ask(who, whom map[string]*corev1.Pod, answered string) {
	p.t.Helper()
	for _, from := range who {
		s, n := sandbox(p.t, p.c, from), p.c.Node(from.Spec.NodeName)
		for _, to := range whom {
			until(p.t, fmt.Sprintf("an answer of %s to %s: %s", to.Name, from.Name, answered), func(ctx context.Context) bool {
				return p.asks(ctx, s, n, to) == (answered == "yes")
			})
		}
	}
}

// refused checks that no pod is answered by another, at the first attempt.
func (p policed) refused(who, whom map[string]*corev1.Pod) {
	p.t.Helper()
	for _, from := range who {
		for _, to := range whom {
			if p.asks(p.t.Context(), sandbox(p.t, p.c, from), p.c.Node(from.Spec.NodeName), to) {
				p.t.Errorf("%s is answered by %s", from.Name, to.Name)
			}
		}
	}
}

// again deletes pods, and returns those that follow them at the same places, once Felix knows them: until then it drops
// what they send and what is sent to them.
func (p policed) again(name string, was map[string]*corev1.Pod) map[string]*corev1.Pod {
	p.t.Helper()
	deletePods(p.t, p.c, p.ns, name)
	is := places(p.t, p.c, p.ns, name, len(was), was)
	cameHome(p.t, was, is)
	plain := ready(p.t, p.c, p.ns, "plain-0")
	p.ask(is, map[string]*corev1.Pod{"plain-0": plain}, "yes")
	for _, pod := range is {
		until(p.t, "Calico's annotation of "+pod.Name, func(context.Context) bool {
			return getPod(p.t, p.c, p.ns, pod.Name).Annotations["cni.projectcalico.org/podIP"] == pod.Status.PodIP+"/32"
		})
	}
	return is
}

// watch has a pod ask others, by their addresses, until the returned function is called. None may answer.
func (p policed) watch(who *corev1.Pod, whom map[string]*corev1.Pod) (end func()) {
	p.t.Helper()
	s, n := sandbox(p.t, p.c, who), p.c.Node(who.Spec.NodeName)
	ctx, cancel := context.WithCancel(p.t.Context())
	var wg sync.WaitGroup
	for _, pod := range whom {
		wg.Go(func() {
			for asked := 0; ; asked++ {
				answers := p.asks(ctx, s, n, pod)
				if answers {
					p.t.Errorf("%s is answered by %s", who.Name, pod.Name)
				}
				if answers || ctx.Err() != nil {
					p.t.Logf("%s has asked %s %d times", who.Name, pod.Name, asked)
					return
				}
			}
		})
	}
	end = func() { cancel(); wg.Wait() }
	p.t.Cleanup(end)
	return end
}
