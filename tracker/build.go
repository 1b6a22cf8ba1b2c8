package tracker

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/endpointslice"
)

// defaultAffinity is what an unset sessionAffinityConfig.clientIP.timeoutSeconds
// stands for.
const defaultAffinity = time.Duration(v1.DefaultClientIPServiceAffinitySeconds) * time.Second

// builder turns one Service into ServicePorts.
type builder struct {
	families []Family
	hook     func(*v1.Service, *v1.ServicePort, *ServicePort) error
	reporter reporter
}

// build returns a Service's ports in every family, sorted by key; none for a
// Service that nothing is forwarded for. None of s's memory is kept.
func (b *builder) build(s *v1.Service) []*ServicePort {
	if s.Spec.Type == v1.ServiceTypeExternalName || s.Spec.ClusterIP == "" || s.Spec.ClusterIP == v1.ClusterIPNone {
		return nil
	}
	ports := b.ports(s)
	if len(ports) == 0 {
		return nil
	}
	var out []*ServicePort
	name := types.NamespacedName{Namespace: strings.Clone(s.Namespace), Name: strings.Clone(s.Name)}
	external := b.addrs(s, "externalIPs", s.Spec.ExternalIPs)
	ingress := b.addrs(s, "load-balancer ingress", ingressIPs(s))
	ranges, badRange := b.ranges(s)
	for _, f := range b.families {
		ip, ok := b.clusterIP(s, f)
		if !ok {
			continue
		}
		common := ServicePort{
			ClusterIP:           ip,
			HealthCheckNodePort: b.healthCheckNodePort(s),
			ExternalIPs:         ofFamily(external, f),
			LoadBalancerIPs:     ofFamily(ingress, f),
			SourceRanges:        prefixesOfFamily(ranges, f),
			Affinity:            b.affinity(s),
			InternalLocal:       s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == v1.ServiceInternalTrafficPolicyLocal,
			ExternalLocal:       externalLocal(s),
		}
		if badRange && len(common.SourceRanges) == 0 {
			// No packet comes from this address (RFC 1122, RFC 4291): nobody may connect.
			none := netip.IPv4Unspecified()
			if f == IPv6 {
				none = netip.IPv6Unspecified()
			}
			common.SourceRanges = []netip.Prefix{netip.PrefixFrom(none, f.Bits())}
			if len(common.LoadBalancerIPs) > 0 {
				b.reporter.service(s, ReasonClosed, fmt.Errorf("no usable %s range in loadBalancerSourceRanges: the load-balancer addresses are closed to everyone", f))
			}
		}
		for i := range ports {
			p := common
			p.Key = Key{ServicePortName{name, strings.Clone(ports[i].Name), protocol(ports[i].Protocol)}, f}
			p.Port = uint16(ports[i].Port)
			p.NodePort = uint16(ports[i].NodePort)
			if b.hook != nil {
				key := p.Key
				if err := b.hook(s, ports[i].source, &p); err != nil {
					b.reporter.service(s, ReasonHookFailed, fmt.Errorf("port %q (%s): %w", ports[i].Name, f, err))
					continue
				}
				p.Key = key
			}
			out = append(out, &p)
		}
	}
	slices.SortFunc(out, func(a, b *ServicePort) int { return a.Key.Compare(b.Key) })
	return out
}

// usablePort is a port that was found good, with a bad node port set to 0.
type usablePort struct {
	v1.ServicePort
	source *v1.ServicePort
}

func (b *builder) ports(s *v1.Service) []usablePort {
	out := make([]usablePort, 0, len(s.Spec.Ports))
next:
	for i := range s.Spec.Ports {
		p := usablePort{s.Spec.Ports[i], &s.Spec.Ports[i]}
		if p.Port <= 0 || p.Port > 65535 {
			b.invalid(s, "port %q has the number %d", p.Name, p.Port)
			continue
		}
		if protocol(p.Protocol) == "" {
			b.invalid(s, "port %q has the unknown protocol %q", p.Name, p.Protocol)
			continue
		}
		for _, o := range out {
			if protocol(o.Protocol) == protocol(p.Protocol) && (o.Name == p.Name || o.Port == p.Port) {
				b.invalid(s, "port %q (%s %d) repeats the name or number of port %q", p.Name, protocol(p.Protocol), p.Port, o.Name)
				continue next
			}
		}
		if p.NodePort < 0 || p.NodePort > 65535 {
			b.invalid(s, "port %q has the node port %d", p.Name, p.NodePort)
			p.NodePort = 0
		}
		out = append(out, p)
	}
	return out
}

// protocol returns p with its default filled in, always one of the API's
// constants, or "" if it is not known.
func protocol(p v1.Protocol) v1.Protocol {
	switch p {
	case v1.ProtocolTCP, "":
		return v1.ProtocolTCP
	case v1.ProtocolUDP:
		return v1.ProtocolUDP
	case v1.ProtocolSCTP:
		return v1.ProtocolSCTP
	}
	return ""
}

