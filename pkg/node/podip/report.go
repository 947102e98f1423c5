package podip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/pkg/retention"
)

const (
	reportRetry = time.Second
	// reportAgain is how often an agent looks whether a report that a controller still waits for is there: it is deleted
	// with its Node.
	reportAgain = 5 * time.Minute
	// mostWhy is the longest text in PodIPReport.spec.cannotServe, in characters.
	mostWhy = 1024
)

// reporter follows the PodIPAudit, and reports to its rounds for the node. A report is what the node has, seen after
// all pods were listed in the epoch of the audit, and after those that were asked for were barred. mu is held for the
// fields below it, and no other lock is taken meanwhile.
type reporter struct {
	node     string
	api      api
	ledgers  ledger.Options
	log      *slog.Logger
	served   *servedPools
	pods     *podTable
	listing  *listing
	machine  *machine
	troubles *troubles
	now      wake.Signal // there may be something to report
	recalled func()      // is called when PodIPs may be others
	// cannotServe is as Options.CannotServe. Tests have their own.
	cannotServe func(mode v1alpha1.PodIPPoolMode) string

	mu    sync.Mutex
	audit *pool.Audit // nil if there is none, or it is not known
	// cannot is why pods here cannot have addresses of pools of a mode, empty if they can. A mode is missing while that is
	// not known.
	cannot map[v1alpha1.PodIPPoolMode]string
	// reported is the round that this node has reported, 0 if it is not known, and when it was found out; saidCannot is
	// what the report says of cannot.
	reported   int64
	reportedAt time.Time
	saidCannot map[string]v1alpha1.PodIPReportCause
}

// reset is for a Keeper that begins.
func (n *reporter) reset() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.audit, n.reported, n.cannot = nil, 0, map[v1alpha1.PodIPPoolMode]string{}
}

// owes reports whether the node has not reported yet.
func (n *reporter) owes() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.audit != nil && n.reported != n.audit.Round
}

// learnLink finds out whether pods of the node can have addresses of mode L2, until ctx is done. Whether they can have
// routed ones is the router's to find out.
func (n *reporter) learnLink(ctx context.Context) {
	for {
		n.setCannot(v1alpha1.ModeL2, n.cannotServe(v1alpha1.ModeL2))
		if !wake.Pause(ctx, networkAgain) {
			return
		}
	}
}

// setCannot notes why pods here cannot have addresses of a mode, empty if they can.
func (n *reporter) setCannot(mode v1alpha1.PodIPPoolMode, why string) {
	why = strings.ToValidUTF8(why, "?")
	if r := []rune(why); len(r) > mostWhy {
		why = string(r[:mostWhy])
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if known, ok := n.cannot[mode]; !ok || known != why {
		n.cannot[mode] = why
		n.now.Up()
	}
}

// cannotLocked returns what a report is to say of the modes, if the last one says this: of a mode that is not known yet
// the same.
func (n *reporter) cannotLocked(last map[string]v1alpha1.PodIPReportCause) map[string]v1alpha1.PodIPReportCause {
	says := maps.Clone(last)
	for mode, why := range n.cannot {
		switch {
		case why == "":
			delete(says, string(mode))
		case says == nil:
			says = map[string]v1alpha1.PodIPReportCause{string(mode): v1alpha1.PodIPReportCause(why)}
		default:
			says[string(mode)] = v1alpha1.PodIPReportCause(why)
		}
	}
	return says
}

// followAudit follows the PodIPAudit until ctx is done.
func (n *reporter) followAudit(ctx context.Context) {
	n.troubles.follow(ctx, "audit", apiwatch.Loop{
		What: "the PodIPAudit", List: n.listAudit, Watch: n.api.WatchAudit, Event: n.auditEvent,
	})
}

func (n *reporter) listAudit(ctx context.Context, c apiwatch.Cycle) (version string, err error) {
	audit, version, err := n.api.Audit(ctx)
	if err != nil {
		return "", err
	}
	if c.Interrupted { // it may have been restored, and the report, too
		n.doubt()
	}
	n.setAudit(audit)
	return version, nil
}

func (n *reporter) auditEvent(e watch.Event) error {
	audit, ok := e.Object.(*v1alpha1.PodIPAudit)
	switch {
	case !ok || audit.Name != v1alpha1.PodIPAuditName:
	case e.Type == watch.Deleted:
		n.setAudit(nil)
	default:
		n.setAudit(audit)
	}
	return nil
}

// setAudit records the audit, nil if there is none. When a recall begins or is over, PodIPs may be others.
func (n *reporter) setAudit(o *v1alpha1.PodIPAudit) {
	var audit *pool.Audit
	if o != nil {
		r := pool.AuditOf(o)
		audit = &r
	}
	n.mu.Lock()
	was := n.audit
	n.audit = audit
	n.mu.Unlock()
	if audit != nil && was != nil && audit.Term != was.Term {
		n.recalled()
	}
	n.now.Up()
}

// doubt makes the loop read the report again.
func (n *reporter) doubt() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reported = 0
}

