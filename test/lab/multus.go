package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"reflect"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// multusComponent is multus: the plugin of thin multus and what its pod runs, and the daemon and the plugin of thick
// multus.
var multusComponent = component{name: "multus", dir: "build/multus", sources: []string{"build/multus"}, pkg: "tool"}

// MultusBin holds the paths of multus' programs.
type MultusBin struct {
	Thin, ThinEntrypoint string // the plugin multus, and what its pod runs
	Shim, Daemon         string // of thick multus
}

// BuildMultus builds multus.
func BuildMultus(ctx context.Context) (MultusBin, error) {
	dirs, err := buildAll(ctx, multusComponent)
	of := func(name string) string { return filepath.Join(dirs[multusComponent.name], name) }
	return MultusBin{
		Thin: of("multus"), ThinEntrypoint: of("thin_entrypoint"), Shim: of("multus-shim"), Daemon: of("multus-daemon"),
	}, err
}

// Where multus' files are on a node, as its own manifests have them.
const (
	multusConf       = cniDir + "/00-multus.conf" // thin multus': from CNI 1.0.0 on 00-multus.conflist
	multusDaemonConf = cniDir + "/multus.d/daemon-config.json"
	multusDir        = "/opt/multus/"
	podAccount       = "/var/run/secrets/kubernetes.io/serviceaccount"
	// MultusNetworks is where it looks for networks whose NetworkAttachmentDefinition has no configuration.
	MultusNetworks = "/etc/cni/multus/net.d"
)

// multusManifest is multus' definition and account, from its deployments/multus-daemonset.yml.
const multusManifest = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: network-attachment-definitions.k8s.cni.cncf.io
spec:
  group: k8s.cni.cncf.io
  scope: Namespaced
  names:
    plural: network-attachment-definitions
    singular: network-attachment-definition
    kind: NetworkAttachmentDefinition
    shortNames: [nad, net-attach-def]
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties:
              config: {type: string}
---
kind: ClusterRole
apiVersion: rbac.authorization.k8s.io/v1
metadata:
  name: multus
rules:
- apiGroups: ["k8s.cni.cncf.io"]
  resources: ["*"]
  verbs: ["*"]
- apiGroups: [""]
  resources: [pods, pods/status]
  verbs: [get, list, watch, update]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch, update]
