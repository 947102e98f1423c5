// Package lab builds and runs real nodes for tests and for the demo: containerd, runc, NRI and the CNI
// plugins, in namespaces of their own, driven over CRI as a kubelet would.
//
// [Build] compiles the pinned components into a cache outside the work tree; [BuildProduct] compiles the
// binaries of this repository. [StartNode] boots a node from them.
//
// A node has its own network, mount, pid, uts and ipc namespaces. Its root is a folder, its disk, so that
// every program in it keeps its default paths and nothing is written to the machine's /etc, /var, /opt or
// /run. /usr, /dev and /sys/fs/cgroup are the machine's. Its network namespace has no link to any other:
// nothing a node sends can leave it, and the sysctls it changes are its own.
//
// A node does not outlive the process that started it. Its pid 1 holds one end of a pipe and takes everything
// down when the other end closes, for whatever reason: return, panic, SIGKILL. Its folder and cgroups are
// named after that process, and what a killed process left of them is removed by the next [StartNode].
//
// The package needs Linux and root.
package lab
