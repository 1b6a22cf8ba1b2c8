package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/testtime"
)

// demoLab is the network of the demo and its servers.
//
//	pod-1 --+                       +-- far (node-2) with pod-3 and pod-4
//	        +-- node (node-1) ------+
//	pod-2 --+                       +-- client, outside the cluster
type demoLab struct {
	lab                           *netlab.Lab
	node, far, client, pod1, pod2 *netlab.Host
	closers                       []io.Closer
}

// The addresses of the demo that are not in its manifests.
var (
	nodeAddr   = dual{"192.0.2.1", "2001:db8::1"}
	clientAddr = dual{"198.51.100.9", "2001:db8:c::9"}
	// strangerAddr is an address of the client that no load balancer admits.
	strangerAddr = dual{"198.51.100.200", "2001:db8:c::1:200"}
	podAddr      = map[string]dual{
		"pod-1": {"10.1.1.2", "fd00:10:1:1::2"},
		"pod-2": {"10.1.1.3", "fd00:10:1:1::3"},
		"pod-3": {"10.1.2.2", "fd00:10:1:2::2"},
		"pod-4": {"10.1.2.3", "fd00:10:1:2::3"},
	}
)

// dual is an IPv4 address and the corresponding IPv6 address.
type dual [2]string

// families are the names of the families of a dual.
var families = [2]string{"IPv4", "IPv6"}

// port returns the address with a port.
func port(addr, port string) string { return net.JoinHostPort(addr, port) }

// newDemoLab builds the network and starts its servers.
func newDemoLab() (_ *demoLab, err error) {
	d := &demoLab{}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	d.lab = netlab.New()
	b := &netlab.Builder{Lab: d.lab}
	d.node, d.far, d.client = b.Host("node"), b.Host("far"), b.Host("client")
	d.pod1, d.pod2 = b.Host("pod-1"), b.Host("pod-2")
	b.Do(func() error { return d.node.Forward() })

	b.Link(d.node, "eth0", d.far, "eth0")
	b.Addrs(d.node, "eth0", "192.0.2.1/24", "2001:db8::1/64")
	b.Addrs(d.far, "eth0", "192.0.2.2/24", "2001:db8::2/64")
	b.Routes(d.far, "", "192.0.2.1", "0.0.0.0/0")
	b.Routes(d.far, "", "2001:db8::1", "::/0")
	b.Routes(d.node, "", "192.0.2.2", "10.1.2.0/24")
	b.Routes(d.node, "", "2001:db8::2", "fd00:10:1:2::/64")
	b.Addrs(d.far, "lo", "10.1.2.2/32", "10.1.2.3/32", "fd00:10:1:2::2/128", "fd00:10:1:2::3/128")

	b.Link(d.node, "eth1", d.client, "eth0")
	b.Addrs(d.node, "eth1", "198.51.100.1/24", "2001:db8:c::1/64")
	b.Addrs(d.client, "eth0", "198.51.100.9/24", "2001:db8:c::9/64", "198.51.100.200/24", "2001:db8:c::1:200/64")
	b.Routes(d.client, "", "198.51.100.1", "0.0.0.0/0")
	b.Routes(d.client, "", "2001:db8:c::1", "::/0")
	b.Routes(d.node, "", clientAddr[0], "0.0.0.0/0")
	b.Routes(d.node, "", clientAddr[1], "::/0")

	for name, h := range map[string]*netlab.Host{"pod-1": d.pod1, "pod-2": d.pod2} {
		veth, a := "veth-"+name, podAddr[name]
		b.Link(d.node, veth, h, "eth0")
		b.Addrs(d.node, veth, "10.1.1.1/32", "fd00:10:1:1::1/128")
		b.Routes(d.node, veth, "", a[0]+"/32", a[1]+"/128")
		b.Addrs(h, "eth0", a[0]+"/32", a[1]+"/128")
		b.Routes(h, "eth0", "", "10.1.1.1/32", "fd00:10:1:1::1/128")
		b.Routes(h, "eth0", "10.1.1.1", "0.0.0.0/0")
		b.Routes(h, "eth0", "fd00:10:1:1::1", "::/0")
	}
	for name, h := range map[string]*netlab.Host{"pod-1": d.pod1, "pod-2": d.pod2, "pod-3": d.far, "pod-4": d.far} {
		for _, a := range podAddr[name] {
			b.Do(func() error { return d.serve(name, h, a) })
		}
	}
	return d, b.Err
}

func (d *demoLab) close() {
	for _, c := range d.closers {
		c.Close()
	}
	if d.lab != nil {
		d.lab.Close()
	}
}

// serve starts a pod's servers. They answer with their name and the client's address: over
// TCP once, and again for each line that they receive; over UDP for each packet.
func (d *demoLab) serve(name string, h *netlab.Host, addr string) error {
	l, err := h.Listen("tcp", port(addr, "8080"))
	if err != nil {
		return err
	}
	d.closers = append(d.closers, l)
	go func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				go greet(name, c)
			}
		}
	}()
	p, err := h.ListenPacket("udp", port(addr, "5353"))
	if err != nil {
		return err
	}
	d.closers = append(d.closers, p)
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := p.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				p.WriteTo([]byte(answer(name, from)), from)
			}
		}
	}()
	return nil
}

func greet(name string, c net.Conn) {
	defer c.Close()
	lines := bufio.NewScanner(c)
	for ok := true; ok; ok = lines.Scan() {
		if _, err := io.WriteString(c, answer(name, c.RemoteAddr())); err != nil {
			return
		}
	}
}

func answer(name string, from net.Addr) string {
	host, _, _ := net.SplitHostPort(from.String())
	return name + " " + host + "\n"
}

// noAnswerTimeout is the timeout for connections that must not get an answer. Connections
// that must get one use [testtime.Timeout].
const noAnswerTimeout = 300 * time.Millisecond

// talk is a connection to one of the servers.
type talk struct {
	net.Conn
	r *bufio.Reader
}

// dial connects to a Service. The source address, from, may be "".
func dial(h *netlab.Host, network, from, to string, wait time.Duration) (*talk, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	if from != "" {
		from = port(from, "0")
	}
	c, err := h.Dial(ctx, network, from, to)
	if err != nil {
		return nil, err
	}
	return &talk{c, bufio.NewReader(c)}, nil
}

// hear reads an answer: the server's name and the client's address.
func (t *talk) hear() (name, source string, err error) {
	t.SetReadDeadline(time.Now().Add(testtime.Timeout))
	line, err := t.r.ReadString('\n')
	name, source, _ = strings.Cut(strings.TrimSpace(line), " ")
	return name, source, err
}

// ask requests another answer and reads it.
func (t *talk) ask() (name, source string, err error) {
	if _, err := io.WriteString(t, "?\n"); err != nil {
		return "", "", err
	}
	return t.hear()
}

// visit connects, reads the answer and closes the connection. The source address, from, may
// be "".
func visit(h *netlab.Host, from, to string) (name, source string, err error) {
	t, err := dial(h, "tcp", from, to, testtime.Timeout)
	if err != nil {
		return "", "", err
	}
	defer t.Close()
	name, source, err = t.hear()
	if err != nil {
		err = fmt.Errorf("connected to %s, but got no answer: %w", to, err)
	}
	return name, source, err
}
