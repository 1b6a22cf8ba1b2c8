//go:build linux

package nftables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// DriftError says how the tables differ from how the backend left them. It is
// [ruleset.ErrNeedFull].
type DriftError struct {
	// Family is the family whose table was altered.
	Family tracker.Family
	// What is what was found.
	What string
}

// Error names the table and what was found.
func (e *DriftError) Error() string {
	return fmt.Sprintf("nftables: %s table was altered by somebody else: %s", e.Family, e.What)
}

// Unwrap returns [ruleset.ErrNeedFull].
func (e *DriftError) Unwrap() error { return ruleset.ErrNeedFull }

// watched is what the tables were like when they were last known to be right.
type watched struct {
	// generation is the network namespace's, and commits how many transactions of
	// this backend came since.
	generation, commits uint32
	// prints is a fingerprint of each table's chains, rules, sets and small maps.
	prints []uint64
}

// Check reports whether the tables are as the backend left them: nil, a
// [*DriftError] if somebody else altered or deleted one, [ruleset.ErrNeedFull] if
// nothing is known of them, or the error of reading them. After any but nil the
// next delta must be a full one; [Backend.Apply] asks for it.
//
// While nobody else commits transactions in the network namespace it costs one
// question to the kernel. Otherwise chains, rules, sets, the small maps and the
// number of elements of the large ones are read, but not what those hold: a full
// delta at long intervals sets that right, too. Numbers of elements are compared
// where the kernel tells them (Linux 6.16) or there are at most 20,000.
func (b *Backend) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tables == nil {
		return ruleset.ErrNeedFull
	}
	var gen uint32
	err := again(func() (err error) {
		if gen, err = b.conn.Generation(); err != nil || gen == b.watched.generation+b.watched.commits {
			return err
		}
		return b.compare()
	})
	if err != nil {
		b.tables = nil
		return err
	}
	b.watched.generation, b.watched.commits = gen, 0
	return nil
}

// Watch calls [Backend.Check] at the interval and drifted with each error but
// those of ctx, until ctx is done; it returns ctx's error. What drifted should do
// is ask the cursor for a full delta and have it synced.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if err := b.Check(ctx); err != nil && ctx.Err() == nil {
			drifted(err)
		}
	}
}

// remember takes the tables as they are now for right.
func (b *Backend) remember() error {
	return again(func() error {
		gen, err := b.conn.Generation()
		if err != nil {
			return err
		}
		prints := make([]uint64, len(b.tables))
		for i, t := range b.tables {
			if prints[i], err = b.fingerprint(t); err != nil {
				return err
			}
		}
		b.watched = watched{generation: gen, prints: prints}
		return nil
	})
}

// compare reads the tables and compares them with what is remembered.
func (b *Backend) compare() error {
	for i, t := range b.tables {
		found, err := b.fingerprint(t)
		switch {
		case errors.Is(err, unix.ENOENT):
			return &DriftError{t.family, "it or one of its sets is gone"}
		case err != nil:
			return fmt.Errorf("nftables: check: %w", err)
		case found != b.watched.prints[i]:
			return &DriftError{t.family, "its chains, rules, sets or classes differ"}
		}
		if err := b.compareCounts(t); err != nil {
			return err
		}
	}
	return nil
}

// countable is how many elements a set may have to be counted one by one.
const countable = 20000

func (b *Backend) compareCounts(t *table) error {
	counts, err := b.setCounts(t.family)
	if err != nil {
		return fmt.Errorf("nftables: check: %w", err)
	}
	for s := range set(len(t.count)) {
		if s == setStickyClients || s == setNodePortIPs || s == setServiceCIDRs {
			continue // dynamic, or in the fingerprint
		}
		want := t.count[s]
		have, told := counts[s.name()]
		if !told {
			if want > countable || t.size[s] == 0 || s >= firstAllowed && !t.prefixes[int(s-firstAllowed)] {
				continue
			}
			have = 0
			if err := b.elements(b.name, t.family, s, func(element) { have++ }); err != nil {
				return fmt.Errorf("nftables: check: %w", err)
			}
		}
		if have != want {
			return &DriftError{t.family, fmt.Sprintf("%s has %d elements instead of %d", s.name(), have, want)}
		}
	}
	return nil
}

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h):
// NFTA_TABLE_HANDLE, NFTA_SET_HANDLE, and NFTA_SET_COUNT, the number of a set's
// elements.
const (
	tableAttrHandle = 4
	setAttrHandle   = 16
	setAttrCount    = 20
)

