package podip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
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

// reporter follows the PodIPAudit, and reports for its epochs what the node has. mu is held for the fields below it,
// and no other lock is taken meanwhile.
type reporter struct {
	node     string
	api      api
	ledgers  ledger.Options
	log      *slog.Logger
	pods     *podTable
	listing  *listing
	machine  *machine
	troubles *troubles
	now      wake.Signal // there may be something to report
	recalled func()      // is called when an epoch has begun or is over: pods and PodIPs may be others
	// cannotServe is as Options.CannotServe. Tests have their own.
	cannotServe func(mode v1alpha1.PodIPPoolMode) string

	mu    sync.Mutex
	audit *pool.Audit // nil if there is none, or it is not known
	seen  pool.Audit  // the newest one that this process has seen
	// cannot is why pods here cannot have addresses of pools of a mode, empty if they can. A mode is missing while that is
	// not known.
	cannot map[v1alpha1.PodIPPoolMode]string
	// reported is the epoch for which this node has reported, 0 if it is not known, and when it was found out; saidCannot
	// is what the report says of cannot.
	reported   int64
	reportedAt time.Time
	saidCannot map[string]v1alpha1.PodIPReportCause
	begun      int // how many reports were begun
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
	return n.audit != nil && n.reported != n.audit.Epoch
}

// doubt returns what the agent may do by the audit, and how many reports were begun: what was read before one of them
// is not granted after it.
func (n *reporter) doubt() (d pool.Doubt, begun int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.doubtLocked(), n.begun
}

