//go:build linux

package socketlb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// socketFlows is FLOWS_OF_SOCKET of programs.c.
const socketFlows = 8

// taken returns how many datagrams f begins to translate.
func (l *lab) taken(f func()) int {
	l.Helper()
	before := l.counters()
	f()
	after := l.counters()
	return int(after.Node + after.Pods - before.Node - before.Pods)
}

// flows returns the number of stored flows, and the sum of the namespaces' counts.
func (l *lab) flows() (stored, counted int) {
	l.Helper()
	all := must.Get(readMap[flowKey, peer](l.backend.maps["flows"]))(l)
	m := l.backend.maps["namespaces"]
	for i := range m.MaxEntries() {
		var n uint64
		must.Do(l, m.Lookup(i, &n))
		counted += int(n)
	}
	return len(all), counted
}

// send sends a datagram. No route leads to a Service if the datagram is left alone.
func send(t *testing.T, c net.PacketConn, to string) {
	t.Helper()
	_, err := c.WriteTo([]byte("who?"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
	if err != nil && !errors.Is(err, unix.ENETUNREACH) {
		t.Error(err)
	}
}

// wantAnswer receives a datagram and checks its source.
func wantAnswer(t *testing.T, what string, c net.PacketConn, want string) {
	t.Helper()
	must.Do(t, c.SetReadDeadline(time.Now().Add(testtime.Timeout)))
	if _, from, err := c.ReadFrom(make([]byte, 64)); err != nil || from.String() != want {
		t.Errorf("%s: an answer from %v, %v, want %s", what, from, err, want)
	}
}

// TestNoNamespaceTakesAnothersAnswers sends datagrams from many sockets of one network namespace
// before a socket of another one reads its answer. Datagrams beyond the bound of a namespace are left
// alone, those of the other are translated, and closing the sockets makes room again.
func TestNoNamespaceTakesAnothersAnswers(t *testing.T) {
	t.Parallel()
	const connections, many = 64, 500
	l := newLab(t, func(c *Config, _ *ruleset.Config) { c.connections = connections })
	l.udp(2, "dns", "log")
	for round := range 2 {
		asked := l.socket(l.nodeNS, "0.0.0.0:0")
		send(t, asked, "10.96.0.1:80")
		var open []net.PacketConn
		if n := l.taken(func() {
			for range many {
				c := l.socket(l.pod, "0.0.0.0:0")
				open = append(open, c)
				send(t, c, "10.96.0.2:80")
			}
		}); n != connections/namespaceShare {
			t.Errorf("round %d: %d datagrams of one namespace were translated, want %d", round, n, connections/namespaceShare)
		}
		wantAnswer(t, "asked before", asked, "10.96.0.1:80")
		wantAnswer(t, "within the bound", open[0], "10.96.0.2:80")
		other := l.socket(l.nodeNS, "0.0.0.0:0")
		send(t, other, "10.96.0.1:80")
		wantAnswer(t, "asked after", other, "10.96.0.1:80")
		for _, c := range append(open, asked, other) {
			c.Close()
		}
		if stored, counted := l.flows(); stored != 0 || counted != 0 {
			t.Errorf("round %d: %d flows are stored and %d counted after all sockets were closed", round, stored, counted)
		}
	}
}

// TestDatagramsToManyServicesAreBounded sends from one socket to more Services than it may have flows.
func TestDatagramsToManyServicesAreBounded(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for i := range socketFlows + 3 {
		s := name(fmt.Sprint("s", i))
		l.tracker.SetService(backendtest.Service(s, "web", vip4(i+1).String(), vip6(i+1).String(), backendtest.Over(v1.ProtocolUDP)))
		l.tracker.SetSlice(backendtest.Slice(s, "IPv4", tracker.IPv4, "web", v1.ProtocolUDP, backendtest.Endpoint(fmt.Sprintf("10.244.9.%d", 100+i), "other")))
	}
	l.sync()
	c := l.socket(l.pod, "0.0.0.0:0")
	for i := range socketFlows + 3 {
		want := 1
		if i >= socketFlows {
			want = 0
		}
		if n := l.taken(func() { send(t, c, netip.AddrPortFrom(vip4(i+1), 80).String()) }); n != want {
			t.Errorf("Service %d: %d datagrams were translated, want %d", i, n, want)
		}
	}
	c.Close()
	if stored, counted := l.flows(); stored != 0 || counted != 0 {
		t.Errorf("%d flows are stored and %d counted after the socket was closed", stored, counted)
	}
}

// directly makes system calls on a UDP socket of a pod, and reads names without package net.
type directly struct {
	*lab
	t      *testing.T
	fd     int
	domain int
}

func (l *lab) directly(t *testing.T, h *netlab.Host, domain int) *directly {
	t.Helper()
	d := &directly{l, t, -1, domain}
	err := l.Do(func() error {
		return h.Do(func() (err error) {
			d.fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			return err
		})
	})
	if err == nil {
		tv := unix.NsecToTimeval(int64(testtime.Timeout))
		err = unix.SetsockoptTimeval(d.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A process that another test starts has a copy of the socket until it executes its program,
		// and the flow would last as long: with room for one flow, the next socket would get none.
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		unix.Close(d.fd)
	})
	return d
}

func (d *directly) addr(to string) unix.Sockaddr {
	a := netip.MustParseAddrPort(to)
	if d.domain == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())} // IPv4-mapped, too
}

