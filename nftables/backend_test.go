//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// rig is a pipeline to one kernel that a test drives.
type rig struct {
	testing.TB
	host    *netlab.Host
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
	last    ruleset.SyncInfo
	// limit, if not 0, is the size of the largest batch.
	limit int
	// offload is Config.Offload.
	offload *Offload
	// stages is Config.Stages.
	stages Stages
	// pools, if not nil, returns a configuration with other limits of pools.
	pools func(model.Config) model.Config
}

// bufferFor returns the size of a send buffer for transactions of at most limit bytes, 0 for the
// usual size. The kernel doubles the size, and needs 32 bytes.
func bufferFor(limit int) int {
	if limit == 0 {
		return kernel.SendBuffer
	}
	return (limit + 32) / 2
}

// limitTo makes the backend use another socket, for transactions of at most limit bytes. The old
// socket stays open until the test ends.
func limitTo(tb testing.TB, b *Backend, limit int) {
	tb.Helper()
	old := b.conn
	tb.Cleanup(func() { old.Close() })
	must.Do(tb, b.limitTo(limit))
	conn := b.conn
	tb.Cleanup(func() { conn.Close() })
}

func (b *Backend) limitTo(limit int) error {
	conn, err := dialWith(Config{NetNS: b.conn.(*socket).ns.File(), Offload: b.config.Offload}, bufferFor(limit))
	if err != nil {
		return err
	}
	if b.conn = conn; b.sink != nil {
		b.sink.conn = conn
	}
	return nil
}

// smallLimit is too small for a full delta of more than a few Services. A process without
// privileges has the same problem in a large cluster.
const smallLimit = 40 << 10

func newRig(tb testing.TB, h *netlab.Host) *rig {
	tb.Helper()
	r := &rig{TB: tb, host: h}
	p := backendtest.NewNode(tb, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
	r.tracker, r.engine = p.Tracker, p.Engine
	r.start()
	tb.Cleanup(func() { r.backend.Close() })
	return r
}

// start attaches a new backend, as a new process would.
func (r *rig) start() {
	r.Helper()
	if r.cursor != nil {
		r.cursor.Detach()
		r.backend.Close()
	}
	l := withoutGrace
	if r.pools != nil {
		l = r.pools(l)
	}
	b := must.Get(open(r.Context(), Config{NetNS: r.host.File(), Offload: r.offload, Stages: r.stages}, l))(r)
	if r.limit != 0 {
		limitTo(r, b, r.limit)
	}
	r.backend = b
	r.cursor = r.engine.Attach("nftables", r.backend)
	r.cursor.OnSync(func(i ruleset.SyncInfo) { r.last = i })
}

func (r *rig) sync() {
	r.Helper()
	must.Do(r, r.cursor.Sync(context.Background()))
}

// verify compares the kernel with the ruleset.
func (r *rig) verify() {
	r.Helper()
	verify(r, r.backend, r.engine.Snapshot())
}

// TestRestartKeepsClients replaces tables in one transaction and by a staging table. A remembered
// client must stay.
func TestRestartKeepsClients(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	for name, limit := range map[string]int{"in place": 0, "by a staging table": smallLimit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, netlab.NewHost(t))
			netlab.NeedPrograms(t, "nft")
			for i := range 60 {
				r.tracker.SetService(svc(i, sticky(1000)))
				r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(20)...))
			}
			r.limit = limit
			r.start()
			r.sync()
			first := r.backend.name
			// The client's endpoint is the one in bucket 7 of some Service.
			var member string
			for line := range strings.Lines(r.nft("list map ip proxier sticky-endpoints")) {
				if before, _, ok := strings.Cut(line, " comment \"ns/svc-33:p/TCP/IPv4\" : 10.244.0.7 ."); ok {
					member = before[strings.LastIndexAny(before, " \t")+1:]
				}
			}
			pool, _, _ := strings.Cut(member, ":")
			r.nft(fmt.Sprintf("add element ip %s sticky-clients { \"%s:0\" . 172.16.0.9 timeout 1000s expires 500s : \"%s\" }", first, pool, member))
			for round := range 5 {
				switch round {
				case 0, 1: // other Services come and go, and might take the numbers
					r.tracker.DeleteService(backendtest.ServiceName(round))
					r.start()
				case 2:
					r.backend.tables = nil
				case 3:
					makeOlder(t, r.host.Do, r.backend.name)
				case 4: // packets do not meet the table, which is deleted
					r.nft("add table ip " + r.backend.name + " { flags dormant; }")
				}
				r.cursor.Resync()
				r.sync()
				r.verify()
				if swapped := r.backend.name != first; swapped != (limit != 0 && round%2 == 0 && round != 4) {
					t.Errorf("round %d: the table is %s", round, r.backend.name)
				}
				out := r.nft("list map ip " + r.backend.name + " sticky-clients")
				if !remembers(out, pool+":0 . 172.16.0.9 timeout 16m40s", member) {
					t.Errorf("round %d: clients are %s", round, out)
				}
				if out := r.nft("list map ip " + r.backend.name + " sticky-endpoints"); !strings.Contains(out, member+" comment \"ns/svc-33:p/TCP/IPv4\" : 10.244.0.7 . 8080") {
					t.Errorf("round %d: %s is another endpoint", round, member)
				}
				if out := r.nft("list tables"); strings.Count(out, "table ip ") != 1 {
					t.Errorf("round %d: %s", round, out)
				}
			}
			// A new process has a smaller limit of clients. A set that stays keeps its room.
			for i := range 2 {
				r.nft(fmt.Sprintf("add element ip %s sticky-clients { \"%s:0\" . 172.16.0.%d timeout 1000s : \"%s\" }", r.backend.name, pool, i+1, member))
			}
			want := 3
			if limit != 0 {
				want = 2
			}
			r.pools = func(c model.Config) model.Config { c.Clients = 2; return c }
			for range 2 {
				r.start()
				r.sync()
				r.verify()
				if out := r.nft("list map ip " + r.backend.name + " sticky-clients"); strings.Count(out, "172.16.0.") != want {
					t.Errorf("%d clients should be remembered: %s", want, out)
				}
			}
		})
	}
}

