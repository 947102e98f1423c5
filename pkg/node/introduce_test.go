package node

import (
	"encoding/json"
	"testing"
)

func TestTheIPAMPluginIsGivenWhatItsMainPluginWouldHandOn(t *testing.T) {
	for name, c := range map[string]struct{ conf, want string }{
		"a list": {`{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","ranges":[[{"subnet":"192.0.2.0/24"}]]}},{"type":"portmap"}]}`,
			`{"cniVersion":"1.0.0","name":"pods","type":"bridge","ipam":{"type":"stayput","ranges":[[{"subnet":"192.0.2.0/24"}]]}}`},
		"one plugin": {`{"cniVersion":"0.4.0","name":"pods","type":"ptp","ipam":{"type":"stayput","subnet":"192.0.2.0/24"}}`,
			`{"cniVersion":"0.4.0","name":"pods","type":"ptp","ipam":{"type":"stayput","subnet":"192.0.2.0/24"}}`},
		"another IPAM": {`{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}`, ""},
		"none":         {`{"cniVersion":"1.0.0","name":"lo","plugins":[{"type":"loopback"}]}`, ""},
		"no JSON":      {`{`, ""},
	} {
		got, err := ipamOf([]byte(c.conf))
		if c.want == "" {
			if err == nil {
				t.Errorf("%s: %s", name, got)
			}
			continue
		}
		var is, want any
		check(t, err)
		check(t, json.Unmarshal(got, &is))
		check(t, json.Unmarshal([]byte(c.want), &want))
		a, _ := json.Marshal(is)
		b, _ := json.Marshal(want)
		if string(a) != string(b) {
			t.Errorf("%s: %s, want %s", name, a, b)
		}
	}
}
