package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
)

// versionBefore is the one that the upgrade begins with.
const versionBefore = "v0.0.9"

// products are what the cells install.
type products struct {
	now, before lab.Product
	chartBefore string
	published   *published // nil if the repository's version is installed
}

// patience bounds a step that hangs; it measures nothing.
const patience = 4 * time.Minute

// step is a part of the scenario.
type step struct {
	name string
	run  func(*stage, context.Context) error
}

// clusterUpgrade is a step of cells with a next version, the others of a published release.
const (
	clusterUpgrade = "upgrade of the cluster"
	publication    = "push, cosign sign, cosign verify"
	installation   = "helm install oci://"
)

var scenario = []step{
	{publication, (*stage).publish},
	{"preflight", (*stage).preflight},
	{"quick start", (*stage).quickStart},
	{"rollout", (*stage).rollout},
	{"all pods deleted, another node emptier", (*stage).deletion},
	{"power loss", (*stage).powerLoss},
	{"cordon", (*stage).cordon},
	{"controllers away", (*stage).controllersAway},
	{"removal", (*stage).removal},
	{"upgrade", (*stage).upgrade},
	{clusterUpgrade, (*stage).upgradeCluster},
	{"removal by Helm", (*stage).removalByHelm},
	{installation, (*stage).installPublished},
}

// run runs the scenario on a cluster of its own.
func (c cell) run(ctx context.Context, out io.Writer, p products) (err error) {
	r := report{out, c}
	if _, err := c.Versions.Build(ctx); err != nil {
		r.line("build", "FAILED", time.Now(), err.Error())
		return err
	}
	start := time.Now()
	starting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cluster, err := lab.StartCluster(starting, lab.ClusterOptions{
		Versions: c.Versions, NoNRI: c.nri == "off", Product: p.now,
		APIServerArgs: c.apiServerArgs(), UpgradesTo: c.next,
	})
	if err != nil {
		r.line("cluster", "FAILED", start, err.Error())
		return err
	}
	s := &stage{Cluster: cluster, cell: c, products: p}
	defer func() {
		if err != nil && ctx.Err() == nil {
			err = errors.Join(err, s.writeLogs(out))
		}
		err = errors.Join(err, s.Close())
	}()
	r.line("cluster", "ok", start, s.versions(ctx))
	for _, step := range scenario {
		if step.name == clusterUpgrade && c.next == "" ||
			(step.name == publication || step.name == installation) && p.published == nil {
			continue
		}
		start, s.note = time.Now(), ""
		ctx, cancel := context.WithTimeout(ctx, patience)
		err := step.run(s, ctx)
		cancel()
		if err != nil {
			r.line(step.name, "FAILED", start, err.Error())
			return err
		}
		r.line(step.name, "ok", start, s.note)
	}
	return nil
}

// versions says what runs, by the programs themselves.
func (s *stage) versions(ctx context.Context) string {
	node, err := s.Client().CoreV1().Nodes().Get(ctx, s.Nodes[0].Name, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	return "Kubernetes " + node.Status.NodeInfo.KubeletVersion + ", " + node.Status.NodeInfo.ContainerRuntimeVersion
}

func (s *stage) writeLogs(out io.Writer) error {
	f, err := os.CreateTemp("", "stayput-compat-*.log")
	if err != nil {
		return err
	}
	s.WriteLogs(f)
	fmt.Fprintln(out, "the cluster's logs:", f.Name())
	return f.Close()
}

// preflight is what kubectl stayput says of the cluster before anything is installed.
func (s *stage) preflight(ctx context.Context) error {
	out, err := s.Command(ctx, s.products.now.Kubectl, "check", "--preflight").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	says := "OK    gate: by MutatingAdmissionPolicy " + s.cell.gatedBy()
	if s.cell.gatedBy() == webhook {
		says = "OK    gate: by a webhook of the controllers"
	}
	var gate, runtime string
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, says):
			gate = says
		case strings.Contains(line, ": runtime: "):
			runtime = line
		}
	}
	if gate == "" || runtime == "" {
		return fmt.Errorf("no %q, or no runtime: %q", says, out)
	}
	s.note = gate + "; " + runtime
	return nil
}

