//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestOffloadByFlowtables runs on a kernel that has flowtables.
func TestOffloadByFlowtables(t *testing.T) {
	testtime.NeedComplete(t)
	t.Parallel()
	if !vm.Inside(t, vm.Debian) {
		return
	}
	for name, test := range map[string]func(*testing.T){
		"only after enough packets":               onlyAfterEnoughPackets,
		"only connections of Services":            onlyConnectionsOfServices,
		"connections live through changes":        connectionsLiveThroughChanges,
		"connections live through interface loss": connectionsLiveThroughInterfaceLoss,
		"connections fit a narrower path":         connectionsFitNarrowerPath,
		"UDP leaves a deleted endpoint":           udpLeavesDeletedEndpoint,
		"interfaces are followed":                 interfacesAreFollowed,
		"alterations are noticed and repaired":    alteredFlowtableIsRepaired,
		"listing":                                 offloadListing,
		"clean-up":                                offloadCleanup,
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t) })
	}
}

// forwarder is a node between a client and pods that have the addresses of epSlice, with a
// rig on the node.
type forwarder struct {
	*rig
	client *netlab.Host
	pods   []*netlab.Host
	lab    *netlab.Lab
}

const pods = 3

// The NodePort and external IPs of the Service, and the addresses of the client's network.
const offloadNodePort = 30080

var (
	externalIPs = []string{"198.51.100.1", "2001:db8:3::1"}
	nodeAddr    = map[tracker.Family]netip.Prefix{tracker.IPv4: netip.MustParsePrefix("192.0.2.1/24"), tracker.IPv6: netip.MustParsePrefix("2001:db8:7::1/64")}
	clientAddr  = map[tracker.Family]netip.Prefix{tracker.IPv4: netip.MustParsePrefix("192.0.2.2/24"), tracker.IPv6: netip.MustParsePrefix("2001:db8:7::2/64")}
	podGateway  = [2]string{"10.244.255.254", "fd00:10:244::ffff"}
	everywhere  = map[tracker.Family]netip.Prefix{tracker.IPv4: netip.MustParsePrefix("0.0.0.0/0"), tracker.IPv6: netip.MustParsePrefix("::/0")}
	families    = []tracker.Family{tracker.IPv4, tracker.IPv6}
)

func newForwarder(tb testing.TB, o *Offload) *forwarder {
	tb.Helper()
	lab, hosts := netlab.NewHosts(tb, "node", "client")
	node := hosts["node"]
	f := &forwarder{rig: newRig(tb, node), client: hosts["client"], lab: lab}
	node.Forward()
	lab.Link(node, "eth0", f.client, "eth0")
	for _, fam := range families {
		f.must(
			node.AddAddr("eth0", nodeAddr[fam]), f.client.AddAddr("eth0", clientAddr[fam]),
			f.client.AddRoute(everywhere[fam], nodeAddr[fam].Addr(), ""), node.AddRoute(everywhere[fam], clientAddr[fam].Addr(), ""),
		)
	}
	for i := range pods {
		p := lab.Host(fmt.Sprint("pod", i+1))
		f.pods = append(f.pods, p)
		f.plug(i)
		for _, fam := range families {
			p.ServeTCP(tb, netip.AddrPortFrom(podAddr(fam, i), 8080).String(), func(c net.Conn) { io.Copy(c, c) })
		}
	}
	f.offload = o
	f.start()
	f.service()
	f.endpoints(1)
	return f
}

// service adds the Service without a sync.
func (f *forwarder) service() {
	f.tracker.SetService(svc(0, func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = offloadNodePort
		s.Spec.ExternalIPs = externalIPs
	}))
}

func (f *forwarder) must(errs ...error) {
	f.Helper()
	for _, err := range errs {
		if err != nil {
			f.Fatal(err)
		}
	}
}

func podAddr(f tracker.Family, i int) netip.Addr {
	return netip.MustParseAddr(epSlice(0, f, i+1).Endpoints[0].Addresses[0])
}

// plug connects pod i to the node.
func (f *forwarder) plug(i int) {
	f.Helper()
	f.pods[i].Pod(f.host, fmt.Sprint("veth", i+1), [2]string{podAddr(tracker.IPv4, i).String(), podAddr(tracker.IPv6, i).String()}, podGateway)
}

// endpoints makes the numbered pods the Service's endpoints.
func (f *forwarder) endpoints(numbers ...int) {
	f.Helper()
	for _, fam := range families {
		f.tracker.SetSlice(epSlice(0, fam, numbers...))
	}
	f.sync()
}

