package netconf

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// object is a JSON object of the configuration. Its getters name the field in their errors.
type object struct {
	path string
	m    map[string]any
}

// Section returns a field of a decoded configuration as [Parse] finds it, in any case. It is nil if that is missing or
// no object.
func Section(m map[string]any, key string) map[string]any {
	o, _, _ := object{m: m}.obj(key)
	return o.m
}

// Text is [Section] for a string.
func Text(m map[string]any, key string) string {
	s, _ := object{m: m}.str(key)
	return s
}

func parseObject(b []byte) (object, error) {
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		return object{}, err
	}
	if m == nil {
		return object{}, fmt.Errorf("expected a JSON object")
	}
	return object{m: m}, nil
}

// lookup finds a key as encoding/json matches struct fields: exactly, else in any case (the least, so that
// every command finds the same).
func (o object) lookup(key string) (any, bool) {
	if v, ok := o.m[key]; ok {
		return v, true
	}
	found := ""
	for k := range o.m {
		if strings.EqualFold(k, key) && (found == "" || k < found) {
			found = k
		}
	}
	v, ok := o.m[found]
	return v, ok && found != ""
}

func (o object) name(key string) string {
	if o.path == "" {
		return key
	}
	return o.path + "." + key
}

// at names an element of a list.
func (o object) at(key string, i int) string { return o.name(key) + "[" + strconv.Itoa(i) + "]" }

func (o object) wrong(key, expected string, v any) error {
	b, _ := json.Marshal(v)
	return fmt.Errorf("%s: %.64s is not valid: expected %s", o.name(key), b, expected)
}

// str returns a string field, "" if it is missing or null.
func (o object) str(key string) (string, error) {
	v, _ := o.lookup(key)
	if v == nil {
		return "", nil
	}
	s, ok := v.(string)
	if !ok {
		return "", o.wrong(key, "a string", v)
	}
	return s, nil
}

// obj returns an object field; ok is false if it is missing or null.
func (o object) obj(key string) (sub object, ok bool, err error) {
	v, _ := o.lookup(key)
	if v == nil {
		return object{path: o.name(key)}, false, nil
	}
	m, ok := v.(map[string]any)
	if !ok {
		return object{}, false, o.wrong(key, "an object", v)
	}
	return object{o.name(key), m}, true, nil
}

func (o object) list(key string) ([]any, error) {
	v, _ := o.lookup(key)
	if v == nil {
		return nil, nil
	}
	l, ok := v.([]any)
	if !ok {
		return nil, o.wrong(key, "a list", v)
	}
	return l, nil
}

// strs returns a list of strings.
func (o object) strs(key string) ([]string, error) {
	l, err := o.list(key)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, v := range l {
		s, ok := v.(string)
		if !ok {
			return nil, o.wrong(key, "a list of strings", v)
		}
		out = append(out, s)
	}
	return out, nil
}

// objs returns a list of objects, each with its place in the path.
func (o object) objs(key string) ([]object, error) {
	l, err := o.list(key)
	if err != nil {
		return nil, err
	}
	var out []object
	for i, v := range l {
		m, ok := v.(map[string]any)
		if !ok {
			return nil, o.wrong(key, "a list of objects", v)
		}
		out = append(out, object{o.at(key, i), m})
	}
	return out, nil
}
