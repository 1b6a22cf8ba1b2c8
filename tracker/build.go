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
	"github.com/go-proxier/proxier/internal/cidr"
	"github.com/go-proxier/proxier/internal/complaint"
)

// defaultAffinity is the default of sessionAffinityConfig.clientIP.timeoutSeconds.
const defaultAffinity = time.Duration(v1.DefaultClientIPServiceAffinitySeconds) * time.Second

// builder converts a Service to ServicePorts.
type builder struct {
	families      []Family
	noExternalIPs bool
	hook          func(*v1.Service, *v1.ServicePort, *ServicePort) error
	reporter      reporter
	// left collects what is left out of the Service that Set is processing.
	left leftOuts

	usable []usablePort
	text   []byte
}

// build returns a Service's ports in every family, sorted by key, none for a Service that is not forwarded. It keeps
// none of s's memory.
func (b *builder) build(s *v1.Service) []*ServicePort {
	whole := func(r Reason, expected bool, why string) []*ServicePort {
		b.leave(LeftOut{Reason: r, Whole: true, Expected: expected}, "%s", why)
		return nil
	}
	switch all := s.Spec.ClusterIPs; {
	case s.Spec.Type == v1.ServiceTypeExternalName:
		return whole(ReasonExternalName, true, "its type is ExternalName")
	case s.Spec.ClusterIP == v1.ClusterIPNone, s.Spec.ClusterIP == "" && len(all) > 0 && all[0] == v1.ClusterIPNone:
		return whole(ReasonHeadless, true, "headless (clusterIP: None)")
	case s.Spec.ClusterIP == "" && len(all) == 0:
		return whole(ReasonNoClusterIP, true, "it has no clusterIP, which an API server assigns")
	case s.Spec.ClusterIP == "":
		// The API server sets all three fields; hand-made manifests may lack some.
		return whole(ReasonNoClusterIP, false, "clusterIPs without clusterIP: the Service is not served")
	case len(s.Spec.Ports) == 0:
		return whole(ReasonNoPorts, true, "it has no ports")
	}
	ports := b.ports(s)
	defer func() { b.usable = emptied(ports) }()
	ips := b.clusterIPs(s, make([]netip.Addr, 0, 2))
	if len(ports) == 0 || len(ips) == 0 {
		return nil
	}
	name := b.name(s, ports)
	b.enumerated(s)
	if n := len(s.Spec.ExternalIPs); b.noExternalIPs && n > 0 {
		b.leave(LeftOut{Reason: ReasonExternalIPsOff, Expected: true}, "the proxy does not serve externalIPs, of which it has %d", n)
	}
	external := b.addrs("externalIPs", b.externalIPs(s), ips, false)
	ingress := b.addrs("load-balancer ingress", b.ingressIPs(s), ips, true)
	room := maxFrontends / len(ports)
	ingress = first(b, "load-balancer ingress addresses for each port", ingress, room)
	external = first(b, "externalIPs for each port", external, room-len(ingress))
	ranges, badRange := b.ranges(s)
	all := len(ranges)
	if room := maxSources / (len(ports) * max(1, len(ingress))); all > room {
		ranges = cidr.Merge(ranges)
		all = len(ranges)
		ranges = first(b, "merged loadBalancerSourceRanges for each port and load-balancer address", ranges, room)
	}
	common := ServicePort{
		Created:             created(s),
		HealthCheckNodePort: b.healthCheckNodePort(s),
		Affinity:            b.affinity(s),
		InternalLocal:       s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == v1.ServiceInternalTrafficPolicyLocal,
		ExternalLocal:       b.externalLocal(s),
		SourceRangesLeftOut: all - len(ranges),
	}
	var out []*ServicePort
	var only *ServicePort
	if len(ips)*len(ports) == 1 {
		// Most Services have one port: use one allocation.
		one := &struct {
			port ServicePort
			list [1]*ServicePort
		}{}
		out, only = one.list[:0], &one.port
	} else {
		out = make([]*ServicePort, 0, len(ips)*len(ports))
	}
	for _, ip := range ips {
		f := FamilyOf(ip)
		common.ClusterIP = ip
		common.ExternalIPs = inFamily(external, f, FamilyOf)
		common.LoadBalancerIPs = inFamily(ingress, f, FamilyOf)
		common.SourceRanges = inFamily(ranges, f, func(p netip.Prefix) Family { return FamilyOf(p.Addr()) })
		if badRange && len(common.SourceRanges) == 0 {
			// Empty would allow every source, although the Service asks for a
			// restriction.
			common.SourceRanges = []netip.Prefix{noSource(f)}
			if len(common.LoadBalancerIPs) > 0 {
				b.leave(LeftOut{Reason: ReasonClosed}, "no usable %s range in loadBalancerSourceRanges: the load-balancer addresses are closed to everyone", f)
			}
		}
		for _, from := range ports {
			p := only
			if p == nil {
				p = &ServicePort{}
			}
			*p = common
			p.Key = Key{ServicePortName{name, from.name, from.protocol}, f}
			p.Port = from.port
			p.NodePort = from.nodePort
			if b.hook != nil {
				key := p.Key
				if err := b.hook(s, from.source, p); err != nil {
					reason := hookReason(err)
					b.leave(LeftOut{Reason: reason, Port: &from.source.Name}, "port %q (%s): %w", complaint.Value(from.source.Name), f, err)
					if reason == ReasonHookFailed {
						continue
					}
				}
				p.Key = key
			}
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *ServicePort) int { return a.Key.Compare(b.Key) })
	return out
}

