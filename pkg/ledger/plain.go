package ledger

import (
	"encoding/json"
	"net/netip"
	"strconv"
	"strings"

	"github.com/stayput/stayput/pkg/retention"
)

// unmarshal decodes a claim or a retained record as encoding/json does. Nearly every record is as this version wrote
// it: then plain reads it, without the reflection that is most of the time of a command which reads them all.
func unmarshal[T Claim | Retained](b []byte, into *T, read func(*plain, *T)) error {
	if plainly(b, into, read) {
		return nil
	}
	*into = *new(T)
	return json.Unmarshal(b, into)
}

// plainly reports whether a record is plain. If not, into means nothing.
func plainly[T Claim | Retained](b []byte, into *T, read func(*plain, *T)) bool {
	p := plain{rest: strings.TrimSuffix(string(b), "\n")}
	read(&p, into)
	return !p.other && p.rest == ""
}

// plain reads a record of recordVersion as json.Marshal writes it: the members in the order of their struct, no blanks,
// strings of printable ASCII without escapes. Once it finds something else, other is true and nothing that it returns
// means anything. A fuzz test compares it with encoding/json.
type plain struct {
	rest  string
	other bool
	begun bool // the object has a member already
}

const plainVersion = `{"v":1` // recordVersion

// member is a member that is a string.
type member struct {
	name string
	is   *string
}

func (p *plain) claim(c *Claim) {
	p.promise(&c.Version, &c.Key, &c.Addrs, &c.Policy)
	if p.member("from") {
		c.From = p.str()
	}
	p.word("}")
}

func (p *plain) retained(r *Retained) {
	p.promise(&r.Version, &r.Key, &r.Addrs, &r.Policy)
	if p.member("bound") {
		p.text(&r.Bound)
	}
	p.must("since")
	p.text(&r.Since)
	p.must("run")
	p.anchor(&r.Run)
	p.must("at")
	p.anchor(&r.At)
	if p.member("netns") {
		p.netns(&r.Netns)
	}
	p.word("}")
}

// promise reads what a claim and a retained record have in common.
func (p *plain) promise(version *int, k *Key, addrs *[]netip.Addr, policy *retention.Policy) {
	*version = recordVersion
	p.word(plainVersion)
	p.begun = true
	p.must("key")
	p.object(func() {
		for _, m := range []member{
			{"network", &k.Network}, {"identity", &k.Identity}, {"pod", &k.Pod}, {"ifname", &k.IfName},
		} {
			p.must(m.name)
			*m.is = p.str()
		}
	})
	p.must("addrs")
	p.word("[")
	for first := true; !p.other && !p.has("]"); first = false {
		if !first {
			p.word(",")
		}
		var a netip.Addr
		p.text(&a)
		*addrs = append(*addrs, a)
	}
	if len(*addrs) == 0 {
		p.other = true
	}
	p.must("policy")
	p.object(func() { p.policy(policy) })
}

func (p *plain) policy(to *retention.Policy) {
	if p.member("retention") {
		p.text(&to.Retention)
	}
	if p.member("whileOwned") {
		to.WhileOwned = p.yes()
	}
	for _, m := range []member{
		{"whenScaled", &to.WhenScaled}, {"whenDeleted", &to.WhenDeleted}, {"whenMoved", &to.WhenMoved},
		{"identity", &to.Identity},
	} {
		if p.member(m.name) {
			*m.is = p.str()
		}
	}
	if p.member("allocateNew") {
		to.AllocateNew = p.yes()
	}
}

func (p *plain) anchor(a *anchor) {
	p.object(func() {
		p.must("left")
		p.text(&a.Left)
		p.must("wall")
		p.text(&a.Time)
		p.must("boottime")
		a.BootTime = int64(p.number(63))
		p.must("boot")
		a.Boot = p.str()
	})
}

func (p *plain) netns(n *Netns) {
	p.object(func() {
		if p.member("path") {
			n.Path = p.str()
		}
		if p.member("dev") {
			n.Dev = p.number(64)
		}
		if p.member("ino") {
			n.Ino = p.number(64)
		}
	})
}

func (p *plain) object(members func()) {
	p.word("{")
	p.begun = false
	members()
	p.word("}")
	p.begun = true
}

// member reports whether the next member has this name, and goes on to its value.
func (p *plain) member(name string) bool {
	rest := p.rest
	if p.begun && !p.has(",") || !p.has(`"`) || !p.has(name) || !p.has(`":`) {
		p.rest = rest
		return false
	}
	p.begun = true
	return true
}

func (p *plain) must(name string) {
	if !p.member(name) {
		p.other = true
	}
}

func (p *plain) has(s string) bool {
	rest, found := strings.CutPrefix(p.rest, s)
	p.rest = rest
	return found
}

func (p *plain) word(s string) {
	if !p.has(s) {
		p.other = true
	}
}

func (p *plain) yes() bool {
	p.word("true")
	return true
}

func (p *plain) str() string {
	p.word(`"`)
	s, rest, whole := strings.Cut(p.rest, `"`)
	if !whole || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' || r == '\\' }) {
		p.other = true
		return ""
	}
	p.rest = rest
	return s
}

// text reads what is a string in JSON.
func (p *plain) text(into interface{ UnmarshalText(b []byte) error }) {
	if into.UnmarshalText([]byte(p.str())) != nil {
		p.other = true
	}
}

func (p *plain) number(bits int) uint64 {
	digits := len(p.rest) - len(strings.TrimLeft(p.rest, "0123456789"))
	n, err := strconv.ParseUint(p.rest[:digits], 10, bits)
	if err != nil || digits > 1 && p.rest[0] == '0' {
		p.other = true
	}
	p.rest = p.rest[digits:]
	return n
}
