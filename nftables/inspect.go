//go:build linux

package nftables

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// kernelTable is what was found of a table by an earlier process, or by this one
// before something went wrong.
type kernelTable struct {
	kernelHead
	// known: this package wrote it, in the layout it still has, so that what it
	// remembers can be taken over.
	known bool
	// sound: it is known and can be written anew in place. A table is not if it was
	// switched off, or a chain hooked in otherwise: deleting it is the only way to
	// put that right on every kernel.
	sound bool
	// hooked: packets meet it.
	hooked bool
	sets   map[string]kernelSet
	chains map[string]kernelChain
	// ranges is what the interval sets hold, of those that there are.
	ranges map[set][]addrRange
	// hairpin is the endpoints that connections from themselves are masqueraded to,
	// nil if they are very many.
	hairpin []netip.Addr
	// sticky is the sticky pools, nil if they cannot be told; stickyNumbers is
	// theirs.
	sticky        map[stickyOwner]*adoptedPool
	stickyNumbers map[uint32]bool
}

// inspect reads what has to be known to replace the family's table of a name. It
// reads no large map. Where others commit so fast that all readings are
// interrupted the last one counts: what they change is most likely elsewhere, and
// if not, the kernel refuses the transaction.
func (b *Backend) inspect(table string, f tracker.Family) (*kernelTable, error) {
	k := &kernelTable{}
	var err error
	if k.kernelHead, err = readTable(b.conn, table, f); err != nil || !k.exists {
		return k, err
	}
	if k.sets, err = uninterrupted(b.readSets(table, f)); err != nil {
		return k, err
	}
	if k.chains, err = uninterrupted(b.readChains(table, f)); err != nil {
		return k, err
	}
	k.sound = k.flags == 0
	base := rules{family: f, mark: b.mark()}.baseChains()
	for name, c := range k.chains {
		k.hooked = k.hooked || c.base != nil
		k.sound = k.sound && c.is(base[name])
	}
	usable := func(s set) bool {
		found, ok := k.sets[s.name()]
		return ok && found.is(s.spec(f))
	}
	if usable(setLayout) {
		err = again(func() error {
			return b.elements(table, f, setLayout, func(e element) {
				k.known = len(e.key) == 4 && binary.NativeEndian.Uint32(e.key) == layoutVersion
			})
		})
	}
	k.sound = k.sound && k.known
	if err != nil || !k.known {
		return k, ignore(err, unix.ENOENT)
	}
	if usable(setStickyEndpoints) && usable(setStickyClients) {
		err = again(func() error {
			k.sticky, k.stickyNumbers = map[stickyOwner]*adoptedPool{}, map[uint32]bool{}
			return b.elements(table, f, setStickyEndpoints, k.addSticky)
		})
		if err = ignoreInterrupted(err); err != nil {
			return k, err
		}
	}
	k.ranges = map[set][]addrRange{}
	for _, s := range []set{setNodePortIPs, setServiceCIDRs} {
		if !usable(s) {
			continue
		}
		if k.ranges[s], err = uninterrupted(b.readRanges(table, f, s)); err != nil {
			return k, err
		}
	}
	if !usable(setHairpin) || k.sets[setHairpin.name()].size > 2*countable {
		return k, nil
	}
	err = again(func() error {
		k.hairpin = nil
		return b.elements(table, f, setHairpin, func(e element) {
			if a, ok := netip.AddrFromSlice(e.key[:len(e.key)/2]); ok {
				k.hairpin = append(k.hairpin, a)
			}
		})
	})
	return k, ignoreInterrupted(err)
}

// readRanges returns what an interval set holds.
func (b *Backend) readRanges(table string, f tracker.Family, s set) ([]addrRange, error) {
	var list []element
	err := again(func() error {
		list = list[:0]
		return b.elements(table, f, s, func(e element) {
			e.key = slices.Clone(e.key)
			list = append(list, e)
		})
	})
	return rangesOf(list), err
}

// keeps reports whether a set stays where the table is rewritten: the one that
// remembers clients, and those whose contents would be missing for a moment if
// they were made anew.
func (k *kernelTable) keeps(s set, f tracker.Family) bool {
	found, ok := k.sets[s.name()]
	if !ok || !k.sound || !found.is(s.spec(f)) {
		return false
	}
	switch s {
	case setStickyClients:
		return k.sticky != nil
	case setNodePortIPs, setServiceCIDRs:
		return true
	}
	return false
}

