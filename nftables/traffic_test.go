//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// total returns the sum of all counters.
func total(t *dataplane.Traffic) (sum dataplane.Counters) {
	for _, c := range t.Services {
		sum.Add(c)
	}
	return sum
}

// traffic reads the counters by the backend and by the function Traffic. Both must agree once no
// packets come in between.
func traffic(tb testing.TB, b *Backend) *dataplane.Traffic {
	tb.Helper()
	for tries := 1; ; tries++ {
		got := must.Get(b.Traffic(tb.Context()))(tb)
		read := must.Get(Traffic(tb.Context(), b.config))(tb)
		if fmt.Sprint(got) == fmt.Sprint(read) {
			return got
		}
		if tries == 10 {
			tb.Errorf("Backend.Traffic returned %v, and Traffic %v", got, read)
			return got
		}
		time.Sleep(50 * time.Millisecond) // the last packets of a connection came in between
	}
}

// TestEveryConnectionIsCounted makes connections while Services change, tables are replaced
// and other processes take over, and compares their number with the counters.
func TestEveryConnectionIsCounted(t *testing.T) {
	t.Parallel()
	w, s, b := busyWorld(t)
	rng := rand.New(rand.NewPCG(1, 3))
	// lost is the number of connections that may be missing after each round. One connection of
	// each round may be counted twice: see Backend.Traffic.
	during := func(what string, rounds, lost int, f func(i int)) {
		t.Helper()
		before := total(traffic(t, b)).Connections
		c := w.Churn(s.targets(), func() {
			for i := range rounds {
				f(i)
				w.Sync()
			}
		})
		if len(c.Failures) != 0 {
			t.Fatalf("%s: %v", what, c.Failures[0])
		}
		after := total(traffic(t, b)).Connections
		missing := int(before) + c.Opened - int(after)
		t.Logf("%s: %d connections, %d of them not counted", what, c.Opened, missing)
		if missing < -rounds || missing > rounds*lost {
			t.Errorf("%s: %d of %d connections were not counted, at most %d may be", what, missing, c.Opened, rounds*lost)
		}
	}
	rounds, growths := 10, 1
	if testtime.Thorough() {
		rounds, growths = 20, 3
	}
	during("endpoint changes", 15*rounds, 0, func(int) { s.hand(w.Tracker, rng) })
	during("full resyncs", rounds, 0, func(int) { w.Cursor.Resync() })
	during("restarts", rounds, 0, func(int) {
		w.Cursor.Detach()
		b.Close()
		b = newForWorld(t, w.Env).(*Backend)
		w.Cursor = w.Engine.Attach("nftables", b)
	})
	limitTo(t, b, 20<<10) // the skeletons fit, and little more
	during("staging tables", rounds, 20, func(int) { w.Cursor.Resync() })
	limitTo(t, b, 0)
	during("sets with more room", growths, 200, func(i int) {
		// The table in the kernel has room for half of them.
		for n := range 3000 << i {
			w.Tracker.SetService(benchService(n + 100))
		}
	})
}

