package modes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Kernelspace is the mode of Windows: load balancers of its Host Networking Service (HNS).
func Kernelspace(cfg *config.Config) Mode {
	cleanup := func(ctx context.Context, log *slog.Logger) error {
		c, err := leftConfig(cfg, log)
		if err != nil {
			return err
		}
		return winkernel.Cleanup(ctx, c)
	}
	return backend[winkernel.Config, *winkernel.Backend]{
		configure: winkernelConfig,
		probe:     winkernel.Probe,
		open:      winkernel.New,
		lookup: func(ctx context.Context, q dataplane.Query) (dataplane.Found, error) {
			c, err := leftConfig(cfg, nil)
			if err != nil {
				return dataplane.Found{}, err
			}
			return winkernel.Lookup(ctx, c, q)
		},
		noEntry: "no load balancer for it",
	}.mode(Mode{
		Name: config.ModeKernelspace, Watch: 30 * time.Second, // lists all objects
		TakesOver: true, NeedsNode: true,
		OnService:        func(s *v1.Service, p *tracker.ServicePort) { _ = winkernel.OnService(s, nil, p) }, // never fails
		Cleanup:          cleanup,
		CleanupKubeProxy: cleanup, // nothing tells whose the load balancers are
	})
}

// winkernelConfig returns the configuration of the backend for the families of the settings.
func winkernelConfig(s Settings) (winkernel.Config, error) {
	hns, err := winkernel.Open()
	if err != nil {
		return winkernel.Config{}, err
	}
	w := s.Effective.Winkernel
	source, _ := netip.ParseAddr(w.SourceVip) // "" or valid
	c := winkernel.Config{
		HNS: hns, Network: w.NetworkName, Node: s.NodeName, DSR: w.EnableDSR, SourceVIP: source,
		ForwardHealthCheckVIP: w.ForwardHealthCheckVip, RootEndpoint: w.RootHnsEndpointName, Log: s.Log,
	}
	c.Trace = &winkernel.Hooks{}
	if s.LoadBalancerFailed != nil {
		c.Trace.WriteFailed = func(write string, lb winkernel.LoadBalancer, err error) {
			s.LoadBalancerFailed(write, lb.Frontend.Family, string(lb.Purpose), reasonOf(err))
		}
	}
	if s.LimitExceeded != nil {
		c.Trace.LeftOut = func(k tracker.Key, addrs []netip.Addr) {
			s.LimitExceeded(k, fmt.Sprintf("pods in the host network of this node get no connections: %v", addrs))
		}
	}
	for _, f := range s.Families {
		i := slices.IndexFunc(s.NodeIPs, func(a netip.Addr) bool { return tracker.FamilyOf(a) == f })
		if i < 0 {
			return c, fmt.Errorf("%w: the node has no %v address", ruleset.ErrConfig, f)
		}
		c.NodeIPs = append(c.NodeIPs, s.NodeIPs[i])
	}
	if at, err := netip.ParseAddrPort(s.Effective.HealthzBindAddress); err == nil {
		c.HealthzPort = at.Port()
	}
	c.HostMAC, err = hostMAC(c.NodeIPs)
	return c, err
}

// reasonOf returns the kind of an error in the words of kube-proxy's metrics.
func reasonOf(err error) string {
	switch {
	case errors.Is(err, winkernel.ErrExists):
		return "port_already_exists"
	case errors.Is(err, winkernel.ErrNotImplemented):
		return "not_implemented"
	case errors.Is(err, winkernel.ErrNoNetwork):
		return "network_not_found"
	case errors.Is(err, winkernel.ErrInvalidAddr):
		return "invalid_ip"
	}
	return "other"
}

// leftConfig returns the configuration for what an earlier run left. Without --bind-address, the node's address is the
// machine's first own one, which tells the endpoints of cluster IPs in an overlay.
func leftConfig(cfg *config.Config, log *slog.Logger) (winkernel.Config, error) {
	at := cfg.BindAddress
	if !at.IsValid() {
		own, _, stop, err := objects.OpenAddresses()
		if err != nil {
			return winkernel.Config{}, err
		}
		defer stop()
		list, err := own()
		if err == nil && len(list) == 0 {
			err = errors.New("the machine has no address")
		}
		if err != nil {
			return winkernel.Config{}, err
		}
		at = list[0]
	}
	return winkernelConfig(Settings{Config: cfg, NodeIPs: []netip.Addr{at}, Families: []tracker.Family{tracker.FamilyOf(at)}, Log: log})
}

// hostMAC returns the hardware address of the adapter with one of the addresses, or "".
func hostMAC(of []netip.Addr) (string, error) {
	adapters, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("cannot list the adapters: %w", err)
	}
	for _, adapter := range adapters {
		addrs, err := adapter.Addrs()
		if err != nil {
			return "", fmt.Errorf("cannot list the addresses of adapter %s: %w", adapter.Name, err)
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && slices.Contains(of, p.Addr()) {
				return adapter.HardwareAddr.String(), nil
			}
		}
	}
	return "", nil
}
