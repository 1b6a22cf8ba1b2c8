//go:build linux

package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/iptables/internal/nfacct"
	"github.com/go-proxier/proxier/tracker"
)

// counts returns the counters.
func counts(tb testing.TB, b *Backend) map[string]uint64 {
	tb.Helper()
	out := must.Get(b.Counters())(tb)
	return out
}

// counted returns the sum, over both families, of iptables' own counters of the rules with
// a text.
func (r *rig) counted(table, text string) (sum uint64) {
	r.Helper()
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		for line := range strings.Lines(r.command(f, "-save", "-c", "-t", table)) {
			var packets, bytes uint64
			if _, err := fmt.Sscanf(line, "[%d:%d] -A", &packets, &bytes); err == nil && strings.Contains(line, text) {
				sum += packets
			}
		}
	}
	return sum
}

// accounts returns a connection to the accounting objects of the rig's namespace.
func (r *rig) accounts() *nfacct.Conn {
	r.Helper()
	c := must.Get(nfacct.Dial(r.host().File()))(r)
	r.Cleanup(func() { c.Close() })
	return c
}

// TestInvalidPacketsAreCounted forwards packets that belong to no connection, in both
// families.
func TestInvalidPacketsAreCounted(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		netlab.Require(t)
		lab, hosts := netlab.NewHosts(t, "node", "client")
		node, client := hosts["node"], hosts["client"]
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		lab.Link(node, "eth0", client, "eth0")
		node.Forward()
		// The node routes packets for these addresses back to the client's link.
		remote := []netip.Addr{netip.MustParseAddr("198.18.0.9"), netip.MustParseAddr("fd00:18::9")}
		for i, link := range []string{"192.0.2.%d/24", "fd00:2::%d/64"} {
			nodeAddr, clientAddr := netip.MustParsePrefix(fmt.Sprintf(link, 1)), netip.MustParsePrefix(fmt.Sprintf(link, 2))
			must(node.AddAddr("eth0", nodeAddr))
			must(client.AddAddr("eth0", clientAddr))
			to := netip.PrefixFrom(remote[i], remote[i].BitLen())
			must(node.AddRoute(to, clientAddr.Addr(), ""))
			must(client.AddRoute(to, nodeAddr.Addr(), ""))
		}
		r := newRig(t, onLinux(flavor), func(c *Config) { c.NetNS = node.File() })
		r.node.(*linuxNode).host = node
		needCounters(t, r.backend)
		r.sync()
		if c, ok := counts(t, r.backend)[InvalidDropped]; !ok || c != 0 {
			t.Fatalf("before the first packet: %d, %v", c, ok)
		}
		const each = 3
		for i, a := range remote {
			must(client.Do(func() error { return sendInvalid(a, each) }))
			want := uint64((i + 1) * each)
			eventually(t, fmt.Sprintf("%d packets to %v and earlier ones are counted", each, a), func() bool {
				return counts(t, r.backend)[InvalidDropped] >= want
			})
		}
		got, want := counts(t, r.backend)[InvalidDropped], r.counted("filter", "--ctstate INVALID")
		if got != want || got == 0 {
			t.Errorf("counted %d packets, iptables counted %d", got, want)
		}
		// A new backend does not reset the counters.
		r.start()
		r.sync()
		r.verify()
		if now := counts(t, r.backend)[InvalidDropped]; now < got {
			t.Errorf("after a restart: %d, before: %d", now, got)
		}
		r.backend.Close()
		if _, err := r.backend.Counters(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// sendInvalid sends TCP packets without flags, which belong to no connection.
func sendInvalid(to netip.Addr, n int) error {
	header := make([]byte, 20)
	binary.BigEndian.PutUint16(header[0:], 1234)
	binary.BigEndian.PutUint16(header[2:], 80)
	header[12] = 5 << 4 // length of the header, in words of 32 bits
	family, sa := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Addr: [4]byte(to.AsSlice()[:4])})
	if to.Is6() {
		family, sa = unix.AF_INET6, &unix.SockaddrInet6{Addr: to.As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for range n {
		if err := unix.Sendto(fd, header, 0, sa); err != nil {
			return err
		}
	}
	return nil
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timeout: %s", what)
		}
	}
}

