package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/lab"
)

const (
	namespace = "default" // the quick start names none
	workload  = "web"
	replicas  = 4
	gateName  = "stayput.io/placement"
)

// web is what users have before they install: without an annotation.
var web = lab.Workload{Name: workload, Replicas: replicas}

// stage is the cluster of a cell.
type stage struct {
	*lab.Cluster
	cell     cell
	products products
	note     string // about the step that runs, for its line
}

// place is a pod's node and address.
type place struct{ node, ip string }

func (p place) String() string { return p.node + " " + p.ip }

// pods returns the workload's pods by name.
func (s *stage) pods(ctx context.Context) (map[string]*corev1.Pod, error) {
	list, err := s.Client().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + workload})
	if err != nil {
		return nil, err
	}
	pods := map[string]*corev1.Pod{}
	for i := range list.Items {
		pods[list.Items[i].Name] = &list.Items[i]
	}
	return pods, nil
}

// settle waits until all pods are Ready and none is one of those before, by container.
func (s *stage) settle(ctx context.Context, before map[string]*corev1.Pod) (after map[string]*corev1.Pod, err error) {
	var missing string
	err = lab.Until(ctx, "the pods to run", func() (bool, error) {
		after, err = s.pods(ctx)
		if err != nil {
			return false, err
		}
		missing = ""
		for i := range replicas {
			name := fmt.Sprintf("%s-%d", workload, i)
			pod := after[name]
			if pod == nil || !lab.Ready(pod) || before[name] != nil && container(pod) == container(before[name]) {
				missing = name
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		err = fmt.Errorf("%w (%s)", err, missing)
	}
	return after, err
}

func container(pod *corev1.Pod) string {
	if len(pod.Status.ContainerStatuses) == 0 {
		return ""
	}
	return pod.Status.ContainerStatuses[0].ContainerID
}

func placeOf(pod *corev1.Pod) place { return place{pod.Spec.NodeName, pod.Status.PodIP} }

// same says which pods are not where they were.
func same(before, after map[string]*corev1.Pod) error {
	var errs []error
	for name, was := range before {
		if is := placeOf(after[name]); is != placeOf(was) {
			errs = append(errs, fmt.Errorf("%s was on %s and is on %s", name, placeOf(was), is))
		}
	}
	return errors.Join(errs...)
}

// comeHome does something that ends all of these pods and checks that they come back to their places.
func (s *stage) comeHome(ctx context.Context, do func() error) error {
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	after, err := s.settle(ctx, before)
	if err != nil {
		return err
	}
	return same(before, after)
}

// kubectl runs kubectl without an interest in its output.
func (s *stage) kubectl(ctx context.Context, args ...string) error {
	_, err := s.Kubectl(ctx, "", args...)
	return err
}

// shell runs lines of a document as they stand there, in the repository's folder.
func (s *stage) shell(ctx context.Context, lines string) error {
	config, err := s.Kubeconfig()
	if err != nil {
		return err
	}
	root, err := repository(ctx)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-e", "-c", lines)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "KUBECONFIG="+config, "HOME="+s.Dir,
		"PATH="+filepath.Dir(s.KubectlPath())+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", lines, err, out)
	}
	return nil
}

func repository(ctx context.Context) (string, error) {
	chart, err := lab.Chart(ctx)
	return filepath.Dir(filepath.Dir(chart)), err
}

// typed returns the first lines to type in a section of a document.
func typed(ctx context.Context, document, section string) (string, error) {
	return between(ctx, document, section, "\n```\n", "\n```\n")
}

// mentioned returns the first command in the text of a section that begins like this.
func mentioned(ctx context.Context, document, section, command string) (string, error) {
	rest, err := between(ctx, document, section, "`"+command, "`")
	return command + rest, err
}

func between(ctx context.Context, document, section, begin, end string) (string, error) {
	root, err := repository(ctx)
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(filepath.Join(root, document))
	if err != nil {
		return "", err
	}
	_, text, _ := strings.Cut(string(data), "\n## "+section+"\n")
	_, text, _ = strings.Cut(text, begin)
	text, _, ok := strings.Cut(text, end)
	if !ok {
		return "", fmt.Errorf("%s has no %q in section %q", document, strings.TrimSpace(begin), section)
	}
	return text, nil
}

// burden puts a pod with half of a node's room on nodes, so that the scheduler prefers the others.
func (s *stage) burden(ctx context.Context, nodes ...string) error {
	pods := s.Client().CoreV1().Pods(namespace)
	for _, name := range nodes {
		node, err := s.Client().CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		room := node.Status.Allocatable
		half := corev1.ResourceList{
			corev1.ResourceCPU:    *resource.NewMilliQuantity(room.Cpu().MilliValue()/2, resource.DecimalSI),
			corev1.ResourceMemory: *resource.NewQuantity(room.Memory().Value()/2, resource.BinarySI),
		}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "burden-" + name, Labels: map[string]string{"app": "burden"}},
			Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{
				Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever,
				Resources: corev1.ResourceRequirements{Requests: half},
			}}},
		}
		if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return lab.Until(ctx, "the burden", func() (bool, error) {
		list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "app=burden"})
		return err == nil && !slices.ContainsFunc(list.Items, func(p corev1.Pod) bool { return !lab.Ready(&p) }), err
	})
}

