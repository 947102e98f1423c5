package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"strings"
)

// CRIOSocket is the socket of CRI-O in a node that has it in place of containerd.
const CRIOSocket = "/run/crio/crio.sock"

const (
	labCRIO     = "/opt/lab/crio/"
	crioRunc    = "/etc/crio/runc"
	crioHookDir = "/etc/crio/hooks.d"
)

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

// crioConfig returns the file of the network that CRI-O has loaded, by its log: its status does not tell.
func (n *Node) crioConfig() (string, error) {
	data, err := os.ReadFile(n.LogFile("containerd"))
	if err != nil {
		return "", err
	}
	// It names all files in their order whenever it reads them.
	var first, last string
	for line := range strings.Lines(string(data)) {
		_, found, ok := strings.Cut(line, `msg="Found CNI network `)
		if !ok {
			continue
		}
		_, file, _ := strings.Cut(found, " at ")
		file, _, _ = strings.Cut(file, `"`)
		if file <= last {
			first = ""
		}
		if last = file; first == "" {
			first = file
		}
	}
	return first, nil
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
