package httplimit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
)

// serve serves on loopback. /hold is answered once hold is closed; held says that it has been asked for.
func serve(t *testing.T) (l *listener, held <-chan struct{}, hold chan<- struct{}) {
	t.Helper()
	of, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	asked, answer := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/hold", func(w http.ResponseWriter, _ *http.Request) {
		close(asked)
		<-answer
		fmt.Fprintln(w, "ok")
	})
	server := Server(mux)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(of) }()
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return of.(*listener), asked, answer
}

// client is a connection that is kept alive.
type client struct {
	net.Conn
	r *bufio.Reader
}

// from connects from a loopback address.
func from(t *testing.T, l *listener, address string) *client {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{c, bufio.NewReader(c)}
}

func (c *client) send(path string) error {
	_, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: stayput\r\n\r\n", path)
	return err
}

func (c *client) answered() error {
	r, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return errors.New(r.Status)
	}
	_, err = io.Copy(io.Discard, r.Body)
	return err
}

func (c *client) get() error {
	if err := c.send("/"); err != nil {
		return err
	}
	return c.answered()
}

// probe asks as kubelet does, which keeps no connection.
func probe(t *testing.T, l *listener, address string) error {
	t.Helper()
	c := from(t, l, address)
	if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: stayput\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	if err := c.answered(); err != nil {
		return err
	}
	if _, err := c.r.ReadByte(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("after the answer: %v", err)
	}
	return nil
}

func (l *listener) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}

func TestAClientThatHoardsConnectionsLosesItsOwnOnly(t *testing.T) {
	l, _, _ := serve(t)
	scraper := from(t, l, "127.0.0.1")
	if err := scraper.get(); err != nil {
		t.Fatal(err)
	}
	for i := range 3 * Connections {
		hoarder := from(t, l, "127.0.0.2")
		if i%2 == 0 { // the others are silent
			if err := hoarder.get(); err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
		}
		if n := l.count(); n > Connections {
			t.Fatalf("there are %d connections, of at most %d", n, Connections)
		}
	}
	if n := l.count(); n < Connections-1 { // the last ones may not be accepted yet
		t.Errorf("there are %d connections: some are closed without need", n)
	}
	if err := scraper.get(); err != nil {
		t.Errorf("the connection of another client: %v", err)
	}
	for i := range 10 {
		if err := probe(t, l, "127.0.0.3"); err != nil {
			t.Errorf("probe %d: %v", i, err)
		}
	}
}

func TestARequestIsAnsweredThoughItsOwnMachineHoardsConnections(t *testing.T) {
	l, held, hold := serve(t)
	scraper := from(t, l, "127.0.0.1")
	if err := scraper.send("/hold"); err != nil {
		t.Fatal(err)
	}
	<-held
	for i := range 3 * Connections {
		if err := from(t, l, "127.0.0.1").get(); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	close(hold)
	if err := scraper.answered(); err != nil {
		t.Error(err)
	}
}

func TestAProbeGetsThroughThoughManyMachinesHoardConnections(t *testing.T) {
	l, _, _ := serve(t)
	for i := range 2 * Connections {
		if err := from(t, l, fmt.Sprintf("127.0.%d.%d", 1+i/250, 1+i%250)).get(); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		if err := probe(t, l, "127.0.0.1"); err != nil {
			t.Fatalf("probe %d: %v", i, err)
		}
	}
	if n := l.count(); n > Connections {
		t.Errorf("there are %d connections, of at most %d", n, Connections)
	}
}

func TestAClosedConnectionTakesNoPlace(t *testing.T) {
	l, _, _ := serve(t)
	for range 2 * Connections {
		if err := probe(t, l, "127.0.0.1"); err != nil {
			t.Fatal(err)
		}
	}
	if n := l.count(); n != 0 {
		t.Errorf("there are %d connections", n)
	}
}

func TestAnIPv6NetworkIsOneClient(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.7": "192.0.2.7/32", "::ffff:192.0.2.7": "192.0.2.7/32",
		"2001:db8::7": "2001:db8::/64", "2001:db8::1:2:3:4": "2001:db8::/64", "fe80::1%eth0": "fe80::/64",
	} {
		at := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 1))
		if got := clientOf(at).String(); got != want {
			t.Errorf("%s counts to %s, expected %s", address, got, want)
		}
	}
}
