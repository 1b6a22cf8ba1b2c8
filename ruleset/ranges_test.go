package ruleset

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/tracker"
)

// externalIPs sets the external IPs of a Service.
func externalIPs(list ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ExternalIPs = list }
}

// TestRangeYieldsToSinglePorts traces packets to addresses where a range meets single ports.
func TestRangeYieldsToSinglePorts(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	nodePort := func(s *v1.Service) {
		s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, 30080
	}
	tr.SetService(service("rtp", "172.30.0.1", externalIPs("192.0.2.1", "198.51.100.1"), withRanges("p=10000-40000:0")))
	tr.SetService(service("sip", "172.30.0.2", externalIPs("198.51.100.1"), withRanges("p=10080-10080:0")))
	tr.SetService(service("thief", "172.30.0.3", externalIPs("172.30.0.1"), withRanges("p=10080-10080:0")))
	tr.SetService(service("web", "172.30.0.4", nodePort))
	tr.SetService(service("game", "172.30.0.5", withRanges("p=1-65535:0")))
	tr.SetService(service("shifted", "172.30.0.6", withRanges("p=7000-7009:9000")))
	tr.SetService(service("down", "172.30.0.7", withRanges("p=7000-7009:70")))
	for i, name := range []string{"rtp", "sip", "thief", "web", "game", "shifted", "down"} {
		tr.SetSlice(slice(name, fmt.Sprintf("10.0.0.%d", i+1)))
	}
	s := e.Snapshot()
	for _, c := range []struct{ to, want string }{
		{"172.30.0.1:10000", "rtp 10.0.0.1:10000"},
		{"172.30.0.1:40000", "rtp 10.0.0.1:40000"},
		{"172.30.0.1:9999", "reject"},
		{"172.30.0.1:40001", "reject"},
		// An external IP takes nothing from a cluster IP.
		{"172.30.0.1:10080", "rtp 10.0.0.1:10080"},
		// The same address, another Service: the single port wins.
		{"198.51.100.1:10079", "rtp 10.0.0.1:10079"},
		{"198.51.100.1:10080", "sip 10.0.0.2:8080"},
		{"198.51.100.1:10081", "rtp 10.0.0.1:10081"},
		// The external IP is an address of the node: the NodePort wins.
		{"192.0.2.1:30080", "web 10.0.0.4:8080"},
		{"192.0.2.1:30081", "rtp 10.0.0.1:30081"},
		{"192.0.2.1:22", "pass"},
		{"172.30.0.5:1", "game 10.0.0.5:1"},
		{"172.30.0.5:65535", "game 10.0.0.5:65535"},
		{"172.30.0.6:7000", "shifted 10.0.0.6:9000"},
		{"172.30.0.6:7009", "shifted 10.0.0.6:9009"},
		{"172.30.0.7:7009", "down 10.0.0.7:79"},
	} {
		v := s.Trace(Packet{
			From: netip.MustParseAddr("203.0.113.9"), InInterface: "eth0", Protocol: v1.ProtocolTCP,
			To: netip.MustParseAddrPort(c.to), NodeAddresses: addrs("192.0.2.1"),
		})
		got := v.Action.String()
		if v.Action == ActionForward {
			got = fmt.Sprint(v.Port.Key.Name, " ", v.AddrOf(v.Endpoints[0]))
		}
		if got != c.want {
			t.Errorf("%s: %s (%s), want %s", c.to, got, v.Rule, c.want)
		}
	}
}

