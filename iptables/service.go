//go:build linux

package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// rendered holds the chains of one Service, and its rules in the dispatchers.
type rendered struct {
	chains []chain
	rules  []placed
}

// placed is a rule of a dispatcher.
type placed struct {
	dispatcher int
	dispatched
	// shared reports that other Services may have a rule for the same key.
	shared bool
}

// serviceRenderer renders one Service.
type serviceRenderer struct {
	*settings
	pods     []string // the matches that recognise pods
	s        *ruleset.Service
	id, name string
	protocol string
	out      rendered
	names    map[string]bool
}

// renderService renders s. It fails if iptables cannot express something that s asks for.
func renderService(c *settings, pods []string, s *ruleset.Service) (rendered, error) {
	r := serviceRenderer{
		settings: c, pods: pods, s: s,
		id: serviceID(s.Key), name: s.Key.ServicePortName.String(), protocol: protocolName(s.Key.Protocol),
	}
	if r.protocol == "" {
		return rendered{}, fmt.Errorf("iptables: unknown protocol %q", s.Key.Protocol)
	}
	if a := s.Port.Affinity; a < 0 || a > maxAffinity {
		return rendered{}, fmt.Errorf("iptables: affinity timeout %v is not between 0 and %v", a, maxAffinity)
	}
	if h := s.Hash(); h != tracker.HashNone && r.refuseHash {
		return rendered{}, fmt.Errorf("%w: %v", ErrHash, h)
	}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Addr.IsValid() && tracker.FamilyOf(f.Addr) != c.family || f.Addr.Zone() != "" {
			return rendered{}, fmt.Errorf("iptables: %v is not an %v address", f.Addr, c.family)
		}
	}
	for _, t := range []ruleset.Target{ruleset.ToCluster, ruleset.ToLocal} {
		if err := r.pool(t); err != nil {
			return rendered{}, err
		}
	}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Kind == ruleset.ClusterIP {
			r.clusterIP(f)
		} else {
			r.external(f)
		}
	}
	if p := s.Port.HealthCheckNodePort; p != 0 {
		// The other ports of the Service have the same health check node port.
		r.place(healthNodePorts, keyOf(netip.Addr{}, protocols[0], p), true, "-p tcp",
			comment(s.Key.Namespace, "/", s.Key.Name, " health check node port"), destinationPort("tcp", p), "-j ACCEPT")
	}
	return r.out, nil
}

// Limits returns the limits of rules for one Service, which are the same in both families.
// The backend refuses a Service with a longer affinity timeout with a
// [*ruleset.PartialError].
func (b *Backend) Limits(tracker.Family) ruleset.Limits { return ruleset.Limits{Affinity: maxAffinity} }

// maxAffinity is the longest affinity timeout. xt_recent multiplies its seconds by the
// ticks of the clock in 32 bits.
const maxAffinity = 48 * 24 * time.Hour

func (r *serviceRenderer) add(c chain) { r.out.chains = append(r.out.chains, c) }

func (r *serviceRenderer) place(d int, k key, shared bool, rule ...string) {
	r.out.rules = append(r.out.rules, placed{d, dispatched{key: k, rule: join(rule...)}, shared})
}

// poolChain returns the name of the chain that chooses among a pool's endpoints.
func (r *serviceRenderer) poolChain(t ruleset.Target) string {
	if t == ruleset.ToLocal {
		return prefixLocal + hashOf(r.id)
	}
	return prefixService + hashOf(r.id)
}

// isPool reports whether t is a pool of endpoints.
func isPool(t ruleset.Target) bool { return t == ruleset.ToCluster || t == ruleset.ToLocal }

// pool renders the endpoints of one pool and the choice among them, if a frontend uses
// the pool.
func (r *serviceRenderer) pool(t ruleset.Target) error {
	used := slices.ContainsFunc(r.s.Frontends, func(f ruleset.Frontend) bool { return f.Target == t || f.Internal == t })
	if !used {
		return nil
	}
	c := chain{table: nat, name: r.poolChain(t), rank: rankService}
	for i := range r.s.Frontends {
		if f := &r.s.Frontends[i]; f.Kind == ruleset.ClusterIP && f.Target == t {
			c.rules = append(c.rules, r.masquerade(f)...)
		}
	}
	endpoints := r.s.Pool(t)
	names := make([]string, len(endpoints))
	if r.names == nil {
		r.names = make(map[string]bool, len(endpoints))
	}
	recent := ""
	if r.s.Port.Affinity != 0 {
		recent = "--mask 255.255.255.255 --rsource"
		if r.family == tracker.IPv6 {
			recent = "--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource"
		}
	}
	for i, ep := range endpoints {
		if tracker.FamilyOf(ep.Addr.Addr()) != r.family || ep.Addr.Addr().Zone() != "" || ep.Addr.Port() == 0 {
			return fmt.Errorf("iptables: endpoint %v is not an %v address and port", ep.Addr, r.family)
		}
		names[i] = prefixEndpoint + hashOf(r.id, ep.Addr.String())
		if r.names[names[i]] {
			continue
		}
		r.names[names[i]] = true
		set := ""
		if recent != "" {
			set = "-m recent --set --name " + names[i] + " " + recent
		}
		about := ""
		if r.endpointComments {
			about = comment(r.name)
		}
		r.add(chain{nat, names[i], []string{
			join(source(host(ep.Addr.Addr())), about, jump(chainMarkMasq)),
			join("-p "+r.protocol, about, set, "-j DNAT --to-destination "+ep.Addr.String()),
		}, rankEndpoint})
	}
	if recent != "" {
		seconds := strconv.FormatInt(int64((r.s.Port.Affinity+time.Second-1)/time.Second), 10)
		for _, name := range names {
			c.rules = append(c.rules, "-m recent --rcheck --seconds "+seconds+" --reap --name "+name+" "+recent+" "+jump(name))
		}
	}
	choices := make([]choice, len(names))
	for i, ep := range endpoints {
		choices[i] = choice{names[i], max(1, int(ep.Weight))}
	}
	rules, groups := choose(choices, c.name, 0)
	for _, g := range groups {
		r.add(g)
	}
	if r.endpointComments && groups == nil {
		for i := range rules {
			rules[i] = comment(r.name, " -> ", endpoints[i].Addr.String()) + " " + rules[i]
		}
	}
	c.rules = append(c.rules, rules...)
	r.add(c)
	return nil
}

