//go:build linux

package socketlb

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// storedPeer reads the peer of a connection's socket.
func storedPeer(b *Backend, c net.Conn) (p peer, err error) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return p, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var cookie uint64
		if cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE); err == nil {
			var r recentPeer
			if err = b.maps["recent"].Lookup(uint32(cookie)%b.config.recentSize(), &r); err == nil && r.Cookie == cookie {
				p = r.Peer
				return
			}
			err = b.maps["peers"].Lookup(cookie, &p)
		}
	})
	return p, errors.Join(err, cerr)
}

// loadBalancer returns an edit that gives a Service a load-balancer IP and source ranges.
func loadBalancer(ip string, sources ...string) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = sources
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ip}}
	}
}

// hashed makes a Service choose endpoints by a hash.
func hashed(s *v1.Service) { s.Labels = map[string]string{"hash": "source"} }

const (
	external = "203.0.113.9"
	all      = "10.244.9.1:8080 10.244.9.2:8080"
	all6     = "[fd00:10:244:9::1]:8080 [fd00:10:244:9::2]:8080"
	local    = "10.244.9.1:8080"
	left     = "" // left alone
)

// TestConnectionsAreTranslatedAsDocumented connects to frontends of each kind and compares
// the endpoints with DESIGN.md.
func TestConnectionsAreTranslatedAsDocumented(t *testing.T) {
	t.Parallel()
	type decision struct {
		what      string
		edits     []func(*v1.Service)
		config    func(*Config, *ruleset.Config)
		to        string // the cluster IP if ""
		node, pod string // the endpoints that node and pod reach
		nodeFrom  string
	}
	masqueradeAll := func(_ *Config, r *ruleset.Config) { r.MasqueradeAll = true }
	undetected := func(_ *Config, r *ruleset.Config) { r.LocalTraffic = ruleset.LocalTraffic{} }
	nodeOnly := func(c *Config, _ *ruleset.Config) { c.NodeOnly = true }
	edits := func(e ...func(*v1.Service)) []func(*v1.Service) { return e }
	for _, d := range []decision{
		{what: "cluster IP", node: all, pod: all},
		{what: "cluster IP, IPv6", to: "[fd00:10:96::1]:80", node: all6, pod: all6},
		{what: "cluster IP, another port", to: "10.96.0.1:81"},
		{what: "cluster IP, masquerade all", config: masqueradeAll, node: all},
		{what: "cluster IP, pods not detected", config: undetected, node: all, pod: all},
		{what: "cluster IP, node only", config: nodeOnly, node: all},
		{what: "cluster IP, source is the node's", nodeFrom: nodeAddr4 + ":0", node: all, pod: all},
		{what: "cluster IP, source is a further address of the node", nodeFrom: secondAddr4 + ":0", node: left, pod: all},
		{what: "cluster IP, source is loopback", nodeFrom: "127.0.0.1:0", node: left, pod: all},
		{what: "internal policy Local", edits: edits(backendtest.InternalLocal), node: local, pod: local},
		{what: "hash", edits: edits(hashed)},
		{what: "SCTP", edits: edits(backendtest.Over(v1.ProtocolSCTP))},
		{what: "external IP", edits: edits(backendtest.ExternalIPs(external)), to: external + ":80", node: all},
		{what: "load balancer", edits: edits(loadBalancer(external)), to: external + ":80", node: all},
		{what: "load balancer, source ranges", edits: edits(loadBalancer(external, "192.0.2.0/24", "10.0.0.0/8")), to: external + ":80"},
		{what: "load balancer, policy Local", edits: edits(loadBalancer(external), backendtest.ExternalLocal), to: external + ":80", node: all, pod: all},
		{
			what: "load balancer, policy Local, pods not detected", edits: edits(loadBalancer(external), backendtest.ExternalLocal), config: undetected,
			to: external + ":80", node: all, pod: local,
		},
		{what: "node port", edits: edits(backendtest.NodePort(30080)), to: nodeAddr4 + ":30080", node: all},
		{what: "node port, policy Local", edits: edits(backendtest.NodePort(30080), backendtest.ExternalLocal), to: nodeAddr4 + ":30080", node: all, pod: all},
		{what: "node port, policy Local, IPv6", edits: edits(backendtest.NodePort(30080), backendtest.ExternalLocal), to: "[" + nodeAddr6 + "]:30080", node: all6, pod: all6},
		{what: "node port at the second address", edits: edits(backendtest.NodePort(30080), backendtest.ExternalLocal), to: secondAddr4 + ":30080", node: all, pod: all},
		{what: "node port at an address of another host", edits: edits(backendtest.NodePort(30080), backendtest.ExternalLocal), to: "192.0.2.2:30080"},
		{what: "node port at loopback", edits: edits(backendtest.NodePort(30080), backendtest.ExternalLocal), to: "127.0.0.1:30080"},
		{what: "node port at IPv6 loopback", edits: edits(backendtest.NodePort(30080), backendtest.ExternalLocal), to: "[::1]:30080"},
	} {
		t.Run(d.what, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, d.config)
			l.set("web", 1, 2, d.edits...)
			l.sync()
			to := d.to
			if to == "" {
				to = "10.96.0.1:80"
			}
			for _, c := range []struct {
				h          *netlab.Host
				from, want string
			}{{l.nodeNS, d.nodeFrom, d.node}, {l.pod, "", d.pod}} {
				got := l.reaches(c.h, c.from, to, 24)
				want := map[string]bool{}
				for _, ep := range strings.Fields(c.want) {
					want[ep] = true
				}
				if c.want == left {
					want[""] = true
				}
				for ep := range got {
					if !want[ep] {
						t.Errorf("%s reached %q, must reach one of %q", c.h.Name, ep, c.want)
					}
				}
				if len(got) != len(want) { // fails by chance once in 8 million times, for two endpoints and 24 connections
					t.Errorf("%s reached %v, must reach all of %q", c.h.Name, got, c.want)
				}
			}
			// Without endpoints everything is left alone.
			l.set("web", 1, 0, d.edits...)
			l.sync()
			if got := l.server(l.pod, "", to) + l.server(l.nodeNS, "", to); got != "" {
				t.Errorf("without endpoints: reached %s", got)
			}
			if n := l.frontends(); n != 0 {
				t.Errorf("without endpoints there are %d frontends", n)
			}
		})
	}
}

