package pool

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Verdict of the fence.
type Verdict int

// The verdicts: the address may change hands; it may soon, without intervention; it may only once an operator has
// acted.
const (
	Yes Verdict = iota
	Wait
	Never
)

// Finding is what the fence says.
type Finding struct {
	Verdict Verdict
	// Reason says what proves that the pod no longer has the address, or what is missing.
	Reason string
	// Remedy is what an operator has to do, if the verdict is Never.
	Remedy string
	// If is what must be so past the caches, too.
	If []Check
	// Frees says that Calico's allocation is to be freed, if If holds: nothing else will.
	Frees bool
	// Contact are nodes whose Leases may bring the proof, and Until is when to look again, zero if a change tells.
	Contact []string
	Until   time.Time
}

// Situation is all that the fence depends on.
type Situation struct {
	Now time.Time
	IP  *PodIP
	// Pod is the pod that the address was given to, nil if the cluster no longer has it.
	Pod *Pod
	// End of that pod, nil if it was not seen.
	End   *End
	Nodes map[string]Node
	// Allocation is what Calico's IPAM says of the address, nil if it was not asked, and Holder the pod that it names, nil
	// if that is not known. Contacts are those of nodes.
	Allocation *Allocation
	Holder     *Pod
	Contacts   map[string]contact
}

// Fence returns what the fence says of an address.
func (f *facts) Fence(p *PodIP, now time.Time) Finding {
	return Fence(f.situation(p, now))
}

func (f *facts) situation(p *PodIP, now time.Time) Situation {
	s := Situation{Now: now, IP: p, Pod: f.pods[p.PodUID], Nodes: f.nodes, Contacts: f.contacts}
	if a, ok := f.allocations[p.Addr]; ok {
		s.Allocation, s.Holder = &a, f.pods[f.named[Owner{Namespace: a.Namespace, Pod: a.Pod}]]
	}
	if end, ok := f.ends[p.PodUID]; ok {
		s.End = &end
	}
	return s
}

// Fence reports whether the pod that an address was given to certainly no longer has it, nor will again: see [MayPass].
// That a pod was deleted, by force or not, proves nothing, nor does a node that is not Ready: its sandbox may live on.
func Fence(s Situation) Finding {
	p := s.IP
	name := p.Namespace + "/" + p.PodName
	switch {
	case p.Mode == Calico:
		return fenceCalico(s)
	case s.Pod.alive():
		return Finding{Verdict: Wait, Reason: fmt.Sprintf("pod %s has it", name)}
	case s.Pod != nil && !s.Pod.Terminal && s.Pod.Node == "":
		return Finding{Verdict: Wait, Reason: fmt.Sprintf("pod %s is being deleted", name)}
	}
	node := p.namedNode()
	n, exists := s.Nodes[node]
	over := s.Pod == nil || s.Pod.Terminal
	switch MayPass(p, over, func(string) bool { return !exists || n.off() }) {
	case Unused:
		f := Finding{Reason: fmt.Sprintf("no node was named for pod %s", name)}
		if s.Pod == nil && s.End == nil { // it may be newer than the cache, and would never start
			f.If = s.podGone()
		}
		return f
	case Ended:
		return Finding{Reason: fmt.Sprintf("node %s reports that pod %s is gone", node, name)}
	case Off:
		return offFinding(node, exists, s.off(node))
	}
	return stillThere(name, node, n, exists)
}

// offFinding is for a node that is deleted, or that an operator has declared off.
func offFinding(node string, exists bool, checks []Check) Finding {
	if !exists {
		return Finding{Reason: fmt.Sprintf("node %s is deleted", node), If: checks}
	}
	return Finding{Reason: fmt.Sprintf("node %s is out of service", node), If: checks}
}

// stillThere is for a pod that may still have the address on its node.
func stillThere(name, node string, n Node, exists bool) Finding {
	if exists && !n.Ready {
		return Finding{Verdict: Never, Remedy: offRemedy,
			Reason: fmt.Sprintf("pod %s may still run on node %s, which is not Ready", name, node)}
	}
	f := Finding{Verdict: Wait, Reason: fmt.Sprintf("node %s has not reported yet that pod %s is gone", node, name)}
	if node == "" {
		f.Reason = fmt.Sprintf("pod %s is being deleted", name)
	}
	if n.Off {
		f.Reason += "; its taint " + OutOfService + " has no effect while the node is Ready"
		f.Remedy = "remove the taint, which is left over"
	}
	return f
}

