// Package hoard is a client of HTTP that keeps more connections than it needs.
package hoard

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
)

// Connections opens so many connections to an address, gets a path by each and keeps all of them alive. It returns by
// how many it then gets another answer: how many the server keeps.
func Connections(t *testing.T, address, path string, many int) (kept int) {
	t.Helper()
	get := func(c net.Conn) error {
		if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: stayput\r\n\r\n", path); err != nil {
			return err
		}
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		_, err = io.Copy(io.Discard, r.Body)
		return err
	}
	var all []net.Conn
	for i := range many {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := get(c); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		all = append(all, c)
	}
	for _, c := range all {
		if get(c) == nil {
			kept++
		}
	}
	return kept
}
