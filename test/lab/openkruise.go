package lab

import (
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// openKruiseComponent is OpenKruise's manager.
var openKruiseComponent = component{
	name: "kruise", dir: "build/openkruise", sources: []string{"build/openkruise"}, pkg: "tool", parallel: 2,
}

// BuildOpenKruise builds OpenKruise's manager and returns its path.
func BuildOpenKruise(ctx context.Context) (string, error) {
	return buildProgram(ctx, openKruiseComponent)
}

const (
	openKruiseNamespace = "kruise-system"
	labOpenKruise       = "/opt/lab/kruise"
	openKruiseConfig    = nodeConfigFolder + "kruise.kubeconfig"
)

// InstallOpenKruise installs OpenKruise by its own config/default. Its manager runs beside the API server, which calls
// its webhooks by URL, and is ready once this returns.
func (c *Cluster) InstallOpenKruise(ctx context.Context) (*Service, error) {
	program, err := BuildOpenKruise(ctx)
	if err != nil {
		return nil, err
	}
	objects, err := c.openKruiseObjects(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := c.Kubectl(ctx, objects, "apply", "--server-side", "-f", "-"); err != nil {
		return nil, err
	}
	token, err := c.AccountToken(ctx, openKruiseNamespace, "kruise-manager", "")
	if err != nil {
		return nil, err
	}
	kubeconfig := c.credentials.kubeconfig(serverURL, map[string]any{"token": token})
	err = errors.Join(c.Control.Install(program, labOpenKruise), c.Control.WriteFile(openKruiseConfig, kubeconfig))
	if err != nil {
		return nil, err
	}
	manager := &Service{node: c.Control, name: "kruise-manager",
		ready: getFrom(c.Control, "http://127.0.0.1:8000/readyz"),
		argv:  []string{labOpenKruise, "--enable-leader-election=false"},
		env: []string{"KUBECONFIG=" + openKruiseConfig, "POD_NAMESPACE=" + openKruiseNamespace,
			"WEBHOOK_HOST=127.0.0.1"}}
	return manager, manager.Start(ctx)
}

// openKruiseObjects returns what OpenKruise's config/default has but for its workloads.
func (c *Cluster) openKruiseObjects(ctx context.Context) (string, error) {
	module, err := moduleDir(ctx, openKruiseComponent.dir, "github.com/openkruise/kruise")
	if err != nil {
		return "", err
	}
	all, err := c.Kubectl(ctx, "", "kustomize", filepath.Join(module, "config/default"))
	if err != nil {
		return "", err
	}
	var kept []string
	for document := range strings.SplitSeq(all, "\n---\n") {
		data, err := yaml.YAMLToJSON([]byte(document))
		if err != nil {
			return "", err
		}
		var object struct{ Kind string }
		if err := json.Unmarshal(data, &object); err != nil {
			return "", err
		}
		if !slices.Contains([]string{"Deployment", "DaemonSet"}, object.Kind) {
			kept = append(kept, string(data))
		}
	}
	return strings.Join(kept, "\n---\n"), nil
}

// NextWebImage is another version of [WebImage], once [Cluster.LoadNextWebImage] has loaded it.
const NextWebImage = "lab.stayput.test/web:2"

// LoadNextWebImage loads NextWebImage into all nodes.
func (c *Cluster) LoadNextWebImage(ctx context.Context) error {
	program := filepath.Join(filepath.Dir(c.bin.Images), "podimage")
	archive := filepath.Join(c.Dir, "next.tar")
	err := WriteImages(archive, Image{Ref: NextWebImage, Entrypoint: []string{"/podimage", ":80"},
		Files: map[string]string{"/podimage": program, "/next": program}})
	if err != nil {
		return err
	}
	return c.LoadImage(ctx, archive)
}
