// Command stayput is a CNI IPAM plugin that gives a stateful pod its IP back.
package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/stayput/stayput/plugin/ipam"
)

// All system calls come from the first thread: the crash tests kill the process at the Nth one.
func init() { runtime.LockOSThread() }

func main() {
	p := &ipam.Plugin{Getenv: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Exit: os.Exit, Version: version()}
	os.Exit(p.Run())
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
