package modes

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	userspace "github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/examples/userspace/vip"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
)

// Userspace is the mode whose data plane is this process. The kernel has no rules for Services, only
// their addresses ([vip]).
func Userspace() Mode {
	return Mode{
		Name:  config.ModeUserspace,
		Watch: 10 * time.Second, // lists addresses and routes
		Probe: func(context.Context, Settings) error { return nil },
		Open:  func(_ context.Context, s Settings) (Plane, error) { return openUserspace(s) },
		Owned: func(context.Context, *slog.Logger) (owned bool, err error) {
			err = WithAddresses(func(a *vip.Addresses) error {
				held, err := a.Held()
				owned = len(held) != 0
				return err
			})
			return owned, err
		},
		Cleanup: func(ctx context.Context, log *slog.Logger) error {
			kept := Missing(ifOwned(nftables.Owned, nftables.Cleanup)(ctx, nftables.Config{Table: keptTable, Log: log}), log)
			return WithAddresses(func(a *vip.Addresses) error {
				held, err := a.Held()
				for _, x := range held {
					err = errors.Join(err, a.Release(x))
				}
				return errors.Join(err, kept)
			})
		},
		CleanupKubeProxy: func(context.Context, *slog.Logger) error { return nil },
	}
}

// WithAddresses calls f with the addresses of the calling thread's network namespace.
func WithAddresses(f func(*vip.Addresses) error) error {
	a, err := vip.New()
	if err != nil {
		return err
	}
	defer a.Close()
	return f(a)
}

// keptTable is an nf_tables table without Services. Its chains of type nat make the kernel translate the connections of an
// earlier mode. Without one, their packets would reach the sockets of this process, which the kernel answers by RST.
const keptTable = "proxier-kept"

// userspacePlane is the data plane of mode userspace.
type userspacePlane struct {
	*userspace.Backend
	addresses *vip.Addresses
	// adds reports whether the process may add addresses to the node (CAP_NET_ADMIN), and first is the first port
	// that it may listen at.
	adds  bool
	first uint16
	keep  func(context.Context) // nil after the first call
}

// Apply calls keep before another mode's rules are removed.
func (p *userspacePlane) Apply(ctx context.Context, d *ruleset.Delta) error {
	if p.adds && p.keep != nil {
		p.keep(ctx)
		p.keep = nil
	}
	return p.Backend.Apply(ctx, d)
}

// keepConnections writes keptTable, if the kernel tracks connections.
func keepConnections(ctx context.Context, s Settings) {
	if n, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count"); err != nil || strings.TrimSpace(string(n)) == "0" {
		return
	}
	b, err := nftables.New(ctx, nftables.Config{Table: keptTable, Families: s.Families, NetNS: s.NetNS, Log: s.Log})
	if err == nil {
		err = errors.Join(b.Apply(ctx, &ruleset.Delta{Full: true, Node: &ruleset.Node{}}), b.Close())
	}
	if err != nil {
		s.Log.Warn("open connections of another mode may break", "error", err)
	}
}

// openUserspace opens the data plane and logs what the process may not serve.
func openUserspace(s Settings) (Plane, error) {
	own, err := vip.New()
	if err != nil {
		return Plane{}, err
	}
	p := &userspacePlane{addresses: own, adds: own.Permitted() == nil, first: firstPort(), keep: func(ctx context.Context) { keepConnections(ctx, s) }}
	c := userspace.Config{Addresses: own, Serves: p.serves, Dial: s.Dial, Log: s.Log}
	if !p.adds {
		c.Addresses = &presentAddresses{own, map[netip.Addr]bool{}}
		s.Log.Warn("without CAP_NET_ADMIN, only addresses that the node already has are served: NodePorts, and cluster, external and load-balancer IPs with a local route (ip route add local CIDR dev lo)")
	}
	if p.first > 1 {
		s.Log.Warn("without CAP_NET_BIND_SERVICE, low ports are not served", "below", p.first, "sysctl", "net.ipv4.ip_unprivileged_port_start")
	}
	c.Sockets, c.MaxConnections, c.MaxSessions = s.Limits, s.Limits.Connections, s.Limits.Sessions
	p.Backend = userspace.New(c)
	return Plane{Backend: p, Powerless: !p.adds}, nil
}

// firstPort returns the first port that the process may listen at, or 0 if it may listen at all.
func firstPort() uint16 {
	l, err := net.Listen("tcp", "127.0.0.1:1")
	if err == nil {
		l.Close()
	}
	if !errors.Is(err, syscall.EACCES) {
		return 0
	}
	text, _ := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 16)
	if err != nil {
		return 1024
	}
	return uint16(n)
}

// serves reports whether the process can serve a frontend at an address and port.
func (p *userspacePlane) serves(f *ruleset.Frontend, _ v1.Protocol, at netip.AddrPort) bool {
	if at.Port() < p.first {
		return false
	}
	return p.adds || f.Kind == ruleset.KindNodePort || p.addresses.Local(at.Addr())
}

// Close resets all connections and removes the addresses of Services from the node.
func (p *userspacePlane) Close() error {
	defer p.addresses.Close()
	return p.Backend.Close()
}

// presentAddresses implements [userspace.Addresses] for a process that cannot add addresses.
// Only addresses that the node has must be held.
type presentAddresses struct {
	*vip.Addresses
	held map[netip.Addr]bool
}

// Hold notes an address.
func (p *presentAddresses) Hold(a netip.Addr) error {
	p.held[a] = true
	return nil
}

// Release forgets an address.
func (p *presentAddresses) Release(a netip.Addr) error {
	delete(p.held, a)
	return nil
}

// Held returns the held addresses that the node still has.
func (p *presentAddresses) Held() ([]netip.Addr, error) {
	var out []netip.Addr
	for a := range p.held {
		if p.Local(a) {
			out = append(out, a)
		}
	}
	return out, nil
}
