package lab

import (
	"context"
	"path/filepath"
)

// meshComponent is Istio's: what its DaemonSet runs to install its CNI plugin, and that plugin.
var meshComponent = component{
	name: "istio", dir: "build/istio", sources: []string{"build/istio"}, pkg: "tool", parallel: 2,
}

// MeshBin holds the paths of Istio's programs.
type MeshBin struct {
	Installer string // install-cni
	Plugin    string // istio-cni, which the installer copies to the node
}

// BuildMesh builds Istio's programs: ten minutes on two processors.
func BuildMesh(ctx context.Context) (MeshBin, error) {
	dirs, err := buildAll(ctx, meshComponent)
	dir := dirs[meshComponent.name]
	return MeshBin{Installer: filepath.Join(dir, "install-cni"), Plugin: filepath.Join(dir, "istio-cni")}, err
}
