package pool

import (
	"flag"
	"iter"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"
)

var (
	modelSeed      = flag.Uint64("model.seed", 0, "replay one history of the model test")
	modelBase      = flag.Uint64("model.base", 1, "seed of the model test's first history; 0: of the clock")
	modelBroken    = flag.String("model.broken", "", "histories without this rule")
	modelForeign   = flag.Bool("model.foreign", false, "histories with other machines on the link")
	modelAdopts    = flag.Bool("model.adopts", false, "histories with pods that are adopted")
	modelRouted    = flag.Bool("model.routed", false, "histories with routed pools")
	modelLies      = flag.Bool("model.lies", false, "histories with an agent that lies")
	modelClocks    = flag.Bool("model.clocks", false, "histories with clocks of controllers that differ and jump")
	modelDisks     = flag.Bool("model.disks", false, "histories with disks that are emptied, and reinstalled nodes")
	modelStarts    = flag.Bool("model.starts", false, "histories with sandboxes that take time to start")
	modelCalico    = flag.Bool("model.calico", false, "histories with pools of Calico's")
	modelImports   = flag.Bool("model.imports", false, "histories with addresses that are imported from Calico")
	modelRestores  = flag.Bool("model.restores", false, "histories with restores that take seconds, or come twice")
	modelHistories = flag.Int("model.histories", 2000, "histories of the model test")
)

// Random histories of two controllers that both lead, of agents and kubelets, partitions, power losses, forced
// deletions, deleted Nodes, restored backups and users who delete and change, against an oracle of who answers for an
// address. A failure prints the seed and the history; -model.seed replays it. The same histories run each time;
// -model.base makes others, or new ones if it is 0.
func TestRandomHistoriesDoubleNoAddressAndLeakNone(t *testing.T) {
	if *modelBroken != "" && !*modelMutated {
		withSwitches(t, "^"+t.Name()+"$")
		return
	}
	var broken rules
	for one, r := range ruleNames {
		if r.name == *modelBroken {
			broken = 1 << one
		}
	}
	if *modelSeed != 0 {
		w := history(t, *modelSeed, broken, chosen())
		t.Log(w.story())
		if w.bad != "" {
			t.Fatalf("seed %d: %s", *modelSeed, w.bad)
		}
		return
	}
	base := *modelBase
	if base == 0 {
		base = uint64(time.Now().UnixNano())
	}
	t.Logf("seeds %d to %d", base, base+uint64(*modelHistories)-1)
	places, hands, known := 0, 0, 0
	for i := range uint64(*modelHistories) {
		w := history(t, base+i, broken, chosen())
		if w.bad != "" {
			t.Fatalf("seed %d: %s\n%s\nseed %d: %s", base+i, w.bad, w.story(), base+i, w.bad)
		}
		places, hands, known = places+w.places, hands+w.hands, known+w.known
	}
	t.Logf("pods placed: %d; addresses that changed hands: %d; that a backup gave to a second pod: %d",
		places, hands, known)
}

// more is what else there is in a history.
type more int

const (
	nothingMore   more = iota
	otherMachines      // on the link
	adoptedPods        // which another program has started
	routedPools        // all are
	lyingAgent         // of one node
	wrongClocks        // of controllers
	emptyDisks         // of nodes
	slowStarts         // of sandboxes
	hastyRestores
	calicoPools // all are
	importedPods
)

// chosen is what the flags say.
func chosen() more {
	switch {
	case *modelForeign:
		return otherMachines
	case *modelAdopts:
		return adoptedPods
	case *modelRouted:
		return routedPools
	case *modelLies:
		return lyingAgent
	case *modelClocks:
		return wrongClocks
	case *modelDisks:
		return emptyDisks
	case *modelStarts:
		return slowStarts
	case *modelRestores:
		return hastyRestores
	case *modelCalico:
		return calicoPools
	case *modelImports:
		return importedPods
	}
	return nothingMore
}

// The same with other machines on the link, which take addresses of pools, too.
func TestOtherMachinesOnTheLinkDoNoHarm(t *testing.T) {
	conflicts := 0
	for w := range histories(t, 400, otherMachines) {
		conflicts += w.conflicts
	}
	if conflicts == 0 {
		t.Error("no agent reported another machine")
	}
	t.Logf("reports of other machines: %d", conflicts)
}

