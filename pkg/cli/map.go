package cli

import (
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/stayput/stayput/pkg/api/inspection"
)

// mark stands before an address.
type mark struct {
	char   byte
	colour colour
	word   string
}

func (d *drawing) mark(m mark) string {
	d.seen[m] = true
	return d.paint.text(m.colour, string(m.char))
}

// The marks, in the order of the legend.
var (
	markBound      = mark{'b', plain, "bound"}
	markPromised   = mark{'B', green, "bound, and kept after its pod stops"}
	markRetained   = mark{'R', yellow, "retained"}
	markNewer      = mark{'N', red, "kept by a newer version of Stayput"}
	markUnreadable = mark{'?', red, "unreadable"}

	marks = []mark{markBound, markPromised, markRetained, markNewer, markUnreadable}
)

func drawNode(w io.Writer, n *inspection.Node, width int, p paint) error {
	d := &drawing{w: w, width: width, paint: p, seen: map[mark]bool{}}
	if n.NetworksError != "" {
		d.line("Some networks cannot be read: %s", printable(n.NetworksError))
	}
	if len(n.Networks) == 0 && n.NetworksError == "" {
		d.line("Stayput has not assigned an address to any pod on this node yet.")
	}
	for i := range n.Networks {
		if i > 0 {
			d.line("")
		}
		d.network(&n.Networks[i])
	}
	if len(d.seen) > 0 {
		d.line("")
		d.legend()
	}
	return d.err
}

type drawing struct {
	w     io.Writer
	width int
	paint paint
	seen  map[mark]bool
	err   error
}

func (d *drawing) line(format string, args ...any) {
	if d.err == nil {
		_, d.err = fmt.Fprintf(d.w, format+"\n", args...)
	}
}

func (d *drawing) network(n *inspection.Network) {
	d.line("Network %s", printable(n.Name))
	if n.Error != "" {
		d.line("  cannot be read: %s", printable(n.Error))
		return
	}
	drawn := map[netip.Addr]bool{}
	for i, set := range n.RangeSets {
		if len(n.RangeSets) > 1 {
			d.line("  Range set %d", i)
		}
		counts, taken := map[inspection.State]int64{}, int64(0)
		for _, a := range n.Addresses {
			if set.Contains(a.IP) {
				counts[a.State]++
				taken++
				drawn[a.IP] = true
			}
		}
		for _, r := range set.Ranges {
			d.line("  %s  %s - %s", r.Subnet, addrText(r.Start), addrText(r.End))
			d.ranged(r, n.Addresses)
		}
		total := fmt.Sprintf("  %d addresses: %d free, %d bound, %d retained",
			set.Size, set.Size-taken, counts[inspection.Bound], counts[inspection.Retained])
		if c := counts[inspection.Newer]; c > 0 {
			total += fmt.Sprintf(", %d kept by a newer version", c)
		}
		if c := counts[inspection.Unreadable]; c > 0 {
			total += fmt.Sprintf(", %d unreadable", c)
		}
		d.line("%s", total)
		d.line("  promised: %d of at most %d (%s)", set.Promised, set.PromiseLimit, promiseSetting(n, set))
	}
	var outside []string
	for _, a := range n.Addresses {
		if !drawn[a.IP] {
			outside = append(outside, fmt.Sprintf("%s (%s)", a.IP, strings.ToLower(string(a.State))))
		}
	}
	if len(outside) > 0 {
		d.line("  %s", wrapped("outside the current ranges: "+strings.Join(outside, ", "), "    ", d.width-2))
	}
}

// ranged lists the addresses of one range that are not free.
func (d *drawing) ranged(r inspection.Range, addrs []inspection.Address) {
	taken := false
	for _, a := range addrs {
		if !r.Contains(a.IP) {
			continue
		}
		taken = true
		m, line := markOf(a), addrText(a.IP)
		if a.Promise != nil {
			line += "  " + printable(a.Promise.Identity)
		}
		d.line("    %s", d.mark(m)+" "+line)
	}
	if !taken {
		d.line("    all free")
	}
}

// addrText returns an address for people. An IPv6 zone can be any text.
func addrText(a netip.Addr) string { return printable(a.String()) }

func markOf(a inspection.Address) mark {
	switch {
	case a.State == inspection.Retained:
		return markRetained
	case a.State == inspection.Newer:
		return markNewer
	case a.State == inspection.Bound && a.Promise != nil:
		return markPromised
	case a.State == inspection.Bound:
		return markBound
	}
	return markUnreadable
}

func (d *drawing) legend() {
	var all []string
	for _, m := range marks {
		if d.seen[m] {
			all = append(all, d.paint.text(m.colour, string(m.char))+" "+m.word)
		}
	}
	d.line("%s", strings.Join(all, "   "))
}
