package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func cleanerAt(tb testing.TB, h *netlab.Host, trace *Hooks) *Cleaner {
	tb.Helper()
	c := must.Get(New(tb.Context(), Config{NetNS: h.File(), Hooks: trace}))(tb)
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}

// create puts flows into the table.
func create(tb testing.TB, h *netlab.Host, flows ...Flow) {
	tb.Helper()
	k := kernelAt(tb, h)
	for _, f := range flows {
		seq := k.conn.Sequence(1)
		must.Do(tb, k.conn.Exchange(tb.Context(), appendCreate(nil, seq, f), seq, 1, nfnl.Message.Err))
	}
}

const (
	ctaStatus  = 3 // CTA_STATUS of nfnetlink_conntrack.h
	ctaTimeout = 7 // CTA_TIMEOUT
	// IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED of nf_conntrack_common.h: the
	// kernel drops no such entry to make room.
	statusAssured = 2 | 4 | 8
)

// appendCreate appends the request to create a flow that the kernel must not drop.
func appendCreate(req []byte, seq uint32, f Flow) []byte {
	start := len(req)
	req = nfnl.Begin(req, unix.NFNL_SUBSYS_CTNETLINK, nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_ACK|unix.NLM_F_CREATE, seq, inet.AF(tracker.FamilyOf(f.Dst.Addr())))
	req = tuple.Append(req, nl.CTA_TUPLE_ORIG, f.Protocol, f.Src, f.Dst)
	req = tuple.Append(req, nl.CTA_TUPLE_REPLY, f.Protocol, f.ReplySrc, f.ReplyDst)
	req = nfnl.AppendUint16(req, nl.CTA_ZONE, f.Zone)
	req = nfnl.AppendUint32(req, ctaStatus, statusAssured)
	req = nfnl.AppendUint32(req, ctaTimeout, 512)
	nfnl.End(req, start)
	return req
}

// read returns the table's flows, by a library, as "protocol client destination
// reply-source".
func read(tb testing.TB, h *netlab.Host) []string {
	tb.Helper()
	var out []string
	err := h.Do(func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return err
			}
			for _, f := range flows {
				if f.Forward.Protocol == unix.IPPROTO_ICMPV6 || f.Forward.Protocol == unix.IPPROTO_ICMP {
					continue
				}
				at := func(ip net.IP, port uint16) string {
					a, _ := netip.AddrFromSlice(ip)
					return netip.AddrPortFrom(a.Unmap(), port).String()
				}
				out = append(out, fmt.Sprint(f.Forward.Protocol, " ", at(f.Forward.SrcIP, f.Forward.SrcPort), " ",
					at(f.Forward.DstIP, f.Forward.DstPort), " ", at(f.Reverse.SrcIP, f.Reverse.SrcPort)))
			}
		}
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func shown(flows ...Flow) []string {
	var out []string
	for _, f := range flows {
		out = append(out, fmt.Sprint(f.Protocol, " ", f.Src, " ", f.Dst, " ", f.ReplySrc))
	}
	slices.Sort(out)
	return out
}

// TestKernelDumpReportsUDPFlows compares the decoded flows with the created ones.
func TestKernelDumpReportsUDPFlows(t *testing.T) {
	h := netlab.NewHost(t)
	tcp := flow("10.9.0.1:1000", "10.96.0.1:53", "10.0.0.1:53")
	tcp.Protocol = unix.IPPROTO_TCP
	zoned := flow("10.9.0.2:1000", "10.96.0.1:53", "10.0.0.1:53")
	zoned.Zone = 7
	masqueraded := flow("10.9.0.3:1000", "10.96.0.1:53", "10.0.0.1:5353")
	masqueraded.ReplyDst = ap("10.9.9.9:40000")
	v6 := flow("[fd09::1]:1000", "[fd96::1]:53", "[fd00::1]:5353")
	create(t, h, tcp, zoned, masqueraded, v6)

	k := kernelAt(t, h, 0, 7)
	for family, want := range map[tracker.Family][]Flow{
		tracker.IPv4: {masqueraded, zoned}, tracker.IPv6: {v6},
	} {
		var got []Flow
		must.Do(t, k.Dump(t.Context(), family, func(f *Flow) { got = append(got, *f) }))
		slices.SortFunc(got, func(a, b Flow) int { return b.Src.Compare(a.Src) })
		for i := range got {
			if got[i].ID == 0 {
				t.Error("a flow without an ID")
			}
			got[i].ID = 0
		}
		if !slices.Equal(got, want) {
			t.Errorf("%v:\n got %v\nwant %v", family, got, want)
		}
	}
}

