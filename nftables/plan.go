package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
)

// The functions in this file compute the elements that a Service needs in the table's
// sets from the Service and the numbers that the table allocated for it. They do no I/O
// and change nothing.

// element is one element of one of the table's sets. Equal elements are the same to the
// kernel.
type element struct {
	set set
	// named elements have the Service port's name as their comment.
	named     bool
	key, data octets
}

// octets is a key or the data of an element in the kernel's encoding, whose fields are
// aligned to 32 bits. The widest is the key of allowed sources of IPv6.
type octets struct {
	buf [40]byte
	n   uint8
}

func (o *octets) bytes() []byte { return o.buf[:o.n] }

// ip returns the address that o consists of.
func (o *octets) ip() netip.Addr {
	a, _ := netip.AddrFromSlice(o.bytes())
	return a
}

func (o octets) addr(a netip.Addr) octets {
	if a.Is4() {
		v := a.As4()
		o.n += uint8(copy(o.buf[o.n:], v[:]))
		return o
	}
	v := a.As16()
	o.n += uint8(copy(o.buf[o.n:], v[:]))
	return o
}

func (o octets) word(v uint32) octets {
	binary.NativeEndian.PutUint32(o.buf[o.n:], v)
	o.n += 4
	return o
}

func (o octets) proto(p v1.Protocol) octets {
	o.buf[o.n] = inet.Protocol(p)
	o.n += 4
	return o
}

func (o octets) port(p uint16) octets {
	binary.BigEndian.PutUint16(o.buf[o.n:], p)
	o.n += 4
	return o
}

// dispatchKeys holds the dispatch keys of one frontend. internal is for internal traffic under
// externalTrafficPolicy Local, and 0 otherwise. any is for other traffic.
type dispatchKeys struct{ any, internal uint32 }

// frontendKey returns the maps that hold a frontend's dispatch keys, and its key in them.
// The key of a NodePort has no address.
func frontendKey(nodePort bool, addr netip.Addr, p v1.Protocol, port uint16) (all, internal set, key octets) {
	if nodePort {
		return setNodePorts, setInternalNodePorts, octets{}.proto(p).port(port)
	}
	return setServiceIPs, setInternalIPs, octets{}.addr(addr).proto(p).port(port)
}

func keyOf(s *ruleset.Service, f *ruleset.Frontend) (all, internal set, key octets) {
	return frontendKey(f.Kind == ruleset.NodePort, f.Addr, s.Key.Protocol, f.Port)
}

// frontendElements appends the elements of a Service's frontends to list. keys holds the
// dispatch keys of each frontend.
func frontendElements(list []element, s *ruleset.Service, keys []dispatchKeys) []element {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		all, internal, key := keyOf(s, f)
		list = append(list, element{all, true, key, octets{}.word(keys[i].any)})
		if keys[i].internal != 0 {
			list = append(list, element{internal, true, key, octets{}.word(keys[i].internal)})
		}
		for _, source := range f.Sources {
			from := octets{}.addr(source.Masked().Addr()).addr(f.Addr).proto(s.Key.Protocol).port(f.Port)
			list = append(list, element{set: allowed(source.Bits()), named: true, key: from})
		}
		if f.Kind == ruleset.ClusterIP {
			list = append(list, clusterIPElement(f.Addr))
		}
	}
	return list
}

func clusterIPElement(a netip.Addr) element {
	return element{set: setClusterIPs, key: octets{}.addr(a)}
}

// hairpinElement returns the element that masquerades an endpoint's connections to itself.
func hairpinElement(a netip.Addr) element {
	return element{set: setHairpin, key: octets{}.addr(a).addr(a)}
}

// emptyBucket returns the element of a pool's bucket without its data.
func emptyBucket(p *pool, bucket int) element {
	if p.sticky {
		return element{set: setStickyBuckets, key: octets{}.word(p.number << stickyShift).word(uint32(bucket))}
	}
	return element{set: setEndpoints, key: octets{}.word(p.number).word(uint32(bucket))}
}

// bucketElement returns the element of a pool's bucket with the endpoint at addr.
func bucketElement(p *pool, bucket int, addr netip.AddrPort) element {
	e := emptyBucket(p, bucket)
	if p.sticky {
		e.data = octets{}.word(p.number<<stickyShift | uint32(p.member(bucket)))
	} else {
		e.data = octets{}.addr(addr.Addr()).port(addr.Port())
	}
	return e
}

// memberElement returns the element of a numbered endpoint of a sticky pool.
func memberElement(p *pool, number uint16, addr netip.AddrPort) element {
	return element{
		set: setStickyEndpoints, key: octets{}.word(p.number<<stickyShift | uint32(number)),
		data: octets{}.addr(addr.Addr()).port(addr.Port()),
	}
}

// stickyPoolElement returns the element that leads from a sticky pool to its handler.
func stickyPoolElement(p *pool) element {
	return element{set: setStickyPools, key: octets{}.word(p.number), data: octets{}.word(stickyKey(p.handler.number, p.number))}
}

// diff calls remove with each element that only before has, and then add with each element that
// only after has. It is fast if the lists are equal, as those of a Service's frontends mostly
// are.
func diff(before, after []element, remove, add func(*element)) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	missing(before, after, remove)
	missing(after, before, add)
}

// missing calls fn with the elements of list that are missing from other.
func missing(list, other []element, fn func(*element)) {
	has := func(e *element) bool { return slices.Contains(other, *e) }
	if len(list)*len(other) > 256 {
		index := make(map[element]bool, len(other))
		for i := range other {
			index[other[i]] = true
		}
		has = func(e *element) bool { return index[*e] }
	}
	for i := range list {
		if e := &list[i]; !has(e) {
			fn(e)
		}
	}
}
