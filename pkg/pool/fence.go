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
	// Ask says that no proof will come unless all nodes are asked for the pod.
	Ask bool
	// Disputed says that another pod has the address, by what nodes have reported, and that the pod of the PodIP surely
	// no longer has it if If holds.
	Disputed bool
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
	// Reports by node, and the round in which nodes were asked for the pod after its end, zero if they were not.
	Reports map[string]Report
	Asked   int64
	// Held are the nodes that say that the pod is there, or was when they answered.
	Held []string
	// Other returns another pod that has the address by a report which was made since nodes were asked, nil if there is
	// none, and the node. It takes time by what all nodes have reported, and is nil if that says nothing.
	Other func() (*Held, string)
	// Agent reports whether a node has ever answered, or had an address, nil if that is not known. Where agents are wanted
	// may have changed since: such a node is asked like any other.
	Agent func(node string) bool
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
	s := Situation{
		Now: now, IP: p, Pod: f.pods[p.PodUID], Nodes: f.nodes, Reports: f.reports, Asked: f.audit.Asked[p.PodUID],
		Held: f.holders(p.PodUID), Agent: f.hadAgent, Contacts: f.contacts,
	}
	if s.Asked > 0 {
		s.Other = func() (*Held, string) { return f.heldByAnother(p, s.Asked) }
	}
	if a, ok := f.allocations[p.Addr]; ok {
		s.Allocation, s.Holder = &a, f.pods[f.named[Owner{Namespace: a.Namespace, Pod: a.Pod}]]
	}
	if end, ok := f.ends[p.PodUID]; ok {
		s.End = &end
	}
	return s
}

// askAfter is how long the fence waits for a report before nodes are asked for one: longer than an agent is away when
// it is upgraded, or than kubelet takes to remove what is left of a pod.
const askAfter = 30 * time.Second

// Fence reports whether the pod that an address was given to certainly no longer has it, nor will again. That is so if
//
//   - its node's agent says so, in the status of the PodIP or when it was asked, or
//   - it has succeeded or failed, was not told of the address, and its node reports that it is not there, or
//   - it was deleted before it had a node, or
//   - it was deleted, and its node is declared off by an operator and not Ready: the kubelet of a node that is off is
//     silent, or
//   - it was deleted, it is unknown which node it had, and every node reports that the pod is not there, or is off.
//
// That a pod was deleted, by force or not, proves nothing, nor does a node that is not Ready: its sandbox may live on.
// Nor does what another node than the pod's says of it: an agent may lie, or its token may have been stolen. Then it
// can do so about the pods of its own node only, as far as it is known which node a pod had.
func Fence(s Situation) Finding {
	p := s.IP
	name := p.Namespace + "/" + p.PodName
	switch {
	case p.Mode == Calico:
		return fenceCalico(s)
	case s.Pod.alive():
		return Finding{Verdict: Wait, Reason: fmt.Sprintf("pod %s has it", name)}
	case p.gone() && s.believed():
		f := Finding{Reason: fmt.Sprintf("node %s reports that pod %s is gone", p.Node, name)}
		if s.Pod == nil && s.End == nil { // the pod may be newer than the cache, and the report a lie
			f.If = s.podGone()
		}
		return f
	case s.Pod != nil && s.Pod.Node == "":
		return Finding{Verdict: Wait, Reason: fmt.Sprintf("pod %s is being deleted", name)}
	case s.forgotten() && s.answered(s.Pod.Node):
		return Finding{Reason: fmt.Sprintf("node %s reports that it does not have pod %s", s.Pod.Node, name), If: s.over()}
	case s.Pod != nil:
		return Finding{Verdict: Wait, Ask: s.forgotten() && (s.Asked == 0 || s.had(s.Pod.Node)),
			Reason: fmt.Sprintf("node %s has not reported yet that pod %s is gone", s.Pod.Node, name)}
	}
	node, known := s.known()
	said := p.saidOn() // after a restore, a pod may run that has no node by the cluster
	switch {
	case node != "":
		return fenceNode(s, name, node)
	case known && said == "" && s.heldBesides("") == "":
		return Finding{Reason: fmt.Sprintf("pod %s never had a node", name), If: s.podGone()}
	case !known && said != "" && s.heldBesides(said) == "":
		return fenceNode(s, name, said)
	}
	return fenceAll(s, fmt.Sprintf("the node of pod %s is unknown", name))
}