// TestLocalhostNodePortsAreCounted connects to a NodePort at loopback addresses, which must
// be counted, and at another address, which must not.
func TestLocalhostNodePortsAreCounted(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor), func(c *Config) { c.LocalhostNodePorts = true })
		needCounters(t, r.backend)
		a := netip.MustParseAddrPort("192.168.9.1:8080")
		must.Do(t, r.host().AddAddr("lo", netip.PrefixFrom(a.Addr(), 32)))
		acceptor(t, r, []netip.AddrPort{a})
		es := slice(0, tracker.IPv4)
		es.Endpoints = []discovery.Endpoint{{Addresses: []string{a.Addr().String()}}}
		r.tracker.SetService(svc(0, nodePort(30000)))
		r.tracker.SetSlice(es)
		r.sync()
		r.verify()
		connect := func(to string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			c := must.Get(r.host().Dial(ctx, "tcp", "", to))(t)
			defer c.Close()
			c.SetDeadline(time.Now().Add(20 * time.Second))
			if server, err := io.ReadAll(c); err != nil || string(server) != a.String() {
				t.Errorf("%s: %q, %v", to, server, err)
			}
		}
		connect("192.168.9.1:30000")
		if c, ok := counts(t, r.backend)[LocalhostNodePorts]; !ok || c != 0 {
			t.Errorf("another address was counted: %d, %v", c, ok)
		}
		for range 3 {
			connect("127.0.0.1:30000")
		}
		connect("127.1.2.3:30000")
		got, want := counts(t, r.backend)[LocalhostNodePorts], r.counted("nat", LocalhostNodePorts)
		if got != 4 || got != want {
			t.Errorf("4 connections are counted as %d, iptables counted %d", got, want)
		}

		// A restart writes nothing.
		r.start()
		r.node.calls()
		r.sync()
		if calls := r.node.calls(); !slices.Equal(calls, []string{""}) {
			t.Errorf("a restart wrote %q", calls)
		}
		if again := counts(t, r.backend)[LocalhostNodePorts]; again != got {
			t.Errorf("after a restart: %d, want %d", again, got)
		}
		// Without objects there are no such rules.
		r.config.uncounted = true
		r.start()
		r.sync()
		r.verify()
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			if text := r.command(f, "-save"); strings.Contains(text, "nfacct") {
				t.Errorf("without objects the rules are\n%s", text)
			}
		}
		if c, err := r.backend.Counters(); len(c) != 0 || err != nil {
			t.Errorf("without objects: %v, error %v", c, err)
		}
		connect("127.0.0.1:30000")
	})
}

// TestDeletedCounterIsRecreated deletes an object that no rule counts into yet. A NodePort
// that needs the object must be programmed, by an incremental and by a full delta.
func TestDeletedCounterIsRecreated(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		var log lines
		r := newRig(t, onLinux(flavor), func(c *Config) {
			c.LocalhostNodePorts, c.Log = true, slog.New(slog.NewTextHandler(&log, nil))
		})
		needCounters(t, r.backend)
		r.set(0, []int{1})
		r.sync()
		gone := func() {
			t.Helper()
			must.Do(t, r.accounts().Delete(LocalhostNodePorts))
			if _, ok := counts(t, r.backend)[LocalhostNodePorts]; ok {
				t.Error("Counters returns a deleted object")
			}
		}
		gone()
		r.set(1, []int{2}, nodePort(30001))
		r.sync()
		r.verify()
		if rules := r.kernel(tracker.IPv4)["nat "+chainNodePorts]; len(rules) != 2 || !strings.Contains(rules[0], counted(LocalhostNodePorts)) {
			t.Errorf("NodePorts are %q", rules)
		}
		if log.b.Len() != 0 {
			t.Errorf("the backend logged: %s", log.b.String())
		}
		if err := r.accounts().Delete(LocalhostNodePorts); !errors.Is(err, unix.EBUSY) {
			t.Errorf("an object in use: %v", err)
		}
		// Delete it again before a full delta.
		r.set(1, []int{2})
		r.sync()
		eventually(t, "no rule uses the object any more", func() bool {
			return !errors.Is(r.accounts().Delete(LocalhostNodePorts), unix.EBUSY)
		})
		r.set(1, []int{2}, nodePort(30001))
		r.cursor.Resync()
		r.sync()
		r.verify()
	})
}

