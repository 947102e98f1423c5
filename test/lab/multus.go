package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// multusComponent is multus: the plugin of thin multus, and the daemon and the plugin of thick multus.
var multusComponent = component{name: "multus", dir: "build/multus", sources: []string{"build/multus"}, pkg: "tool"}

// MultusBin holds the paths of multus' programs.
type MultusBin struct {
	Thin         string // the plugin multus
	Shim, Daemon string // of thick multus
}

// BuildMultus builds multus.
func BuildMultus(ctx context.Context) (MultusBin, error) {
	dirs, err := buildAll(ctx, multusComponent)
	of := func(name string) string { return filepath.Join(dirs[multusComponent.name], name) }
	return MultusBin{Thin: of("multus"), Shim: of("multus-shim"), Daemon: of("multus-daemon")}, err
}

// Where multus' files are on a node, as its own manifests have them.
const (
	multusConf       = cniDir + "/00-multus.conf"
	multusKubeconfig = cniDir + "/multus.d/multus.kubeconfig"
	multusDaemonConf = cniDir + "/multus.d/daemon-config.json"
	multusDaemonFile = "/opt/multus/multus-daemon"
	podAccount       = "/var/run/secrets/kubernetes.io/serviceaccount"
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
// from now on that is the default network, and pods have others by annotation.
func (c *Cluster) InstallMultus(ctx context.Context, thick bool) error {
	bin, err := BuildMultus(ctx)
	if err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, multusManifest, "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "", "wait", "--for=condition=Established", "crd",
		"network-attachment-definitions.k8s.cni.cncf.io"); err != nil {
		return err
	}
	for _, n := range c.Nodes {
		if thick {
			err = n.installThickMultus(ctx, bin)
		} else {
			err = n.installThinMultus(ctx, bin)
		}
		if err != nil {
			return fmt.Errorf("multus on %s: %w", n.Name, err)
		}
	}
	return nil
}

func (n *ClusterNode) installThinMultus(ctx context.Context, bin MultusBin) error {
	token, err := n.cluster.AccountToken(ctx, "kube-system", "multus", "")
	if err != nil {
		return err
	}
	first, err := n.firstNetwork(ctx)
	if err != nil {
		return err
	}
	network, err := n.Run(ctx, "/bin/cat", first)
	if err != nil {
		return err
	}
	conf, err := json.Marshal(map[string]any{ // as cmd/thin_entrypoint writes it
		"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus", "kubeconfig": multusKubeconfig,
		"capabilities": map[string]any{AnnotationsCapability: true},
		"delegates":    []any{json.RawMessage(network)},
	})
	if err != nil {
		return err
	}
	config := n.cluster.credentials.kubeconfig(serverURL, map[string]any{"token": token})
	if err := errors.Join(n.Install(bin.Thin, "/opt/cni/bin/multus"), n.WriteFile(multusKubeconfig, config)); err != nil {
		return err
	}
	return n.WriteFile(multusConf, conf)
}

func (n *ClusterNode) installThickMultus(ctx context.Context, bin MultusBin) error {
	token, err := n.cluster.AccountToken(ctx, "kube-system", "multus", "")
	if err != nil {
		return err
	}
	conf, err := json.Marshal(map[string]any{ // as deployments/multus-daemonset-thick.yml has it, but without its mounts
		"cniVersion": "1.0.0", "logLevel": "verbose", "logToStderr": true, "cniConfigDir": cniDir,
		"multusAutoconfigDir": cniDir, "multusConfigFile": "auto", "socketDir": "/run/multus/",
	})
	if err != nil {
		return err
	}
	if _, err := n.firstNetwork(ctx); err != nil {
		return err
	}
	if err := errors.Join(
		n.Install(bin.Shim, "/opt/cni/bin/multus-shim"), n.Install(bin.Daemon, multusDaemonFile),
		n.WriteFile(multusDaemonConf, conf), n.WriteFile(path.Join(podAccount, "token"), []byte(token)),
		n.WriteFile(path.Join(podAccount, "ca.crt"), n.cluster.credentials.cert),
	); err != nil {
		return err
	}
	_, err = n.Start("multus", []string{"MULTUS_NODE_NAME=" + n.Name, "KUBERNETES_SERVICE_PORT=" + serverPort,
		"KUBERNETES_SERVICE_HOST=" + serverIP.String()}, multusDaemonFile, "-config", multusDaemonConf)
	if err != nil {
		return err
	}
	return wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := n.Run(ctx, "/usr/bin/test", "-s", multusConf)
		return err == nil, nil
	})
}

// firstNetwork returns the configuration that the runtime uses, once stayput has put its own there.
func (n *ClusterNode) firstNetwork(ctx context.Context) (file string, err error) {
	file = path.Join(cniDir, "00-stayput.conflist")
	return file, wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := n.Run(ctx, "/usr/bin/test", "-s", file)
		return err == nil, nil
	})
}