// clusterIP returns the Service's cluster IP of the family: spec.clusterIPs
// corresponds to spec.ipFamilies one by one. A Service without ipFamilies (they
// are set by the API server, but not in every manifest) has only its clusterIP.
func (b *builder) clusterIP(s *v1.Service, f Family) (netip.Addr, bool) {
	text := s.Spec.ClusterIP
	if len(s.Spec.IPFamilies) > 0 {
		i := slices.Index(s.Spec.IPFamilies, v1.IPFamily(f.String()))
		switch {
		case i < 0:
			return netip.Addr{}, false
		case i < len(s.Spec.ClusterIPs):
			text = s.Spec.ClusterIPs[i]
		case i > 0:
			b.invalid(s, "ipFamilies has %s, clusterIPs has no address for it", f)
			return netip.Addr{}, false
		}
	}
	ip, err := parseAddr(text)
	if err != nil {
		b.invalid(s, "cluster IP: %w", err)
		return netip.Addr{}, false
	}
	if FamilyOf(ip) != f {
		if len(s.Spec.IPFamilies) > 0 {
			b.invalid(s, "cluster IP %s where ipFamilies says %s", ip, f)
		}
		return netip.Addr{}, false
	}
	return ip, true
}

// parseAddr parses an address that packets can be sent to.
func parseAddr(s string) (netip.Addr, error) {
	a, err := endpointslice.ParseAddr(s)
	if err != nil {
		return a, err
	}
	if a.IsUnspecified() || a.IsMulticast() {
		return netip.Addr{}, fmt.Errorf("%s is not the address of a host", a)
	}
	return a, nil
}

// ingressIPs returns the addresses of status.loadBalancer.ingress whose packets
// arrive here with that destination.
func ingressIPs(s *v1.Service) []string {
	var out []string
	for i := range s.Status.LoadBalancer.Ingress {
		in := &s.Status.LoadBalancer.Ingress[i]
		if in.IP != "" && (in.IPMode == nil || *in.IPMode == v1.LoadBalancerIPModeVIP) {
			out = append(out, in.IP)
		}
	}
	return out
}

// addrs parses a list of addresses of any family and leaves out duplicates.
func (b *builder) addrs(s *v1.Service, what string, texts []string) []netip.Addr {
	var out []netip.Addr
	for _, text := range texts {
		a, err := parseAddr(text)
		if err != nil {
			b.invalid(s, "%s: %w", what, err)
		} else if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// ranges parses spec.loadBalancerSourceRanges and reports whether some could not
// be used.
func (b *builder) ranges(s *v1.Service) (out []netip.Prefix, bad bool) {
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		p, err := parsePrefix(strings.TrimSpace(text))
		if err != nil {
			b.invalid(s, "loadBalancerSourceRanges: %w", err)
			bad = true
		} else if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out, bad
}

// parsePrefix parses a range as [endpointslice.ParseAddr] does an address, and
// masks it.
func parsePrefix(s string) (netip.Prefix, error) {
	ip, length, ok := strings.Cut(s, "/")
	if !ok {
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses", s)
	}
	a, err := endpointslice.ParseAddr(ip)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses", s)
	}
	// ParseUint takes leading zeros, but no sign.
	n, err := strconv.ParseUint(length, 10, 8)
	if err == nil && a.Is4() && strings.Contains(ip, ":") {
		// An IPv4-mapped range counts the 96 bits before the IPv4 address.
		n -= 96
	}
	if err != nil || n > uint64(a.BitLen()) {
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses", s)
	}
	return netip.PrefixFrom(a, int(n)).Masked(), nil
}

func ofFamily(addrs []netip.Addr, f Family) []netip.Addr {
	var out []netip.Addr
	for _, a := range addrs {
		if FamilyOf(a) == f {
			out = append(out, a)
		}
	}
	return out
}

func prefixesOfFamily(prefixes []netip.Prefix, f Family) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if FamilyOf(p.Addr()) == f {
			out = append(out, p)
		}
	}
	return out
}

func (b *builder) affinity(s *v1.Service) time.Duration {
	if s.Spec.SessionAffinity != v1.ServiceAffinityClientIP {
		return 0
	}
	c := s.Spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return defaultAffinity
	}
	if *c.ClientIP.TimeoutSeconds <= 0 {
		b.invalid(s, "session affinity of %d seconds", *c.ClientIP.TimeoutSeconds)
		return defaultAffinity
	}
	return time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
}

// externalLocal reports whether externalTrafficPolicy Local is asked for and
// means anything: there is external traffic only to a NodePort or LoadBalancer
// Service, and to one with external IPs.
func externalLocal(s *v1.Service) bool {
	if s.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyLocal {
		return false
	}
	switch s.Spec.Type {
	case v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer:
		return true
	}
	return len(s.Spec.ExternalIPs) > 0
}

func (b *builder) healthCheckNodePort(s *v1.Service) uint16 {
	if s.Spec.Type != v1.ServiceTypeLoadBalancer || !externalLocal(s) {
		return 0
	}
	n := s.Spec.HealthCheckNodePort
	if n <= 0 || n > 65535 {
		b.invalid(s, "health check node port %d", n)
		return 0
	}
	return uint16(n)
}

func (b *builder) invalid(s *v1.Service, format string, args ...any) {
	b.reporter.service(s, ReasonInvalid, fmt.Errorf(format, args...))
}
