package netlab

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// TestAnsweredPacketsAreNotLost connects to addresses to which a router has no route, with
// sockets that are not read. The kernel sends the first packet again although the router has
// answered it, or because the router has dropped it.
func TestAnsweredPacketsAreNotLost(t *testing.T) {
	client, node, _ := pair(t)
	// A packet that waits for the router's link-layer address would arrive too late.
	for _, to := range []string{"192.0.2.254:80", "[2001:db8:1::254]:80"} {
		if _, err := client.Dial(t.Context(), "tcp", "", to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, to    string
		first, then int // types of the router's route
		want        int
	}{
		{"IPv4, answered", "203.0.113.1", unix.RTN_UNREACHABLE, unix.RTN_UNREACHABLE, 0},
		{"IPv6, answered", "2001:db8:3::1", unix.RTN_UNREACHABLE, unix.RTN_UNREACHABLE, 0},
		{"IPv4, dropped", "203.0.113.2", unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, 1},
		{"IPv6, dropped", "2001:db8:3::2", unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			to := netip.MustParseAddr(c.to)
			route := func(kind int) {
				r := &netlink.Route{Dst: ipNet(netip.PrefixFrom(to, to.BitLen())), Type: kind}
				if to.Is6() {
					r.LinkIndex = 1 // lo
				}
				must.Do(t, node.netlink(func(nl *netlink.Handle) error { return nl.RouteReplace(r) }))
			}
			for range 10 {
				route(c.first)
				fd := refusedSocket(t, client, netip.AddrPortFrom(to, 80), func() { route(c.then) })
				info := must.Get(unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO))(t)
				// There is no retransmission if the answer arrives after connect(2), and more than one
				// if the second route comes late. Both are rare.
				if info.Total_retrans != 1 {
					continue
				}
				if lost, err := unanswered(fd, true); err != nil || lost != c.want {
					t.Errorf("%d packets were lost, want %d: %v", lost, c.want, err)
				}
				return
			}
			t.Error("the kernel did not retransmit once in ten attempts")
		})
	}
}

// refusedSocket returns a socket that a host connects and that is refused in the end. It calls
// sent after connect(2).
func refusedSocket(t *testing.T, h *Host, to netip.AddrPort, sent func()) (fd int) {
	t.Helper()
	err := h.Do(func() (err error) {
		family := unix.AF_INET
		var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(to.Port()), Addr: [4]byte(to.Addr().AsSlice()[:4])}
		if to.Addr().Is6() {
			family, sa = unix.AF_INET6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
		}
		if fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := reportICMPErrors(fd, to.Addr().Is6(), true); err != nil {
			return err
		}
		if err := unix.Connect(fd, sa); !errors.Is(err, unix.EINPROGRESS) {
			return errors.Join(errors.New("connect did not start"), err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sent()
	const closed = 7 // TCP_CLOSE in include/net/tcp_states.h
	for end := time.Now().Add(testtime.Timeout); ; time.Sleep(10 * time.Millisecond) {
		info := must.Get(unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO))(t)
		if info.State == closed {
			return fd
		}
		if time.Now().After(end) {
			t.Fatalf("the connection was not refused: state %d, %d retransmissions", info.State, info.Total_retrans)
		}
	}
}

// TestOutcomesAreToldApart checks the outcomes of greetings and errors.
func TestOutcomesAreToldApart(t *testing.T) {
	for _, c := range []struct {
		greeting string
		err      error
		kind     OutcomeKind
		text     string
	}{
		{"10.0.0.1:80 10.0.0.2:4000\n", nil, Reached, "reached 10.0.0.1:80 with source 10.0.0.2"},
		{"hello\n", nil, Failed, "failed: unexpected reply"},
		{"10.0.0.1:80 unknown\n", nil, Failed, "failed: unexpected reply"},
		{"", &net.OpError{Op: "dial", Err: unix.ECONNREFUSED}, Refused, "refused"},
		{"", os.ErrDeadlineExceeded, Silent, "no answer"},
		{"", &net.OpError{Op: "dial", Err: context.DeadlineExceeded}, Silent, "no answer"},
		{"", unix.ECONNRESET, Failed, "failed: connection reset"},
	} {
		if o := OutcomeOf(c.greeting, c.err); o.Kind != c.kind || !strings.HasPrefix(o.String(), c.text) {
			t.Errorf("%q, error %v: %v", c.greeting, c.err, o)
		}
	}
	if got := string(Greeting(netip.MustParseAddrPort("[::ffff:10.0.0.1]:80"), netip.MustParseAddrPort("[fd00::1]:4000"))); got != "10.0.0.1:80 [fd00::1]:4000\n" {
		t.Errorf("greeting %q", got)
	}
}