// Pods that another program has started, with addresses that they were not told of here, keep these until they surely
// have them no more. These histories have no restores, and so are a mode of their own: what the backup lacks of a pod
// that was adopted, no node can tell, and it is the operator's to adopt it again.
func TestAdoptedPodsKeepTheirAddresses(t *testing.T) {
	adopted := 0
	for w := range histories(t, 500, adoptedPods) {
		adopted += w.adopted
	}
	if adopted == 0 {
		t.Error("no pod was adopted")
	}
	t.Logf("pods that were adopted: %d", adopted)
}

// With routed pools, agents say of a pod that it is on their node before it has its address: that makes nothing less
// safe, and nodes never route to another pod than the one that answers.
func TestOtherNodesRouteToThePodThatAnswers(t *testing.T) {
	hands, early := 0, 0
	for w := range histories(t, 500, routedPools) {
		hands, early = hands+w.hands, early+w.early
	}
	if hands == 0 || early == 0 {
		t.Errorf("%d addresses changed hands, and to %d pods nodes routed before they started", hands, early)
	}
	t.Logf("addresses that changed hands: %d; pods that nodes routed to before they started: %d", hands, early)
}

// An agent that writes all that its policy lets it write harms the pods of its own node only.
func TestAnAgentThatLiesHarmsNoPodOfAnotherNode(t *testing.T) {
	lies := 0
	for w := range histories(t, 500, lyingAgent) {
		lies += w.lies
	}
	if lies == 0 {
		t.Error("no agent told a lie that was written")
	}
	t.Logf("lies: %d", lies)
}

// Controllers have clocks of their own, which are wrong now and then. No restore goes unnoticed for that.
func TestWrongClocksOfControllersDoNoHarm(t *testing.T) {
	for range histories(t, 500, wrongClocks) {
	}
}

// A node may lose what it keeps on disk, while its pods run or while it is off, and may be another machine under its
// old name: the plugin gives no address before the agent has noticed, and then only by the agent's word.
func TestNodesThatLoseTheirDisksDoNoHarm(t *testing.T) {
	wiped := 0
	for w := range histories(t, 300, emptyDisks) {
		wiped += w.wiped
	}
	if wiped == 0 {
		t.Error("no files were lost while pods ran")
	}
	t.Logf("pods whose files were lost while they ran: %d", wiped)
}

// A sandbox is there before its ADD, and an ADD takes time: meanwhile its pod is deleted, nodes are asked, the agent or
// the runtime restarts.
func TestASandboxThatTakesTimeToStartDoesNoHarm(t *testing.T) {
	refused := 0
	for w := range histories(t, 300, slowStarts) {
		refused += w.refused
	}
	if refused == 0 {
		t.Error("no ADD was refused whose sandbox had been created before")
	}
	t.Logf("ADDs that were refused: %d", refused)
}

// Restores of a backup that is seconds old, within seconds, or twice in a row.
func TestRestoresThatTakeSecondsAreNoticed(t *testing.T) {
	hasty := 0
	for w := range histories(t, 300, hastyRestores) {
		hasty += w.hasty
	}
	if hasty == 0 {
		t.Error("no restore took seconds")
	}
	t.Logf("restores that took seconds: %d", hasty)
}

// With pools of Calico's, its garbage collection, its plugin, Felix and late DELs are actors, too.
func TestCalicosOwnActorsDoNoHarm(t *testing.T) {
	hands, freed, collected, unblocked := 0, 0, 0, 0
	for w := range histories(t, 500, calicoPools) {
		hands, freed, collected = hands+w.hands, freed+w.calico.freed, collected+w.calico.gced
		unblocked += w.calico.unblocked
	}
	if hands == 0 || freed == 0 || collected == 0 || unblocked == 0 {
		t.Errorf("%d addresses changed hands, %d were freed here, %d of them of pods that exist, and %d collected on nodes "+
			"that exist", hands, freed, unblocked, collected)
	}
	t.Logf("addresses that changed hands: %d; freed here: %d, of pods that exist: %d; collected on nodes that exist: %d",
		hands, freed, unblocked, collected)
}

// Ordinary pods want more addresses than there are, and those of some are imported while they run, end and are made
// again: what was read of a pod may be long over.
func TestImportsFromCalicoDoNoHarm(t *testing.T) {
	hands, confirmed := 0, 0
	for w := range histories(t, 500, importedPods) {
		hands, confirmed = hands+w.hands, confirmed+w.calico.confirmed
	}
	if hands == 0 || confirmed == 0 {
		t.Errorf("%d addresses changed hands, and %d were imported", hands, confirmed)
	}
	t.Logf("addresses that changed hands: %d; that were imported: %d", hands, confirmed)
}

