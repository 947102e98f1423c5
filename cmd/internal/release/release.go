// Package release knows which release a program is of. It links nothing, for the sake of the plugin's start.
package release

import "runtime/debug"

// version is set by the linker when a release is built, see the Makefile.
var version string

// Version is the release, or the version of the module that the program was built from.
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
