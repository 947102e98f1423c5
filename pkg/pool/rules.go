package pool

// rule is one on which safety rests. The model test breaks each in turn, and must notice.
type rule uint

type rules uint64

// broken reports whether a test does without a rule. Nobody else can.
func (r rules) broken(one rule) bool { return r&(1<<one) != 0 }

const (
	forceDeleteIsNoProof rule = iota // that the pod is gone from the cluster proves nothing
	notReadyIsNoProof                // nor does a node that is not Ready
	podIsLookedUp                    // that a pod is gone is read past the cache
	nodeIsLookedUp                   // that its node is off, too
	readyIsNotOff                    // a node that is Ready is not off, whatever its taints
	everyNodeAnswers                 // an unknown holder may be anywhere
	nodeIsKnown                      // only the node that a pod has by the cluster is to speak of it
	answersAreFresh                  // what a node said before the end of a pod says nothing
	restoresAreNoticed               // after a restore, nodes know more than the cluster
	futureIsLost                     // also if the clock was ahead that set the mark
	restoresWaitForAll               // also those that do not answer
	placedSinceMark                  // a pod is ungated only if nothing was forgotten
	versionsMatter                   // a write is bound to what it was decided on
	createsAreClaims                 // a PodIP is never overwritten
	releaseWaitsForFence             // an address that was released may be in use
	finalizerHolds                   // one that was deleted, too
	annotationsDecide                // an address that a pod has not been told of is surplus
	goneMeansForGood                 // an agent: a pod that may start again is not gone
	goneMeansNamespace               // an agent: a pod whose namespace exists is not gone
	goneMeansBarred                  // an agent: kubelet may start again what was reported gone
	ownPodsOnly                      // an agent: a pod that may be another node's is not its to speak of
	recallsEnd                       // nor ends its word a pod, but for one from before all nodes were asked
	recallMeansChecked               // kubelet may start what the cluster has forgotten
	strangersGoDown                  // a pod that the cluster has given up must not answer
	offGoesDown                      // nor one that it has deleted on a node that it believes to be off
	foundCounts                      // an agent: nor one that another program has started, of which it never heard
	unusedIsFreed                    // nothing leaks: an address whose reason is gone
	surplusIsFreed                   // nor one that no pod was told of
	adoptedIsOwn                     // but for one that its pod had before
	rulesEnd
)
