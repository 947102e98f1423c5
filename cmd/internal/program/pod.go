package program

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// namespaceFile is where kubelet tells a pod that has a service account its namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Namespace is the namespace of the pod that the program runs in: $POD_NAMESPACE, else the one of its service
// account; empty where it runs in no pod.
func Namespace() string {
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		return ns
	}
	b, _ := os.ReadFile(namespaceFile)
	return strings.TrimSpace(string(b))
}

// Restart replaces this process by a new one of the same program and arguments. It returns only with an error.
func Restart() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return unix.Exec(self, os.Args, os.Environ())
}
