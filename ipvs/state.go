//go:build linux

package ipvs

import (
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state holds the kernel's objects in one family, as last read and written, with their
// owners.
type state struct {
	family tracker.Family
	// virtuals holds every virtual server of the family except excluded ones.
	virtuals map[virtualKey]*virtualState
	// entries holds the elements of the sets, each with its packet mark.
	entries owned[entry, uint32]
	// bound holds the addresses of the dummy device.
	bound owned[netip.Addr, struct{}]
	// own holds the node's own addresses, on other devices.
	own map[netip.Addr]bool
	// services holds the last state of each Service port.
	services map[tracker.Key]*serviceState
	// drainingReals holds the draining real servers, with the time at which the drain
	// began.
	drainingReals map[virtualKey]map[netip.AddrPort]time.Time
	// retired holds the virtual servers without an owner that still have connections.
	retired map[virtualKey]retired
	// marks holds the packet marks that Service ports have.
	marks map[uint32]tracker.Key
	// notLocalYet lists bound addresses that the kernel may not treat as local yet.
	notLocalYet []netip.Addr
	// abandoned lists bound addresses that may have no owner any more.
	abandoned []netip.Addr
	// stale reports that the node's addresses have changed since Services were programmed.
	stale bool
	node  *ruleset.Node
	// before is the state that was known before this one, during a full delta.
	before *state
}

type virtualState struct {
	virtual
	// owner is the Service port that the virtual server is for, or the zero Key. proto is
	// the Service port's protocol, also if the virtual server's key has a mark.
	owner tracker.Key
	proto uint8
	// reals holds the weights of the real servers. Draining ones are in
	// state.drainingReals, too.
	reals map[netip.AddrPort]uint16
}

// serviceState holds the objects of a Service port in the kernel, also after its update
// failed half-way.
type serviceState struct {
	service *ruleset.Service
	// virtuals, entries and bound are the objects that the Service port owns.
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

// knows reports whether an element is in the kernel, or was when this process last knew.
func (s *state) knows(e entry) bool {
	return s.entries.has(e) || s.before != nil && s.before.entries.has(e)
}

// recognised reports whether a Backend, perhaps in an earlier process, has added a virtual
// server that no Service wants. The virtual server's mark identifies it, or an element in a
// set that is added before it and deleted after it.
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
		if s.knows(e) {
			return e, true
		}
	}
	set := nodePortSet(k.proto, false)
	if sets[set].kind != bitmapPort {
		return entry{}, false
	}
	e := entry{set: set, family: k.family, port: k.at.Port()}
	return e, s.knows(e)
}

// allocate returns the packet mark of a Service port: preferred if it is not 0, or else a
// free one. It returns 0 if no mark is left.
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
