package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"github.com/go-proxier/proxier/internal/testing/must"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// view describes a table without its arbitrary numbers, with a line for each fact.
type view map[string]string

// kernelView reads one family's table and resolves its dispatch keys.
func kernelView(tb testing.TB, b *Backend, f tracker.Family) view {
	tb.Helper()
	all := func(s layout.Set, fn func(nft.Element)) {
		err := b.conn.Elements(b.name, f, s, fn)
		if err != nil && !errors.Is(err, syscall.ENOENT) {
			tb.Fatalf("read %s: %v", s.Name(), err)
		}
	}
	handlers := map[bool]map[uint32]string{}
	for internal, s := range map[bool]layout.Set{false: layout.Handlers, true: layout.InternalHandlers} {
		handlers[internal] = map[uint32]string{}
		all(s, func(e nft.Element) { handlers[internal][number(e.Key)] = e.Chain })
	}
	stickyChains, stickyKeys := map[uint32]string{}, map[uint32]uint32{}
	all(layout.StickyHandlers, func(e nft.Element) { stickyChains[number(e.Key)] = e.Chain })
	all(layout.StickyPools, func(e nft.Element) { stickyKeys[number(e.Key)] = number(e.Data) })
	members := map[uint32]string{}
	all(layout.StickyEndpoints, func(e nft.Element) {
		a, _ := layout.ParseAddrPort(e.Data)
		members[number(e.Key)] = a.String()
	})
	pools := map[uint32][]string{}
	put := func(pool, bucket uint32, ep string) {
		for int(bucket) >= len(pools[pool]) {
			pools[pool] = append(pools[pool], "")
		}
		pools[pool][bucket] = ep
	}
	for _, s := range []layout.Set{layout.Endpoints, layout.UDPEndpoints, layout.SCTPEndpoints} {
		all(s, func(e nft.Element) {
			a, _ := layout.ParseAddrPort(e.Data)
			put(number(e.Key), number(e.Key[4:]), a.String())
		})
	}
	all(layout.StickyBuckets, func(e nft.Element) {
		ep := members[number(e.Data)]
		if ep == "" {
			tb.Errorf("bucket of unknown member %x", number(e.Data))
		}
		put(number(e.Key), number(e.Key[4:]), ep)
	})
	v := view{}
	used := map[uint32]bool{}
	dispatchKey := func(kind string, internal bool) func(nft.Element) {
		return func(e nft.Element) {
			t := number(e.Data)
			at := place(e.Key, f)
			chain := handlers[internal][t&layout.HandlerMask]
			pool := t & layout.PoolMask
			if strings.HasSuffix(chain, layout.ChainSticky) {
				key := stickyKeys[pool]
				chain += " " + stickyChains[key&layout.MaxMember]
				if pool <<= layout.StickyShift; key&layout.StickyMask != pool {
					tb.Errorf("pool %x has the sticky key %x", pool, key)
				}
			}
			used[pool] = true
			if slices.Contains(pools[pool], "") {
				tb.Errorf("pool %x has a hole: %v", pool, pools[pool])
			}
			eps := pools[pool]
			if !strings.Contains(chain, "-by-") { // with a hash, the order of buckets matters
				eps = slices.Sorted(slices.Values(eps))
			}
			v[kind+" "+at] = fmt.Sprintf("%s %s %v", e.Comment, chain, eps)
		}
	}
	all(layout.ServiceIPs, dispatchKey("service", false))
	all(layout.NodePorts, dispatchKey("service", false))
	all(layout.InternalIPs, dispatchKey("internal", true))
	all(layout.InternalNodePorts, dispatchKey("internal", true))
	for p := range pools {
		if !used[p] {
			tb.Errorf("pool %x is not used", p)
		}
	}
	n := f.Bits() / 8
	all(layout.ClusterIPs, func(e nft.Element) { v["cluster IP "+address(e.Key)] = "" })
	// The set also has endpoints in their grace period, and no others.
	inGrace := b.tables.Table(f).Hairpin.InGrace(time.Now())
	all(layout.Hairpin, func(e nft.Element) {
		if a, _ := netip.AddrFromSlice(e.Key[:n]); inGrace[a].IsZero() {
			v["hairpin "+a.String()] = ""
		}
	})
	for bits := range f.Bits() + 1 {
		all(layout.Allowed(bits), func(e nft.Element) {
			v[fmt.Sprintf("source %s/%d to %s", address(e.Key[:n]), bits, place(e.Key[n:], f))] = ""
		})
	}
	return v
}

func address(data []byte) string {
	a, _ := netip.AddrFromSlice(data)
	return a.String()
}

// place returns a text of the address, if any, the protocol and the port in a key.
func place(key []byte, f tracker.Family) string {
	n := 0
	addr := "node port"
	if len(key) > 8 {
		n = f.Bits() / 8
		addr = address(key[:n])
	}
	return fmt.Sprintf("%s %d %d", addr, key[n], binary.BigEndian.Uint16(key[n+4:]))
}

