// Package retention reads what the annotations of a pod ask for its addresses, for everything that acts on them: the
// CNI plugin and the agent for addresses of nodes, the controller for those of pools. The admission policies of the
// chart refuse what it refuses, which test/cluster checks on one table of values. Only the standard library is linked,
// since the plugin starts with every pod.
package retention

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The annotations on a pod that ask for its address to be retained.
const (
	AnnotationRetainIP    = "stayput.io/retain-ip"
	AnnotationWhenScaled  = "stayput.io/when-scaled"
	AnnotationWhenDeleted = "stayput.io/when-deleted"
	AnnotationWhenMoved   = "stayput.io/when-moved"
	AnnotationIdentity    = "stayput.io/identity"
	AnnotationWhenInUse   = "stayput.io/when-in-use"

	// AnnotationReservedIPDuration is OpenKruise's name for retain-ip: an integer number of minutes.
	AnnotationReservedIPDuration = "io.kubernetes.cri/reserved-ip-duration"
)

// Values of AnnotationWhenScaled, AnnotationWhenDeleted and AnnotationWhenMoved, the words of StatefulSet's PVC policy.
const (
	Retain  = "Retain"
	Release = "Release"
)

// WhileOwned is the value of AnnotationRetainIP that retains an address for as long as the workload wants the pod.
const WhileOwned = "while-owned"

// None is the value of AnnotationRetainIP that retains nothing, whatever the default of the pod's namespace is.
const None = "none"

// Reasons of Events that say why a pod was promised nothing. The ledger decides; kubectl stayput shows them.
const (
	ReasonRefused          = "IPRetentionRefused"
	ReasonNamespaceRefused = "IPNamespaceShareUsedUp"
)

// Policy says what becomes of a pod's addresses when its attachment ends. The zero Policy retains nothing.
type Policy struct {
	// Retention is how long the addresses stay retained. With WhileOwned zero means without end.
	Retention  Duration `json:"retention,omitzero"`
	WhileOwned bool     `json:"whileOwned,omitempty"`
	// WhenScaled, WhenDeleted and WhenMoved are Retain or Release.
	WhenScaled  string `json:"whenScaled,omitempty"`
	WhenDeleted string `json:"whenDeleted,omitempty"`
	WhenMoved   string `json:"whenMoved,omitempty"`
	// Identity is the shared identity's name; empty means the pod's own.
	Identity string `json:"identity,omitempty"`
	// AllocateNew takes a fresh address instead of waiting for a predecessor that still lives.
	AllocateNew bool `json:"allocateNew,omitempty"`
}

// Retains reports whether the policy asks for anything.
func (p Policy) Retains() bool { return p.WhileOwned || p.Retention > 0 }

// Duration returns how long an address stays retained; zero means without end.
func (p Policy) Duration() time.Duration { return time.Duration(p.Retention) }

// RetainIP returns the value of AnnotationRetainIP that asks for p, as people write it: 10m, not 10m0s. It is empty if
// p retains nothing.
func (p Policy) RetainIP() string {
	switch {
	case p.WhileOwned:
		return WhileOwned
	case !p.Retains():
		return ""
	}
	s := p.Duration().String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Clamp shortens the policy to the longest retention, and reports whether that changed it. Zero is no limit.
func (p Policy) Clamp(longest time.Duration) (Policy, bool) {
	if longest <= 0 || !p.Retains() || (p.Retention > 0 && time.Duration(p.Retention) <= longest) {
		return p, false
	}
	p.Retention = Duration(longest)
	return p, true
}

// AnnotationError is a value of an annotation that cannot be honoured.
type AnnotationError struct {
	Key, Value, Expected string
}

func (e *AnnotationError) Error() string {
	v := e.Value
	if len(v) > 64 {
		v = v[:64] + "…"
	}
	return fmt.Sprintf("annotation %s: %q is not valid: expected %s", e.Key, v, e.Expected)
}

const expectedRetainIP = "a duration above 0 in h, m and s of at most 2562047h, such as 10m, or 168h for 7 days; " +
	"while-owned; or none"

// Parse reads a pod's annotations. answers is false if none of Stayput's keys is among them:
// then they say nothing, and another source may. An error is an *AnnotationError.
//
// If both names of the retention are present, AnnotationRetainIP counts; both must be valid.
func Parse(annotations map[string]string) (p Policy, answers bool, err error) {
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if key != AnnotationReservedIPDuration && !strings.HasPrefix(key, "stayput.io/") {
			continue
		}
		value := annotations[key]
		switch key {
		case AnnotationReservedIPDuration:
			d, err := parseMinutes(key, value)
			if err != nil {
				return Policy{}, true, err
			}
			if _, own := annotations[AnnotationRetainIP]; !own {
				p.Retention = Duration(d)
			}
		case AnnotationRetainIP:
			p.Retention, p.WhileOwned, err = parseRetainIP(value)
		case AnnotationWhenScaled:
			p.WhenScaled, err = parseRetainRelease(key, value)
		case AnnotationWhenDeleted:
			p.WhenDeleted, err = parseRetainRelease(key, value)
		case AnnotationWhenMoved:
			p.WhenMoved, err = parseRetainRelease(key, value)
		case AnnotationIdentity:
			if !isDNSLabel(value) {
				err = &AnnotationError{key, value,
					"a DNS label: 1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or digit"}
			}
			p.Identity = value
		case AnnotationWhenInUse:
			switch value {
			case "Wait":
			case "AllocateNew":
				p.AllocateNew = true
			default:
				err = &AnnotationError{key, value, `"Wait" or "AllocateNew"`}
			}
		default:
			// Other keys of the domain are the controller's, or a later version's.
			continue
		}
		if err != nil {
			return Policy{}, true, err
		}
		answers = true
	}
	switch {
	case p.Retains():
	case annotations[AnnotationRetainIP] == None:
		return Policy{AllocateNew: p.AllocateNew}, true, nil
	case answers:
		return Policy{}, true, &AnnotationError{AnnotationRetainIP, "",
			expectedRetainIP + ", with the other stayput.io annotations, which have no effect without it"}
	}
	return p.withDefaults(), answers, nil
}