// TestConnectionsOutsideTheCgroupAreLeftAlone connects from a thread outside of the cgroup.
func TestConnectionsOutsideTheCgroupAreLeftAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 2)
	l.sync()
	if c, err := l.pod.Dial(t.Context(), "tcp", "", "10.96.0.1:80"); err == nil {
		t.Errorf("connected to %s", c.RemoteAddr())
		c.Close()
	}
	if n := l.counters(); n != (connections{}) {
		t.Errorf("counters are %+v", n)
	}
}

// TestMappedAddressesAreTranslated connects an IPv6 socket to an IPv4-mapped address, as Java
// does.
func TestMappedAddressesAreTranslated(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 2, backendtest.NodePort(30080), backendtest.ExternalLocal)
	l.sync()
	for _, to := range []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort(nodeAddr4 + ":30080")} {
		for _, h := range []*netlab.Host{l.pod, l.nodeNS} {
			mapped := &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
			err := l.Do(func() error {
				return h.Do(func() error {
					fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					if err != nil {
						return err
					}
					defer unix.Close(fd)
					// A socket whose connection failed may be used again.
					unix.Connect(fd, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: 1})
					if err := unix.Connect(fd, mapped); err != nil {
						return err
					}
					got, err := unix.Getpeername(fd)
					if g := got.(*unix.SockaddrInet6); g.Addr != mapped.Addr || g.Port != mapped.Port {
						return fmt.Errorf("getpeername returns %v", g)
					}
					return err
				})
			})
			if err != nil {
				t.Errorf("%s to %s: %v", h.Name, to, err)
			}
		}
	}
	if n := l.counters(); n.Node != 2 || n.Pods != 2 {
		t.Errorf("counters are %+v", n)
	}
}

