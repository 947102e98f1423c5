package cli

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/rest"
)

// interval is what is known of the difference between a clock and this machine's: at least low, at most high.
type interval struct{ low, high time.Duration }

// ahead is the likeliest difference.
func (i interval) ahead() time.Duration { return (i.low + i.high) / 2 }

// minus is how far a clock is ahead of another one for sure; zero: they may agree.
func (i interval) minus(o interval) time.Duration {
	switch {
	case i.low > o.high:
		return i.low - o.high
	case i.high < o.low:
		return i.high - o.low
	}
	return 0
}

// between is the difference of a clock that showed t somewhere between two moments.
func between(t time.Time, from, to time.Time) interval { return interval{t.Sub(to), t.Sub(from)} }

// serverClock reads the Date of an answer, which has whole seconds.
func serverClock(ctx context.Context, config *rest.Config) (interval, error) {
	hc, err := rest.HTTPClientFor(config)
	if err != nil {
		return interval{}, err
	}
	url, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return interval{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url.JoinPath("version").String(), nil)
	if err != nil {
		return interval{}, err
	}
	from := time.Now()
	answer, err := hc.Do(req)
	if err != nil {
		return interval{}, err
	}
	to := time.Now()
	defer answer.Body.Close()
	at, err := http.ParseTime(answer.Header.Get("Date"))
	if err != nil {
		return interval{}, fmt.Errorf("its answer has the Date %q", answer.Header.Get("Date"))
	}
	return interval{at.Sub(to), at.Add(time.Second).Sub(from)}, nil
}

// A wrong clock costs a retention only over a reboot, when nothing else is left to count by.
const (
	skewWarn = 2 * time.Second
	skewFail = time.Minute
)

func findClock(l looked, server interval) []Finding {
	const check = "clock"
	if l.is.Clock.Error != "" {
		return []Finding{{LevelFail, "", check, l.is.Clock.Error, "see the log of the agent: without the clock of the boot nothing of this node can expire"}}
	}
	skew := between(l.is.Clock.Wall, l.from, l.to).minus(server)
	f := Finding{LevelOK, "", check, "agrees with the API server's", ""}
	if skew.Abs() > skewWarn {
		word := "ahead of"
		if skew < 0 {
			word = "behind"
		}
		f = Finding{LevelWarn, "", check, fmt.Sprintf("at least %s %s the API server's: over a reboot retentions end early or late by that", duration.HumanDuration(skew.Abs()), word), "let NTP set it"}
		if skew.Abs() > skewFail {
			f.Level = LevelFail
		}
	}
	return []Finding{f}
}