// TestKernelDeletesOnlyGivenFlows deletes entries, but not a later one between the same
// addresses.
func TestKernelDeletesOnlyGivenFlows(t *testing.T) {
	h := netlab.NewHost(t)
	stay := flow("10.9.0.1:1000", "10.96.0.1:53", "10.0.0.1:53")
	zoned := flow("10.9.0.2:1000", "10.96.0.1:53", "10.0.0.1:53")
	zoned.Zone = 7
	v6 := flow("[fd09::1]:1000", "[fd96::1]:53", "[fd00::1]:5353")
	var many []Flow
	for i := range 3*deleteBatch + 1 {
		many = append(many, flow(fmt.Sprintf("10.9.1.1:%d", 1000+i), "10.96.0.1:53", "10.0.0.1:53"))
	}
	create(t, h, append(many, stay, zoned, v6)...)
	k := kernelAt(t, h, 0, 7)
	var doomed []Flow
	see := func(f *Flow) {
		if f.Src != stay.Src {
			doomed = append(doomed, *f)
		}
	}
	must.Do(t, errors.Join(k.Dump(t.Context(), tracker.IPv4, see), k.Dump(t.Context(), tracker.IPv6, see)))
	other := doomed[0]
	other.ID++ // as if another entry had replaced it
	if n, err := k.Delete(t.Context(), []Flow{other}); n != 0 || err != nil {
		t.Errorf("another entry's ID: %d deleted, %v", n, err)
	}
	if n, err := k.Delete(t.Context(), doomed); n != len(many)+2 || err != nil {
		t.Errorf("%d deleted of %d, %v", n, len(many)+2, err)
	}
	if n, err := k.Delete(t.Context(), doomed); n != 0 || err != nil {
		t.Errorf("a second time: %d, %v", n, err)
	}
	if got, want := read(t, h), shown(stay); !slices.Equal(got, want) {
		t.Errorf("left: %v, want %v", got, want)
	}
}

// TestKernelDumpAfterAbandonedDump dumps again after a canceled dump.
func TestKernelDumpAfterAbandonedDump(t *testing.T) {
	h := netlab.NewHost(t)
	var many []Flow
	for i := range 2000 { // several datagrams
		many = append(many, flow(fmt.Sprintf("10.9.1.1:%d", 1000+i), "10.96.0.1:53", "10.0.0.1:53"))
	}
	create(t, h, many...)
	k := kernelAt(t, h)
	ctx, cancel := context.WithCancel(t.Context())
	seen := 0
	err := k.Dump(ctx, tracker.IPv4, func(*Flow) { seen++; cancel() })
	if !errors.Is(err, context.Canceled) || seen == 0 || seen >= len(many) {
		t.Fatalf("%v after %d flows", err, seen)
	}
	seen = 0
	if err := k.Dump(t.Context(), tracker.IPv4, func(*Flow) { seen++ }); err != nil || seen != len(many) {
		t.Fatalf("then: %v after %d flows", err, seen)
	}
}

