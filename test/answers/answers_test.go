package answers_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/test/answers"
	"github.com/stayput/stayput/test/lab"
)

var (
	addrA, addrB = netip.MustParseAddr("10.50.0.1"), netip.MustParseAddr("10.50.0.2")
	noon         = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
)

// seconds after noon.
func seconds(n float64) time.Time { return noon.Add(time.Duration(n * float64(time.Second))) }

// heard is an answer in a history: somebody asks, and an incarnation answers that has started then.
type heard struct {
	asked, started float64
	pod            string
	addr           netip.Addr // that it says to have
}

func TestAnswersOfTwoAtATimeAreSeen(t *testing.T) {
	for _, is := range []struct {
		name  string
		heard []heard
		want  []string
	}{
		{"one after the other", []heard{
			{1, 0, "far-0", addrA}, {2, 0, "far-0", addrA}, {11, 10, "far-0", addrA}, {12, 10, "far-0", addrA},
		}, nil},
		{"an answer that was long on its way", []heard{
			{1, 0, "far-0", addrA}, {11, 10, "far-0", addrA}, {9.9, 0, "far-0", addrA},
		}, nil},
		{"the one before answers again", []heard{
			{1, 0, "far-0", addrA}, {11, 10, "far-0", addrA}, {12, 0, "far-0", addrA},
		}, []string{"answered by far-0 of 12:00:00.000, though far-0 of 12:00:10.000 had started"}},
		{"and is heard first", []heard{
			{12, 0, "far-0", addrA}, {11, 10, "far-0", addrA},
		}, []string{"though far-0 of 12:00:10.000 had started"}},
		{"after the next one, too", []heard{
			{1, 0, "far-0", addrA}, {11, 10, "far-0", addrA}, {21, 20, "far-0", addrA}, {22, 10, "far-0", addrA},
		}, []string{"answered by far-0 of 12:00:10.000, though far-0 of 12:00:20.000 had started"}},
		{"another pod", []heard{{1, 0, "far-1", addrA}},
			[]string{"asked 10.50.0.1, the address of far-0, and far-1 answered"}},
		{"a pod without the address", []heard{{1, 0, "far-0", addrB}}, []string{"and far-0 answered, with [10.50.0.2]"}},
	} {
		t.Run(is.name, func(t *testing.T) {
			var said []string
			told := map[string]bool{}
			judge := answers.NewJudge(func(netip.Addr) string { return "far-0" }, func(subject, format string, args ...any) {
				if !told[subject] {
					said = append(said, fmt.Sprintf(format, args...))
				}
				told[subject] = true
			})
			for _, h := range is.heard {
				judge.Hear(addrA, "node-1", seconds(h.asked),
					lab.Answer{Name: h.pod, Addrs: []netip.Addr{h.addr}, Started: seconds(h.started)})
			}
			if len(said) != len(is.want) {
				t.Fatalf("%d are wrong, want %d: %q", len(said), len(is.want), said)
			}
			for i, s := range said {
				if !strings.Contains(s, is.want[i]) {
					t.Errorf("%q, want %q", s, is.want[i])
				}
			}
		})
	}
}