// masquerade returns the rules that mark connections to a cluster IP that must be
// masqueraded.
func (r *serviceRenderer) masquerade(f *ruleset.Frontend) []string {
	rule := func(src, in, to string) []string {
		return []string{join(src, destination(host(f.Addr)), in, "-p "+r.protocol, comment(r.name, " cluster IP"),
			destinationPort(r.protocol, f.Port), jump(to))}
	}
	switch f.Masquerade {
	case ruleset.MasqueradeAlways:
		return rule("", "", chainMarkMasq)
	case ruleset.MasqueradeNotPods:
		switch {
		case len(r.pods) > 1:
			return rule("", "", chainMarkNotPods)
		case len(r.pods) == 0:
			return rule("", "", chainMarkMasq)
		case strings.HasPrefix(r.pods[0], "-i "):
			return rule("", "! "+r.pods[0], chainMarkMasq)
		}
		return rule("! "+r.pods[0], "", chainMarkMasq)
	}
	return nil
}

// clusterIP renders a cluster IP.
func (r *serviceRenderer) clusterIP(f *ruleset.Frontend) {
	k := keyOf(f.Addr, r.s.Key.Protocol, f.Port)
	// In the filter table, this rule refuses the ports that no Service has.
	r.place(clusterIPs, key(f.Addr.AsSlice()), true, destination(host(f.Addr)), comment("no such port of this cluster IP"), reject(r.family))
	if isPool(f.Target) {
		r.place(toServices, k, false, r.to(f), comment(r.name, " cluster IP"), destinationPort(r.protocol, f.Port), jump(r.poolChain(f.Target)))
	}
	if f.Target != ruleset.ToCluster {
		verdict, why := r.verdict(f)
		r.place(refusedServices, k, false, r.to(f), comment(r.name, why), destinationPort(r.protocol, f.Port), verdict)
	}
}

// to returns the match of a frontend's address and protocol. The match of the port comes
// after the comment.
func (r *serviceRenderer) to(f *ruleset.Frontend) string {
	if f.Kind == ruleset.NodePort {
		return "-p " + r.protocol
	}
	return destination(host(f.Addr)) + " -p " + r.protocol
}

// verdict returns the target, in the filter table, for connections to f that were not
// forwarded, and the reason. The rule exists even while all connections are forwarded. A
// packet that arrives between the changes of the two tables then does not leave for an
// address that no host has. Under a policy of Local the rule drops the packet, and the
// sender retransmits it.
func (r *serviceRenderer) verdict(f *ruleset.Frontend) (verdict, why string) {
	switch {
	case f.Target == ruleset.Reject || f.Internal == ruleset.Reject && f.Target != ruleset.Drop:
		return reject(r.family), " has no endpoints"
	case f.Target == ruleset.Drop:
		return "-j DROP", " has no local endpoints"
	case f.Target == ruleset.ToLocal || f.Internal == ruleset.Drop:
		return "-j DROP", " was not forwarded"
	}
	return reject(r.family), " was not forwarded"
}

