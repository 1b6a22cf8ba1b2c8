//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// view describes a table without its arbitrary numbers, with a line for each fact.
type view map[string]string

// kernelView reads one family's table and resolves its dispatch keys.
func kernelView(tb testing.TB, b *Backend, f tracker.Family) view {
	tb.Helper()
	all := func(s set, fn func(kernelElement)) {
		err := b.elements(b.name, f, s, fn)
		if err != nil && !strings.Contains(err.Error(), unix.ENOENT.Error()) {
			tb.Fatalf("read %s: %v", s.name(), err)
		}
	}
	number := func(data []byte) uint32 { return binary.NativeEndian.Uint32(data) }
	handlers := map[bool]map[uint32]string{}
	for internal, s := range map[bool]set{false: setHandlers, true: setInternalHandlers} {
		handlers[internal] = map[uint32]string{}
		err := b.verdicts(f, s, func(key []byte, chain string) { handlers[internal][number(key)] = chain })
		if err != nil {
			tb.Fatal(err)
		}
	}
	stickyChains, stickyKeys := map[uint32]string{}, map[uint32]uint32{}
	if err := b.verdicts(f, setStickyHandlers, func(key []byte, chain string) { stickyChains[number(key)] = chain }); err != nil {
		tb.Fatal(err)
	}
	all(setStickyPools, func(e kernelElement) { stickyKeys[number(e.key)] = number(e.data) })
	members := map[uint32]string{}
	all(setStickyEndpoints, func(e kernelElement) {
		a, _ := parseAddrPort(e.data)
		members[number(e.key)] = a.String()
	})
	pools := map[uint32][]string{}
	put := func(pool, bucket uint32, ep string) {
		for int(bucket) >= len(pools[pool]) {
			pools[pool] = append(pools[pool], "")
		}
		pools[pool][bucket] = ep
	}
	all(setEndpoints, func(e kernelElement) {
		a, _ := parseAddrPort(e.data)
		put(number(e.key), number(e.key[4:]), a.String())
	})
	all(setStickyBuckets, func(e kernelElement) {
		ep := members[number(e.data)]
		if ep == "" {
			tb.Errorf("bucket of unknown member %x", number(e.data))
		}
		put(number(e.key), number(e.key[4:]), ep)
	})
	v := view{}
	used := map[uint32]bool{}
	dispatchKey := func(kind string, internal bool) func(kernelElement) {
		return func(e kernelElement) {
			t := number(e.data)
			chain := handlers[internal][t&handlerMask]
			pool := t & poolMask
			if strings.HasSuffix(chain, chainSticky) {
				key := stickyKeys[pool]
				chain += " " + stickyChains[key&maxMember]
				if pool <<= stickyShift; key&stickyMask != pool {
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
			v[kind+" "+place(e.key, f)] = fmt.Sprintf("%s %s %v", e.comment, chain, eps)
		}
	}
	all(setServiceIPs, dispatchKey("service", false))
	all(setNodePorts, dispatchKey("service", false))
	all(setInternalIPs, dispatchKey("internal", true))
	all(setInternalNodePorts, dispatchKey("internal", true))
	for p := range pools {
		if !used[p] {
			tb.Errorf("pool %x is not used", p)
		}
	}
	n := f.Bits() / 8
	all(setClusterIPs, func(e kernelElement) { v["cluster IP "+address(e.key)] = "" })
	// The set also has endpoints in their grace period, and no others.
	inGrace := b.table(f).hairpin.inGrace(time.Now())
	all(setHairpin, func(e kernelElement) {
		if a, _ := netip.AddrFromSlice(e.key[:n]); inGrace[a].IsZero() {
			v["hairpin "+a.String()] = ""
		}
	})
	for bits := range f.Bits() + 1 {
		all(allowed(bits), func(e kernelElement) {
			v[fmt.Sprintf("source %s/%d to %s", address(e.key[:n]), bits, place(e.key[n:], f))] = ""
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

// verdicts calls fn with the elements of a verdict map.
func (b *Backend) verdicts(f tracker.Family, s set, fn func(key []byte, chain string)) error {
	request := nfnl.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, b.name)
	request = nfnl.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, s.name())
	inside := func(data []byte, want uint16, next func([]byte)) {
		for typ, d := range nfnl.Attributes(data) {
			if typ == want {
				next(d)
			}
		}
	}
	return b.conn.Get(unix.NFT_MSG_GETSETELEM, inet.AF(f), true, request, func(attrs []byte) error {
		inside(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(list []byte) {
			inside(list, unix.NFTA_LIST_ELEM, func(one []byte) {
				e := parseElement(one)
				inside(one, unix.NFTA_SET_ELEM_DATA, func(data []byte) {
					inside(data, unix.NFTA_DATA_VERDICT, func(v []byte) {
						inside(v, unix.NFTA_VERDICT_CHAIN, func(chain []byte) { fn(e.key, nfnl.String(chain)) })
					})
				})
			})
		})
		return nil
	})
}

// rulesetView returns the view that follows from the ruleset.
func rulesetView(services []*ruleset.Service, node *ruleset.Node, f tracker.Family) view {
	v := view{}
	for _, s := range services {
		if s.Key.Family != f {
			continue
		}
		line := func(handler handler, target ruleset.Target) string {
			list := []string{}
			eps := s.Pool(target)
			switch {
			case s.Hash() != tracker.HashNone && handler.hasPool():
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
			chain := handler.chain()
			if handler.sticky {
				chain += " " + stickyHandlerOf(s, target).chain()
			}
			return fmt.Sprintf("%s %s %v", nlbatch.Printable(s.Key.ServicePortName.String()), chain, list)
		}
		for i := range s.Frontends {
			fr := &s.Frontends[i]
			at := fmt.Sprintf("%s %d %d", fr.Addr, inet.Protocol(s.Key.Protocol), fr.Port)
			if fr.Kind == ruleset.NodePort {
				at = fmt.Sprintf("node port %d %d", inet.Protocol(s.Key.Protocol), fr.Port)
			}
			v["service "+at] = line(handlerOf(s, fr, wantedSticky(s)), fr.Target)
			if fr.ShortCircuit() && fr.Internal == ruleset.ToCluster {
				v["internal "+at] = line(poolHandler(s, ruleset.ToCluster, wantedSticky(s)), ruleset.ToCluster)
			}
			if fr.Kind == ruleset.ClusterIP {
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
