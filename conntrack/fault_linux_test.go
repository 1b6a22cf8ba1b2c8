package conntrack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/usage"
	"github.com/go-proxier/proxier/ruleset"
)

// TestCleanUpNeedsOnlyNetAdmin cleans up in a process that has only CAP_NET_ADMIN, and in one
// without it.
func TestCleanUpNeedsOnlyNetAdmin(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		capabilities []int
		enough       bool
	}{
		{[]int{unix.CAP_NET_ADMIN}, true},
		{[]int{unix.CAP_NET_RAW, unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE}, false},
		{nil, false},
	} {
		h := netlab.NewHost(t)
		create(t, h, toOne, toTwo)
		var said strings.Builder
		cmd := confine.Command("clean up", confine.Limits{Capabilities: c.capabilities})
		cmd.Stderr = &said
		must.Do(t, h.Start(cmd))
		err := cmd.Wait()
		want := shown(toTwo)
		if !c.enough {
			want = shown(toOne, toTwo)
		}
		if c.enough != (err == nil) || !c.enough && !strings.Contains(said.String(), unix.EPERM.Error()) {
			t.Errorf("with capabilities %v: %v, %s", c.capabilities, err, said.String())
		}
		if got := read(t, h); !slices.Equal(got, want) {
			t.Errorf("with capabilities %v: left %v, want %v", c.capabilities, got, want)
		}
	}
}

// cleanUp opens a Cleaner and flushes it.
func cleanUp() error {
	c, err := New(context.Background(), Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	c.note(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
	return c.Flush(context.Background())
}

// TestSignalsDoNotFailFlush interrupts every blocking system call.
func TestSignalsDoNotFailFlush(t *testing.T) {
	h := netlab.NewHost(t)
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGALRM)
	defer signal.Stop(got)
	every := unix.Timeval{Usec: 100}
	must.Get(unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Interval: every, Value: every}))(t)
	defer unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{})
	c := cleanerAt(t, h, nil)
	for range 20 {
		create(t, h, toOne, toTwo)
		c.note(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
		must.Do(t, c.Flush(t.Context()))
		must.Do(t, h.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	}
	select { // the timer goes on
	case <-got:
	case <-time.After(testtime.Timeout):
		t.Error("there was no signal")
	}
}

// fillUp creates flows that the kernel must not drop, until the kernel refuses one or there
// are most, and returns their number.
func fillUp(tb testing.TB, h *netlab.Host, most int) int {
	tb.Helper()
	k := kernelAt(tb, h)
	const batch = 128
	taken, full := 0, false
	for i := 0; i < most && !full; i += batch {
		var req []byte
		first := k.conn.Sequence(batch)
		for j := i; j < i+batch; j++ {
			src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, 16 + byte(j>>24), byte(j >> 16), byte(j >> 8)}), uint16(1000+j&255))
			req = appendCreate(req, first+uint32(j-i), Flow{Protocol: inet.UDP, Src: src, Dst: ap("172.31.0.1:9"), ReplySrc: ap("172.31.0.1:9"), ReplyDst: src})
		}
		err := k.conn.Exchange(tb.Context(), req, first, batch, func(m nfnl.Message) error {
			err := m.Err()
			switch {
			case err == nil:
				taken++
			case errors.Is(err, unix.ENOMEM):
				full = true
			default:
				return err
			}
			return nil
		})
		if err != nil {
			tb.Fatal(err)
		}
	}
	return taken
}