// run reports to every round of the audit until ctx is done.
func (n *reporter) run(ctx context.Context) {
	n.now.Loop(ctx, 0, func(bool) (time.Duration, bool) {
		err := n.report(ctx)
		n.troubles.note("report", err)
		return reportRetry, err != nil
	})
}

// owed returns the audit if its round is to be reported to, nil if it was.
func (n *reporter) owed() *pool.Audit {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.audit == nil {
		return nil
	}
	known := n.reported == n.audit.Round && maps.Equal(n.cannotLocked(n.saidCannot), n.saidCannot)
	waited := n.audit.Recalling || len(n.audit.Asked) > 0
	if known && !(waited && n.machine.now().Sub(n.reportedAt).Abs() > reportAgain) {
		return nil
	}
	return n.audit
}

// cannotOf returns what the next report is to say of the modes.
func (n *reporter) cannotOf(last *v1alpha1.PodIPReport) map[string]v1alpha1.PodIPReportCause {
	n.mu.Lock()
	defer n.mu.Unlock()
	if last == nil {
		return n.cannotLocked(nil)
	}
	return n.cannotLocked(last.Spec.CannotServe)
}

// report reports what this node holds to the round of the audit, unless it has.
func (n *reporter) report(ctx context.Context) error {
	// 1. Whether there is anything to report.
	listed := n.listing.isComplete()
	audit := n.owed()
	if audit == nil {
		return nil
	}
	node, err := n.api.Node(ctx)
	if err == nil && node == "" {
		err = fmt.Errorf("Node %s does not exist: cannot report for it", n.node)
	}
	if err != nil {
		return err
	}
	last, err := n.api.Report(ctx)
	if err != nil {
		return err
	}
	cannot := n.cannotOf(last)
	if last != nil && v1alpha1.RoundOf(&last.Spec.Round) >= audit.Round &&
		slices.ContainsFunc(last.OwnerReferences, func(r metav1.OwnerReference) bool { return r.UID == node }) {
		if !maps.Equal(last.Spec.CannotServe, cannot) {
			last.Spec.CannotServe = cannot
			if err := n.api.ApplyReport(ctx, last); err != nil {
				return err
			}
			n.log.Info("Reported which pools pods here cannot have addresses of", "cannotServe", cannot)
		}
		n.noteReported(audit.Round, cannot)
		return nil
	}

	// 2. What is heeded from now on. The files are written again, from a list that is as new as the question.
	if heeded, err := n.heed(ctx, *audit, listed); err != nil || !heeded {
		return err
	}

	// 3. What is there after that.
	s, err := n.see(ctx, *audit)
	if err != nil {
		return err
	}
	held, err := n.held(ctx, s, *audit)
	if err != nil {
		return err
	}
	report := &v1alpha1.PodIPReport{Spec: v1alpha1.PodIPReportSpec{Round: v1alpha1.RoundTime(audit.Round), Held: held,
		CannotServe: cannot}}
	report.OwnerReferences = []metav1.OwnerReference{ownerOf(n.node, node)}
	if err := n.api.ApplyReport(ctx, report); err != nil {
		return err
	}
	n.log.Info("Reported held pool addresses", "round", audit.Round, "held", len(held))
	n.noteReported(audit.Round, cannot)
	return nil
}

