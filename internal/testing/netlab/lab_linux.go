package netlab

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
)

// Lab is a set of hosts. Its network is built by steps: Host, Link, Do, and the methods of a [Host] that
// say so. If a step fails, later steps do nothing. Steps must not run concurrently.
type Lab struct {
	// Err is the error of the step that failed. In a lab of [NewHosts] a failed step ends the test.
	Err error

	tb      testing.TB // nil in programs
	hosts   map[string]*Host
	servers []io.Closer
	closed  bool
}

// New returns a Lab without hosts. The caller must call [Lab.Close].
func New() *Lab { return &Lab{hosts: map[string]*Host{}} }

// Do runs a step.
func (l *Lab) Do(step func() error) {
	if l.Err != nil {
		return
	}
	if l.Err = step(); l.Err != nil && l.tb != nil {
		l.tb.Helper()
		l.tb.Fatal(l.Err)
	}
}

// Host adds a host: a new network namespace with the loopback interface up, forwarding
// off, reverse-path filtering off, IPv6 addresses usable immediately (no duplicate address
// detection), no limit on the rate of ICMP errors, and no following of redirects. The name
// is for messages and must be unique in the lab.
func (l *Lab) Host(name string) *Host {
	h := &Host{Name: name, lab: l}
	l.Do(func() (err error) {
		switch {
		case l.closed:
			return errors.New("netlab: lab is closed")
		case l.hosts[name] != nil:
			return fmt.Errorf("netlab: host %q exists already", name)
		}
		if h.ns, err = netns.New(); err != nil {
			return fmt.Errorf("netlab: host %s: %w", name, err)
		}
		l.hosts[name] = h
		return h.setup()
	})
	return h
}

// Close ends all servers and removes all hosts and their links. Processes and open sockets in a
// namespace keep it alive, but nothing can reach it. Further calls do nothing.
func (l *Lab) Close() error {
	var errs []error
	for _, s := range l.servers {
		s.Close()
	}
	for _, h := range l.hosts {
		errs = append(errs, h.ns.Close())
	}
	clear(l.hosts)
	l.servers, l.closed = nil, true
	return errors.Join(errs...)
}

// Link joins two hosts by a pair of virtual Ethernet interfaces. Both are up when Link
// returns.
func (l *Lab) Link(a *Host, ifA string, b *Host, ifB string) {
	add := func() error {
		return a.netlink(func(nl *netlink.Handle) error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = ifA
			return nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: ifB, PeerNamespace: netlink.NsFd(b.ns.File().Fd())})
		})
	}
	for _, do := range []func() error{
		add,
		func() error { return a.onLink(ifA, (*netlink.Handle).LinkSetUp) },
		func() error { return b.onLink(ifB, (*netlink.Handle).LinkSetUp) },
		func() error { return a.waitUp(ifA) },
		func() error { return b.waitUp(ifB) },
	} {
		l.Do(func() error {
			if err := do(); err != nil {
				return fmt.Errorf("netlab: link %s:%s to %s:%s: %w", a.Name, ifA, b.Name, ifB, err)
			}
			return nil
		})
	}
}

// waitUp waits until the interface can send. Kernel workers must have passed on the carrier
// and added the IPv6 link-local address.
func (h *Host) waitUp(name string) error {
	var index int
	var own netip.Addr
	err := h.onLink(name, func(nl *netlink.Handle, _ netlink.Link) error {
		return wait(func() (bool, error) {
			link, err := nl.LinkByName(name)
			if err != nil || link.Attrs().OperState != netlink.OperUp {
				return false, err
			}
			index = link.Attrs().Index
			addrs, err := nl.AddrList(link, netlink.FAMILY_V6)
			if err != nil {
				return false, err
			}
			for _, a := range addrs {
				if a.IP.IsLinkLocalUnicast() && a.Flags&unix.IFA_F_TENTATIVE == 0 {
					own, _ = netip.AddrFromSlice(a.IP)
					return true, nil
				}
			}
			return false, nil
		})
	})
	if err == nil {
		err = h.waitSolicited(index, own)
	}
	if err != nil {
		return fmt.Errorf("interface %s did not come up: %w", name, err)
	}
	return nil
}

// waitSolicited waits until an interface receives the neighbor solicitations for one of its
// IPv6 addresses. A kernel worker joins their multicast group (RFC 4291 section 2.7.1) some
// time after the address was added. A neighbor whose solicitation comes before that repeats
// it only a second later.
func (h *Host) waitSolicited(index int, addr netip.Addr) error {
	a := addr.As16()
	group := fmt.Sprintf("ff0200000000000000000001ff%x", a[13:])
	return h.Do(func() error {
		return wait(func() (bool, error) {
			// The fields are the interface's index and name, the group, and others.
			list, err := os.ReadFile("/proc/thread-self/net/igmp6")
			if err != nil {
				return false, err
			}
			for line := range strings.Lines(string(list)) {
				f := strings.Fields(line)
				if len(f) > 2 && f[0] == strconv.Itoa(index) && f[2] == group {
					return true, nil
				}
			}
			return false, nil
		})
	})
}

// wait waits until ready reports true, for at most a minute, because kernel workers may be
// busy.
func wait(ready func() (bool, error)) error {
	deadline := time.Now().Add(time.Minute)
	for {
		ok, err := ready()
		if ok || err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
		if time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		time.Sleep(time.Millisecond)
	}
}