func nameOf(sa unix.Sockaddr) string {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)).String()
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)).String()
	}
	return "nothing"
}

// asks sends to an address, or over the connected socket if it is "", and checks the answer's source.
func (d *directly) asks(to, want string) {
	d.t.Helper()
	var err error
	if to == "" {
		_, err = unix.Write(d.fd, []byte("who?"))
	} else {
		err = unix.Sendto(d.fd, []byte("who?"), 0, d.addr(to))
	}
	if err != nil {
		d.t.Errorf("to %q: %v", to, err)
		return
	}
	_, from, err := unix.Recvfrom(d.fd, make([]byte, 64), 0)
	for err == unix.EINTR { // the kernel does not restart a call with a timeout
		_, from, err = unix.Recvfrom(d.fd, make([]byte, 64), 0)
	}
	if err != nil || nameOf(from) != want {
		d.t.Errorf("to %q: an answer from %s, %v, want %s", to, nameOf(from), err, want)
	}
}

// connects connects to an address and checks the peer. It ends the connection if the address is "".
func (d *directly) connects(to string) {
	d.t.Helper()
	if to == "" {
		if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(d.fd), uintptr(unsafe.Pointer(&unix.RawSockaddr{})), unix.SizeofSockaddrInet4); errno != 0 {
			d.t.Error(errno)
		}
		return
	}
	if err := unix.Connect(d.fd, d.addr(to)); err != nil {
		d.t.Error(err)
		return
	}
	if got, err := unix.Getpeername(d.fd); err != nil || nameOf(got) != to {
		d.t.Errorf("connected to %s: the peer is %s, %v", to, nameOf(got), err)
	}
}

// TestDirectDatagramsKeepTheirAddress uses an endpoint directly after the socket has used it through
// a Service, in each way.
func TestDirectDatagramsKeepTheirAddress(t *testing.T) {
	t.Parallel()
	for _, room := range []int{0, 1} { // with 1, peers are in the map peers
		l := newLab(t, func(c *Config, _ *ruleset.Config) {
			if room != 0 {
				c.connections = room
			}
		})
		l.udp(1, "dns", "log")
		if room != 0 {
			first := l.directly(t, l.nodeNS, unix.AF_INET)
			first.connects("10.96.0.1:80")
		}
		for _, f := range []struct {
			domain                 int
			service, log, endpoint string
		}{
			{unix.AF_INET, "10.96.0.1:80", "10.96.0.2:80", endpoints4[0] + ":8080"},
			{unix.AF_INET6, "[fd00:10:96::1]:80", "[fd00:10:96::2]:80", "[" + endpoints6[0] + "]:8080"},
			{unix.AF_INET6, "10.96.0.1:80", "10.96.0.2:80", endpoints4[0] + ":8080"}, // IPv4-mapped
		} {
			for what, steps := range map[string]func(*directly){
				"unconnected": func(d *directly) {
					for range socketFlows + 2 {
						d.asks(f.service, f.service)
						d.asks(f.endpoint, f.endpoint)
					}
					if room == 0 {
						d.asks(f.log, f.log) // the endpoint answers for no other Service now
					}
				},
				"connected afterwards": func(d *directly) {
					d.asks(f.service, f.service)
					d.connects(f.endpoint)
					d.asks("", f.endpoint)
				},
				"connected to another Service afterwards": func(d *directly) {
					d.asks(f.service, f.service)
					d.connects(f.log)
					d.asks("", f.log)
				},
				"connected, disconnected, unconnected": func(d *directly) {
					d.connects(f.service)
					d.asks("", f.service)
					d.connects("")
					d.asks(f.endpoint, f.endpoint)
				},
				"connected, disconnected, connected": func(d *directly) {
					d.connects(f.service)
					d.asks("", f.service)
					d.connects("")
					d.connects(f.endpoint)
					d.asks("", f.endpoint)
				},
				"connected twice": func(d *directly) {
					d.connects(f.service)
					d.asks("", f.service)
					d.connects(f.endpoint)
					d.asks("", f.endpoint)
				},
				"connected, and named again": func(d *directly) {
					for range 8 {
						d.connects(f.service)
						d.asks(f.service, f.service)
						if n := l.taken(func() { _ = unix.Sendto(d.fd, []byte("who?"), 0, d.addr(f.log)) }); n != 0 {
							d.t.Error("the datagram to another Service is translated, whose answer the kernel drops")
						}
						d.asks("", f.service)
					}
				},
			} {
				t.Run(what+" "+f.service, func(t *testing.T) {
					steps(l.directly(t, l.pod, f.domain))
				})
			}
		}
	}
}