// TestFullTableCanBeCleanedUp fills the kernel's table to its last entry. Existing connections
// live, stale flows can be deleted, and new connections work once there is room.
func TestFullTableCanBeCleanedUp(t *testing.T) {
	testtime.NeedThorough(t)
	lab, hosts := netlab.NewHosts(t, "node", "client")
	node, client := hosts["node"], hosts["client"]
	netlab.NeedPrograms(t, "nft")
	limit := must.Get(os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max"))(t)
	most := must.Get(strconv.Atoi(strings.TrimSpace(string(limit))))(t)
	if most > 300000 {
		t.Skipf("the table has room for %d entries, too many for a test", most)
	}
	lab.Link(client, "eth0", node, "eth0")
	client.Addrs("eth0", "10.9.0.2/24")
	node.Addrs("eth0", "10.9.0.1/24")
	client.Routes("eth0", "10.9.0.1", "10.96.0.1/32")
	node.ServeTCP(t, "10.9.0.1:8080", func(c net.Conn) { _, _ = io.Copy(c, c) })
	must.Get(node.Run(t, "nft", "table ip t { chain c { type nat hook prerouting priority dstnat; ip daddr 10.96.0.1 tcp dport 80 dnat to 10.9.0.1:8080; }; }"))(t)
	dial := func(wait time.Duration) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		return client.Dial(ctx, "tcp", "", "10.96.0.1:80")
	}
	held := must.Get(dial(testtime.Timeout))(t)
	defer held.Close()
	r, n := bufio.NewReader(held), 0
	lives := func(when string) {
		t.Helper()
		n++
		want := fmt.Sprintln("line", n)
		held.SetDeadline(time.Now().Add(testtime.Timeout))
		if _, err := held.Write([]byte(want)); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if got, err := r.ReadString('\n'); err != nil || got != want {
			t.Fatalf("%s: %q, %v", when, got, err)
		}
	}
	lives("before")
	create(t, node, toOne, toTwo)
	c := cleanerAt(t, node, nil)

	start := time.Now()
	taken := fillUp(t, node, most+most/8+1000)
	t.Logf("%d entries created, of at most %d, in %v", taken, most, time.Since(start).Round(time.Millisecond))
	if taken < most/2 || taken > most+most/8 {
		t.Fatal("the table is not full")
	}
	if conn, err := dial(500 * time.Millisecond); err == nil {
		conn.Close()
		t.Fatal("there is room for a new connection")
	}
	lives("when the table is full")
	c.note(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
	if err := c.Flush(t.Context()); err != nil {
		t.Fatalf("when the table is full: %v", err)
	}
	lives("after a clean-up")

	must.Do(t, node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	conn, err := dial(testtime.Timeout)
	if err != nil {
		t.Fatalf("when there is room again: %v", err)
	}
	conn.Close()
}

// TestCleanersDoNotLeak opens and closes Cleaners, and records Services that come and go. A
// second round must not use more resources than the first.
func TestCleanersDoNotLeak(t *testing.T) {
	h := netlab.NewHost(t)
	kept := cleanerAt(t, h, nil)
	rounds := 100
	if !testtime.Thorough() {
		rounds = 20
	}
	work := func() {
		for i := range rounds {
			if i%10 == 0 { // the kernel closes sockets slowly
				c := must.Get(New(t.Context(), Config{NetNS: h.File()}))(t)
				must.Do(t, c.Close())
			}
			var came, went []ruleset.Change
			for n := range 20 {
				s := service{name: fmt.Sprint("s", n), cluster: fmt.Sprintf("10.96.%d.%d:53", i%200, n), nodePort: uint16(30000 + n), endpoints: eps("10.0.0.1:53")}.compile(everyAddress())
				came, went = append(came, change(nil, s)), append(went, change(s, nil))
			}
			for _, changes := range [][]ruleset.Change{came, went} {
				kept.note(&ruleset.Delta{Node: everyAddress(), OldNode: everyAddress(), Changes: changes}, nil)
				if i%10 != 0 { // every time the whole table is read
					continue
				}
				must.Do(t, kept.Flush(t.Context()))
			}
		}
	}
	work()
	before := usage.Now()
	work()
	before.Keep(t, 200<<10)
}

// sockets returns the process's netlink sockets of a protocol.
func sockets(t *testing.T, protocol int) (out []int) {
	t.Helper()
	entries := must.Get(os.ReadDir("/proc/self/fd"))(t)
	for _, e := range entries {
		fd := must.Get(strconv.Atoi(e.Name()))(t)
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err == nil && domain == unix.AF_NETLINK && got == protocol {
			out = append(out, fd)
		}
	}
	return out
}
