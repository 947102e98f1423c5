package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

// life is one pod from its creation to its end, as the API server shows it.
type life struct {
	set       *workload
	name, uid string
	node      string
	ip        netip.Addr
	ready     bool
	deleting  bool
	gated     bool

	created   time.Time // by the API server, in whole seconds
	scheduled time.Time // the same
	addressed time.Time // when its address was seen
	readied   time.Time // when it became Ready, by its condition
	ungated   time.Time // when it was first seen without gate
	left      time.Time // the first sign of its end; zero while it is Ready
	gone      time.Time

	before    []*life  // of the same name, the newest last
	records   []string // the nodes that the PersistentPodState had at its creation and when it got a node
	published bool     // the RetainedIP that makes the place it is due at its home was there when it got a node
	gatedFor  time.Duration
	waitsFor  time.Duration // gated although its home could take it
}

func (l *life) String() string {
	s := l.name + " (" + l.uid[:min(len(l.uid), 8)] + ")"
	if l.node != "" {
		s += " on " + l.node
	}
	if l.ip.IsValid() {
		s += " with " + l.ip.String()
	}
	return s
}

// lives follows the pods, and judges them by what docs/guarantees.md promises: it is the observer of the API. Its
// methods may be called concurrently.
type lives struct {
	report  *report
	weather *weather
	now     func() time.Time
	nodes   []string // their names

	mu       sync.Mutex
	current  map[string]*life
	past     map[string][]*life // of pods that come home, the newest last
	arrived  []*life            // to be judged
	objects  map[string]*v1alpha1.RetainedIP
	released map[home]time.Time
	records  map[string]string    // pod -> node
	dropped  map[string]time.Time // pod -> when its record was seen to go
	unfit    map[string]func()    // nodes that take no pods, and how to note the end of that
	missing  map[string]func()    // Nodes that are deleted
	wants    map[string][]wanted
	doubled  map[string]time.Time // pairs of pods with one IP, since when
	ticked   time.Time
	over     bool // the workloads are deleted
}

// home is a pod and a node.
type home struct{ pod, node string }

// wanted is how many pods a workload wants from some time on.
type wanted struct {
	at       time.Time
	replicas int32
}

func newLives(r *report, w *weather) *lives {
	return &lives{
		report: r, weather: w, now: r.now,
		current: map[string]*life{}, past: map[string][]*life{}, objects: map[string]*v1alpha1.RetainedIP{},
		released: map[home]time.Time{}, records: map[string]string{}, dropped: map[string]time.Time{},
		unfit: map[string]func(){}, missing: map[string]func(){}, wants: map[string][]wanted{},
		doubled: map[string]time.Time{},
	}
}

func deletedNode(name string) string { return "Node " + name }

// seePod takes note of the state of a pod.
func (l *lives) seePod(pod *corev1.Pod) {
	set := setOf(pod)
	if set == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	is := l.current[pod.Name]
	if is != nil && is.uid != string(pod.UID) {
		l.endLocked(is, now)
		is = nil
	}
	if is == nil {
		is = &life{
			set: set, name: pod.Name, uid: string(pod.UID), created: pod.CreationTimestamp.Time,
			before: l.past[pod.Name], records: []string{l.records[pod.Name]},
		}
		l.current[pod.Name] = is
		l.report.note("created: %s", is)
	}
	if is.gated = gated(pod); !is.gated && is.ungated.IsZero() {
		is.ungated = now
	}
	if pod.Spec.NodeName != "" && is.node == "" {
		is.node, is.scheduled = pod.Spec.NodeName, changedAt(pod, corev1.PodScheduled, now)
		is.records = append(is.records, l.records[pod.Name])
		if want, _ := is.due(); want != nil {
			r := l.objects[v1alpha1.RetainedIPName(is.name, want.node)]
			is.published = r != nil && r.Spec.Scheduled != ""
		}
		l.report.note("bound: %s", is)
	}
	if ip, err := netip.ParseAddr(pod.Status.PodIP); err == nil && ip != is.ip {
		was := is.ip
		is.ip = ip
		l.report.note("has its address: %s", is)
		if was.IsValid() {
			l.changedLocked(is, was, now)
		} else {
			is.addressed = now
			l.arrived = append(l.arrived, is)
		}
	}
	is.deleting, is.ready = pod.DeletionTimestamp != nil, lab.Ready(pod)
	if is.ready {
		is.left, is.readied = time.Time{}, changedAt(pod, corev1.PodReady, now)
	} else if is.left.IsZero() && is.ip.IsValid() {
		is.left = now
	}
}

func gated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == v1alpha1.PlacementGate
	})
}

// changedAt returns when a condition of a pod became true, or now.
func changedAt(pod *corev1.Pod, condition corev1.PodConditionType, now time.Time) time.Time {
	for _, c := range pod.Status.Conditions {
		if c.Type == condition && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time
		}
	}
	return now
}