// TestNoServiceTakesPortsOfAnother checks who owns ranges and single ports while Services come
// and go, and that the loser gets a log line and an event.
func TestNoServiceTakesPortsOfAnother(t *testing.T) {
	tr, e, seen := worldWithEvents(t, nil)
	set := func(name, ip, ranges string, created int64, edit ...func(*v1.Service)) {
		s := service(name, ip, append(edit, withRanges(ranges))...)
		s.CreationTimestamp = metav1.Unix(created, 0)
		tr.SetService(s)
	}
	owner := func(to string) string {
		t.Helper()
		if s, _ := e.Snapshot().Lookup(netip.MustParseAddrPort(to), v1.ProtocolTCP); s != nil {
			return s.Key.Name
		}
		return "none"
	}
	check := func(to, want string) {
		t.Helper()
		if got := owner(to); got != want {
			t.Errorf("%s belongs to %s, want %s", to, got, want)
		}
	}
	external := externalIPs("198.51.100.1")
	set("old", "172.30.0.1", "p=100-200:0", 1000, external)
	set("young", "172.30.0.2", "p=150-300:0", 2000, external)
	set("third", "172.30.0.3", "p=250-350:0", 3000, external)
	check("198.51.100.1:150", "old")
	check("198.51.100.1:201", "none")  // young overlaps old, and gets nothing
	check("198.51.100.1:250", "third") // third overlaps only young
	check("172.30.0.2:250", "young")
	want := `external IP 198.51.100.1 port 150-300 (TCP) belongs to default/old:p/TCP/IPv4`
	if got := strings.Join(seen.take(), "\n"); !strings.Contains(got, want) {
		t.Errorf("events\n%s\nlack %q", got, want)
	}
	// old shrinks: young gets its range, and third loses its own.
	set("old", "172.30.0.1", "p=100-149:0", 1000, external)
	check("198.51.100.1:149", "old")
	check("198.51.100.1:250", "young")
	check("198.51.100.1:320", "none")
	tr.DeleteService(name("young"))
	check("198.51.100.1:320", "third")
	check("198.51.100.1:150", "none")

	// A single port at an external IP exists before the range of the cluster IP.
	set("thief", "172.30.0.9", "", 500, externalIPs("172.30.0.4"))
	check("172.30.0.4:80", "thief")
	set("victim", "172.30.0.4", "p=1-65535:0", 4000)
	check("172.30.0.4:80", "victim")
	check("172.30.0.9:80", "thief")
	tr.DeleteService(name("victim"))
	check("172.30.0.4:80", "thief")
}

// TestRangesAreFoundAsInAModel compares look-ups with a list of all frontends.
func TestRangesAreFoundAsInAModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		s := &Snapshot{Node: &Node{}}
		type claim struct {
			svc *Port
			f   Frontend
		}
		var all []claim
		for i := range 12 {
			first := uint16(1 + r.IntN(60))
			last := first + uint16(r.IntN(30)*r.IntN(2))
			p := &tracker.ServicePort{Key: key(fmt.Sprint("s", i), tracker.IPv4), Port: first, LastPort: last, ClusterIP: addrs("10.96.0.1", "10.96.0.2")[r.IntN(2)]}
			if i%2 == 0 {
				p.Key.Protocol = v1.ProtocolUDP
			}
			svc := Compile(tracker.PortState{Port: p}, nil, tracker.TopologyOptions{})
			f := svc.Frontends[0]
			overlaps := false
			for _, o := range all {
				if o.f.Addr == f.Addr && o.svc.Key.Protocol == p.Key.Protocol && o.f.IsRange() == f.IsRange() && o.f.Port <= max(f.Port, f.LastPort) && f.Port <= max(o.f.Port, o.f.LastPort) {
					overlaps = true
				}
			}
			if !overlaps { // as the Engine ensures
				all = append(all, claim{svc, f})
				s.Ports = append(s.Ports, svc)
			}
		}
		for _, addr := range addrs("10.96.0.1", "10.96.0.2") {
			for _, proto := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
				for port := uint16(1); port < 100; port++ {
					var want claim
					for _, c := range all {
						if c.f.Addr == addr && c.svc.Key.Protocol == proto && c.f.Matches(port) && (want.svc == nil || !c.f.IsRange()) {
							want = c
						}
					}
					if got, f := s.Lookup(netip.AddrPortFrom(addr, port), proto); got != want.svc || got != nil && !equalFrontends(*f, want.f) {
						t.Fatalf("round %d: %s %s %d is found in %v, want %v", round, addr, proto, port, f, want.f)
					}
				}
			}
		}
	}
}

