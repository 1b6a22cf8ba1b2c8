//go:build linux

package ipvs

import (
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state is what the kernel holds in one family, as far as the backend knows, with the
// owners.
type state struct {
	family tracker.Family
	// virtuals is every virtual server of the family except excluded ones.
	virtuals map[virtualKey]*virtualState
	// entries is the elements of the sets, each with its packet mark.
	entries owned[entry, uint32]
	// bound is the addresses of the dummy device.
	bound owned[netip.Addr, struct{}]
	// own is the node's own addresses, on other devices.
	own map[netip.Addr]bool
	// services is the last state of each Service port.
	services map[tracker.Key]*serviceState
	// drainingReals is the draining real servers, with the time at which that began.
	drainingReals map[virtualKey]map[netip.AddrPort]time.Time
	// retired is the virtual servers without an owner that still have connections.
	retired map[virtualKey]retired
	// marks is the packet marks that Service ports have.
	marks map[uint32]tracker.Key
	// notLocalYet is bound addresses that the kernel may not treat as local yet.
	notLocalYet []netip.Addr
	// abandoned is bound addresses that may have no owner any more.
	abandoned []netip.Addr
	// stale reports that the node's addresses have changed since Services were programmed.
	stale bool
	node  *ruleset.Node
}

type virtualState struct {
	virtual
	// owner is the Service port that it is for, the zero Key if none, and proto its
	// protocol, which it has with a mark, too.
	owner tracker.Key
	proto uint8
	// reals is the weights of the real servers. Those that drain are in
	// state.drainingReals, too.
	reals map[netip.AddrPort]uint16
}

// serviceState is what a Service port has in the kernel, also after an update of it failed
// half-way.
type serviceState struct {
	service *ruleset.Service
	// virtuals, entries and bound are the objects that it owns.
	virtuals []virtualKey
	entries  []entry
	bound    []netip.Addr
	mark     uint32
}

func newState(f tracker.Family) *state {
	return &state{
		family:        f,
		virtuals:      map[virtualKey]*virtualState{},
		entries:       owned[entry, uint32]{},
		bound:         owned[netip.Addr, struct{}]{},
		own:           map[netip.Addr]bool{},
		services:      map[tracker.Key]*serviceState{},
		drainingReals: map[virtualKey]map[netip.AddrPort]time.Time{},
		retired:       map[virtualKey]retired{},
		marks:         map[uint32]tracker.Key{},
	}
}

// recognised reports whether a Backend, perhaps in an earlier process, has added a virtual
// server that no Service wants. Its mark identifies it, or an element in a set, which is
// added before it and deleted after it.
func (s *state) recognised(c Config, k virtualKey) bool {
	if k.mark != 0 {
		return c.Marks.contains(k.mark)
	}
	_, ok := s.identity(k)
	return ok && !c.excluded(k.at.Addr())
}

// identity returns the element that identifies a virtual server as a Backend's.
func (s *state) identity(k virtualKey) (entry, bool) {
	for _, id := range []setID{setClusterIP, setExternalIP, setExternalIPLocal, setLoadBalancer, setNodePortSCTP} {
		e := entry{set: id, family: k.family, addr: k.at.Addr(), proto: k.proto, port: k.at.Port()}
		if s.entries.has(e) {
			return e, true
		}
	}
	set := nodePortSet(k.proto, false)
	if sets[set].kind != bitmapPort {
		return entry{}, false
	}
	e := entry{set: set, family: k.family, port: k.at.Port()}
	return e, s.entries.has(e)
}

// allocate returns the packet mark of a Service port: preferred if it is not 0, or else a
// free one, 0 if none is left.
func (s *state) allocate(r Marks, k tracker.Key, preferred uint32) uint32 {
	if preferred != 0 {
		return preferred
	}
	// n counts in the bits that are not in the mask.
	free := ^r.Mask
	for n := (0 - free) & free; n != 0; n = (n - free) & free {
		m := r.Value | n
		_, used := s.marks[m]
		if !used && s.virtuals[virtualKey{family: s.family, mark: m}] == nil {
			s.marks[m] = k
			return m
		}
	}
	return 0
}
