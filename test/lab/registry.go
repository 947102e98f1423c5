package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path"
)

// registryComponent is a container registry.
var registryComponent = component{
	name: "registry", dir: "build/registry", sources: []string{"build/registry"}, pkg: "tool", parallel: 2,
}

// Where the control plane's machine has it.
const (
	registryProgram = "/opt/lab/registry"
	registryConfig  = "/etc/registry.yaml"
	registryPort    = "5000"
)

// BuildRegistry builds what only [Cluster.StartRegistry] needs.
func BuildRegistry(ctx context.Context) error {
	_, err := buildAll(ctx, registryComponent)
	return err
}

// StartRegistry starts a container registry beside the control plane, and has containerd on every machine ask it in
// place of the one of that name. It returns the registry's address on this machine, which has no TLS either.
func (c *Cluster) StartRegistry(ctx context.Context, inPlaceOf string) (address string, err error) {
	program, err := buildProgram(ctx, registryComponent)
	if err != nil {
		return "", err
	}
	if err := c.Control.Install(program, registryProgram); err != nil {
		return "", err
	}
	config := fmt.Sprintf(`version: 0.1
storage: {filesystem: {rootdirectory: /var/lib/registry}}
http: {addr: ':%s'}
`, registryPort)
	if err := c.Control.WriteFile(registryConfig, []byte(config)); err != nil {
		return "", err
	}
	at := net.JoinHostPort(serverIP.String(), registryPort)
	service := &Service{
		node: c.Control, name: "registry", ready: getFrom(c.Control, "http://"+at+"/v2/"), keep: true,
		argv: []string{registryProgram, "serve", registryConfig},
		env:  []string{"OTEL_TRACES_EXPORTER=none"}, // by default it looks for a collector
	}
	if err := service.Start(ctx); err != nil {
		return "", err
	}
	hosts := fmt.Sprintf(`server = 'https://%s'

[host.'http://%s']
  capabilities = ['pull', 'resolve']
`, inPlaceOf, at)
	for _, n := range c.machines() {
		err = errors.Join(err, n.WriteFile(path.Join("/etc/containerd/certs.d", inPlaceOf, "hosts.toml"), []byte(hosts)))
	}
	if err != nil {
		return "", err
	}
	if c.registry, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return "", err
	}
	go relay(c.registry, func(ctx context.Context) (net.Conn, error) { return c.Control.Dial(ctx, "tcp", at) })
	return c.registry.Addr().String(), nil
}
