package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// client is a pod that keeps asking other pods for their names, each by its IP and on a new connection.
type client struct {
	node *lab.ClusterNode
	pod  lab.Pod
}

const (
	askEvery = 50 * time.Millisecond
	// askFor is how long the client waits for an answer, while it keeps asking. On a busy machine answers are late, but
	// after a second a lost packet is resent, and the answer would be to an old question.
	askFor = 900 * time.Millisecond
)

// ask returns the name given by the pod with the IP.
func (c client) ask(ctx context.Context, ip netip.Addr) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	web := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return c.node.DialFrom(ctx, c.pod, network, address)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+ip.String(), nil)
	if err != nil {
		return "", err
	}
	resp, err := web.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	name, err := bufio.NewReader(resp.Body).ReadString('\n')
	return strings.TrimSpace(name), err
}

// talk is the conversation with one pod at one IP.
type talk struct {
	name string
	ip   netip.Addr
	stop context.CancelFunc
	done chan struct{} // closed when the last question has ended

	mu        sync.Mutex
	questions []question // ended ones
}

type question struct {
	sent, ended time.Time
	answered    bool // by that pod
}

// talk asks the named pod at the IP until the talk ends.
func (c client) talk(ctx context.Context, name string, ip netip.Addr) *talk {
	asking, stop := context.WithCancel(ctx)
	t := &talk{name: name, ip: ip, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		var open sync.WaitGroup
		defer open.Wait()
		for asking.Err() == nil {
			open.Go(func() {
				q := question{sent: time.Now()}
				answer, err := c.ask(ctx, ip)
				q.ended, q.answered = time.Now(), err == nil && answer == name
				t.mu.Lock()
				defer t.mu.Unlock()
				t.questions = append(t.questions, q)
			})
			select {
			case <-time.After(askEvery):
			case <-asking.Done():
			}
		}
	}()
	return t
}

// hear waits for the answer to a question asked from now on.
func (t *talk) hear(ctx context.Context) error {
	now := time.Now()
	return lab.Until(ctx, fmt.Sprintf("%s to answer at %v", t.name, t.ip), func() (bool, error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		return slices.ContainsFunc(t.questions, func(q question) bool { return q.answered && q.sent.After(now) }), nil
	})
}

// end waits for one more answer, and returns the longest time between two answers with failed questions in between.
func (t *talk) end(ctx context.Context) (time.Duration, error) {
	err := t.hear(ctx)
	t.stop()
	<-t.done
	return longestAway(t.questions), err
}

func longestAway(questions []question) (longest time.Duration) {
	slices.SortFunc(questions, func(a, b question) int { return a.ended.Compare(b.ended) })
	var heard time.Time // the last answer
	for _, q := range questions {
		if !q.answered {
			continue
		}
		vain := 0
		for _, v := range questions {
			if !v.answered && v.sent.After(heard) && v.sent.Before(q.ended) {
				vain++
			}
		}
		if vain > 1 && !heard.IsZero() {
			longest = max(longest, q.ended.Sub(heard))
		}
		heard = q.ended
	}
	return longest
}
