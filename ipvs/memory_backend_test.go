package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// newMemoryRig starts a backend on a namespace in memory.
func newMemoryRig(t *testing.T, c Config) (*rig, *memory) {
	t.Helper()
	m := newMemory(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1"))
	return newRigOn(t, memoryNode{m}, c), m
}

func tcpServer(at string) virtualKey {
	a := netip.MustParseAddrPort(at)
	return virtualKey{family: tracker.FamilyOf(a.Addr()), proto: inet.TCP, at: a}
}

// TestRetireWaitsForConnections removes an endpoint, and then its Service, while the endpoint has
// a connection.
func TestRetireWaitsForConnections(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	retire := func(want int) {
		t.Helper()
		if n, err := r.backend.Retire(t.Context()); err != nil || n != want {
			t.Errorf("%d real servers drain, error %v, want %d", n, err, want)
		}
	}
	retire(0) // before the first delta
	r.set(svc(1, externalIPs("198.18.0.1")), 1, 1, 2)
	r.sync()
	retire(0)
	busy := m.servers[tcpServer("198.18.0.1:80")].reals[netip.MustParseAddrPort("10.244.1.1:8080")]
	busy.active = 1
	r.set(svc(1, externalIPs("198.18.0.1")), 1, 2)
	r.sync()
	retire(1)
	if busy.weight != 0 {
		t.Errorf("the draining server has weight %d", busy.weight)
	}
	r.remove(1)
	r.sync()
	retire(1)
	r.has("ipvsadm -Sn", "-a -t 198.18.0.1:80 -r 10.244.1.1:8080 -m -w 0")
	r.hasNot("ipvsadm -Sn", "10.96.0.1")
	r.has("ip -o addr show dev kube-ipvs0", "1: kube-ipvs0 inet 198.18.0.1/32")
	r.has("ipset save KUBE-NO-LOCAL-ENDPOINTS", "add KUBE-NO-LOCAL-ENDPOINTS 198.18.0.1,tcp:80")
	// A new process continues.
	r.restart()
	r.sync()
	retire(1)
	if err := r.backend.Check(t.Context()); err != nil {
		t.Error(err)
	}
	// The Service returns, with the endpoint.
	r.set(svc(1, externalIPs("198.18.0.1")), 1, 1)
	r.sync()
	retire(0)
	if busy.weight != 1 {
		t.Errorf("the returned endpoint has weight %d", busy.weight)
	}
	r.hasNot("ipset save", "NO-LOCAL-ENDPOINTS 1")
	r.remove(1)
	r.sync()
	busy.active = 0
	retire(0)
	if got := r.run("ipvsadm -Sn"); len(got) != 0 {
		t.Errorf("left: %q", got)
	}
	r.hasNot("ipset save", "add ")
	r.hasNot("ip -o addr show dev kube-ipvs0", "198.18")
}

// TestDrainLimitEndsConnections lets the limit pass.
func TestDrainLimitEndsConnections(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}, DrainLimit: time.Minute})
	r.set(svc(1), 1, 1)
	r.sync()
	m.servers[tcpServer("10.96.0.1:80")].reals[netip.MustParseAddrPort("10.244.1.1:8080")].active = 1
	r.remove(1)
	r.sync()
	for _, c := range []struct {
		after time.Duration
		want  int
	}{{time.Second, 1}, {time.Hour, 0}} {
		must.Do(t, r.backend.tend(t.Context(), time.Now().Add(c.after)))
		if n := len(m.servers); n != c.want {
			t.Errorf("%d virtual servers after %v, want %d", n, c.after, c.want)
		}
	}
}

