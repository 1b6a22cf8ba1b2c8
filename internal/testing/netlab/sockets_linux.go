package netlab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Start starts cmd inside the namespace. The caller waits for it as usual.
//
// cmd must not have Pdeathsig, because the thread that starts the process may end long
// before the process does.
func (h *Host) Start(cmd *exec.Cmd) error { return h.Do(cmd.Start) }

// Output runs a command inside the namespace and returns its standard output. The error
// contains its standard error. Tests call [Host.Run].
func (h *Host) Output(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	var out, diag strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &diag
	err := h.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return out.String(), fmt.Errorf("%s: %s: %w: %s", h.Name, cmd, err, strings.TrimSpace(diag.String()))
	}
	return out.String(), nil
}

// Listen calls net.Listen inside the namespace. The address must be literal.
func (h *Host) Listen(network, addr string) (l net.Listener, err error) {
	err = h.Do(func() error {
		l, err = net.Listen(network, addr)
		return err
	})
	return l, err
}

// ListenPacket calls net.ListenPacket inside the namespace. The address must be
// literal.
func (h *Host) ListenPacket(network, addr string) (c net.PacketConn, err error) {
	err = h.Do(func() error {
		c, err = net.ListenPacket(network, addr)
		return err
	})
	return c, err
}

// Dial connects from inside the namespace, from laddr ("" for any) to raddr. Both must be
// literal. "tcp" and "udp" take address and port. To limit the time, use a context with a
// deadline.
func (h *Host) Dial(ctx context.Context, network, laddr, raddr string) (conn net.Conn, err error) {
	// Other goroutines, outside the namespace, would look up a name and connect to a
	// host with several addresses.
	if _, err := netip.ParseAddrPort(raddr); err != nil {
		return nil, fmt.Errorf("%s: %w", h.Name, err)
	}
	var d net.Dialer
	if laddr != "" {
		local, err := netip.ParseAddrPort(laddr)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", h.Name, err)
		}
		switch {
		case strings.HasPrefix(network, "tcp"):
			d.LocalAddr = net.TCPAddrFromAddrPort(local)
		case strings.HasPrefix(network, "udp"):
			d.LocalAddr = net.UDPAddrFromAddrPort(local)
		default:
			return nil, fmt.Errorf("%s: local address for network %q", h.Name, network)
		}
	}
	err = h.Do(func() error {
		conn, err = d.DialContext(ctx, network, raddr)
		return err
	})
	return conn, err
}

// Get sends an HTTP request for a page, such as "127.0.0.1:10256/healthz", from inside the namespace, and
// returns the answer. If no answer comes within the time, code is 0 and body the error.
func (h *Host) Get(page string, timeout time.Duration) (code int, body string, header http.Header) {
	client := &http.Client{Timeout: timeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return h.Dial(ctx, network, "", to)
		},
	}}
	r, err := client.Get("http://" + page)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return 0, err.Error(), nil
	}
	return r.StatusCode, string(text), r.Header
}

// DialTCP connects from one of the namespace's addresses, with port 0 for any, to
// another address. lost is the number of packets without an answer that the kernel sent before
// the connection was accepted or refused, and 0 if neither happened. conn is nil if there is an
// error.
func (h *Host) DialTCP(ctx context.Context, from, to netip.AddrPort) (conn *net.TCPConn, lost int, err error) {
	// Dial closes the socket of a refused connection. A duplicate still has the number of
	// retransmissions and the ICMP errors.
	dup := -1
	six := to.Addr().Is6()
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(from),
		Control: func(_, _ string, raw syscall.RawConn) error {
			if dup >= 0 { // Dial tries again if it connected to itself
				unix.Close(dup)
			}
			var err error
			if cerr := raw.Control(func(fd uintptr) {
				dup, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
				err = errors.Join(err, reportICMPErrors(int(fd), six, true))
			}); cerr != nil {
				return cerr
			}
			return err
		},
	}
	err = h.ns.Do(func() error {
		c, err := d.DialContext(ctx, "tcp", to.String())
		if err == nil {
			conn = c.(*net.TCPConn)
		}
		return err
	})
	if dup >= 0 {
		defer unix.Close(dup)
	}
	if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
		return nil, 0, err
	}
	lost, lerr := unanswered(dup, err != nil)
	if lerr == nil {
		lerr = reportICMPErrors(dup, six, false)
	}
	if lerr != nil {
		if conn != nil {
			conn.Close()
		}
		return nil, 0, lerr
	}
	return conn, lost, err
}

// unanswered returns the number of packets without an answer that the kernel sent for a socket
// before its connection was accepted or refused. A socket that was refused by an ICMP error
// during connect(2) still counts as connecting. The kernel retransmits after a second unless the
// process has read the error by then, which it has not if it got no processor. The error of
// each packet is in the socket's queue.
func unanswered(fd int, refused bool) (int, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return 0, err
	}
	// Attempts that the kernel could not send are not counted.
	lost := int(info.Total_retrans)
	if !refused {
		return lost, nil
	}
	// The last packet was answered, by an ICMP error or a reset.
	for answered := -1; ; answered++ {
		_, _, _, _, err := unix.Recvmsg(fd, nil, make([]byte, 512), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return max(0, lost-max(0, answered)), nil
		}
		if err != nil {
			return 0, err
		}
	}
}

// reportICMPErrors makes the socket report ICMP errors immediately (ip(7), IP_RECVERR; during
// connect since Linux 5.8). Without it the kernel ignores an ICMP error that arrives during
// connect(2), as it does if the same machine refuses. Such a connection is refused only after
// a retransmission.
func reportICMPErrors(fd int, six, on bool) error {
	value := 0
	if on {
		value = 1
	}
	if six {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, value)
	}
	return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, value)
}

// RefusedUDP sends a few packets to the address, which must be literal, from one
// connected UDP socket inside the namespace. It returns an error unless each of them
// can be sent and is refused (ECONNREFUSED) within the time.
func (h *Host) RefusedUDP(to string, wait time.Duration) error {
	c, err := h.Dial(context.Background(), "udp", "", to)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(wait))
	for range 3 {
		if _, err := c.Write([]byte("hello")); err != nil {
			return fmt.Errorf("%s: cannot send to %s: %w", h.Name, to, err)
		}
		if n, err := c.Read(make([]byte, 64)); !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("%s: reading from %s: %d bytes and %v, want %v", h.Name, to, n, err, unix.ECONNREFUSED)
		}
	}
	return nil
}