// TestCountersFollowFrontends adds counters as packets would, and has Services come, go and
// take frontends from each other.
func TestCountersFollowFrontends(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	c := Config{NetNS: r.host.File()}
	if _, err := Traffic(t.Context(), c); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("without a table: %v, want ErrNoRules", err)
	}
	nodePort := func(port int32) func(*v1.Service) {
		return func(s *v1.Service) { s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, port }
	}
	for i := range 3 {
		r.tracker.SetService(svc(i, nodePort(30000+int32(i))))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, 1, 2))
	}
	r.sync()
	count := func(set, at string, packets int) {
		r.nft(fmt.Sprintf("add element ip proxier %s { %s counter packets %d bytes 100 }", set, at, packets))
	}
	// wants compares the connections by Service and family.
	wants := func(what string, want map[string]dataplane.Counters) {
		t.Helper()
		got := map[string]dataplane.Counters{}
		for k, c := range traffic(t, r.backend).Services {
			got[k.String()] = c
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	count("connections", "10.96.0.1 . tcp . 80", 1)
	count("connections", "192.168.7.1 . tcp . 30000", 2)
	count("connections", "192.168.7.2 . tcp . 30000", 4)
	count("refused-packets", "10.96.0.2 . tcp . 80", 8)
	count("dropped-packets", "192.168.7.1 . tcp . 30001", 16)
	count("connections", "10.96.0.3 . tcp . 80", 32)
	count("connections", "10.96.0.3 . udp . 80", 64) // not a frontend
	all := map[string]dataplane.Counters{
		"ns/svc-0:p/TCP/IPv4": {Connections: 7}, "ns/svc-1:p/TCP/IPv4": {Refused: 8, Dropped: 16}, "ns/svc-2:p/TCP/IPv4": {Connections: 32},
	}
	wants("as counted", all)
	if out := r.nft("list set ip proxier connections"); strings.Contains(out, "udp") {
		t.Errorf("a counter without a frontend stays: %s", out)
	}

	// Another number of endpoints gives the frontends other dispatch keys.
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1, 2, 3))
	r.sync()
	wants("with another endpoint", all)
	for _, what := range []string{"a restart", "an older layout"} {
		if what == "an older layout" {
			makeOlder(t, r.host.Do, r.backend.name)
		}
		r.start()
		r.sync()
		r.verify()
		wants("after "+what, all)
	}
	limitTo(t, r.backend, smallLimit/2)
	for range 2 { // to the other name and back
		r.cursor.Resync()
		r.sync()
		r.verify()
		wants("after a swap of tables", all)
	}

	// Service 3 takes the addresses of 0 in one delta, and the NodePort of 1, which was read in
	// between, in two.
	takeOver := svc(3, func(s *v1.Service) { s.Spec.ClusterIPs[0], s.Spec.ClusterIP = "10.96.0.1", "10.96.0.1" }, nodePort(30001))
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-1"})
	r.sync()
	delete(all, "ns/svc-1:p/TCP/IPv4")
	wants("after a Service was deleted", all)
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-0"})
	r.tracker.SetService(takeOver)
	r.sync()
	delete(all, "ns/svc-0:p/TCP/IPv4")
	wants("after frontends passed to another Service", all)
	r.verify()

	// The change deletes the counters of a deleted Service's addresses, before Traffic is called.
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-2"})
	r.sync()
	if out := r.nft("list set ip proxier connections"); strings.Contains(out, "10.96.0.3 . tcp . 80") {
		t.Errorf("the counter of a deleted Service's address stays: %s", out)
	}
	r.tracker.SetService(svc(2))
	r.sync()
	wants("after the Service came back", map[string]dataplane.Counters{})
	r.tracker.SetService(svc(2, func(s *v1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.7"} }))
	r.sync()
	count("connections", "10.96.0.3 . tcp . 80", 3)
	count("connections", "203.0.113.7 . tcp . 80", 5)
	r.tracker.SetService(svc(2))
	r.sync()
	wants("after one of two addresses was lost", map[string]dataplane.Counters{"ns/svc-2:p/TCP/IPv4": {Connections: 3}})
}

// TestCountersOfManyDeletedServices deletes one Service, and then more than fit into one
// transaction.
func TestCountersOfManyDeletedServices(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	const services = 240
	counters := &nft.Elements{}
	for i := range services {
		s := svc(i)
		r.tracker.SetService(s)
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, 1))
		key := layout.Octets{}.Addr(netip.MustParseAddr(s.Spec.ClusterIP)).Proto(inet.TCP).Port(80)
		counters.AddCounter(key.Bytes(), onePacket())
	}
	r.sync()
	addCounters(t, r.backend, tracker.IPv4, counters)
	wants := func(want int) {
		t.Helper()
		for _, set := range layout.TrafficSets() {
			if got := strings.Count(r.nft("list set ip proxier "+set.Name()), "counter packets 1 "); got != want {
				t.Errorf("%d counters in %s, want %d", got, set.Name(), want)
			}
		}
	}
	wants(services)
	r.tracker.DeleteService(backendtest.ServiceName(7))
	r.sync()
	wants(services - 1)
	limitTo(t, r.backend, smallLimit)
	for i := range services - 40 {
		r.tracker.DeleteService(backendtest.ServiceName(i))
	}
	r.sync()
	r.verify()
	wants(40)
}

// addCounters adds counters to each set of counters.
func addCounters(tb testing.TB, b *Backend, f tracker.Family, list *nft.Elements) {
	tb.Helper()
	w := kernel.NewWriter(b.name)
	for _, s := range layout.TrafficSets() {
		w.AddElements(f, s, list)
	}
	must.Do(tb, b.conn.Commit(w))
}

// TestFullSetsForwardAll fills the sets of counters. Connections, affinity and refusals must
// not depend on them.
func TestFullSetsForwardAll(t *testing.T) {
	t.Parallel()
	w, s, b := busyWorld(t)
	rng := rand.New(rand.NewPCG(1, 3))
	w.Tracker.SetService(s.service(sticky(1000)))
	w.Sync()
	for _, f := range b.config.Families {
		from := netip.MustParseAddr("192.0.2.0")
		if f == tracker.IPv6 {
			from = netip.MustParseAddr("2001:db8::")
		}
		counters := &nft.Elements{}
		for i := range 4096 {
			key := layout.Octets{}.Addr(from).Proto(inet.TCP).Port(uint16(i))
			counters.AddCounter(key.Bytes(), onePacket())
		}
		addCounters(t, b, f, counters)
	}
	c := w.Churn(s.targets(), func() {
		for range 50 {
			s.hand(w.Tracker, rng)
			w.Sync()
		}
	})
	if len(c.Failures) != 0 {
		t.Errorf("%d of %d connections failed: %v", len(c.Failures), c.Opened, c.Failures[0])
	}
	if got := total(traffic(t, b)).Connections; got != 0 {
		t.Errorf("%d connections were counted in sets without room", got)
	}
	if c = w.Churn(s.targets(), func() {}); int(total(traffic(t, b)).Connections) != c.Opened {
		t.Errorf("%d connections were counted of %d after the sets had room again", total(traffic(t, b)).Connections, c.Opened)
	}
}

// onePacket returns a counter of one packet of one byte.
func onePacket() []byte {
	values := nfnl.AppendUint64(nil, unix.NFTA_COUNTER_BYTES, 1)
	values = nfnl.AppendUint64(values, unix.NFTA_COUNTER_PACKETS, 1)
	expr := nfnl.AppendString(nil, unix.NFTA_EXPR_NAME, "counter")
	return nfnl.AppendBytes(expr, unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, values)
}