// TestKernelReportsLostAnswers deletes flows with a receive buffer that is too small for the
// answers, and then with a larger one.
func TestKernelReportsLostAnswers(t *testing.T) {
	h := netlab.NewHost(t)
	var many []Flow
	for i := range deleteBatch {
		many = append(many, flow(fmt.Sprintf("10.9.1.1:%d", 1000+i), "10.96.0.1:53", "10.0.0.1:53"))
	}
	create(t, h, many...)
	before := sockets(t, unix.NETLINK_NETFILTER)
	k := kernelAt(t, h)
	fd := slices.DeleteFunc(sockets(t, unix.NETLINK_NETFILTER), func(fd int) bool { return slices.Contains(before, fd) })[0]
	var doomed []Flow
	must.Do(t, k.Dump(t.Context(), tracker.IPv4, func(f *Flow) { doomed = append(doomed, *f) }))
	size := must.Get(unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF))(t)
	must.Do(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1))
	if _, err := k.Delete(t.Context(), doomed); !errors.Is(err, ErrIncomplete) || !errors.Is(err, unix.ENOBUFS) {
		t.Fatalf("with the smallest buffer: %v", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size/2); err != nil { // the kernel doubles it
		t.Fatal(err)
	}
	if _, err := k.Delete(t.Context(), doomed); err != nil {
		t.Error(err)
	}
	if left := read(t, h); len(left) != 0 {
		t.Errorf("%d flows left", len(left))
	}
}

// TestNewUsesTheThreadsNamespace calls New without a namespace.
func TestNewUsesTheThreadsNamespace(t *testing.T) {
	h := netlab.NewHost(t)
	create(t, h, toOne)
	var c *Cleaner
	must.Do(t, h.Do(func() (err error) { c, err = New(t.Context(), Config{}); return err }))
	defer c.Close()
	c.note(&ruleset.Delta{Full: true, Node: everyAddress(), Changes: []ruleset.Change{change(nil, dns("10.0.0.2:53"))}}, nil)
	must.Do(t, c.Flush(t.Context()))
	if left := read(t, h); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestKernelListsLocalAddrs(t *testing.T) {
	h := netlab.NewHost(t)
	for _, p := range []string{"192.0.2.1/24", "2001:db8::1/64"} {
		must.Do(t, h.AddAddr("lo", netip.MustParsePrefix(p)))
	}
	k := kernelAt(t, h)
	for family, want := range map[tracker.Family][]netip.Addr{
		tracker.IPv4: {addr("127.0.0.1"), addr("192.0.2.1")},
		tracker.IPv6: {addr("::1"), addr("2001:db8::1")},
	} {
		got, err := k.LocalAddrs(t.Context(), family)
		slices.SortFunc(got, netip.Addr.Compare)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%v: %v, %v, want %v", family, got, err, want)
		}
	}
}

func TestNewRejectsFileOfNoNamespace(t *testing.T) {
	if c, err := New(t.Context(), Config{NetNS: os.Stdin}); err == nil || c != nil {
		t.Errorf("%v, %v", c, err)
	}
}