// TestBackendsAreOfferedOnlyTheirRanges checks what backends with and without ranges see, and
// what is reported.
func TestBackendsAreOfferedOnlyTheirRanges(t *testing.T) {
	tr, e, seen := worldWithEvents(t, nil)
	external := externalIPs("198.51.100.1")
	backends := map[PortRanges]*limitedBackend{}
	cursors := map[PortRanges]*Cursor{}
	for r := range PortRangesShifted + 1 {
		backends[r] = &limitedBackend{limits: Limits{PortRanges: r}}
		cursors[r] = e.Attach(r.String(), backends[r])
	}
	syncAll := func() {
		t.Helper()
		for _, c := range cursors {
			if err := c.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	served := func(r PortRanges, k tracker.Key) (out []string) {
		for _, f := range cursors[r].Port(k).Frontends {
			out = append(out, f.Ports())
		}
		return out
	}
	tr.SetService(service("kept", "172.30.0.1", external, withRanges("p=100-200:0")))
	tr.SetService(service("shifted", "172.30.0.2", withRanges("p=100-200:1100")))
	tr.SetService(service("single", "172.30.0.3"))
	syncAll()
	for _, c := range []struct {
		r    PortRanges
		name string
		want string
	}{
		{PortRangesNone, "kept", "[]"}, {PortRangesNone, "shifted", "[]"}, {PortRangesNone, "single", "[80]"},
		{PortRangesKept, "kept", "[100-200 100-200]"}, {PortRangesKept, "shifted", "[]"}, {PortRangesKept, "single", "[80]"},
		{PortRangesShifted, "kept", "[100-200 100-200]"}, {PortRangesShifted, "shifted", "[100-200]"}, {PortRangesShifted, "single", "[80]"},
	} {
		if got := fmt.Sprint(served(c.r, key(c.name, tracker.IPv4))); got != c.want {
			t.Errorf("a backend with ranges %q is offered %s at ports %s, want %s", c.r, c.name, got, c.want)
		}
	}
	got := strings.Join(seen.take(), "\n")
	for _, want := range []string{
		"backend none: the range of ports 100 to 200 is not served",
		"backend kept: the range of ports 100 to 200 is not served, because the endpoints' ports differ from it",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("events %s\nlack %q", got, want)
		}
	}
	if strings.Contains(got, "backend shifted") {
		t.Errorf("a backend with all ranges is reported: %s", got)
	}
}

// BenchmarkServiceNextToRanges changes one endpoint in a world with 1,000 Services, with and
// without one range.
func BenchmarkServiceNextToRanges(b *testing.B) {
	for _, ranges := range []string{"", "p=1000-2000:0"} {
		b.Run(fmt.Sprintf("range=%t", ranges != ""), func(b *testing.B) {
			tr, e := world(b, Config{}, tracker.NodeInfo{Name: "n1"})
			for i := range 1000 {
				s := serviceN(i)
				if i == 0 {
					withRanges(ranges)(s)
				}
				tr.SetService(s)
				tr.SetSlice(sliceN(i, 10, "n1"))
			}
			c := e.Attach("b", &limitedBackend{limits: Limits{PortRanges: PortRangesKept}})
			if err := c.Sync(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				tr.SetSlice(sliceN(500, 9+i%2, "n1"))
				if err := c.Sync(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestRangesThatExchangePortsShareADelta divides the changes of a Sync into several deltas. Some
// ranges give up ports that others get. A data plane that deletes before it adds must never have two
// ranges with the same port.
func TestRangesThatExchangePortsShareADelta(t *testing.T) {
	tr, e := world(t, Config{Budget: Budget{Delta: 3}}, tracker.NodeInfo{Name: "n1"})
	installed, deltas := map[l4Key]bool{}, 0
	c := e.Attach("b", &rangePlane{func(d *Delta) {
		deltas++
		for i := range d.Changes {
			for f := range d.Changes[i].GoneFrontends() {
				delete(installed, l4KeyOf(d.Changes[i].Old, &f))
			}
		}
		for i := range d.Changes {
			s := d.Changes[i].New
			for j := 0; s != nil && j < len(s.Frontends); j++ {
				at := l4KeyOf(s, &s.Frontends[j])
				for o := range installed {
					if o != at && o.anyPort() == at.anyPort() && o.port <= at.last && at.port <= o.last {
						t.Errorf("delta %d: ports %d-%d are added beside %d-%d", deltas, at.port, at.last, o.port, o.last)
					}
				}
				installed[at] = true
			}
		}
	}})
	external := externalIPs("198.51.100.1", "198.51.100.2", "198.51.100.3")
	set := func(i int, ranges string) {
		s := service(fmt.Sprint("s", i), fmt.Sprintf("172.30.0.%d", i+1), withRanges(ranges))
		if i%2 == 0 {
			external(s) // three frontends more than a delta has room for
		} else {
			externalIPs("198.51.100.1")(s)
		}
		s.CreationTimestamp = metav1.Unix(int64(1000-i), 0)
		tr.SetService(s)
	}
	for round := range 4 {
		for i := range 6 {
			first := 1000 + 100*i + 50*(round%2)
			set(i, fmt.Sprintf("p=%d-%d:0", first, first+99))
		}
		before := deltas
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		if round == 0 && deltas == before {
			t.Fatal("no delta")
		}
	}
	// Services without ranges are still divided.
	before := deltas
	for i := range 6 {
		tr.SetService(service(fmt.Sprint("t", i), fmt.Sprintf("172.30.1.%d", i+1)))
	}
	if err := c.Sync(t.Context()); err != nil || deltas-before < 2 {
		t.Errorf("%d deltas, error %v, want more than 1", deltas-before, err)
	}
}

// rangePlane is a backend with all ranges of ports.
type rangePlane struct{ apply func(*Delta) }

func (p *rangePlane) Limits(tracker.Family) Limits { return Limits{PortRanges: PortRangesShifted} }

func (p *rangePlane) Apply(_ context.Context, d *Delta) error {
	p.apply(d)
	return nil
}
