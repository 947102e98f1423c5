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
	files := map[string][]byte{"install.yaml": install}
	for name, of := range additions {
		if files[name], err = added(ctx, of); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	definitions, err := Render(ctx, "--show-only=templates/05-crds.yaml", "--set=crds.keep=false,pools.enabled=true,pools.spiderpool=true")
	if err != nil {
		return nil, err
	}
	for name, of := range definitionFiles {
		var all []Document
		for _, d := range definitions {
			if slices.Contains(of.names, d.Name) {
				all = append(all, d)
			}
		}
		if len(all) != len(of.names) {
			return nil, fmt.Errorf("of the definitions %q there are %d", of.names, len(all))
		}
		files[name] = file(of.head, all)
	}
	return files, nil
}

// ungated are the values without anything that gates pods, which not every API server has in the same way.
const ungated = "gate.mechanism=Template"

// addition is a file of what values add to an installation with others.
type addition struct {
	head, without, with string
	only                string // the objects of the kinds that begin with this, empty if all
}

var additions = map[string]addition{
	"gate-policies.yaml": {head: gatePoliciesHead, without: ungated, with: "gate.mechanism=Policy",
		only: "MutatingAdmissionPolicy"},
	"gate-webhook.yaml": {head: gateWebhookHead, without: ungated, with: "gate.mechanism=Webhook"},
	"pools.yaml":        {head: poolsHead, without: ungated, with: ungated + ",pools.enabled=true"},
	"pools-gate-policies.yaml": {head: poolsGateHead, without: "gate.mechanism=Policy",
		with: "gate.mechanism=Policy,pools.enabled=true", only: "MutatingAdmissionPolicy"},
	"pools-spiderpool.yaml": {head: spiderpoolHead, without: ungated + ",pools.enabled=true",
		with: ungated + ",pools.enabled=true,pools.spiderpool=true"},
}

const (
	persistentPodStates = "persistentpodstates.apps.kruise.io"
	spiderIPPools       = "spiderippools.spiderpool.spidernet.io"
)

// definitionFiles are the files of the definitions.
var definitionFiles = map[string]struct {
	head  string
	names []string
}{
	"crds.yaml":                {crdsHead, []string{"retainedips.stayput.io"}},
	"persistentpodstates.yaml": {theirsHead, []string{persistentPodStates}},
	"spiderippools.yaml":       {spiderIPPoolsHead, []string{spiderIPPools}},
	"pools-crds.yaml": {poolsCRDsHead, []string{
		"podippools.stayput.io", "podips.stayput.io", "podipaudits.stayput.io", "podipreports.stayput.io",
	}},
}

const crdsHead = `# The custom resource definition of stayput. Made from the chart by make manifests.
`

const poolsCRDsHead = `# The custom resource definitions of pools, for those who use them, from Kubernetes 1.31 on. Made from the chart by make
# manifests. The rights and policies are in pools.yaml.
`

const gatePoliciesHead = `# The policies that gate pods, beside install.yaml, for API servers that have them: Kubernetes 1.36 and later. Made from
# the chart by make manifests. They are deleted before install.yaml, in the order of the file: first the bindings.
`

const gateWebhookHead = `# The webhook that gates pods, beside install.yaml, for API servers without the policies in gate-policies.yaml: before
# Kubernetes 1.36. Made from the chart by make manifests. It is deleted before install.yaml, in the order of the file:
# first the webhook.
`

const poolsHead = `# What pools take beside install.yaml and pools-crds.yaml. Made from the chart by make manifests.
#
# Before it is deleted, delete all PodIPPools, which wait for their last address: with these rights goes what frees them.
`

const poolsGateHead = `# The policy that gates the pods that ask for addresses of pools, beside pools.yaml and gate-policies.yaml, for API servers
# that have it: Kubernetes 1.36 and later. Made from the chart by make manifests. It is deleted before pools.yaml: first no
# pod is gated any more because of pools.
`

const spiderpoolHead = `# What it takes beside pools.yaml that Spiderpool's annotations and SpiderIPPools count. Made from the chart by make
# manifests. Not while Spiderpool runs in the cluster.
`

const spiderIPPoolsHead = `# The custom resource definition of SpiderIPPools, for those who use them. Made from the chart by make manifests.
# It is Spiderpool's by origin: not for clusters where Spiderpool is installed, which has brought its own.
`

const theirsHead = `# The custom resource definition of PersistentPodStates, for those who use them. Made from the chart by make manifests.
# It is OpenKruise's by origin: not for clusters where OpenKruise is installed, which has brought its own.
`

const installHead = `# stayput, without its custom resource definitions, which are in crds.yaml and persistentpodstates.yaml, and without what
# gates pods, which is in gate-policies.yaml and, before Kubernetes 1.36, in gate-webhook.yaml. Made from the chart by make
# manifests.
#
# kubectl applies and deletes in the order of the file. First comes the permission without which no pod is gated: none may
# be once the controllers are gone. Then come the policies, and the Namespace above its contents. Before you delete it, run
# kubectl stayput uninstall: the deletion alone puts no node back, and ungates no pod.
`

// added returns what values add to an installation with others. They change nothing else, so that this can be applied
// and deleted on its own.
func added(ctx context.Context, a addition) ([]byte, error) {
	render := func(values string) ([]Document, error) {
		return Render(ctx, "--no-hooks", "--set=crds.install=false,namespace.create=true,"+values)
	}
	before, err := render(a.without)
	if err != nil {
		return nil, err
	}
	all, err := render(a.with)
	if err != nil {
		return nil, err
	}
	more := slices.DeleteFunc(all, func(d Document) bool {
		return slices.Contains(before, d) || !strings.HasPrefix(d.Kind, a.only)
	})
	for _, d := range more {
		if slices.ContainsFunc(before, func(o Document) bool {
			return o.Kind == d.Kind && o.Name == d.Name &&
				o.Namespace == d.Namespace
		}) {
			return nil, fmt.Errorf("with %s, %s %s is another one", a.with, d.Kind, d.Name)
		}
	}
	inOrder(more)
	return file(a.head, more), nil
}

// installation returns everything except the definitions, in the order explained by its head.
func installation(ctx context.Context) ([]byte, error) {
	all, err := Render(ctx, "--no-hooks", "--set=crds.install=false,namespace.create=true,"+ungated)
	if err != nil {
		return nil, err
	}
	inOrder(all)
	return file(installHead, all), nil
}

// inOrder sorts objects as they are to be deleted.
func inOrder(all []Document) {
	slices.SortStableFunc(all, func(a, b Document) int {
		return cmp.Or(cmp.Compare(turn(a), turn(b)), cmp.Compare(a.Source, b.Source))
	})
}

// turn returns an object's position in install.yaml.
func turn(d Document) int {
	switch d.Kind {
	case "MutatingAdmissionPolicyBinding", "MutatingWebhookConfiguration":
		return 1
	case "MutatingAdmissionPolicy", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding":
		return 2
	case "Namespace":
		return 3
	}
	if strings.HasPrefix(d.Kind, "ClusterRole") && d.Name == "stayput-gate" {
		return 0
	}
	return 4
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
	// Without Helm, Helm manages no object, and what gates pods is whichever file was applied.
	return Split(regexp.MustCompile(`(?m)^ +(app\.kubernetes\.io/managed-by: Helm|# What gates pods\.|gate: \w+)\n`).
		ReplaceAll(out, nil))
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
