//go:build linux

package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
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
	socket *nl.SocketHandle
	// calls counts requests.
	calls int
}

// maxElements is how many elements a hash may grow to. It starts small.
const maxElements = 1 << 22

// bulk is the most elements of one request. An element has about 100 bytes, and the length
// of the attribute that contains them has 16 bits.
const bulk = 400

// dialIPSets opens a socket in the calling thread's namespace.
func dialIPSets() (*ipsets, error) {
	s, err := dialNetfilter()
	if err != nil {
		return nil, err
	}
	return &ipsets{socket: s}, nil
}

func (c *ipsets) close() { c.socket.Close() }

// request returns a request about a set.
func (c *ipsets) request(cmd int, name string, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(cmd|unix.NFNL_SUBSYS_IPSET<<8, nl.GetIpsetFlags(cmd)|flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_NETLINK, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(name)))
	return req
}

func (c *ipsets) execute(req *nl.NetlinkRequest) ([][]byte, error) {
	c.calls++
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: c.socket}
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	var errno syscall.Errno
	if errors.As(err, &errno) && errno >= nl.IPSET_ERR_PRIVATE {
		err = ipsetError(errno)
	}
	return msgs, socketError(err)
}

// ipsetError is an error of ipset's own.
type ipsetError uint

func (e ipsetError) Error() string { return nl.IPSetError(e).Error() }

// create creates the set unless it exists.
func (c *ipsets) create(s setID, f tracker.Family) error {
	kind := sets[s].kind
	typeName, revision := kind.typeName()
	req := c.request(nl.IPSET_CMD_CREATE, s.name(f), 0)
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_TYPENAME, nl.ZeroTerminated(typeName)))
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_REVISION, nl.Uint8Attr(revision)))
	data := nl.NewRtAttr(nl.IPSET_ATTR_DATA|unix.NLA_F_NESTED, nil)
	if kind == bitmapPort {
		req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, nl.Uint8Attr(unix.AF_UNSPEC)))
		data.AddRtAttr(nl.IPSET_ATTR_PORT_FROM|unix.NLA_F_NET_BYTEORDER, port(0))
		data.AddRtAttr(nl.IPSET_ATTR_PORT_TO|unix.NLA_F_NET_BYTEORDER, port(0xffff))
	} else {
		req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, nl.Uint8Attr(inet.AF(f))))
		data.AddRtAttr(nl.IPSET_ATTR_MAXELEM|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, maxElements))
	}
	if kind == hashIPPortMark {
		data.AddRtAttr(nl.IPSET_ATTR_CADT_FLAGS|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, nl.IPSET_FLAG_WITH_SKBINFO))
	}
	req.AddData(data)
	_, err := c.execute(req)
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

// header returns the type of a set.
func (c *ipsets) header(name string) (typeName string, err error) {
	req := c.request(nl.IPSET_CMD_HEADER, name, 0)
	msgs, err := c.execute(req)
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		for typ, data := range nfnl.Attributes(m[nl.SizeofNfgenmsg:]) {
			if typ == nl.IPSET_ATTR_TYPENAME {
				typeName = nfnl.String(data)
			}
		}
	}
	return typeName, err
}

// change adds elements to a set, or deletes them. It is no error if they exist already, or
// do not exist. An existing element gets the new value.
func (c *ipsets) change(cmd int, s setID, f tracker.Family, entries []entry, marks map[entry]uint32) error {
	for len(entries) > 0 {
		some := entries[:min(len(entries), bulk)]
		entries = entries[len(some):]
		req := c.request(cmd, s.name(f), 0)
		if len(some) == 1 {
			req.AddData(encodeEntry(some[0], marks[some[0]], 0))
		} else {
			list := nl.NewRtAttr(nl.IPSET_ATTR_ADT|unix.NLA_F_NESTED, nil)
			for i, e := range some {
				list.AddChild(encodeEntry(e, marks[e], uint32(i+1)))
			}
			// The kernel writes the line of an error in a list into this attribute.
			req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_LINENO|unix.NLA_F_NET_BYTEORDER, make([]byte, 4)))
			req.AddData(list)
		}
		if _, err := c.execute(req); err != nil {
			verb := "add to"
			if cmd == nl.IPSET_CMD_DEL {
				verb = "delete from"
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

func encodeEntry(e entry, mark, line uint32) *nl.RtAttr {
	data := nl.NewRtAttr(nl.IPSET_ATTR_DATA|unix.NLA_F_NESTED, nil)
	kind := sets[e.set].kind
	if kind != bitmapPort {
		data.AddChild(encodeAddr(nl.IPSET_ATTR_IP, e.addr))
	}
	if kind != hashIP {
		data.AddRtAttr(nl.IPSET_ATTR_PORT|unix.NLA_F_NET_BYTEORDER, port(e.port))
	}
	if kind != hashIP && kind != bitmapPort {
		data.AddRtAttr(nl.IPSET_ATTR_PROTO, []byte{e.proto})
	}
	switch kind {
	case hashIPPortIP:
		data.AddChild(encodeAddr(nl.IPSET_ATTR_IP2, e.other.Addr()))
	case hashIPPortNet:
		data.AddChild(encodeAddr(nl.IPSET_ATTR_IP2, e.other.Addr()))
		data.AddRtAttr(nl.IPSET_ATTR_CIDR2, []byte{byte(e.other.Bits())})
	case hashIPPortMark:
		// Value and mask, as one number.
		data.AddRtAttr(nl.IPSET_ATTR_SKBMARK|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint64(nil, uint64(mark)<<32|0xffffffff))
	}
	data.AddRtAttr(nl.IPSET_ATTR_LINENO|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, line))
	return data
}

func encodeAddr(typ int, a netip.Addr) *nl.RtAttr {
	out := nl.NewRtAttr(typ|unix.NLA_F_NESTED, nil)
	inner := nl.IPSET_ATTR_IPADDR_IPV4
	if a.Is6() {
		inner = nl.IPSET_ATTR_IPADDR_IPV6
	}
	out.AddRtAttr(inner|unix.NLA_F_NET_BYTEORDER, a.AsSlice())
	return out
}

func port(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

// list calls fn with each element of a set and its packet mark, 0 if it has none.
func (c *ipsets) list(s setID, f tracker.Family, fn func(e entry, mark uint32)) error {
	msgs, err := c.execute(c.request(nl.IPSET_CMD_LIST, s.name(f), 0))
	if err != nil {
		return fmt.Errorf("list set %s: %w", s.name(f), err)
	}
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		for typ, data := range nfnl.Attributes(m[nl.SizeofNfgenmsg:]) {
			if typ != nl.IPSET_ATTR_ADT {
				continue
			}
			for _, data := range nfnl.Attributes(data) {
				fn(decodeEntry(s, f, data))
			}
		}
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

// destroy removes the set if it exists, unless a rule uses it.
func (c *ipsets) destroy(s setID, f tracker.Family) error {
	_, err := c.execute(c.request(nl.IPSET_CMD_DESTROY, s.name(f), 0))
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, ipsetError(nl.IPSET_ERR_BUSY)) {
		return fmt.Errorf("destroy set %s: %w", s.name(f), err)
	}
	return nil
}