// gonePod takes note that a pod is deleted.
func (l *lives) gonePod(pod *corev1.Pod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if is := l.current[pod.Name]; is != nil && is.uid == string(pod.UID) {
		l.endLocked(is, l.now())
	}
}

func (l *lives) endLocked(is *life, now time.Time) {
	if is.gone = now; is.left.IsZero() {
		is.left = now
	}
	is.ready = false
	delete(l.current, is.name)
	if is.set.comesHome() {
		l.past[is.name] = append(l.past[is.name], is)
	}
	l.report.note("gone: %s", is)
}

// due returns the pod's last predecessor with an address, and the nodes to which later ones were bound without showing
// an address: they may be its home too.
func (l *life) due() (want *life, perhaps []string) {
	for _, was := range slices.Backward(l.before) {
		if was.ip.IsValid() {
			return was, perhaps
		}
		if was.node != "" {
			perhaps = append(perhaps, was.node)
		}
	}
	return nil, nil
}

// settled is how long after its start a pod is judged: until then what explains it may be on its way.
const settled = 5 * time.Second

// tick judges what is due. It is called every second or so.
func (l *lives) tick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	waiting := l.arrived[:0]
	for _, is := range l.arrived {
		if now.Sub(is.addressed) < settled {
			waiting = append(waiting, is)
		} else if is.set.comesHome() {
			l.judgeLocked(is)
		}
	}
	l.arrived = waiting
	passed := time.Duration(0)
	if !l.ticked.IsZero() {
		passed = now.Sub(l.ticked)
	}
	l.ticked = now
	for _, is := range l.current {
		l.gateLocked(is, passed, now)
	}
	l.doublesLocked(now)
}

