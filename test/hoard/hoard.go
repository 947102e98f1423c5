// Package hoard is a client of HTTP that keeps more connections than it needs. Only tests import it.
package hoard

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stayput/stayput/test/must"
)

// Connections checks that a server at an address keeps no more than so many connections: the next one is answered once
// one of them is closed, and not before.
func Connections(t *testing.T, address string, most int) {
	t.Helper()
	open := func() net.Conn {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		must.Do(t, err)
		t.Cleanup(func() { c.Close() })
		_, err = fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: stayput\r\n\r\n")
		must.Do(t, err)
		return c
	}
	answered := func(c net.Conn) error {
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		_, err = io.Copy(io.Discard, r.Body)
		return err
	}
	var first net.Conn
	for i := range most {
		c := open()
		if err := answered(c); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		if first == nil {
			first = c
		}
	}
	next := open()
	must.Do(t, next.SetReadDeadline(time.Now().Add(100*time.Millisecond))) // a server without limits answers within one
	if err := answered(next); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("beside %d connections one more is answered: %v", most, err)
	}
	must.Do(t, next.SetReadDeadline(time.Time{}))
	must.Do(t, first.Close())
	must.Do(t, answered(next))
}
