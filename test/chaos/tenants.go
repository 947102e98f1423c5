package main

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

// tenants follows the pods of routed pools: each has its address from its first start to the end of the run, wherever
// it is made again. The methods may be called concurrently.
type tenants struct {
	report  *report
	weather *weather
	nodes   []string // their names
	now     func() time.Time

	mu      sync.Mutex
	current map[string]*tenant // by the pod's name
	was     map[string]string  // the node of the pod of that name that had an address last
	addr    map[string]netip.Addr
	owner   map[netip.Addr]string
	left    map[string]leaving // by the pod's name
	clients map[string]string  // node -> the ordinary pod there that asks
	over    bool               // the workloads are deleted
}

// tenant is a pod as the API server shows it.
type tenant struct {
	uid, node string
	ready     bool
	moved     time.Time // when it was last seen to start or to end
}

// leaving is the end of a pod on a node that was lost.
type leaving struct {
	node string
	at   time.Time // from then on its address may be its successor's
}

func newTenants(r *report, w *weather) *tenants {
	return &tenants{
		report: r, weather: w, now: r.now, left: map[string]leaving{}, current: map[string]*tenant{},
		was:  map[string]string{},
		addr: map[string]netip.Addr{}, owner: map[netip.Addr]string{}, clients: map[string]string{},
	}
}

// clientsLabel is the label app of the pods that ask.
const clientsLabel = "client"

// seePod takes note of the state of a pod, and judges its address.
func (t *tenants) seePod(pod *corev1.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if pod.Labels["app"] == clientsLabel {
		if lab.Ready(pod) {
			t.clients[pod.Spec.NodeName] = pod.Name
		}
		return
	}
	is, now := t.current[pod.Name], t.now()
	if is == nil || is.uid != string(pod.UID) {
		is = &tenant{uid: string(pod.UID), moved: now}
		t.current[pod.Name] = is
		t.report.count(tablePods, "created")
		t.report.note("created: %s (%s)", pod.Name, is.uid)
	}
	if pod.Spec.NodeName != is.node {
		is.node = pod.Spec.NodeName
		t.report.note("bound: %s (%s) to %s", pod.Name, is.uid, is.node)
		t.arrivedLocked(pod.Name, is.uid, is.node, now)
	}
	if ready := lab.Ready(pod); ready != is.ready {
		is.ready, is.moved = ready, now
		t.report.note("Ready is %t: %s (%s) on %s", ready, pod.Name, is.uid, is.node)
		if was := t.was[pod.Name]; ready && was != is.node {
			if t.was[pod.Name] = is.node; was != "" {
				t.report.count(tablePods, "moved to another node")
			}
		}
	}
	addr, err := netip.ParseAddr(pod.Status.PodIP)
	if err != nil {
		return // it has none yet
	}
	switch had, has := t.addr[pod.Name]; {
	case has && had != addr:
		t.report.violation("address of "+pod.Name+addr.String(), "%s had %s and has %s on %s", pod.Name, had, addr, is.node)
	case !has:
		if owner := t.owner[addr]; owner != "" {
			t.report.violation("owner of "+addr.String(), "%s has %s, the address of %s", pod.Name, addr, owner)
			return
		}
		t.addr[pod.Name], t.owner[addr] = addr, pod.Name
	}
}

// gonePod takes note that a pod is deleted.
func (t *tenants) gonePod(pod *corev1.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if is := t.current[pod.Name]; is != nil && is.uid == string(pod.UID) {
		is.ready, is.moved = false, t.now()
		t.report.note("gone: %s (%s) on %s", pod.Name, is.uid, is.node)
		// One that was bound to a lost node and never ran there does not begin the wait again.
		if _, waits := t.left[pod.Name]; !waits && is.node != "" && !t.weather.since(deletedNode(is.node)).IsZero() {
			t.left[pod.Name] = leaving{is.node, t.now()}
		}
	}
	if t.clients[pod.Spec.NodeName] == pod.Name {
		delete(t.clients, pod.Spec.NodeName)
	}
}

// farewell is how long the successor of a pod of a lost node may take to another node, though nothing else is broken.
const farewell = 30 * time.Second

// arrivedLocked judges how long a pod has taken from a node that was lost to another one: since its predecessor was
// gone and the Node deleted or declared out of service.
func (t *tenants) arrivedLocked(pod, uid, node string, now time.Time) {
	if !t.weather.since(deletedNode(node)).IsZero() {
		t.report.count(tableLost, "bound to a node that was lost")
		return
	}
	from, waits := t.left[pod]
	if !waits {
		return
	}
	delete(t.left, pod)
	others := []string{theServer, theController}
	for _, name := range t.nodes {
		if name != from.node {
			others = append(others, name)
		}
	}
	wait := now.Sub(from.at)
	excuse := t.weather.between(from.at.Add(-lately), now, others...)
	t.report.note("%s (%s) came from the lost %s to %s after %.1fs", pod, uid, from.node, node, wait.Seconds())
	switch {
	case wait <= 2*time.Second:
		t.report.count(tableLost, "within 2 s")
	case wait <= farewell:
		t.report.count(tableLost, "within 30 s")
	case excuse != "":
		t.report.count(tableLost, "later, while more was broken")
	default:
		t.report.count(tableLost, "later")
		t.report.violation("wait of "+uid, "%s (%s) took %.0fs from the lost %s to %s", pod, uid, wait.Seconds(), from.node,
			node)
	}
}

// seeIP judges what the API server says of an address.
func (t *tenants) seeIP(ip *v1alpha1.PodIP) {
	t.mu.Lock()
	defer t.mu.Unlock()
	addr, err := netip.ParseAddr(ip.Name)
	if err != nil || t.over {
		return
	}
	if owner := t.owner[addr]; owner != "" && ip.Spec.PodName != owner {
		t.report.violation("PodIP of "+ip.Name, "PodIP %s is given to %s, and was that of %s", ip.Name,
			ip.Spec.PodName, owner)
	}
	if mac := ip.Status.Conflict; mac != "" {
		t.report.violation("conflict of "+ip.Name, "PodIP %s is said to be that of the machine %s", ip.Name, mac)
	}
}

// goneIP judges that an address is free: none is before the end.
func (t *tenants) goneIP(ip *v1alpha1.PodIP) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.over {
		t.report.violation("end of "+ip.Name, "the address %s of %s was freed", ip.Name, ip.Spec.PodName)
	}
}

// end says that the workloads are deleted, and with them the promises.
func (t *tenants) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}

func (t *tenants) ownerOf(a netip.Addr) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.owner[a]
}

func (t *tenants) clientOn(node string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.clients[node]
}

// names returns the pods of a workload that exist, as far as is known.
func (t *tenants) names(workload string) (all []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range t.current {
		if strings.HasPrefix(name, workload+"-") {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

// runningOn returns the pods that are Ready on a node.
func (t *tenants) runningOn(node string) (all []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, is := range t.current {
		if is.node == node && is.ready {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

// restless is for how long after its start or end a pod is asked for more often than others.
const restless = 15 * time.Second

// addresses returns all addresses, and those of pods that have lately started or ended.
func (t *tenants) addresses() (all, moving []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(t.addr)) {
		all = append(all, t.addr[name])
		if is := t.current[name]; is == nil || t.now().Sub(is.moved) < restless {
			moving = append(moving, t.addr[name])
		}
	}
	return all, moving
}