func clusterIP(f tracker.Family, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(svc(0).Spec.ClusterIPs[index(f)]), port)
}

// flow is a TCP connection to an echo server.
type flow struct {
	*forwarder
	net.Conn
	family tracker.Family
}

// dial connects from a host to an echo server.
func (f *forwarder) dial(from *netlab.Host, to netip.AddrPort) *flow {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), testtime.Timeout)
	defer cancel()
	c := must.Get(from.Dial(ctx, "tcp", "", to.String()))(f)
	f.Cleanup(func() { c.Close() })
	return &flow{f, c, tracker.FamilyOf(to.Addr())}
}

// echo sends n packets, and waits for the answer to each.
func (c *flow) echo(n int) {
	c.Helper()
	buf := []byte{0}
	for i := range n {
		buf[0] = byte(i)
		c.SetDeadline(time.Now().Add(testtime.Timeout))
		_, err := c.Write(buf)
		if err == nil {
			_, err = io.ReadFull(c, buf)
		}
		if err != nil || buf[0] != byte(i) {
			c.Fatalf("packet %d of connection %s to %s: %v", i, c.LocalAddr(), c.RemoteAddr(), err)
		}
	}
}

// offloaded reports whether connection tracking lists the connection as offloaded, and the number
// of its packets.
func (c *flow) offloaded() (offloaded bool, packets int) {
	c.Helper()
	local := c.LocalAddr()
	protocol, family := local.Network(), "ipv"+strconv.Itoa(map[bool]int{true: 4, false: 6}[c.family == tracker.IPv4])
	_, port, _ := net.SplitHostPort(local.String())
	out, err := c.host.Run(c, "conntrack", "-L", "-f", family, "-p", protocol, "--orig-port-src", port)
	if err != nil || strings.Count(out, "\n") != 1 {
		c.Fatalf("conntrack: %v\n%s", err, out)
	}
	for _, m := range regexp.MustCompile(`packets=(\d+)`).FindAllStringSubmatch(out, -1) {
		n, _ := strconv.Atoi(m[1])
		packets += n
	}
	return strings.Contains(out, "[OFFLOAD]"), packets
}

func (c *flow) expect(offloaded bool) {
	c.Helper()
	if got, packets := c.offloaded(); got != offloaded {
		c.Errorf("offloaded is %v after %d packets from %s to %s", got, packets, c.LocalAddr(), c.RemoteAddr())
	}
}

// watchForward counts the packets in the forward hook, in a table of another program.
func (f *forwarder) watchForward() {
	f.Helper()
	f.nft("add table inet watch; add chain inet watch forward { type filter hook forward priority -10; }; add rule inet watch forward meta l4proto { tcp, udp } counter")
}

// forwarded returns the number of packets that the forward hook has seen.
func (f *forwarder) forwarded() int {
	f.Helper()
	m := regexp.MustCompile(`counter packets (\d+)`).FindStringSubmatch(f.nft("list chain inet watch forward"))
	n, _ := strconv.Atoi(m[1])
	return n
}

// onlyAfterEnoughPackets verifies that the first packet after afterPackets opens the fast path. A
// few packets may be on their way then.
func onlyAfterEnoughPackets(t *testing.T) {
	const after, underway = 30, 4
	f := newForwarder(t, &Offload{Interfaces: everyInterface, afterPackets: after})
	f.watchForward()
	for _, fam := range families {
		for _, to := range []netip.AddrPort{clusterIP(fam, 80), netip.AddrPortFrom(nodeAddr[fam].Addr(), offloadNodePort)} {
			before := f.forwarded()
			c := f.dial(f.client, to)
			c.echo(5) // at most 23 packets
			c.expect(false)
			c.echo(50)
			c.expect(true)
			if n := f.forwarded() - before; n <= after || n > after+1+underway {
				t.Errorf("%s: the forward hook saw %d packets, want %d", to, n, after+1)
			}
			before = f.forwarded()
			_, counted := c.offloaded()
			c.echo(100)
			if n := f.forwarded() - before; n != 0 {
				t.Errorf("%s: the forward hook saw %d packets of an offloaded connection", to, n)
			}
			if _, n := c.offloaded(); n < counted+200 {
				t.Errorf("%s: %d packets were counted before and %d after 100 on the fast path", to, counted, n)
			}
			if f.must(c.Close()); f.forwarded() == before {
				time.Sleep(100 * time.Millisecond)
			}
			if f.forwarded() == before {
				t.Errorf("%s: the forward hook did not see the end of the connection", to)
			}
		}
	}
	f.verify()
}