// TestReconnectedSocketReturnsItsNewPeer connects a socket to a Service and then to another
// address. The socket's peer is in the map recent or, if that has no room, in peers.
func TestReconnectedSocketReturnsItsNewPeer(t *testing.T) {
	t.Parallel()
	for name, room := range map[string]int{"recent": 0, "peers": 1} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, func(c *Config, _ *ruleset.Config) { c.connections = room })
			l.set("web", 1, 1)
			l.set("other", 2, 2)
			l.sync()
			if name == "peers" {
				c := must.Get(l.dial(l.pod, "tcp", "", "10.96.0.1:80"))(t)
				defer c.Close()
			}
			for _, other := range []string{endpoints4[1] + ":8080", endpoints4[0] + ":8081", "10.96.0.2:80"} {
				c := must.Get(l.dial(l.pod, "tcp", "", "10.96.0.1:80"))(t)
				before := l.peers()
				to := netip.MustParseAddrPort(other)
				raw := must.Get(c.(*net.TCPConn).SyscallConn())(t)
				err := raw.Control(func(fd uintptr) { l.reconnect(int(fd), to) })
				if err != nil {
					t.Error(err)
				}
				want := before - 1
				if other == "10.96.0.2:80" {
					want = before
				}
				if after := l.peers(); after != want {
					t.Errorf("%d peers before the socket was connected to %s, and %d after it, want %d", before, other, after, want)
				}
				c.Close()
			}
		})
	}
}

// reconnect connects a connected socket to another address, and waits until that is its peer.
func (l *lab) reconnect(fd int, to netip.AddrPort) {
	l.Helper()
	// AF_UNSPEC ends the connection (connect(2)).
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unix.RawSockaddr{})), unix.SizeofSockaddrInet4); errno != 0 {
		l.Error(errno)
	}
	if err := l.Do(func() error {
		return unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	}); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		l.Error(err)
	}
	until(l, "the connection", func() bool {
		got, err := unix.Getpeername(fd)
		if err != nil {
			return false
		}
		if g := got.(*unix.SockaddrInet4); netip.AddrPortFrom(netip.AddrFrom4(g.Addr), uint16(g.Port)) != to {
			l.Errorf("getpeername returns %v, want %s", g, to)
		}
		return true
	})
}

// TestAffinityIsByNetworkNamespace checks that a network namespace keeps its endpoint until
// the timeout.
func TestAffinityIsByNetworkNamespace(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 3, backendtest.Affinity(100), backendtest.NodePort(30080), backendtest.ExternalLocal)
	l.sync()
	const to = "10.96.0.1:80"
	clients := func() map[clientKey]client {
		all := must.Get(readMap[clientKey, client](l.backend.maps["clients"]))(t)
		return all
	}
	first := l.server(l.pod, "", to)
	for range 20 {
		if ep := l.server(l.pod, "", to); ep != first {
			t.Fatalf("moved from %s to %s", first, ep)
		}
	}
	if ep := l.server(l.pod, "", nodeAddr4+":30080"); ep != first {
		t.Errorf("at the NodePort it is %s, at the cluster IP %s", ep, first)
	}
	// Another namespace is another client.
	l.server(l.nodeNS, "", to)
	if n := len(clients()); n != 2 {
		t.Errorf("the map has %d clients", n)
	}
	// A new process keeps the clients.
	l.start(l.config())
	l.sync()
	if ep := l.server(l.pod, "", to); ep != first {
		t.Errorf("a restart moved it from %s to %s", first, ep)
	}
	// Changes of other endpoints move no client.
	l.set("web", 1, 2, backendtest.Affinity(100))
	l.sync()
	second := l.server(l.pod, "", to)
	if second != first && first != endpoints4[2]+":8080" {
		t.Errorf("moved from %s to %s when another endpoint was removed", first, second)
	}
	for range 20 {
		if ep := l.server(l.pod, "", to); ep != second {
			t.Fatalf("moved from %s to %s", second, ep)
		}
	}
	// After the timeout any endpoint may be chosen.
	used := map[string]bool{}
	for range 40 {
		for k, c := range clients() {
			c.Seen -= uint64(101 * time.Second)
			must.Do(t, l.backend.maps["clients"].Put(k, c))
		}
		used[l.server(l.pod, "", to)] = true
	}
	if len(used) != 2 {
		t.Errorf("after the timeout only %v was used", used)
	}
}

