package lab

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs f on a thread of its own, which f may move into other namespaces: it ends with f, so that
// nothing leaks to other goroutines.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			done <- f()
			return // still locked: the runtime ends the thread
		}
		// The main thread cannot end, and it is what /proc/self shows. As long as this goroutine holds it,
		// another one gets another thread.
		done <- onThread(f)
		runtime.UnlockOSThread()
	}()
	return <-done
}

// inside runs f in those namespaces of the process pid that flags, of CLONE_NEW*, name. With CLONE_NEWPID it
// is f's children that are born there. Only what f does on its own goroutine happens inside.
func inside(pid int, flags int, f func() error) error {
	return onThread(func() error {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return fmt.Errorf("entering the node: %w", err)
		}
		defer unix.Close(fd)
		if flags&unix.CLONE_NEWNS != 0 {
			// Threads share their root and working directory, which a mount namespace brings along.
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
