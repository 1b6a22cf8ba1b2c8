package conntrack

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/holdings"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
)

// TestLeastPrivilege has a process with nothing but CAP_NET_ADMIN, or without it,
// clean up.
func TestLeastPrivilege(t *testing.T) {
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
		if err := h.Start(cmd); err != nil {
			t.Fatal(err)
		}
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

// cleanUp is what a Cleaner does.
func cleanUp() error {
	c, err := New(Config{})
	if err != nil {
		return err
	}
	defer c.Close()
	c.Record(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
	return c.Flush(context.Background())
}

// TestSocketLost has the sockets of a Cleaner closed, or become something else: it
// opens others and goes on.
func TestSocketLost(t *testing.T) {
	h := netlab.NewHost(t)
	// For NodePorts the node's addresses are asked for.
	nodePort := service{name: "np", cluster: "10.96.0.99:53", nodePort: 30099, endpoints: eps("10.0.0.2:53")}.compile(everyAddress())
	for _, what := range []string{"another file", "another socket", "route"} {
		create(t, h, toOne, toTwo)
		before := routeSockets(t)
		c := cleanerAt(t, h, nil)
		k := c.table.(*kernel)
		fd := k.sock.FD()
		if what == "route" {
			opened := slices.DeleteFunc(routeSockets(t), func(fd int) bool { return slices.Contains(before, fd) })
			if len(opened) != 1 {
				t.Fatalf("it has the route sockets %v", opened)
			}
			fd = opened[0]
		}
		// Another file in its place, since a number that is free may be taken by
		// somebody else of this process.
		var other int
		var err error
		if what == "another file" {
			other, err = unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		} else {
			other, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(other)
		if err := unix.Dup3(other, fd, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		c.Record(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53")), change(nil, nodePort)}}, nil)
		err = c.Flush(t.Context())
		if what == "route" {
			// Whether it is lost is seen by using it.
			if err == nil || !c.Pending() {
				t.Errorf("%s: %v, pending %v", what, err, c.Pending())
			}
			err = c.Flush(t.Context())
		}
		if err != nil || c.Pending() {
			t.Fatalf("%s: %v, pending %v", what, err, c.Pending())
		}
		if got, want := read(t, h), shown(toTwo); !slices.Equal(got, want) {
			t.Errorf("%s: left %v, want %v", what, got, want)
		}
		if what == "route" {
			continue
		}
		if k.sock.FD() == fd {
			t.Errorf("%s: the number is still in use", what)
		}
		if err := unix.Close(fd); err != nil {
			t.Errorf("%s: somebody else's file was closed: %v", what, err)
		}
	}
}

// routeSockets returns the process's netlink sockets to routing.
func routeSockets(t *testing.T) (out []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err == nil && domain == unix.AF_NETLINK && protocol == unix.NETLINK_ROUTE {
			out = append(out, fd)
		}
	}
	return out
}

// TestSignals interrupts every system call that waits.
func TestSignals(t *testing.T) {
	h := netlab.NewHost(t)
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGALRM)
	defer signal.Stop(got)
	every := unix.Timeval{Usec: 100}
	if _, err := unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Interval: every, Value: every}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{})
	c := cleanerAt(t, h, nil)
	for range 20 {
		create(t, h, toOne, toTwo)
		c.Record(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
		if err := c.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := h.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
			t.Fatal(err)
		}
	}
	select { // the timer goes on
	case <-got:
	case <-time.After(patience):
		t.Error("there was no signal")
	}
}

const (
	ctaStatus = 3 // CTA_STATUS of nfnetlink_conntrack.h
	// IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED of nf_conntrack_common.h: the
	// kernel drops no such entry to make room.
	statusAssured = 2 | 4 | 8
)

// appendAssured appends the request to put in a UDP flow that the kernel must not
// drop.
func appendAssured(req []byte, k *kernel, f Flow) []byte {
	k.seq++
	start := len(req)
	req = beginMessage(req, ctNew, flagRequest|flagAck|unix.NLM_F_CREATE, k.seq, afInet)
	req = appendTuple(req, ctaTupleOrig, protoUDP, f.Src, f.Dst)
	req = appendTuple(req, ctaTupleReply, protoUDP, f.ReplySrc, f.ReplyDst)
	req = appendAttr(req, ctaStatus, binary.BigEndian.AppendUint32(nil, statusAssured)...)
	return endMessage(appendAttr(req, ctaTimeout, 0, 0, 2, 0), start)
}

// fillUp puts in flows that the kernel must not drop, until it takes no more or
// there are so many, and returns how many it took.
func fillUp(tb testing.TB, h *netlab.Host, most int) int {
	tb.Helper()
	open, err := openKernel(h.File())
	if err != nil {
		tb.Fatal(err)
	}
	defer open.Close()
	k := open.(*kernel)
	const batch = 128
	taken, full := 0, false
	for i := 0; i < most && !full; i += batch {
		var req []byte
		for j := i; j < i+batch; j++ {
			src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, 16 + byte(j>>24), byte(j >> 16), byte(j >> 8)}), uint16(1000+j&255))
			req = appendAssured(req, k, Flow{Src: src, Dst: ap("172.31.0.1:9"), ReplySrc: ap("172.31.0.1:9"), ReplyDst: src})
		}
		err := k.exchange(tb.Context(), req, batch, func(m message) (bool, error) {
			err := m.err()
			switch {
			case err == nil:
				taken++
			case errors.Is(err, unix.ENOMEM):
				full = true
			default:
				return true, err
			}
			return true, nil
		})
		if err != nil {
			tb.Fatal(err)
		}
	}
	return taken
}

