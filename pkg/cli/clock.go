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

// ahead returns the likeliest difference.
func (i interval) ahead() time.Duration { return (i.low + i.high) / 2 }

// minus returns how far a clock is ahead of another one for certain, zero if they may agree.
func (i interval) minus(o interval) time.Duration {
	switch {
	case i.low > o.high:
		return i.low - o.high
	case i.high < o.low:
		return i.high - o.low
	}
	return 0
}

// between returns the difference of a clock that showed t at some moment between two.
func between(t time.Time, from, to time.Time) interval { return interval{t.Sub(to), t.Sub(from)} }

// serverClock reads the API server's clock from the Date of an answer, which has whole seconds.
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
		return interval{}, fmt.Errorf("its response has the Date %q", answer.Header.Get("Date"))
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
		return finding(check, LevelFail, l.is.Clock.Error,
			"see the agent's log. Without the boot clock no retention on this node can expire")
	}
	skew := between(l.is.Clock.Wall, l.from, l.to).minus(server)
	if skew.Abs() <= skewWarn {
		return finding(check, LevelOK, "agrees with the API server's", "")
	}
	level, direction := LevelWarn, "ahead of"
	if skew < 0 {
		direction = "behind"
	}
	if skew.Abs() > skewFail {
		level = LevelFail
	}
	return finding(check, level, fmt.Sprintf("at least %s %s the API server's: after a reboot retentions end that much "+
		"early or late", duration.HumanDuration(skew.Abs()), direction), "synchronize it with NTP")
}