// TestEndedConnectionsHoldNoAddress deletes a Service whose connections have ended, which IPVS remembers.
// Those that are half open have not ended.
func TestEndedConnectionsHoldNoAddress(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	at := tcpServer("198.18.0.1:80")
	endpoint := netip.MustParseAddrPort("10.244.1.1:8080")
	r.set(svc(1, externalIPs("198.18.0.1"), externalLocal), 1, 1, -2)
	r.sync()
	for _, v := range m.servers {
		for _, real := range v.reals {
			real.inactive = 3
		}
	}
	r.remove(1)
	r.sync()
	m.halfOpen[at.at], m.halfOpen[endpoint] = true, true // the second is through the mark
	servers := func(want ...string) {
		t.Helper()
		for _, s := range r.backend.states {
			s.nextLook = time.Time{}
		}
		must.Get(r.backend.Retire(t.Context()))(t)
		var got []string
		for k := range m.servers {
			got = append(got, k.at.String()+" "+strconv.Itoa(int(k.mark)))
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("virtual servers %q, want %q", got, want)
		}
	}
	const mark = "invalid AddrPort 12289"
	servers("198.18.0.1:80 0", mark)
	delete(m.halfOpen, at.at)
	servers(mark)
	r.hasNot("ip -o addr show dev kube-ipvs0", "198.18")
	delete(m.halfOpen, endpoint)
	servers()
	r.hasNot("ipset save", "add ")
}

// TestUnownedAddressIsFreedAfterALimit keeps a connection open for longer than the limit, first while its
// Service lost the endpoint and then after the Service was deleted. Full deltas do not extend the time.
func TestUnownedAddressIsFreedAfterALimit(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	now := time.Now()
	r.backend.now = func() time.Time { return now }
	pass := func(d time.Duration, want int) {
		t.Helper()
		now = now.Add(d)
		r.cursor.Resync()
		r.sync()
		must.Do(t, r.backend.tend(t.Context(), now))
		if n := r.backend.draining(); n != want {
			t.Errorf("%d real servers drain, want %d", n, want)
		}
	}
	r.set(svc(1), 1, 1, 2)
	r.sync()
	m.servers[tcpServer("10.96.0.1:80")].reals[netip.MustParseAddrPort("10.244.1.1:8080")].active = 1
	r.set(svc(1), 1, 2)
	r.sync()
	pass(10*retireLimit, 1)
	r.remove(1)
	r.sync()
	pass(retireLimit/2, 1)
	pass(retireLimit/2-1, 1)
	pass(1, 0)
	r.hasNot("ip -o addr show dev kube-ipvs0", "10.96.0.1/")
}

// TestCleanupRemovesOnlyItsObjects compares a namespace before a Backend and after a clean-up.
func TestCleanupRemovesOnlyItsObjects(t *testing.T) {
	t.Parallel()
	m := newMemory(netip.MustParseAddr("192.0.2.1"))
	n := memoryNode{m}
	for _, c := range []string{
		"ipvsadm -A -t 203.0.113.9:99 -s lc", "ipvsadm -A -f 77 -s rr", "ipset create mine hash:ip maxelem 9", "ipset add mine 192.0.2.77",
		"iptables -t nat -A POSTROUTING -s 192.0.2.77/32 -j MASQUERADE", "iptables -t mangle -N KUBE-MARK-MASQ",
	} {
		n.lines(t, c)
	}
	before := m.dump()
	r := newRigOn(t, n, Config{})
	r.set(svc(1, nodePort(30001), externalIPs("198.18.0.1", "2001:db8:e::1"), externalLocal), 1, 1, -1)
	r.set(svc(2, over(v1.ProtocolSCTP), nodePort(30002)), 2, 1, -1)
	r.sync()
	if got := strings.Count(m.dump(), "\n") - strings.Count(before, "\n"); got < 40 {
		t.Errorf("the backend wrote %d objects", got)
	}
	for range 2 {
		must.Do(t, r.backend.cleanup(t.Context()))
		if after := m.dump(); after != before {
			t.Errorf("after the clean-up:\n%s\nbefore:\n%s", after, before)
		}
	}
	if m.devices[deviceName] != nil || len(m.sets) != 1 {
		t.Errorf("devices %v, sets %v", m.devices, m.sets)
	}
}