---
kind: ClusterRoleBinding
apiVersion: rbac.authorization.k8s.io/v1
metadata:
  name: multus
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: multus}
subjects:
- {kind: ServiceAccount, name: multus, namespace: kube-system}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: multus, namespace: kube-system}
`

// InstallMultus puts multus, thick or thin, before the network that the nodes' pods have now, as its own DaemonSets do:
// from now on that is the default network, and pods have others by annotation. With agents on the nodes it waits for
// Stayput's to be that network.
func (c *Cluster) InstallMultus(ctx context.Context, thick bool) error {
	bin, err := BuildMultus(ctx)
	if err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, multusManifest, "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	if err := c.WaitForCRDs(ctx); err != nil {
		return err
	}
	return together(len(c.Nodes), func(i int) error {
		n := c.Nodes[i]
		err := n.installMultus(ctx, bin, thick)
		if err == nil && n.Agent != nil {
			err = n.waitOwnConf(ctx)
		}
		if err == nil {
			err = n.RestartMultus(ctx)
		}
		if err != nil {
			return fmt.Errorf("multus on %s: %w", n.Name, err)
		}
		return nil
	})
}

func (n *ClusterNode) installMultus(ctx context.Context, bin MultusBin, thick bool) error {
	token, err := n.cluster.AccountToken(ctx, "kube-system", "multus", "")
	if err != nil {
		return err
	}
	conf, err := json.Marshal(map[string]any{ // as deployments/multus-daemonset-thick.yml has it, but without its mounts
		"cniVersion": "0.3.1", "logLevel": "verbose", "logToStderr": true, "cniConfigDir": cniDir,
		"multusAutoconfigDir": cniDir, "multusConfigFile": "auto", "socketDir": "/run/multus/",
	})
	if err != nil {
		return err
	}
	argv := []string{multusDir + "thin_entrypoint", "--multus-conf-file=auto", "--multus-autoconfig-dir=" + cniDir,
		"--cni-conf-dir=" + cniDir, "--cni-bin-dir=/opt/cni/bin", "--multus-bin-file=" + multusDir + "multus"}
	if thick {
		argv = []string{multusDir + "multus-daemon", "-config=" + multusDaemonConf}
	}
	n.Multus = &Service{node: n.Node, name: "multus", argv: argv, env: []string{"MULTUS_NODE_NAME=" + n.Name,
		"KUBERNETES_SERVICE_PORT=" + serverPort, "KUBERNETES_SERVICE_HOST=" + serverIP.String()}}
	return errors.Join(
		n.Install(bin.ThinEntrypoint, multusDir+"thin_entrypoint"), n.Install(bin.Thin, multusDir+"multus"),
		n.Install(bin.Daemon, multusDir+"multus-daemon"), n.Install(bin.Shim, "/opt/cni/bin/multus-shim"),
		n.WriteFile(multusDaemonConf, conf), n.WriteFile(path.Join(podAccount, "token"), []byte(token)),
		n.WriteFile(path.Join(podAccount, "ca.crt"), n.cluster.credentials.cert),
	)
}

// RestartMultus restarts the node's multus, as a restart of its pod does, and waits until the runtime has loaded what
// it writes then.
func (n *ClusterNode) RestartMultus(ctx context.Context) error {
	if err := n.Multus.Stop(); err != nil {
		return err
	}
	var before os.FileInfo // the file that an end of thin multus leaves, and the next start replaces
	file, _, err := n.multusFile()
	if err == nil && file != "" {
		before, err = os.Stat(n.Path(file))
	}
	if err != nil {
		return err
	}
	if err := n.Multus.Start(ctx); err != nil {
		return err
	}
	return Until(ctx, "multus to be the network of "+n.Name, func() (bool, error) {
		if n.Multus.Process() == nil {
			return false, fmt.Errorf("it has ended: see %s", n.LogFile("multus"))
		}
		file, data, err := n.multusFile()
		if err != nil || file == "" {
			return false, err
		}
		is, err := os.Stat(n.Path(file))
		if err != nil || before != nil && os.SameFile(is, before) && is.ModTime().Equal(before.ModTime()) {
			return false, err
		}
		r, err := n.CRI().Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
		if err != nil {
			return false, err
		}
		loaded, err := loadedConfigs(r)
		return err == nil && len(loaded) > 0 && sameConf(loaded[0], data), err
	})
}

// StopMultus stops the node's multus and takes its configuration away, as its removal does.
func (n *ClusterNode) StopMultus(ctx context.Context) error {
	if err := n.Multus.Stop(); err != nil {
		return err
	}
	for _, file := range []string{multusConf, multusConf + "list"} {
		if err := os.Remove(n.Path(file)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	n.Multus = nil
	return n.waitCNI(ctx)
}

// multusFile returns the name and the content of the configuration that multus has written; "" if there is none yet.
func (n *ClusterNode) multusFile() (file string, data []byte, err error) {
	for _, file := range []string{multusConf, multusConf + "list"} {
		data, err := os.ReadFile(n.Path(file))
		if !errors.Is(err, os.ErrNotExist) {
			return file, data, err
		}
	}
	return "", nil, nil
}

// MultusConf returns the configuration that multus has written.
func (n *ClusterNode) MultusConf() ([]byte, error) {
	file, data, err := n.multusFile()
	if err == nil && file == "" {
		err = fmt.Errorf("%s: %w", n.Path(multusConf), os.ErrNotExist)
	}
	return data, err
}

// sameConf reports whether a configuration list that containerd has loaded is that of a file, which may be of one
// plugin.
func sameConf(loaded string, file []byte) bool {
	var list struct{ Plugins []any }
	var is, want any
	if json.Unmarshal([]byte(loaded), &is) != nil || json.Unmarshal(file, &want) != nil {
		return false
	}
	if plugin, ok := want.(map[string]any); ok && plugin["plugins"] == nil {
		if json.Unmarshal([]byte(loaded), &list) != nil || len(list.Plugins) != 1 {
			return false
		}
		is = list.Plugins[0]
	}
	return reflect.DeepEqual(is, want)
}

// waitOwnConf waits until the agent has put its configuration there.
func (n *ClusterNode) waitOwnConf(ctx context.Context) error {
	return Until(ctx, "Stayput's configuration on "+n.Name, func() (bool, error) {
		_, err := os.Stat(n.Path(path.Join(cniDir, "00-stayput.conflist")))
		return err == nil, err
	})
}
