// Package lab builds and runs real nodes and clusters for tests and the demo: containerd, runc, NRI and the CNI plugins
// in namespaces of their own, driven over CRI as by a kubelet, or by the kubelets of a real Kubernetes.
//
// [Build] and [BuildCluster] compile the pinned components into a cache outside the work tree; [BuildProduct] and
// [BuildWholeProduct] compile this repository's binaries, which [BuildImage] packs into their image. [StartNode] boots
// a node, [StartCluster] a cluster, and [Cluster.Install] installs the product on it as users do.
//
// A node has its own network, mount, pid, uts and ipc namespaces. Its root is a folder, its disk, so that every program
// in it keeps its default paths and the machine's /etc, /var, /opt and /run stay untouched. /usr, /dev and
// /sys/fs/cgroup are the machine's. Its network namespace has no link to the machine's: a node's packets cannot leave
// it, and its sysctls are its own. The sysctls that a kubelet sets and that have no namespace are files of the node.
// Nodes raise a single sysctl of the machine, the number of inotify instances; the last one restores it.
//
// A cluster is a machine with the control plane, which Install makes a node, and a machine for each node, all of them
// as above. A bridge in the network namespace of the control plane's machine, the fabric, joins them. The cluster's
// programs are real, with real authentication and authorization, but there is no DNS and, unless it is asked for, no
// kube-proxy: of all Service addresses only the API server's works then. Nodes have routes to each other's pods, or a
// flanneld that sets them. Programs of this machine reach the API server through a loopback port, see
// [Cluster.Kubeconfig].
//
// Neither outlives the process that started it. Pid 1 of a machine holds one end of a pipe and tears everything down
// when the other end closes, for whatever reason: return, panic, SIGKILL. Folders and cgroups are named after the
// starting process; the next [StartNode] or [StartCluster] removes what a killed process left behind.
//
// The package needs Linux and root.
package lab
