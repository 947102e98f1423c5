package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// acting are agents that note when they are to change something.
type acting struct{ acted *[]string }

func (a acting) Run(_ context.Context, _ string, _ []byte, args ...string) ([]byte, error) {
	done := slices.Contains(args, "--act")
	if done {
		*a.acted = append(*a.acted, strings.Join(args, " "))
	}
	if args[0] == "release" {
		return json.Marshal(inspection.Release{Items: []inspection.ReleaseItem{{Namespace: "gone", Pod: "web-2",
			IP: addr("10.1.0.9"), Network: "pods", Done: done}}})
	}
	return json.Marshal(inspection.Import{Items: []inspection.ImportItem{{Namespace: "default", Pod: "web-2",
		Action: inspection.ActionRetain, Done: done, Why: "the pod is not there"}}})
}

// The verbs that change something ask, and do what they are told without a question.
func TestNothingIsChangedWithoutConsent(t *testing.T) {
	node := aNode("node-1")
	objects := map[string][]client.Object{"nodes": {&node}, "retainedips": {aRetainedIP()},
		"podips":          {aPodIP(podIPRetained, func(p *stayputv1alpha1.PodIP) { p.Spec.PodName = "web-3" })},
		"spiderippools":   {theirPool("p")},
		"pods":            {theirPod("web-0", func(p *corev1.Pod) { p.UID = "u" })},
		"spiderendpoints": {aSpiderEndpoint(anEndpoint(t, "StatefulSet", "node-1", "10.6.0.5/16"))}}
	var changed []string
	kubeconfig := hostileServer(t, objects, func(r *http.Request) { changed = append(changed, r.Method) })
	run := func(stdin *os.File, args ...string) (out, errs string, err error) {
		t.Helper()
		changed = nil
		cmd := New(Options{Version: "test", Agents: acting{&changed}})
		var stdout, stderr bytes.Buffer
		cmd.SetOut(&stdout)
		cmd.SetErr(&stderr)
		cmd.SetIn(stdin)
		cmd.SetArgs(append(args, "--kubeconfig", kubeconfig, "--cache-dir", t.TempDir()))
		err = cmd.ExecuteContext(t.Context())
		return stdout.String(), stderr.String(), err
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, verb := range []struct{ args, plan, question string }{
		{"release web-2 --wait=false", "web-2  10.1.0.9  node node-1", "Release them? (y/N) "},
		{"release web-3 --wait=false", "web-3  10.6.168.101  pool blue", "Release them? (y/N) "},
		{"release --all --wait=false", "web-2  10.1.0.9  node node-1", "Release them? (y/N) "},
		{"release --node node-1 --namespace gone", "web-2  10.1.0.9  network pods", "Release them? (y/N) "},
		{"import openkruise", "the pod is not there", "Take them over? (y/N) "},
		{"import spiderpool", "the pod is not there", "Take them over? (y/N) "},
		{"import spiderpool --pools", "Adopt", "Take them over? (y/N) "},
		{"uninstall --timeout=2s", "give up the addresses", "Uninstall Stayput from this cluster? (y/N) "},
	} {
		args := strings.Fields(verb.args)
		out, errs, err := run(file, args...)
		if !errors.Is(err, errNoConsent) || out != "" || errs != "Error: "+errNoConsent.Error()+"\n" || len(changed) > 0 {
			t.Errorf("%s without a terminal: error %v, changed %q, printed %q and %q", verb.args, err, changed, out, errs)
		}
		out, errs, err = run(file, append(args, "--dry-run=client")...)
		if err != nil || out == "" || strings.Contains(errs, "(y/N)") || len(changed) > 0 {
			t.Errorf("%s as a dry run: error %v, changed %q, printed %q and %q", verb.args, err, changed, out, errs)
		}
		_, errs, _ = run(file, append(args, "--yes")...)
		if strings.Contains(errs, "(y/N)") || len(changed) == 0 {
			t.Errorf("%s with --yes: changed %q, printed %q", verb.args, changed, errs)
		}
		for _, answer := range []string{"n", "", "y", "YES"} {
			screen, tty := terminal(t, 200)
			if _, err := screen.WriteString(answer + "\n"); err != nil {
				t.Fatal(err)
			}
			agrees := strings.EqualFold(answer, "y") || strings.EqualFold(answer, "yes")
			_, errs, err := run(tty, args...)
			if agrees == (len(changed) == 0) || agrees == errors.Is(err, errUnchanged) ||
				!strings.Contains(errs, verb.plan) || strings.Index(errs, verb.question) < strings.Index(errs, verb.plan) {
				t.Errorf("%s answered %q: error %v, changed %q, printed %q", verb.args, answer, err, changed, errs)
			}
		}
	}
}

// There is nothing to agree to.
func TestWithoutAPlanThereIsNoQuestion(t *testing.T) {
	node := aNode("node-1")
	kubeconfig := hostileServer(t, map[string][]client.Object{"nodes": {&node}})
	for _, args := range []string{"release --all", "release web-2", "import spiderpool", "import spiderpool --pools"} {
		_, tty := terminal(t, 200)
		cmd := New(Options{Version: "test"})
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetIn(tty)
		cmd.SetArgs(append(strings.Fields(args), "--kubeconfig", kubeconfig, "--cache-dir", t.TempDir()))
		err := cmd.ExecuteContext(t.Context())
		if out.Len() == 0 || strings.Contains(out.String(), "(y/N)") || errors.Is(err, errUnchanged) {
			t.Errorf("%s: error %v, printed %q", args, err, out.String())
		}
	}
}

// SIGINT ends the context, not the program.
func TestAnInterruptEndsTheQuestion(t *testing.T) {
	_, tty := terminal(t, 200)
	ctx, cancel := context.WithCancel(t.Context())
	cmd := &cobra.Command{}
	cmd.SetContext(ctx)
	cmd.SetIn(tty)
	cmd.SetErr(io.Discard)
	ended := make(chan error, 1)
	go func() {
		a := consent{dryRun: dryRunNone}
		ended <- a.ask(cmd, "Really?", func() error { cancel(); return nil })
	}()
	select {
	case err := <-ended:
		if !errors.Is(err, errUnchanged) {
			t.Errorf("the error is %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it still waits for an answer")
	}
}