// TestProbeNamesWhatIsMissing probes namespaces that lack something.
func TestProbeNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		config Config
		lack   func(*memory)
		want   string // "" if the backend works
		maglev bool
	}{
		{"everything is there", Config{}, func(*memory) {}, "", true},
		{"no Maglev", Config{}, func(m *memory) { m.missing[Maglev] = true }, "", false},
		{"no round robin", Config{}, func(m *memory) { m.missing[RoundRobin] = true }, "scheduler rr (module ip_vs_rr) for IPv4", true},
		{"no scheduler of the configuration", Config{Scheduler: "zz"}, func(m *memory) { m.missing["zz"] = true }, "scheduler zz (module ip_vs_zz)", true},
		{"no IPv6", Config{}, func(m *memory) { m.noIPv6 = true }, "disable_ipv6", true},
		{"no IPv6 needed", Config{Families: []tracker.Family{tracker.IPv4}}, func(m *memory) { m.noIPv6 = true }, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory()
			c.lack(m)
			b, err := memoryNode{m}.open(t, c.config)
			if c.want != "" {
				if !errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %v, want %q", err, c.want)
				}
			} else if err != nil || b.config.noMaglev == c.maglev {
				t.Errorf("error %v, without Maglev %t", err, b.config.noMaglev)
			}
			if len(m.servers) != 0 {
				t.Errorf("left: %v", m.servers)
			}
		})
	}
}

// TestLackOfMemoryIsNoMissingScheduler probes while the kernel has no memory.
func TestLackOfMemoryIsNoMissingScheduler(t *testing.T) {
	t.Parallel()
	m := newMemory()
	m.fail = func() error { return syscall.ENOMEM }
	if _, err := (memoryNode{m}).open(t, Config{}); !errors.Is(err, syscall.ENOMEM) || errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("error %v", err)
	}
}

// TestIPv4WorksWhileIPv6IsDisabled disables IPv6 while a backend serves both families.
func TestIPv4WorksWhileIPv6IsDisabled(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{})
	r.set(svc(1), 1, -1)
	r.sync()
	m.noIPv6 = true
	clear(m.devices[deviceName].addrs)
	r.set(svc(2), 2, -2)
	r.cursor.Resync()
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 2 {
		t.Fatalf("%v, want a PartialError for two IPv6 Services", err)
	}
	for k := range partial.Failed {
		if k.Family != tracker.IPv6 {
			t.Errorf("%v failed", k)
		}
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.2:80 -r 10.245.0.2:8080 -m -w 1")
}

// TestParametersAndTimeoutsAreSet compares the namespace after a full delta with the
// configuration.
func TestParametersAndTimeoutsAreSet(t *testing.T) {
	t.Parallel()
	timeouts := Timeouts{TCP: 100 * time.Second, UDP: 30 * time.Second}
	r, m := newMemoryRig(t, Config{StrictARP: true, Timeouts: timeouts})
	if len(m.params) != 0 {
		t.Errorf("New set %v", m.params)
	}
	r.sync()
	for name, want := range map[string]string{"net/ipv4/vs/conntrack": "1", "net/ipv4/ip_forward": "1", "net/ipv4/conf/all/arp_ignore": "1"} {
		if got := m.params[name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if m.timeouts != timeouts {
		t.Errorf("timeouts %v", m.timeouts)
	}
	r, m = newMemoryRig(t, Config{KeepSysctls: true})
	r.sync()
	if len(m.params) != 0 {
		t.Errorf("with KeepSysctls: %v", m.params)
	}
}

// TestLookupAndTrafficReadTheKernel compares both with the servers in memory.
func TestLookupAndTrafficReadTheKernel(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, nodePort(30001), externalLocal), 1, 1, -1)
	r.sync()
	const local, remote = "10.244.1.1:8080", "10.245.0.1:8080"
	for _, c := range []struct {
		to       string
		internal bool
		want     []string
	}{
		{"10.96.0.1:80", false, []string{local, remote}},
		{"192.0.2.1:30001", false, []string{local}},
		{"192.0.2.1:30001", true, []string{local, remote}},
		{"10.96.0.1:81", false, nil},
	} {
		found, err := r.backend.lookup(tcpServer(c.to), c.internal)
		var got []string
		for _, a := range found.Endpoints {
			got = append(got, a.String())
		}
		if err != nil || !slices.Equal(got, c.want) || found.Entry != (c.want != nil) {
			t.Errorf("%s, internal %t: %+v, error %v, want %v", c.to, c.internal, found, err, c.want)
		}
	}
	m.servers[tcpServer("10.96.0.1:80")].counters = dataplane.Counters{Connections: 3, Packets: 9}
	m.servers[tcpServer("192.0.2.1:30001")].counters = dataplane.Counters{Connections: 1, Packets: 2}
	traffic, err := r.backend.Traffic(t.Context())
	if err != nil || len(traffic.Services) != 1 {
		t.Fatalf("%+v, error %v", traffic, err)
	}
	for _, c := range traffic.Services {
		if c.Connections != 4 || c.Packets != 11 {
			t.Errorf("%+v", c)
		}
	}
	r.run("ip addr del 10.96.0.1/32 dev kube-ipvs0")
	var drift *dataplane.DriftError
	if _, err := r.backend.lookup(tcpServer("10.96.0.1:80"), false); !errors.As(err, &drift) {
		t.Errorf("without the address: %v, want a DriftError", err)
	}
}

