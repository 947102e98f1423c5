package ledger

import (
	"errors"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// counts say how many promises a network has, so that an ADD need not read all claims to learn whether it may make one
// more. They are kept in the file counts of the state directory:
//
//	v1 DUE STRAYS
//	PROMISES NAMESPACE
//	…
//	end
//
// A command that changes the claims writes the file before the stamp: if the stamp agrees with the directories, so does
// the file. If not (a kill, a wipe), a command that scans counts again. A missing file has not been counted.
type counts struct {
	of  map[string]int // claims by namespace, those that are over included
	all int
	// due is the CLOCK_BOOTTIME before which no retention ends: until then every claim counts.
	due time.Duration
	// strays says that some claim lies outside the ranges, and does not count.
	strays bool

	changed bool
}

const (
	never     = time.Duration(math.MaxInt64)
	countsEnd = "\nend\n" // behind it may be more, of a longer file that was written over
)

func (c *counts) encode() []byte {
	var b strings.Builder
	b.WriteString("v1 " + strconv.FormatInt(int64(c.due), 10) + " " + strconv.FormatBool(c.strays))
	for _, ns := range slices.Sorted(maps.Keys(c.of)) {
		b.WriteString("\n" + strconv.Itoa(c.of[ns]) + " " + ns)
	}
	b.WriteString(countsEnd)
	return []byte(b.String())
}

// decodeCounts returns nil for what it cannot read: it is counted again.
func decodeCounts(b []byte) *counts {
	text, _, whole := strings.Cut(string(b), countsEnd)
	head, rest, _ := strings.Cut(text, "\n")
	words := strings.Split(head, " ")
	if !whole || len(words) != 3 || words[0] != "v1" {
		return nil
	}
	due, err1 := strconv.ParseInt(words[1], 10, 64)
	strays, err2 := strconv.ParseBool(words[2])
	if err1 != nil || err2 != nil {
		return nil
	}
	c := &counts{of: map[string]int{}, due: time.Duration(due), strays: strays}
	for rest != "" {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		n, ns, _ := strings.Cut(line, " ")
		count, err := strconv.Atoi(n)
		if err != nil || count < 0 {
			return nil
		}
		c.of[ns] += count
		c.all += count
	}
	return c
}

// count counts what the files say.
func (p *picture) count(n *Network, now Instant) *counts {
	c := &counts{of: map[string]int{}, due: never, changed: true}
	for _, cl := range slices.Concat(p.claims, p.newerClaims) {
		c.addClaim(cl, n)
	}
	for _, sl := range p.slots {
		if sl.state != slotRetained {
			continue
		}
		if left, ends := sl.retained.Expires(now); ends {
			c.due = min(c.due, now.Boot+left)
		}
	}
	return c
}

// countAfter counts what the files say after the steps of a scan or a rebuild, which were made from the picture.
func (p *picture) countAfter(steps []step, n *Network, now Instant) *counts {
	c := p.count(n, now)
	for _, st := range steps {
		switch st := st.(type) {
		case putClaim:
			if st.was == nil {
				c.addClaim(st.claim, n)
			}
		case putSlot:
			c.due = min(c.due, now.Boot) // it is not known for how long the address is retained
		}
	}
	return c
}

func (c *counts) addClaim(cl *Claim, n *Network) {
	c.add(cl.Key.Namespace(), 1)
	for _, a := range cl.Addrs {
		c.strays = c.strays || !slices.ContainsFunc(n.Ranges, func(s RangeSet) bool { return s.allocatable(a) })
	}
}

func (c *counts) add(ns string, n int) {
	c.changed = true
	c.all = max(0, c.all+n)
	if c.of[ns] = max(0, c.of[ns]+n); c.of[ns] == 0 {
		delete(c.of, ns)
	}
}

// counts returns how many promises there are; errIncomplete if that is not known without a scan.
func (s *session) counts() (*counts, error) {
	if s.counted != nil {
		return s.counted, nil
	}
	if !s.trusted && !s.scanned {
		return nil, errIncomplete
	}
	if s.counted, _ = s.readCounts(); s.counted == nil {
		p, err := s.files.picture()
		if err != nil {
			return nil, err
		}
		s.counted, s.touched = p.count(s.net, s.now), true
	}
	return s.counted, nil
}

// change changes the counts along with the claims. While the stamp is not trusted no command believes them, unless a
// scan counts.
func (s *session) change(f func(*counts)) {
	if !s.trusted {
		return
	}
	missing := false
	if s.counted == nil {
		s.counted, missing = s.readCounts()
	}
	switch {
	case s.counted != nil:
		f(s.counted)
	case !missing:
		s.trusted = false // later it may be read, and would be wrong
	}
}

// counting writes or removes a claim, and counts n if that makes one more, or one less.
func (s *session) counting(k Key, n int, write func() error) error {
	there := s.countable(k)
	if err := write(); err != nil {
		return err // the counts are no longer believed
	}
	if there == (n < 0) {
		s.change(func(c *counts) { c.add(k.Namespace(), n) })
	}
	return nil
}

// countable reports whether there is a claim of that key which a count would find.
func (s *session) countable(k Key) bool {
	c, err := s.files.claim(k.hash())
	if c == nil && err != nil && !errors.Is(err, ErrCorrupt) {
		s.trusted = false
	}
	return c != nil
}

// promised counts exactly what of a range set is promised, in all and to a namespace: what lies in it and is not over.
// It reads every claim, and counts again for those who come next.
func (s *session) promised(set RangeSet, ns string) (all, of int, err error) {
	p, err := s.files.picture()
	if err != nil {
		return 0, 0, err
	}
	s.counted, s.touched = p.count(s.net, s.now), true
	for _, c := range slices.Concat(p.claims, p.newerClaims) {
		for _, a := range c.Addrs {
			sl := p.slots[a]
			if !set.allocatable(a) || sl.state == slotFree || sl.state == slotRetained && sl.retained.expired(s.now) {
				continue
			}
			all++
			if c.Key.Namespace() == ns {
				of++
			}
		}
	}
	return all, of, nil
}
