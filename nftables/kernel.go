//go:build linux

package nftables

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// kernelTable is what was found of a table by an earlier process, or by this one
// before something went wrong.
type kernelTable struct {
	exists bool
	// compatible: this package wrote it, in the layout it still has.
	compatible bool
	// hooked: packets meet it.
	hooked       bool
	sets, chains []string
	// ranges is what the interval sets hold, of those that there are.
	ranges map[set][]addrRange
	// hairpin is the endpoints that connections from themselves are masqueraded to,
	// nil if they are very many.
	hairpin []netip.Addr
	sticky  map[stickyOwner]*adoptedPool
}

// inspect reads what has to be known to replace the family's table of a name. It
// reads no large map.
func (b *Backend) inspect(table string, f tracker.Family) (*kernelTable, error) {
	k := &kernelTable{}
	var err error
	if k.exists, err = tableExists(b.conn, table, f); err != nil || !k.exists {
		return k, err
	}
	err = again(func() error {
		k.sets, err = b.names(table, unix.NFT_MSG_GETSET, f, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME)
		return err
	})
	if err != nil {
		return k, err
	}
	err = again(func() error {
		k.chains, err = b.names(table, unix.NFT_MSG_GETCHAIN, f, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME)
		return err
	})
	if err != nil {
		return k, err
	}
	k.hooked = slices.Contains(k.chains, chainNATPrerouting)
	err = again(func() error {
		return b.elements(table, f, setLayout, func(e element) {
			k.compatible = len(e.key) == 4 && binary.NativeEndian.Uint32(e.key) == layoutVersion
		})
	})
	if err != nil || !k.compatible {
		return k, ignore(err, unix.ENOENT)
	}
	err = again(func() error {
		k.sticky = map[stickyOwner]*adoptedPool{}
		return b.elements(table, f, setStickyEndpoints, k.addSticky)
	})
	if err != nil {
		k.compatible = false
		return k, ignore(err, unix.ENOENT)
	}
	k.ranges = map[set][]addrRange{}
	for _, s := range []set{setNodePortIPs, setServiceCIDRs} {
		if !slices.Contains(k.sets, s.name()) {
			continue
		}
		err := again(func() error {
			var list []element
			err := b.elements(table, f, s, func(e element) {
				e.key = slices.Clone(e.key)
				list = append(list, e)
			})
			k.ranges[s] = rangesOf(list)
			return err
		})
		if err != nil {
			return k, err
		}
	}
	size, err := b.setSize(table, f, setHairpin)
	if err != nil || size > 2*countable {
		return k, ignore(err, unix.ENOENT)
	}
	err = again(func() error {
		k.hairpin = nil
		return b.elements(table, f, setHairpin, func(e element) {
			if a, ok := netip.AddrFromSlice(e.key[:len(e.key)/2]); ok {
				k.hairpin = append(k.hairpin, a)
			}
		})
	})
	return k, err
}

// setSize returns the size that a set was made with.
func (b *Backend) setSize(table string, f tracker.Family, s set) (size int, err error) {
	request := nlbatch.AppendString(nil, unix.NFTA_SET_TABLE, table)
	request = nlbatch.AppendString(request, unix.NFTA_SET_NAME, s.name())
	err = b.conn.Get(unix.NFT_MSG_GETSET, protoFamily(f), false, request, func(attrs []byte) error {
		nlbatch.Attributes(attrs, func(typ uint16, desc []byte) {
			if typ != unix.NFTA_SET_DESC {
				return
			}
			nlbatch.Attributes(desc, func(typ uint16, data []byte) {
				if typ == unix.NFTA_SET_DESC_SIZE && len(data) == 4 {
					size = int(binary.BigEndian.Uint32(data))
				}
			})
		})
		return nil
	})
	return size, err
}

// keeps reports whether a set of the name stays where the table is rewritten:
// the one that remembers clients, and those whose contents would be missing for a
// moment if they were made anew.
func (k *kernelTable) keeps(s set) bool {
	return k.compatible && slices.Contains(k.sets, s.name()) &&
		(s == setStickyClients || s == setNodePortIPs || s == setServiceCIDRs)
}