// onlyConnectionsOfServices verifies that connections stay on the usual path if the backend did
// not translate them, if they do not cross the node, or if they use other interfaces.
func onlyConnectionsOfServices(t *testing.T) {
	chosen := []string{"eth*", "veth1", "veth3"}
	f := newForwarder(t, &Offload{Interfaces: chosen, afterPackets: 1})
	f.tracker.SetService(svc(1))
	for _, fam := range families {
		f.tracker.SetSlice(epSlice(1, fam, 2)) // behind veth2
	}
	f.sync()
	f.nft(`add table inet other; add chain inet other nat { type nat hook prerouting priority -110; }
		add rule inet other nat tcp dport 9999 dnat ip to 10.244.0.1:8080
		add rule inet other nat tcp dport 9999 dnat ip6 to [fd00:10:244::1]:8080`)
	for _, fam := range families {
		node := nodeAddr[fam].Addr()
		for _, c := range []struct {
			what string
			from *netlab.Host
			to   netip.AddrPort
			want bool
		}{
			{"a Service", f.client, clusterIP(fam, 80), true},
			{"an external IP", f.client, netip.AddrPortFrom(netip.MustParseAddr(externalIPs[index(fam)]), 80), true},
			{"a pod itself", f.client, netip.AddrPortFrom(podAddr(fam, 0), 8080), false},
			{"a translation of another program", f.client, netip.AddrPortFrom(node, 9999), false},
			{"the node's own connection", f.host, clusterIP(fam, 80), false},
			{"an interface that is not chosen", f.client, netip.AddrPortFrom(netip.MustParseAddr(svc(1).Spec.ClusterIPs[index(fam)]), 80), false},
			{"a pod of the node", f.pods[2], clusterIP(fam, 80), true},
		} {
			conn := f.dial(c.from, c.to)
			conn.echo(30)
			if got, _ := conn.offloaded(); got != c.want {
				t.Errorf("%s, %s: offloaded is %v", fam, c.what, got)
			}
		}
	}
}

// connectionsLiveThroughChanges keeps connections while endpoints change, the agent restarts,
// the tables are replaced in every way, and offload is turned off and on.
func connectionsLiveThroughChanges(t *testing.T) {
	f := newForwarder(t, &Offload{Interfaces: everyInterface, afterPackets: 1})
	f.watchForward()
	var open []*flow
	for _, fam := range families {
		open = append(open, f.dial(f.client, clusterIP(fam, 80)))
	}
	all := func(step string, offloaded bool) {
		t.Helper()
		for _, c := range open {
			c.echo(20)
			if got, _ := c.offloaded(); got != offloaded {
				t.Errorf("%s: offloaded is %v", step, got)
			}
		}
		f.must(f.backend.Check(t.Context()))
	}
	untouched := func(step string) {
		t.Helper()
		before := f.forwarded()
		all(step, true)
		if n := f.forwarded() - before; n != 0 {
			t.Errorf("%s: %d packets left the fast path", step, n)
		}
	}
	all("begin", true)
	f.endpoints(1, 2)
	untouched("an endpoint more")
	f.endpoints(2)
	untouched("the connection's endpoint gone")
	f.endpoints(1)
	f.start()
	f.sync()
	untouched("restart")
	f.cursor.Resync()
	f.sync()
	untouched("full delta")
	f.nft("flush chain ip proxier services")
	f.cursor.Resync()
	f.sync()
	untouched("repaired tables")
	for i := range 100 {
		f.tracker.SetService(svc(10 + i))
		f.tracker.SetSlice(epSlice(10+i, tracker.IPv4, upTo(10)...))
	}
	f.limit = smallLimit
	f.start()
	f.sync()
	if f.backend.name == DefaultTable {
		t.Error("the tables were replaced in one transaction")
	}
	// The kernel deletes the old flowtable in the background. A connection enters the new one
	// after it has left the old one.
	for end := time.Now().Add(testtime.Timeout); ; {
		before, all := f.forwarded(), true
		for _, c := range open {
			c.echo(20)
			got, _ := c.offloaded()
			all = all && got
		}
		if all && f.forwarded() == before {
			break
		}
		if time.Now().After(end) {
			t.Fatal("after the swap a connection does not return to the fast path")
		}
	}
	f.must(f.backend.Check(t.Context()))
	f.limit = 0
	f.offload = nil
	f.start()
	f.sync()
	if out := f.nft("list flowtables"); strings.Contains(out, layout.FastPath) {
		t.Errorf("with offload turned off: %s", out)
	}
	all("offload turned off", false)
	f.offload = &Offload{Interfaces: everyInterface, afterPackets: 1}
	f.start()
	f.sync()
	all("offload turned on", true)
}

