// Package chart renders the manifests in deploy/ from the chart, for users without Helm.
package chart

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/test/lab"
)

// Namespace is install.yaml's namespace.
const Namespace = lab.SystemNamespace

// Files returns the manifests by their name in deploy/.
func Files(ctx context.Context) (map[string][]byte, error) {
	install, err := installation(ctx)
	if err != nil {
		return nil, err
	}
	definitions, err := Render(ctx, "--show-only=templates/05-crds.yaml", "--set=crds.keep=false")
	if err != nil {
		return nil, err
	}
	theirs := slices.IndexFunc(definitions, func(d Document) bool { return d.Name == persistentPodStates })
	if theirs < 0 || len(definitions) != 2 {
		return nil, fmt.Errorf("the definitions are %+v, want that of %s and one more", definitions, persistentPodStates)
	}
	ours := slices.Delete(slices.Clone(definitions), theirs, theirs+1)
	return map[string][]byte{
		"install.yaml": install, "crds.yaml": file(crdsHead, ours),
		"persistentpodstates.yaml": file(theirsHead, definitions[theirs:theirs+1]),
	}, nil
}

const persistentPodStates = "persistentpodstates.apps.kruise.io"

const crdsHead = `# The custom resource definition of stayput. Made from the chart by make manifests.
`

const theirsHead = `# The custom resource definition of PersistentPodStates, for those who use them. Made from the chart by make manifests.
# It is OpenKruise's by origin: not for clusters where OpenKruise is installed, which has brought its own.
`

const installHead = `# stayput, without its custom resource definitions, which are in crds.yaml and
# persistentpodstates.yaml. Made from the chart by make manifests.
#
# kubectl applies and deletes in the order of the file, which is made for deleting. First come the permission without
# which no pod is gated, and the bindings by which pods are: their deletion makes the controllers ungate every pod. Then,
# after the policies, comes the Namespace, above its contents because they can only be applied after it; they are deleted
# in the background. Then comes the ConfigMap whose deletion is the agents' signal to put their nodes back. The
# controllers' rights, which they need until then, are the end of the file. When the file is applied, the pods wait a
# moment for their accounts.
`

// installation returns everything except the definitions, in the order explained by its head.
func installation(ctx context.Context) ([]byte, error) {
	all, err := Render(ctx, "--no-hooks", "--set=crds.install=false,namespace.create=true")
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(all, func(a, b Document) int {
		return cmp.Or(cmp.Compare(turn(a), turn(b)), cmp.Compare(a.Source, b.Source))
	})
	return file(installHead, all), nil
}

// turn returns an object's position in install.yaml.
func turn(d Document) int {
	switch d.Kind {
	case "MutatingAdmissionPolicyBinding":
		return 1
	case "MutatingAdmissionPolicy", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding":
		return 2
	case "Namespace":
		return 3
	case "ConfigMap":
		return 4
	case "DaemonSet", "Deployment", "PodDisruptionBudget":
		return 5
	}
	switch {
	case d.Name == "stayput-gate":
		return 0
	case !strings.HasPrefix(d.Name, "stayput-controller"):
		return 6
	}
	return 7
}

// Document is an object of a rendering.
type Document struct {
	Kind, Namespace, Name string
	Source                string // the template
	Text                  string // with its comments
}

// Render renders the chart with these flags of helm template, for use without Helm.
func Render(ctx context.Context, args ...string) ([]Document, error) {
	out, err := lab.Template(ctx, Namespace, args...)
	if err != nil {
		return nil, err
	}
	// Without Helm, Helm manages no object.
	return Split(regexp.MustCompile(`(?m)^ +app\.kubernetes\.io/managed-by: Helm\n`).ReplaceAll(out, nil))
}

// Split splits the output of helm template.
func Split(rendering []byte) ([]Document, error) {
	var all []Document
	for text := range strings.SplitSeq("\n"+string(rendering), "\n---\n") {
		text = strings.TrimSpace(text)
		source, rest, _ := strings.Cut(text, "\n")
		source, ok := strings.CutPrefix(source, "# Source: ")
		if !ok {
			if text == "" {
				continue
			}
			return nil, fmt.Errorf("document without its source: %.80q", text)
		}
		var o struct {
			Kind     string
			Metadata struct{ Namespace, Name string }
		}
		if err := yaml.Unmarshal([]byte(rest), &o); err != nil {
			return nil, fmt.Errorf("%s: %w", source, err)
		}
		if o.Kind == "" { // only comments
			continue
		}
		all = append(all, Document{
			Kind: o.Kind, Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, Source: source, Text: strings.TrimSpace(rest),
		})
	}
	return all, nil
}

func file(head string, all []Document) []byte {
	var b bytes.Buffer
	b.WriteString(head)
	for _, d := range all {
		fmt.Fprintf(&b, "---\n%s\n", d.Text)
	}
	return b.Bytes()
}
