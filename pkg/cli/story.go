package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/stayput/stayput/pkg/home"
)

// Story is what why -o json prints: all that is known of one pod's address and node.
type Story struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// State is how the pod is, in words. UID, Node and IPs are empty if there is no pod, or it has none.
	State    string   `json:"state"`
	UID      string   `json:"uid,omitempty"`
	Node     string   `json:"node,omitempty"`
	IPs      []string `json:"ips,omitempty"`
	Workload string   `json:"workload,omitempty"` // Kind/name
	// Asked are the annotations about address and node.
	Asked []Asked `json:"asked"`
	// Promise says what is promised, or why nothing is.
	Promise []string `json:"promise"`
	Kept    []Kept   `json:"kept"`
	Record  string   `json:"record,omitempty"`
	// Placement says how the pod came, or comes, to its node.
	Placement []string `json:"placement,omitempty"`
	// Events are those that bear on the nodes and addresses of pods of this name, oldest first.
	Events    []Told   `json:"events"`
	IfDeleted Forecast `json:"ifDeleted"`
	// Unknown is what could not be read, and why.
	Unknown []string `json:"unknown,omitempty"`
}

// Asked is an annotation and what it means.
type Asked struct {
	Annotation string `json:"annotation"`
	Value      string `json:"value"`
	Meaning    string `json:"meaning"`
}

// Kept is a RetainedIP or a PodIP.
type Kept struct {
	Kind      string   `json:"kind"`
	Name      string   `json:"name"`
	IPs       []string `json:"ips"`
	Pool      string   `json:"pool,omitempty"`
	Interface string   `json:"interface,omitempty"`
	Phase     string   `json:"phase"`
	Node      string   `json:"node,omitempty"` // of the pod that has them or had them last
	Why       string   `json:"why"`
	Until     string   `json:"until,omitempty"` // RFC 3339, or never
	// NoHome says why the pod does not go there although the node keeps its addresses, empty if it may.
	NoHome string `json:"noHome,omitempty"`
	// Ledger is what the node says of each address that it keeps.
	Ledger []string `json:"ledger,omitempty"`
	// Held says what an operator has to do so that the address of a pool can change hands, empty if nothing is known.
	Held string `json:"held,omitempty"`
}

// story returns the story that the facts tell.
func (f *facts) story() *Story {
	s := &Story{
		Namespace: f.namespace, Pod: f.name, State: f.podIs(),
		Asked: askedBy(f.annotations()), Promise: f.promise(), Kept: []Kept{}, Record: f.recorded(),
		Placement: f.placement(), Events: f.told(), IfDeleted: f.forecast(), Unknown: f.unknown,
	}
	if f.pod != nil {
		s.UID, s.Node = string(f.pod.UID), f.pod.Spec.NodeName
		for _, ip := range f.pod.Status.PodIPs {
			s.IPs = append(s.IPs, ip.IP)
		}
		if owner, _, ok := home.OwnerOf(f.pod); ok {
			s.Workload = owner.Kind + "/" + owner.Name
		}
	}
	if f.workload != nil {
		s.Workload = f.workload.GetKind() + "/" + f.workload.GetName()
	}
	for _, k := range f.kept {
		s.Kept = append(s.Kept, f.describe(k))
	}
	return s
}

func (f *facts) podIs() string {
	p := f.pod
	if p == nil {
		return "the pod does not exist"
	}
	state := fmt.Sprintf("%s on node %s", strings.ToLower(string(p.Status.Phase)), p.Spec.NodeName)
	switch {
	case p.Spec.NodeName != "" && p.DeletionTimestamp != nil:
		state = "ending on node " + p.Spec.NodeName
	case p.Spec.NodeName != "":
	case home.LastGate(p):
		state = "gated by Stayput"
	case len(p.Spec.SchedulingGates) > 0:
		state = "gated by another program"
	default:
		state = "waiting for the scheduler"
	}
	return state + " for " + duration.HumanDuration(f.now.Sub(p.CreationTimestamp.Time))
}

// write writes the story for people.
func (s *Story) write(w io.Writer, now time.Time) error {
	most := width(w)
	var b strings.Builder
	say := func(text string) { fmt.Fprintf(&b, "  %s\n", wrapped(text, "    ", most-2)) }
	section := func(title string, lines []string) {
		if len(lines) > 0 {
			fmt.Fprintf(&b, "\n%s\n", title)
		}
		for _, line := range lines {
			say(line)
		}
	}
	fmt.Fprintf(&b, "Pod %s/%s\n", printable(s.Namespace), printable(s.Pod))
	state := s.State
	if len(s.IPs) > 0 {
		state += ", with " + strings.Join(s.IPs, ", ")
	}
	if s.Workload != "" {
		state += ", of " + strings.Replace(s.Workload, "/", " ", 1)
	}
	say(state)
	var asked []string
	for _, a := range s.Asked {
		asked = append(asked, a.Annotation+": "+a.Value+" - "+a.Meaning)
	}
	section("What it requests", asked)
	section("What is promised", s.promised())
	node := s.Placement
	if s.Record != "" {
		node = append(slices.Clone(node), s.Record)
	}
	section("Its node", node)
	var happened []string
	for i := range s.Events {
		happened = append(happened, s.Events[i].text(s.Pod, now))
	}
	section("What happened", happened)
	section(s.IfDeleted.Title, s.IfDeleted.Lines)
	section("What could not be read", s.Unknown)
	_, err := io.WriteString(w, b.String())
	return err
}

// promised returns the promises, and what is known of each address.
func (s *Story) promised() []string {
	all := slices.Clone(s.Promise)
	for _, k := range s.Kept {
		line := fmt.Sprintf("%s %s: %s, %s", k.Kind, k.Name, k.Phase, strings.Join(k.IPs, ", "))
		if k.Interface != "" {
			line += ", " + k.Interface
			if k.Node != "" {
				line += ", node " + k.Node
			}
		}
		all = append(all, line)
		for _, more := range []string{k.NoHome, k.Held} {
			if more != "" {
				all = append(all, more)
			}
		}
		for _, l := range k.Ledger {
			all = append(all, "ledger of node "+k.Node+": "+l)
		}
	}
	return all
}