// histories yields the first n histories of a mode. The first one that fails ends the test.
func histories(t *testing.T, n uint64, with more) iter.Seq[*world] {
	return func(yield func(*world) bool) {
		for seed := uint64(1); seed <= n; seed++ {
			w := history(t, seed, 0, with)
			if w.bad != "" {
				t.Fatalf("seed %d: %s\n%s\nseed %d: %s", seed, w.bad, w.story(), seed, w.bad)
			}
			if !yield(w) {
				return
			}
		}
	}
}

func history(t testing.TB, seed uint64, broken rules, with more) *world {
	w := newWorld(t, rand.New(rand.NewPCG(seed, 0)), broken)
	total, deeds := 0, deeds
	switch with {
	case otherMachines:
		w.foreign, deeds = map[netip.Addr]bool{}, foreigners
	case routedPools:
		w.routed = true
		for _, name := range w.pools.keys() {
			is := w.pools.objs[name]
			is.Spec.Mode = Routed
			w.pools.put(name, is)
		}
	case lyingAgent:
		w.liar, deeds = pickOne(w.r, w.nodes), append(slices.Clone(deeds), deed{25, func(w *world) { w.lie() }})
	case wrongClocks:
		w.clocks, deeds = true, append(slices.Clone(deeds), deed{8, func(w *world) { w.jump() }})
		w.setClocks()
	case emptyDisks:
		deeds = append(slices.Clone(deeds), deed{6, func(w *world) { w.wipe(pickOne(w.r, w.nodes)) }},
			deed{4, func(w *world) { w.wipeAfterEnds(pickOne(w.r, w.nodes)) }},
			deed{4, func(w *world) { w.reinstall(pickOne(w.r, w.nodes)) }})
	case slowStarts:
		w.slow, deeds = true, append(slices.Clone(deeds), deed{5, func(w *world) { w.agentRestarts(pickOne(w.r, w.nodes)) }},
			deed{5, func(w *world) { w.runtimeRestarts(pickOne(w.r, w.nodes)) }},
			deed{6, func(w *world) { w.deleteStarting() }})
	case calicoPools:
		w.becomeCalico()
		deeds = append(slices.Clone(deeds), deed{8, func(w *world) { w.collects() }},
			deed{4, func(w *world) { w.reinstall(pickOne(w.r, w.nodes)) }},
			deed{6, func(w *world) { w.now = w.now.Add(time.Minute) }})
	case importedPods:
		w.becomeImporting()
		deeds = slices.Concat(deeds, importDeeds, []deed{{8, func(w *world) { w.collects() }}})
	case hastyRestores:
		deeds = append(slices.Clone(deeds), deed{5, func(w *world) { w.restoreHastily() }})
	case adoptedPods:
		w.adopts, deeds = true, append(slices.Clone(deeds), deed{8, func(w *world) { w.adopt() }})
		w.workloads["old"] = &workload{name: "old", keep: Keep{WhileOwned: true, Scaled: true, Deleted: true},
			wants: []Want{{"net", "eth0", []string{"a4", "b4"}}}}
	}
	for _, d := range deeds {
		total += d.weight
	}
	w.calm = true
	if w.rest(50); w.bad != "" {
		return w
	}
	w.calm = false
	for range 30 + w.r.IntN(90) {
		w.now = w.now.Add(time.Duration(w.r.IntN(4000)) * time.Millisecond)
		k := w.r.IntN(total)
		for _, d := range deeds {
			if k -= d.weight; k < 0 {
				d.do(w)
				break
			}
		}
		if w.oracle(); w.bad != "" {
			return w
		}
	}
	w.settle()
	return w
}

