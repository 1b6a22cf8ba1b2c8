package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ipsets speaks the ipset protocol (include/uapi/linux/netfilter/ipset/ip_set.h)
// over one socket.
type ipsets struct {
	conn *nfnl.Conn
}

// netOrder marks an attribute as a big-endian number, which ipset requires.
const netOrder = unix.NLA_F_NET_BYTEORDER

// hashFull is IPSET_ERR_HASH_FULL (linux/netfilter/ipset/ip_set_hash.h). For bitmaps the number is another error,
// which cannot occur: theirs is every port.
const hashFull = ipsetError(nl.IPSET_ERR_TYPE_SPECIFIC)

// bulk is the most elements of one request, of about 100 bytes each: an attribute's length has 16 bits.
const bulk = 400

// dialIPSets opens a socket in the calling thread's namespace.
func dialIPSets() (*ipsets, error) {
	conn, err := nfnl.Dial(nil)
	if err != nil {
		return nil, err
	}
	return &ipsets{conn: conn}, nil
}

func (c *ipsets) close() { c.conn.Close() }

// request makes a request about a set, with further attributes. It calls fn with the attributes
// of each part of the answer.
func (c *ipsets) request(cmd uint16, name string, attrs []byte, fn func([]byte)) error {
	b := nfnl.AppendUint8(nil, nl.IPSET_ATTR_PROTOCOL, nl.IPSET_PROTOCOL)
	b = nfnl.AppendString(b, nl.IPSET_ATTR_SETNAME, name)
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_IPSET, Type: cmd, Dump: cmd == nl.IPSET_CMD_LIST, Attrs: append(b, attrs...)}
	err := c.conn.Get(context.Background(), r, func(attrs []byte) error { fn(attrs); return nil })
	var errno syscall.Errno
	if errors.As(err, &errno) && errno >= nl.IPSET_ERR_PRIVATE {
		return ipsetError(errno)
	}
	return err
}

// unanswered is for requests that the kernel only acknowledges.
func unanswered([]byte) {}

// ipsetError is an error of ipset's own.
type ipsetError uint

func (e ipsetError) Error() string { return nl.IPSetError(e).Error() }

func (c *ipsets) createSet(s setID, f tracker.Family) error {
	kind, family := sets[s].kind, inet.AF(f)
	if kind == bitmapPort {
		family = unix.AF_UNSPEC
	}
	typeName, revision := kind.typeName()
	b := nfnl.AppendString(nil, nl.IPSET_ATTR_TYPENAME, typeName)
	b = nfnl.AppendUint8(b, nl.IPSET_ATTR_REVISION, revision)
	b = nfnl.AppendUint8(b, nl.IPSET_ATTR_FAMILY, family)
	data := len(b)
	b = nfnl.BeginNested(b, nl.IPSET_ATTR_DATA)
	if kind == bitmapPort {
		b = nfnl.AppendUint16(b, nl.IPSET_ATTR_PORT_FROM|netOrder, 0)
		b = nfnl.AppendUint16(b, nl.IPSET_ATTR_PORT_TO|netOrder, 0xffff)
	} else {
		b = nfnl.AppendUint32(b, nl.IPSET_ATTR_MAXELEM|netOrder, maxElements)
	}
	if kind == hashIPPortMark {
		b = nfnl.AppendUint32(b, nl.IPSET_ATTR_CADT_FLAGS|netOrder, nl.IPSET_FLAG_WITH_SKBINFO)
	}
	nfnl.EndNested(b, data)
	err := c.request(nl.IPSET_CMD_CREATE, s.name(f), b, unanswered)
	if err == nil {
		return nil
	}
	// A set with other parameters is good enough if it has the same type.
	if found, ferr := c.header(s.name(f)); ferr == nil {
		if found == typeName {
			return nil
		}
		err = fmt.Errorf("%w: the set exists with type %s", err, found)
	}
	return fmt.Errorf("create set %s of type %s: %w", s.name(f), typeName, err)
}

func (c *ipsets) hasSets() error {
	_, err := c.header("KUBE-PROBE")
	if errors.Is(err, unix.ENOENT) {
		return nil // it has no set of this name
	}
	return err
}

func (c *ipsets) header(name string) (typeName string, err error) {
	err = c.request(nl.IPSET_CMD_HEADER, name, nil, func(attrs []byte) {
		for typ, data := range nfnl.Attributes(attrs) {
			if typ == nl.IPSET_ATTR_TYPENAME {
				typeName = nfnl.String(data)
			}
		}
	})
	return typeName, err
}

func (c *ipsets) addEntries(s setID, f tracker.Family, list []entry, marks map[entry]uint32) error {
	return c.change(nl.IPSET_CMD_ADD, s, f, list, marks)
}

func (c *ipsets) delEntries(s setID, f tracker.Family, list []entry) error {
	return c.change(nl.IPSET_CMD_DEL, s, f, list, nil)
}