// addSticky adds an element of sticky-endpoints to the pool it is of.
func (k *kernelTable) addSticky(e element) {
	if len(e.key) != 4 || e.comment == "" {
		return
	}
	number := binary.NativeEndian.Uint32(e.key)
	addr, ok := parseAddrPort(e.data)
	if !ok || number&dispatchMark == 0 {
		return
	}
	owner := stickyOwner(e.comment)
	p, pool := k.sticky[owner], number>>stickyShift
	if p == nil {
		if k.stickyNumbers[pool] {
			return // altered: no two owners have the same
		}
		p = &adoptedPool{number: pool, members: map[netip.AddrPort]uint16{}}
		k.sticky[owner], k.stickyNumbers[pool] = p, true
	}
	if p.number == pool {
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

// element is one element of a set or map.
type element struct {
	key, data []byte
	// verdict and chain are an element's of a verdict map.
	verdict int32
	chain   string
	comment string
	// intervalEnd marks the first address behind an interval.
	intervalEnd bool
	// timeout and expiration are as the kernel tells them, nil if there is none.
	timeout, expiration []byte
}

// elements calls fn with the elements of a set, as readElements does.
func (b *Backend) elements(table string, f tracker.Family, s set, fn func(element)) error {
	return readElements(b.conn, table, f, s.name(), fn)
}

// readElements calls fn with each element of a set. The element is valid only during
// the call. See BenchmarkLibraryReadElements.
func readElements(conn *nlbatch.Conn, table string, f tracker.Family, set string, fn func(element)) error {
	request := nfnl.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, table)
	request = nfnl.AppendString(request, unix.NFTA_SET_ELEM_LIST_SET, set)
	return conn.Get(unix.NFT_MSG_GETSETELEM, inet.AF(f), true, request, func(attrs []byte) error {
		for typ, list := range nfnl.Attributes(attrs) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			for _, one := range nfnl.Attributes(list) {
				fn(parseElement(one))
			}
		}
		return nil
	})
}

func parseElement(attrs []byte) element {
	var e element
	value := func(data []byte) (out []byte) {
		for typ, v := range nfnl.Attributes(data) {
			if typ == unix.NFTA_DATA_VALUE {
				out = v
			}
		}
		return out
	}
	for typ, data := range nfnl.Attributes(attrs) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = value(data)
		case unix.NFTA_SET_ELEM_DATA:
			e.data = value(data)
			e.verdict, e.chain = parseVerdict(data)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.intervalEnd = len(data) == 4 && binary.BigEndian.Uint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_TIMEOUT:
			e.timeout = data
		case unix.NFTA_SET_ELEM_EXPIRATION:
			e.expiration = data
		case unix.NFTA_SET_ELEM_USERDATA:
			e.comment = nlbatch.Comment(data)
		}
	}
	return e
}

// parseVerdict reads the data of an element of a verdict map.
func parseVerdict(data []byte) (verdict int32, chain string) {
	for typ, v := range nfnl.Attributes(data) {
		if typ != unix.NFTA_DATA_VERDICT {
			continue
		}
		for typ, v := range nfnl.Attributes(v) {
			switch typ {
			case unix.NFTA_VERDICT_CODE:
				verdict = int32(nfnl.Uint32(v))
			case unix.NFTA_VERDICT_CHAIN:
				chain = nfnl.String(v)
			}
		}
	}
	return verdict, chain
}

// again repeats a read that a transaction of somebody else's interrupted.
func again(read func() error) error {
	var err error
	for range 10 {
		if err = read(); !errors.Is(err, nfnl.ErrInterrupted) {
			break
		}
	}
	return err
}

// ignoreInterrupted returns err unless it says that others committed transactions
// during the reading, every time.
func ignoreInterrupted(err error) error {
	if errors.Is(err, nfnl.ErrInterrupted) {
		return nil
	}
	return err
}

// uninterrupted returns what was read, interrupted or not.
func uninterrupted[T any](v T, err error) (T, error) { return v, ignoreInterrupted(err) }

// persist repeats what failed because somebody else changed the same tables
// between reading and writing them.
func persist(f func() error) error {
	var err error
	for range 5 {
		err = f()
		var drift *ruleset.DriftError
		if !errors.As(err, &drift) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) {
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