// The model test can fail: without any one of the rules on which safety rests, it does. It is tried from the seed on
// that once did. What no history ever showed, or none of many does any more, has a test of its own: the order of an
// agent's steps, TestTheSearchFindsEachBrokenRule; that other nodes are listed past the caches,
// TestWhatNoVersionCoversIsReadPastTheCaches; that a mark of the future counts as lost,
// TestARestoreIsNoticedThoughAClockWasWrong; that an agent takes a deleted pod down while it believes its node to be
// off, and one of another program once its address is another pod's, TestAnAgentDoesWhatThePodIPSays; that a pod is
// told of nothing that was claimed before a restore, TestAPodIsNotToldOfAnAddressThatARestoreTookBack; what Calico says
// and when, TestWhatCalicoSaidBeforeThePodsEndSaysNothing and TestCalicosWordCountsOnlyWithThatOfTheNode; when a pod
// ended whose end is heard of late, TestAPodsEndIsDatedByTheVersionOfItsDeletion; what a later pod may have,
// TestAnAllocationThatALaterPodOfTheNameMayHaveIsNotFreed; that an ADD of a pod which exists may be about to end, or
// has by now, TestNothingIsFreedThatAnADDIsAboutToNote; the other rules without a seed,
// TestKubeletStartsNothingThatTheClusterHasForgotten and TestAPodThatRunsAlreadyKeepsWhatItRunsWith.
func TestEachRuleIsMissedIfItIsBroken(t *testing.T) {
	if !*modelMutated {
		withSwitches(t, "^(TestEachRuleIsMissedIfItIsBroken|TestKubeletStartsNothingThatTheClusterHasForgotten|"+
			"TestNothingIsFreedThatAnADDIsAboutToNote)$")
		return
	}
	const most = 2500
	for one := range rulesEnd {
		from := ruleNames[one].from
		if from == 0 {
			continue
		}
		t.Run(ruleNames[one].name, func(t *testing.T) {
			for seed := from; seed < from+most; seed++ {
				if w := history(t, seed, 1<<one, ruleNames[one].with); w.bad != "" {
					if whole := history(t, seed, 0, ruleNames[one].with); whole.bad != "" {
						t.Fatalf("seed %d fails with the rule, too: %s", seed, whole.bad)
					}
					t.Logf("seed %d: %s", seed, w.bad)
					return
				}
			}
			t.Errorf("%d histories found nothing", most)
		})
	}
}

var ruleNames = map[rule]struct {
	name string
	from uint64
	with more
}{
	forceDeleteIsNoProof: {"forceDeleteIsNoProof", 10, nothingMore},
	notReadyIsNoProof:    {"notReadyIsNoProof", 12, nothingMore},
	nodeIsLookedUp:       {"nodeIsLookedUp", 10, nothingMore},
	readyIsNotOff:        {"readyIsNotOff", 10, nothingMore},
	nodeIsKnown:          {"nodeIsKnown", 1, lyingAgent},
	restoresAreNoticed:   {"restoresAreNoticed", 14, nothingMore},
	futureIsLost:         {"futureIsLost", 0, wrongClocks},
	restoresWaitForAll:   {"restoresWaitForAll", 209, nothingMore},
	placedSinceMark:      {"placedSinceMark", 0, nothingMore},
	versionsMatter:       {"versionsMatter", 128, nothingMore},
	releaseWaitsForFence: {"releaseWaitsForFence", 8697, nothingMore},
	finalizerHolds:       {"finalizerHolds", 2152, nothingMore},
	annotationsDecide:    {"annotationsDecide", 405, nothingMore},
	goneMeansForGood:     {"goneMeansForGood", 1, nothingMore},
	goneMeansNamespace:   {"goneMeansNamespace", 427, nothingMore},
	recallsEnd:           {"recallsEnd", 3, lyingAgent},
	grantsCount:          {"grantsCount", 1, nothingMore},
	endedOnce:            {"endedOnce", 0, hastyRestores},
	strangersGoDown:      {"strangersGoDown", 3915, nothingMore},
	offGoesDown:          {"offGoesDown", 0, nothingMore},
	foundCounts:          {"foundCounts", 0, adoptedPods},
	unusedIsFreed:        {"unusedIsFreed", 1, nothingMore},
	surplusIsFreed:       {"surplusIsFreed", 199, nothingMore},
	adoptedIsOwn:         {"adoptedIsOwn", 0, nothingMore},
	newestMarkCounts:     {"newestMarkCounts", 0, hastyRestores},
	toldIsTaken:          {"toldIsTaken", 0, hastyRestores},
	roomWakes:            {"roomWakes", 1, nothingMore},
	sharersWake:          {"sharersWake", 1, nothingMore},
	poolsWake:            {"poolsWake", 0, nothingMore},
	collectedIsNoProof:   {"collectedIsNoProof", 138, calicoPools},
	contactIsRecent:      {"contactIsRecent", 111, calicoPools},
	observedSinceEnd:     {"observedSinceEnd", 0, calicoPools},
	endsAreDated:         {"endsAreDated", 0, calicoPools},
	offIsFreed:           {"offIsFreed", 16500, calicoPools},
	addsTakeTime:         {"addsTakeTime", 0, calicoPools},
	forgottenEnds:        {"forgottenEnds", 307, calicoPools},
	importsAreConfirmed:  {"importsAreConfirmed", 1, importedPods},
	laterPodsHaveIt:      {"laterPodsHaveIt", 0, importedPods},
	addsEnd:              {"addsEnd", 0, calicoPools},
	startedIsLookedUp:    {"startedIsLookedUp", 0, calicoPools},
}