// connectionsFitNarrowerPath makes the route to an endpoint, and then the one to the client, narrower
// than the packets of connections on the fast path. The senders must learn it from the node.
func connectionsFitNarrowerPath(t *testing.T) {
	const length = 200_000
	f := newForwarder(t, &Offload{Interfaces: everyInterface, afterPackets: 1})
	narrow := func(fam tracker.Family, route ...string) {
		f.Helper()
		args := append([]string{map[tracker.Family]string{tracker.IPv4: "-4", tracker.IPv6: "-6"}[fam], "route", "change"}, route...)
		if out, err := f.host.Run(t, "ip", args...); err != nil {
			t.Fatal(err, out)
		}
	}
	for _, fam := range families {
		var conns []*flow
		for _, to := range []netip.AddrPort{clusterIP(fam, 80), netip.AddrPortFrom(nodeAddr[fam].Addr(), offloadNodePort)} {
			c := f.dial(f.client, to)
			c.echo(50)
			c.expect(true)
			conns = append(conns, c)
		}
		for _, route := range [][]string{
			{podAddr(fam, 0).String(), "dev", "veth1", "mtu", "1400"},
			{"default", "via", clientAddr[fam].Addr().String(), "mtu", "1300"},
		} {
			narrow(fam, route...)
			for _, c := range conns {
				c.SetDeadline(time.Now().Add(testtime.Timeout))
				sent := make(chan error, 1)
				go func() { _, err := c.Write(make([]byte, length)); sent <- err }()
				n, err := io.CopyN(io.Discard, c, length)
				if err := errors.Join(err, <-sent); err != nil {
					t.Errorf("%s to %s: %d of %d bytes came back: %v", strings.Join(route, " "), c.RemoteAddr(), n, length, err)
				}
			}
		}
		for _, c := range conns {
			c.echo(50)
			c.expect(true)
		}
	}
}

// connectionsLiveThroughInterfaceLoss deletes a pod's interface and adds it again. The client is a
// pod, whose connections are not masqueraded, because the kernel deletes the entries of
// masqueraded connections with their interface.
func connectionsLiveThroughInterfaceLoss(t *testing.T) {
	f := newForwarder(t, &Offload{Interfaces: everyInterface, afterPackets: 1})
	f.watch()
	for _, fam := range families {
		c := f.dial(f.pods[2], clusterIP(fam, 80))
		c.echo(20)
		c.expect(true)
		f.deleteLink("veth1")
		f.plug(0)
		c.echo(1)
		f.eventually("the interface is in the flowtable again", func() bool { return f.devices()["veth1"] })
		f.eventually("the connection is offloaded again", func() bool {
			c.echo(10)
			got, _ := c.offloaded()
			return got
		})
	}
	f.must(f.backend.Check(t.Context()))
}

// watch runs the backend's Watch until the test ends. No drift may be reported.
func (f *forwarder) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	b := f.backend
	go func() {
		done <- b.Watch(ctx, 10*time.Millisecond, func(err error) { f.Errorf("Watch reports %v", err) })
	}()
	f.Cleanup(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			f.Errorf("Watch returned %v", err)
		}
	})
}

func (f *forwarder) deleteLink(name string) {
	f.Helper()
	f.links(func(h *netlink.Handle) error {
		l, err := h.LinkByName(name)
		if err != nil {
			return err
		}
		return h.LinkDel(l)
	})
}

// links runs fn with the node's rtnetlink.
func (f *forwarder) links(fn func(*netlink.Handle) error) {
	f.Helper()
	f.must(f.host.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return fn(h)
	}))
}

func (f *forwarder) eventually(what string, ok func() bool) {
	f.Helper()
	for deadline := time.Now().Add(testtime.Timeout); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.Fatalf("did not happen: %s", what)
		}
	}
}

// devices returns the interfaces of the flowtable, which must be the same in both families.
func (f *forwarder) devices() map[string]bool {
	f.Helper()
	f.backend.mu.Lock()
	defer f.backend.mu.Unlock()
	var both []map[string]bool
	for _, fam := range families {
		found := must.Get(f.backend.conn.Flowtables(f.backend.name, fam))(f)
		both = append(both, found[layout.FastPath].Devices)
	}
	if fmt.Sprint(both[0]) != fmt.Sprint(both[1]) {
		return nil // between two messages
	}
	return both[0]
}