// TestNewProcessTakesOver closes a Backend and opens another one on the same files.
func TestNewProcessTakesOver(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 2, backendtest.Affinity(100))
	l.set("gone", 2, 2)
	l.sync()
	identity := func() string {
		var ids []string
		for _, name := range hookNames {
			found := must.Get(link.LoadPinnedLink(filepath.Join(l.dir, name), nil))(t)
			defer found.Close()
			info := must.Get(found.Info())(t)
			ids = append(ids, fmt.Sprint(name, info.ID))
		}
		for name, m := range l.backend.maps {
			ids = append(ids, fmt.Sprint(name, mapID(m)))
		}
		slices.Sort(ids)
		return strings.Join(ids, " ")
	}
	was, slots := identity(), func() map[slotKey]endpoint {
		all := must.Get(readMap[slotKey, endpoint](l.backend.maps["endpoints"]))(t)
		return all
	}
	before := slots()
	old := l.backend
	must.Do(t, old.Close())
	// Between processes everything stays in effect.
	if c, err := l.dial(l.pod, "tcp", "", "10.96.0.1:80"); err != nil {
		t.Errorf("after the process ended: %v", err)
	} else {
		c.Close()
	}
	if err := old.Check(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Check of a closed backend returns %v", err)
	}
	l.tracker.DeleteService(name("gone"))
	l.start(l.config())
	l.sync()
	if now := identity(); now != was {
		t.Errorf("maps and links were %s, and are %s", was, now)
	}
	after := slots()
	for k, ep := range after {
		if before[k] != ep {
			t.Errorf("slot %v had %s and has %s", k, before[k], ep)
		}
	}
	if len(after) != 4 { // two endpoints in each family
		t.Errorf("%d slots", len(after))
	}
	if n := l.frontends(); n != 2 {
		t.Errorf("%d frontends, must be one in each family", n)
	}
	if l.server(l.pod, "", "10.96.0.1:80") == left {
		t.Error("the Service is left alone")
	}
	if l.server(l.pod, "", "10.96.0.2:80") != left {
		t.Error("the Service that was deleted is served")
	}
	// A map of another version is deleted.
	other := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}))(t)
	defer other.Close()
	path := filepath.Join(l.dir, "replies")
	must.Do(t, other.Pin(path))
	// A map of another size is replaced, and the Service is served.
	c := l.config()
	c.endpoints = 1000
	l.start(c)
	l.sync()
	if l.server(l.pod, "", "10.96.0.1:80") == left {
		t.Error("after a map was replaced the Service is left alone")
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of a map of another version: %v", err)
	}
}

