package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
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
	busy := m.virtuals[tcpServer("198.18.0.1:80")].reals[netip.MustParseAddrPort("10.244.1.1:8080")]
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

// TestPassingAddressIsNotBound takes the endpoints of a Service while they have connections.
// The address must not wait for these, or packets could not pass.
func TestPassingAddressIsNotBound(t *testing.T) {
	const bound = "1: kube-ipvs0 inet 198.18.0.1/32"
	pass := func(s *v1.Service) { s.Annotations = map[string]string{"pass": "true"} }
	for _, stopped := range []bool{false, true} {
		r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
		r.set(svc(1, externalIPs("198.18.0.1"), pass), 1, 1)
		r.sync()
		r.has("ip -o addr show dev kube-ipvs0", bound)
		for _, at := range []string{"198.18.0.1:80", "10.96.0.1:80"} {
			m.virtuals[tcpServer(at)].reals[netip.MustParseAddrPort("10.244.1.1:8080")].active = 1
		}
		r.set(svc(1, externalIPs("198.18.0.1"), pass), 1)
		if stopped {
			r.restart()
		}
		r.sync()
		r.hasNot("ip -o addr show dev kube-ipvs0", "198.18")
		r.hasNot("ipvsadm -Sn", "198.18")
		r.hasNot("ipset save", "198.18")
		r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 0")
		r.set(svc(1, externalIPs("198.18.0.1"), pass), 1, 1)
		r.sync()
		r.has("ip -o addr show dev kube-ipvs0", bound)
	}
}

// TestDrainLimitEndsConnections lets the limit pass.
func TestDrainLimitEndsConnections(t *testing.T) {
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}, DrainLimit: time.Minute})
	r.set(svc(1), 1, 1)
	r.sync()
	m.virtuals[tcpServer("10.96.0.1:80")].reals[netip.MustParseAddrPort("10.244.1.1:8080")].active = 1
	r.remove(1)
	r.sync()
	for _, c := range []struct {
		after time.Duration
		want  int
	}{{time.Second, 1}, {time.Hour, 0}} {
		if err := r.backend.tend(t.Context(), time.Now().Add(c.after)); err != nil {
			t.Fatal(err)
		}
		if n := len(m.virtuals); n != c.want {
			t.Errorf("%d virtual servers after %v, want %d", n, c.after, c.want)
		}
	}
}

// TestCleanupRemovesOnlyItsObjects compares a namespace before a Backend and after a clean-up.
func TestCleanupRemovesOnlyItsObjects(t *testing.T) {
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
		if err := r.backend.cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
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
			if len(m.virtuals) != 0 {
				t.Errorf("left: %v", m.virtuals)
			}
		})
	}
}

// TestLackOfMemoryIsNoMissingScheduler probes while the kernel has no memory.
func TestLackOfMemoryIsNoMissingScheduler(t *testing.T) {
	m := newMemory()
	m.fail = func() error { return syscall.ENOMEM }
	if _, err := (memoryNode{m}).open(t, Config{}); !errors.Is(err, syscall.ENOMEM) || errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("error %v", err)
	}
}

// TestIPv4WorksWhileIPv6IsDisabled disables IPv6 while a backend serves both families.
func TestIPv4WorksWhileIPv6IsDisabled(t *testing.T) {
	r, m := newMemoryRig(t, Config{})
	r.set(svc(1), 1, -1)
	r.sync()
	m.noIPv6 = true
	clear(m.devices[deviceName].addrs)
	r.set(svc(2), 2, -2)
	r.cursor.Resync()
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 2 || !partial.Pruned {
		t.Fatalf("%v, want a PartialError for two IPv6 Services, without stale objects", err)
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
	m.virtuals[tcpServer("10.96.0.1:80")].stats = dataplane.Counters{Connections: 3, Packets: 9}
	m.virtuals[tcpServer("192.0.2.1:30001")].stats = dataplane.Counters{Connections: 1, Packets: 2}
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

// TestLostFrontendStaysIfItsNewServiceFails moves an external IP to a Service that cannot be
// programmed.
func TestLostFrontendStaysIfItsNewServiceFails(t *testing.T) {
	r, m := newMemoryRig(t, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, externalIPs("198.18.0.1")), 1, 1)
	r.sync()
	m.noServer[netip.MustParseAddr("10.96.0.2")] = true
	r.set(svc(1), 1, 1)
	r.set(svc(2, externalIPs("198.18.0.1")), 2, 2)
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) {
		t.Fatalf("%v, want a PartialError", err)
	}
	r.has("ipvsadm -Sn", "-a -t 198.18.0.1:80 -r 10.244.1.1:8080 -m -w 1")
	r.has("ip -o addr show dev kube-ipvs0", "1: kube-ipvs0 inet 198.18.0.1/32")
	clear(m.noServer)
	r.sync()
	if _, err := r.backend.Retire(t.Context()); err != nil {
		t.Error(err)
	}
	r.agree()
}

// TestFailedServiceLosesEndpointsThatAreGone replaces the endpoints of a Service to which the kernel
// refuses another virtual server.
func TestFailedServiceLosesEndpointsThatAreGone(t *testing.T) {
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

// TestStaleServerThatStaysFailsNoService fails the deletion of a virtual server of an earlier
// process.
func TestStaleServerThatStaysFailsNoService(t *testing.T) {
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
		if !errors.As(err, &partial) || len(partial.Failed) != 0 || partial.Pruned || !errors.Is(err, syscall.EBUSY) {
			t.Fatalf("%v, want a PartialError with stale objects", err)
		}
		r.sync()
		r.agree()
		return
	}
}

// TestStateNotYetWrittenIsNoDrift checks the kernel before the first full delta, and after a failure.
func TestStateNotYetWrittenIsNoDrift(t *testing.T) {
	r, _ := newMemoryRig(t, Config{})
	r.set(svc(1), 1, 1)
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("before the first delta, Check returned %v", err)
	}
	r.sync()
	r.backend.discard()
	var drift *dataplane.DriftError
	if err := r.backend.Check(t.Context()); !errors.As(err, &drift) || !strings.Contains(drift.What, "unknown") {
		t.Errorf("after a failure, Check returned %v", err)
	}
}