// TestClosedBackendReturnsErrClosed calls every method after Close.
func TestClosedBackendReturnsErrClosed(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{})
	r.set(svc(1), 1, 1)
	r.sync()
	before := m.dump()
	for range 2 {
		if err := r.backend.Close(); err != nil {
			t.Error(err)
		}
	}
	ctx := context.Background()
	_, retired := r.backend.Retire(ctx)
	_, traffic := r.backend.Traffic(ctx)
	for name, err := range map[string]error{
		"Apply": r.backend.Apply(ctx, &ruleset.Delta{Full: true, Node: &ruleset.Node{}}), "Check": r.backend.Check(ctx), "Retire": retired, "Traffic": traffic,
		"Watch": r.backend.Watch(ctx, time.Millisecond, func(err error) { t.Errorf("drifted: %v", err) }),
	} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s: %v, want ErrClosed", name, err)
		}
	}
	if m.dump() != before {
		t.Error("a closed backend changed something")
	}
}

// TestLostFrontendStaysIfItsNewServiceFails moves an external IP to a Service whose endpoints
// cannot be added there. Its other frontends are served.
func TestLostFrontendStaysIfItsNewServiceFails(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, externalIPs("198.18.0.1")), 1, 1)
	r.sync()
	m.noServer[netip.MustParseAddr("198.18.0.1")] = true
	r.set(svc(1), 1, 1)
	r.set(svc(2, externalIPs("198.18.0.1")), 2, 2)
	for _, restart := range []bool{false, true} {
		if restart {
			r.restart()
		}
		r.fails(2)
		r.has("ipvsadm -Sn", "-a -t 198.18.0.1:80 -r 10.244.1.1:8080 -m -w 1", "-a -t 10.96.0.2:80 -r 10.244.1.2:8080 -m -w 1")
		r.has("ip -o addr show dev kube-ipvs0", "1: kube-ipvs0 inet 198.18.0.1/32")
	}
	clear(m.noServer)
	r.sync()
	if _, err := r.backend.Retire(t.Context()); err != nil {
		t.Error(err)
	}
	r.agree()
}

// reach returns the endpoints to which the memory sends a client of an address and TCP port 80.
func (m *memory) reach(from, to string) (out []string) {
	p := ruleset.Packet{Protocol: v1.ProtocolTCP, From: netip.MustParseAddr(from), To: netip.MustParseAddrPort(to + ":80")}
	if from != "192.0.2.1" { // the node
		p.InInterface = "eth0"
	}
	for _, c := range m.handlePacket(p).Endpoints {
		out = append(out, c.Addr.Addr().String())
	}
	slices.Sort(out)
	return out
}

