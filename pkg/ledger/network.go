package ledger

import (
	"cmp"
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"
)

// Network is one CNI network as its configuration describes it. Its JSON, durations in nanoseconds, is the file network
// of the state directory:
//
//	{"v":1,"name":"…","dataDir":"…","ranges":[[{"subnet":"…","start":"…","end":"…","gateway":"…"}]],…}
type Network struct {
	Version          int           `json:"v,omitempty"` // of the description that Networks reads
	Name             string        `json:"name"`
	DataDir          string        `json:"dataDir"`
	Ranges           []RangeSet    `json:"ranges"`
	LongestRetention time.Duration `json:"longestRetention,omitempty"` // 0 for no limit
	PromisedShare    float64       `json:"promisedShare,omitempty"`    // 0 for DefaultPromisedShare
	// PromisedSharePerNamespace is that of one namespace, 0 if it may have all of PromisedShare.
	PromisedSharePerNamespace float64 `json:"promisedSharePerNamespace,omitempty"`
	// PromisedLimit and PromisedLimitPerNamespace are absolute limits for each range set, even if the shares allow more.
	PromisedLimit             int64 `json:"promisedLimit,omitempty"`             // 0 for DefaultPromisedLimit
	PromisedLimitPerNamespace int64 `json:"promisedLimitPerNamespace,omitempty"` // 0 for all of PromisedLimit
}

// MostPromised returns how many addresses of a range set may be promised.
func (n *Network) MostPromised(set RangeSet) int64 {
	return min(portion(set, cmp.Or(n.PromisedShare, DefaultPromisedShare)), cmp.Or(n.PromisedLimit, DefaultPromisedLimit))
}

// MostPromisedTo returns how many of them may be promised to one namespace.
func (n *Network) MostPromisedTo(set RangeSet) int64 {
	most := n.MostPromised(set)
	if n.PromisedSharePerNamespace != 0 {
		most = min(most, portion(set, n.PromisedSharePerNamespace))
	}
	if n.PromisedLimitPerNamespace != 0 {
		most = min(most, n.PromisedLimitPerNamespace)
	}
	return most
}

func portion(set RangeSet, share float64) int64 {
	f := float64(set.Size()) * share
	if f >= math.MaxInt64 { // of an IPv6 range
		return math.MaxInt64
	}
	return max(1, int64(f))
}

func (n *Network) encode() []byte {
	of := *n
	of.Version = recordVersion
	b, err := json.Marshal(of)
	if err != nil {
		panic(err)
	}
	return append(b, '\n')
}

// fingerprint changes whenever the configuration does. Every ADD makes it, so it does without JSON and fmt.
func (n *Network) fingerprint() string {
	var b strings.Builder
	b.WriteString(n.DataDir + "\x00" + n.LongestRetention.String() + "\x00")
	b.WriteString(strconv.FormatFloat(n.PromisedShare, 'g', -1, 64) + " ")
	b.WriteString(strconv.FormatFloat(n.PromisedSharePerNamespace, 'g', -1, 64) + " ")
	b.WriteString(strconv.FormatInt(n.PromisedLimit, 10) + " ")
	b.WriteString(strconv.FormatInt(n.PromisedLimitPerNamespace, 10))
	for _, set := range n.Ranges {
		b.WriteByte(0)
		for _, r := range set {
			b.WriteString(r.Subnet.String() + " " + r.String() + " " + r.Gateway.String() + ";")
		}
	}
	return hashOf(b.String())[:16]
}

// RangeUse is how full one range set of a network is.
type RangeUse struct {
	RangeSet RangeSet
	// Addresses are how many it can give.
	Addresses int64
	// Taken are those that are not free.
	Taken int
	// Promised are those of them that are promised, bound and retained together, and Promisable the most that may be.
	Promised   int
	Promisable int64
}

// Use returns how full each range set is with these addresses, which List returned. Those in no range are left out.
func (n *Network) Use(addrs []Address) []RangeUse {
	use := make([]RangeUse, len(n.Ranges))
	for i, set := range n.Ranges {
		use[i] = RangeUse{RangeSet: set, Addresses: set.Size(), Promisable: n.MostPromised(set)}
	}
	for _, a := range addrs {
		for i, set := range n.Ranges {
			if !set.allocatable(a.Addr) {
				continue
			}
			use[i].Taken++
			if a.Key != nil {
				use[i].Promised++
			}
		}
	}
	return use
}
