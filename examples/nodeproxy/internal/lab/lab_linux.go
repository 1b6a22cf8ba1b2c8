// Package lab is the network of the demo and of nodeproxy's tests: hosts in network namespaces,
// and clients that record which server answered.
package lab

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// Lab is the network of the demo and its servers.
//
//	pod-1 --+                       +-- far (node-2) with pod-3 and pod-4
//	        +-- node (node-1) ------+
//	pod-2 --+                       +-- client, outside the cluster
type Lab struct {
	*netlab.Lab
	Node, far, Client, Pod1, Pod2 *netlab.Host
}

// The addresses of the demo that are not in its manifests.
var (
	NodeAddr   = Dual{"192.0.2.1", "2001:db8::1"}
	ClientAddr = Dual{"198.51.100.9", "2001:db8:c::9"}
	// StrangerAddr is an address of the client that no load balancer admits.
	StrangerAddr = Dual{"198.51.100.200", "2001:db8:c::1:200"}
	PodAddr      = map[string]Dual{
		"pod-1": {"10.1.1.2", "fd00:10:1:1::2"},
		"pod-2": {"10.1.1.3", "fd00:10:1:1::3"},
		"pod-3": {"10.1.2.2", "fd00:10:1:2::2"},
		"pod-4": {"10.1.2.3", "fd00:10:1:2::3"},
	}
)

// Dual is an IPv4 address and the corresponding IPv6 address.
type Dual [2]string

// Families are the names of the families of a dual.
var Families = [2]string{"IPv4", "IPv6"}

// Port returns the address with a port.
func Port(addr, port string) string { return net.JoinHostPort(addr, port) }

// New builds the network and starts its servers.
func New() (_ *Lab, err error) {
	b := netlab.New()
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	d := &Lab{b, b.Host("node"), b.Host("far"), b.Host("client"), b.Host("pod-1"), b.Host("pod-2")}
	d.Node.Forward()

	b.Link(d.Node, "eth0", d.far, "eth0")
	d.Node.Addrs("eth0", "192.0.2.1/24", "2001:db8::1/64")
	d.far.Addrs("eth0", "192.0.2.2/24", "2001:db8::2/64")
	d.far.Routes("", "192.0.2.1", "0.0.0.0/0")
	d.far.Routes("", "2001:db8::1", "::/0")
	d.Node.Routes("", "192.0.2.2", "10.1.2.0/24")
	d.Node.Routes("", "2001:db8::2", "fd00:10:1:2::/64")
	d.far.Addrs("lo", "10.1.2.2/32", "10.1.2.3/32", "fd00:10:1:2::2/128", "fd00:10:1:2::3/128")

	b.Link(d.Node, "eth1", d.Client, "eth0")
	d.Node.Addrs("eth1", "198.51.100.1/24", "2001:db8:c::1/64")
	d.Client.Addrs("eth0", "198.51.100.9/24", "2001:db8:c::9/64", "198.51.100.200/24", "2001:db8:c::1:200/64")
	d.Client.Routes("", "198.51.100.1", "0.0.0.0/0")
	d.Client.Routes("", "2001:db8:c::1", "::/0")
	d.Node.Routes("", ClientAddr[0], "0.0.0.0/0")
	d.Node.Routes("", ClientAddr[1], "::/0")

	for name, h := range map[string]*netlab.Host{"pod-1": d.Pod1, "pod-2": d.Pod2} {
		h.Pod(d.Node, "veth-"+name, PodAddr[name], Dual{"10.1.1.1", "fd00:10:1:1::1"})
	}
	for name, h := range map[string]*netlab.Host{"pod-1": d.Pod1, "pod-2": d.Pod2, "pod-3": d.far, "pod-4": d.far} {
		for _, a := range PodAddr[name] {
			Serve(name, h, a)
		}
	}
	return d, b.Err
}

// Serve starts a pod's servers. They answer with their name and the client's address: over
// TCP once, and again for each line that they receive; over UDP for each packet.
func Serve(name string, h *netlab.Host, addr string) {
	h.Serve(Port(addr, "8080"), func(c net.Conn) { greet(name, c) },
		Port(addr, "5353"), func(from netip.AddrPort) []byte { return answer(name, from) })
}

func greet(name string, c net.Conn) {
	lines := bufio.NewScanner(c)
	for ok := true; ok; ok = lines.Scan() {
		if _, err := c.Write(answer(name, c.RemoteAddr().(*net.TCPAddr).AddrPort())); err != nil {
			return
		}
	}
}

func answer(name string, from netip.AddrPort) []byte {
	return fmt.Appendf(nil, "%s %s\n", name, from.Addr().Unmap())
}

// NoAnswerTimeout is the timeout for connections that must not get an answer. Connections
// that must get one use [testtime.Timeout].
const NoAnswerTimeout = 300 * time.Millisecond

// Talk is a connection to one of the servers.
type Talk struct {
	net.Conn
	r *bufio.Reader
}

// Dial connects to a Service. The source address, from, may be "".
func Dial(h *netlab.Host, network, from, to string, wait time.Duration) (*Talk, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	if from != "" {
		from = Port(from, "0")
	}
	c, err := h.Dial(ctx, network, from, to)
	if err != nil {
		return nil, err
	}
	return NewTalk(c), nil
}

// NewTalk returns a talk over a connection.
func NewTalk(c net.Conn) *Talk { return &Talk{c, bufio.NewReader(c)} }

// Hear reads an answer: the server's name and the client's address.
func (t *Talk) Hear() (name, source string, err error) { return t.hear(testtime.Timeout) }

func (t *Talk) hear(wait time.Duration) (name, source string, err error) {
	t.SetReadDeadline(time.Now().Add(wait))
	line, err := t.r.ReadString('\n')
	name, source, _ = strings.Cut(strings.TrimSpace(line), " ")
	return name, source, err
}

// Ask requests another answer and reads it.
func (t *Talk) Ask() (name, source string, err error) {
	if _, err := io.WriteString(t, "?\n"); err != nil {
		return "", "", err
	}
	return t.Hear()
}

// AskOverUDP asks as a resolver does: it repeats a question that has no answer after half a second.
// The answer to a question is lost if the flow is deleted while the answer is under way.
func (t *Talk) AskOverUDP() (name, source string, err error) {
	const wait = 500 * time.Millisecond
	for end := time.Now().Add(testtime.Timeout); ; {
		if _, err := io.WriteString(t, "?\n"); err != nil {
			return "", "", err
		}
		if name, source, err = t.hear(wait); !IsTimeout(err) || time.Now().After(end) {
			return name, source, err
		}
	}
}

// Visit connects, reads the answer and closes the connection. The source address, from, may
// be "".
func Visit(h *netlab.Host, from, to string) (name, source string, err error) {
	return visit(h, from, to, testtime.Timeout)
}

// VisitSoon is Visit for connections that may get no answer.
func VisitSoon(h *netlab.Host, from, to string) (name, source string, err error) {
	return visit(h, from, to, NoAnswerTimeout/3)
}

func visit(h *netlab.Host, from, to string, wait time.Duration) (name, source string, err error) {
	t, err := Dial(h, "tcp", from, to, wait)
	if err != nil {
		return "", "", err
	}
	defer t.Close()
	name, source, err = t.Hear()
	if err != nil {
		err = fmt.Errorf("connected to %s, but got no answer: %w", to, err)
	}
	return name, source, err
}