// TestInternalTrafficStaysIfTheNewServiceFails moves an external IP between Services with
// externalTrafficPolicy Local and endpoints on another node. The second one cannot get a virtual
// server of internal traffic, and the first one loses an endpoint or all, or is deleted.
func TestInternalTrafficStaysIfTheNewServiceFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		left  []int
		stays []string
	}{
		{"one endpoint", []int{-2}, []string{"10.245.0.2"}},
		{"no endpoint", nil, []string{"10.245.0.1", "10.245.0.2"}},
		{"deleted", nil, []string{"10.245.0.1", "10.245.0.2"}},
	} {
		r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
		reach := func(want ...string) {
			t.Helper()
			if got := m.reach("192.0.2.1", "198.18.0.1"); !slices.Equal(got, want) {
				t.Errorf("%s: the node reaches %q, want %q", c.name, got, want)
			}
		}
		r.set(svc(1, externalIPs("198.18.0.1", "198.18.0.2"), externalLocal), 1, -1, -2)
		r.sync()
		reach("10.245.0.1", "10.245.0.2")
		m.noServer[netip.Addr{}] = true
		if r.set(svc(1, externalIPs("198.18.0.2"), externalLocal), 1, c.left...); c.name == "deleted" {
			r.remove(1)
		}
		r.set(svc(2, externalIPs("198.18.0.1"), externalLocal), 2, -3)
		r.fails(2)
		reach(c.stays...)
		clear(m.noServer)
		r.sync()
		reach("10.245.0.3")
		if err := r.backend.tend(t.Context(), time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		r.agree()
		r.hasNot("ipvsadm -Sn", "10.245.0.1:")
	}
}

// TestFailedWritesBreakNoMove moves an address between Services, and fails one to three writes at
// every place. A client that both Services admit must always reach an endpoint, and a client that only
// one of them admits must not reach those of the other.
func TestFailedWritesBreakNoMove(t *testing.T) {
	t.Parallel()
	type edit = func(*v1.Service)
	sources := func(s ...string) edit { return balancer("198.18.0.1", s...) }
	var local edit = func(s *v1.Service) { externalIPs("198.18.0.1")(s); externalLocal(s) }
	none, one, two := func(*v1.Service) {}, externalIPs("198.18.0.1"), externalIPs("198.18.0.2")
	for _, c := range []struct {
		name             string
		before, after    [2]edit
		first, second    int    // the endpoints
		both, old, young string // clients
	}{
		{"other ranges", [2]edit{sources("198.51.100.0/24", "203.0.113.0/24"), none}, [2]edit{none, sources("198.51.0.0/16", "100.64.0.0/16")}, 1, 2, "198.51.100.9", "203.0.113.9", ""},
		{"no range before", [2]edit{sources(), none}, [2]edit{none, sources("198.51.100.0/24")}, 1, 2, "198.51.100.9", "203.0.113.9", ""},
		{"no range after", [2]edit{sources("198.51.100.0/24"), none}, [2]edit{none, sources()}, 1, 2, "198.51.100.9", "", "203.0.113.9"},
		{"internal traffic", [2]edit{local, none}, [2]edit{none, local}, -1, -2, "192.0.2.1", "", ""},
		{"in a circle", [2]edit{one, two}, [2]edit{two, one}, 1, 2, "198.51.100.9", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			for place, more := 1, true; more && !t.Failed(); place++ {
				more = false
				for way := range 9 {
					r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
					r.set(svc(1, c.before[0]), 1, c.first)
					r.set(svc(2, c.before[1]), 2, c.second)
					r.sync()
					r.set(svc(1, c.after[0]), 1, c.first)
					r.set(svc(2, c.after[1]), 2, c.second, 2*c.second)
					writes := 0
					m.fail = func() error {
						if writes++; writes < place || writes > place+way/3 {
							return nil
						}
						if way%3 != 0 {
							m.failures = way % 3 // all failed writes take effect, or none of them
						}
						return syscall.EBUSY
					}
					old := slice(1, v1.ProtocolTCP, c.first).Endpoints[0].Addresses[0]
					m.look = func() {
						if len(m.reach(c.both, "198.18.0.1")) == 0 || c.name == "in a circle" && len(m.reach(c.both, "198.18.0.2")) == 0 {
							t.Errorf("way %d, write %d of %d: a client of both reaches nothing", way, place, writes)
						}
						if c.old != "" && slices.ContainsFunc(m.reach(c.old, "198.18.0.1"), func(to string) bool { return to != old }) {
							t.Errorf("way %d, write %d of %d: a client of the first reaches the second", way, place, writes)
						}
						if c.young != "" && slices.Contains(m.reach(c.young, "198.18.0.1"), old) {
							t.Errorf("way %d, write %d of %d: a client of the second reaches the first", way, place, writes)
						}
					}
					_ = r.cursor.Sync(t.Context()) // it may add elements one by one
					more = more || writes >= place
					m.look()
					m.fail = nil
					r.sync()
					if err := r.backend.tend(t.Context(), time.Now().Add(time.Hour)); err != nil {
						t.Error(err)
					}
					r.agree()
					r.hasNot("ipset save", "203.0.113")
				}
			}
		})
	}
}

