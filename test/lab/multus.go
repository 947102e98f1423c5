package lab

import (
	"context"
	"path/filepath"
)

// multusComponent is multus: the plugin of thin multus, and the daemon and the plugin of thick multus.
var multusComponent = component{name: "multus", dir: "build/multus", sources: []string{"build/multus"}, pkg: "tool"}

// MultusBin holds the paths of multus' programs.
type MultusBin struct {
	Thin         string // the plugin multus
	Shim, Daemon string // of thick multus
}

// BuildMultus builds multus.
func BuildMultus(ctx context.Context) (MultusBin, error) {
	dirs, err := buildAll(ctx, multusComponent)
	of := func(name string) string { return filepath.Join(dirs[multusComponent.name], name) }
	return MultusBin{Thin: of("multus"), Shim: of("multus-shim"), Daemon: of("multus-daemon")}, err
}
