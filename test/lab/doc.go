// Package lab builds and runs real nodes and clusters for tests and for the demo: containerd, runc, NRI and the
// CNI plugins, in namespaces of their own, driven over CRI as a kubelet would, or by the kubelets of a real
// Kubernetes.
//
// [Build] and [BuildCluster] compile the pinned components into a cache outside the work tree; [BuildProduct] and
// [BuildWholeProduct] compile the binaries of this repository, of which [BuildImage] makes their image. [StartNode]
// boots a node from them, [StartCluster] a cluster, and [Cluster.Install] installs the product on it as its users do.
//
// A node has its own network, mount, pid, uts and ipc namespaces. Its root is a folder, its disk, so that
// every program in it keeps its default paths and nothing is written to the machine's /etc, /var, /opt or
// /run. /usr, /dev and /sys/fs/cgroup are the machine's. Its network namespace has no link to the machine's:
// nothing a node sends can leave it, and the sysctls it changes are its own. Those that a kubelet sets and that
// have no namespace are files of the node. One of the machine's is raised while a node is there, that of inotify
// instances, and put back after the last.
//
// A cluster is a machine with the control plane, which Install makes a node as well, and one for each node, all of
// them as above. The network namespace of the control plane's machine has a bridge, the fabric, which joins them. The
// programs of a cluster are real, with real authentication and authorization; what differs from a usual cluster is
// that there is no kube-proxy and no DNS: Service addresses lead nowhere but for that of the API server. Programs of
// this machine reach the API server by a loopback port, see [Cluster.Kubeconfig].
//
// Neither outlives the process that started it. Pid 1 of a machine holds one end of a pipe and takes everything
// down when the other end closes, for whatever reason: return, panic, SIGKILL. Its folder and cgroups are
// named after that process, and what a killed process left of them is removed by the next [StartNode] or
// [StartCluster].
//
// The package needs Linux and root.
package lab
