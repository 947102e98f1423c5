package pool

import (
	"fmt"
	"slices"
	"strings"
)

// DefaultInterface is that of a pool without @INTERFACE.
const DefaultInterface = "eth0"

// ParseWants reads the annotation stayput.io/pools: names of pools, separated by commas, each with @INTERFACE if it is
// not for [DefaultInterface]. Empty: none.
func ParseWants(value string) ([]Want, error) {
	if strings.TrimSpace(value) == "" {
		return nil, nil
	}
	var wants []Want
	for part := range strings.SplitSeq(value, ",") {
		name, iface, other := strings.Cut(strings.TrimSpace(part), "@")
		if !other {
			iface = DefaultInterface
		}
		if !isName(name, 253) || !isInterface(iface) {
			return nil, fmt.Errorf("%q is not valid: expected names of pools, separated by commas, each with @INTERFACE "+
				"if it is not for %s, such as blue-v4,blue-v6,green@net1", value, DefaultInterface)
		}
		i := slices.IndexFunc(wants, func(w Want) bool { return w.Interface == iface })
		if i < 0 {
			i, wants = len(wants), append(wants, Want{Interface: iface})
		}
		if slices.Contains(wants[i].Pools, name) {
			return nil, fmt.Errorf("%q is not valid: expected each pool once for an interface, but %s is listed twice",
				value, name)
		}
		wants[i].Pools = append(wants[i].Pools, name)
	}
	return wants, nil
}

// isName reports whether Kubernetes takes a name, of at most this many characters.
func isName(s string, most int) bool {
	edge := func(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }
	return s != "" && len(s) <= most && edge(s[0]) && edge(s[len(s)-1]) &&
		!strings.ContainsFunc(s, func(r rune) bool { return r > 'z' || !edge(byte(r)) && r != '-' && r != '.' })
}

// isInterface reports whether Linux takes the name of an interface.
func isInterface(s string) bool {
	return s != "" && len(s) < 16 && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\n")
}