// TestKernelLosesOnlyStaleFlows has flows of every kind together, in both families, and makes a
// change of every kind.
func TestKernelLosesOnlyStaleFlows(t *testing.T) {
	h := netlab.NewHost(t)
	if err := errors.Join(h.AddAddr("lo", netip.MustParsePrefix("192.0.2.1/32")),
		h.AddAddr("lo", netip.MustParsePrefix("2001:db8::1/128"))); err != nil {
		t.Fatal(err)
	}
	node := everyAddress()
	// v returns an address of either family: "s1" is cluster IP 1, "p1" pod 1.
	v := func(six bool, s string, port int) string {
		four := map[byte]string{'s': "10.96.0.%s", 'p': "10.0.0.%s", 'c': "10.9.0.%s", 'n': "192.0.2.%s", 'x': "198.51.100.%s"}
		long := map[byte]string{'s': "fd96::%s", 'p': "fd00::%s", 'c': "fd09::%s", 'n': "2001:db8::%s", 'x': "2001:db8:1::%s"}
		if six {
			return fmt.Sprintf("[%s]:%d", fmt.Sprintf(long[s[0]], s[1:]), port)
		}
		return fmt.Sprintf("%s:%d", fmt.Sprintf(four[s[0]], s[1:]), port)
	}
	var stay, stale []Flow
	var before, after []ruleset.Change
	for _, six := range []bool{false, true} {
		name := "v4"
		ext := "198.51.100.1"
		if six {
			name, ext = "v6", "2001:db8:1::1"
		}
		port := 1000
		f := func(dst string, dport int, src string, sport int) Flow {
			port++
			return flow(v(six, "c1", port), v(six, dst, dport), v(six, src, sport))
		}
		p := func(names ...string) []*tracker.Endpoint {
			var out []*tracker.Endpoint
			for _, n := range names {
				out = append(out, ep(v(six, n, 5300), ""))
			}
			return out
		}
		dns := service{name: name + "dns", cluster: v(six, "s1", 53), nodePort: 30053, external: []string{ext}, endpoints: p("p1", "p2")}
		old := service{name: name + "old", cluster: v(six, "s2", 53), nodePort: 30054, endpoints: p("p1", "p3")}
		idle := service{name: name + "idle", cluster: v(six, "s3", 53), nodePort: 30055}
		other := service{name: name + "other", cluster: v(six, "s4", 53), endpoints: p("p1")}
		a, b, c, d := dns.compile(node), old.compile(node), idle.compile(node), other.compile(node)
		for _, s := range []*ruleset.Port{a, b, c, d} {
			before = append(before, change(nil, s))
		}
		dns.endpoints, idle.endpoints = p("p2"), p("p4")
		after = append(after, change(a, dns.compile(node)), change(b, nil), change(c, idle.compile(node)))

		tcp := f("s1", 53, "p1", 5300)
		tcp.Protocol = unix.IPPROTO_TCP
		zoned := f("s1", 53, "p1", 5300)
		zoned.Zone = 1
		stay = append(stay, tcp, zoned,
			f("s1", 53, "p2", 5300),     // an endpoint that stays
			f("n1", 30053, "p2", 5300),  //
			f("s4", 53, "p1", 5300),     // another Service with the same endpoint
			f("s1", 54, "s1", 54),       // no port of a Service
			f("n9", 30053, "n9", 30053), // another host's NodePort
			f("n9", 30055, "n9", 30055), //
			f("p1", 5300, "p1", 5300),   // an endpoint, asked directly
		)
		stale = append(stale,
			f("s1", 53, "p1", 5300),     // the endpoint that went
			f("x1", 53, "p1", 5300),     //
			f("n1", 30053, "p1", 5300),  //
			f("s2", 53, "p1", 5300),     // the Service that went
			f("s2", 53, "p3", 5300),     //
			f("n1", 30054, "p3", 5300),  //
			f("s3", 53, "s3", 53),       // not translated, though there is an endpoint now
			f("n1", 30055, "n1", 30055), //
		)
	}
	var info FlushInfo
	c := cleanerAt(t, h, &Hooks{Flushed: func(i FlushInfo) { info = i }})
	backend := c.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
	must.Do(t, backend.Apply(t.Context(), &ruleset.Delta{Full: true, Node: node, Changes: before}))
	create(t, h, append(slices.Clone(stay), stale...)...)
	must.Do(t, errors.Join(backend.Apply(t.Context(), &ruleset.Delta{Node: node, OldNode: node, Changes: after}), c.Flush(t.Context())))
	if got, want := read(t, h), shown(stay...); !slices.Equal(got, want) {
		t.Errorf("left:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if info.Dumps != 2 || info.Deleted != len(stale) || info.Stale != len(stale) || info.Err != nil {
		t.Errorf("%+v, want 2 dumps and %d deleted", info, len(stale))
	}
}

// TestKernelClientReachesNextEndpoint has one client's socket send while its endpoint goes away.
// In a zone, only a Cleaner for that zone helps the client.
func TestKernelClientReachesNextEndpoint(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	netlab.NeedPrograms(t, "nft")
	type world struct {
		name, client, node, vip, one, two, family, zone string
	}
	v4 := world{"IPv4", "10.9.0.2/24", "10.9.0.1/24", "10.96.0.1", "10.0.0.1", "10.0.0.2", "ip", ""}
	v6 := world{"IPv6", "fd09::2/64", "fd09::1/64", "fd96::1", "fd00::1", "fd00::2", "ip6", ""}
	worlds := []world{v4, v6}
	for _, zone := range []string{"ct zone set 7", "ct original zone set 7", "ct reply zone set 7"} {
		for _, w := range []world{v4, v6} {
			w.name, w.zone = w.name+" "+zone, zone
			worlds = append(worlds, w)
		}
	}
	for _, w := range worlds {
		t.Run(w.name, func(t *testing.T) {
			lab, hosts := netlab.NewHosts(t, "node", "client")
			node, client := hosts["node"], hosts["client"]
			bits := addr(w.vip).BitLen()
			lab.Link(client, "eth0", node, "eth0")
			client.Addrs("eth0", w.client)
			node.Addrs("eth0", w.node)
			client.Routes("eth0", netip.MustParsePrefix(w.node).Addr().String(), fmt.Sprint(w.vip, "/", bits))
			at := func(a string) string { return netip.AddrPortFrom(addr(a), 53).String() }
			for _, e := range []string{w.one, w.two} {
				node.Addrs("lo", fmt.Sprint(e, "/", bits))
				node.ServeUDP(t, at(e), e)
			}
			conn := must.Get(client.Dial(t.Context(), "udp", "", at(w.vip)))(t)
			defer conn.Close()
			ask := func() string {
				t.Helper()
				b := make([]byte, 64)
				conn.SetDeadline(time.Now().Add(testtime.Timeout))
				must.Get(conn.Write([]byte("who")))(t)
				n := must.Get(conn.Read(b))(t)
				return string(b[:n])
			}
			// The data plane is one rule that sends all packets to one endpoint.
			dataPlane := ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
				to := d.Changes[0].New.Selection.Cluster[0].Addr.String()
				_, err := node.Run(t, "nft", fmt.Sprintf(`table %[1]s t
					delete table %[1]s t
					table %[1]s t {
					chain in { type filter hook prerouting priority raw; %[4]s; }
					chain out { type filter hook output priority raw; %[5]s; }
					chain c {
						type nat hook prerouting priority dstnat
						%[1]s daddr %[2]s udp dport 53 dnat to %[3]s
					}
					}
`, w.family, w.vip, to, cmp.Or(w.zone, "accept"), cmp.Or(w.zone, "accept")))
				return err
			})
			elsewhere := cleanerAt(t, node, nil)
			var zones []uint16
			if w.zone != "" {
				zones = []uint16{7}
			}
			c := must.Get(New(t.Context(), Config{NetNS: node.File(), Zones: zones}))(t)
			t.Cleanup(func() { c.Close() })
			backend := c.Wrap(dataPlane)
			info := everyAddress()
			svc := service{name: "dns", cluster: at(w.vip), endpoints: eps(at(w.one))}
			first := svc.compile(info)
			svc.endpoints = eps(at(w.two))
			second := svc.compile(info)
			must.Do(t, backend.Apply(t.Context(), &ruleset.Delta{Full: true, Node: info, Changes: []ruleset.Change{change(nil, first)}}))
			if got := ask(); got != w.one {
				t.Fatalf("answered by %s, want %s", got, w.one)
			}
			next := &ruleset.Delta{Node: info, OldNode: info, Changes: []ruleset.Change{change(first, second)}}
			must.Do(t, dataPlane.Apply(t.Context(), next))
			if got := ask(); got != w.one {
				t.Fatalf("without a clean-up answered by %s, so the test proves nothing", got)
			}
			if w.zone != "" {
				elsewhere.note(&ruleset.Delta{Full: true, Node: info, Changes: []ruleset.Change{change(nil, second)}}, nil)
				must.Do(t, elsewhere.Flush(t.Context()))
				if got := ask(); got != w.one {
					t.Fatalf("after a clean-up of zone 0 answered by %s, so the flow was in zone 0", got)
				}
			}
			must.Do(t, errors.Join(backend.Apply(t.Context(), next), c.Flush(t.Context())))
			if got := ask(); got != w.two {
				t.Fatalf("answered by %s, want %s", got, w.two)
			}
		})
	}
}

