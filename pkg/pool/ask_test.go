package pool

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseWants(t *testing.T) {
	for value, want := range map[string][]Want{
		"": nil, " ": nil, "blue": {{Interface: "eth0", Pools: []string{"blue"}}},
		"blue-v4, blue-v6,green@net1": {{Interface: "eth0", Pools: []string{"blue-v4", "blue-v6"}},
			{Interface: "net1", Pools: []string{"green"}}},
		"blue,blue@net1": {{Interface: "eth0", Pools: []string{"blue"}},
			{Interface: "net1", Pools: []string{"blue"}}},
	} {
		if is, err := ParseWants(value); err != nil || !reflect.DeepEqual(is, want) {
			t.Errorf("%q: %+v, %v", value, is, err)
		}
	}
	for _, value := range []string{",", "blue,", "Blue", "blue@", "@net1", "blue@a/b", "blue@0123456789abcdef",
		"blue,blue", "-blue", "blüe"} {
		if is, err := ParseWants(value); err == nil || !strings.Contains(err.Error(), "expected") {
			t.Errorf("%q: %+v, %v", value, is, err)
		}
	}
}