// created returns the value of [ServicePort].Created. The API server sets the time of
// every object; a time before 1970 counts as not set.
func created(s *v1.Service) time.Time {
	if s.CreationTimestamp.Unix() <= 0 { // so is the zero Time's
		return time.Time{}
	}
	return time.Unix(s.CreationTimestamp.Unix(), 0).UTC()
}

// name returns the Service's name and sets the names of its ports, as parts of one copy of the text: the object's
// strings may keep a larger buffer alive.
func (b *builder) name(s *v1.Service, ports []usablePort) types.NamespacedName {
	b.text = append(append(b.text[:0], s.Namespace...), s.Name...)
	for i := range ports {
		b.text = append(b.text, ports[i].source.Name...)
	}
	text := string(b.text)
	cut := func(n int) (part string) {
		part, text = text[:n], text[n:]
		return part
	}
	name := types.NamespacedName{Namespace: cut(len(s.Namespace)), Name: cut(len(s.Name))}
	for i := range ports {
		ports[i].name = cut(len(ports[i].source.Name))
	}
	return name
}

type usablePort struct {
	source         *v1.ServicePort
	name           string // a copy of its name, set by builder.name
	protocol       v1.Protocol
	port, nodePort uint16 // nodePort is 0 if unset or invalid
}

// ports returns the valid ports. It reuses the memory of b.usable.
func (b *builder) ports(s *v1.Service) []usablePort {
	out := b.usable
	list := first(b, "ports", s.Spec.Ports, maxPorts)
	for i := range list {
		p := &list[i]
		if p.Port <= 0 || p.Port > 65535 {
			b.leave(LeftOut{Reason: ReasonPortNumber, Port: &p.Name}, "port %q: number %d is out of range", complaint.Value(p.Name), p.Port)
			continue
		}
		u := usablePort{source: p, protocol: protocol(p.Protocol), port: uint16(p.Port)}
		if u.protocol == "" {
			b.leave(LeftOut{Reason: ReasonProtocol, Port: &p.Name}, "port %q: unknown protocol %q", complaint.Value(p.Name), complaint.Value(p.Protocol))
			continue
		}
		if j := slices.IndexFunc(out, func(o usablePort) bool {
			return o.protocol == u.protocol && (o.port == u.port || o.source.Name == p.Name)
		}); j >= 0 {
			b.leave(LeftOut{Reason: ReasonDuplicate, Port: &p.Name}, "port %q (%s %d) repeats the name or number of port %q", complaint.Value(p.Name), u.protocol, p.Port, complaint.Value(out[j].source.Name))
			continue
		}
		if p.NodePort < 0 || p.NodePort > 65535 {
			b.leave(LeftOut{Reason: ReasonPortNumber, Port: &p.Name}, "port %q: node port %d is out of range", complaint.Value(p.Name), p.NodePort)
		} else {
			u.nodePort = uint16(p.NodePort)
		}
		out = append(out, u)
	}
	return out
}

// protocol returns the API's constant for p, TCP if p is empty, or "" if p is
// unknown.
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

// clusterIPs appends the Service's cluster IPs in the tracked families to out, at most one per family. Entry i of
// spec.ipFamilies is the family of entry i of spec.clusterIPs. Hand-made manifests may lack ipFamilies; then only
// spec.clusterIP is used.
func (b *builder) clusterIPs(s *v1.Service, out []netip.Addr) []netip.Addr {
	texts := s.Spec.ClusterIPs
	if len(texts) == 0 || len(s.Spec.IPFamilies) == 0 {
		if len(texts) > 1 {
			b.leave(LeftOut{Reason: ReasonFamilyMismatch, Expected: true}, "%d cluster IPs but no ipFamilies: only clusterIP is used", len(texts))
		}
		texts = []string{s.Spec.ClusterIP}
	}
	if len(s.Spec.IPFamilies) > len(texts) {
		b.leave(LeftOut{Reason: ReasonFamilyMismatch}, "%d ipFamilies but %d cluster IPs", len(s.Spec.IPFamilies), len(texts))
	}
	for i, text := range texts {
		ip, err := parseAddr(text)
		f := FamilyOf(ip)
		switch {
		case err != nil:
			b.leave(LeftOut{Reason: ReasonAddress}, "cluster IP: %w", err)
		case len(s.Spec.IPFamilies) > 0 && (i >= len(s.Spec.IPFamilies) || string(s.Spec.IPFamilies[i]) != f.String()):
			b.leave(LeftOut{Reason: ReasonFamilyMismatch}, "cluster IP %[2]s: its entry in ipFamilies is not %[1]s", f, ip)
		case slices.ContainsFunc(out, func(o netip.Addr) bool { return FamilyOf(o) == f }):
			b.leave(LeftOut{Reason: ReasonDuplicate}, "cluster IP %s: there is another %s cluster IP before it", ip, f)
		case !slices.Contains(b.families, f):
			b.leave(LeftOut{Reason: ReasonFamily, Expected: true}, "cluster IP %s: the proxy does not serve %s", ip, f)
		default:
			out = append(out, ip)
		}
	}
	return out
}

