package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/test/bench/internal/table"
)

const (
	watchers = 1000
	// stepTime is how long PodIPs change at one rate.
	stepTime = 5 * time.Second
	// behind is when a watcher is: an event reaches it later.
	behind = time.Second
	// changed begins the node's name in a PodIP that was changed, before the number of the change.
	changed = "bench-"
)

// audience are watches of routed PodIPs, as each node's agent has one, with a connection of its own.
type audience struct {
	*moving
	standing atomic.Int64
	lost     atomic.Int64 // ended by the API server
	bytes    atomic.Int64
	number   int // of the last change

	mu    sync.Mutex
	first int       // number of the first change of the step
	steps []*change // from that on
}

// change is one of a PodIP.
type change struct {
	sent time.Time
	seen int       // by so many watchers
	last time.Time // when the last of them saw it
}

// measureWatches raises the rate at which PodIPs change until the watchers fall behind.
func (m *moving) measureWatches(ctx context.Context, b *bench) ([]table.Row, error) {
	a := &audience{moving: m}
	var ips stayputv1alpha1.PodIPList
	if err := m.world.client.List(ctx, &ips, client.MatchingFieldsSelector{Selector: podip.RoutedSelector}); err != nil {
		return nil, err
	}
	var names []string
	for i := range ips.Items {
		names = append(names, ips.Items[i].Name)
	}

	// 1. What a change costs that nobody watches, and then with all watchers.
	server := m.APIServer.Process()
	if err := settle(ctx, server, m.Etcd.Process()); err != nil {
		return nil, err
	}
	const slow = 20
	alone, err := a.step(ctx, names, slow, 0)
	if err != nil {
		return nil, err
	}
	n := b.times(watchers)
	watching, stop := context.WithCancel(ctx)
	defer stop()
	begin := time.Now()
	if err := a.watch(watching, n, ips.ResourceVersion); err != nil {
		return nil, err
	}
	if err := settleBelow(ctx, 0.1+bookmarks*float64(n), server, m.Etcd.Process()); err != nil {
		return nil, err
	}
	say("moves: %d watches after %.0f s", n, time.Since(begin).Seconds())

	// 2. Ever faster.
	var kept, broke *step
	var each, said []float64
	var detail []string
	for rate := 5.0; ; rate *= 1.5 {
		s, err := a.step(ctx, names, rate, n)
		if err != nil {
			return nil, err
		}
		say("moves: %s", s)
		if s.behind() {
			broke = s
			break
		}
		kept = s
		each = append(each, (s.serverCPU-alone.serverCPU)/float64(n)*1e3)
		said = append(said, s.bytes/float64(n))
		detail = append(detail, fmt.Sprintf("%.0f/s %.0f ms", s.rate, s.p99))
		if err := settleBelow(ctx, 0.1+bookmarks*float64(n), server, m.Etcd.Process()); err != nil {
			return nil, err
		}
	}
	if kept == nil {
		return nil, fmt.Errorf("the watchers were behind from the start: %s", broke)
	}
	against := fmt.Sprintf("%d watches of routed PodIPs", n)
	return []table.Row{
		{
			What: "PodIPs changed per second that all agents keep up with", Against: against,
			Figure: table.Figure{Value: kept.rate, Unit: "/s", N: len(each)},
			Detail: fmt.Sprintf("all have it after, p99: %s; then %s", strings.Join(detail, ", "), broke),
		},
		{
			What: "  kube-apiserver's CPU for an event and watcher", Against: against, Figure: measured(" µs", median, each),
			Detail: fmt.Sprintf("%s; %.1f ms for a change that nobody watches; %.0f bytes an event", extent("%.1f µs", each),
				alone.serverCPU, median(said)),
		},
		{
			What: "  kube-apiserver at that rate", Against: against,
			Figure: table.Figure{Value: kept.serverCPU * kept.rate / 10, Unit: " % of a core", N: 1},
			Detail: fmt.Sprintf("the watchers, on the same machine, %.0f %%", kept.ownCPU*kept.rate/10),
		},
	}, nil
}

// step is what was measured at one rate.
type step struct {
	rate, got         float64 // changes a second: asked for, and made
	p50, p99          float64 // ms until all watchers have seen a change
	serverCPU, ownCPU float64 // ms for a change: of the API server, and of this process
	bytes             float64 // for a change, to all watchers
	missing           int     // changes that some watcher had not seen much later
	lost              int64   // watches that the API server ended
}

func (s *step) behind() bool {
	return s.missing > 0 || s.lost > 0 || s.p99 > behind.Seconds()*1e3 || s.got < 0.9*s.rate
}

func (s *step) String() string {
	return fmt.Sprintf("%.0f/s asked for, %.1f/s made, seen by all after %.0f ms, p99 %.0f ms, missing %d, "+
		"watches lost %d, CPU for each: kube-apiserver %.1f ms, watchers %.1f ms", s.rate, s.got, s.p50, s.p99, s.missing,
		s.lost, s.serverCPU, s.ownCPU)
}