// values are the chart's, for what is not the default in this cell: those that docs/install.md tells to set.
func (s *stage) values() map[string]any {
	values := map[string]any{}
	if s.cell.Runtime == "crio" {
		values["platform"] = "crio"
	}
	if s.cell.nri == "off" {
		values["agent"] = map[string]any{"runtime": map[string]any{"nriSocket": ""}}
	}
	return values
}

// template changes the pod template, and waits for the rollout.
func (s *stage) template(ctx context.Context, patch string) error {
	patch = `{"spec":{"template":` + patch + `}}`
	_, err := s.Client().AppsV1().StatefulSets(namespace).Patch(ctx, workload, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{})
	if err != nil {
		return err
	}
	return s.rolledOut(ctx)
}

// rolledOut waits until all pods are of the current template and Ready.
func (s *stage) rolledOut(ctx context.Context) error {
	return lab.Until(ctx, "the rollout", func() (bool, error) {
		set, err := s.Client().AppsV1().StatefulSets(namespace).Get(ctx, workload, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		is := set.Status
		return is.ObservedGeneration == set.Generation && is.UpdateRevision == is.CurrentRevision &&
			is.UpdatedReplicas == replicas && is.ReadyReplicas == replicas, nil
	})
}

func gated(pod *corev1.Pod) bool {
	return slices.Contains(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: gateName})
}

// gatesBy asks the API server for a pod that it does not keep whether it would be gated.
func (s *stage) gatesBy(ctx context.Context) (bool, error) {
	pod, err := s.Client().CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "asked", Annotations: map[string]string{"stayput.io/retain-ip": "10m"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: lab.WebImage}}},
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	return err == nil && gated(pod), err
}

// gatesSoon waits until new pods are gated. A webhook needs its certificate first.
func (s *stage) gatesSoon(ctx context.Context) error {
	return lab.Until(ctx, "pods with the annotation to be gated", func() (bool, error) { return s.gatesBy(ctx) })
}

// gatedAsWanted returns an error if something else gates pods than is to in this cell. The chart picks it by itself.
func (s *stage) gatedAsWanted(ctx context.Context) error {
	const webhooks = "mutatingwebhookconfigurations"
	find := func(kind string) (string, error) {
		return s.Kubectl(ctx, "", "get", kind, "-l", "app.kubernetes.io/name=stayput", "-o", "name")
	}
	found, err := find(webhooks)
	if err != nil {
		return err
	}
	if s.cell.gatedBy() == webhook != (found != "") {
		return fmt.Errorf("webhooks: %q", found)
	}
	if s.cell.gatedBy() == webhook {
		return nil
	}
	found, err = find("mutatingadmissionpolicies." + s.cell.gatedBy() + ".admissionregistration.k8s.io")
	if err == nil && found == "" {
		err = fmt.Errorf("no policies %s", s.cell.gatedBy())
	}
	return err
}

// clean waits until no node has anything of stayput.
func (s *stage) clean(ctx context.Context) error {
	var left string
	err := lab.Until(ctx, "the nodes to be clean", func() (bool, error) {
		left = ""
		for _, n := range s.Nodes {
			for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/lib/stayput"} {
				entries, err := os.ReadDir(n.Path(dir))
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return false, err
				}
				for _, e := range entries {
					if dir == "/var/lib/stayput" || strings.Contains(e.Name(), "stayput") {
						left = n.Name + " " + dir + "/" + e.Name()
						return false, nil
					}
				}
			}
		}
		return true, nil
	})
	if err != nil {
		err = fmt.Errorf("%w (%s)", err, left)
	}
	return err
}

// report is where the lines go.
type report struct {
	out  io.Writer
	cell cell
}

// line writes a step's line, with no more than the first one of a note: the rest is in the logs.
func (r report) line(step, verdict string, start time.Time, note string) {
	note, _, _ = strings.Cut(note, "\n")
	fmt.Fprintln(r.out, strings.TrimRight(fmt.Sprintf("%-44s  %-38s  %-6s %6.1f s  %s", r.cell, step, verdict,
		time.Since(start).Seconds(), note), " "))
}