// TestFailedServiceLosesEndpointsThatAreGone replaces the endpoints of a Service to which the kernel
// refuses another virtual server.
func TestFailedServiceLosesEndpointsThatAreGone(t *testing.T) {
	t.Parallel()
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, externalIPs("198.18.0.1")), 1, 1, 2)
	r.sync()
	m.noServer[netip.MustParseAddr("198.18.0.2")] = true
	for _, restart := range []bool{false, true} {
		if restart {
			r.restart()
		}
		r.set(svc(1, externalIPs("198.18.0.1", "198.18.0.2")), 1, 2, 3)
		r.fails(1)
		r.hasNot("ip -o addr show dev kube-ipvs0", "198.18.0.2")
		for _, at := range []string{"10.96.0.1:80", "198.18.0.1:80"} {
			r.has("ipvsadm -Sn", "-a -t "+at+" -r 10.244.1.1:8080 -m -w 0", "-a -t "+at+" -r 10.244.1.2:8080 -m -w 1")
		}
	}
	clear(m.noServer)
	r.sync()
	if _, err := r.backend.Retire(t.Context()); err != nil {
		t.Error(err)
	}
	r.agree()
}

// TestStaleServerThatStaysIsRetried fails the deletion of a virtual server of an earlier
// process.
func TestStaleServerThatStaysIsRetried(t *testing.T) {
	t.Parallel()
	for failing := 1; ; failing++ {
		r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
		r.set(svc(1), 1, 1)
		r.set(svc(2), 2, 2)
		r.sync()
		r.restart()
		r.remove(2)
		writes := 0
		m.fail = func() error {
			if writes++; writes == failing {
				return syscall.EBUSY
			}
			return nil
		}
		err := r.cursor.Sync(t.Context())
		if err == nil {
			t.Fatal("no write deleted the virtual server")
		}
		if !strings.Contains(err.Error(), "delete virtual server") {
			continue
		}
		var partial *ruleset.PartialError
		if errors.As(err, &partial) || !errors.Is(err, syscall.EBUSY) {
			t.Fatalf("%v, want EBUSY and no PartialError", err)
		}
		r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 1") // no Service is held up
		r.sync()
		r.agree()
		return
	}
}

// TestStateNotYetWrittenIsNoDrift checks the kernel before the first full delta, and after a failure.
func TestStateNotYetWrittenIsNoDrift(t *testing.T) {
	t.Parallel()
	r, _ := newMemoryRig(t, Config{})
	r.set(svc(1), 1, 1)
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("before the first delta, Check returned %v", err)
	}
	r.sync()
	r.backend.discard()
	var drift *dataplane.DriftError
	if err := r.backend.Check(t.Context()); errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) || !strings.Contains(err.Error(), "unknown") {
		t.Errorf("after a failure, Check returned %v", err)
	}
}