// setCounts returns the number of elements of each of the table's sets by name,
// where the kernel tells it.
func (b *Backend) setCounts(f tracker.Family) (map[string]int, error) {
	counts := map[string]int{}
	request := nlbatch.AppendString(nil, unix.NFTA_SET_TABLE, b.name)
	err := b.conn.Get(unix.NFT_MSG_GETSET, protoFamily(f), true, request, func(attrs []byte) error {
		var name string
		count := -1
		nlbatch.Attributes(attrs, func(typ uint16, data []byte) {
			switch {
			case typ == unix.NFTA_SET_NAME:
				name = text(data)
			case typ == setAttrCount && len(data) == 4:
				count = int(binary.BigEndian.Uint32(data))
			}
		})
		if count >= 0 {
			counts[name] = count
		}
		return nil
	})
	return counts, err
}

// fingerprint sums up everything of the table that changes only by a new class
// or prefix length, or with the node. Its error is ENOENT where the table or
// something of it is gone.
func (b *Backend) fingerprint(t *table) (uint64, error) {
	sum := fnv.New64a()
	name := nlbatch.AppendString(nil, unix.NFTA_TABLE_NAME, b.name)
	err := b.conn.Get(unix.NFT_MSG_GETTABLE, protoFamily(t.family), false, name, func(attrs []byte) error {
		addTo(sum, attrs, unix.NFTA_TABLE_NAME, unix.NFTA_TABLE_FLAGS, tableAttrHandle)
		return nil
	})
	if err != nil {
		return 0, err
	}
	dumps := []struct {
		typ, table uint16
		keep       []uint16
	}{
		{unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, []uint16{unix.NFTA_SET_NAME, unix.NFTA_SET_FLAGS, unix.NFTA_SET_KEY_LEN, unix.NFTA_SET_DATA_LEN, setAttrHandle}},
		{unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_TABLE, []uint16{unix.NFTA_CHAIN_NAME, unix.NFTA_CHAIN_HANDLE, unix.NFTA_CHAIN_HOOK, unix.NFTA_CHAIN_POLICY, unix.NFTA_CHAIN_TYPE}},
		{unix.NFT_MSG_GETRULE, unix.NFTA_RULE_TABLE, []uint16{unix.NFTA_RULE_CHAIN, unix.NFTA_RULE_HANDLE, unix.NFTA_RULE_EXPRESSIONS}},
	}
	for _, d := range dumps {
		request := nlbatch.AppendString(nil, d.table, b.name)
		table := append([]byte(b.name), 0)
		err := b.conn.Get(d.typ, protoFamily(t.family), true, request, func(attrs []byte) error {
			mine := false
			nlbatch.Attributes(attrs, func(typ uint16, data []byte) {
				mine = mine || typ == d.table && bytes.Equal(data, table)
			})
			if mine {
				addTo(sum, attrs, d.keep...)
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	for _, s := range []set{setLayout, setClasses, setNearClasses, setNodePortIPs, setServiceCIDRs} {
		err := b.elements(b.name, t.family, s, func(e element) {
			sum.Write(e.key)
			sum.Write(e.data)
		})
		if err != nil {
			return 0, err
		}
	}
	return sum.Sum64(), nil
}

// addTo adds the attributes of the kept types.
func addTo(sum hash.Hash64, attrs []byte, keep ...uint16) {
	nlbatch.Attributes(attrs, func(typ uint16, data []byte) {
		for _, k := range keep {
			if typ == k {
				sum.Write([]byte{byte(typ)})
				sum.Write(data)
			}
		}
	})
}
