package ledger

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// records are encoded claims and retained records, with every member and with the fewest.
func records() (claims, retained [][]byte) {
	now := Instant{Wall: time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC), Boot: 90 * time.Minute, BootID: "3765d352"}
	key := Key{Network: "cbr0", Identity: "set:default/web", Pod: "web-0", IfName: "eth0"}
	full := &Claim{
		Version: recordVersion, Key: key,
		Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::7")},
		Policy: retention.Policy{
			Retention: retention.Duration(90 * time.Second), WhileOwned: true, WhenScaled: "Retain", WhenDeleted: "Release",
			WhenMoved: "Release", Identity: "web", AllocateNew: true,
		},
		From: key.hash(),
	}
	least := &Claim{Version: recordVersion, Key: key, Addrs: full.Addrs[:1], Policy: retention.Policy{WhileOwned: true}}
	bound := retainedOf(full, now, Netns{Path: "/run/netns/a", Dev: 4, Ino: 4026532177})
	bound.Bound = now.Wall
	return [][]byte{full.encode(), least.encode()},
		[][]byte{bound.encode(), retainedOf(full, now, Netns{Ino: 7}).encode(), retainedOf(least, now, Netns{}).encode()}
}

func TestEveryRecordOfThisVersionIsReadPlainly(t *testing.T) {
	claims, retained := records()
	for _, b := range claims {
		if !plainly(b, new(Claim), (*plain).claim) {
			t.Errorf("not plain: %s", b)
		}
	}
	for _, b := range retained {
		if !plainly(b, new(Retained), (*plain).retained) {
			t.Errorf("not plain: %s", b)
		}
	}
}

func agreesWithJSON[T Claim | Retained](t *testing.T, b []byte, read func(*plain, *T)) {
	var got, want T
	if !plainly(b, &got, read) {
		return
	}
	if err := json.Unmarshal(b, &want); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%s\nread plainly:\n%+v\nby encoding/json:\n%+v %v", b, got, want, err)
	}
}

func FuzzPlainRecordsAreReadAsByEncodingJSON(f *testing.F) {
	claims, retained := records()
	for _, b := range append(claims, retained...) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		agreesWithJSON(t, b, (*plain).claim)
		agreesWithJSON(t, b, (*plain).retained)
	})
}

// Each byte of a record is taken out, doubled, and replaced by others that mean something.
func TestAlmostPlainRecordsAreReadAsByEncodingJSON(t *testing.T) {
	claims, retained := records()
	for _, b := range append(claims, retained...) {
		for i := range b {
			twice := string(b[i:i+1]) + string(b[i:i+1])
			for _, c := range []string{"", twice, "\\", "\"", "\n", "\x00", "\xff", "0", "-", ",", "}", "é", "null"} {
				changed := []byte(string(b[:i]) + c + string(b[i+1:]))
				agreesWithJSON(t, changed, (*plain).claim)
				agreesWithJSON(t, changed, (*plain).retained)
			}
		}
	}
}
