package nftables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestMemoryEqualsLinux drives the same random worlds through a Backend with a kernel in memory and one
// with Linux, and compares the contents of all tables after each change.
func TestMemoryEqualsLinux(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	for seed := range randomSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			h := netlab.NewHost(t)
			m := newMemory()
			p := backendtest.NewNode(t, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
			limit := []int{0, smallLimit}[seed%2]
			m.limit = limit
			// The numbers of sticky pools are random in tables that replace others. kernelView resolves
			// them.
			var omit []layout.Set
			written := false
			var backends [2]*Backend
			var cursors [2]*ruleset.Cursor
			start := func() {
				for i := range backends {
					if cursors[i] != nil {
						cursors[i].Detach()
						backends[i].Close()
					}
				}
				backends[0] = m.backend(t, Config{}, withoutGrace)
				b := must.Get(open(t.Context(), Config{NetNS: h.File()}, withoutGrace))(t)
				t.Cleanup(func() { b.Close() })
				if limit != 0 {
					limitTo(t, b, limit)
				}
				backends[1] = b
				for i, b := range backends {
					cursors[i] = p.Engine.Attach(fmt.Sprint("backend ", i), b)
					cursors[i].OnSync(func(i ruleset.SyncInfo) {
						if i.Full && written {
							omit = []layout.Set{
								layout.StickyPools, layout.StickyBuckets, layout.StickyEndpoints, layout.ServiceIPs, layout.NodePorts,
								layout.InternalIPs, layout.InternalNodePorts,
							}
						}
					})
				}
			}
			start()
			rng := rand.New(rand.NewPCG(seed, 4))
			// A Maglev table does not fit into the smallest transactions.
			changes := backendtest.Changes{Hash: limit == 0, Shared: 4}
			for step := range 60 {
				for range 1 + rng.IntN(3) {
					changes.Make(p.Tracker, p.Engine, rng)
				}
				switch n := rng.IntN(20); {
				case step < 20:
				case n == 0:
					start()
				case n == 1:
					cursors[0].Resync()
					cursors[1].Resync()
				}
				for i, c := range cursors {
					if err := c.Sync(t.Context()); err != nil {
						t.Fatalf("step %d, backend %d: %v", step, i, err)
					}
					verify(t, backends[i], p.Engine.Snapshot())
				}
				written = true
				for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
					if backends[0].name != backends[1].name {
						t.Fatalf("step %d: table %s in memory, %s in Linux", step, backends[0].name, backends[1].name)
					}
					for _, table := range []string{DefaultTable, stagingOf(DefaultTable)} {
						got, want := contents(t, backends[0].conn, table, f, omit...), contents(t, backends[1].conn, table, f, omit...)
						if !slices.Equal(got, want) {
							t.Fatalf("step %d, table %s: memory has\n%s\nLinux has\n%s", step, table, without(got, want), without(want, got))
						}
					}
				}
			}
		})
	}
}

