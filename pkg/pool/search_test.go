package pool

import (
	"flag"
	"hash/maphash"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// This file visits every interleaving of one address, two nodes, pods of one name that follow each other, a controller
// whose caches lag independently, agents of two threads that end anywhere, power losses, partitions, deletions by
// force, an operator who declares off what has lost its power, and a restored backup. What the controller and the
// agents decide, they decide by MayName, MayPass and NextAction.

var searchDeep = flag.Bool("search.deep", false, "the exhaustive search with more pods and writes, in minutes")

// record is the PodIP: spec.podUID, status, and the version.
type searchIP struct {
	exists   bool
	spec     uint8
	node     uint8
	uid      uint8
	retained bool
	rv       uint8
}

var searchUIDs = []types.UID{"", "1", "2", "3"}
var searchNodes = []string{"", "n1", "n2"}

func (p searchIP) podIP() *PodIP {
	if !p.exists {
		return nil
	}
	ip := &PodIP{PodUID: searchUIDs[p.spec], StatusUID: searchUIDs[p.uid], Node: searchNodes[p.node], Phase: Bound}
	switch {
	case p.retained:
		ip.Phase = Retained
	case p.uid == 0:
		ip.Phase = Allocated
	}
	return ip
}

// A pod's life.
const (
	podNone = iota
	podGated
	podUngated
	podBound
)

// searchPods is what a controller believes of pods.
type searchPods struct{ current, state uint8 }

// The steps of an agent's thread.
const (
	threadIdle     = iota
	grantBegun     // there is an unfinished grant
	grantRead      // the record was read
	grantWritten   // the record names this node
	releaseRead    // the record was read
	releaseRevoked // the grant is gone
)

type searchThread struct {
	step, uid uint8
	read      searchIP
	off       bool // whether its own node was declared off when the record was read
}

type searchNode struct {
	up, link, off bool     // off: an operator declared it
	view          uint8    // UIDs, as bits, that kubelet and agent believe to be bound here
	begun         [2]uint8 // unfinished grants by thread, each under a name of its own
	grant         uint8
	use           uint8 // sandboxes that answer for the address
	reported      uint8 // the epoch that the agent has reported for
	threads       [2]searchThread
}

type searchData struct { // of the API server, as a backup has it
	ip                   searchIP
	rv, current, pod, on uint8
	deleting             bool
}

type searchReport struct {
	done          bool
	held, running uint8
}

type searchState struct {
	searchData
	last   uint8 // the newest UID
	nodes  [2]searchNode
	ip     searchIP   // the controller's view of the record
	pods   searchPods // and of the pods
	offNow bool       // the node in ip was read, past the cache and after ip, to be declared off

	backup    searchData
	backed    bool
	stale     bool // the mark is old, and no controller has seen it
	recalling bool
	epoch     uint8
	reports   [2]searchReport
	faults    int8
	restores  int8
}

type search struct {
	t                  *testing.T
	uids, writes, most int
	threads            [2]int // of the agents
	broken             string
	emit               func(string, searchState)
}

func bit(u uint8) uint8 { return 1 << u }

func (s *searchState) over(u uint8) bool { return u != s.current || s.pod == podNone }

// over takes a pod that the view does not have yet for gone.
func (v searchPods) over(u uint8) bool { return u != v.current || v.state == podNone }

func (m *search) next(s searchState) {
	m.podsGoOn(s)
	m.restoresGoOn(s)
	for i := range s.nodes {
		m.machineGoesOn(s, i)
		if s.nodes[i].up {
			m.agentGoesOn(s, i)
		}
	}
	m.controllerGoesOn(s)
}

func (m *search) podsGoOn(s searchState) {
	if s.pod == podNone && int(s.last) < m.uids {
		t := s
		t.last++
		t.current, t.pod, t.on, t.deleting = t.last, podGated, 0, false
		m.emit("a pod is created", t)
	}
	if s.pod == podNone {
		return
	}
	t := s
	t.pod, t.on, t.deleting = podNone, 0, false
	m.emit("the pod is deleted by force", t)
	if s.pod == podBound && !s.deleting {
		t := s
		t.deleting = true
		m.emit("the pod is deleted", t)
	}
	for i, n := range s.nodes {
		if s.pod == podUngated && !s.deleting && n.up && n.link && !n.off {
			t := s
			t.pod, t.on = podBound, uint8(i+1)
			m.emit("the pod is bound", t)
		}
		if s.pod == podBound && int(s.on) == i+1 && s.deleting && n.up && n.link && n.use&bit(s.current) == 0 {
			t := s
			t.pod, t.on, t.deleting = podNone, 0, false
			m.emit("the pod is gone", t)
		}
	}
}

func (m *search) restoresGoOn(s searchState) {
	if s.restores > 0 && !s.backed {
		t := s
		t.backup, t.backed = s.searchData, true
		m.emit("a backup is made", t)
	}
	if s.backed && s.restores > 0 && s.searchData != s.backup {
		t := s
		t.restores--
		t.searchData, t.stale, t.recalling, t.reports = s.backup, true, false, [2]searchReport{}
		for i := range t.nodes { // what was read before is too old to be written after
			for j := range t.nodes[i].threads {
				if step := t.nodes[i].threads[j].step; (step == grantRead || step >= releaseRead) && m.broken != "oldread" {
					t.nodes[i].threads[j] = searchThread{}
				}
			}
		}
		m.emit("the API server's data are restored", t)
	}
	if s.stale {
		t := s
		t.stale, t.recalling = false, true
		t.epoch++
		m.emit("an epoch begins", t)
	}
	if s.recalling {
		m.epochEnds(s)
	}
}

// epochEnds makes the record say what the reports say, once all nodes have reported or are off.
func (m *search) epochEnds(s searchState) {
	var on, uid uint8
	weight := -1
	for i, r := range s.reports {
		if !r.done && !(s.nodes[i].off && !s.nodes[i].up) {
			return
		}
		for u := uint8(1); u <= s.last; u++ {
			w := int(r.running>>u&1)*8 + 1
			if Names(s.ip0().podIP(), searchUIDs[u], searchNodes[i+1]) {
				w += 4
			}
			if r.held&bit(u) != 0 && w > weight {
				weight, on, uid = w, uint8(i+1), u
			}
		}
	}
	if int(s.rv) >= m.writes {
		return
	}
	t := s
	t.recalling = false
	if weight >= 0 && m.broken != "norebuild" && !Names(s.ip0().podIP(), searchUIDs[uid], searchNodes[on]) {
		t.rv++
		t.searchData.ip = searchIP{exists: true, spec: uid, node: on, uid: uid, rv: t.rv}
	}
	m.emit("the epoch is over", t)
}

// ip0 is the record as the API server has it.
func (s *searchState) ip0() searchIP { return s.searchData.ip }

func (m *search) machineGoesOn(s searchState, i int) {
	n := s.nodes[i]
	put := func(what string, do func(*searchNode)) {
		t := s
		do(&t.nodes[i])
		m.emit(searchNodes[i+1]+": "+what, t)
	}
	fault := func(what string, do func(*searchNode)) {
		t := s
		t.faults--
		do(&t.nodes[i])
		m.emit(searchNodes[i+1]+": "+what, t)
	}
	if n.up && n.link {
		var view uint8
		if s.pod == podBound && int(s.on) == i+1 {
			view = bit(s.current)
		}
		if view != n.view {
			put("sees its pods", func(n *searchNode) { n.view = view })
		}
	}
	for u := uint8(1); n.up && u <= s.last; u++ {
		if n.view&bit(u) != 0 && n.grant&bit(u) != 0 && n.use&bit(u) == 0 {
			put("ADD", func(n *searchNode) { n.use |= bit(u) })
		}
		if n.use&bit(u) != 0 {
			put("DEL", func(n *searchNode) { n.use &^= bit(u) })
		}
	}
	if n.up && s.faults > 0 {
		fault("loses its power", func(n *searchNode) {
			n.up, n.use, n.view, n.threads = false, 0, 0, [2]searchThread{}
			if m.broken != "boot" {
				n.begun, n.grant = [2]uint8{}, 0
			}
		})
	}
	if n.link && s.faults > 0 {
		fault("is cut off", func(n *searchNode) { n.link = false })
	}
	if !n.up {
		put("has its power again", func(n *searchNode) { n.up = true })
		if !n.off {
			put("is declared off", func(n *searchNode) { n.off = true })
		}
	}
	if !n.link {
		put("is there again", func(n *searchNode) { n.link = true })
	}
	if n.off && n.up && n.link {
		put("is no longer declared off", func(n *searchNode) { n.off = false })
	}
}

// local is what an agent knows, as far as the search has it.
func (m *search) local(s *searchState, i int, u uint8, ip searchIP) Local {
	n := s.nodes[i]
	alive := s.pod == podBound && s.current == u && int(s.on) == i+1
	doubt := Sure
	switch {
	case s.stale || s.recalling:
		doubt = Doubted
	case n.reported != s.epoch:
		doubt = Unasked
	}
	return Local{UID: searchUIDs[u], Node: searchNodes[i+1], Exists: n.view&bit(u) != 0 && (alive || m.broken == "lookup"),
		Here: alive, Off: n.off, Doubt: doubt,
		Granted: n.grant&bit(u) != 0, Netns: n.use&bit(u) != 0, IP: ip.podIP()}
}

func (m *search) agentGoesOn(s searchState, i int) {
	n := s.nodes[i]
	if n.link && s.recalling && !s.reports[i].done {
		t := s
		t.reports[i] = searchReport{true, n.grant | n.use, n.use}
		t.nodes[i].reported = s.epoch
		if m.broken != "unfinished" {
			t.nodes[i].begun = [2]uint8{}
		}
		m.emit(searchNodes[i+1]+": reports", t)
	}
	for u := uint8(1); n.link && u <= s.last; u++ {
		if n.grant&bit(u) == 0 && n.use&bit(u) == 0 {
			continue
		}
		if a := NextAction(m.local(&s, i, u, s.ip0())); a.Down || a.Revoke && a.Report == "" {
			t := s
			t.nodes[i].grant &^= bit(u)
			t.nodes[i].use &^= bit(u)
			m.emit(searchNodes[i+1]+": ends what is not its own", t)
		}
	}
	for j := range m.threads[i] {
		m.threadGoesOn(s, i, j)
	}
}

func (m *search) threadGoesOn(s searchState, i, j int) {
	n, th := s.nodes[i], s.nodes[i].threads[j]
	put := func(what string, do func(*searchState, *searchNode, *searchThread)) {
		t := s
		do(&t, &t.nodes[i], &t.nodes[i].threads[j])
		m.emit(searchNodes[i+1]+": "+what, t)
	}
	end := func(_ *searchState, n *searchNode, t *searchThread) {
		if *t = (searchThread{}); m.broken != "leftover" {
			n.begun[j] = 0
		}
	}
	if th.step != threadIdle {
		put("the thread ends", end)
	}
	me, u := uint8(i+1), th.uid
	switch th.step {
	case threadIdle:
		if j == 0 || n.threads[0].step != threadIdle { // they are alike
			m.threadBegins(s, i, put)
		}
	case grantBegun:
		shut := s.stale && m.broken != "stalegrant" || s.recalling && m.broken != "opengrant" ||
			n.reported != s.epoch
		if n.link && !shut {
			put("reads the record to grant", func(s *searchState, n *searchNode, t *searchThread) {
				t.step, t.read, t.off = grantRead, s.ip0(), n.off
			})
		}
		if m.broken == "order" {
			put("grants before the write", func(_ *searchState, n *searchNode, t *searchThread) { n.grant |= bit(t.uid) })
		}
	case grantRead:
		may := MayName(th.read.podIP(), searchUIDs[u], searchNodes[me])
		if m.broken == "retained" && th.read.uid == u && th.read.retained {
			may = true
		}
		switch {
		case !may, th.off && m.broken != "offgrant":
			put("may not grant", end)
		case m.broken == "rewrite" && Names(th.read.podIP(), searchUIDs[u], searchNodes[me]):
			put("is named already", func(_ *searchState, _ *searchNode, t *searchThread) { t.step = grantWritten })
		case n.link && int(s.rv) < m.writes:
			m.write(s, th.read, put, end, "names itself", func(ip *searchIP, t *searchThread) {
				ip.node, ip.uid, ip.retained = me, t.uid, false
				t.step, t.read = grantWritten, searchIP{}
			})
		}
	case grantWritten:
		if n.begun[j]&bit(u) != 0 || m.broken == "rename" {
			put("grants", func(_ *searchState, n *searchNode, t *searchThread) {
				n.begun[j], n.grant = 0, n.grant|bit(t.uid)
				*t = searchThread{}
			})
		} else {
			put("finds the grant revoked", end)
		}
	case releaseRead:
		if n.use&bit(u) != 0 && m.broken != "lock" {
			put("finds it in use", end)
		} else {
			put("revokes", func(_ *searchState, n *searchNode, t *searchThread) {
				m.revoke(n, t.uid)
				t.step = releaseRevoked
			})
		}
	case releaseRevoked:
		switch {
		case !n.link:
		case !Names(th.read.podIP(), searchUIDs[u], searchNodes[me]):
			put("has nothing to release", end)
		case int(s.rv) < m.writes:
			m.write(s, th.read, put, end, "says that it is retained", func(ip *searchIP, t *searchThread) {
				ip.retained = true
				*t = searchThread{}
			})
		}
	}
}

func (m *search) revoke(n *searchNode, u uint8) {
	n.grant &^= bit(u)
	for j := range n.begun {
		if m.broken != "oneshot" {
			n.begun[j] &^= bit(u)
		}
	}
}

type searchPut = func(string, func(*searchState, *searchNode, *searchThread))

func (m *search) threadBegins(s searchState, i int, put searchPut) {
	n := s.nodes[i]
	for u := uint8(1); u <= s.last; u++ {
		if n.view&bit(u) != 0 && n.grant&bit(u) == 0 {
			put("begins a grant", func(_ *searchState, n *searchNode, t *searchThread) {
				for j := range n.threads {
					if &n.threads[j] == t {
						n.begun[j] = bit(u)
					}
				}
				*t = searchThread{step: grantBegun, uid: u}
			})
		}
		if !n.link || !s.over(u) || n.use&bit(u) != 0 && m.broken != "lock" ||
			!Names(s.ip0().podIP(), searchUIDs[u], searchNodes[i+1]) {
			continue
		}
		put("reads the record to release", func(s *searchState, _ *searchNode, t *searchThread) {
			*t = searchThread{step: releaseRead, uid: u, read: s.ip0()}
		})
	}
}

// write is a write of the status that is bound to the version that was read.
func (m *search) write(s searchState, read searchIP, put searchPut, end func(*searchState, *searchNode, *searchThread),
	what string, do func(*searchIP, *searchThread)) {
	if !s.ip0().exists || s.ip0() != read && m.broken != "cas" {
		put("finds a conflict", end)
		return
	}
	put(what, func(s *searchState, _ *searchNode, t *searchThread) {
		s.rv++
		do(&s.searchData.ip, t)
		s.searchData.ip.rv = s.rv
	})
}

func (m *search) controllerGoesOn(s searchState) {
	if s.ip != s.ip0() {
		t := s
		t.ip, t.offNow = s.ip0(), false
		m.emit("the controller sees the record", t)
	}
	if on := s.ip.node; s.ip.exists && on != 0 && !s.offNow && s.nodes[on-1].off {
		t := s
		t.offNow = true
		m.emit("the controller reads that the node is off", t)
	}
	now := searchPods{s.current, s.pod}
	if s.pods != now {
		t := s
		t.pods = now
		m.emit("the controller sees the pods", t)
	}
	shut := s.stale || s.recalling
	if v := s.pods; int(s.rv) < m.writes && !shut {
		if !s.ip.exists && v.state == podGated && !s.ip0().exists {
			t := s
			t.rv++
			t.searchData.ip = searchIP{exists: true, spec: v.current, rv: t.rv}
			m.emit("the controller claims the address", t)
		}
		if s.ip.exists && m.mayPass(s) && s.ip0() == s.ip {
			if v.state == podGated && v.current != s.ip.spec {
				t := s
				t.rv++
				t.searchData.ip.spec, t.searchData.ip.rv = v.current, t.rv
				m.emit("the controller gives the address to the next pod", t)
			}
			t := s
			t.rv++
			t.searchData.ip = searchIP{}
			m.emit("the controller frees the address", t)
		}
	}
	if s.ip.exists && s.ip.spec == s.pods.current && s.pods.state == podGated && s.current == s.pods.current &&
		s.pod == podGated && !s.stale && !s.recalling {
		t := s
		t.pod = podUngated
		m.emit("the controller ungates the pod", t)
	}
}

func (m *search) mayPass(s searchState) bool {
	off := func(string) bool { return s.offNow || m.broken == "off" }
	return MayPass(s.ip.podIP(), s.pods.over(s.ip.spec), off) != Closed
}

func (s *searchState) doubled() bool {
	return bits.OnesCount8(s.nodes[0].use)+bits.OnesCount8(s.nodes[1].use) > 1
}

type searchStep struct {
	before *searchStep
	what   string
}

// run visits all states, breadth first, and returns how many there are, and how the address was doubled, if it was.
func (m *search) run(faults, restores int8) (states int, story string) {
	start := searchState{faults: faults, restores: restores}
	for i := range start.nodes {
		start.nodes[i].up, start.nodes[i].link = true, true
	}
	type visit struct {
		state searchState
		by    *searchStep
	}
	seed := maphash.MakeSeed()
	seen := map[uint64]struct{}{maphash.Comparable(seed, start): {}}
	for level := []visit{{state: start}}; len(level) > 0 && story == "" && len(seen) <= m.most; {
		var following []visit
		for _, v := range level {
			m.emit = func(what string, t searchState) {
				h := maphash.Comparable(seed, t)
				if _, known := seen[h]; known || story != "" {
					return
				}
				seen[h] = struct{}{}
				by := &searchStep{v.by, what}
				if t.doubled() {
					var all []string
					for step := by; step != nil; step = step.before {
						all = append(all, step.what)
					}
					slices.Reverse(all)
					story = strings.Join(all, "\n")
				}
				following = append(following, visit{t, by})
			}
			m.next(v.state)
		}
		level = following
	}
	return len(seen), story
}

// setting bounds a search.
type setting struct {
	uids, writes     int
	threads          [2]int
	faults, restores int8
}

var (
	threadsRace = setting{2, 5, [2]int{2, 1}, 0, 0}
	powerIsLost = setting{2, 5, [2]int{1, 1}, 1, 0}
	backupComes = setting{2, 3, [2]int{1, 1}, 0, 1}
	oneBackup   = setting{2, 2, [2]int{1, 1}, 0, 1} // with three writes, as -search.deep has, 7,845,295 states
)

func TestEveryInterleavingHasOneSandboxAtMost(t *testing.T) {
	for name, c := range map[string]setting{"threads": threadsRace, "power": powerIsLost, "backup": oneBackup} {
		t.Run(name, func(t *testing.T) {
			m := &search{t: t, uids: c.uids, writes: c.writes, threads: c.threads, most: 1_000_000_000}
			if *searchDeep {
				m.writes, m.threads = m.writes+1, [2]int{2, 2}
			}
			states, story := m.run(c.faults, c.restores)
			if story != "" {
				t.Fatalf("two sandboxes answer for the address, after %d states:\n%s", states, story)
			}
			t.Logf("%d states", states)
		})
	}
}

// What a search of this size does not find has no line here: that a PodIP is read before its grant is revoked, that
// each node has reported before an epoch is over, and that nothing is given while one is open.
func TestTheSearchFindsEachBrokenRule(t *testing.T) {
	for broken, c := range map[string]setting{
		"order": threadsRace, "cas": threadsRace, "rename": threadsRace, "oneshot": threadsRace, "lock": threadsRace,
		"off":  threadsRace,
		"boot": powerIsLost, "offgrant": powerIsLost, "rewrite": powerIsLost,
		"stalegrant": backupComes, "opengrant": backupComes, "unfinished": backupComes,
		"oldread": backupComes, "norebuild": backupComes,
	} {
		t.Run(broken, func(t *testing.T) {
			m := &search{t: t, uids: c.uids, writes: c.writes, threads: c.threads, most: 4_000_000, broken: broken}
			states, story := m.run(c.faults, c.restores)
			if story == "" {
				t.Errorf("%d states, and none with two sandboxes", states)
			}
			t.Logf("found after %d states", states)
		})
	}
}
