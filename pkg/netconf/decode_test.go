package netconf

import (
	"encoding/json"
	"reflect"
	"testing"
)

// decodesAlike reports whether the input was plain.
func decodesAlike(t *testing.T, b []byte) bool {
	t.Helper()
	var want map[string]any
	wantErr := json.Unmarshal(b, &want)
	got, err := decodeObject(b)
	if (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(got, want) {
		t.Fatalf("%q: %#v, %v; encoding/json: %#v, %v", b, got, err, want, wantErr)
	}
	d := plainJSON{text: string(b)}
	v, ok := d.value(0)
	_, object := v.(map[string]any)
	return ok && object && d.next() == 0 && d.pos == len(d.text)
}

const ordinaryConf = `{"cniVersion":"1.0.0","name":"podnet","type":"bridge","isGateway":true,"mtu":1500,
	"ipam":{"type":"stayput","ranges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"fd00::/64"}]],"promisedShare":0.5,
	"routes":[{"dst":"0.0.0.0/0"}],"none":[],"nothing":{}},"prevResult":null,"off":false,
	"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"stayput.io/retain-ip":"10m"}}}`

func TestAnOrdinaryConfigurationIsPlain(t *testing.T) {
	if !decodesAlike(t, []byte(ordinaryConf)) {
		t.Fatal("it is left to encoding/json")
	}
}

func FuzzDecodeObject(f *testing.F) {
	for _, s := range []string{
		ordinaryConf, "", "null", "{}", " { } ", "[]", "{}x", "{} \x00", "{,}", `{"a":1,}`, `{"a":1 "b":2}`, `{"a" 1}`, `{"a":}`,
		`{"a":[1,]}`, `{"a":[1 2]}`, `{"a":[`, `{"a":"b`, `{"a":01}`, `{"a":1.}`, `{"a":.5}`, `{"a":-1}`, `{"a":1e3}`,
		`{"a":1.5x}`, `{"a":nul}`, `{"a":nullx}`, `{"a":true}`, `{"a":1,"a":{"b":2}}`, `{"a":{"b":1},"a":{"c":1}}`, `{"":0}`,
		`{"ü":"\u00fc\n"}`, "{\"a\":\"\xff\"}", "{\"a\":\"\t\"}", "{\"a\":\"\x7f\"}", `{"a":123456789012345678901234567890.5}`,
		`{"a":0.1000000000000000055511151231257827}`, `{"A":1,"a":2}`, "\ufeff{}", "{\v}", `{1:2}`, `{"a":[[],{}]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) { decodesAlike(t, b) })
}
