//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// testUntranslatedPacketsArrive uses the forwarding methods that do not translate packets.
// The endpoint has the Services' addresses itself, and answers by a link to the client that
// does not pass the node.
func testUntranslatedPacketsArrive(t *testing.T) {
	for _, f := range []Forwarding{DirectRouting, Tunnel} {
		for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			t.Run(fmt.Sprintf("%s %s", f, family), func(t *testing.T) { testDirectOver(t, f, family) })
		}
	}
}

func testDirectOver(t *testing.T, f Forwarding, family tracker.Family) {
	four := family == tracker.IPv4
	choose := func(a, b string) string {
		if four {
			return a
		}
		return b
	}
	lab, hosts := netlab.NewHosts(t, "node", "client", "pod")
	node, client, pod := hosts["node"], hosts["client"], hosts["pod"]
	must := func(errs ...error) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	must(node.Forward(), lab.Link(node, "eth0", client, "eth0"), lab.Link(node, "eth1", pod, "eth0"), lab.Link(pod, "eth1", client, "eth1"))
	addr := func(h *netlab.Host, dev, a, b string) {
		t.Helper()
		must(h.AddAddr(dev, netip.MustParsePrefix(choose(a, b))))
	}
	addr(node, "eth0", "192.0.2.1/24", "2001:db8:1::1/64")
	addr(client, "eth0", "192.0.2.2/24", "2001:db8:1::2/64")
	addr(node, "eth1", "10.244.1.254/24", "fd00:10:244:1::fe/64")
	addr(pod, "eth0", "10.244.1.1/24", "fd00:10:244:1::1/64")
	addr(pod, "eth1", "198.51.100.1/24", "2001:db8:2::1/64")
	addr(client, "eth1", "198.51.100.2/24", "2001:db8:2::2/64")
	everything := netip.MustParsePrefix(choose("0.0.0.0/0", "::/0"))
	must(client.AddRoute(everything, netip.MustParseAddr(choose("192.0.2.1", "2001:db8:1::1")), ""))
	must(pod.AddRoute(netip.MustParsePrefix(choose("192.0.2.2/32", "2001:db8:1::2/128")), netip.MustParseAddr(choose("198.51.100.2", "2001:db8:2::2")), ""))
	vips := []string{choose("10.96.0.1", "fd00:96::2"), choose("198.18.0.1", "2001:db8:e::1")}
	for _, vip := range vips {
		addr(pod, "lo", vip+"/32", vip+"/128")
	}
	if f == Tunnel {
		add := "ip link add unpack type ipip local 10.244.1.1 remote 10.244.1.254"
		if !four {
			add = "ip link add unpack type ip6tnl mode ip6ip6 local fd00:10:244:1::1 remote fd00:10:244:1::fe"
		}
		lines(t, pod, add)
		lines(t, pod, "ip link set unpack up")
	}

	r := newRig(t, node, Config{Forwarding: f, Families: []tracker.Family{family}})
	r.tracker.SetService(svc(1, nodePort(30001), externalIPs("198.18.0.1", "2001:db8:e::1")))
	s := slice(1, "TCP", 1)
	if !four {
		s.AddressType = "IPv6"
		s.Endpoints[0].Addresses = []string{"fd00:10:244:1::1"}
	}
	r.tracker.SetSlice(s)
	r.sync()

	for _, vip := range vips {
		pod.ServeTCP(t, net.JoinHostPort(vip, "80"), func(c net.Conn) { fmt.Fprintf(c, "%s %s", c.LocalAddr(), c.RemoteAddr()) })
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		c, err := client.Dial(ctx, "tcp", net.JoinHostPort(choose("192.0.2.2", "2001:db8:1::2"), "0"), net.JoinHostPort(vip, "80"))
		cancel()
		if err != nil {
			t.Errorf("%s: %v\n%s\n%s", vip, err, strings.Join(r.run("ipvsadm -Lnc"), "\n"), strings.Join(r.run("ip -s link"), "\n"))
			continue
		}
		c.SetDeadline(time.Now().Add(20 * time.Second))
		text, err := io.ReadAll(c)
		if want := c.RemoteAddr().String() + " " + c.LocalAddr().String(); err != nil || string(text) != want {
			t.Errorf("%s: the endpoint saw %q (%v), want %q", vip, text, err, want)
		}
		c.Close()
	}
	// IPVS must have sent them there.
	r.connections("ipvsadm -Lnc", func(l []string) error {
		for _, vip := range vips {
			to := net.JoinHostPort(vip, "80")
			if !slices.ContainsFunc(l, func(l string) bool { return strings.Contains(l, to) }) {
				return fmt.Errorf("IPVS has no connection to %s, only %q", to, l)
			}
		}
		return nil
	})
}
