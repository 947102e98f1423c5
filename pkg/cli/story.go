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

// Story is what -o json prints: one pod's address and node.
type Story struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// State is how the pod is, in words; UID, Node and IPs are empty where there is no pod or it has none.
	State    string   `json:"state"`
	UID      string   `json:"uid,omitempty"`
	Node     string   `json:"node,omitempty"`
	IPs      []string `json:"ips,omitempty"`
	Workload string   `json:"workload,omitempty"` // Kind/name
	// Asked are the annotations about address and node, each with its meaning.
	Asked []Asked `json:"asked"`
	// Promise says in words what is promised, or why nothing is.
	Promise []string `json:"promise"`
	Kept    []Kept   `json:"kept"`
	Record  string   `json:"record,omitempty"`
	// Placement says how the pod came, or comes, to its node.
	Placement []string `json:"placement,omitempty"`
	// Lives are the pods of this name of which something is known, Events what bore on their nodes and addresses.
	Lives     []Life   `json:"lives"`
	Events    []Told   `json:"events"`
	IfDeleted Forecast `json:"ifDeleted"`
	// Unknown is what could not be found out.
	Unknown []string `json:"unknown,omitempty"`
}

// Asked is an annotation.
type Asked struct {
	Annotation string `json:"annotation"`
	Value      string `json:"value"`
	Meaning    string `json:"meaning"`
}

// Kept is a RetainedIP and what the ledger of its node says of it.
type Kept struct {
	RetainedIP string   `json:"retainedIP"`
	Node       string   `json:"node"`
	IPs        []string `json:"ips"`
	Phase      string   `json:"phase"`
	Why        string   `json:"why"`
	Until      string   `json:"until,omitempty"` // RFC 3339, or never
	Ledger     []string `json:"ledger,omitempty"`
}

// story tells what the facts say.
func (f *facts) story() *Story {
	s := &Story{Namespace: f.namespace, Pod: f.name, Asked: []Asked{}, Kept: []Kept{}, Unknown: f.unknown}
	s.State = f.podIs()
	if f.pod != nil {
		s.UID, s.Node = string(f.pod.UID), f.pod.Spec.NodeName
		for _, ip := range f.pod.Status.PodIPs {
			s.IPs = append(s.IPs, ip.IP)
		}
	}
	if f.workload != nil {
		s.Workload = f.workload.GetKind() + "/" + f.workload.GetName()
	} else if owner, ok := f.owner(); ok {
		s.Workload = owner.Kind + "/" + owner.Name
	}
	s.Asked = askedBy(f.annotations())
	s.Promise = f.promise()
	for i := range f.kept {
		s.Kept = append(s.Kept, f.keptBy(&f.kept[i]))
	}
	s.Record = f.recorded()
	s.Placement = f.placement()
	s.Lives, s.Events = f.lives(), f.told()
	s.IfDeleted = f.forecast()
	return s
}

func (f *facts) podIs() string {
	p := f.pod
	if p == nil {
		return "there is no such pod now"
	}
	is := fmt.Sprintf("%s on node %s", strings.ToLower(string(p.Status.Phase)), p.Spec.NodeName)
	switch {
	case p.DeletionTimestamp != nil && p.Spec.NodeName != "":
		is = "is ending on node " + p.Spec.NodeName
	case p.Spec.NodeName == "" && home.Gated(p):
		is = "waits, gated, for its placement by stayput"
	case p.Spec.NodeName == "" && len(p.Spec.SchedulingGates) > 0:
		is = "waits, gated by somebody else than stayput"
	case p.Spec.NodeName == "":
		is = "waits for the scheduler"
	}
	return is + ", for " + duration.HumanDuration(f.now.Sub(p.CreationTimestamp.Time))
}

// write tells a story to people.
func (s *Story) write(w io.Writer, now time.Time) error {
	most := width(w)
	var b strings.Builder
	section := func(title string) { fmt.Fprintf(&b, "\n%s\n", title) }
	say := func(text string) { fmt.Fprintf(&b, "  %s\n", wrapped(text, "    ", most-2)) }

	fmt.Fprintf(&b, "Pod %s/%s\n", s.Namespace, s.Pod)
	is := s.State
	if len(s.IPs) > 0 {
		is += ", with " + strings.Join(s.IPs, ", ")
	}
	if s.Workload != "" {
		is += ", of " + strings.Replace(s.Workload, "/", " ", 1)
	}
	say(is)
	if len(s.Asked) > 0 {
		section("What it asks for")
		for _, a := range s.Asked {
			say(a.Annotation + ": " + a.Value + " - " + a.Meaning)
		}
	}
	section("What is promised")
	for _, p := range s.Promise {
		say(p)
	}
	for _, k := range s.Kept {
		say(fmt.Sprintf("RetainedIP %s: %s, %s", k.RetainedIP, k.Phase, strings.Join(k.IPs, ", ")))
		for _, l := range k.Ledger {
			say("ledger of node " + k.Node + ": " + l)
		}
	}
	if s.Record != "" || len(s.Placement) > 0 {
		section("Its node")
		for _, p := range s.Placement {
			say(p)
		}
		if s.Record != "" {
			say(s.Record)
		}
	}
	if len(s.Events) > 0 || slices.ContainsFunc(s.Lives, func(l Life) bool { return !l.Present }) {
		section("What happened")
		if err := s.writeLives(&b, now, most); err != nil {
			return err
		}
	}
	section(s.IfDeleted.Title)
	for _, line := range s.IfDeleted.Lines {
		say(line)
	}
	if len(s.Unknown) > 0 {
		section("What could not be found out")
		for _, u := range s.Unknown {
			say(u)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