// TestServiceWithoutEndpointsLosesItsFlows has the sockets of two clients send to a cluster IP
// and to a NodePort while the Service loses its last endpoint. Their packets keep the flows
// alive, so only a clean-up keeps them from the endpoint.
func TestServiceWithoutEndpointsLosesItsFlows(t *testing.T) {
	t.Parallel()
	lab, hosts := netlab.NewHosts(t, "node", "client")
	node, client := hosts["node"], hosts["client"]
	lab.Link(client, "eth0", node, "eth0")
	client.Addrs("eth0", "10.9.0.2/24")
	node.Addrs("eth0", "10.9.0.1/24")
	node.Addrs("lo", "10.0.0.1/32")
	client.Routes("eth0", "10.9.0.1", "10.96.0.1/32")
	node.ServeUDP(t, "10.0.0.1:53", "answer")
	rules := func(text string) {
		t.Helper()
		// The kernel translates packets of old flows while it has a NAT chain and a rule that
		// needs connection tracking.
		if out, err := node.Run(t, "nft", "table ip t {\nchain c { type nat hook prerouting priority dstnat\n}\n}\nflush chain ip t c\nadd rule ip t c ct state new\n"+text); err != nil {
			t.Fatal(err, out)
		}
	}
	rules("add rule ip t c ip daddr 10.96.0.1 udp dport 53 dnat to 10.0.0.1:53\nadd rule ip t c udp dport 30053 dnat to 10.0.0.1:53\n")
	var sockets []net.Conn
	for _, to := range []string{"10.96.0.1:53", "10.9.0.1:30053"} {
		conn := must.Get(client.Dial(t.Context(), "udp", "", to))(t)
		defer conn.Close()
		sockets = append(sockets, conn)
	}
	answered := func(conn net.Conn, wait time.Duration) bool {
		conn.SetDeadline(time.Now().Add(wait))
		if _, err := conn.Write([]byte("who")); err != nil {
			return false
		}
		_, err := conn.Read(make([]byte, 64))
		return err == nil
	}
	c := cleanerAt(t, node, nil)
	info := everyAddress()
	svc := service{name: "dns", cluster: "10.96.0.1:53", nodePort: 30053, endpoints: eps("10.0.0.1:53")}
	first := svc.compile(info)
	svc.endpoints = nil
	second := svc.compile(info)
	c.note(&ruleset.Delta{Full: true, Node: info, Changes: []ruleset.Change{change(nil, first)}}, nil)
	must.Do(t, c.Flush(t.Context()))
	for _, conn := range sockets {
		if !answered(conn, testtime.Timeout) {
			t.Fatalf("%v does not answer", conn.RemoteAddr())
		}
	}
	rules("") // without endpoints there is no rule
	for _, conn := range sockets {
		if !answered(conn, testtime.Timeout) {
			t.Fatalf("%v does not answer without a clean-up, so the test proves nothing", conn.RemoteAddr())
		}
	}
	c.note(&ruleset.Delta{Node: info, OldNode: info, Changes: []ruleset.Change{change(first, second)}}, nil)
	must.Do(t, c.Flush(t.Context()))
	for _, conn := range sockets {
		if answered(conn, time.Second) {
			t.Errorf("%v still sends to the endpoint", conn.RemoteAddr())
		}
	}
}
