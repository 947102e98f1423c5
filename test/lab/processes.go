package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// Paths and URLs of the product's programs on machines without their pods.
const (
	agentFile        = "/opt/stayput/stayput-agent"
	controllerFile   = "/opt/stayput/stayput-controller"
	productToken     = "/etc/stayput/token"
	productConfig    = "/etc/stayput/kubeconfig"
	agentHealth      = "http://127.0.0.1:9463/healthz"
	controllerHealth = "http://127.0.0.1:8081/healthz"
)

// ProcessOptions configure an installation without pods.
type ProcessOptions struct {
	// Controllers is the number of controllers; one of them leads.
	Controllers int
	// Pools: with pools switched on.
	Pools bool
	// Additional flags.
	AgentArgs, ControllerArgs []string
}

// InstallProcesses applies the chart without its workloads, and runs the agents and controllers as processes of the
// nodes and of separate machines, each with the service account of its workload. It is for benchmarks, which stop
// kubelets and measure the controller as a process of this machine; use [Cluster.Install] otherwise.
func (c *Cluster) InstallProcesses(ctx context.Context, o ProcessOptions) error {
	files := []string{"crds.yaml", "persistentpodstates.yaml", "install.yaml", "gate-policies.yaml"}
	if o.Pools {
		files = append(files, "pools-crds.yaml", "pools.yaml", "pools-gate-policies.yaml")
	}
	if err := c.applyFiles(ctx, files); err != nil {
		return err
	}
	err := together(len(c.Nodes), func(i int) error { return c.Nodes[i].StartAgent(ctx, o.AgentArgs...) })
	if err != nil {
		return err
	}
	for range o.Controllers {
		if _, err := c.StartController(ctx, o.ControllerArgs...); err != nil {
			return err
		}
	}
	return nil
}

// writeAccount writes a service account's token, and a kubeconfig that uses it, to a machine of the cluster.
func (c *Cluster) writeAccount(ctx context.Context, machine *Node, account, node string) error {
	token, err := c.AccountToken(ctx, SystemNamespace, account, node)
	if err != nil {
		return err
	}
	config := c.credentials.kubeconfig(serverURL, map[string]any{"tokenFile": productToken})
	return errors.Join(machine.WriteFile(productToken, []byte(token)), machine.WriteFile(productConfig, config))
}

// StartAgent starts stayput-agent on the node and waits until it answers. n.AgentProcess stops and restarts it.
func (n *ClusterNode) StartAgent(ctx context.Context, args ...string) error {
	if n.cluster.options.Product.Agent == "" {
		return errors.New("the cluster was started without Product.Agent")
	}
	if n.AgentProcess != nil {
		if err := n.AgentProcess.Stop(); err != nil {
			return err
		}
	}
	if err := n.Install(n.cluster.options.Product.Agent, agentFile); err != nil {
		return err
	}
	if err := n.cluster.writeAccount(ctx, n.Node, AgentAccount, n.Name); err != nil {
		return err
	}
	n.AgentProcess = &Service{node: n.Node, name: "agent", ready: getFrom(n.Node, agentHealth), argv: append([]string{
		agentFile, "--kubeconfig=" + productConfig, "--node-name=" + n.Name, "--log-level=debug",
	}, args...)}
	return n.AgentProcess.Start(ctx)
}

// ControllerProcess is a stayput-controller without a pod. It has a machine of its own, so that controllers do not
// share ports; it stands for the node of its pod.
type ControllerProcess struct {
	*Service
	Node *Node
}

// StartController starts another stayput-controller.
func (c *Cluster) StartController(ctx context.Context, args ...string) (*ControllerProcess, error) {
	if c.options.Product.Controller == "" {
		return nil, errors.New("the cluster was started without Product.Controller")
	}
	number := len(c.ControllerProcesses) + 1
	name := fmt.Sprintf("controller-%d", number)
	machine, err := startNode(ctx, c.bin.Bin, NodeOptions{
		Name: name, Networks: []Network{}, Idle: true,
		connect: func(pid int) error { return plug(c.Control.Pid(), pid, name, controllerIP(number), c.routedNodes(), 0) },
	})
	if err != nil {
		return nil, err
	}
	controller := &ControllerProcess{Node: machine, Service: &Service{
		node: machine, name: "controller", ready: getFrom(machine, controllerHealth), argv: append([]string{
			controllerFile, "--kubeconfig=" + productConfig, "--leader-election-namespace=" + SystemNamespace,
			"--log-level=debug",
		}, args...),
	}}
	c.ControllerProcesses = append(c.ControllerProcesses, controller)
	if err := machine.Install(c.options.Product.Controller, controllerFile); err != nil {
		return nil, err
	}
	if err := c.writeAccount(ctx, machine, ControllerAccount, ""); err != nil {
		return nil, err
	}
	return controller, controller.Start(ctx)
}

// applyFiles applies manifests in deploy/ except workloads, overwriting fields of other field managers.
func (c *Cluster) applyFiles(ctx context.Context, files []string) error {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	for _, name := range files {
		data, err := os.ReadFile(filepath.Join(root, "deploy", name))
		if err != nil {
			return err
		}
		var rest strings.Builder
		for doc := range strings.SplitSeq(string(data), "\n---") {
			var object struct{ Kind string }
			if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			switch object.Kind {
			case "", "Deployment", "DaemonSet":
			default:
				fmt.Fprintf(&rest, "---\n%s\n", doc)
			}
		}
		if _, err := c.Kubectl(ctx, rest.String(), "apply", "--server-side", "--force-conflicts", "-f", "-"); err != nil {
			return err
		}
	}
	return c.WaitForCRDs(ctx)
}