// judgeLocked judges where a pod came to.
func (l *lives) judgeLocked(is *life) {
	want, perhaps := is.due()
	if want == nil {
		return
	}
	node := want.node
	if is.set.recorded {
		if node = is.records[0]; node == "" {
			l.report.count(tableExcused, "not recorded yet")
			return
		}
		if at, dropped := l.dropped[is.name]; dropped && at.After(want.addressed) && !at.After(is.addressed) {
			l.report.count(tableExcused, "its record was dropped")
			return
		}
	}
	switch {
	case is.set.recorded && slices.Contains(is.records, is.node), is.node == node && is.ip == want.ip:
		l.report.count(tableReturns, "home")
		return
	case l.endedLocked(is, want):
		l.report.count(tableExcused, "the promise was over")
		return
	case is.node == node:
		l.report.violation("return of "+is.uid, "%s came home and lost its address: it was %s, last seen %s",
			is, want, clock(want.left))
		return
	}
	why := l.excuseLocked(is, want, node, perhaps)
	if why == "" {
		l.report.violation("return of "+is.uid, "%s did not come home to %s: it was %s, last seen %s; broken meanwhile: %s",
			is, node, want, clock(want.left), orNothing(l.weather.between(want.left, l.now(), node, agentOf(node), theServer,
				theController, theObjects)))
		return
	}
	l.report.count(tableExcused, why)
	l.report.note("not home, %s: %s was %s", why, is, want)
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05.000") }

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

// endedLocked reports whether the promise on a pod's address may have ended, by time or by a release.
func (l *lives) endedLocked(is, want *life) bool {
	if r := is.set.retention(); r != forever {
		if is.addressed.Sub(want.left) > r/2 {
			return true
		}
		// When a pod stops on a node in trouble is not known to the second.
		if r < lately && l.weather.between(want.left.Add(-lately), is.addressed, want.node, theServer) != "" {
			return true
		}
	}
	at, released := l.released[home{is.name, want.node}]
	return released && at.After(want.addressed)
}

// excuseLocked returns why a pod may be on another node than its home, empty if it may not.
func (l *lives) excuseLocked(is, want *life, node string, perhaps []string) string {
	const slack = 2 * time.Second // timestamps are in whole seconds
	switch {
	case slices.Contains(perhaps, is.node):
		return "its predecessor may have had an address there"
	case l.weather.between(want.left, is.scheduled, deletedNode(node)) != "":
		return "its home was deleted"
	}
	wait := is.set.homeWait()
	broken := l.weather.between(want.left, is.scheduled.Add(slack), node) != ""
	if is.scheduled.Sub(is.created) >= wait-slack && broken {
		return "it waited for its home in vain"
	}
	for _, was := range slices.Backward(is.before) {
		if was.node != "" {
			break
		}
		if !was.ungated.IsZero() && was.gone.Sub(was.ungated) >= wait-slack && broken {
			return "its home had no room in time"
		}
	}
	// Whoever could tell the controller of the home was broken as well.
	if !is.set.recorded && !is.published && l.weather.between(want.addressed, is.scheduled.Add(slack), agentOf(node),
		theServer, theController) != "" {
		return "its home was not published"
	}
	return ""
}

// changedLocked judges another address of the same pod, after its sandbox was made again. With a shared identity a
// sibling may have taken the first one meanwhile.
func (l *lives) changedLocked(is *life, was netip.Addr, now time.Time) {
	if is.set.retain == "" || is.set.identity != "" {
		return
	}
	before := *is
	before.ip = was
	if before.left.IsZero() {
		before.left = now
	}
	after := *is
	after.addressed = now
	if l.endedLocked(&after, &before) {
		l.report.count(tableExcused, "the promise was over")
		return
	}
	l.report.violation(fmt.Sprint("address of ", is.uid, was), "%s had %s, and started again with another address",
		is, was)
}

// patience is how long a pod may be gated after its time is over, or while its home can take it, in a cluster with API
// server and controller: another one may have to take over first.
const patience = 60 * time.Second

// gateLocked judges how long a pod has been gated.
func (l *lives) gateLocked(is *life, passed time.Duration, now time.Time) {
	if !is.gated || is.deleting {
		return
	}
	if l.weather.between(now.Add(-passed), now, theServer, theController) != "" {
		is.waitsFor = 0
		return
	}
	is.gatedFor += passed
	subjects := []string{}
	for _, n := range l.nodes {
		subjects = append(subjects, n, agentOf(n))
	}
	if l.weather.between(now.Add(-passed), now, subjects...) == "" {
		is.waitsFor += passed
	} else {
		is.waitsFor = 0
	}
	wait := is.set.homeWait()
	if wait != forever && is.gatedFor > wait+patience || is.waitsFor > patience {
		l.report.violation("gate of "+is.uid,
			"%s has been gated for %s with a controller at work, %s of it with all nodes up",
			is, is.gatedFor.Round(time.Second), is.waitsFor.Round(time.Second))
	}
}

// doublesLocked looks for two pods with one IP.
func (l *lives) doublesLocked(now time.Time) {
	byIP := map[netip.Addr][]*life{}
	for _, is := range l.current {
		if is.ready && !is.deleting && is.ip.IsValid() {
			byIP[is.ip] = append(byIP[is.ip], is)
		}
	}
	seen := map[string]bool{}
	for ip, all := range byIP {
		if len(all) < 2 {
			continue
		}
		slices.SortFunc(all, func(a, b *life) int { return strings.Compare(a.uid, b.uid) })
		a, b := all[0], all[1]
		pair := a.uid + b.uid
		seen[pair] = true
		if l.doubled[pair].IsZero() {
			l.doubled[pair] = now
		}
		// Until kubelet has caught up, a pod shows an address that it has lost.
		sure := a.set.outlasts() && b.set.outlasts() || l.weather.calm(a.node, theServer)
		if sure && now.Sub(l.doubled[pair]) > settled {
			l.report.violation("doubled "+pair, "%s is the IP of both %s and %s", ip, a, b)
		}
	}
	for pair := range l.doubled {
		if !seen[pair] {
			delete(l.doubled, pair)
		}
	}
}

// seeObject takes note of a RetainedIP, and judges its release.
func (l *lives) seeObject(r *v1alpha1.RetainedIP) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.objects[r.Name]
	l.objects[r.Name] = r
	if r.Spec.Release == "" || was != nil && was.UID == r.UID && was.Spec.Release != "" {
		return
	}
	l.released[home{r.Spec.PodName, r.Spec.NodeName}] = l.now()
	l.report.note("released: %s %v", r.Name, r.Status.IPs)
	if why := l.unreleasableLocked(r); why != "" {
		l.report.violation("release of "+r.Name, "RetainedIP %s %v is released, but %s", r.Name, r.Status.IPs, why)
	}
}

// goneObject takes note of a deleted RetainedIP.
func (l *lives) goneObject(r *v1alpha1.RetainedIP) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if is := l.objects[r.Name]; is != nil && is.UID == r.UID {
		delete(l.objects, r.Name)
	}
}

// rooted is for how long a pod must have been Ready elsewhere before its earlier addresses are released.
const rooted = 10 * time.Minute

// unreleasableLocked returns why addresses must not be released, empty if they may.
func (l *lives) unreleasableLocked(r *v1alpha1.RetainedIP) string {
	if l.over {
		return ""
	}
	if r.Spec.Retention != v1alpha1.RetentionWhileOwned {
		return "they are kept for " + r.Spec.Retention
	}
	if is := l.current[r.Spec.PodName]; is != nil && is.node != "" && is.node != r.Spec.NodeName &&
		r.Spec.WhenMoved == v1alpha1.PolicyRelease && is.ready && l.now().Sub(is.readied) >= rooted-settled {
		return ""
	}
	set, ordinal := setNamed(r.Spec.PodName)
	if set == nil {
		return "their workload exists"
	}
	if set.scaledDown || l.leastWantedLocked(set) > ordinal {
		return fmt.Sprintf("%s wants the pod", set.name)
	}
	return ""
}