func parseAddr(s string) (netip.Addr, error) {
	a, err := endpointslice.ParseAddr(s)
	if err != nil {
		return a, err
	}
	if !endpointslice.IsUnicast(a) {
		return netip.Addr{}, fmt.Errorf("%s is not a unicast address", a)
	}
	return a, nil
}

// metadata is the address at which clouds serve the metadata and credentials of a machine.
var metadata = netip.AddrFrom4([4]byte{169, 254, 169, 254})

// reservedError is the error for an address that no Service may have.
type reservedError struct{ addr netip.Addr }

func (e *reservedError) Error() string { return e.addr.String() + " is reserved" }

// external parses an address at which other hosts can reach a Service. The API server refuses loopback and link-local
// addresses elsewhere, but not in the status of a Service, where a loopback address would redirect the node's own
// servers, such as 127.0.0.1:10256. Routers may announce link-local load-balancer IPs.
func (b *builder) external(s string, linkLocal bool) (netip.Addr, error) {
	a, err := parseAddr(s)
	switch {
	case err != nil:
	case a.IsLoopback() || a.IsLinkLocalUnicast() && !linkLocal:
		err = fmt.Errorf("%s is valid on one host or link only", a)
	case a == metadata:
		err = &reservedError{a}
	}
	return a, err
}

// ingressIPs returns the status.loadBalancer.ingress addresses whose packets arrive
// at the node with that destination.
func (b *builder) ingressIPs(s *v1.Service) []string {
	var out []string
	for i := range s.Status.LoadBalancer.Ingress {
		switch in := &s.Status.LoadBalancer.Ingress[i]; {
		case in.IP == "":
			b.leave(LeftOut{Reason: ReasonHostname, Expected: true}, "load-balancer ingress %q has no address", complaint.Value(in.Hostname))
		case in.IPMode != nil && *in.IPMode != v1.LoadBalancerIPModeVIP:
			b.leave(LeftOut{Reason: ReasonIPMode, Expected: true}, "load-balancer ingress %q has ipMode %s: packets arrive with another destination", complaint.Value(in.IP), complaint.Value(*in.IPMode))
		default:
			out = append(out, in.IP)
		}
	}
	return out
}

// addrs parses a list of external addresses and removes duplicates. It leaves out addresses of a
// family in which the Service has none of the cluster IPs ips.
func (b *builder) addrs(what string, texts []string, ips []netip.Addr, linkLocal bool) []netip.Addr {
	var out []netip.Addr
	for _, text := range first(b, what, texts, maxAddresses) {
		a, err := b.external(text, linkLocal)
		switch err.(type) {
		case nil:
			if !slices.ContainsFunc(ips, func(ip netip.Addr) bool { return FamilyOf(ip) == FamilyOf(a) }) {
				b.leave(LeftOut{Reason: ReasonFamily, Expected: true}, "%s: the Service has no cluster IP of the family of %s that is served", what, a)
			} else if !slices.Contains(out, a) {
				out = append(out, a)
			}
		case *reservedError:
			b.leave(LeftOut{Reason: ReasonReserved}, "%s: %w", what, err)
		default:
			b.leave(LeftOut{Reason: ReasonAddress}, "%s: %w", what, err)
		}
	}
	return out
}

// ranges parses spec.loadBalancerSourceRanges and reports whether some entries are
// invalid.
func (b *builder) ranges(s *v1.Service) (out []netip.Prefix, bad bool) {
	list := s.Spec.LoadBalancerSourceRanges
	if len(list) == 0 {
		return nil, false
	}
	seen := make(map[netip.Prefix]struct{}, len(list))
	for _, text := range list {
		p, err := parsePrefix(strings.TrimSpace(text))
		if err != nil {
			b.leave(LeftOut{Reason: ReasonSourceRange}, "loadBalancerSourceRanges: %w", err)
			bad = true
			continue
		}
		if _, repeated := seen[p]; !repeated {
			seen[p] = struct{}{}
			out = append(out, p)
		}
	}
	return out, bad
}

