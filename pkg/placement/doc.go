// Package placement is stayput's controller: it brings re-created pods home, to the node that keeps their
// addresses or that a PersistentPodState records, and gives up the addresses that no workload wants.
//
// # What it promises
//
//   - It decides only on what it knows. A cache that is not complete, an error of the API server, an object that
//     vanished: each means to try again, never "there is no home" or "nobody wants it".
//   - No pod is gated for ever: a pod without a home goes at once, one with a home that cannot take it after
//     stayput.io/home-wait.
//   - Every write is by server-side apply under one field manager, bound to uid and resourceVersion of what the
//     decision was made on, and made only where something differs. What is the user's own is not lost.
//   - Nothing that is remembered in memory alone is needed for that: see memory.
//
// # Where things are
//
//	home.go       the decision where a pod goes, a pure function; affinity.go how that is said to the scheduler
//	pod.go        the loop around it; memory.go what it remembers between two looks
//	release.go    addresses that no workload wants any more
//	targets.go    the workloads: which pods they want
//	generate.go   PersistentPodStates from annotations; record.go what they record; gated.go whose pods are gated
//	kruise.go     stepping aside where OpenKruise runs
//	ungate.go     letting all pods go, for uninstalling
//	manager.go    all of it together
package placement