// scaled takes note of how many pods a workload wants.
func (l *lives) scaled(set *workload, replicas int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wants[set.name] = append(l.wants[set.name], wanted{l.now(), replicas})
}

// leastWantedLocked returns the fewest pods that a workload wanted in the last two minutes.
func (l *lives) leastWantedLocked(set *workload) int32 {
	least, now := set.replicas, l.now()
	all := l.wants[set.name]
	for i, w := range all {
		if i == len(all)-1 || now.Sub(all[i+1].at) < 2*time.Minute {
			least = min(least, w.replicas)
		}
	}
	return least
}

// seeRecord takes note of a PersistentPodState, which has its workload's name, and judges which records went.
func (l *lives) seeRecord(s *kruisev1alpha1.PersistentPodState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLocked(s)
	for pod, is := range s.Status.PodStates {
		if l.records[pod] != is.NodeName {
			l.report.note("recorded: %s on %s", pod, is.NodeName)
		}
		l.records[pod] = is.NodeName
	}
}

// goneRecord takes note of a deleted PersistentPodState.
func (l *lives) goneRecord(s *kruisev1alpha1.PersistentPodState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s = s.DeepCopy()
	s.Status.PodStates = nil
	l.dropLocked(s)
}

// dropLocked drops the records that a PersistentPodState no longer has: only those of pods that are not wanted may go.
func (l *lives) dropLocked(s *kruisev1alpha1.PersistentPodState) {
	for pod, node := range l.records {
		set, ordinal := setNamed(pod)
		if _, still := s.Status.PodStates[pod]; still || set.name != s.Name {
			continue
		}
		delete(l.records, pod)
		l.dropped[pod] = l.now()
		l.report.note("no longer recorded: %s on %s", pod, node)
		if !l.over && l.leastWantedLocked(set) > ordinal {
			l.report.violation(fmt.Sprint("record of ", pod, l.now()),
				"the record of %s, %s, is dropped, but %s wants the pod", pod, node, set.name)
		}
	}
}

// seeNode takes note of whether a node takes pods.
func (l *lives) seeNode(n *corev1.Node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ends := l.missing[n.Name]; ends != nil {
		ends()
		delete(l.missing, n.Name)
	}
	why := ""
	if n.Spec.Unschedulable {
		why = "cordoned"
	}
	for _, t := range n.Spec.Taints {
		if t.Key != corev1.TaintNodeUnschedulable {
			why = "tainted " + t.Key
		}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			why = "not Ready"
		}
	}
	switch ends := l.unfit[n.Name]; {
	case why != "" && ends == nil:
		l.unfit[n.Name] = l.weather.begins(n.Name, why)
		l.report.note("%s is %s", n.Name, why)
	case why == "" && ends != nil:
		ends()
		delete(l.unfit, n.Name)
		l.report.note("%s takes pods", n.Name)
	}
}

// goneNode takes note of a deleted Node.
func (l *lives) goneNode(n *corev1.Node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.missing[n.Name] == nil {
		l.missing[n.Name] = l.weather.begins(deletedNode(n.Name), "deleted")
	}
	if l.unfit[n.Name] == nil {
		l.unfit[n.Name] = l.weather.begins(n.Name, "deleted")
	}
}

// running returns the pods that are Ready, by name.
func (l *lives) running() []life {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []life
	for _, is := range l.current {
		if is.ready && is.ip.IsValid() {
			all = append(all, *is)
		}
	}
	slices.SortFunc(all, func(a, b life) int { return strings.Compare(a.name, b.name) })
	return all
}

// runningOn returns the names of those on a node.
func (l *lives) runningOn(node string) (names []string) {
	for _, is := range l.running() {
		if is.node == node {
			names = append(names, is.name)
		}
	}
	return names
}

// pod returns the present pod of a name.
func (l *lives) pod(name string) (life, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if is := l.current[name]; is != nil {
		return *is, true
	}
	return life{}, false
}

// pods returns the names of a workload's present pods.
func (l *lives) pods(set *workload) (names []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, is := range l.current {
		if is.set == set && !is.deleting {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// recordOf returns the node that is recorded for a pod.
func (l *lives) recordOf(pod string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.records[pod]
}

// releasedAt returns when the addresses of a pod on a node were last seen to be released.
func (l *lives) releasedAt(pod, node string) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.released[home{pod, node}]
}

// end takes note that the workloads are deleted.
func (l *lives) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
}

func (l *lives) isOver() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.over
}
