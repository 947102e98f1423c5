package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
)

const (
	namespace = "default"
	class     = "local-disk" // of storageclass.yaml
	volumes   = 2            // of a node: one for each pod that an application has there
)

// stage is the cluster and what runs on it.
type stage struct {
	*lab.Cluster
	out  io.Writer
	step string // is in the titles of the steps that are played

	resolved []member // of the registry, as its clients remember them
}

// prepare loads the applications' images.
func (s *stage) prepare(ctx context.Context, apps []app) error {
	var images []lab.Image
	for _, a := range apps {
		own, err := a.images(ctx, s.Dir)
		if err != nil {
			return err
		}
		for _, image := range own {
			if !slices.ContainsFunc(images, func(i lab.Image) bool { return i.Ref == image.Ref }) {
				images = append(images, image)
			}
		}
	}
	archive := filepath.Join(s.Dir, "apps.tar")
	if err := lab.WriteImages(archive, images...); err != nil {
		return err
	}
	if err := s.LoadImage(ctx, archive); err != nil {
		return err
	}
	return s.apply(ctx, "storageclass.yaml")
}

// example returns the path of a manifest that users have.
func example(ctx context.Context, manifest string) (string, error) {
	chart, err := lab.Chart(ctx)
	return filepath.Join(filepath.Dir(chart), "examples", manifest), err
}

func (s *stage) apply(ctx context.Context, manifest string) error {
	file, err := example(ctx, manifest)
	if err != nil {
		return err
	}
	return s.kubectl(ctx, "apply", "--server-side", "-f", file)
}

// kubectl runs kubectl without an interest in its output.
func (s *stage) kubectl(ctx context.Context, args ...string) error {
	_, err := s.Kubectl(ctx, "", args...)
	return err
}

// deploy starts an application on empty volumes, and waits until its clients can write.
func (s *stage) deploy(ctx context.Context, a app) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	if err := s.makeVolumes(ctx, a); err != nil {
		return err
	}
	if err := s.apply(ctx, a.manifest); err != nil {
		return err
	}
	var members []member
	err := lab.Until(ctx, "the pods to have addresses", func() (bool, error) {
		var err error
		members, err = s.membersOf(ctx, a)
		return err == nil && len(members) == a.members && !slices.ContainsFunc(members, func(m member) bool {
			return m.ip == ""
		}), err
	})
	if err != nil {
		return err
	}
	if err := a.form(ctx, s, members); err != nil {
		return err
	}
	return lab.Until(ctx, a.name+" to be formed", func() (bool, error) {
		members, err := s.membersOf(ctx, a)
		if err != nil || !restarted(members, members, func(member) bool { return false }) {
			return false, err
		}
		says, ok := a.health(ctx, s, members)
		if !ok {
			return false, fmt.Errorf("%s", says)
		}
		for _, what := range a.writes {
			if err := s.writeOnce(ctx, a, what); err != nil {
				return false, err
			}
		}
		return true, nil
	})
}

// membersMap is the ConfigMap that tells the members of an application each other's addresses.
func membersMap(app string) string { return app + "-members" }

// runHead runs the commands in the head of a manifest, as a user copies them.
func (s *stage) runHead(ctx context.Context, manifest string) error {
	file, err := example(ctx, manifest)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	config, err := s.Kubeconfig()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "sh", "-ec", commandsOf(string(text)))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+config, "HOME="+s.Dir, // as of [lab.Cluster.Kubectl]
		"PATH="+filepath.Dir(s.KubectlPath())+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("the commands of %s: %w: %s", manifest, err, out)
	}
	return nil
}

// commandsOf returns the indented lines of the comment at the head of a manifest.
func commandsOf(manifest string) string {
	var commands strings.Builder
	for line := range strings.Lines(manifest) {
		comment, ok := strings.CutPrefix(line, "#")
		if !ok {
			break
		}
		if command, ok := strings.CutPrefix(comment, "   "); ok {
			commands.WriteString(command)
		}
	}
	return commands.String()
}