// TestAlterationsAreFoundAndRepaired alters the maps, programs and files behind the backend.
func TestAlterationsAreFoundAndRepaired(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 2, backendtest.Affinity(100), backendtest.NodePort(30080))
	l.sync()
	first := func(m *ebpf.Map, key any) {
		if !m.Iterate().Next(key, new([]byte)) {
			t.Fatalf("%s is empty", m)
		}
	}
	m := l.backend.maps
	for what, tamper := range map[string]func() error{
		"frontend deleted": func() error { return m["frontends"].Delete(endpointOf(netip.MustParseAddrPort("10.96.0.1:80"))) },
		"frontend altered": func() error {
			return m["frontends"].Put(endpointOf(netip.MustParseAddrPort("10.96.0.1:80")), frontendValue{})
		},
		"frontend added": func() error {
			return m["frontends"].Put(endpointOf(netip.MustParseAddrPort("10.96.0.9:80")), frontendValue{})
		},
		"endpoint deleted": func() error { var k slotKey; first(m["endpoints"], &k); return m["endpoints"].Delete(k) },
		"endpoint altered": func() error { var k slotKey; first(m["endpoints"], &k); return m["endpoints"].Put(k, endpoint{}) },
		"endpoint added":   func() error { return m["endpoints"].Put(slotKey{1, 2, 3}, endpoint{}) },
		"member deleted":   func() error { var k memberKey; first(m["members"], &k); return m["members"].Delete(k) },
		"address deleted":  func() error { var k [16]byte; first(m["addresses"], &k); return m["addresses"].Delete(k) },
		"map's file gone":  func() error { return os.Remove(filepath.Join(l.dir, "endpoints")) },
		"link's file gone": func() error { return os.Remove(filepath.Join(l.dir, "connect4")) },
		"program detached": func() error {
			found, err := link.LoadPinnedLink(filepath.Join(l.dir, "connect4"), nil)
			if err != nil {
				return err
			}
			defer found.Close()
			return found.Detach()
		},
		"everything gone": func() error { return Cleanup(t.Context(), l.config()) },
		"program replaced": func() error {
			found, err := link.LoadPinnedLink(filepath.Join(l.dir, "connect6"), nil)
			if err != nil {
				return err
			}
			defer found.Close()
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet6Connect, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
			})
			if err != nil {
				return err
			}
			defer p.Close()
			return found.Update(p)
		},
	} {
		if err := tamper(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		err := l.backend.Check(t.Context())
		var drift *dataplane.DriftError
		if !errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) {
			t.Errorf("%s: Check returns %v", what, err)
		}
		l.cursor.Resync()
		l.sync() // and Check returns nil
		if got := l.reaches(l.pod, "", "10.96.0.1:80", 3); len(got) != 1 || got[left] != 0 {
			t.Errorf("%s, and repaired: reached %v", what, got)
		}
	}
}

// TestServiceThatDoesNotFitIsLeftAlone fills a map.
func TestServiceThatDoesNotFitIsLeftAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *Config, _ *ruleset.Config) { c.endpoints = 5 })
	l.set("a", 1, 2) // four slots: two endpoints in each family
	l.sync()
	l.set("b", 2, 3)
	var partial *ruleset.PartialError
	if err := l.cursor.Sync(t.Context()); !errors.As(err, &partial) || !errors.Is(err, unix.E2BIG) {
		t.Fatalf("Sync returns %v", err)
	}
	if err := l.backend.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if got := l.server(l.pod, "", "10.96.0.1:80"); got == left {
		t.Error("a is left alone")
	}
	// A family of b that does not fit must have no entries.
	for k := range partial.Failed {
		at := "10.96.0.2:80"
		if k.Family == 6 {
			at = "[fd00:10:96::2]:80"
		}
		if got := l.server(l.pod, "", at); got != left {
			t.Errorf("%s failed, but reached %s", k, got)
		}
	}
	l.tracker.DeleteService(name("a"))
	l.set("b", 2, 2)
	l.sync() // there is room after a is deleted
	if got := l.server(l.pod, "", "10.96.0.2:80"); got == left {
		t.Error("b is left alone, though there is room")
	}
}

// TestConnectionsBeyondTheLimitAreLeftAlone opens connections until there is no more room.
func TestConnectionsBeyondTheLimitAreLeftAlone(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{1, 3, 4} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			l := newLab(t, func(c *Config, _ *ruleset.Config) { c.connections = limit })
			l.set("a", 1, 1)
			l.sync()
			recent := int(l.backend.config.recentSize())
			for round := range 3 {
				var open []net.Conn
				for {
					c, err := l.dial(l.pod, "tcp", "", "10.96.0.1:80")
					if err != nil {
						break // the backend behind would serve it
					}
					open = append(open, c)
					if got := c.RemoteAddr().String(); got != "10.96.0.1:80" {
						t.Errorf("round %d: the peer of connection %d is %s", round, len(open), got)
					}
				}
				if n := len(open); n < limit || n > limit+recent {
					t.Errorf("round %d: %d connections, want %d to %d", round, n, limit, limit+recent)
				}
				if got := l.peers(); got != len(open) {
					t.Errorf("round %d: %d peers of %d connections", round, got, len(open))
				}
				// Half of them first, so that later ones find entries of earlier ones.
				for i, c := range open {
					if i%2 == 0 {
						c.Close()
					}
				}
				if got := l.peers(); got != len(open)/2 {
					t.Errorf("round %d: %d peers of %d connections after half were closed", round, got, len(open)/2)
				}
				for _, c := range open {
					c.Close()
				}
				if got := l.peers(); got != 0 {
					t.Errorf("round %d: %d peers after all sockets were closed", round, got)
				}
			}
		})
	}
}

