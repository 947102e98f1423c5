package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/httplimit"
	"github.com/stayput/stayput/test/must"
)

// asked posts a body of a size, or one that does not say its size, and returns the answer's code.
func asked(to http.Handler, size int, says bool) int {
	r := httptest.NewRequest(http.MethodPost, Path, strings.NewReader(strings.Repeat("x", size)))
	if !says {
		r.ContentLength = -1
	}
	w := httptest.NewRecorder()
	to.ServeHTTP(w, r)
	return w.Code
}

// reads is a handler that reads bodies, and then calls with what it has read.
func reads(then func(read int64)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
		then(n)
	})
}

func TestALongRequestIsNotRead(t *testing.T) {
	read := int64(0)
	to := bounded{reads(func(n int64) { read = n }), newRoom()}
	for name, c := range map[string]struct {
		size int
		says bool
		code int
		read int64
	}{
		"a pod":                          {10 << 10, true, http.StatusOK, 10 << 10},
		"one that does not say its size": {10 << 10, false, http.StatusOK, 10 << 10},
		"the longest":                    {bodyMost, true, http.StatusOK, bodyMost},
		"a longer one":                   {bodyMost + 1, true, http.StatusRequestEntityTooLarge, 0},
		"a longer one that does not say": {2 * bodyMost, false, http.StatusBadRequest, bodyMost},
	} {
		read = 0
		if code := asked(to, c.size, c.says); code != c.code || read != c.read {
			t.Errorf("%s is answered by %d, read are %d bytes", name, code, read)
		}
	}
	if to.room.free != bodiesMost || len(to.room.bodies) > 0 {
		t.Errorf("afterwards %d bytes are free, of %d bodies", to.room.free, len(to.room.bodies))
	}
}

func TestOnlySoMuchIsReadAtATime(t *testing.T) {
	for name, c := range map[string]struct {
		size int
		says bool
		want int // how many at a time
	}{
		"short ones":                    {1, true, bodiesMost / bodyLeast},
		"long ones":                     {bodyMost, true, bodiesMost / bodyMost},
		"ones that do not say how long": {1, false, bodiesMost / bodyLeast},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := make(chan struct{})
				answers := make(chan int, 2*c.want)
				to := bounded{reads(func(int64) { <-end }), newRoom()}
				for range 2 * c.want {
					go func() { answers <- asked(to, c.size, c.says) }()
					synctest.Wait() // the others are read
				}
				codes := map[int]int{}
				for range c.want { // after roomWithin
					codes[<-answers]++
				}
				close(end)
				for range c.want {
					codes[<-answers]++
				}
				if codes[http.StatusServiceUnavailable] != c.want || codes[http.StatusOK] != c.want {
					t.Errorf("answered by %v, want %d at a time", codes, c.want)
				}
				if code := asked(to, c.size, c.says); code != http.StatusOK {
					t.Errorf("the next one is answered by %d", code)
				}
			})
		})
	}
}

// slow posts a body of which it sends so many bytes, and no more. It returns what ends the request.
func slow(to http.Handler, client string, declares int64, sends int) (end func()) {
	body, send := io.Pipe()
	r := httptest.NewRequest(http.MethodPost, Path, body)
	r.ContentLength, r.RemoteAddr = declares, client+":1"
	go to.ServeHTTP(httptest.NewRecorder(), r)
	go func() { _, _ = send.Write(bytes.Repeat([]byte("x"), sends)) }()
	return func() { send.Close() }
}

func TestSlowRequestsKeepNoOtherClientOut(t *testing.T) {
	for name, c := range map[string]struct {
		requests, clients, sends int
	}{
		"that declare much": {4, 1, 1},
		"that send much":    {4, 1, bodyMost - 1},
		"that are many":     {1000, 1, 1},
		"of many clients":   {100, 100, bodyMost / 10},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				to := bounded{reads(func(int64) {}), newRoom()}
				for i := range c.requests {
					defer slow(to, fmt.Sprintf("192.0.2.%d", 100+i%c.clients), bodyMost, c.sends)()
				}
				synctest.Wait()
				for range 10 {
					start := time.Now()
					if code := asked(to, 10<<10, true); code != http.StatusOK || time.Since(start) > 0 {
						t.Fatalf("another client is answered by %d after %s", code, time.Since(start))
					}
				}
			})
		})
	}
}

// served is a webhook that serves by TLS, and its address.
func served(t *testing.T, h http.Handler) string {
	t.Helper()
	data, err := renew(nil, "stayput-gate.stayput-system.svc", time.Now())
	must.Do(t, err)
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	must.Do(t, err)
	s := &server{handler: h, certificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &pair, nil }}
	l, err := httplimit.Listen("127.0.0.1:0")
	must.Do(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func TestAClientThatHoardsConnectionsKeepsNoRequestFromTheWebhook(t *testing.T) {
	at := served(t, bounded{reads(func(int64) {}), newRoom()})
	insecure := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // it is ours
	api := &http.Client{Transport: &http.Transport{TLSClientConfig: insecure.Clone(), ForceAttemptHTTP2: true}}
	defer api.CloseIdleConnections()
	post := func() error {
		answer, err := api.Post("https://"+at+Path, "application/json", strings.NewReader(strings.Repeat("x", 10<<10)))
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK || answer.ProtoMajor != 2 {
			return fmt.Errorf("%s by %s", answer.Status, answer.Proto)
		}
		return nil
	}
	hoarder := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for i := range 3 * httplimit.Connections {
		c, err := hoarder.DialContext(t.Context(), "tcp", at)
		must.Do(t, err)
		defer c.Close()
		if i%4 == 0 { // the others are silent
			c := tls.Client(c, insecure)
			// The server may have closed it for the next one.
			_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: stayput\r\nContent-Length: %d\r\n\r\n{", Path, bodyMost)
		}
		if i%16 == 0 {
			if err := post(); err != nil {
				t.Fatalf("after %d connections: %v", i, err)
			}
		}
	}
	if err := post(); err != nil {
		t.Error(err)
	}
}

func TestABodyIsNotReadForLong(t *testing.T) {
	at := served(t, bounded{reads(func(int64) {}), newRoom()})
	c, err := tls.Dial("tcp", at, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is ours
	must.Do(t, err)
	defer c.Close()
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: stayput\r\nContent-Length: 100\r\n\r\n{", Path)
	must.Do(t, err)
	start := time.Now()
	must.Do(t, c.SetReadDeadline(start.Add(3*bodyWithin)))
	_, err = io.ReadAll(c)
	if took := time.Since(start); err != nil || took < bodyWithin-time.Second {
		t.Errorf("it is answered after %s, %v", took, err)
	}
}