// step changes PodIPs at a rate, one after the other, and waits until that many watchers have seen all changes.
func (a *audience) step(ctx context.Context, names []string, rate float64, n int) (*step, error) {
	s := &step{rate: rate}
	count := max(20, int(rate*stepTime.Seconds()))
	a.mu.Lock()
	a.first, a.steps = a.number+1, make([]*change, count)
	for i := range a.steps {
		a.steps[i] = &change{}
	}
	a.mu.Unlock()
	lost, received := a.lost.Load(), a.bytes.Load()
	server, own, err := a.used()
	if err != nil {
		return nil, err
	}
	// Late calls do not hold up later ones: the rate is what is asked for as long as the API server can do it.
	begin := time.Now()
	tick := time.NewTicker(time.Duration(float64(time.Second) / rate))
	defer tick.Stop()
	err = parallel(ctx, count, 16, func(ctx context.Context, _, i int) error {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		a.mu.Lock()
		a.number++
		number := a.number
		a.steps[number-a.first].sent = time.Now()
		a.mu.Unlock()
		return a.world.client.Status().Patch(ctx,
			&stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: names[number%len(names)]}},
			client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"nodeName":"%s%d"}}`, changed, number)))
	})
	if err != nil {
		return nil, err
	}
	s.got = float64(count) / time.Since(begin).Seconds()
	const atMost = 20 * behind
	for waited := time.Now(); time.Since(waited) < atMost; {
		if s.missing = a.missing(n); s.missing == 0 {
			break
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
	}
	server2, own2, err := a.used()
	if err != nil {
		return nil, err
	}
	each := float64(count) * 1e6
	s.serverCPU, s.ownCPU = float64(server2-server)/each, float64(own2-own)/each
	s.bytes = float64(a.bytes.Load()-received) / float64(count)
	s.lost = a.lost.Load() - lost
	if n == 0 {
		return s, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var took []float64
	for _, c := range a.steps {
		took = append(took, c.last.Sub(c.sent).Seconds()*1e3)
	}
	s.p50, s.p99 = median(took), quantile(0.99)(took)
	return s, nil
}

// missing counts the changes of the step that fewer than n watchers have seen.
func (a *audience) missing(n int) (missing int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.steps {
		if c.seen < n {
			missing++
		}
	}
	return missing
}

// watch starts n watches from a version on, and waits until the API server has taken them all.
func (a *audience) watch(ctx context.Context, n int, version string) error {
	query := url.Values{
		"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {version},
		"fieldSelector": {podip.RoutedSelector.String()}, "timeoutSeconds": {"3600"},
	}
	for range n {
		own, err := rest.HTTPClientFor(a.RESTConfig())
		if err != nil {
			return err
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet,
			a.RESTConfig().Host+"/apis/stayput.io/v1alpha1/podips?"+query.Encode(), nil)
		if err != nil {
			return err
		}
		go func() {
			if err := a.read(own, request); ctx.Err() == nil {
				a.lost.Add(1)
				say("moves: a watch ended: %v", err)
			}
		}()
		if err := sleep(ctx, 2*time.Millisecond); err != nil { // agents start at different times
			return err
		}
	}
	return until(ctx, "the watches to stand", func() (bool, error) {
		if a.lost.Load() > 0 {
			return false, errors.New("one ended")
		}
		return a.standing.Load() == int64(n), nil
	})
}

// read reads a watch, and decodes no more than it must know.
func (a *audience) read(own *http.Client, request *http.Request) error {
	answer, err := own.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	a.standing.Add(1)
	lines := bufio.NewReaderSize(answer.Body, 16<<10)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return err
		}
		a.bytes.Add(int64(len(line)))
		if bytes.HasPrefix(line, []byte(`{"type":"ERROR"`)) {
			return fmt.Errorf("%s", bytes.TrimSpace(line))
		}
		_, rest, ok := bytes.Cut(line, []byte(`"nodeName":"`+changed))
		digits, _, _ := bytes.Cut(rest, []byte(`"`))
		number, err := strconv.Atoi(string(digits))
		if ok && err == nil {
			a.saw(number, time.Now())
		}
	}
}

// saw notes that a watcher has seen a change.
func (a *audience) saw(number int, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := number - a.first; i >= 0 && i < len(a.steps) {
		c := a.steps[i]
		c.seen++
		c.last = slices.MaxFunc([]time.Time{c.last, at}, time.Time.Compare)
	}
}

// used returns the CPU time of the API server and of this process.
func (a *audience) used() (server, own time.Duration, err error) {
	if server, err = cpuTime(a.APIServer.Process()); err == nil {
		own, err = cpuTimeOf(os.Getpid())
	}
	return server, own, err
}