// remembers reports whether a listing of clients has a client with its endpoint. The client was
// added with 500 seconds to its expiry, and most of that time must be left.
func remembers(listing, client, member string) bool {
	for line := range strings.Lines(listing) {
		_, rest, ok := strings.Cut(line, client+" expires ")
		expires, rest, _ := strings.Cut(rest, " ")
		left, err := time.ParseDuration(expires)
		if ok && err == nil && left > 100*time.Second && left <= 500*time.Second && strings.HasPrefix(rest, ": "+member+" ") {
			return true
		}
	}
	return false
}

// nft runs the nft tool in the rig's namespace.
func (r *rig) nft(script string) string {
	r.Helper()
	out, err := r.host.Run(r, "nft", script)
	if err != nil {
		r.Fatalf("nft %s: %v\n%s", script, err, out)
	}
	return out
}

// TestCleanupDeletesOnlyOwnTables deletes the tables that Owned reports, and no other.
func TestCleanupDeletesOnlyOwnTables(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	r.nft("add table ip other")
	r.tracker.SetService(svc(0))
	r.sync()
	for _, want := range []bool{true, false} { // the second time, no table is left
		c := Config{NetNS: r.host.File()}
		if owned, err := Owned(t.Context(), c); err != nil || owned != want {
			t.Errorf("Owned returned %v, %v, want %v", owned, err, want)
		}
		must.Do(t, Cleanup(t.Context(), c))
	}
	if out := strings.TrimSpace(r.nft("list ruleset")); out != "table ip other {\n}" {
		t.Errorf("left behind:\n%s", out)
	}
}

// TestBackendsOfTwoTablesCoexist has two backends with different tables.
func TestBackendsOfTwoTablesCoexist(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(0))
	r.sync()
	other := must.Get(New(t.Context(), Config{NetNS: r.host.File(), Table: "another", Families: []tracker.Family{tracker.IPv6}}))(t)
	defer other.Close()
	must.Do(t, r.engine.Attach("another", other).Sync(context.Background()))
	r.verify()
	if err := other.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestServiceBeyondLimitsGetsFirstEndpoints has Services that exceed the limits beside one that does not.
