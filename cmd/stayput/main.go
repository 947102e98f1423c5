// Command stayput is a CNI IPAM plugin that gives a stateful pod its IP back.
package main

import (
	"os"
	"runtime"

	"github.com/stayput/stayput/cmd/internal/release"
	"github.com/stayput/stayput/plugin/ipam"
)

// All system calls come from the first thread: the crash tests kill the process at the Nth one.
func init() { runtime.LockOSThread() }

func main() {
	p := &ipam.Plugin{
		Getenv: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Exit: os.Exit, Version: release.Version,
	}
	os.Exit(p.Run())
}
