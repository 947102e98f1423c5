package hostnet

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

func TestThereIsNoViewWithoutTheHostsProcesses(t *testing.T) {
	if _, err := Observe(t.Context(), nil, 0); err == nil {
		t.Error("a view without the runtime's process")
	}
}

// In a pod the node's directory is mounted at /run/netns and at /var/run/netns, and no unmount comes through to the
// node.
func TestALeftoverNamespaceGoesFromTheNodeThoughTheAgentHasItTwice(t *testing.T) {
	dir := t.TempDir()
	dirs := map[string]string{}
	for _, name := range []string{"node", "run", "var-run"} {
		dirs[name] = filepath.Join(dir, name)
		must.Do(t, os.Mkdir(dirs[name], 0o755))
	}
	must.Do(t, unix.Mount("tmpfs", dirs["node"], "tmpfs", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(dirs["node"], unix.MNT_DETACH)) })
	must.Do(t, unix.Mount("", dirs["node"], "", unix.MS_SHARED, ""))
	left := filepath.Join(dirs["node"], "left")
	must.Do(t, os.WriteFile(left, nil, 0o644))
	mounts := []string{dirs["run"], dirs["var-run"]}

	done := make(chan error)
	mounted := make(chan error)
	go func() { // in a mount namespace of its own, which ends with this thread
		runtime.LockOSThread()
		err := errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""))
		for _, dir := range mounts {
			err = errors.Join(err, unix.Mount(dirs["node"], dir, "", unix.MS_BIND, ""))
		}
		done <- errors.Join(err, unix.Unmount(dirs["node"], unix.MNT_DETACH))
		if err := <-mounted; err != nil {
			done <- err
			return
		}
		v := &View{dirs: mounts, roots: []string{""}}
		ns, ok, err := ledger.SystemNetns{}.Identify(filepath.Join(dirs["var-run"], "left"))
		if err == nil && !ok {
			err = errors.New("the namespace is not visible")
		}
		if err == nil {
			err = v.Remove(&Space{}, ns)
		}
		done <- err
	}()
	must.Do(t, <-done)
	err := unix.Mount("/proc/self/ns/net", left, "", unix.MS_BIND, "")
	mounted <- err
	must.Do(t, err)
	must.Do(t, <-done)
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still on the node: %v", err)
	}
}
