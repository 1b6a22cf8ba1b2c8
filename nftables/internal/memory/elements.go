package memory

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
)

// Set is a set or map. In a set of intervals, an element marks the begin of an interval, or the first address
// behind it.
type Set struct {
	nft.Set
	// Elements holds the elements by what id returns.
	Elements map[string]nft.Element
	// owner is the loader that may change the elements. Another one makes a copy.
	owner *loader
	lines []string
}

// id identifies an element. In a set of intervals, the end of one sorts before the begin of the next.
func (s *Set) id(e nft.Element) string {
	switch {
	case s.Flags&nft.FlagInterval == 0:
		return string(e.Key)
	case e.IntervalEnd:
		return string(e.Key) + "0"
	}
	return string(e.Key) + "1"
}

func (s *Set) find(key []byte) (nft.Element, bool) {
	if s.Flags&nft.FlagInterval == 0 {
		e, ok := s.Elements[string(key)]
		return e, ok
	}
	last, want := "", s.id(nft.Element{Key: key})
	for id := range s.Elements {
		if last < id && id <= want {
			last = id
		}
	}
	e, ok := s.Elements[last]
	return e, ok && !e.IntervalEnd
}

func (s *Set) list() []string {
	texts := kernel.ElementTexts(s.Spec, func(fn func(nft.Element)) {
		for _, id := range slices.Sorted(maps.Keys(s.Elements)) {
			fn(s.Elements[id])
		}
	})
	if texts == nil {
		return s.lines
	}
	slices.Sort(texts)
	return append(s.lines[:len(s.lines):len(s.lines)], "elements = {", "\t"+strings.Join(texts, ",\n\t\t\t"), "}")
}

// elements adds what a text describes to a set or deletes it.
func (l *loader) elements(t *Table, s *Set, verb, text string) error {
	list, err := s.parse(text)
	if err != nil {
		return err
	}
	for _, e := range list {
		l.Written++
		id := s.id(e)
		old, exists := s.Elements[id]
		switch {
		case verb == "delete" && !exists:
			return syscall.ENOENT
		case verb == "delete":
			delete(s.Elements, id)
		case exists && (verb == "create" || string(old.Data) != string(e.Data) || old.Chain != e.Chain):
			return syscall.EEXIST
		case exists:
			continue
		case s.Size != 0 && len(s.Elements) >= s.Size:
			return syscall.ENFILE
		default:
			s.Elements[id] = e
			if e.Chain != "" {
				l.references = append(l.references, reference{t, e.Chain, text})
			}
		}
		l.changed = true
	}
	return nil
}

func (s *Set) parse(text string) (out []nft.Element, err error) {
	text, data, _ := strings.Cut(text, " : ")
	text, comment, _ := strings.Cut(text, " comment ")
	key, times, _ := strings.Cut(text, " timeout ")
	if s.Flags&nft.FlagInterval != 0 {
		return parseInterval(key)
	}
	e := nft.Element{Comment: strings.Trim(comment, `"`)}
	if e.Key, err = nft.ParseValue(s.KeyType, key); err != nil {
		return nil, err
	}
	if timeout, left, ok := strings.Cut(times, " expires "); ok {
		e.Timeout, e.Expiration = milliseconds(timeout), milliseconds(left)
	}
	switch verb, chain, _ := strings.Cut(data, " "); {
	case data == "":
	case s.DataType == nft.DataVerdict:
		e.Goto, e.Chain = verb == "goto", chain
	default:
		e.Data, err = nft.ParseValue(s.DataType, data)
	}
	return []nft.Element{e}, err
}

// milliseconds returns the kernel's encoding of a time.
func milliseconds(text string) []byte {
	d, _ := time.ParseDuration(text)
	return binary.BigEndian.AppendUint64(nil, uint64(d.Milliseconds()))
}

// parseInterval reads a prefix, a range of addresses or a single address.
func parseInterval(text string) ([]nft.Element, error) {
	from, to, ok := strings.Cut(text, "-")
	if !ok {
		to = from
	}
	first, err := netip.ParseAddr(from)
	last, _ := netip.ParseAddr(to)
	if p, notPrefix := netip.ParsePrefix(text); notPrefix == nil {
		b := p.Addr().AsSlice()
		for i := p.Bits(); i < p.Addr().BitLen(); i++ {
			b[i/8] |= 0x80 >> (i % 8)
		}
		first, err = p.Addr(), nil
		last, _ = netip.AddrFromSlice(b)
	}
	out := []nft.Element{{Key: first.AsSlice()}}
	if end := last.Next(); end.IsValid() {
		out = append(out, nft.Element{Key: end.AsSlice(), IntervalEnd: true})
	}
	return out, err
}