// known returns the node that the pod has or had by the cluster, empty if it never had one. Without a pod, and without
// its end, no controller that runs has seen it: then ok is false.
func (s Situation) known() (node string, ok bool) {
	switch {
	case s.Pod != nil:
		return s.Pod.Node, true
	case s.End != nil && (s.End.Node != "" || s.End.Final):
		return s.End.Node, true
	}
	return "", false
}

// podGone is the pod of the address, which must not exist.
func (s Situation) podGone() []Check {
	return []Check{{Gone: &Pod{UID: s.IP.PodUID, Namespace: s.IP.Namespace, Name: s.IP.PodName}}}
}

func (s Situation) off(node string) []Check {
	return []Check{{Off: node}}
}

const offRemedy = "bring the node back or, once it is certainly off, delete the Node or taint it " + OutOfService +
	":NoExecute"

// muteAfter is how long a node that is Ready may stay silent before an operator has to act: either no agent has ever
// run there, or none is to run there any more.
const muteAfter = 2 * time.Minute

const muteRemedy = "run the agent there or, if the node is to have none, label the Node " + AgentLabel + "=" + NoAgent

// leftRemedy is for a node where an agent was, and none is to run now. Pods there may still have addresses: that no
// agent is wanted is no proof that they do not.
const leftRemedy = "run the agent there again until it has answered, " +
	"or drain the node, switch it off and delete the Node"

// muteFor tells a node that is late from one that will never report.
type muteFor struct {
	asked    time.Duration          // since nodes were asked
	hadAgent func(node string) bool // whether a node has ever reported, or had an address; nil if reports are not awaited
}

func (m muteFor) isMute() bool { return m.hadAgent != nil && m.asked >= muteAfter }

func (m muteFor) had(node string) bool { return m.hadAgent != nil && m.hadAgent(node) }

// everyone reports whether each node is satisfied, or is off, or can have no address at all.
func everyone(nodes map[string]Node, why string, mutes muteFor, satisfied func(node string) bool) Finding {
	var checks []Check
	var among, silent, mute, left, lost []string
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		among = append(among, name)
		switch n := nodes[name]; {
		case n.Foreign && !mutes.had(name) || satisfied(name):
		case n.off():
			checks = append(checks, Check{Off: name})
		case n.Ready && mutes.isMute() && (n.Foreign || !mutes.had(name)):
			if n.Foreign {
				left = append(left, name)
			} else {
				mute = append(mute, name)
			}
		case n.Ready:
			silent = append(silent, name)
		default:
			lost = append(lost, name)
		}
	}
	switch {
	case lost != nil:
		return Finding{Verdict: Never, Remedy: offRemedy,
			Reason: fmt.Sprintf("%s, and node %s is not Ready", why, few(lost))}
	case mute != nil:
		return Finding{Verdict: Never, Remedy: muteRemedy,
			Reason: fmt.Sprintf("%s, and node %s has never answered", why, few(mute))}
	case left != nil:
		return Finding{Verdict: Never, Remedy: leftRemedy, Reason: fmt.Sprintf(
			"%s, and node %s, where the agent is no longer scheduled, has not answered", why, few(left))}
	case silent != nil:
		return Finding{Verdict: Wait, Reason: fmt.Sprintf("%s; node %s has not answered yet", why, few(silent))}
	}
	checks = append(checks, Check{Among: append(among, "")}) // not nil, also if there are no nodes
	return Finding{Reason: "every node reports that it does not have the pod", If: checks}
}

// few names some of these nodes: of thousands that have not answered yet, a reason that named all would be long, and
// another one with each answer.
func few(nodes []string) string {
	const most = 3
	if len(nodes) > most {
		return strings.Join(nodes[:most], ", ") + " and others"
	}
	return strings.Join(nodes, ", ")
}
