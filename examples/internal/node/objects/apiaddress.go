package objects

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/tracker"
)

// apiAddresses are the addresses at which the agent reaches its API server.
//
// A Service with such an address among its external IPs would capture new connections of the
// agent, of kubelet and of pods to the API server (CVE-2020-8554). The agent would not receive the
// Service's deletion, so the node could not recover without help. onService therefore leaves
// these external IPs out. A load-balancer IP is kept: a controller assigned it, and an API server
// may be behind a Service of its cluster.
type apiAddresses []netip.AddrPort

// resolveTimeout limits how long FindAPIAddresses resolves a host name.
const resolveTimeout = 5 * time.Second

// FindAPIAddresses returns the addresses of the API server of a client, which may be nil. It
// returns none for --manifests, and if a host name cannot be resolved.
func FindAPIAddresses(ctx context.Context, client *kubeapi.Client, log *slog.Logger) apiAddresses {
	if client == nil {
		return nil
	}
	url := client.URL()
	name := url.Port()
	if name == "" {
		name = url.Scheme
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", name)
	var list []netip.Addr
	if err == nil {
		list, err = net.DefaultResolver.LookupNetIP(ctx, "ip", url.Hostname())
	}
	if err != nil {
		log.Warn("cannot find the API server's address: external IPs that equal it are served", "server", url.Host, "error", err)
		return nil
	}
	var out apiAddresses
	for _, a := range list {
		out = append(out, netip.AddrPortFrom(a.Unmap(), uint16(port)))
	}
	return out
}

// onService leaves out external IPs at which the agent reaches its API server. If it finds one, it
// returns a [tracker.Warning].
func (l apiAddresses) onService(p *tracker.ServicePort) error {
	captures := func(a netip.Addr) bool {
		return p.Key.Protocol == v1.ProtocolTCP && slices.Contains(l, netip.AddrPortFrom(a.Unmap(), p.Port))
	}
	if !slices.ContainsFunc(p.ExternalIPs, captures) {
		return nil
	}
	p.ExternalIPs = slices.DeleteFunc(slices.Clone(p.ExternalIPs), captures)
	return tracker.Warning("an external IP is the address of the API server, port %d, and is not served", p.Port)
}