// addSticky adds an element of sticky-endpoints to the pool it is of.
func (k *kernelTable) addSticky(e element) {
	if len(e.key) != 4 || e.comment == "" {
		return
	}
	number := binary.NativeEndian.Uint32(e.key)
	addr, ok := parseAddrPort(e.data)
	if !ok || number&ticketMark == 0 {
		return
	}
	owner := parseStickyOwner(e.comment)
	p := k.sticky[owner]
	if p == nil {
		p = &adoptedPool{number: number >> stickyShift, members: map[netip.AddrPort]uint16{}}
		k.sticky[owner] = p
	}
	if p.number == number>>stickyShift {
		p.members[addr] = uint16(number)
	}
}

// parseAddrPort reads an address and port as maps hold them.
func parseAddrPort(data []byte) (netip.AddrPort, bool) {
	if len(data) != 8 && len(data) != 20 {
		return netip.AddrPort{}, false
	}
	n := len(data) - 4
	addr, ok := netip.AddrFromSlice(data[:n])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(data[n:])), ok
}

// names returns the names of the table's objects of one type.
func (b *Backend) names(table string, typ uint16, f tracker.Family, tableAttr, nameAttr uint16) ([]string, error) {
	var out []string
	request := nlbatch.AppendString(nil, tableAttr, table)
	err := b.conn.Get(typ, protoFamily(f), true, request, func(attrs []byte) error {
		var of, name string
		nlbatch.Attributes(attrs, func(typ uint16, data []byte) {
			switch typ {
			case tableAttr:
				of = text(data)
			case nameAttr:
				name = text(data)
			}
		})
		// Not every kernel heeds the request's table.
		if of == table {
			out = append(out, name)
		}
		return nil
	})
	return out, err
}

func text(data []byte) string { return strings.TrimRight(string(data), "\x00") }

// element is one element of a set or map.
type element struct {
	key, data []byte
	comment   string
	// intervalEnd marks the first address behind an interval.
	intervalEnd bool
	// timeout and expiration are as the kernel tells them, nil if there is none.
	timeout, expiration []byte
}

// elements calls fn with the elements of a set. What it is given is valid only
// during the call.
func (b *Backend) elements(table string, f tracker.Family, s set, fn func(element)) error {
	request := nlbatch.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, table)
	request = nlbatch.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, s.name())
	return b.conn.Get(unix.NFT_MSG_GETSETELEM, protoFamily(f), true, request, func(attrs []byte) error {
		nlbatch.Attributes(attrs, func(typ uint16, list []byte) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				return
			}
			nlbatch.Attributes(list, func(_ uint16, one []byte) { fn(parseElement(one)) })
		})
		return nil
	})
}

func parseElement(attrs []byte) element {
	var e element
	value := func(data []byte) (out []byte) {
		nlbatch.Attributes(data, func(typ uint16, v []byte) {
			if typ == unix.NFTA_DATA_VALUE {
				out = v
			}
		})
		return out
	}
	nlbatch.Attributes(attrs, func(typ uint16, data []byte) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = value(data)
		case unix.NFTA_SET_ELEM_DATA:
			e.data = value(data)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.intervalEnd = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_TIMEOUT:
			e.timeout = data
		case unix.NFTA_SET_ELEM_EXPIRATION:
			e.expiration = data
		case unix.NFTA_SET_ELEM_USERDATA:
			e.comment = nlbatch.Comment(data)
		}
	})
	return e
}

// again repeats a read that a transaction of somebody else's interrupted.
func again(read func() error) error {
	var err error
	for range 10 {
		if err = read(); !errors.Is(err, nlbatch.ErrInterrupted) {
			break
		}
	}
	return err
}

// persist repeats what failed because somebody else changed the same tables
// between reading and writing them.
func persist(f func() error) error {
	var err error
	for range 5 {
		err = f()
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return err
}

// ignore returns err unless it is the kernel's error errno.
func ignore(err error, errno unix.Errno) error {
	if errors.Is(err, errno) {
		return nil
	}
	return err
}