// forgotten reports whether a pod has ended that was not told of its address, since a restore has taken that back: then
// its node may not know that it had it.
func (s Situation) forgotten() bool {
	return s.Pod != nil && s.Pod.Terminal && s.Pod.Assigned == nil && !s.IP.Adopted
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

// believed reports whether the status of the PodIP, which is about the pod, is the word of the pod's own node, or that
// of a controller.
func (s Situation) believed() bool {
	p := s.IP
	switch node, known := s.known(); {
	case known && (node != "" || s.Pod != nil):
		return p.Node == "" || p.Node == node
	}
	return s.heldBesides(p.Node) == ""
}

// heldBesides returns another node that says that the pod is there, empty if there is none.
func (s Situation) heldBesides(node string) string {
	for _, held := range s.Held {
		if held != node {
			return held
		}
	}
	return ""
}

// podGone is the pod of the address, which must not exist.
func (s Situation) podGone() []Check {
	return []Check{{Gone: &Pod{UID: s.IP.PodUID, Namespace: s.IP.Namespace, Name: s.IP.PodName}}}
}

// over is the pod of the address, which must have ended, whether it exists or not.
func (s Situation) over() []Check {
	return []Check{{Over: &Pod{UID: s.IP.PodUID, Namespace: s.IP.Namespace, Name: s.IP.PodName}}}
}

func (s Situation) off(node string) []Check {
	return []Check{{Off: node}}
}

const offRemedy = "bring the node back or, once it is certainly off, delete the Node or taint it " + OutOfService +
	":NoExecute"

// fenceNode is for a pod that was deleted, and was on this node.
func fenceNode(s Situation, name, node string) Finding {
	n, exists := s.Nodes[node]
	switch {
	case !exists:
		return Finding{Reason: fmt.Sprintf("node %s is deleted", node), If: append(s.podGone(), s.off(node)...)}
	case n.off():
		return Finding{Reason: fmt.Sprintf("node %s is out of service", node), If: append(s.podGone(), s.off(node)...)}
	case s.answered(node):
		return s.disputed(Finding{Reason: fmt.Sprintf("node %s reports that it does not have pod %s", node, name)})
	case !n.Ready:
		return Finding{Verdict: Never, Ask: s.Asked == 0,
			Reason: fmt.Sprintf("pod %s may still run on node %s, which is not Ready", name, node),
			Remedy: offRemedy}
	}
	ask := s.Asked == 0 && (s.End == nil || s.Now.Sub(s.End.At) >= askAfter) || s.had(node)
	f := Finding{Verdict: Wait, Ask: ask,
		Reason: fmt.Sprintf("node %s has not reported yet that pod %s is gone", node, name)}
	if n.Off {
		f.Reason += "; its taint " + OutOfService + " has no effect while the node is Ready"
		f.Remedy = "remove the taint, which is left over"
	}
	return f
}

// disputed returns a finding that no node has the address for its pod, unless one has it for another pod: that was told
// of it before a restore, on a node that was said to be off and has come back since.
func (s Situation) disputed(f Finding) Finding {
	if s.Other == nil {
		return f
	}
	if other, on := s.Other(); other != nil {
		f.Verdict, f.Disputed = Wait, true
		f.Reason = fmt.Sprintf("pod %s/%s has it on node %s", other.Namespace, other.PodName, on)
	}
	return f
}

// had reports whether a node had the pod when it was asked, and is to be asked again.
func (s Situation) had(node string) bool {
	a := s.Reports[node]
	return s.Asked > 0 && a.Round >= s.Asked && a.holds(s.IP) && s.Now.Sub(time.Unix(0, s.Asked)) >= askAfter
}

// answered reports whether a node says that the pod is not there, having been asked after the pod's end.
func (s Situation) answered(node string) bool {
	a, ok := s.Reports[node]
	return ok && s.Asked > 0 && a.Round >= s.Asked && !a.holds(s.IP)
}

// muteAfter is how long a node that is Ready may stay silent before an operator has to act: either no agent has ever
// run there, or none is to run there any more.
const muteAfter = 2 * time.Minute

const muteRemedy = "run the agent there or, if the node is to have none, label the Node " + AgentLabel + "=" + NoAgent

// leftRemedy is for a node where an agent was, and none is to run now. Pods there may still have addresses: that no
// agent is wanted is no proof that they do not.
const leftRemedy = "run the agent there again until it has answered, " +
	"or drain the node, switch it off and delete the Node"

// askedFor reports whether nodes were asked so long ago.
func (s Situation) askedFor(d time.Duration) bool {
	return s.Asked > 0 && s.Now.Sub(time.Unix(0, s.Asked)) >= d
}

// hadAgent reports whether a node has ever answered, or had an address.
func (s Situation) hadAgent(node string) bool { return s.Agent != nil && s.Agent(node) }

// fenceAll is for a pod that was deleted, and may have been on any node, if it was on one.
func fenceAll(s Situation, why string) Finding {
	f := everyone(s, why, s.answered)
	if f.Verdict == Yes {
		f.If = append(f.If, s.podGone()...)
		f = s.disputed(f)
	}
	f.Ask = f.Verdict != Yes && (s.Asked == 0 || slices.ContainsFunc(slices.Collect(maps.Keys(s.Nodes)), s.had))
	return f
}

// everyone reports whether each node is satisfied, or is off, or can have no address at all.
func everyone(s Situation, why string, satisfied func(node string) bool) Finding {
	var checks []Check
	var among, silent, mute, left, lost []string
	for _, name := range slices.Sorted(maps.Keys(s.Nodes)) {
		among = append(among, name)
		switch n := s.Nodes[name]; {
		case n.Foreign && !s.hadAgent(name) || satisfied(name):
		case n.off():
			checks = append(checks, s.off(name)...)
		case n.Ready && s.Agent != nil && (n.Foreign || !s.Agent(name)) && s.askedFor(muteAfter):
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
