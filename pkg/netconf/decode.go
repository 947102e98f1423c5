package netconf

import (
	"encoding/json"
	"strconv"
)

// decodeObject decodes a JSON object as encoding/json does, nil for null. A configuration is nearly always plain: then
// the reflection of encoding/json, which is half of a process's decoding, stays away. What is not plain, and what is
// wrong, is left to it.
func decodeObject(b []byte) (m map[string]any, err error) {
	d := plainJSON{text: string(b)}
	if v, ok := d.value(0); ok && d.next() == 0 && d.pos == len(d.text) {
		if m, ok := v.(map[string]any); ok {
			return m, nil
		}
	}
	err = json.Unmarshal(b, &m)
	return m, err
}

// plainJSON decodes JSON whose strings are printable ASCII without a backslash, and whose numbers are decimals without
// sign and exponent. Its methods report false for everything else; a fuzz test compares what they return with
// encoding/json.
type plainJSON struct {
	text string
	pos  int
}

// deepest is how deep plain configurations nest.
const deepest = 32

// next skips white space and returns the byte behind it, 0 at the end.
func (d *plainJSON) next() byte {
	for ; d.pos < len(d.text); d.pos++ {
		switch c := d.text[d.pos]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// skip skips white space and c, and reports whether c was there.
func (d *plainJSON) skip(c byte) bool {
	found := d.next() == c && c != 0
	if found {
		d.pos++
	}
	return found
}

func (d *plainJSON) value(depth int) (any, bool) {
	if depth > deepest {
		return nil, false
	}
	switch c := d.next(); {
	case c == '{':
		return d.object(depth)
	case c == '[':
		return d.list(depth)
	case c == '"':
		return d.str()
	case c >= '0' && c <= '9':
		return d.number()
	}
	for _, word := range []struct {
		text  string
		value any
	}{{"true", true}, {"false", false}, {"null", nil}} {
		if len(d.text)-d.pos >= len(word.text) && d.text[d.pos:d.pos+len(word.text)] == word.text {
			d.pos += len(word.text)
			return word.value, true
		}
	}
	return nil, false
}

func (d *plainJSON) object(depth int) (any, bool) {
	d.pos++
	m := map[string]any{}
	for first := true; !d.skip('}'); first = false {
		if !first && !d.skip(',') || d.next() != '"' {
			return nil, false
		}
		key, ok := d.str()
		if !ok || !d.skip(':') {
			return nil, false
		}
		if m[key], ok = d.value(depth + 1); !ok {
			return nil, false
		}
	}
	return m, true
}

func (d *plainJSON) list(depth int) (any, bool) {
	d.pos++
	l := []any{}
	for first := true; !d.skip(']'); first = false {
		if !first && !d.skip(',') {
			return nil, false
		}
		v, ok := d.value(depth + 1)
		if !ok {
			return nil, false
		}
		l = append(l, v)
	}
	return l, true
}

func (d *plainJSON) str() (string, bool) {
	d.pos++
	for begin := d.pos; d.pos < len(d.text); d.pos++ {
		switch c := d.text[d.pos]; {
		case c == '"':
			d.pos++
			return d.text[begin : d.pos-1], true
		case c < ' ' || c > '~' || c == '\\':
			return "", false
		}
	}
	return "", false
}

func (d *plainJSON) number() (any, bool) {
	begin := d.pos
	digits := func() int {
		from := d.pos
		for d.pos < len(d.text) && d.text[d.pos] >= '0' && d.text[d.pos] <= '9' {
			d.pos++
		}
		return d.pos - from
	}
	if n := digits(); n > 1 && d.text[begin] == '0' {
		return nil, false
	}
	if d.pos < len(d.text) && d.text[d.pos] == '.' {
		if d.pos++; digits() == 0 {
			return nil, false
		}
	}
	f, err := strconv.ParseFloat(d.text[begin:d.pos], 64)
	return f, err == nil // what stands behind it is refused by the caller
}