// quickStart is the README's, on a cluster with pods: those go on. One node is left empty for the steps that follow.
func (s *stage) quickStart(ctx context.Context) error {
	spare := s.Nodes[len(s.Nodes)-1].Name
	if err := s.kubectl(ctx, "cordon", spare); err != nil {
		return err
	}
	if err := s.Deploy(ctx, namespace, web); err != nil {
		return err
	}
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	lines, err := typed(ctx, "README.md", "Use it")
	if err != nil {
		return err
	}
	install, patch, ok := strings.Cut(lines, "kubectl patch ")
	if !ok {
		return fmt.Errorf("the README has no kubectl patch: %s", lines)
	}
	options := lab.InstallOptions{By: func(ctx context.Context) error { return s.shell(ctx, s.manifests(install)) }}
	if s.byHelm() {
		options = lab.InstallOptions{Values: s.values()}
		s.note = "installed by Helm"
	}
	if err := s.Install(ctx, options); err != nil {
		return err
	}
	after, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	for name, pod := range before {
		if after[name].UID != pod.UID || container(after[name]) != container(pod) {
			return fmt.Errorf("%s did not run on", name)
		}
	}
	if err := s.pulled(ctx); err != nil {
		return err
	}
	if err := s.gatedAsWanted(ctx); err != nil {
		return err
	}
	if err := s.gatesSoon(ctx); err != nil {
		return err
	}
	if err := s.shell(ctx, "kubectl patch "+patch); err != nil {
		return err
	}
	if err := s.rolledOut(ctx); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "uncordon", spare); err != nil {
		return err
	}
	return s.burden(ctx, s.Nodes[0].Name, s.Nodes[1].Name)
}

// byHelm says that kubectl apply does not do: there are values to set, or policies that the manifests have as v1 only.
func (s *stage) byHelm() bool { return len(s.values()) > 0 || s.cell.gatedBy() == betaPolicies }

// manifests names in these lines the manifest of what gates pods in this cell, and those of a published release.
func (s *stage) manifests(lines string) string {
	if s.cell.gatedBy() == webhook {
		lines = strings.ReplaceAll(lines, "deploy/gate-policies.yaml", "deploy/gate-webhook.yaml")
	}
	if p := s.products.published; p != nil {
		lines = strings.ReplaceAll(lines, "-f deploy/", "-f "+p.dist+"/")
	}
	return lines
}

func (s *stage) rollout(ctx context.Context) error {
	return s.comeHome(ctx, func() error {
		return s.kubectl(ctx, "rollout", "restart", "statefulset", workload)
	})
}

func (s *stage) deletion(ctx context.Context) error {
	return s.comeHome(ctx, func() error {
		return s.kubectl(ctx, "delete", "pods", "--selector=app="+workload, "--wait=false")
	})
}

// powerLoss switches one node off and on. Its pods are restarted in place, and the others run on.
func (s *stage) powerLoss(ctx context.Context) error {
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	lost := before[workload+"-0"].Spec.NodeName
	if err := s.Node(lost).Reboot(ctx); err != nil {
		return err
	}
	ended := map[string]*corev1.Pod{}
	for name, pod := range before {
		if pod.Spec.NodeName == lost {
			ended[name] = pod
		}
	}
	after, err := s.settle(ctx, ended)
	if err != nil {
		return err
	}
	return same(before, after)
}

// cordon has a pod wait for its cordoned node, and come home once it is open again.
func (s *stage) cordon(ctx context.Context) error {
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	pod := before[workload+"-0"]
	if err := s.kubectl(ctx, "cordon", pod.Spec.NodeName); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "delete", "pod", pod.Name, "--wait=false"); err != nil {
		return err
	}
	err = lab.Until(ctx, pod.Name+" to wait for its node", func() (bool, error) {
		events, err := s.Client().CoreV1().Events(namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "reason=WaitingForHome,involvedObject.name=" + pod.Name,
		})
		if err != nil {
			return false, err
		}
		now, err := s.Client().CoreV1().Pods(namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		return err == nil && now.UID != pod.UID && gated(now) && len(events.Items) > 0, err
	})
	if err != nil {
		return err
	}
	if err := s.kubectl(ctx, "uncordon", pod.Spec.NodeName); err != nil {
		return err
	}
	after, err := s.settle(ctx, map[string]*corev1.Pod{pod.Name: pod})
	if err != nil {
		return err
	}
	return same(before, after)
}

