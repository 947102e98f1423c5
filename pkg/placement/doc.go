// Package placement is Stayput's controller: it brings re-created pods home, to the node that keeps their addresses or
// that a PersistentPodState records, and releases the addresses that no workload wants. The rules are in package home.
//
// # What it promises
//
//   - It decides only on what it knows. An incomplete cache, an error of the API server, an object that vanished: each
//     means to try again, never "there is no home" or "no workload wants it".
//   - No pod stays gated forever: a pod without a home is ungated at once, a pod whose home cannot take it after
//     stayput.io/home-wait.
//   - It writes only what differs, and only its own fields. A change or a deletion is bound to the uid or the
//     resourceVersion of the object that it was decided on: another object of the name is left alone. Written by name
//     alone is what it does not decide about: its own objects whose content is all that counts (gated workloads,
//     reservations of Calico's), and single fields of others' (a namespace's label, a webhook's authority).
//   - Nothing that is remembered in memory alone is needed for that: see memory.
//
// # Where things are
//
//	placer.go    the loop that places pods; memory.go what it remembers of them
//	release.go   addresses that no workload wants any more; owner.go which workload they belong to
//	manager.go   all of it together; strip.go what the caches keep; pods.go which pods they have
//	podip        addresses of pools: which a pod gets, and when they are free
//	cluster      pods as the caches keep them, and nodes and workloads as the rules ask for them
//	podstate     PersistentPodStates: generating, recording, gating, stepping aside for OpenKruise
//	gate         the scheduling gate and how it is removed
//	webhook      what adds the gate where the API server has no policies for that
//
// A pod's way: the placer claims its addresses of pools, if it asks for any, gathers its situation from the caches and
// memory, home.Decide decides, and one patch gives the pod all of that and removes its gate. What changes in the
// cluster wakes the pods that it bears upon: the placer's own sources those that wait for a home, podip those that wait
// for an address. memory and podip know nothing of the placer, and the rules nothing of any of them.
package placement