// peers returns the number of stored peers. It checks the overflow of all entries.
func (l *lab) peers() (n int) {
	l.Helper()
	m := l.backend.maps
	hashed := must.Get(readMap[uint64, peer](m["peers"]))(l)
	overflow := 0
	for i := range l.backend.config.recentSize() {
		var r recentPeer
		must.Do(l, m["recent"].Lookup(i, &r))
		if r.Cookie != 0 {
			n++
		}
		overflow += int(r.Overflow)
	}
	if overflow != len(hashed) {
		l.Errorf("the overflow is %d, but there are %d peers", overflow, len(hashed))
	}
	return n + len(hashed)
}

// TestConnectionsAreCountedByService compares the counters with the connections that were made,
// through changes, a restart and the deletion of a Service.
func TestConnectionsAreCountedByService(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	if _, err := Traffic(t.Context(), Config{Dir: l.dir}, func(func(tracker.Key) bool) {}); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("without a backend: %v, want ErrNoRules", err)
	}
	l.set("a", 1, 2)
	l.set("b", 2, 1)
	l.sync()
	connect := func(to string, times int) {
		t.Helper()
		for range times {
			if got := l.server(l.pod, "", to); got == left {
				t.Fatalf("a connection to %s is left alone", to)
			}
		}
	}
	// wants compares the connections by name and family, as the backend and as others read them.
	wants := func(what string, want map[string]uint64) {
		t.Helper()
		all := must.Get(l.backend.Traffic(t.Context()))(t)
		read := must.Get(Traffic(t.Context(), Config{Dir: l.dir}, maps.Keys(all.Services)))(t)
		for _, traffic := range []*dataplane.Traffic{all, read} {
			got := map[string]uint64{}
			for k, c := range traffic.Services {
				got[k.Name+" "+k.Family.String()] = c.Connections
			}
			if !maps.Equal(got, want) {
				t.Errorf("%s: %v, want %v", what, got, want)
			}
		}
	}
	connect("10.96.0.1:80", 3)
	connect("[fd00:10:96::1]:80", 2)
	connect("10.96.0.2:80", 1)
	wants("connections", map[string]uint64{"a IPv4": 3, "a IPv6": 2, "b IPv4": 1})
	l.set("a", 1, 1)
	l.sync()
	connect("10.96.0.1:80", 1)
	l.backend.Close()
	l.start(l.backend.config)
	wants("after a restart, before the first delta", map[string]uint64{})
	l.sync()
	wants("after a restart", map[string]uint64{"a IPv4": 4, "a IPv6": 2, "b IPv4": 1})
	l.tracker.DeleteService(name("a"))
	l.sync()
	l.set("a", 1, 2)
	l.sync()
	wants("after a Service was deleted and created", map[string]uint64{"b IPv4": 1})
	connect("10.96.0.1:80", 1)
	wants("after another connection", map[string]uint64{"a IPv4": 1, "b IPv4": 1})
	// A Service that is deleted while no process runs is found by the next full delta.
	l.backend.Close()
	l.tracker.DeleteService(name("b"))
	l.start(l.backend.config)
	l.sync()
	l.set("b", 2, 1)
	l.sync()
	wants("after a Service was deleted without a process", map[string]uint64{"a IPv4": 1})
}

