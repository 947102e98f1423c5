package program

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"syscall"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// APIServer returns the client configuration of a kubeconfig file, or, if that is empty, of the cluster that the
// program runs in.
func APIServer(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("no --kubeconfig, and not running in a cluster: %w", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return config, nil
}

// namespaceFile has the namespace of a pod with a service account.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Namespace returns the namespace of the pod that the program runs in: $POD_NAMESPACE, else the one of its service
// account. It is empty outside of a pod.
func Namespace() string {
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		return ns
	}
	b, _ := os.ReadFile(namespaceFile)
	return strings.TrimSpace(string(b))
}

// InstalledIn returns the namespace that Stayput is installed in: the given one, or that of the pod. A manifest gives
// the namespace that it was made for, whose accounts its admission policies name. In a pod of another namespace, where
// a kustomize overlay has moved it, no policy would restrict these accounts: that is an error.
func InstalledIn(given string) (string, error) {
	pod := Namespace()
	if given != "" && pod != "" && given != pod {
		return "", fmt.Errorf("--namespace: the manifest was rendered for namespace %s, whose service accounts "+
			"its admission policies name, and this pod is in %s: expected the same namespace; to install in another one, "+
			"use helm template --namespace, not the namespace field of kustomize", given, pod)
	}
	return cmp.Or(given, pod), nil
}

// Restart replaces this process by a new one of the same program and arguments. It returns only after an error.
func Restart() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return syscall.Exec(self, os.Args, os.Environ())
}
