package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
)

var aptUpdate sync.Once

// Need makes sure that Debian packages are installed: as root it installs missing ones, otherwise its error names them.
func Need(ctx context.Context, packages ...string) error {
	var missing []string
	for _, p := range packages {
		out, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f=${Status}", p).Output()
		if err != nil || !bytes.HasSuffix(out, []byte(" installed")) {
			missing = append(missing, p)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	list := strings.Join(missing, " ")
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("missing packages, install them (as root: apt-get install %s)", list)
	}
	progress("installing %s", list)
	install := func() error {
		args := append([]string{"install", "-y", "-q", "--no-install-recommends"}, missing...)
		return aptGet(ctx, args...)
	}
	err := install()
	if err != nil {
		// The package lists may be missing or stale.
		aptUpdate.Do(func() { err = errors.Join(err, aptGet(ctx, "update", "-q")) })
		err = install()
	}
	if err != nil {
		return fmt.Errorf("installing %s: %w", list, err)
	}
	return nil
}

func aptGet(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-o", "DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
