package lab

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// inotifyLimit is the one sysctl of the machine that the lab changes. It counts a user's instances across all
// namespaces, so a node cannot have its own. A node with a kubelet takes up to ten; distributions that allow 128 per
// user run out with three or four clusters.
const (
	inotifyLimit  = "/proc/sys/fs/inotify/max_user_instances"
	inotifyWanted = 1024
)

// holdInotify raises the limit until the last release in any process of the lab. Killed processes no longer count; the
// next release restores the limit.
func holdInotify() (release func() error, err error) {
	users := filepath.Join(os.TempDir(), "stayput-lab.inotify") // holds the original limit
	hold, err := os.OpenFile(users, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = inotifyAlone(users, func() error {
		limit, err := readLimit()
		if err != nil {
			return err
		}
		if limit < inotifyWanted {
			if err := os.WriteFile(users, []byte(strconv.Itoa(limit)), 0o600); err != nil {
				return err
			}
			if err := writeLimit(inotifyWanted); err != nil {
				return err
			}
		}
		return unix.Flock(int(hold.Fd()), unix.LOCK_SH)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("raising the number of inotify instances: %w", err), hold.Close())
	}
	return func() error {
		return inotifyAlone(users, func() error {
			defer hold.Close()
			if unix.Flock(int(hold.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
				return nil // another one holds it
			}
			before, err := io.ReadAll(hold)
			if err != nil || len(before) == 0 {
				return err // already high enough
			}
			limit, err := strconv.Atoi(string(before))
			if err != nil {
				return fmt.Errorf("%s: %w", users, err)
			}
			return errors.Join(writeLimit(limit), hold.Truncate(0))
		})
	}, nil
}

// inotifyAlone runs f while no other process or goroutine raises or restores the limit.
func inotifyAlone(users string, f func() error) error {
	unlock, err := lock(filepath.Dir(users), filepath.Base(users), "changes the number of inotify instances")
	if err != nil {
		return err
	}
	defer unlock()
	return f()
}

func readLimit() (int, error) {
	data, err := os.ReadFile(inotifyLimit)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(data)))
}

func writeLimit(limit int) error { return os.WriteFile(inotifyLimit, []byte(strconv.Itoa(limit)), 0) }