// TestWritesDependOnTheChangeOnly counts the entries that a change writes and deletes among
// many Services.
func TestWritesDependOnTheChangeOnly(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	set := func(service, last int) {
		service4 := backendtest.Service(name(fmt.Sprint("s", service)), "web", fmt.Sprintf("10.97.%d.%d", service>>8, service&255), "fd00::1")
		slice := backendtest.Slice(name(fmt.Sprint("s", service)), "v4", tracker.IPv4, "web", v1.ProtocolTCP)
		for e := range 9 {
			slice.Endpoints = append(slice.Endpoints, backendtest.Endpoint(fmt.Sprintf("10.128.0.%d", e+1), "other"))
		}
		if last != 0 {
			slice.Endpoints = append(slice.Endpoints, backendtest.Endpoint(fmt.Sprintf("10.128.1.%d", last), "other"))
		}
		l.tracker.SetService(service4)
		l.tracker.SetSlice(slice)
	}
	const services = 1000
	for i := range services {
		set(i, 1)
	}
	l.sync()
	for _, c := range []struct {
		what   string
		change func()
		most   int
	}{
		{"nothing", func() { l.cursor.Resync() }, 0},
		{"an endpoint replaced", func() { set(500, 2) }, 1},
		{"an endpoint deleted", func() { set(500, 0) }, 3}, // moved slot, frontend's size, deleted slot
		{"an endpoint added", func() { set(500, 3) }, 2},   // slot, frontend's size
		{"a Service added", func() { set(services, 1) }, 11},
		{"a Service deleted", func() { l.tracker.DeleteService(name("s7")) }, 11},
	} {
		before := l.backend.writes
		c.change()
		l.sync()
		if n := l.backend.writes - before; n > c.most {
			t.Errorf("%s: %d entries were written, must be at most %d", c.what, n, c.most)
		}
	}
}

// TestCheckAddsNewNodeAddresses adds an address to the node.
func TestCheckAddsNewNodeAddresses(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 2, backendtest.NodePort(30080), backendtest.ExternalLocal)
	l.sync()
	if got := l.server(l.pod, "", "192.0.2.8:30080"); got != left {
		t.Errorf("reached %s", got)
	}
	must.Do(t, l.nodeNS.AddAddr("eth0", netip.MustParsePrefix("192.0.2.8/24")))
	must.Do(t, l.backend.Check(t.Context()))
	if got := l.server(l.pod, "", "192.0.2.8:30080"); got == left {
		t.Error("the NodePort is left alone at a new address of the node")
	}
}

// TestClusterIPOfTheNodeIsLeftAlone gives the node the cluster IP of a Service, as node-local-dns does, and takes
// it away.
func TestClusterIPOfTheNodeIsLeftAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	clusterIPs := []string{"10.96.0.1", "fd00:10:96::1"}
	l.set("web", 1, 2, backendtest.ExternalIPs(nodeAddr4), backendtest.NodePort(30080))
	l.set("other", 2, 2)
	check := func(alone bool, when string) {
		t.Helper()
		for _, a := range clusterIPs {
			to := netip.AddrPortFrom(netip.MustParseAddr(a), 80).String()
			for _, h := range []*netlab.Host{l.pod, l.nodeNS} {
				if got := l.server(h, "", to); (got == left) != alone {
					t.Errorf("%s, %s to %s: reached %q", when, h.Name, to, got)
				}
			}
		}
		for _, to := range []string{"10.96.0.2:80", nodeAddr4 + ":80", nodeAddr4 + ":30080"} {
			if got := l.server(l.nodeNS, "", to); got == left {
				t.Errorf("%s: %s is left alone", when, to)
			}
		}
	}
	drifts := func() {
		t.Helper()
		var drift *dataplane.DriftError
		if err := l.backend.Check(t.Context()); !errors.As(err, &drift) {
			t.Fatal(err)
		}
		l.cursor.Resync()
		l.sync()
		must.Do(t, l.backend.Check(t.Context()))
	}
	l.sync()
	check(false, "at first")
	for _, a := range clusterIPs {
		p := netip.MustParsePrefix(a + "/32")
		if p.Addr().Is6() {
			p = netip.PrefixFrom(p.Addr(), 128)
		}
		must.Do(t, l.nodeNS.AddAddr("lo", p))
	}
	drifts()
	check(true, "with the addresses")
	l.set("web", 1, 1, backendtest.ExternalIPs(nodeAddr4), backendtest.NodePort(30080))
	l.sync()
	check(true, "after a change")
	if out, err := l.nodeNS.Run(t, "ip", "addr", "flush", "dev", "lo", "scope", "global"); err != nil {
		t.Fatal(err, out)
	}
	drifts()
	check(false, "without the addresses")
}