// udpLeavesDeletedEndpoint has package conntrack delete the entry of an offloaded flow. The
// flow's next packets must go to another endpoint.
func udpLeavesDeletedEndpoint(t *testing.T) {
	f := newForwarder(t, &Offload{Interfaces: everyInterface, udp: true})
	cleaner, err := conntrack.New(t.Context(), conntrack.Config{NetNS: f.host.File()})
	f.must(err)
	t.Cleanup(func() { cleaner.Close() })
	f.cursor.Detach()
	f.cursor = f.engine.Attach("both", cleaner.Wrap(f.backend))
	f.tracker.SetService(svc(1, func(s *v1.Service) { s.Spec.Ports[0].Port, s.Spec.Ports[0].Protocol = 53, v1.ProtocolUDP }))
	endpoint := func(n int) {
		for _, fam := range families {
			es := epSlice(1, fam, n)
			*es.Ports[0].Protocol = v1.ProtocolUDP
			f.tracker.SetSlice(es)
		}
		f.sync()
		f.must(cleaner.Flush(t.Context()))
	}
	endpoint(1)
	for i, p := range f.pods {
		for _, fam := range families {
			p.ServeUDP(t, netip.AddrPortFrom(podAddr(fam, i), 8080).String(), fmt.Sprint("pod", i+1))
		}
	}
	for _, fam := range families {
		endpoint(1)
		to := netip.AddrPortFrom(netip.MustParseAddr(svc(1).Spec.ClusterIPs[index(fam)]), 53)
		conn, err := f.client.Dial(t.Context(), "udp", "", to.String())
		f.must(err)
		defer conn.Close()
		c := &flow{f, conn, fam}
		ask := func(wait time.Duration) string {
			buf := make([]byte, 16)
			c.SetDeadline(time.Now().Add(wait))
			must.Get(c.Write([]byte("?")))(t)
			n, err := c.Read(buf)
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
			return string(buf[:n])
		}
		for range 20 {
			if got := ask(testtime.Timeout); got != "pod1" {
				t.Fatalf("%s: the answer is from %q", fam, got)
			}
		}
		c.expect(true)
		endpoint(2)
		f.eventually("an answer from the other endpoint", func() bool { return ask(100*time.Millisecond) == "pod2" })
		for range 20 {
			if got := ask(testtime.Timeout); got != "pod2" {
				t.Fatalf("%s: the answer is from %q", fam, got)
			}
		}
		c.expect(true)
	}
}

// interfacesAreFollowed adds and deletes more interfaces than one message holds.
func interfacesAreFollowed(t *testing.T) {
	const many = 2*128 + 10 // a message has 128
	chosen := []string{"eth*", "pod-*"}
	f := newForwarder(t, &Offload{Interfaces: chosen})
	make := func(h *netlink.Handle, name string) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return h.LinkAdd(&netlink.Dummy{LinkAttrs: attrs})
	}
	expect := func(names ...string) {
		t.Helper()
		want := map[string]bool{}
		for _, n := range names {
			want[n] = true
		}
		f.eventually(fmt.Sprintf("%d interfaces", len(names)), func() bool { return fmt.Sprint(f.devices()) == fmt.Sprint(want) })
		f.must(f.backend.Check(t.Context()))
	}
	var all []string
	f.links(func(h *netlink.Handle) error {
		for i := range many {
			all = append(all, fmt.Sprint("pod-", i))
			if err := make(h, all[i]); err != nil {
				return err
			}
		}
		return make(h, "other")
	})
	f.must(f.backend.refreshInterfaces(t.Context()))
	expect(append(all, "eth0")...)
	f.start()
	f.sync() // a full delta, which lists all of them
	expect(append(all, "eth0")...)
	f.watch()
	f.links(func(h *netlink.Handle) error {
		for _, name := range all[3:20] {
			l, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			if err := h.LinkDel(l); err != nil {
				return err
			}
		}
		return nil
	})
	expect(append(all[20:], "eth0", "pod-0", "pod-1", "pod-2")...)
	f.links(func(h *netlink.Handle) error {
		for old, name := range map[string]string{"pod-1": "gone", "other": "pod-x"} {
			l, err := h.LinkByName(old)
			if err != nil {
				return err
			}
			if err := h.LinkSetName(l, name); err != nil {
				return err
			}
		}
		return make(h, "pod-3")
	})
	expect(append(all[20:], "eth0", "pod-0", "pod-2", "pod-3", "pod-x")...)
}

