//go:build linux

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// nodeAddr is the address of every node.
const nodeAddr = "10.0.0.1"

// node is the host of one proxy, with a server at the addresses of all endpoints.
type node struct {
	lab      *netlab.Lab
	host     *netlab.Host
	listener net.Listener
	visiting sync.Mutex // one client visits at a time
}

// newNode makes the n-th node and links it to the API server's host.
func newNode(c *control, n int) (_ *node, err error) {
	d := &node{lab: netlab.New()}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	d.host = d.lab.Host(fmt.Sprintf("node-%d", n))
	there := fmt.Sprintf("node%d", n)
	own, other := fmt.Sprintf("10.1.%d.1", n), fmt.Sprintf("10.1.%d.2", n)
	d.lab.Link(d.host, "eth0", c.host, there)
	d.host.Addrs("lo", nodeAddr+"/32")
	d.host.Addrs("eth0", own+"/24")
	d.lab.Do(func() error { return c.host.AddAddr(there, netip.MustParsePrefix(other+"/24")) })
	// Packets to cluster IPs need a route to reach the proxy's rules. Without rules they
	// end at the API server's host, which does not forward them.
	d.host.Routes("", other, "0.0.0.0/0")
	d.host.Forward()
	d.host.AddLocal(endpointRange)
	if d.lab.Err != nil {
		return nil, d.lab.Err
	}
	if d.listener, err = d.host.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", endpointPort)); err != nil {
		return nil, err
	}
	go netlab.Serve(d.listener, answer)
	return d, nil
}

// answer sends a client the address that its connection reached.
func answer(conn net.Conn) {
	a := conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().As4()
	conn.Write(a[:])
	conn.Read(a[:]) // until the client resets it
}

func (d *node) close() {
	if d.listener != nil {
		d.listener.Close()
	}
	d.lab.Close()
}

// probe connects to an address and returns the address that answers. It uses plain blocking
// system calls: the caller's thread must be in the node's namespace.
func probe(to netip.AddrPort, timeout time.Duration) (netip.Addr, error) {
	var none netip.Addr
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return none, err
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(int64(timeout))
	err = errors.Join(
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
	if err != nil {
		return none, err
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return none, err
	}
	var b [4]byte
	if n, err := unix.Read(fd, b[:]); n != len(b) {
		return none, fmt.Errorf("bad answer: %d bytes, error %w", n, err)
	}
	return netip.AddrFrom4(b), nil
}

// noAnswer bounds a connection through rules that are in effect. A connection whose first
// packet was lost is abandoned after this time.
const noAnswer = 20 * time.Millisecond

// visit connects to a Service and returns the set of the endpoint that answers.
func visit(service int) (set int, err error) {
	a, err := probe(netip.AddrPortFrom(clusterIP(service), servicePort), noAnswer)
	if err != nil {
		return 0, err
	}
	s, set := setOf(a)
	if s != service {
		return 0, fmt.Errorf("service %d was answered by %s, an endpoint of service %d", service, a, s)
	}
	return set, nil
}

// connections returns the number of connections per second to an address that two clients make.
func (d *node) connections(to netip.AddrPort) (float64, error) {
	const clients, length = 2, 200 * time.Millisecond
	var n atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, clients)
	began := time.Now()
	end := began.Add(length)
	for i := range clients {
		wg.Go(func() {
			errs[i] = d.host.Do(func() error {
				for time.Now().Before(end) {
					// Go interrupts a thread that stays in one goroutine for long.
					if _, err := probe(to, time.Second); errors.Is(err, unix.EINTR) {
						continue
					} else if err != nil {
						return err
					}
					n.Add(1)
				}
				return nil
			})
		})
	}
	wg.Wait()
	return float64(n.Load()) / time.Since(began).Seconds(), errors.Join(errs...)
}