// parsePrefix parses an address range and masks it. It accepts the addresses that
// [endpointslice.ParseAddr] accepts.
func parsePrefix(s string) (netip.Prefix, error) {
	ip, length, ok := strings.Cut(s, "/")
	if !ok {
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses", complaint.Value(s))
	}
	a, err := endpointslice.ParseAddr(ip)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses", complaint.Value(s))
	}
	// ParseUint accepts leading zeros and rejects signs.
	n, err := strconv.ParseUint(length, 10, 8)
	if err == nil && a.Is4() && strings.Contains(ip, ":") {
		// An IPv4-mapped range counts the 96 bits before the IPv4 address.
		n -= 96
	}
	if err != nil || n > uint64(a.BitLen()) {
		return netip.Prefix{}, fmt.Errorf("%q is not a range of addresses", complaint.Value(s))
	}
	return netip.PrefixFrom(a, int(n)).Masked(), nil
}

// noSource returns a range that no packet comes from: the unspecified address, which
// is never the source of a routed packet (RFC 1122 section 3.2.1.3, RFC 4291 section
// 2.5.2).
func noSource(f Family) netip.Prefix {
	if f == IPv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 128)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 32)
}

func inFamily[T any](list []T, f Family, of func(T) Family) []T {
	var out []T
	for _, x := range list {
		if of(x) == f {
			out = append(out, x)
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
		b.leave(LeftOut{Reason: ReasonInvalid}, "session affinity timeout of %d seconds is not positive", *c.ClientIP.TimeoutSeconds)
		return defaultAffinity
	}
	return time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
}

// externalIPs returns spec.externalIPs, or nil if they are ignored.
func (b *builder) externalIPs(s *v1.Service) []string {
	if b.noExternalIPs {
		return nil
	}
	return s.Spec.ExternalIPs
}

// externalLocal reports whether externalTrafficPolicy Local is set and has an effect.
// Only NodePort and LoadBalancer Services and Services with external IPs have
// external traffic.
func (b *builder) externalLocal(s *v1.Service) bool {
	if s.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyLocal {
		return false
	}
	switch s.Spec.Type {
	case v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer:
		return true
	}
	return len(b.externalIPs(s)) > 0
}

func (b *builder) healthCheckNodePort(s *v1.Service) uint16 {
	if s.Spec.Type != v1.ServiceTypeLoadBalancer || !b.externalLocal(s) {
		return 0
	}
	n := s.Spec.HealthCheckNodePort
	if n <= 0 || n > 65535 {
		b.leave(LeftOut{Reason: ReasonPortNumber}, "health-check node port %d is out of range", n)
		return 0
	}
	return uint16(n)
}

// enumerated reports values that the API does not define. They count as unset.
func (b *builder) enumerated(s *v1.Service) {
	check := func(field, value string, known ...string) {
		if value != "" && !slices.Contains(known, value) {
			b.leave(LeftOut{Reason: ReasonInvalid}, "%s %q is unknown and counts as %s", field, complaint.Value(value), known[0])
		}
	}
	spec := &s.Spec
	check("type", string(spec.Type), "ClusterIP", "NodePort", "LoadBalancer")
	check("sessionAffinity", string(spec.SessionAffinity), "None", "ClientIP")
	check("externalTrafficPolicy", string(spec.ExternalTrafficPolicy), "Cluster", "Local")
	if p := spec.InternalTrafficPolicy; p != nil {
		check("internalTrafficPolicy", string(*p), "Cluster", "Local")
	}
}

// leave records that a part of the Service is left out.
func (b *builder) leave(l LeftOut, format string, args ...any) {
	if l.Expected && b.reporter.hook == nil {
		return
	}
	l.Err = fmt.Errorf(format, args...)
	b.left.add(l)
}

// Bounds of one Service. Its ports and addresses are lists, and every port has every address, so a
// small object could have a very large result. The parts that come last in the object are left
// out, and reported with [ReasonLimitExceeded].
const (
	maxPorts = 2000
	// maxAddresses is the maximum number of external IPs and of load-balancer IPs.
	maxAddresses = 1000
	// maxFrontends is the maximum number of ports times external and load-balancer IPs.
	maxFrontends = 10_000
	// maxSources is the maximum number of ports times load-balancer IPs times source ranges.
	maxSources = 100_000
)

// first returns the first most elements of list. It leaves out the others.
func first[T any](b *builder, what string, list []T, most int) []T {
	if len(list) <= most {
		return list
	}
	b.leave(LeftOut{Reason: ReasonLimitExceeded}, "%d %s are more than %d: the others are not used", len(list), what, most)
	return list[:most]
}
