package layout

import (
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

func TestSetNamesAreUnique(t *testing.T) {
	seen := map[string]Set{}
	for s := range SetCount {
		if other, ok := seen[s.Name()]; ok || s.Name() == "" || len(s.Name()) > 31 {
			t.Errorf("sets %d and %d are named %q", s, other, s.Name())
		}
		seen[s.Name()] = s
	}
}

func TestKeysAndDataOfEverySetFitIntoOctets(t *testing.T) {
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		for s := range SetCount {
			sp := s.Spec(f)
			if most := uint32(len(Octets{}.buf)); sp.KeyLen == 0 || sp.KeyLen > most || sp.DataLen > most {
				t.Errorf("%s %s: %+v", f, s.Name(), sp)
			}
			if verdicts := sp.DataType == nft.DataVerdict; verdicts != s.Verdicts() {
				t.Errorf("%s is a verdict map: %v", s.Name(), verdicts)
			}
		}
	}
}

func TestKeysHaveTheLengthOfTheirSet(t *testing.T) {
	for _, a := range []string{"10.0.0.1", "fd00::1"} {
		addr := netip.MustParseAddr(a)
		f := tracker.FamilyOf(addr)
		for _, nodePort := range []bool{false, true} {
			all, internal, key := FrontendKey(nodePort, addr, inet.TCP, 80)
			for _, s := range []Set{all, internal} {
				if uint32(len(key.Bytes())) != s.Spec(f).KeyLen {
					t.Errorf("a key of %s has %d bytes, not %d", s.Name(), len(key.Bytes()), s.Spec(f).KeyLen)
				}
			}
		}
		data := Octets{}.Addr(addr).Port(8080)
		if got, ok := ParseAddrPort(data.Bytes()); !ok || got != netip.AddrPortFrom(addr, 8080) {
			t.Errorf("%s is read as %v, %v", a, got, ok)
		}
	}
	if key := nft.InterfaceName("eth0"); uint32(len(key)) != FastPathInterfaces.Spec(tracker.IPv4).KeyLen {
		t.Errorf("an interface's key has %d bytes", len(key))
	}
}

func TestDispatchKeyHoldsHandlerAndPool(t *testing.T) {
	for _, handler := range []uint32{1, MaxHandler} {
		for _, pool := range []uint32{0, 1, MaxPool} {
			k := DispatchKey(handler, pool)
			if k&DispatchMark == 0 || k&PoolMask != pool || k&HandlerMask != DispatchKey(handler, 0) {
				t.Errorf("handler %d, pool %d: %#x", handler, pool, k)
			}
		}
	}
	if k := StickyKey(MaxStickyHandlers, StickyMark|MaxSticky); k&DispatchMark == 0 || k&MaxMember != MaxStickyHandlers {
		t.Errorf("the largest sticky key is %#x", k)
	}
}

func TestHandlersHaveDifferentChains(t *testing.T) {
	seen := map[string]Handler{}
	for h := HandleDirect; h <= HandleDrop; h++ {
		for _, firewall := range []bool{false, true} {
			for _, pool := range []Handler{{}, {Sticky: true}, {Buckets: 3}, {Buckets: 251, Hash: tracker.HashSource}, {Buckets: 251, Hash: tracker.HashSourcePort}} {
				if needs := h < HandleInternalOrDrop; needs != pool.HasPool() {
					continue
				}
				pool.Handling, pool.Firewall = h, firewall
				if other, ok := seen[pool.Chain()]; ok {
					t.Errorf("%+v and %+v have the chain %s", pool, other, pool.Chain())
				}
				seen[pool.Chain()] = pool
			}
		}
	}
}
