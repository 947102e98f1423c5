package ledger

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Through a link that another program puts in the place of the lock, the plugin would make a file anywhere, as root, or
// exclude nobody.
func TestALockThatIsALinkIsRefused(t *testing.T) {
	for name, there := range map[string]bool{"to a file": true, "to nothing": false} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			target := filepath.Join(dir, "target")
			if there {
				if err := os.WriteFile(target, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			n := &Network{Name: "pods", DataDir: filepath.Join(dir, "networks")}
			if err := os.MkdirAll(filepath.Join(n.DataDir, n.Name), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(target, filepath.Join(n.DataDir, n.Name, lockFile)); err != nil {
				t.Fatal(err)
			}
			l := New(n, Options{StateDir: filepath.Join(dir, "state")})
			if err := l.Prepare(); !errors.Is(err, unix.ELOOP) {
				t.Errorf("a command: %v, want %v", err, unix.ELOOP)
			}
			if _, err := l.List(); !errors.Is(err, unix.ELOOP) {
				t.Errorf("a list: %v, want %v", err, unix.ELOOP)
			}
			if _, err := os.Stat(target); !there && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the lock was made elsewhere: %v", err)
			}
		})
	}
}
