package pool

import (
	"reflect"
	"strings"
	"testing"
)

const (
	ours      = "stayput.io/pools"
	theirs    = "ipam.spidernet.io/ippool"
	theirList = "ipam.spidernet.io/ippools"
)

// manual is as Spiderpool's manual of StatefulSets writes it.
const manual = "{      \n  \"ipv4\": [\"test-ippool\"]\n}"

func TestPodsAskInSpiderpoolsWords(t *testing.T) {
	on := func(iface string, pools ...string) Want { return Want{Interface: iface, Pools: pools} }
	type annotations = map[string]string
	for name, test := range map[string]struct {
		pod, namespace annotations
		without        bool // Spiderpool's words do not count
		want           []Want
	}{
		"nothing":                    {},
		"the manual":                 {pod: annotations{theirs: manual}, want: []Want{on("eth0", "test-ippool")}},
		"words that do not count":    {pod: annotations{theirs: manual}, without: true},
		"ours, where they count not": {pod: annotations{theirs: manual, ours: "blue"}, without: true, want: []Want{on("eth0", "blue")}},
		"two families, in order": {pod: annotations{theirs: `{"ipv4":["a","b"],"ipv6":["c"]}`},
			want: []Want{on("eth0", "a", "b", "c")}},
		"another interface": {pod: annotations{theirs: `{"interface":"net1","ipv6":["c"]}`}, want: []Want{on("net1", "c")}},
		"several interfaces": {pod: annotations{theirList: `[{"interface":"eth0","ipv4":["a"],"cleangateway":false},
			{"interface":"net1","ipv4":["a"]}]`, theirs: "?"}, want: []Want{on("eth0", "a"), on("net1", "a")}},
		"the only interface":     {pod: annotations{theirList: `[{"ipv4":["a"]}]`}, want: []Want{on("eth0", "a")}},
		"ours":                   {pod: annotations{theirs: manual, ours: "blue"}, want: []Want{on("eth0", "blue")}},
		"ours, which are empty":  {pod: annotations{theirs: manual, ours: ""}},
		"theirs, which is empty": {pod: annotations{theirs: ""}, namespace: annotations{ours: "red"}, want: []Want{on("eth0", "red")}},
		"theirs, and a default":  {pod: annotations{theirs: manual}, namespace: annotations{ours: "red"}, want: []Want{on("eth0", "test-ippool")}},
		"defaults of theirs": {namespace: annotations{spiderDefaultV4: `["a","b"]`, spiderDefaultV6: `["c"]`},
			want: []Want{on("eth0", "a", "b", "c")}},
		"a default of theirs":             {namespace: annotations{spiderDefaultV6: `["c"]`}, want: []Want{on("eth0", "c")}},
		"defaults of theirs and ours":     {namespace: annotations{spiderDefaultV4: `["a"]`, ours: "red"}, want: []Want{on("eth0", "red")}},
		"no default, whatever they say":   {namespace: annotations{spiderDefaultV4: `["a"]`, ours: ""}},
		"a pod that does without both":    {pod: annotations{ours: ""}, namespace: annotations{spiderDefaultV4: `["a"]`}},
		"defaults that do not count":      {namespace: annotations{spiderDefaultV4: `["a"]`}, without: true},
		"routes beside words of our own":  {pod: annotations{ours: "blue", spiderRoutes: "[]"}, want: []Want{on("eth0", "blue")}},
		"routes of who asks for no pools": {pod: annotations{spiderRoutes: "[]"}},
	} {
		is, err := Asks(test.pod, test.namespace, !test.without)
		if err != nil || !reflect.DeepEqual(is, test.want) {
			t.Errorf("%s: %+v, %v", name, is, err)
		}
		asks, decides := AsksItself(test.pod, !test.without)
		if !decides {
			asks = AsksByDefault(OfNamespace(test.namespace), !test.without)
		}
		if asks != (is != nil) {
			t.Errorf("%s: asks is %t", name, asks)
		}
	}
}

// What cannot be honoured is said, and asks all the same: the pod must not get another address.
func TestWordsOfSpiderpoolThatCannotBeHonouredSayWhy(t *testing.T) {
	type annotations = map[string]string
	for says, test := range map[string]struct{ pod, namespace annotations }{
		theirs + `: "blue" is not valid: expected an object such as {"ipv4"`: {pod: annotations{theirs: "blue"}},
		`expected an object such as {"ipv4"`:                                 {pod: annotations{theirs: `{"ipv4":["a"]} {}`}},
		`unknown field "ipv44"`:                                              {pod: annotations{theirs: `{"ipv44":["a"]}`}},
		"expected names of pools in ipv4 or ipv6":                            {pod: annotations{theirs: `{}`}},
		`wildcards such as "a*" are not supported`:                           {pod: annotations{theirs: `{"ipv4":["a*"]}`}},
		`"A" is not valid: expected the name of a pool`:                      {pod: annotations{theirs: `{"ipv4":["A"]}`}},
		"each pool once for an interface, but a is listed twice":             {pod: annotations{theirs: `{"ipv4":["a"],"ipv6":["a"]}`}},
		`interface: "a/b" is not valid`:                                      {pod: annotations{theirs: `{"interface":"a/b","ipv4":["a"]}`}},
		theirList + `: "[]" is not valid: expected a list such as`:           {pod: annotations{theirList: "[]"}},
		"[1]: cleangateway is not supported": {pod: annotations{theirList: `[{"interface":"eth0","ipv4":["a"]},
			{"interface":"net1","ipv4":["b"],"cleangateway":true}]`}},
		"[0]: expected an interface in each":              {pod: annotations{theirList: `[{"ipv4":["a"]},{"ipv4":["b"]}]`}},
		"but eth0 is listed twice":                        {pod: annotations{theirList: `[{"interface":"eth0","ipv4":["a"]},{"interface":"eth0","ipv6":["b"]}]`}},
		spiderSubnet + " is not supported: expected":      {pod: annotations{spiderSubnet: `{"ipv4":["a"]}`, theirs: manual}},
		spiderSubnets + " is not supported":               {pod: annotations{spiderSubnets: "[]"}},
		spiderRoutes + " is not supported":                {pod: annotations{theirs: manual, spiderRoutes: "[]"}},
		spiderDefaultV4 + ` of the namespace: "a" is not`: {namespace: annotations{spiderDefaultV4: "a"}},
		spiderDefaultV6 + ` of the namespace: "[\"a?\"]`: {namespace: annotations{spiderDefaultV6: `["a?"]`,
			spiderDefaultV4: `["a"]`}},
	} {
		is, err := Asks(test.pod, test.namespace, true)
		if err == nil || is != nil || !strings.Contains(err.Error(), says) || !strings.HasPrefix(err.Error(), "annotation") {
			t.Errorf("want %s: %+v, %v", says, is, err)
		}
		if asks, _ := AsksItself(test.pod, true); !asks && !AsksByDefault(test.namespace, true) {
			t.Errorf("%s: it does not ask", says)
		}
		if is, err := Asks(test.pod, test.namespace, false); err != nil || is != nil {
			t.Errorf("%s: without Spiderpool's words: %+v, %v", says, is, err)
		}
	}
}
