// Package httplimit serves HTTP at little cost, and to everyone, though some clients hoard connections.
//
// A listener has at most [Connections] at a time. It accepts each further one, and closes an older one for it: the
// oldest of the client that has most of them, those with a request last. So a client that hoards connections loses its
// own, and the probes of kubelet and the scrapes of Prometheus get through.
package httplimit

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Connections is how many connections a listener has at most. Each takes some 20 KiB.
const Connections = 128

// Server returns a server of h for a listener of [Listen], also by TLS over it. An h that reads the bodies of requests
// bounds them itself.
func Server(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 8 << 10,
		ConnState: func(c net.Conn, s http.ConnState) {
			if over, ok := c.(*tls.Conn); ok {
				c = over.NetConn()
			}
			if c, ours := c.(*conn); ours {
				c.asking.Store(s == http.StateActive)
			}
		},
	}
}

// Listen listens on a TCP address.
func Listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	return &listener{Listener: l}, nil
}

type listener struct {
	net.Listener

	mu   sync.Mutex
	open []*conn // oldest first; at most Connections
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: accepted, of: l, client: clientOf(accepted.RemoteAddr())}
	l.mu.Lock()
	l.open = append(l.open, c)
	var surplus *conn
	if len(l.open) > Connections {
		surplus = l.surplusLocked()
	}
	l.mu.Unlock()
	if surplus != nil {
		_ = surplus.Close() // a connection that is given up
	}
	return c, nil
}

// surplusLocked returns the connection that is closed for another one.
func (l *listener) surplusLocked() *conn {
	counts, most := map[netip.Prefix]int{}, 0
	for _, c := range l.open {
		counts[c.client]++
		most = max(most, counts[c.client])
	}
	hoarded := func(c *conn) bool { return counts[c.client] == most }
	i := slices.IndexFunc(l.open, func(c *conn) bool { return hoarded(c) && !c.asking.Load() })
	if i < 0 {
		i = slices.IndexFunc(l.open, hoarded)
	}
	return l.open[i]
}

func (l *listener) remove(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.open, c); i >= 0 {
		l.open = slices.Delete(l.open, i, i+1)
	}
}

type conn struct {
	net.Conn
	of     *listener
	client netip.Prefix
	asking atomic.Bool // some of a request has been read, and it is not answered yet
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.of.remove(c)
	return c.Conn.Close()
}

func clientOf(remote net.Addr) netip.Prefix {
	tcp, ok := remote.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	return Client(tcp.AddrPort().Addr())
}

// Client returns the client that a remote address belongs to: an IPv4 address, or an IPv6 network, since a machine has
// all addresses of one.
func Client(addr netip.Addr) netip.Prefix {
	addr = addr.Unmap().WithZone("")
	bits := 32
	if addr.Is6() {
		bits = 64
	}
	return netip.PrefixFrom(addr, bits).Masked()
}