// heed has the epoch of an audit begun, and bars the pods that it asks for and that are not here. It returns false if
// the epoch is not begun yet, or the pods are not listed since: the next list calls for the report again.
func (n *reporter) heed(ctx context.Context, audit pool.Audit, listed bool) (bool, error) {
	checked, _, err := ledger.Epoch(n.ledgers)
	if err != nil {
		return false, err
	}
	s, err := n.see(ctx, audit)
	if err != nil {
		return false, err
	}
	reply := pool.Respond(audit, func(uid pool.UID) bool { return n.holds(ctx, s, string(uid)) }, checked)
	if reply.Checked {
		n.listing.recall(audit.Epoch)
		return false, nil
	}
	if !listed {
		return false, nil
	}
	slices.Sort(reply.Bar)
	for _, uid := range reply.Bar {
		if mailbox.ValidPodUID(string(uid)) != nil {
			continue // an address
		}
		if _, err := ledger.Bar(n.ledgers, string(uid)); err != nil {
			return false, err
		}
		n.log.Info("Barred pod: the controller asked for it, and it is not on this node", "pod", uid)
	}
	return true, nil
}

func ownerOf(node string, uid types.UID) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node, UID: uid}
}

func (n *reporter) noteReported(round int64, cannot map[string]v1alpha1.PodIPReportCause) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reported, n.reportedAt, n.saidCannot = round, n.machine.now(), cannot
	if n.audit != nil && n.audit.Round != round || !maps.Equal(n.cannotLocked(cannot), cannot) {
		n.now.Up()
	}
}

// holds reports whether a pod is on the machine, or may be.
func (n *reporter) holds(ctx context.Context, s *sight, uid string) bool {
	p, err := n.machine.presence(ctx, s, n.sought(uid, s))
	return err != nil || p.netns()
}

// sought is a pod with the addresses that it has been given, as far as the node knows.
func (n *reporter) sought(uid string, s *sight) sought {
	pod := n.known(uid, s)
	addrs, err := pod.addrs()
	if err != nil {
		addrs = nil // the plugin refuses such a pod
	}
	pod.uid = uid
	return pod.sought(addrs)
}

// see returns what is on the machine, with the namespaces that may have an address of the pods that a report to an
// audit is about. The runtime is asked twice: the first time says which pods these are.
func (n *reporter) see(ctx context.Context, audit pool.Audit) (*sight, error) {
	s, err := n.machine.see(ctx, nil)
	if err != nil {
		return nil, err
	}
	var q hostnet.Question
	uids := n.concerned(s, audit)
	for _, b := range s.bound {
		uids[b.uid(s)] = true
	}
	for uid := range uids {
		pod := n.sought(uid, s)
		q.Addrs, q.Netns = append(q.Addrs, pod.addrs...), append(q.Netns, pod.netns...)
	}
	return n.machine.see(ctx, &q)
}

// concerned returns the pods that may have addresses of pools here, and those that an audit asks for.
func (n *reporter) concerned(s *sight, audit pool.Audit) map[string]bool {
	uids, _ := n.pods.uids()
	for about := range audit.Asked {
		if mailbox.ValidPodUID(string(about)) == nil {
			uids[string(about)] = true
		}
	}
	for _, sandbox := range s.sandboxes {
		if sandbox.Annotations[v1alpha1.AnnotationAddresses] != "" {
			uids[sandbox.Pod.UID] = true
		}
	}
	return uids
}

// known returns what the node knows of a pod: by its watch and files, else by its sandboxes.
func (n *reporter) known(uid string, s *sight) record {
	pod, _ := n.pods.get(uid)
	for _, sandbox := range s.sandboxes {
		if sandbox.Pod.UID == uid {
			pod.learn(sandbox, n.served)
		}
	}
	for _, b := range s.bound {
		if b.uid(s) == uid && pod.name == "" {
			pod.namespace, pod.name = b.Pod.Namespace, b.Pod.Name
		}
	}
	return pod
}

// unknownPool is the pool of an address that only the ledger knows.
const unknownPool = "unknown"

// errUnknownPod means that an address of a pool is in use, and that it is not known by which pod. A reclamation or a
// DEL ends that.
var errUnknownPod = errors.New("unknown which pod uses it")