// Kubelet may start a pod long after it saw it, as when it waits for a volume: none that the cluster has forgotten
// since.
func TestKubeletStartsNothingThatTheClusterHasForgotten(t *testing.T) {
	withAndWithout := []rules{0, 1 << grantsCount}
	if !*modelMutated {
		withAndWithout = withAndWithout[:1]
	}
	for _, broken := range withAndWithout {
		w := newWorld(t, rand.New(rand.NewPCG(1, 0)), broken)
		w.calm = true
		w.rest(50)
		w.backUp()
		w.workloads["web"].replicas++
		w.workloadsAct()
		for range 2 {
			for _, c := range w.controllers {
				w.sweep(c)
			}
			w.schedule()
		}
		forgotten := w.pods.objs["web-2"]
		n := w.nodes[slices.IndexFunc(w.nodes, func(n *node) bool { return n.name == forgotten.Node })]
		w.kubeletSyncs(n)
		n.kubelet = false
		w.restore()
		delete(n.view, forgotten.UID)
		w.rest(400)
		if again := w.pods.objs["web-2"]; again.UID == forgotten.UID || !again.has(forgotten.Assigned[0].Prefix.Addr()) {
			t.Fatalf("web-2 has not been given its address again: %+v\n%s", again, w.story())
		}
		n.view[forgotten.UID] = forgotten
		w.kubeletActs(n)
		if w.oracle(); (w.bad != "") != (broken != 0) {
			t.Errorf("rules %b broken: %q\n%s", broken, w.bad, w.story())
		}
	}
}

// An ADD of Calico's plugin may take its time until it notes that a pod has the address that it has allocated. If that
// were freed meanwhile, the pod would run without an allocation: that its address is free soon after its end would be
// taken for its node's word, though the node is cut off.
func TestNothingIsFreedThatAnADDIsAboutToNote(t *testing.T) {
	for name, c := range map[string]struct {
		broken rule
		takes  time.Duration // the ADD, from its allocation on
		heard  bool          // that it has ended, by the controllers
	}{
		"it goes on": {addsEnd, 2 * time.Minute, true},
		"it has ended, which no controller has heard of": {startedIsLookedUp, addGivenUp - time.Second, false},
	} {
		withAndWithout := []rules{0, 1 << c.broken}
		if !*modelMutated {
			withAndWithout = withAndWithout[:1]
		}
		for _, broken := range withAndWithout {
			w := newWorld(t, rand.New(rand.NewPCG(1, 0)), broken)
			w.becomeCalico()
			w.calm = true
			w.rest(50)
			sweeps := func() {
				for _, c := range w.controllers {
					w.sweep(c)
				}
			}
			w.workloads["web"].replicas++
			w.workloadsAct()
			sweeps()
			w.schedule()
			pod := w.pods.objs["web-2"]
			n := w.nodes[slices.IndexFunc(w.nodes, func(n *node) bool { return n.name == pod.Node })]
			w.allocate(pod.Assigned[0].Prefix.Addr(), n, pod, "net.1")
			passes := func(d time.Duration) {
				for end := w.now.Add(d); w.now.Before(end); sweeps() {
					w.now = w.now.Add(min(20*time.Second, end.Sub(w.now)))
					w.renews(n)
				}
			}
			passes(c.takes)
			w.calicoStarts(n, pod, pod, "net.1")
			if !c.heard {
				for _, c := range w.controllers {
					c.at[2] = len(w.pods.log) // what was said of the pod is lost
				}
				passes(2 * time.Minute)
				for _, c := range w.controllers {
					w.relist(c, 2)
				}
			}
			sweeps()
			for _, c := range w.controllers {
				c.book.DatePods(strconv.Itoa(w.rev), w.now)
			}
			n.kubelet, n.agent = false, false
			w.delPod("web-2")
			w.makePod(w.workloads["web"], "web-2")
			sweeps()
			next := w.pods.objs["web-2"]
			other := w.nodes[slices.IndexFunc(w.nodes, func(n *node) bool { return n.name != pod.Node })]
			next.Node = other.name
			if next.Assigned != nil {
				w.pods.put("web-2", next)
				w.bound[next.UID] = next.Node
				w.kubeletSyncs(other)
				w.kubeletActs(other)
			}
			if w.oracle(); (w.bad != "") != (broken != 0) {
				t.Errorf("%s: rules %b broken: %q\n%s", name, broken, w.bad, w.story())
			}
		}
	}
}
