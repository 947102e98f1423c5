// Command kubectl-stayput is the kubectl plugin of stayput: see pkg/cli. Under the name kubectl_complete-stayput,
// as a link or a copy, it completes the plugin's arguments for kubectl.
package main

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // what kubeconfig files of cloud providers want

	"github.com/stayput/stayput/cmd/internal/program"
	"github.com/stayput/stayput/pkg/cli"
)

func main() {
	// An API server that does not answer is the command's error already, in one line.
	utilruntime.ErrorHandlers = nil
	cmd := cli.New(cli.Options{Version: program.Version()})
	if filepath.Base(os.Args[0]) == "kubectl_complete-stayput" {
		cmd.SetArgs(slices.Concat([]string{cobra.ShellCompRequestCmd}, os.Args[1:]))
	}
	os.Exit(program.Run(cmd))
}