// controllersAway deletes a pod while no controller runs: it waits and comes home. One that is not gated then starts
// anywhere, with its address if that is its home.
func (s *stage) controllersAway(ctx context.Context) error {
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	pod := before[workload+"-1"]
	if err := s.Controllers.Kill(ctx); err != nil {
		return err
	}
	if err := s.kubectl(ctx, "delete", "pod", pod.Name, "--wait=false"); err != nil {
		return err
	}
	var next *corev1.Pod
	err = lab.Until(ctx, "another "+pod.Name, func() (bool, error) {
		next, err = s.Client().CoreV1().Pods(namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil && next.UID != pod.UID && (gated(next) || lab.Ready(next)), err
	})
	if err != nil {
		return err
	}
	waited := gated(next)
	if err := s.Controllers.Start(ctx); err != nil {
		return err
	}
	if err := s.gatesSoon(ctx); err != nil {
		return err
	}
	after, err := s.settle(ctx, map[string]*corev1.Pod{pod.Name: pod})
	if err != nil {
		return err
	}
	is := after[pod.Name]
	if !waited && is.Spec.NodeName != pod.Spec.NodeName {
		s.note = "the pod did not wait, and went elsewhere"
		return nil
	}
	return same(before, after)
}

// removal leaves no gate and nothing on the nodes, and pods run on.
func (s *stage) removal(ctx context.Context) error {
	return s.removed(ctx, func() error {
		if s.byHelm() {
			_, err := s.Uninstall(ctx)
			return err
		}
		line, err := mentioned(ctx, "docs/operations.md", "Remove", "kubectl delete -f ")
		if err != nil {
			return err
		}
		out, err := s.Command(ctx, s.products.now.Kubectl, "uninstall", "--yes").CombinedOutput()
		if err != nil {
			return fmt.Errorf("kubectl stayput uninstall: %w: %s", err, out)
		}
		return s.shell(ctx, s.manifests(line))
	})
}

func (s *stage) removalByHelm(ctx context.Context) error {
	return s.removed(ctx, func() error {
		_, err := s.Uninstall(ctx)
		return err
	})
}

func (s *stage) removed(ctx context.Context, remove func() error) error {
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	if err := remove(); err != nil {
		return err
	}
	if err := s.clean(ctx); err != nil {
		return err
	}
	after, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	for name, pod := range before {
		if after[name].UID != pod.UID || container(after[name]) != container(pod) {
			return fmt.Errorf("%s did not run on", name)
		}
	}
	// The annotation is the user's to remove. Its rollout shows that host-local is in charge.
	if err := s.template(ctx, `{"metadata":{"annotations":{"stayput.io/retain-ip":null}}}`); err != nil {
		return err
	}
	switch gates, err := s.gatesBy(ctx); {
	case err != nil:
		return err
	case gates:
		return errors.New("new pods are still gated")
	}
	return s.kubectl(ctx, "delete", "crd", "retainedips.stayput.io", "persistentpodstates.apps.kruise.io")
}

// upgrade installs the version before and upgrades it: promises and pods stay, and pods come home afterwards.
func (s *stage) upgrade(ctx context.Context) error {
	err := s.Install(ctx, lab.InstallOptions{
		Chart: s.products.chartBefore, Product: &s.products.before, Values: s.values(),
	})
	if err != nil {
		return err
	}
	if err := s.template(ctx, `{"metadata":{"annotations":{"stayput.io/retain-ip":"10m"}}}`); err != nil {
		return err
	}
	pods, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	ids, err := s.promises(ctx, pods)
	if err != nil {
		return err
	}
	if err := s.Upgrade(ctx, nil); err != nil {
		return err
	}
	if err := s.pulled(ctx); err != nil {
		return err
	}
	now, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	for name, pod := range pods {
		if now[name].UID != pod.UID || container(now[name]) != container(pod) {
			return fmt.Errorf("%s did not run on", name)
		}
	}
	still, err := s.promises(ctx, pods)
	if err != nil {
		return err
	}
	if !slices.Equal(ids, still) {
		return fmt.Errorf("the RetainedIPs were %v and are %v", ids, still)
	}
	if err := s.gatedAsWanted(ctx); err != nil {
		return err
	}
	if err := s.gatesSoon(ctx); err != nil {
		return err
	}
	return s.deletion(ctx)
}

// upgradeCluster upgrades the control plane under the nodes. The webhook goes on gating pods until the release is
// upgraded: once for the policies, and once more to take the webhook away.
func (s *stage) upgradeCluster(ctx context.Context) error {
	if err := s.UpgradeControlPlane(ctx); err != nil {
		return err
	}
	if err := errors.Join(s.gatedAsWanted(ctx), s.gatesSoon(ctx)); err != nil {
		return err
	}
	for range 2 {
		if err := s.Upgrade(ctx, nil); err != nil {
			return err
		}
	}
	s.cell.gate = policies
	if err := s.gatedAsWanted(ctx); err != nil {
		return err
	}
	version, err := s.Client().Discovery().ServerVersion()
	if err != nil {
		return err
	}
	s.note = "to " + version.GitVersion
	if err := s.gatesSoon(ctx); err != nil {
		return err
	}
	return s.deletion(ctx)
}

// promises waits until each of the pods has a RetainedIP, and returns their UIDs.
func (s *stage) promises(ctx context.Context, pods map[string]*corev1.Pod) (uids []string, err error) {
	err = lab.Until(ctx, "the RetainedIPs", func() (bool, error) {
		out, err := s.Kubectl(ctx, "", "get", "retainedips", "-n", namespace, "-o",
			`jsonpath={range .items[*]}{.metadata.uid}{"\n"}{end}`)
		uids = strings.Fields(out)
		return err == nil && len(uids) >= len(pods), err
	})
	slices.Sort(uids)
	return uids, err
}