func TestServiceBeyondLimitsGetsFirstEndpoints(t *testing.T) {
	t.Parallel()
	b := must.Get(New(t.Context(), Config{NetNS: netlab.NewHost(t).File(), Families: []tracker.Family{tracker.IPv4}}))(t)
	defer b.Close()
	make := func(id uint32, name string, edit func(*tracker.ServicePort), endpoints int) ruleset.Change {
		k := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
		p := &tracker.ServicePort{Key: k, ClusterIP: netip.AddrFrom4([4]byte{10, 96, 0, byte(id)}), Port: 80}
		edit(p)
		var eps []*tracker.Endpoint
		for e := range endpoints {
			eps = append(eps, &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(e >> 16), byte(e >> 8), byte(e)}), 80), Ready: true, Serving: true, Weight: 1, Node: "far"})
		}
		s := ruleset.Compile(tracker.PortState{Port: p, Endpoints: eps}, &ruleset.Node{})
		s.ID, s.Key = id, p.Key
		return ruleset.Change{Key: p.Key, New: s, Fields: ruleset.FieldAll}
	}
	limits := ruleset.LimitsOf(b, tracker.IPv4)
	d := &ruleset.Delta{Full: true, Node: &ruleset.Node{}, Changes: []ruleset.Change{
		make(1, "sticky-and-huge", func(p *tracker.ServicePort) { p.Affinity = 1e9 }, limits.AffinityEndpoints+1),
		make(2, "fine", func(*tracker.ServicePort) {}, 3),
		make(4, "hashed-and-huge", func(p *tracker.ServicePort) { p.Hash = tracker.HashSource }, limits.WeightedEndpoints+1),
	}}
	for range 2 { // as a whole and as a change
		must.Do(t, b.Apply(context.Background(), d))
		for at, want := range map[string]int{"10.96.0.1:80": limits.AffinityEndpoints, "10.96.0.2:80": 3, "10.96.0.4:80": limits.WeightedEndpoints} {
			f, err := lookUp(t.Context(), b.config, netip.MustParseAddrPort(at), v1.ProtocolTCP)
			if err != nil || f.Entry != (want != 0) || len(f.Endpoints) != want {
				t.Errorf("%s: %d endpoints, want %d, error %v", at, len(f.Endpoints), want, err)
			}
		}
		d.Full = false
		for i := range d.Changes {
			d.Changes[i].Old = d.Changes[i].New
		}
	}
}

// TestMissingCapabilityIsUnsupported probes in a thread without capabilities.
func TestMissingCapabilityIsUnsupported(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	err := withoutCapabilities(func() error { return Probe(t.Context(), Config{}) })
	var unsupported *dataplane.UnsupportedError
	if !errors.As(err, &unsupported) || !errors.Is(err, dataplane.ErrUnsupported) || !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("Probe returned %v", err)
	}
}

// TestProbeKeepsForeignTable probes while another program has a table of the probe's name.
func TestProbeKeepsForeignTable(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	netlab.NeedPrograms(t, "nft")
	if out, err := h.Run(t, "nft", "add table ip proxier-probe; add chain ip proxier-probe theirs"); err != nil {
		t.Fatal(err, out)
	}
	if err := Probe(t.Context(), Config{NetNS: h.File()}); !errors.Is(err, unix.EEXIST) || errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("Probe returned %v", err)
	}
	if out, err := h.Run(t, "nft", "list table ip proxier-probe"); err != nil || !strings.Contains(out, "chain theirs") {
		t.Errorf("theirs is %s, %v", out, err)
	}
}

// TestPermanentErrorsAreUnsupported classifies errors as permanent or temporary.
func TestPermanentErrorsAreUnsupported(t *testing.T) {
	t.Parallel()
	for errno, want := range map[unix.Errno]bool{
		unix.EOPNOTSUPP: true, unix.ENOENT: true, unix.EINVAL: true, unix.EPERM: true,
		unix.ENOMEM: false, unix.ENOBUFS: false, unix.EBUSY: false, unix.EEXIST: false,
	} {
		err := unsupported(tracker.IPv6, &Error{Errno: errno, What: "create set handlers"})
		if errors.Is(err, dataplane.ErrUnsupported) != want || !errors.Is(err, errno) {
			t.Errorf("%v became %v", errno, err)
		}
	}
	if err := unsupported(tracker.IPv4, ErrTooLarge); errors.Is(err, dataplane.ErrUnsupported) || !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
	for errno, want := range map[unix.Errno]bool{unix.EPROTONOSUPPORT: true, unix.EAFNOSUPPORT: true, unix.EMFILE: false, unix.EBADF: false} {
		err := unsupportedSocket(fmt.Errorf("netlink socket: %w", errno))
		if errors.Is(err, dataplane.ErrUnsupported) != want || !errors.Is(err, errno) {
			t.Errorf("%v became %v", errno, err)
		}
	}
}

// withoutCapabilities runs f on a thread without capabilities, which then ends.
func withoutCapabilities(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]Config{
		"table name":        {Table: "a b"},
		"long name":         {Table: strings.Repeat("a", 56)},
		"probe":             {Table: "proxier-probe"},
		"staging":           {Table: "proxier-shadow"},
		"family":            {Families: []tracker.Family{5}},
		"no family":         {Families: []tracker.Family{}},
		"family twice":      {Families: []tracker.Family{tracker.IPv4, tracker.IPv4}},
		"mark bit":          {MasqueradeMark: 0b11},
		"network namespace": {NetNS: os.Stdin},
	} {
		b, err := New(t.Context(), c)
		if err == nil {
			b.Close()
		}
		if err == nil || errors.Is(err, ruleset.ErrConfig) != (c.NetNS == nil) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
