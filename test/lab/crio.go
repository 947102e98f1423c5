package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"time"
)

// CRIOSocket is the socket of CRI-O in a node that has it in place of containerd.
const CRIOSocket = "/run/crio/crio.sock"

const (
	labCRIO     = "/opt/lab/crio/"
	crioRunc    = "/etc/crio/runc"
	crioHookDir = "/etc/crio/hooks.d"
)

// crioDirs are where CRI-O has its state.
var crioDirs = []string{"/run/containers", "/run/crio", "/var/lib/containers", "/var/lib/crio"}

// crioFiles are a node's files for CRI-O: its default configuration except for cgroups without systemd, runc, an image
// that is never pulled, and what a root without CAP_SYS_RESOURCE cannot do.
func crioFiles(o NodeOptions) (map[string]string, error) {
	hook, err := json.Marshal(map[string]any{
		"version": "1.0.0", "hook": bootIDHook, "when": map[string]any{"always": true},
		"stages": []string{"createContainer"},
	})
	if err != nil {
		return nil, err
	}
	return map[string]string{
		"/etc/crio/crio.conf": fmt.Sprintf(`[crio]
storage_driver = "overlay"

[crio.runtime]
drop_infra_ctr = %t
default_runtime = "runc"
cgroup_manager = "cgroupfs"
pinns_path = "%s"
hooks_dir = ["%s"]

[crio.runtime.runtimes.runc]
runtime_path = "%s"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"

[crio.image]
pause_image = "%s"
pause_command = ""

[crio.nri]
enable_nri = %t
`, !o.pauses, labCRIO+"pinns", crioHookDir, crioRunc, PauseImage, !o.NoNRI),
		"/etc/containers/policy.json":         `{"default": [{"type": "insecureAcceptAnything"}]}`,
		"/etc/containers/registries.conf":     "",
		path.Join(crioHookDir, "bootid.json"): string(hook),
	}, nil
}

// crioRuncScript is runc for a root that cannot lower an oom_score_adj, without the controller hugetlb. containerd has
// settings for both.
const crioRuncScript = `#!/bin/sh
previous=
for arg; do
  if [ "$previous" = --bundle ]; then
    sed -z -i 's/"oomScoreAdj":\s*-[0-9]*/"oomScoreAdj":0/; s/"hugepageLimits":\s*\[[^]]*\]/"hugepageLimits":[]/' \
      "$arg/config.json" || exit 1
  fi
  previous=$arg
done
exec /opt/lab/runc/runc "$@"
`

// ConfigureCRIO adds a file to CRI-O's configuration, which it reads when it starts.
func (n *Node) ConfigureCRIO(name, toml string) error {
	return n.WriteFile(path.Join("/etc/crio/crio.conf.d", name), []byte(toml))
}

// WipeCRIO runs "crio wipe", as crio-wipe.service does at boot before CRI-O starts.
func (n *Node) WipeCRIO(ctx context.Context) error {
	_, err := n.Run(ctx, labCRIO+crioRuntime, "wipe")
	return err
}

// crioReads waits until CRI-O has read the CNI configurations that are on the disk now. Its status does not tell; its
// log names what changes, one after the other, each after everything before it was read. So make something change that
// nothing takes for a configuration: a directory.
func (n *Node) crioReads(ctx context.Context) error {
	mark := path.Join(cniDir, newUUID()+".json")
	if err := os.Mkdir(n.Path(mark), 0o755); err != nil {
		return err
	}
	defer func() { _ = os.Remove(n.Path(mark)) }()
	for {
		log, err := os.ReadFile(n.LogFile("containerd"))
		if err != nil || bytes.Contains(log, []byte(mark)) {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("CRI-O does not see that %s changes: %w", cniDir, ctx.Err())
		}
	}
}

// importIntoCRIO loads images of a docker-archive, a file of the node.
func (n *Node) importIntoCRIO(ctx context.Context, archive string, refs []string) error {
	for _, ref := range refs {
		_, err := n.Run(ctx, labCRIO+"copyimg", "--root=/var/lib/containers/storage", "--runroot=/run/containers/storage",
			"--storage-driver=overlay", "--signature-policy=/etc/containers/policy.json", "--image-name="+ref,
			"--import-from=docker-archive:"+archive+":"+ref)
		if err != nil {
			return err
		}
	}
	return nil
}
