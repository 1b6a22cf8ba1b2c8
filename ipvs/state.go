package ipvs

import (
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// owner identifies who needs an object: a Service port by its [ruleset.Port].ID, or a retired virtual server by a
// number from firstRetired.
type owner uint64

const firstRetired owner = 1 << 32

// state holds the kernel's objects in one family, as last read and written, with their
// owners.
type state struct {
	family tracker.Family
	// virtuals holds every virtual server of the family except excluded ones, and servers
	// their owners.
	virtuals map[virtualKey]*virtualState
	servers  driver.Ledger[owner, virtualKey]
	// entries holds the elements of the sets, and entryMarks the packet marks of those that
	// have one.
	entries    driver.Ledger[owner, entry]
	entryMarks map[entry]uint32
	// led holds the packet marks that elements have or had.
	led   map[uint32]bool
	bound driver.Ledger[owner, netip.Addr]
	// own holds the node's own addresses, on other devices.
	own map[netip.Addr]bool
	// services holds all Service ports: the node's addresses, on which plans depend, change without a
	// delta.
	services map[tracker.Key]*ruleset.Port
	// drainingReals holds the draining real servers, with the time at which the drain
	// began.
	drainingReals map[virtualKey]map[netip.AddrPort]time.Time
	// retired holds the virtual servers without a Service port that still have connections,
	// and lastRetired the number of the latest.
	retired     map[virtualKey]retired
	lastRetired owner
	// nextLook is when [Backend.inUse] may read connection tracking again.
	nextLook time.Time
	// marks assigns numbers to Service ports; the packet mark is markDrop + number.
	marks *driver.IDs[tracker.Key]
	// notLocalYet lists bound addresses that the kernel may not treat as local yet.
	notLocalYet []netip.Addr
	// stale reports that the node's addresses have changed since Services were programmed, and moved
	// holds those that have.
	stale bool
	moved map[netip.Addr]bool
	node  *ruleset.Node
	// before is the state that was known before this one, during a full delta.
	before *state
}

type virtualState struct {
	virtual
	// service is the Service port that the virtual server is or was for. proto is its protocol, even if the key has a
	// mark.
	service tracker.Key
	proto   uint8
	// reals holds the weights of the real servers. Draining ones are in
	// state.drainingReals, too.
	reals map[netip.AddrPort]uint16
	// unread is set if reals may be wrong, after a write that failed.
	unread     bool
	rejected   bool
	forwarding Forwarding
}

func (v *virtualState) found(r real) {
	if len(v.reals) != 0 && r.forwarding != v.forwarding {
		r.forwarding = forwardingMixed
	}
	v.reals[r.at], v.forwarding = r.weight, r.forwarding
}

func newState(f tracker.Family) *state {
	marks, err := driver.NewIDs[tracker.Key](1, lastMark)
	if err != nil {
		panic(err) // the bounds are constants
	}
	return &state{
		family:        f,
		virtuals:      map[virtualKey]*virtualState{},
		entryMarks:    map[entry]uint32{},
		led:           map[uint32]bool{},
		own:           map[netip.Addr]bool{},
		services:      map[tracker.Key]*ruleset.Port{},
		moved:         map[netip.Addr]bool{},
		drainingReals: map[virtualKey]map[netip.AddrPort]time.Time{},
		retired:       map[virtualKey]retired{},
		marks:         marks,
	}
}

func (s *state) setOwn(own map[netip.Addr]bool) {
	for _, m := range []map[netip.Addr]bool{own, s.own} {
		for a := range m {
			if own[a] != s.own[a] {
				s.stale, s.moved[a] = true, true
			}
		}
	}
	s.own = own
}

// follows reports whether the plan of a Service port may depend on addresses that have changed: by a NodePort, or
// because a frontend's address is one of the node's own.
func (s *state) follows(svc *ruleset.Port) bool {
	return svc.Spec.ExternallyAccessible() ||
		slices.ContainsFunc(svc.Frontends, func(f ruleset.Frontend) bool { return s.moved[f.Addr] })
}

func (s *state) hasEntry(e entry, mark uint32) {
	s.entries.Installed(e)
	if mark != 0 {
		s.entryMarks[e] = mark
		s.led[mark] = true
	}
}

// knows reports whether an element is in the kernel, or was when this process last knew.
func (s *state) knows(e entry) bool {
	return s.entries.Has(e) || s.before != nil && s.before.entries.Has(e)
}

// recognized reports whether a Backend, perhaps in an earlier process, has added a virtual server that no Service
// wants. Its signature, or an element that leads to it, identifies a virtual server of a mark. An element in a set,
// which is added before the virtual server and deleted after it, identifies others.
func (s *state) recognized(c Config, k virtualKey, v virtual) bool {
	if k.mark != 0 {
		return namesServer(k.mark) && (v.timeout == signature || s.led[k.mark])
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

// adoptMark keeps the packet mark that an earlier process allocated for a Service port, whose elements are list. It
// does not keep a mark that another element has, too: that element's frontend has moved from or to another Service
// port. elements counts the elements with each mark.
func (s *state) adoptMark(k tracker.Key, list []entry, elements map[uint32]int) {
	var mark uint32
	n := 0
	for _, e := range list {
		if m := s.entryMarks[e]; namesServer(m) && (mark == 0 || m == mark) {
			mark = m
			n++
		}
	}
	if n != 0 && n == elements[mark] {
		_ = s.marks.Adopt(k, mark-markDrop) // fails if another Service port has it
	}
}

// reserveMarks reserves the packet marks of virtual servers that no Service port has
// adopted.
func (s *state) reserveMarks() {
	for k := range s.virtuals {
		if !namesServer(k.mark) {
			continue
		}
		n := k.mark - markDrop
		if _, adopted := s.marks.Key(n); !adopted {
			s.marks.Reserve(n)
		}
	}
}

// freeMark ends a Service port's use of its packet mark. The mark stays reserved while it has a virtual server.
func (s *state) freeMark(k tracker.Key) {
	n, ok := s.marks.Lookup(k)
	if !ok {
		return
	}
	if s.virtuals[virtualKey{family: s.family, mark: markDrop + n}] != nil {
		s.marks.Reserve(n)
	}
	s.marks.Release(k)
}