// held returns the addresses of pools that pods of this node have.
func (n *reporter) held(ctx context.Context, s *sight, audit pool.Audit) ([]v1alpha1.PodIPHeld, error) {
	_, all := n.pods.uids()
	uids := n.concerned(s, audit)
	wanted := func(b bound) bool {
		_, asked := audit.Asked[pool.UID(b.Addr.String())]
		return asked || b.foreign
	}
	for _, b := range s.bound {
		switch uid := b.uid(s); {
		case !wanted(b):
		case uid == "":
			return nil, fmt.Errorf("%s of network %s, container %s: %w", b.Addr, b.network, b.Attachment.ContainerID,
				errUnknownPod)
		case !b.foreign || !all[uid]: // of a pod that the cluster has, it says itself which are of pools
			uids[uid] = true
		}
	}
	var held []v1alpha1.PodIPHeld
	for _, uid := range slices.Sorted(maps.Keys(uids)) {
		_, asked := audit.Asked[pool.UID(uid)]
		its, err := n.heldBy(ctx, s, uid, asked, wanted)
		if err != nil {
			return nil, err
		}
		held = append(held, its...)
	}
	return held, nil
}

// heldBy returns the addresses of pools that a pod has: those that it was given, and what it has besides, if that is
// wanted. If the pod was asked for and nothing says what it was given, every address of the pod counts.
func (n *reporter) heldBy(ctx context.Context, s *sight, uid string, asked bool, wanted func(bound) bool) (
	[]v1alpha1.PodIPHeld, error) {
	pod := n.known(uid, s)
	addrs, err := pod.addrs()
	if err != nil { // the plugin has refused it
		addrs = nil
	}
	pod.uid = uid
	p, err := n.machine.presence(ctx, s, pod.sought(addrs))
	if err != nil || !p.netns() {
		return nil, err
	}
	given, err := pod.given()
	if err != nil {
		given = nil
	}
	// Of what nothing vouches for, what the ledgers know is true.
	claimed, err := addressesOf(pod.claimed)
	if err != nil {
		claimed = nil
	}
	for _, a := range claimed {
		if slices.ContainsFunc(p.entries, func(b bound) bool { return b.Addr == a.Prefix.Addr() }) {
			given = append(given, a)
		}
	}
	var held []v1alpha1.PodIPHeld
	base := v1alpha1.PodIPHeld{PodUID: uid, Namespace: pod.namespace, PodName: pod.name,
		Identity: pod.annotations[v1alpha1.AnnotationIdentity]}
	policy := policyOf(pod.annotations, pod.labels)
	base.Retention, base.WhenScaled, base.WhenDeleted = policy.RetainIP(), policy.WhenScaled, policy.WhenDeleted
	if base.Namespace == "" || base.PodName == "" {
		return nil, fmt.Errorf("pod %s: unknown name", uid)
	}
	for _, a := range given {
		h := base
		h.Address, h.Pool, h.Mode, h.Network, h.Interface = a.Prefix.Addr().String(), a.Pool,
			a.Mode, a.Network, a.Interface
		held = append(held, h)
	}
	for _, b := range p.entries {
		said := slices.ContainsFunc(given, func(a pool.Address) bool { return a.Prefix.Addr() == b.Addr })
		if said || !wanted(b) && !(asked && len(given) == 0) {
			continue
		}
		h := base
		h.Address, h.Pool, h.Mode, h.Network, h.Interface = b.Addr.String(), unknownPool, v1alpha1.ModeL2, b.network,
			cmp.Or(b.Attachment.IfName, ledger.PodInterface)
		held = append(held, h)
	}
	if asked && len(held) == 0 {
		return nil, fmt.Errorf("pod %s is on this node, but its addresses are unknown", &pod)
	}
	return held, nil
}

// policyOf returns what a pod asks for its addresses. What it asks for badly is kept while owned: a mistake frees no
// address.
func policyOf(annotations, labels map[string]string) retention.Policy {
	policy, err := retention.ParsePooled(annotations, numbered(labels) || annotations[v1alpha1.AnnotationIdentity] != "" ||
		annotations[v1alpha1.AnnotationRetainIP] == retention.WhileOwned)
	if err != nil {
		policy, _ = retention.ParsePooled(nil, true)
	}
	return policy
}

// statefulSetLabels is what the labels begin with that a StatefulSet gives to its pods.
const statefulSetLabels = "statefulset.kubernetes.io/"

// numbered reports whether a pod is one of a StatefulSet, whose names come back.
func numbered(labels map[string]string) bool {
	for label := range labels {
		if strings.HasPrefix(label, statefulSetLabels) {
			return true
		}
	}
	return false
}
