// Package home holds the rules by which a pod comes home: which pods ask for their addresses, which node keeps them,
// whether that node can take the pod, how long the pod waits for it, and which pods a workload wants.
//
// The controller acts on these rules and kubectl stayput explains by them, so each is here once. Nothing in this
// package reads or writes: all that a decision depends on is an argument, and a caller that does not know one must not
// ask.
//
//	pod.go       what a pod says: annotated, gated, pinned, its home-wait
//	workload.go  what a workload says: the pods that it wants
//	retained.go  which node keeps the addresses of a pod
//	record.go    what a PersistentPodState records of a pod
//	decide.go    the decision; node.go whether a node can take a pod; affinity.go how a home is required
//	rejection.go predecessors that a kubelet did not admit
//	foresee.go   the decision for a pod that does not exist yet
//	names.go     names and reasons of Events that more than one program knows
package home
