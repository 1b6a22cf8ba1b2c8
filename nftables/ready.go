//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Ready returns the number of endpoints to which each Service port forwards new connections.
// It reads the kernel's tables of a [Backend] with the same configuration, in this process or
// another. If the frontends of a Service port have different endpoints, the largest number
// counts. Names of Service ports are as in [Traffic]. The error wraps [ruleset.ErrNoRules] if
// there is no table.
//
// Ready is a debugging aid. It reads all endpoints, without a snapshot, so a concurrent change
// can yield an inconsistent result.
func Ready(ctx context.Context, c Config) (map[tracker.Key]int, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	conn, err := nlbatch.Dial(c.NetNS)
	if err != nil {
		return nil, unsupportedSocket(err)
	}
	defer conn.Close()
	out, any := map[tracker.Key]int{}, false
	for _, f := range c.Families {
		table, err := tableInUse(conn, c.Table, f)
		if err == nil && table != "" {
			any = true
			err = countReady(ctx, conn, table, f, out)
		}
		if err != nil {
			return nil, fmt.Errorf("nftables: cannot read endpoints: %w", err)
		}
	}
	if !any {
		return nil, fmt.Errorf("nftables: cannot read endpoints: %w", ruleset.ErrNoRules)
	}
	return out, nil
}

// countReady adds the Service ports of one table to out.
func countReady(ctx context.Context, conn *nlbatch.Conn, table string, f tracker.Family, out map[tracker.Key]int) error {
	read := func(s set, fn func(kernelElement)) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return ignoreInterrupted(again(func() error { return readElements(conn, table, f, s.name(), fn) }))
	}
	chains := map[uint32]string{} // by handler
	err := read(setHandlers, func(e kernelElement) { chains[binary.NativeEndian.Uint32(e.key)] = e.chain })
	// An endpoint may have several buckets.
	type member struct {
		pool     uint32
		endpoint netip.AddrPort
	}
	members, size := map[member]bool{}, map[uint32]int{}
	err = errors.Join(err, read(setEndpoints, func(e kernelElement) {
		a, ok := parseAddrPort(e.data)
		m := member{binary.NativeEndian.Uint32(e.key), a}
		if ok && !members[m] {
			members[m] = true
			size[m.pool]++
		}
	}))
	sticky, stickySize := map[uint64]bool{}, map[uint32]int{}
	err = errors.Join(err, read(setStickyBuckets, func(e kernelElement) {
		pool := binary.NativeEndian.Uint32(e.key) >> stickyShift
		m := uint64(pool)<<32 | uint64(binary.NativeEndian.Uint32(e.data))
		if !sticky[m] {
			sticky[m] = true
			stickySize[pool]++
		}
	}))
	for _, s := range []set{setServiceIPs, setNodePorts} {
		err = errors.Join(err, read(s, func(e kernelElement) {
			if len(e.key) < portOffset || e.comment == "" || len(e.data) < 4 {
				return
			}
			key := binary.NativeEndian.Uint32(e.data)
			chain, n := chains[key&handlerMask], 0
			switch {
			case chain == chainNoEndpoints || chain == chainNoLocalEndpoints:
			case strings.HasSuffix(chain, "s"): // the seconds of client affinity
				n = stickySize[key&poolMask]
			default:
				n = size[key&poolMask]
			}
			k := tracker.Key{ServicePortName: parseName(e.comment, e.key[len(e.key)-portOffset]), Family: f}
			out[k] = max(out[k], n)
		}))
	}
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("table has another layout: %w", ruleset.ErrNoRules)
	}
	return err
}
