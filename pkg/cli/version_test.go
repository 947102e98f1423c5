package cli

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
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

// The version of the command does not need a cluster, and is said first.
func TestWithoutAClusterTheVersionOfTheCommandIsPrinted(t *testing.T) {
	t.Setenv("KUBECONFIG", os.DevNull)
	t.Setenv("KUBERNETES_MASTER", "")
	cmd := New(Options{Version: "v1"})
	var out, errs bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs([]string{"version"})
	const line = "Error: no cluster is configured: set the environment variable KUBECONFIG, --kubeconfig or --server\n"
	if err := cmd.ExecuteContext(t.Context()); err == nil || out.String() != "Client Version: v1\n" ||
		errs.String() != line {
		t.Errorf("printed is %q and %q, error %v", out.String(), errs.String(), err)
	}
}

// A check of a cluster without Stayput is one line, not a failure of each check. What is there in part is checked.
func TestACheckWithoutStayputNamesThePreflight(t *testing.T) {
	elsewhere := anInstallation()
	elsewhere.Namespace = "shop"
	controllers := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: controllerDeployment}}
	for says, objects := range map[string][]client.Object{
		"check --preflight reports":                        nil,
		"set --stayput-namespace=shop":                     {elsewhere, aDefinition()},
		"any more: its definitions and what they keep are": {aDefinition()},
	} {
		_, err := howInstalled(t.Context(), aCluster(nothing, objects...), DefaultNamespace)
		if !errors.Is(err, ErrNotInstalled) || !strings.Contains(err.Error(), says) {
			t.Errorf("the error is %v, want %q", err, says)
		}
	}
	for what, objects := range map[string][]client.Object{
		"the ConfigMap alone": {anInstallation()}, "the controllers alone": {controllers},
	} {
		if _, err := howInstalled(t.Context(), aCluster(nothing, objects...), DefaultNamespace); err != nil {
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