func (n *reporter) doubtLocked() pool.Doubt {
	return pool.DoubtOf(n.audit, n.seen, n.reported, n.machine.now())
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

// followAudit follows the PodIPAudit until ctx is done. While it cannot, the API server's data may be restored.
func (n *reporter) followAudit(ctx context.Context) {
	loop := apiwatch.Loop{What: "the PodIPAudit", List: n.listAudit, Watch: n.api.WatchAudit, Event: n.auditEvent}
	loop.Note = func(err error) {
		if err != nil {
			n.setAudit(nil)
		}
		n.troubles.note("audit", err)
	}
	loop.Run(ctx)
}

func (n *reporter) listAudit(ctx context.Context, c apiwatch.Cycle) (version string, err error) {
	audit, version, err := n.api.Audit(ctx)
	if err != nil {
		return "", err
	}
	if c.Interrupted { // it may have been restored, and the report, too
		n.forgetReport()
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

// setAudit records the audit, nil if there is none, or it is not known. When an epoch begins or is over, PodIPs may be
// others.
func (n *reporter) setAudit(o *v1alpha1.PodIPAudit) {
	n.changed(func() {
		n.audit = nil
		if o != nil {
			r := pool.AuditOf(o)
			n.audit, n.seen = &r, pool.Newest(n.seen, r)
		}
	})
	n.now.Up()
}

// changed makes a change. By it PodIPs may be others, or grants may be given again.
func (n *reporter) changed(change func()) {
	n.mu.Lock()
	doubt, term := n.doubtLocked(), n.seen.Term
	change()
	sure := doubt != pool.Sure && n.doubtLocked() == pool.Sure
	recalled := term != 0 && n.seen.Term != term
	n.mu.Unlock()
	if recalled {
		n.recalled()
	}
	if sure {
		n.pods.enqueueAll()
	}
}

// forgetReport makes the loop read the report again.
func (n *reporter) forgetReport() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reported = 0
}

// run reports for every epoch of the audit until ctx is done.
func (n *reporter) run(ctx context.Context) {
	n.now.Loop(ctx, 0, func(bool) (time.Duration, bool) {
		err := n.report(ctx)
		n.troubles.note("report", err)
		return reportRetry, err != nil
	})
}

// owed returns the audit if its epoch is to be reported for, nil if it was.
func (n *reporter) owed() *pool.Audit {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.audit == nil {
		return nil
	}
	known := n.reported == n.audit.Epoch && maps.Equal(n.cannotLocked(n.saidCannot), n.saidCannot)
	if known && !(n.audit.Recalling && n.machine.now().Sub(n.reportedAt).Abs() > reportAgain) {
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

// report reports what this node has for the epoch of the audit, unless it has.
func (n *reporter) report(ctx context.Context) error {
	// 1. Whether there is anything to report, and all pods are known of which it may be.
	audit := n.owed()
	if audit == nil || !n.listing.isComplete() {
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
	if last != nil && v1alpha1.EpochOf(&last.Spec.Epoch) == audit.Epoch &&
		slices.ContainsFunc(last.OwnerReferences, func(r metav1.OwnerReference) bool { return r.UID == node }) {
		if !maps.Equal(last.Spec.CannotServe, cannot) {
			last.Spec.CannotServe = cannot
			if err := n.api.ApplyReport(ctx, last); err != nil {
				return err
			}
			n.log.Info("Reported which pools pods here cannot have addresses of", "cannotServe", cannot)
		}
		n.noteReported(audit.Epoch, cannot)
		return nil
	}

	// 2. What was read before the report is granted by nobody.
	n.changed(func() { n.begun, n.reported = n.begun+1, 0 })
	if err := n.ledgers.Grants().EndPending(); err != nil {
		return err
	}

	// 3. What is granted and there after that.
	held, err := n.held(ctx)
	if err != nil {
		return err
	}
	report := &v1alpha1.PodIPReport{Spec: v1alpha1.PodIPReportSpec{Epoch: v1alpha1.EpochTime(audit.Epoch), Held: held,
		CannotServe: cannot}}
	report.OwnerReferences = []metav1.OwnerReference{ownerOf(n.node, node)}
	if err := n.api.ApplyReport(ctx, report); err != nil {
		return err
	}
	n.log.Info("Reported held pool addresses", "epoch", audit.Epoch, "held", len(held))
	n.noteReported(audit.Epoch, cannot)
	return nil
}

func ownerOf(node string, uid types.UID) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node, UID: uid}
}

func (n *reporter) noteReported(epoch int64, cannot map[string]v1alpha1.PodIPReportCause) {
	n.changed(func() {
		n.reported, n.reportedAt, n.saidCannot = epoch, n.machine.now(), cannot
		if n.audit != nil && n.audit.Epoch != epoch || !maps.Equal(n.cannotLocked(cannot), cannot) {
			n.now.Up()
		}
	})
}

// unknownPool is the pool of an address that only the ledger knows.
const unknownPool = "unknown"

// errUnknownPod means that an address of a pool is in use, and that it is not known by which pod. A reclamation or a
// DEL ends that.
var errUnknownPod = errors.New("unknown which pod uses it")

// held returns the addresses of pools that pods of this node have, or are granted. The grants are read before the
// machine is looked at: what is not granted by then is started by nobody.
func (n *reporter) held(ctx context.Context) (held []v1alpha1.PodIPHeld, err error) {
	granted, err := n.ledgers.Grants().All()
	if err != nil {
		return nil, err
	}
	s, err := n.machine.see(ctx, nil)
	if err != nil {
		return nil, err
	}
	pods, all := n.concerned(s, granted)
	for _, b := range s.bound {
		switch uid := b.uid(s); {
		case !b.foreign:
		case uid == "":
			return nil, fmt.Errorf("%s of network %s, container %s: %w", b.Addr, b.network, b.Attachment.ContainerID,
				errUnknownPod)
		case pods[uid] == nil && !all[uid]: // of a pod that the cluster has, it says itself which are of pools
			pods[uid] = n.known(uid, s, "")
		}
	}
	var q hostnet.Question
	for _, pod := range pods {
		addrs, err := pod.addrs()
		if err == nil { // else the plugin refuses it
			q.Addrs, q.Netns = append(q.Addrs, addrs...), append(q.Netns, pod.netns...)
		}
	}
	if s, err = n.machine.see(ctx, &q); err != nil {
		return nil, err
	}
	for _, uid := range slices.Sorted(maps.Keys(pods)) {
		its, err := n.heldBy(ctx, s, pods[uid], granted[uid])
		if err != nil {
			return nil, err
		}
		held = append(held, its...)
	}
	return held, nil
}

// concerned returns the pods that may have addresses of pools here, and the UIDs of all pods that the cluster has here.
func (n *reporter) concerned(s *sight, granted map[string]string) (pods map[string]*record, all map[string]bool) {
	known, all := n.pods.uids()
	for uid := range granted {
		known[uid] = true
	}
	for _, sandbox := range s.sandboxes {
		if sandbox.Annotations[v1alpha1.AnnotationAddresses] != "" {
			known[sandbox.Pod.UID] = true
		}
	}
	pods = map[string]*record{}
	for uid := range known {
		pods[uid] = n.known(uid, s, granted[uid])
	}
	return pods, all
}

// known returns what the node knows of a pod: by its grant, its watch and its sandboxes.
func (n *reporter) known(uid string, s *sight, granted string) *record {
	pod, _ := n.pods.get(uid)
	pod.uid, pod.text = uid, cmp.Or(granted, pod.text)
	for _, sandbox := range s.sandboxes {
		if sandbox.Pod.UID == uid {
			pod.learn(sandbox)
		}
	}
	for _, b := range s.bound {
		if b.uid(s) == uid {
			pod.learnName(b.Pod.Namespace, b.Pod.Name)
		}
	}
	return &pod
}

// heldBy returns the addresses of pools that a pod has, or is granted. An annotation alone says nothing.
func (n *reporter) heldBy(ctx context.Context, s *sight, pod *record, granted string) ([]v1alpha1.PodIPHeld, error) {
	addrs, err := pod.addrs()
	if err != nil { // the plugin refuses it
		addrs = nil
	}
	p, err := n.machine.presence(ctx, s, pod.sought(addrs))
	if err != nil || !p.netns() && granted == "" {
		return nil, err
	}
	if pod.namespace == "" || pod.name == "" {
		if p.netns() {
			return nil, fmt.Errorf("pod %s: unknown name", pod.uid)
		}
		return nil, n.revokeUnknown(pod.uid)
	}
	base := v1alpha1.PodIPHeld{PodUID: pod.uid, Namespace: pod.namespace, PodName: pod.name,
		Identity: pod.annotations[v1alpha1.AnnotationIdentity], Running: p.netns()}
	policy := policyOf(pod.annotations, pod.labels)
	base.Retention, base.WhenScaled, base.WhenDeleted = policy.RetainIP(), policy.WhenScaled, policy.WhenDeleted
	var held []v1alpha1.PodIPHeld
	given, err := pod.given()
	if err != nil {
		given = nil
	}
	for _, a := range given {
		if granted != "" || p.has("", []netip.Addr{a.Prefix.Addr()}) || len(p.spaces) > 0 {
			h := base
			h.Address, h.Pool, h.Mode, h.Network, h.Interface = a.Prefix.Addr().String(), a.Pool, a.Mode, a.Network, a.Interface
			held = append(held, h)
		}
	}
	for _, b := range p.entries {
		said := slices.ContainsFunc(given, func(a pool.Address) bool { return a.Prefix.Addr() == b.Addr })
		if said || !b.foreign {
			continue
		}
		h := base
		h.Address, h.Pool, h.Mode, h.Network, h.Interface = b.Addr.String(), unknownPool, v1alpha1.ModeL2, b.network,
			cmp.Or(b.Attachment.IfName, ledger.PodInterface)
		held = append(held, h)
	}
	return held, nil
}

// revokeUnknown ends the grant of a pod that the cluster has no more, and that does not run: nothing tells its name.
func (n *reporter) revokeUnknown(uid string) error {
	has, err := ledger.Revoke(n.ledgers, uid)
	if err == nil && len(has) > 0 {
		err = fmt.Errorf("pod %s: it has just started", uid)
	}
	return err
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