// external renders any frontend but a cluster IP.
func (r *serviceRenderer) external(f *ruleset.Frontend) {
	about := map[ruleset.Kind]string{ruleset.ExternalIP: " external IP", ruleset.LoadBalancerIP: " loadbalancer IP"}[f.Kind]
	port := destinationPort(r.protocol, f.Port)
	k := keyOf(f.Addr, r.s.Key.Protocol, f.Port)
	to, refused := toServices, refusedExternal
	if f.Kind == ruleset.NodePort {
		to, refused = toNodePorts, refusedNodePorts
	}
	if isPool(f.Target) || isPool(f.Internal) {
		target := r.externalChain(f)
		if len(f.Sources) != 0 {
			target = r.firewallChain(f, target)
		}
		d := dispatched{key: k, rule: join(r.to(f), comment(r.name, about), port, jump(target))}
		if f.Kind == ruleset.NodePort && slices.Contains(r.counters, LocalhostNodePorts) {
			d.before = join(destination(loopback(r.family)), r.to(f), comment(r.name, about), port, counted(LocalhostNodePorts), jump(target))
		}
		r.out.rules = append(r.out.rules, placed{to, d, false})
	}
	verdict, why := r.verdict(f)
	r.place(refused, k, false, r.to(f), comment(r.name, why), port, verdict)
	if len(f.Sources) == 0 {
		return
	}
	name := prefixFirewall + hashOf(r.variant(sourcesOf, f))
	if f.Target != ruleset.Reject {
		r.place(firewalled, k, false, r.to(f), comment(r.name, " traffic not accepted by "+name), port, "-j DROP")
		return
	}
	// KUBE-EXTERNAL-SERVICES, which is next, refuses connections from allowed sources. All
	// others are dropped.
	if r.fresh(filter, name) {
		c := chain{table: filter, name: name, rank: rankFirewall}
		for _, p := range f.Sources {
			c.rules = append(c.rules, join(source(p), comment(r.name, " source allowed"), "-j RETURN"))
		}
		c.rules = append(c.rules, comment(r.name, " source not allowed")+" -j DROP")
		r.add(c)
	}
	r.place(firewalled, k, false, r.to(f), comment(r.name, about), port, jump(name))
}

// variant returns the text that the name of f's chain is a hash of. Frontends for which
// aspect returns the same share a chain. The text is the Service's ID for the first, and
// usually only, such group.
func (r *serviceRenderer) variant(aspect func(*ruleset.Frontend) string, f *ruleset.Frontend) string {
	var seen []string
	want := aspect(f)
	for i := range r.s.Frontends {
		g := &r.s.Frontends[i]
		if g.Kind == ruleset.ClusterIP || aspect(g) == "" {
			continue
		}
		if a := aspect(g); !slices.Contains(seen, a) {
			seen = append(seen, a)
		}
	}
	if i := slices.Index(seen, want); i > 0 {
		return r.id + "#" + strconv.Itoa(i)
	}
	return r.id
}

// treatmentOf returns the aspect in which the chains for external addresses differ.
func treatmentOf(f *ruleset.Frontend) string {
	return string([]byte{byte(f.Target), byte(f.Internal), byte(f.Masquerade)})
}

// sourcesOf returns the aspect in which the chains that restrict sources differ.
func sourcesOf(f *ruleset.Frontend) string {
	if len(f.Sources) == 0 {
		return ""
	}
	return treatmentOf(f) + fmt.Sprint(f.Sources)
}

// fresh reports whether a chain has not been rendered yet.
func (r *serviceRenderer) fresh(t table, name string) bool {
	return !slices.ContainsFunc(r.out.chains, func(c chain) bool { return c.rank > rankService && c.table == t && c.name == name })
}

// externalChain renders the chain for external addresses, and returns its name.
func (r *serviceRenderer) externalChain(f *ruleset.Frontend) string {
	c := chain{table: nat, name: prefixExternal + hashOf(r.variant(treatmentOf, f)), rank: rankExternal}
	if !r.fresh(nat, c.name) {
		return c.name
	}
	leave := func(t ruleset.Target) string {
		if isPool(t) {
			return jump(r.poolChain(t))
		}
		return "-j RETURN"
	}
	why := func(what string) string { return comment(what, r.name, " external destinations") }
	if f.ShortCircuit() {
		for _, pods := range r.pods {
			c.rules = append(c.rules, join(pods, why("pod traffic for "), leave(f.Internal)))
		}
		if isPool(f.Internal) {
			c.rules = append(c.rules, join(why("masquerade LOCAL traffic for "), "-m addrtype --src-type LOCAL", jump(chainMarkMasq)))
		}
		c.rules = append(c.rules, join(why("route LOCAL traffic for "), "-m addrtype --src-type LOCAL", leave(f.Internal)))
	} else if f.Masquerade == ruleset.MasqueradeAlways {
		c.rules = append(c.rules, join(why("masquerade traffic for "), jump(chainMarkMasq)))
	}
	if isPool(f.Target) {
		c.rules = append(c.rules, leave(f.Target))
	}
	r.add(c)
	return c.name
}

// firewallChain renders the chain that accepts allowed sources, and returns its name.
func (r *serviceRenderer) firewallChain(f *ruleset.Frontend, next string) string {
	c := chain{table: nat, name: prefixFirewall + hashOf(r.variant(sourcesOf, f)), rank: rankFirewall}
	if !r.fresh(nat, c.name) {
		return c.name
	}
	about := comment(r.name, " loadbalancer IP")
	for _, p := range f.Sources {
		src := ""
		if p.Bits() != 0 {
			src = source(p)
		}
		c.rules = append(c.rules, join(src, about, jump(next)))
	}
	c.rules = append(c.rules, comment("other traffic to "+r.name+" will be dropped by "+chainFirewall))
	r.add(c)
	return c.name
}