// alteredFlowtableIsRepaired has another program alter the objects of the fast path.
func alteredFlowtableIsRepaired(t *testing.T) {
	f := newForwarder(t, &Offload{Interfaces: everyInterface, afterPackets: 1})
	drop := "flush chain ip proxier filter-forward; flush chain ip proxier to-fast-path; delete flowtable ip proxier fast-path; "
	for _, script := range []string{
		drop,
		"delete flowtable ip6 proxier fast-path { hook ingress priority 0; devices = { veth1 }; }",
		"add flowtable ip proxier fast-path { hook ingress priority 0; devices = { lo }; counter; }",
		"add flowtable ip proxier strange { hook ingress priority 5; }",
		"flush set ip6 proxier fast-path-interfaces",
		"flush chain ip proxier to-fast-path",
		"delete rule ip proxier filter-forward handle HANDLE",
	} {
		script = strings.Replace(script, "HANDLE", f.handleOf("ip", layout.ChainFilterForward, "jump "+layout.ChainToFastPath), 1)
		f.must(f.backend.Check(t.Context()))
		f.nft(script)
		err := f.backend.Check(t.Context())
		var drift *dataplane.DriftError
		if !errors.As(err, &drift) {
			t.Errorf("%s: Check returned %v", script, err)
		}
		f.cursor.Resync()
		f.sync()
		f.verify()
		if n := len(f.devices()); n != 1+pods {
			t.Errorf("%s: %d interfaces", script, n)
		}
		for _, fam := range families {
			c := f.dial(f.client, clusterIP(fam, 80))
			c.echo(10)
			c.expect(true)
		}
	}
	// A new process repairs it, too.
	f.nft(drop + "add flowtable ip proxier fast-path { hook ingress priority 5; devices = { eth0, lo }; }; add flowtable ip6 proxier strange { hook ingress priority 5; }")
	f.start()
	f.sync()
	f.checkRepaired()
}

// handleOf returns the handle of the rule of a chain that contains the text.
func (f *forwarder) handleOf(family, chain, text string) string {
	f.Helper()
	out, err := f.host.Run(f, "nft", "-a", "list chain "+family+" proxier "+chain)
	f.must(err)
	for line := range strings.Lines(out) {
		if rule, handle, ok := strings.Cut(line, " # handle "); ok && strings.Contains(rule, text) {
			return strings.TrimSpace(handle)
		}
	}
	f.Fatalf("no rule with %q:\n%s", text, out)
	return ""
}

// offloadListing compares the nft tool's listing with testdata.
func offloadListing(t *testing.T) {
	f := newForwarder(t, &Offload{Interfaces: everyInterface, udp: true})
	version, _ := f.host.Run(t, "nft", "--version")
	netlab.Need(t, strings.Contains(version, goldenVersion), "nft "+goldenVersion)
	f.compareListing(map[string]string{"ip": "offload-ipv4.nft", "ip6": "offload-ipv6.nft"}, normal)
	f.must(f.host.Do(func() error { return loads(t, false) }))
}

// offloadCleanup deletes the tables with their flowtables. Connections must live.
func offloadCleanup(t *testing.T) {
	f := newForwarder(t, &Offload{Interfaces: everyInterface, afterPackets: 1})
	// Without any NAT chain the kernel stops translating, and without any rule that needs
	// connection tracking it stops tracking.
	f.nft("add table ip other; add chain ip other in { type nat hook prerouting priority 0; }; add chain ip other out { type nat hook postrouting priority 0; }; add rule ip other in ct state new")
	c := f.dial(f.client, clusterIP(tracker.IPv4, 80))
	c.echo(10)
	c.expect(true)
	if owned, err := Owned(t.Context(), Config{NetNS: f.host.File()}); !owned || err != nil {
		t.Errorf("Owned returned %v, %v", owned, err)
	}
	f.must(Cleanup(t.Context(), Config{NetNS: f.host.File()}))
	if out := f.nft("list ruleset"); strings.Contains(out, DefaultTable) {
		t.Errorf("left behind:\n%s", out)
	}
	c.echo(10)
	c.expect(false)
}

// index returns the index of a family in a list of both.
func index(f tracker.Family) int {
	if f == tracker.IPv6 {
		return 1
	}
	return 0
}
