package lab

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on a thread of its own, which f may move into other namespaces. The thread ends with f, so that other
// goroutines never run in them.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			done <- f()
			return // still locked: the runtime ends the thread
		}
		// The main thread cannot end, and /proc/self shows it. While this goroutine holds it, another one gets another
		// thread.
		done <- onThread(f)
		runtime.UnlockOSThread()
	}()
	return <-done
}

// inside runs f in the namespaces of process pid named by flags, a set of CLONE_NEW*. With CLONE_NEWPID only f's
// children are in the namespace. Only f's own goroutine runs inside.
func inside(pid int, flags int, f func() error) error {
	return onThread(func() error {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return fmt.Errorf("entering the node: %w", err)
		}
		defer unix.Close(fd)
		if flags&unix.CLONE_NEWNS != 0 {
			// Threads share their root and working directory, which setns to a mount namespace changes.
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return fmt.Errorf("entering the node: %w", err)
			}
		}
		if err := unix.Setns(fd, flags); err != nil {
			return fmt.Errorf("entering the node: %w", err)
		}
		return f()
	})
}

// insideNetNS runs f in the network namespace at path.
func insideNetNS(path string, f func() error) error {
	return onThread(func() error {
		ns, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("entering a network namespace: %w", err)
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering the network namespace %s: %w", path, err)
		}
		return f()
	})
}