func (c *ipsets) change(cmd uint16, s setID, f tracker.Family, entries []entry, marks map[entry]uint32) error {
	for some := range slices.Chunk(entries, bulk) {
		var b []byte
		if len(some) == 1 {
			b = appendEntry(b, some[0], marks[some[0]], 0)
		} else {
			// The kernel writes the line of an error in a list into this attribute.
			b = nfnl.AppendUint32(b, nl.IPSET_ATTR_LINENO|netOrder, 0)
			list := len(b)
			b = nfnl.BeginNested(b, nl.IPSET_ATTR_ADT)
			for i, e := range some {
				b = appendEntry(b, e, marks[e], uint32(i+1))
			}
			nfnl.EndNested(b, list)
		}
		if err := c.request(cmd, s.name(f), b, unanswered); err != nil {
			verb := "add to"
			if cmd == nl.IPSET_CMD_DEL {
				verb = "delete from"
			}
			if errors.Is(err, hashFull) {
				err = errSetFull
			}
			err = fmt.Errorf("%s set %s: %w", verb, s.name(f), err)
			if errors.Is(err, unix.ENOENT) {
				err = fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
			}
			return err
		}
	}
	return nil
}

func appendEntry(b []byte, e entry, mark, line uint32) []byte {
	start, kind := len(b), sets[e.set].kind
	b = nfnl.BeginNested(b, nl.IPSET_ATTR_DATA)
	if kind != bitmapPort {
		b = appendAddr(b, nl.IPSET_ATTR_IP, e.addr)
	}
	if kind != hashIP {
		b = nfnl.AppendUint16(b, nl.IPSET_ATTR_PORT|netOrder, e.port)
	}
	if kind != hashIP && kind != bitmapPort {
		b = nfnl.AppendUint8(b, nl.IPSET_ATTR_PROTO, e.proto)
	}
	switch kind {
	case hashIPPortIP:
		b = appendAddr(b, nl.IPSET_ATTR_IP2, e.other.Addr())
	case hashIPPortNet:
		b = appendAddr(b, nl.IPSET_ATTR_IP2, e.other.Addr())
		b = nfnl.AppendUint8(b, nl.IPSET_ATTR_CIDR2, uint8(e.other.Bits()))
	case hashIPPortMark:
		// Value and mask, as one number.
		b = nfnl.AppendUint64(b, nl.IPSET_ATTR_SKBMARK|netOrder, uint64(mark)<<32|0xffffffff)
	}
	b = nfnl.AppendUint32(b, nl.IPSET_ATTR_LINENO|netOrder, line)
	nfnl.EndNested(b, start)
	return b
}

func appendAddr(b []byte, typ uint16, a netip.Addr) []byte {
	start, inner := len(b), uint16(nl.IPSET_ATTR_IPADDR_IPV4)
	if a.Is6() {
		inner = nl.IPSET_ATTR_IPADDR_IPV6
	}
	b = nfnl.AppendBytes(nfnl.BeginNested(b, typ), inner|netOrder, a.AsSlice())
	nfnl.EndNested(b, start)
	return b
}

func (c *ipsets) listSet(s setID, f tracker.Family, fn func(e entry, mark uint32)) error {
	err := c.request(nl.IPSET_CMD_LIST, s.name(f), nil, func(attrs []byte) {
		for typ, data := range nfnl.Attributes(attrs) {
			if typ != nl.IPSET_ATTR_ADT {
				continue
			}
			for _, data := range nfnl.Attributes(data) {
				fn(decodeEntry(s, f, data))
			}
		}
	})
	if err != nil {
		return fmt.Errorf("list set %s: %w", s.name(f), err)
	}
	return nil
}

func decodeEntry(s setID, f tracker.Family, data []byte) (e entry, mark uint32) {
	e = entry{set: s, family: f}
	var other netip.Addr
	bits := -1
	for typ, data := range nfnl.Attributes(data) {
		switch {
		case typ == nl.IPSET_ATTR_IP:
			e.addr = decodeAddr(data)
		case typ == nl.IPSET_ATTR_PORT && len(data) >= 2:
			e.port = binary.BigEndian.Uint16(data)
		case typ == nl.IPSET_ATTR_PROTO && len(data) >= 1:
			e.proto = data[0]
		case typ == nl.IPSET_ATTR_IP2:
			other = decodeAddr(data)
		case typ == nl.IPSET_ATTR_CIDR2 && len(data) >= 1:
			bits = int(data[0])
		case typ == nl.IPSET_ATTR_SKBMARK && len(data) >= 8:
			mark = uint32(binary.BigEndian.Uint64(data) >> 32)
		}
	}
	if other.IsValid() {
		if bits < 0 {
			bits = other.BitLen()
		}
		e.other = netip.PrefixFrom(other, bits)
	}
	return e, mark
}

func decodeAddr(data []byte) (a netip.Addr) {
	for _, data := range nfnl.Attributes(data) {
		a, _ = netip.AddrFromSlice(data)
	}
	return a
}

// destroySet removes the set if it exists, unless a rule uses it.
func (c *ipsets) destroySet(s setID, f tracker.Family) error {
	err := c.request(nl.IPSET_CMD_DESTROY, s.name(f), nil, unanswered)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, ipsetError(nl.IPSET_ERR_BUSY)) {
		return fmt.Errorf("destroy set %s: %w", s.name(f), err)
	}
	return nil
}
