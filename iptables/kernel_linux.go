package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/sysctl"
	"github.com/go-proxier/proxier/iptables/internal/nfacct"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

type linux struct {
	config Config
	ns     *netns.Namespace
	conn   *nfnl.Conn
}

func openKernel(c Config) (kernel, error) {
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return nil, fmt.Errorf("iptables: %w", err)
	}
	return &linux{config: c, ns: ns}, nil
}

func (l *linux) Close() error {
	var err error
	if l.conn != nil {
		err = l.conn.Close()
	}
	return errors.Join(err, l.ns.Close())
}

func (l *linux) Programs(ctx context.Context, f tracker.Family) (programs, error) {
	return findPrograms(ctx, l.tools(f))
}

func (l *linux) tools(f tracker.Family) iptool.Config {
	return iptool.Config{
		Family: f, Flavor: string(l.config.Flavor), Namespace: l.ns,
		LockFile: l.config.LockFile, LockWait: lockWait, Timeout: programTimeout,
	}
}

func findPrograms(ctx context.Context, c iptool.Config) (programs, error) {
	t, err := iptool.Find(ctx, c)
	if errors.Is(err, iptool.ErrUnsupported) {
		return nil, &dataplane.UnsupportedError{Backend: "iptables", Family: c.Family, Feature: "running iptables-restore and iptables-save", Minimum: "iptables 1.6.2", Err: err}
	}
	return tool{t}, commandError(err)
}

type tool struct{ *iptool.Tool }

func (t tool) Restore(ctx context.Context, input []byte, options ...string) error {
	return commandError(t.Tool.Restore(ctx, input, options...))
}

func (t tool) Save(ctx context.Context, table string, out io.Writer, options ...string) error {
	return commandError(t.Tool.Save(ctx, table, out, options...))
}

// commandError returns err with a [*CommandError] in place of a [*iptool.Error].
func commandError(err error) error {
	if e, ok := err.(*iptool.Error); ok { // iptool does not wrap it
		return (*CommandError)(e)
	}
	return err
}

func (l *linux) Sysctl(name string) (value string) {
	_ = l.ns.Do(func() (err error) { value, err = sysctl.Get(name); return err })
	return value
}

func (l *linux) SetSysctl(name, value string) error {
	return l.ns.Do(func() error { return sysctl.Set(name, value) })
}

func (l *linux) Accounts() (accounts, error) {
	conn, err := nfacct.Dial(l.ns.File())
	if err != nil {
		return nil, err
	}
	return objects{conn}, nil
}

type objects struct{ *nfacct.Conn }

func (o objects) Packets(name string) (n uint64, ok bool, err error) {
	got, err := o.Get(name)
	if errors.Is(err, unix.ENOENT) {
		return 0, false, nil
	}
	return got.Packets, err == nil, err
}

func (o objects) Delete(name string) error {
	if err := o.Conn.Delete(name); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

func (l *linux) Watch(ctx context.Context, interval time.Duration, check func(context.Context) error, drifted func(error)) error {
	return nfnl.WatchCommits(ctx, l.ns.File(), interval, check, drifted)
}

// Generation implements kernel. iptables-restore --test commits nothing, so Check does not change the generation.
func (l *linux) Generation(ctx context.Context, nft bool, legacy []tracker.Family) (g generation, ok bool) {
	if len(legacy) != 0 {
		err := l.ns.Do(func() error {
			for _, f := range legacy {
				info, err := legacyTables(f)
				if err != nil {
					return err
				}
				g.legacy += info
			}
			return nil
		})
		if err != nil {
			return g, false
		}
	}
	if nft {
		g.nft, ok = l.transactions(ctx)
		return g, ok
	}
	return g, true
}

func (l *linux) get(ctx context.Context, r nfnl.Request, f func(attrs []byte) error) error {
	if l.conn == nil || l.conn.Closed() {
		conn, err := nfnl.Dial(l.ns.File())
		if err != nil {
			return err
		}
		l.conn = conn
	}
	r.Subsystem = unix.NFNL_SUBSYS_NFTABLES
	return l.conn.Get(ctx, r, f)
}

func (l *linux) transactions(ctx context.Context) (gen uint32, ok bool) {
	err := l.get(ctx, nfnl.Request{Type: unix.NFT_MSG_GETGEN, Family: unix.AF_UNSPEC}, func(attrs []byte) error {
		for typ, data := range nfnl.Attributes(attrs) {
			if typ == unix.NFTA_GEN_ID {
				gen, ok = nfnl.Uint32(data), true
			}
		}
		return nil
	})
	if err != nil {
		if l.conn != nil {
			l.conn.Close()
		}
		return 0, false
	}
	return gen, ok
}

func (l *linux) CountRules(ctx context.Context, f tracker.Family, t table, chain string) (n int, err error) {
	attrs := nfnl.AppendString(nil, unix.NFTA_RULE_TABLE, t.String())
	attrs = nfnl.AppendString(attrs, unix.NFTA_RULE_CHAIN, chain)
	err = l.get(ctx, nfnl.Request{Type: unix.NFT_MSG_GETRULE, Family: inet.AF(f), Dump: true, Attrs: attrs}, func(attrs []byte) error {
		var inTable, inChain string
		for typ, data := range nfnl.Attributes(attrs) {
			switch typ {
			case unix.NFTA_RULE_TABLE:
				inTable = nfnl.String(data)
			case unix.NFTA_RULE_CHAIN:
				inChain = nfnl.String(data)
			}
		}
		// Old kernels report the rules of all chains.
		if inTable == t.String() && inChain == chain {
			n++
		}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	return n, err
}

// legacyInfo is struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h, and struct ip6t_getinfo.
type legacyInfo struct {
	name                 [32]byte
	validHooks           uint32
	hookEntry, underflow [5]uint32 // offsets in bytes, by hook
	entries              uint32    // rules, and one for each user-defined chain and the end
	size                 uint32    // of all of them in bytes
}

// legacyTables returns the number and the total size of each table's rules, in the calling thread's namespace. The
// cost of IPT_SO_GET_INFO does not depend on the size of the tables.
func legacyTables(f tracker.Family) (string, error) {
	const getInfo = 64 // IPT_SO_GET_INFO and IP6T_SO_GET_INFO
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == tracker.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	var out [tables]legacyInfo
	for t := range tables {
		info := &out[t]
		copy(info.name[:], t.String())
		size := uint32(unsafe.Sizeof(*info))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
			uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			return "", fmt.Errorf("%s: %w", t, os.NewSyscallError("getsockopt", errno))
		}
	}
	return fmt.Sprint(out), nil
}
