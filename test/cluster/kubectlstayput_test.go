package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stayput/stayput/pkg/cli"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// pluginDir returns a directory with the kubectl plugin as people install it: the program, and its link for completion.
// It is removed with the cluster.
func pluginDir(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	dir := filepath.Join(c.Dir, "plugin")
	build.Lock()
	defer build.Unlock()
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	compile := exec.Command("go", "build", "-o", dir+"/", "github.com/stayput/stayput/cmd/kubectl-stayput")
	must.Do(t, says(t, compile).error())
	must.Do(t, os.Symlink("kubectl-stayput", filepath.Join(dir, "kubectl_complete-stayput")))
	return dir
}

var build sync.Mutex

// said is a command's output and exit code.
type said struct {
	out, err string
	code     int
}

func (s said) error() error {
	if s.code == 0 {
		return nil
	}
	return fmt.Errorf("exit code %d: %s", s.code, s.err)
}

func says(t *testing.T, cmd *exec.Cmd) said {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return said{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// plugin runs kubectl with the plugin in its PATH.
func plugin(t *testing.T, c *lab.Cluster, args ...string) said {
	t.Helper()
	return says(t, pluginCommand(t, c, args...))
}

func pluginCommand(t *testing.T, c *lab.Cluster, args ...string) *exec.Cmd {
	t.Helper()
	dir := pluginDir(t, c)
	config, err := c.Kubeconfig()
	must.Do(t, err)
	cmd := exec.CommandContext(testContext(t), c.KubectlPath(), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+config, "HOME="+c.Dir, "PATH="+dir+":"+os.Getenv("PATH"))
	return cmd
}

// stayput runs kubectl stayput in a namespace.
func stayput(t *testing.T, c *lab.Cluster, ns string, args ...string) said {
	t.Helper()
	return plugin(t, c, append([]string{"stayput"}, append(args, "-n", ns)...)...)
}

// anywhere runs kubectl stayput without a namespace besides the arguments.
func anywhere(t *testing.T, c *lab.Cluster, args ...string) said {
	t.Helper()
	return plugin(t, c, append([]string{"stayput"}, args...)...)
}

// works is stayput for commands that must succeed; it returns the output.
func works(t *testing.T, c *lab.Cluster, ns string, args ...string) string {
	t.Helper()
	s := stayput(t, c, ns, args...)
	if s.code != 0 {
		t.Fatalf("kubectl stayput %v: %d %s", args, s.code, s.err)
	}
	return s.out
}

// row returns the line of a table that begins with a word, keyed by the columns of the header.
func row(t *testing.T, table, first string) map[string]string {
	t.Helper()
	lines := strings.Split(strings.TrimRight(table, "\n"), "\n")
	for _, line := range lines[1:] {
		if strings.Fields(line)[0] != first {
			continue
		}
		cells := map[string]string{}
		header := lines[0]
		for i := 0; i < len(header); {
			end := i
			for end < len(header) && !strings.HasPrefix(header[end:], "   ") {
				end++
			}
			next := end
			for next < len(header) && header[next] == ' ' {
				next++
			}
			if next == len(header) {
				cells[header[i:end]] = strings.TrimSpace(line[i:])
			} else {
				cells[header[i:end]] = strings.TrimSpace(line[i:next])
			}
			i = next
		}
		return cells
	}
	t.Fatalf("no line of %s in\n%s", first, table)
	return nil
}

// checked returns the report of check and its exit code.
func checked(t *testing.T, c *lab.Cluster, nodes ...string) (r cli.Report, code int) {
	t.Helper()
	s := anywhere(t, c, append([]string{"check", "-o", "json"}, nodes...)...)
	if err := json.Unmarshal([]byte(s.out), &r); err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	return r, s.code
}

// level returns the worst level of a check's findings about a node, or about the cluster if node is empty.
func level(r cli.Report, node, check string) cli.Level {
	is := cli.Level("")
	for _, f := range r.Findings {
		if f.Node == node && f.Check == check && is != cli.LevelFail && (is != cli.LevelWarn || f.Level == cli.LevelFail) {
			is = f.Level
		}
	}
	return is
}