// TestTableFull fills the kernel's table to its last entry. Connections that are
// in it live, and stale flows can be deleted; new connections have to wait until
// there is room.
func TestTableFull(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds and a hundred megabytes of kernel memory")
	}
	node := netlab.NewHost(t)
	_, err := node.Output("nft", "--version")
	netlab.Need(t, err == nil, "the nft command")
	limit, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	if err != nil {
		t.Fatal(err)
	}
	most, err := strconv.Atoi(strings.TrimSpace(string(limit)))
	if err != nil {
		t.Fatal(err)
	}
	if most > 300000 {
		t.Skipf("the table has room for %d entries, more than a test should put in", most)
	}
	lab, err := netlab.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lab.Close() })
	client, err := lab.Host("client")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		lab.Link(client, "eth0", node, "eth0"),
		client.AddAddr("eth0", netip.MustParsePrefix("10.9.0.2/24")),
		node.AddAddr("eth0", netip.MustParsePrefix("10.9.0.1/24")),
		client.AddRoute(netip.MustParsePrefix("10.96.0.1/32"), addr("10.9.0.1"), "eth0"),
	); err != nil {
		t.Fatal(err)
	}
	l, err := node.Listen("tcp", "10.9.0.1:8080")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for r := bufio.NewReader(c); ; {
					line, err := r.ReadString('\n')
					if err != nil {
						return
					}
					c.Write([]byte(line))
				}
			}()
		}
	}()
	if _, err := node.Output("nft", "table ip t { chain c { type nat hook prerouting priority dstnat; ip daddr 10.96.0.1 tcp dport 80 dnat to 10.9.0.1:8080; }; }"); err != nil {
		t.Fatal(err)
	}
	dial := func(wait time.Duration) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		return client.Dial(ctx, "tcp", "", "10.96.0.1:80")
	}
	held, err := dial(patience)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	r, n := bufio.NewReader(held), 0
	lives := func(when string) {
		t.Helper()
		n++
		want := fmt.Sprintln("line", n)
		held.SetDeadline(time.Now().Add(patience))
		if _, err := held.Write([]byte(want)); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if got, err := r.ReadString('\n'); err != nil || got != want {
			t.Fatalf("%s: %q, %v", when, got, err)
		}
	}
	lives("before")
	// One that is not assured might be dropped to make room for the connection that
	// there must be none for.
	open, err := openKernel(node.File())
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for _, f := range []Flow{toOne, toTwo} {
		k := open.(*kernel)
		if err := k.exchange(t.Context(), appendAssured(nil, k, f), 1, func(m message) (bool, error) { return true, m.err() }); err != nil {
			t.Fatal(err)
		}
	}
	c := cleanerAt(t, node, nil)

	start := time.Now()
	taken := fillUp(t, node, most+most/8+1000)
	t.Logf("%d entries put in, of at most %d, in %v", taken, most, time.Since(start).Round(time.Millisecond))
	if taken < most/2 || taken > most+most/8 {
		t.Fatal("that is not what full is")
	}
	if conn, err := dial(500 * time.Millisecond); err == nil {
		conn.Close()
		t.Fatal("there is room for a new connection")
	}
	lives("when the table is full")
	c.Record(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
	if err := c.Flush(t.Context()); err != nil {
		t.Fatalf("when the table is full: %v", err)
	}
	lives("after a clean-up")

	if err := node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
		t.Fatal(err)
	}
	conn, err := dial(patience)
	if err != nil {
		t.Fatalf("when there is room again: %v", err)
	}
	conn.Close()
}

// TestLeaks makes and closes Cleaners, and records Services that come and go: what
// is held afterwards is what was held after as many of each.
func TestLeaks(t *testing.T) {
	h := netlab.NewHost(t)
	kept := cleanerAt(t, h, nil)
	rounds := 100
	if testing.Short() {
		rounds = 20
	}
	work := func() {
		for i := range rounds {
			if i%10 == 0 { // the kernel takes its time to close sockets
				c, err := New(Config{NetNS: h.File()})
				if err != nil {
					t.Fatal(err)
				}
				if err := c.Close(); err != nil {
					t.Fatal(err)
				}
			}
			var came, went []ruleset.Change
			for n := range 20 {
				s := service{name: fmt.Sprint("s", n), cluster: fmt.Sprintf("10.96.%d.%d:53", i%200, n), nodePort: uint16(30000 + n), endpoints: eps("10.0.0.1:53")}.compile(everyAddress())
				came, went = append(came, change(nil, s)), append(went, change(s, nil))
			}
			for _, changes := range [][]ruleset.Change{came, went} {
				kept.Record(&ruleset.Delta{Node: everyAddress(), OldNode: everyAddress(), Changes: changes}, nil)
				if i%10 != 0 { // every time the whole table is read
					continue
				}
				if err := kept.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	work()
	before := holdings.Now()
	work()
	before.Keep(t, 200<<10)
}
