package cli

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// retaining is an agent that retains an address for a pod of a namespace that is gone.
type retaining struct{ asked []string }

func (a *retaining) Run(_ context.Context, node string, _ []byte, args ...string) ([]byte, error) {
	a.asked = append(a.asked, node+" "+strings.Join(args, " "))
	done := "false"
	if slices.Contains(args, "--act") {
		done = "true"
	}
	const item = `"namespace":"gone","pod":"web-0","ip":"10.1.0.5","network":"cbr0"`
	return []byte(`{"items":[{` + item + `,"done":` + done + `}]}`), nil
}

func TestAnAdministratorReleasesWhatIsKeptForANamespaceThatIsGone(t *testing.T) {
	there := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "there"}}
	for name, c := range map[string]struct {
		namespace string
		o         release
		asked     []string
		prints    string
		err       error
	}{
		"it is gone": {"gone", release{consent: consent{yes: true, dryRun: "none"}},
			[]string{"node-1 release gone", "node-1 release gone --act"},
			"gone/web-0 released: 10.1.0.5 of node node-1\n", nil},
		"a dry run": {"gone", release{consent: consent{dryRun: "client"}}, []string{"node-1 release gone"},
			"gone/web-0 released (dry run): 10.1.0.5 of node node-1\n", nil},
		"it is there": {"there", release{consent: consent{yes: true, dryRun: "none"}}, nil, "", errNamespace},
	} {
		t.Run(name, func(t *testing.T) {
			agents, out := &retaining{}, &bytes.Buffer{}
			cmd := &cobra.Command{}
			cmd.SetOut(out)
			cmd.SetErr(&bytes.Buffer{})
			cmd.SetContext(t.Context())
			c.o.node = "node-1"
			err := c.o.runOn(cmd, &cluster{Client: aCluster(nothing, there), agents: agents,
				namespace: c.namespace})
			if !errors.Is(err, c.err) || !slices.Equal(agents.asked, c.asked) || out.String() != c.prints {
				t.Errorf("asked %q, printed %q, error %v", agents.asked, out, err)
			}
		})
	}
}

func TestReleaseOnANodeIsForAWholeNamespace(t *testing.T) {
	for _, c := range []struct {
		o     release
		args  []string
		names string
	}{
		{release{node: "node-1", all: true}, nil, "--node"},
		{release{node: "node-1"}, []string{"web-0"}, "--node"},
		{release{node: "node-1", consent: consent{dryRun: "server"}}, nil, "--dry-run"},
	} {
		if err := c.o.validate(c.args); err == nil || !strings.HasPrefix(err.Error(), c.names) {
			t.Errorf("%+v %v: %v", c.o, c.args, err)
		}
	}
}