// TestMemoryRefusesWhatLinuxRefuses commits transactions to a kernel in memory and to Linux. Both must
// answer the same, and have the same contents afterwards.
func TestMemoryRefusesWhatLinuxRefuses(t *testing.T) {
	t.Parallel()
	const f = tracker.IPv4
	host, n := netlab.NewHost(t), 0
	object := func(o model.Object) func(writer) {
		o.Family = f
		return func(w writer) { w.Add(&model.Tx{Objects: []model.Object{o}}) }
	}
	edit := func(deletion bool, s layout.Set, key layout.Octets, data layout.Octets, text string) func(writer) {
		e := model.Edit{Set: s, Family: f, Deletion: deletion}
		switch {
		case s.Interval():
			e.AddInterval(key.Bytes(), data.Bytes())
		case text != "":
			e.AddVerdict(key.Bytes(), text)
		default:
			e.Add(key.Bytes(), data.Bytes(), "")
		}
		return func(w writer) { w.Add(&model.Tx{Edits: []model.Edit{e}}) }
	}
	endpoint := func(bucket uint32) (layout.Octets, layout.Octets) {
		return layout.Octets{}.Word(1).Word(bucket), layout.Octets{}.Word(0x0100000a).Port(80)
	}
	add := func(bucket uint32) func(writer) {
		key, data := endpoint(bucket)
		return edit(false, layout.Endpoints, key, data, "")
	}
	remove := func(bucket uint32) func(writer) {
		key, _ := endpoint(bucket)
		return edit(true, layout.Endpoints, key, layout.Octets{}, "")
	}
	again := func(w writer) {
		list := &nft.Elements{}
		key, data := endpoint(0)
		list.Add(key.Bytes(), data.Bytes(), "")
		w.AddElements(f, layout.Endpoints, list)
	}
	pool := layout.Handler{Buckets: 1}
	masquerading := layout.Handler{Handling: layout.HandleAlways, Buckets: 1}
	unknown := layout.Handler{Handling: layout.HandleAlways, Buckets: 2}
	handler := func(n uint32, chain string) func(writer) {
		return edit(false, layout.Handlers, layout.Octets{}.Word(n), layout.Octets{}, chain)
	}
	interval := func(first, end uint32) func(writer) {
		return edit(false, layout.ServiceCIDRs, layout.Octets{}.Port(uint16(first)), layout.Octets{}.Port(uint16(end)), "")
	}
	before := []func(writer){
		object(model.Object{Kind: model.CreateTable}),
		object(model.Object{Kind: model.NewSet, Set: layout.Endpoints, Size: 2}),
		object(model.Object{Kind: model.NewSet, Set: layout.UDPEndpoints, Size: 2}),
		object(model.Object{Kind: model.NewSet, Set: layout.SCTPEndpoints, Size: 2}),
		object(model.Object{Kind: model.NewSet, Set: layout.Handlers, Size: 100}),
		object(model.Object{Kind: model.NewSet, Set: layout.Connections, Size: 100}),
		object(model.Object{Kind: model.NewSet, Set: layout.ServiceCIDRs}),
		object(model.Object{Kind: model.HandlerChain, Handler: pool}),
		object(model.Object{Kind: model.HandlerChain, Handler: masquerading}),
		add(0), handler(1, masquerading.Chain()), interval(0x0a00, 0x0b00),
	}
	for name, c := range map[string]struct {
		do   []func(writer)
		want syscall.Errno
	}{
		"nothing":                          {nil, 0},
		"create a table that exists":       {[]func(writer){object(model.Object{Kind: model.CreateTable})}, 0},
		"create a new table that exists":   {[]func(writer){object(model.Object{Kind: model.CreateNewTable})}, syscall.EEXIST},
		"delete a table":                   {[]func(writer){object(model.Object{Kind: model.DeleteTable})}, 0},
		"delete a table twice":             {[]func(writer){object(model.Object{Kind: model.DeleteTable}), object(model.Object{Kind: model.DeleteTable})}, syscall.ENOENT},
		"delete a table and add a set":     {[]func(writer){object(model.Object{Kind: model.DeleteTable}), object(model.Object{Kind: model.NewSet, Set: layout.Hairpin})}, syscall.ENOENT},
		"delete and create a table":        {[]func(writer){object(model.Object{Kind: model.DeleteTable}), object(model.Object{Kind: model.CreateNewTable})}, 0},
		"delete a set that does not exist": {[]func(writer){object(model.Object{Kind: model.DeleteSet, Name: "hairpin-connections"})}, syscall.ENOENT},
		"replace a set that rules used": {[]func(writer){
			object(model.Object{Kind: model.DeleteRules}), object(model.Object{Kind: model.DeleteSet, Name: layout.Endpoints.Name()}),
			object(model.Object{Kind: model.NewSet, Set: layout.Endpoints, Size: 2}), add(0), add(1),
		}, 0},
		"add an element":                       {[]func(writer){add(1)}, 0},
		"add an element that exists":           {[]func(writer){add(1), add(0)}, syscall.EEXIST},
		"add too many elements":                {[]func(writer){add(1), add(2)}, syscall.ENFILE},
		"replace an element of a full set":     {[]func(writer){remove(0), add(1), add(2)}, 0},
		"replace an element by the same":       {[]func(writer){remove(0), add(0)}, 0},
		"delete an element that is missing":    {[]func(writer){add(1), remove(2)}, syscall.ENOENT},
		"delete an element twice":              {[]func(writer){remove(0), remove(0)}, syscall.ENOENT},
		"add an element once more":             {[]func(writer){again}, 0},
		"add an element to a missing set":      {[]func(writer){edit(false, layout.Hairpin, layout.Octets{}.Word(1).Word(1), layout.Octets{}, "")}, syscall.ENOENT},
		"lead to a chain":                      {[]func(writer){handler(2, pool.Chain())}, 0},
		"lead to a missing chain":              {[]func(writer){handler(2, "none")}, syscall.ENOENT},
		"delete a chain that elements use":     {[]func(writer){object(model.Object{Kind: model.DeleteChain, Name: masquerading.Chain()})}, syscall.EBUSY},
		"delete a chain that rules use":        {[]func(writer){object(model.Object{Kind: model.DeleteChain, Name: pool.Chain()})}, syscall.EBUSY},
		"delete a chain that does not exist":   {[]func(writer){object(model.Object{Kind: model.DeleteChain, Name: "none"})}, syscall.ENOENT},
		"create a chain that leads to nothing": {[]func(writer){object(model.Object{Kind: model.HandlerChain, Handler: unknown})}, syscall.ENOENT},
		"delete all rules":                     {[]func(writer){object(model.Object{Kind: model.DeleteRules})}, 0},
		"add an interval":                      {[]func(writer){interval(0x0c00, 0x0d00)}, 0},
		"add an interval next to another":      {[]func(writer){interval(0x0b00, 0x0c00)}, 0},
		"add an interval that exists":          {[]func(writer){interval(0x0a00, 0x0b00)}, syscall.EEXIST},
		"change interfaces without flowtable":  {[]func(writer){object(model.Object{Kind: model.AddDevices, Names: []string{"lo"}})}, syscall.ENOENT},
	} {
		n++
		t.Run(name, func(t *testing.T) {
			table := fmt.Sprint("t", n)
			linux := must.Get(dialWith(Config{NetNS: host.File()}, kernel.SendBuffer))(t)
			defer linux.Close()
			conns := []connection{newMemory().connect(), linux}
			var generations [2]uint32
			var found [2][]string
			for i, conn := range conns {
				for j, steps := range [][]func(writer){before, c.do} {
					w := conn.NewWriter(table, kernel.Rules{Family: f, Mark: 1, Seed: 1})
					for _, step := range steps {
						step(w)
					}
					generation := must.Get(conn.Generation())(t)
					err := conn.Commit(w)
					var refused *Error
					switch {
					case j == 0 && err != nil:
						t.Fatalf("%T: %v", conn, err)
					case j == 0:
					case c.want == 0 && err != nil, c.want != 0 && (!errors.As(err, &refused) || refused.Errno != c.want):
						t.Errorf("%T: Commit returned %v, want %v", conn, err, c.want)
					}
					now := must.Get(conn.Generation())(t)
					generations[i] = now - generation
				}
				found[i] = contents(t, conn, table, f)
			}
			if generations[0] != generations[1] {
				t.Errorf("memory has %d new generations, Linux %d", generations[0], generations[1])
			}
			if !slices.Equal(found[0], found[1]) {
				t.Errorf("memory has\n%s\nLinux has\n%s", without(found[0], found[1]), without(found[1], found[0]))
			}
		})
	}
}