// TestCleanupRemovesEverything checks Owned and Cleanup.
func TestCleanupRemovesEverything(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("web", 1, 2)
	if owned, err := Owned(t.Context(), l.config()); owned || err != nil {
		t.Errorf("before the first Apply: Owned returns %v, %v", owned, err)
	}
	l.sync()
	c := must.Get(l.dial(l.pod, "tcp", "", "10.96.0.1:80"))(t)
	defer c.Close()
	if owned, err := Owned(t.Context(), l.config()); !owned || err != nil {
		t.Errorf("Owned returns %v, %v", owned, err)
	}
	for range 2 {
		if err := Cleanup(t.Context(), l.config()); err != nil {
			t.Error(err)
		}
	}
	if owned, err := Owned(t.Context(), l.config()); owned || err != nil {
		t.Errorf("after Cleanup: Owned returns %v, %v", owned, err)
	}
	if got := l.server(l.pod, "", "10.96.0.1:80"); got != left {
		t.Errorf("after Cleanup: reached %s", got)
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Errorf("a connection broke: %v", err)
	}
}

// TestErrorsNameWhatIsMissing probes wrong configurations and processes without capabilities.
func TestErrorsNameWhatIsMissing(t *testing.T) {
	need(t)
	dir, closeDir, err := TemporaryDir()
	must.Do(t, err)
	defer closeDir()
	for _, c := range []struct {
		config Config
		want   string
		is     error
	}{
		{Config{Dir: filepath.Join(t.TempDir(), "x")}, "not in a BPF file system", dataplane.ErrUnsupported},
		{Config{Dir: dir, Cgroup: t.TempDir()}, "not a cgroup2 folder", dataplane.ErrUnsupported},
		{Config{Dir: "relative"}, "not an absolute path", ruleset.ErrConfig},
	} {
		if err := Probe(t.Context(), c.config); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Probe(%+v) returns %v", c.config, err)
		}
	}
	folder := must.Get(os.Open(filepath.Dir(dir)))(t)
	defer folder.Close()
	probe := func(attr *syscall.SysProcAttr, capabilities ...int) (stderr string, err error) {
		var said strings.Builder
		cmd := confine.Command("probe", confine.Limits{Capabilities: capabilities})
		cmd.Stderr, cmd.ExtraFiles, cmd.SysProcAttr = &said, []*os.File{folder}, attr
		cmd.Env = append(cmd.Env, "PROBE_DIR=/proc/self/fd/3/socketlb")
		err = cmd.Run()
		return said.String(), err
	}
	user := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: []syscall.SysProcIDMap{{Size: 1}}, GidMappings: []syscall.SysProcIDMap{{Size: 1}}}
	if said, err := probe(user, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN); err == nil || !strings.Contains(said, "CAP_BPF") {
		t.Errorf("without privileges: %v, %q", err, said)
	}
	if said, err := probe(nil, unix.CAP_NET_ADMIN, unix.CAP_BPF, unix.CAP_PERFMON); err != nil {
		t.Errorf("with CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON only: %v, %q", err, said)
	}
	// Some kernels do not need CAP_PERFMON. Others must not be called too old.
	said, err := probe(nil, unix.CAP_NET_ADMIN, unix.CAP_BPF)
	t.Logf("without CAP_PERFMON: %v, %q", err, said)
	if err != nil && (!strings.Contains(said, "CAP_PERFMON") || strings.Contains(said, "or later")) {
		t.Errorf("without CAP_PERFMON: %v, %q", err, said)
	}
}

// TestMapsNotYetWrittenAreNoDrift checks the maps before the first full delta, and after a failure.
func TestMapsNotYetWrittenAreNoDrift(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("a", 1, 1)
	if err := l.backend.Check(t.Context()); err != nil {
		t.Errorf("before the first delta, Check returned %v", err)
	}
	l.sync()
	l.backend.known = false
	var drift *dataplane.DriftError
	if err := l.backend.Check(t.Context()); !errors.As(err, &drift) || !strings.Contains(drift.What, "unknown") {
		t.Errorf("after a failure, Check returned %v", err)
	}
}