// rulesetView returns the view that follows from the ruleset.
func rulesetView(services []*ruleset.Port, node *ruleset.Node, f tracker.Family) view {
	v := view{}
	for _, s := range services {
		if s.Key.Family != f {
			continue
		}
		line := func(handler layout.Handler, target ruleset.Target) string {
			list := []string{}
			eps := s.Pool(target)
			switch {
			case s.Hash() != tracker.HashNone && handler.HasPool():
				tab := s.Maglev(target, node.HashSeed)
				for bucket := range tab.Len() {
					list = append(list, eps[tab.At(bucket)].Addr.String())
				}
			case s.Weighted(target):
				for i, n := range ruleset.Shares(eps) {
					list = append(list, slices.Repeat([]string{eps[i].Addr.String()}, n)...)
				}
				slices.Sort(list)
			default:
				for _, ep := range eps {
					list = append(list, ep.Addr.String())
				}
				slices.Sort(list)
			}
			chain := handler.Chain()
			if handler.Sticky {
				chain += " " + model.StickyHandlerOf(s, target).Chain()
			}
			return fmt.Sprintf("%s %s %v", nft.Printable(s.Key.ServicePortName.String()), chain, list)
		}
		for i := range s.Frontends {
			fr := &s.Frontends[i]
			at := fmt.Sprintf("%s %d %d", fr.Addr, inet.Protocol(s.Key.Protocol), fr.Port)
			if fr.Kind == ruleset.KindNodePort {
				at = fmt.Sprintf("node port %d %d", inet.Protocol(s.Key.Protocol), fr.Port)
			}
			h, own := model.HandlersOf(s, fr)
			v["service "+at] = line(h, fr.Target)
			if fr.ShortCircuit() && fr.Internal == ruleset.TargetCluster {
				v["internal "+at] = line(own, ruleset.TargetCluster)
			}
			if fr.Kind == ruleset.KindClusterIP {
				v["cluster IP "+fr.Addr.String()] = ""
			}
			for _, source := range fr.Sources {
				v[fmt.Sprintf("source %s to %s", source, at)] = ""
			}
		}
		for _, ep := range s.Selection.Reachable {
			if ep.Node == "" || ep.Node == node.Info.Name {
				v["hairpin "+ep.Addr.Addr().String()] = ""
			}
		}
	}
	return v
}

// diffViews describes the differences between two views, "" if they are equal.
func diffViews(have, want view) string {
	var out []string
	for k, w := range want {
		if h, ok := have[k]; !ok {
			out = append(out, fmt.Sprintf("missing: %s -> %s", k, w))
		} else if h != w {
			out = append(out, fmt.Sprintf("%s -> %s, want %s", k, h, w))
		}
	}
	for k, h := range have {
		if _, ok := want[k]; !ok {
			out = append(out, fmt.Sprintf("stale: %s -> %s", k, h))
		}
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// everySet lists all sets.
func everySet() (out []layout.Set) {
	for s := range layout.SetCount + 1 {
		out = append(out, s)
	}
	return out
}

// contents returns a line for each object and element of a table, except those of the omitted sets.
// A chain's line has its number of rules only if that is 0.
func contents(tb testing.TB, c connection, table string, f tracker.Family, omit ...layout.Set) []string {
	tb.Helper()
	head := must.Get(c.Table(table, f))(tb)
	if !head.Exists {
		return nil
	}
	out := []string{fmt.Sprintf("table %v flags %d", f, head.Flags)}
	chains := must.Get(c.Chains(table, f))(tb)
	rules := must.Get(c.Rules(table, f))(tb)
	ruled := map[string]bool{}
	for _, r := range rules {
		ruled[r.Chain] = true
	}
	for name, chain := range chains {
		out = append(out, fmt.Sprintf("chain %s, hooked %t, has rules %t", name, chain.Base != nil, ruled[name]))
	}
	sets := must.Get(c.Sets(table, f))(tb)
	for _, s := range everySet() {
		set, ok := sets[s.Name()]
		if !ok {
			continue
		}
		delete(sets, s.Name())
		out = append(out, fmt.Sprintf("set %s, sound %t, size %d", s.Name(), set.Is(s.Spec(f)), set.Size))
		n := 0
		must.Do(tb, readAll(c, table, f, s, func() { n = 0 }, func(nft.Element) { n++ }))
		out = append(out, fmt.Sprintf("%s has %d elements", s.Name(), n))
		if slices.Contains(omit, s) {
			continue
		}
		must.Do(tb, c.Elements(table, f, s, func(e nft.Element) {
			out = append(out, fmt.Sprintf("%s %x: %x %s %t %q %t %x", s.Name(), e.Key, e.Data, e.Chain, e.Goto, e.Comment, e.IntervalEnd, e.Timeout))
		}))
	}
	for name := range sets {
		out = append(out, "unknown set "+name)
	}
	slices.Sort(out)
	return out
}

// without returns the lines of a that b lacks.
func without(a, b []string) string {
	have := map[string]bool{}
	for _, line := range b {
		have[line] = true
	}
	return strings.Join(slices.DeleteFunc(slices.Clone(a), func(line string) bool { return have[line] }), "\n")
}

// number reads a number in the machine's byte order, 0 if data is not one.
func number(data []byte) uint32 {
	if len(data) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(data)
}

// word returns the key that consists of a number.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
