//go:build linux

package iptables

import (
	"context"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

// generation is a summary of the tables that the kernel returns cheaply. Different values
// mean that the tables changed.
type generation struct {
	// nft is how many transactions any process has committed to nf_tables in the network
	// namespace, 0 if no family uses it.
	nft uint32
	// legacy describes the tables of the families that use ip_tables, in the order of the
	// backend's families.
	legacy [2][tables]legacyInfo
}

// legacyRecheck is how long Check relies on [legacyInfo], which does not change if another
// process replaces rules by the same number of rules of the same sizes.
const legacyRecheck = 5 * time.Minute

// unchanged reports whether Check found everything in place in this generation.
func (b *Backend) unchanged(g generation) bool {
	return b.known && g == b.checked && (g.legacy == generation{}.legacy || time.Since(b.ran) < legacyRecheck)
}

// generation reads the generation of the tables from the kernel. It runs no program and
// changes nothing. ok is false if the kernel does not return it.
//
// iptables-nft-restore and iptables-legacy-restore commit nothing if they only check rules,
// so Check does not change the generation.
func (b *Backend) generation(ctx context.Context) (g generation, ok bool) {
	if b.closed.Load() {
		return g, false
	}
	nft := false
	for i, f := range b.families {
		if nft = nft || f.tool.NFT(); f.tool.NFT() {
			continue
		}
		err := b.ns.Do(func() (err error) {
			g.legacy[i], err = legacyTables(f.family)
			return err
		})
		if err != nil {
			return g, false
		}
	}
	if nft {
		g.nft, ok = b.transactions(ctx)
		return g, ok
	}
	return g, true
}

// transactions returns how many transactions any process has committed to nf_tables.
func (b *Backend) transactions(ctx context.Context) (gen uint32, ok bool) {
	if b.genConn == nil || b.genConn.Closed() {
		conn, err := nfnl.Dial(b.ns.File())
		if err != nil {
			return 0, false
		}
		b.genConn = conn
	}
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETGEN, Family: unix.AF_UNSPEC}
	err := b.genConn.Get(ctx, r, func(attrs []byte) error {
		for typ, data := range nfnl.Attributes(attrs) {
			if typ == unix.NFTA_GEN_ID {
				gen, ok = nfnl.Uint32(data), true
			}
		}
		return nil
	})
	if err != nil {
		b.genConn.Close()
		b.genConn = nil
		return 0, false
	}
	return gen, ok
}

// legacyInfo is struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h, and struct
// ip6t_getinfo, which is the same.
type legacyInfo struct {
	name                 [32]byte
	validHooks           uint32
	hookEntry, underflow [5]uint32 // offsets in bytes, by hook
	entries              uint32    // rules, and one for each user-defined chain and the end
	size                 uint32    // of all of them in bytes
}

// legacyTables returns a summary of a family's tables in the calling thread's namespace.
// The cost of IPT_SO_GET_INFO does not depend on the size of the tables.
func legacyTables(f tracker.Family) (out [tables]legacyInfo, err error) {
	const getInfo = 64 // IPT_SO_GET_INFO and IP6T_SO_GET_INFO
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == tracker.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return out, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	for t := range tables {
		info := &out[t]
		copy(info.name[:], t.String())
		size := uint32(unsafe.Sizeof(*info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
			uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			return out, fmt.Errorf("%s: %w", t, os.NewSyscallError("getsockopt", errno))
		}
	}
	return out, nil
}
