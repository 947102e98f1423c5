// Package pool decides which pod has which address of a pool: an address that belongs to the pod and not to its node.
// It neither reads nor writes. What is known goes into a [Book], and out come the writes to make, in order, each bound
// to what it was decided on. The controller and the agents carry them out; so does the model test, which runs the same
// code through random histories.
//
// # What it promises
//
// At no time can two pods answer for one address. That rests on four things.
//
//   - The name of a PodIP is its address, so there is only one. To create it is the claim; nothing overwrites it.
//   - It changes hands, or goes, only past the fence: once it is certain that the pod that had it no longer has it, and
//     will not have it again. See [Fence]. Every such write is bound to the version of the PodIP that was decided on.
//     So two controllers that both believe to lead, writes that come late or twice, and a kill between any two of them
//     do no harm.
//   - What an agent reports as gone stays gone: before it says so, it bars the pod from its node for good. See
//     [NextAction].
//   - Nothing is given or taken while the API server may have forgotten something: after a restore from a backup, every
//     node says first which addresses it has. See [Audit].
//
// Besides, no address leaks (every PodIP has a reason to exist, or [Book.Review] ends it) and no pod waits without a
// reason that is reported ([Plan.Reason]).
//
// # Who can be wrong
//
// What a Book knows comes from caches that lag behind, each independently. Most decisions are safe even so, because an
// old version makes the write fail. What a version does not cover is in the write's conditions ([Check]), which are
// read past the caches.
//
// An agent can lie, or its token be stolen. It is believed about the pods of its own node, and only as far as the
// cluster itself says that they are: see [Fence]. What another one has written of a pod is taken back ([Book.Review]).
// Only of a pod that was bound and deleted while no controller saw it, its PodIP alone says on which node it was.
//
// An operator who declares a node off is believed: its Node is deleted, or has the taint
// node.kubernetes.io/out-of-service and is not Ready. If it was not off, a pod that was deleted there answers until its
// agent reaches the API server and finds that out. After a restore the declaration is that of the backup, also of a
// Node that was deleted then and has come back since: the operator who restores a backup has to take back what no
// longer holds.
//
// # Where it is
//
// A Book is what is known, what waits for that to change, and the decisions: each is a value that reads what is known
// and returns a [Plan]. It changes nothing but what [Book.Place] reserves.
//
//	set.go    sets of addresses; parse.go a pool as people write it
//	facts.go  what is known; objects.go of what; stock.go what is free of a pool; book.go puts it in
//	wake.go   what waits, and is woken; line.go the pods that wait for an address of a pool
//	place.go  placing: the addresses of a new pod
//	life.go   reviewing: the life of a PodIP, and of a pool
//	conflict.go  what other machines on a link can do
//	fence.go  whether an address can change hands
//	audit.go   what all nodes are asked; recall: before anything is given
//	node.go   what an agent says and does
//	write.go  writes, and what they are bound to
package pool
