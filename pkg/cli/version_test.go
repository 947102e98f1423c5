package cli

import (
	"bytes"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/installation"
)

func anInstallation() *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: installation.ConfigMap,
		Labels: map[string]string{"app.kubernetes.io/version": "0.1.0"}}}
}

func aDefinition() client.Object {
	o := object("apiextensions.k8s.io/v1", "CustomResourceDefinition")
	o.SetName("retainedips.stayput.io")
	return o
}

func TestTheVersionIsThatOfTheCommandAndOfTheInstallation(t *testing.T) {
	cmd := New(Options{Version: "v1"})
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"version", "--client", "--kubeconfig=/nonexistent/kubeconfig"})
	if err := cmd.ExecuteContext(t.Context()); err != nil || out.String() != "Client Version: v1\n" {
		t.Errorf("printed is %q, error %v", out.String(), err)
	}

	is, err := installedVersion(t.Context(), aCluster(nothing, anInstallation()), DefaultNamespace)
	if err != nil || is != "0.1.0" {
		t.Errorf("installed is %q, error %v", is, err)
	}
	if _, err := installedVersion(t.Context(), aCluster(nothing, anInstallation()), "elsewhere"); !errors.Is(err,
		ErrNotInstalled) {
		t.Errorf("without an installation the error is %v", err)
	}
}

// A check of a cluster without Stayput is one line, not a failure of each check. What is there in part is checked.
func TestACheckWithoutStayputNamesThePreflight(t *testing.T) {
	for what, objects := range map[string][]client.Object{
		"nothing": nil, "the ConfigMap alone": {anInstallation()}, "the definition alone": {aDefinition()},
	} {
		_, err := howInstalled(t.Context(), aCluster(nothing, objects...), DefaultNamespace)
		if (objects == nil) != errors.Is(err, ErrNotInstalled) || objects != nil && err != nil {
			t.Errorf("with %s the error is %v", what, err)
		}
	}

	cmd := New(Options{Version: "v1"})
	var out, errs bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs([]string{"check", "--kubeconfig", hostileServer(t, nil), "--cache-dir", t.TempDir()})
	err := cmd.ExecuteContext(t.Context())
	const line = "Error: stayput is not installed in this cluster: " +
		"kubectl stayput check --preflight reports what would work here\n"
	if err == nil || out.Len() > 0 || errs.String() != line {
		t.Errorf("printed is %q and %q, error %v", out.String(), errs.String(), err)
	}
}

// -v is the version for one program and how much is logged for another.
func TestNoVerbHasTheFlagV(t *testing.T) {
	for _, verb := range append(New(Options{Version: "v1"}).Commands(), New(Options{Version: "v1"})) {
		verb.InitDefaultHelpFlag()
		verb.InitDefaultVersionFlag()
		if f := verb.Flags().ShorthandLookup("v"); f != nil {
			t.Errorf("%s has it for --%s", verb.CommandPath(), f.Name)
		}
	}
	cmd := New(Options{Version: "v1"})
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--version"})
	if err := cmd.ExecuteContext(t.Context()); err != nil || out.String() != "kubectl stayput version v1\n" {
		t.Errorf("--version prints %q, error %v", out.String(), err)
	}
}
