package lab

import (
	"context"
	"os"
	"path/filepath"
)

// istioComponent is Istio's: what its DaemonSet runs to install its CNI plugin, and that plugin.
var istioComponent = component{
	name: "istio", dir: "build/istio", sources: []string{"build/istio"}, pkg: "tool", parallel: 2,
}

// linkerdComponent is Linkerd's CNI plugin, and the script that installs it, of May 2023, when both were in linkerd2:
// the module proxy lacks today's module.
var linkerdComponent = component{
	name: "linkerd", dir: "build/linkerd", sources: []string{"build/linkerd"}, pkg: "tool",
	finish: func(dir string) error {
		return os.Rename(filepath.Join(dir, "cni-plugin"), filepath.Join(dir, "linkerd-cni"))
	},
}

// IstioBin holds the paths of Istio's programs.
type IstioBin struct {
	Installer string // install-cni
	Plugin    string // istio-cni, which the installer copies to the node
}

// BuildIstio builds Istio's programs: ten minutes on two processors.
func BuildIstio(ctx context.Context) (IstioBin, error) {
	dirs, err := buildAll(ctx, istioComponent)
	dir := dirs[istioComponent.name]
	return IstioBin{Installer: filepath.Join(dir, "install-cni"), Plugin: filepath.Join(dir, "istio-cni")}, err
}

// LinkerdBin holds the paths of Linkerd's programs.
type LinkerdBin struct {
	Installer string // install-cni.sh
	Filter    string // filter.jq, which the installer expects as /linkerd/filter.jq
	Plugin    string // linkerd-cni, which the installer copies to the node
}

// BuildLinkerd builds Linkerd's plugin, and returns the module's own installer with it. That is a script, whose
// programs are installed.
func BuildLinkerd(ctx context.Context) (LinkerdBin, error) {
	if err := Need(ctx, "bash", "inotify-tools", "jq", "procps"); err != nil {
		return LinkerdBin{}, err
	}
	plugin, err := buildAll(ctx, linkerdComponent)
	if err != nil {
		return LinkerdBin{}, err
	}
	module, err := moduleDir(ctx, linkerdComponent.dir, "github.com/linkerd/linkerd2/cni-plugin")
	scripts := filepath.Join(module, "deployment", "scripts")
	return LinkerdBin{
		Installer: filepath.Join(scripts, "install-cni.sh"), Filter: filepath.Join(scripts, "filter.jq"),
		Plugin: filepath.Join(plugin[linkerdComponent.name], "linkerd-cni"),
	}, err
}