// lines is a log for concurrent writers.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// count returns how many lines have a text.
func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// TestMissingCountersAreLogged removes each requirement of counters in turn. Services must be
// served without counters, with one line in the log.
func TestMissingCountersAreLogged(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		var log lines
		r := newRig(t, onLinux(flavor), func(c *Config) {
			c.LocalhostNodePorts, c.Log = true, slog.New(slog.NewTextHandler(&log, nil))
		})
		needCounters(t, r.backend)
		r.everyKind()
		r.sync()
		without := func(what string, logged int) {
			t.Helper()
			r.sync()
			r.verify()
			for _, f := range r.backend.families {
				if f.counters != nil || strings.Contains(fmt.Sprint(r.kernel(f.family)), "nfacct") {
					t.Errorf("%s: %v counts %+v", what, f.family, f.counters)
				}
			}
			if n := log.count(notCounted); n != logged {
				t.Errorf("%s: logged %d times so far, want %d", what, n, logged)
			}
		}
		// The program, or the kernel, has no match, in each family.
		r.node.set("refuse", "nfacct")
		r.start()
		if c, err := r.backend.Counters(); len(c) != 0 || err != nil {
			t.Errorf("without the match: %v, error %v", c, err)
		}
		without("no match", 2)
		r.node.set("", "")
		r.start()
		r.sync()
		r.verify()
		if c := counts(t, r.backend); len(c) != 2 {
			t.Errorf("with the match again: %v", c)
		}

		// Another program's object has the same name.
		r.config.uncounted = true
		r.start()
		r.sync()
		for _, name := range countersFor(true) {
			eventually(t, "no rule uses "+name+" any more", func() bool { return r.accounts().Delete(name) == nil })
		}
		must.Do(t, r.host().Do(func() error { return makeQuota(InvalidDropped) }))
		r.config.uncounted = false
		r.start()
		without("a quota", 3)
		// Another program replaces the object after New.
		must.Do(t, r.accounts().Delete(InvalidDropped))
		r.start()
		must.Do(t, r.accounts().Delete(InvalidDropped))
		must.Do(t, r.host().Do(func() error { return makeQuota(InvalidDropped) }))
		without("a quota later", 5)
		must.Do(t, r.accounts().Delete(InvalidDropped))
		r.cursor.Resync()
		r.sync()
		r.verify()
		if c := counts(t, r.backend); len(c) != 2 {
			t.Errorf("after the repair: %v", c)
		}
	})
}

// makeQuota creates an accounting object with a quota of packets, as the program nfacct can.
func makeQuota(name string) error {
	n := binary.NativeEndian
	attribute := func(b []byte, kind uint16, value []byte) []byte {
		b = n.AppendUint16(b, uint16(4+len(value)))
		b = n.AppendUint16(b, kind)
		b = append(b, value...)
		return append(b, make([]byte, (4-len(value)%4)%4)...)
	}
	number := binary.BigEndian
	body := make([]byte, 4)
	body = attribute(body, 1, append([]byte(name), 0))        // NFACCT_NAME
	body = attribute(body, 5, number.AppendUint32(nil, 1))    // NFACCT_FLAGS: NFACCT_F_QUOTA_PKTS
	body = attribute(body, 6, number.AppendUint64(nil, 1000)) // NFACCT_QUOTA
	msg := n.AppendUint32(nil, uint32(16+len(body)))
	msg = n.AppendUint16(msg, unix.NFNL_SUBSYS_ACCT<<8) // NFNL_MSG_ACCT_NEW
	msg = n.AppendUint16(msg, unix.NLM_F_REQUEST|unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	msg = append(msg, make([]byte, 8)...)
	msg = append(msg, body...)
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 1024)
	if _, _, err := unix.Recvfrom(fd, answer, 0); err != nil {
		return err
	}
	if errno := int32(n.Uint32(answer[16:])); errno != 0 {
		return unix.Errno(-errno)
	}
	return nil
}

// TestCleanupDeletesUnusedCounters checks that Cleanup deletes an object with the last rule
// that counts into it, including rules of other programs.
func TestCleanupDeletesUnusedCounters(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor), func(c *Config) { c.LocalhostNodePorts = true })
		needCounters(t, r.backend)
		existing := func() (out []string) {
			t.Helper()
			for _, name := range countersFor(true) {
				if _, err := r.accounts().Get(name); err == nil {
					out = append(out, name)
				} else if !errors.Is(err, unix.ENOENT) {
					t.Fatal(err)
				}
			}
			return out
		}
		r.everyKind()
		r.sync()
		clean := func(families ...tracker.Family) {
			t.Helper()
			c := r.config
			c.Families = families
			must.Do(t, Cleanup(t.Context(), c))
		}
		clean(tracker.IPv4)
		if got := existing(); !slices.Equal(got, []string{InvalidDropped}) {
			t.Errorf("with rules of IPv6: %v", got)
		}
		clean(tracker.IPv6)
		if got := existing(); got != nil {
			t.Errorf("without rules: %v", got)
		}
		r.cursor.Resync()
		r.sync()
		r.verify()
		foreign := []string{"INPUT", "-m", "nfacct", "--nfacct-name", LocalhostNodePorts, "-s", "203.0.113.1", "-j", "DROP"}
		r.command(tracker.IPv4, "", append([]string{"-A"}, foreign...)...)
		clean()
		if got := existing(); !slices.Equal(got, []string{LocalhostNodePorts}) {
			t.Errorf("with another program's rule: %v", got)
		}
	})
}
