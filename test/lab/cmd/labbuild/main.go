// Labbuild fills the lab's cache before the first test needs it. With the argument conformance it adds upstream's own
// tests, with flannel flanneld and kube-proxy, with calico flanneld and Calico, with calico-ipam the latter alone, with
// cert-manager that, with mesh Istio's and Linkerd's CNI programs, with openkruise that, with release a registry.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/stayput/stayput/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := lab.BuildEverything(ctx)
	if err == nil { // for tests of routes, most of which know no lab
		err = lab.Need(ctx, "iproute2", "iptables")
	}
	if err == nil && slices.Contains(os.Args[1:], "conformance") {
		_, err = lab.BuildConformance(ctx)
	}
	if err == nil && slices.Contains(os.Args[1:], "flannel") {
		err = lab.BuildFlannelAndProxy(ctx)
	}
	if err == nil && slices.Contains(os.Args[1:], "calico") {
		err = lab.BuildCanal(ctx)
	}
	if err == nil && slices.Contains(os.Args[1:], "calico-ipam") {
		_, err = lab.BuildCalico(ctx)
	}
	if err == nil && slices.Contains(os.Args[1:], "cert-manager") {
		_, err = lab.BuildCertManager(ctx)
	}
	if err == nil && slices.Contains(os.Args[1:], "mesh") {
		_, err = lab.BuildIstio(ctx)
		if err == nil {
			_, err = lab.BuildLinkerd(ctx)
		}
	}
	if err == nil && slices.Contains(os.Args[1:], "openkruise") {
		_, err = lab.BuildOpenKruise(ctx)
	}
	if err == nil && slices.Contains(os.Args[1:], "release") {
		err = lab.BuildRegistry(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "labbuild:", err)
		os.Exit(1)
	}
}