func parseRetainIP(value string) (_ Duration, whileOwned bool, _ error) {
	switch value {
	case None:
		return 0, false, nil
	case WhileOwned:
		return 0, true, nil
	}
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return 0, false, &AnnotationError{AnnotationRetainIP, value, expectedRetainIP}
	}
	return Duration(d), false, nil
}

// ParsePooled is [Parse] for a pod with addresses of pools. comesBack reports that its workload makes pods of its name,
// or of its identity, again. Such a pod retains its addresses while owned if it does not say. Another one then retains
// none, and neither does it by asking for while-owned.
func ParsePooled(annotations map[string]string, comesBack bool) (Policy, error) {
	p, _, err := Parse(annotations)
	switch {
	case err != nil:
		return Policy{}, err
	case p.Retains() && !p.WhileOwned:
		return p, nil
	case !comesBack, annotations[AnnotationRetainIP] == None:
		return Policy{AllocateNew: p.AllocateNew}, nil
	}
	p.WhileOwned = true
	return p.withDefaults(), nil
}

// Recorded returns the policy that an object of the API records in these words. A retention that is not valid has no
// end: a mistake frees no address.
func Recorded(retainIP, whenScaled, whenDeleted string) Policy {
	p := Policy{WhenScaled: whenScaled, WhenDeleted: whenDeleted}
	switch d, err := time.ParseDuration(retainIP); {
	case retainIP == "", err == nil && d <= 0:
		return Policy{}
	case err != nil:
		p.WhileOwned = true
	default:
		p.Retention = Duration(d)
	}
	return p
}

// withDefaults fills in what annotations leave open: what was asked for a time runs on.
func (p Policy) withDefaults() Policy {
	if !p.Retains() {
		return p
	}
	byDefault := Retain
	if p.WhileOwned {
		byDefault = Release
	}
	p.WhenScaled = cmp.Or(p.WhenScaled, byDefault)
	p.WhenDeleted = cmp.Or(p.WhenDeleted, byDefault)
	p.WhenMoved = cmp.Or(p.WhenMoved, byDefault)
	return p
}

func parseMinutes(key, value string) (time.Duration, error) {
	const most = int64(1<<63-1) / int64(time.Minute)
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n <= 0 || n > most || value[0] == '+' {
		return 0, &AnnotationError{key, value, `a positive whole number of minutes such as "10"`}
	}
	return time.Duration(n) * time.Minute, nil
}

func parseRetainRelease(key, value string) (string, error) {
	switch value {
	case Retain, Release:
		return value, nil
	case "Delete": // as StatefulSet's PVC policy says it
		return Release, nil
	}
	return "", &AnnotationError{key, value, `"Retain" or "Release"`}
}

// isDNSLabel follows RFC 1123 as Kubernetes reads it.
func isDNSLabel(s string) bool {
	if len(s) == 0 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// Duration is a time.Duration that JSON shows as people write it.
type Duration time.Duration

func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = Duration(v)
	return err
}