// makeVolumes makes the volumes that a node's disk would be partitioned into or, for an application that may run on any
// node, those of a network storage: folders that the machine and all of the lab's nodes have in common.
func (s *stage) makeVolumes(ctx context.Context, a app) error {
	for _, n := range s.Nodes {
		for i := range volumes {
			name := fmt.Sprintf("%s-%d", n.Name, i+1)
			spec := corev1.PersistentVolumeSpec{
				Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			}
			var folder string
			if a.anyNode {
				folder = filepath.Join(s.networkStorage(), name)
				spec.HostPath = &corev1.HostPathVolumeSource{Path: folder}
			} else {
				path := fmt.Sprintf("/var/lib/disks/%d", i+1)
				folder = n.Path(path)
				spec.StorageClassName, spec.Local = class, &corev1.LocalVolumeSource{Path: path}
				spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
					NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{
						Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{n.Name},
					}}}},
				}}
			}
			if err := os.RemoveAll(folder); err != nil {
				return err
			}
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
			_, err := s.Client().CoreV1().PersistentVolumes().Create(ctx,
				&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// networkStorage is a folder in the machine's /dev, which is also that of the nodes.
func (s *stage) networkStorage() string { return "/dev/shm/" + filepath.Base(s.Dir) }

// clear removes an application and all volumes.
func (s *stage) clear(ctx context.Context, a app) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	manifest, err := example(ctx, a.manifest)
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"delete", "--cascade=foreground", "--filename", manifest},
		{"delete", "configmap", membersMap(a.name), "--ignore-not-found"},
		{"delete", "persistentvolumeclaims", "--selector=app=" + a.name},
		{"delete", "persistentvolumes", "--all"},
	} {
		if err := s.kubectl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// member is a pod of an application.
type member struct {
	name, node, ip string
	container      string // the ID of its first container
	runs           bool
}

// membersOf returns the pods of an application by name, without those that are being deleted.
func (s *stage) membersOf(ctx context.Context, a app) ([]member, error) {
	list, err := s.Client().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + a.name})
	if err != nil {
		return nil, err
	}
	var members []member
	for _, p := range list.Items {
		if p.DeletionTimestamp != nil {
			continue
		}
		m := member{name: p.Name, node: p.Spec.NodeName, ip: p.Status.PodIP}
		if len(p.Status.ContainerStatuses) > 0 {
			m.container = p.Status.ContainerStatuses[0].ContainerID
			m.runs = m.ip != "" && p.Status.ContainerStatuses[0].State.Running != nil
		}
		members = append(members, m)
	}
	slices.SortFunc(members, func(a, b member) int { return cmp.Compare(a.name, b.name) })
	return members, nil
}

func running(members []member) []member {
	return slices.DeleteFunc(slices.Clone(members), func(m member) bool { return !m.runs })
}

// dial connects to a port of a member, from outside of the nodes.
func (s *stage) dial(ctx context.Context, m member, port string) (net.Conn, error) {
	conn, err := s.Control.Dial(ctx, "tcp", net.JoinHostPort(m.ip, port))
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		err = conn.SetDeadline(deadline)
	}
	return conn, err
}

// askHTTP sends a request to a member. An answer other than 200 is an error.
func askHTTP(ctx context.Context, s *stage, m member, port, method, path, body string) error {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx, m, port) },
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+m.name+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s of %s: %s", path, m.name, resp.Status)
	}
	return nil
}

// writeLogs saves the logs of all machines, and of the applications.
func (s *stage) writeLogs() error {
	f, err := os.CreateTemp("", "stayput-apps-*.log")
	if err != nil {
		return err
	}
	s.WriteLogs(f)
	for _, n := range s.Nodes {
		logs, _ := filepath.Glob(n.Path("/var/log/pods/" + namespace + "_*/*/*.log"))
		for _, log := range logs {
			data, err := os.ReadFile(log)
			if err != nil {
				continue // of a pod that has just been removed
			}
			fmt.Fprintf(f, "--- %s %s\n%s\n", n.Name, strings.TrimPrefix(log, n.Path("/var/log/pods")), data)
		}
	}
	fmt.Fprintln(os.Stderr, "apps: the cluster's logs:", f.Name())
	return f.Close()
}
