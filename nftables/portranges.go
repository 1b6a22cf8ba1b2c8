package nftables

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// findRange resolves a packet's destination that is in a range of ports.
func (r reader) findRange(to netip.AddrPort, q dataplane.Query) (found dataplane.Found, err error) {
	at := layout.Octets{}.Addr(to.Addr()).Proto(inet.Protocol(q.Packet.Protocol)).Port(to.Port())
	key, n := string(at.Bytes()), at.Len()-4
	var number string
	service := ""
	err = ignoreMissing(r.each(layout.ServiceRanges, func(e kernel.Element) {
		if len(e.Key) == len(key) && len(e.KeyEnd) == len(key) && string(e.Key[:n]) == key[:n] && string(e.Key) <= key && key <= string(e.KeyEnd) {
			number, service = string(e.Data), e.Comment
		}
	}))
	if err != nil || number == "" {
		return found, err
	}
	keys := layout.RangeKeys
	found, err = r.find(number, keys, layout.Handlers)
	if err == nil && found.Entry && q.Internal {
		var internal dataplane.Found
		if internal, err = r.find(number, layout.InternalRangeKeys, layout.InternalHandlers); internal.Entry {
			found, keys = internal, layout.InternalRangeKeys
		}
	}
	if err != nil {
		return found, err
	}
	found.Service = service
	port, err := r.shift(number, keys, to.Port())
	for i, a := range found.Endpoints {
		found.Endpoints[i] = netip.AddrPortFrom(a.Addr(), port)
	}
	return found, err
}

// shift returns the endpoints' port for a port of a range, whose number keys resolves.
func (r reader) shift(number string, keys layout.Set, port uint16) (uint16, error) {
	get := func(s layout.Set, key string) (value string, err error) {
		err = r.each(s, func(e kernel.Element) {
			if string(e.Key) == key {
				value = string(e.Data)
			}
		})
		return value, err
	}
	key, err := get(keys, number)
	if err != nil || len(key) != 4 {
		return port, err
	}
	pool := binary.NativeEndian.Uint32([]byte(key)) & layout.PoolMask
	sticky, err := get(layout.StickyPools, string(binary.NativeEndian.AppendUint32(nil, pool)))
	if err != nil {
		return port, err
	}
	if len(sticky) == 4 {
		pool = binary.NativeEndian.Uint32([]byte(sticky)) & layout.StickyMask
	}
	key = string(binary.NativeEndian.AppendUint32(nil, pool))
	from, err := get(layout.ShiftFrom, key)
	if err != nil || len(from) < 2 {
		return port, err
	}
	to, err := get(layout.ShiftTo, key)
	if err != nil || len(to) < 2 {
		return port, err
	}
	first, last := binary.BigEndian.Uint16([]byte(from)), binary.BigEndian.Uint16([]byte(to))
	return layout.Shifted(first, last, port), nil
}

// ranges calls fn with the element of each frontend of a range of ports and with its Service port.
// The error wraps [syscall.ENOENT] if the table has never had ranges.
func (r reader) ranges(fn func(kernel.Element, tracker.Key)) error {
	return r.named(fn, layout.ServiceRanges)
}

// rangesOf is ranges if the table k has them.
func (r reader) rangesOf(k *kernelTable, fn func(kernel.Element, tracker.Key)) error {
	if !k.has(layout.ServiceRanges, r.family) {
		return nil
	}
	return r.ranges(fn)
}

// dispatchedRanges is ranges with dispatch keys as the data of the elements. It calls nothing if the table
// has never had ranges.
func (r reader) dispatchedRanges(fn func(kernel.Element, tracker.Key)) error {
	dispatchKeys := map[string][]byte{}
	err := r.each(layout.RangeKeys, func(e kernel.Element) { dispatchKeys[string(e.Key)] = slices.Clone(e.Data) })
	if err == nil {
		err = r.ranges(func(e kernel.Element, k tracker.Key) {
			if e.Data = dispatchKeys[string(e.Data)]; e.Data != nil {
				fn(e, k)
			}
		})
	}
	return ignoreMissing(err)
}

// ignoreMissing returns nil if a set is missing, and err otherwise.
func ignoreMissing(err error) error {
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}

// stickyChainBehind returns the chain of a sticky handler to which the handler with the given chain leads.
// sticky is its chain for single ports.
func stickyChainBehind(chain, sticky string) string {
	if strings.HasPrefix(chain, layout.RangePrefix) {
		return layout.RangePrefix + sticky
	}
	return sticky
}

// readConcats reads the sets of ranges of concatenations of a table into k, except those with an element that
// this package cannot have written.
func (b *Backend) readConcats(k *kernelTable, table string, f tracker.Family) error {
	k.concat = map[layout.Set]map[layout.Element]string{}
	for _, s := range [...]layout.Set{layout.ServiceRanges, layout.RangeSources} {
		foreign := false
		err := b.readUsable(k, table, f, s, func() { k.concat[s], foreign = map[layout.Element]string{}, false }, func(e kernel.Element) {
			c, ok := layout.ConcatElement(s, e.Key, e.KeyEnd, e.Data)
			k.concat[s][c], foreign = e.Comment, foreign || !ok
		})
		if err != nil {
			return err
		}
		if foreign {
			delete(k.concat, s)
		}
	}
	return nil
}
