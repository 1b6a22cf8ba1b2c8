package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
	v1 "k8s.io/api/core/v1"
)

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

type serviceRenderer struct {
	*settings
	pods     []string // the matches that recognize pods
	s        *ruleset.Port
	id, name string
	protocol string
	out      rendered
	names    map[string]bool
}

var pools = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// ignored returns what the rules do not do although s asks for it, or "".
func (c *settings) ignored(s *ruleset.Port) string {
	switch {
	case c.noSCTP && s.Key.Protocol == v1.ProtocolSCTP:
		return "service has no rules, the system lacks the match sctp"
	case c.noAffinity && s.Spec.Affinity != 0:
		return "service has no client affinity, the system lacks the match recent"
	case s.Hash() != tracker.HashNone:
		return "endpoints are chosen at random, not by a hash"
	}
	return ""
}

func renderService(c *settings, pods []string, s *ruleset.Port) rendered {
	r := serviceRenderer{
		settings: c, pods: pods, s: s,
		id: serviceID(s.Key), name: s.Key.ServicePortName.String(), protocol: iptext.Protocol(s.Key.Protocol),
	}
	if c.noSCTP && s.Key.Protocol == v1.ProtocolSCTP {
		return r.out
	}
	for _, t := range pools {
		r.pool(t)
	}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Kind == ruleset.KindClusterIP {
			r.clusterIP(f)
		} else {
			r.external(f)
		}
	}
	if p := s.Spec.HealthCheckNodePort; p != 0 {
		// The other ports of the Service have the same health check node port.
		r.place(healthNodePorts, keyOf(netip.Addr{}, protocols[0], p), true, "-p tcp",
			iptext.Comment(s.Key.Namespace, "/", s.Key.Name, " health check node port"), iptext.DestinationPort("tcp", p), "-j ACCEPT")
	}
	return r.out
}

// maxAffinity is the longest affinity timeout. xt_recent multiplies its seconds by the
// ticks of the clock in 32 bits.
const maxAffinity = 48 * 24 * time.Hour

func (r *serviceRenderer) add(c chain) { r.out.chains = append(r.out.chains, c) }

func (r *serviceRenderer) place(d int, k key, shared bool, rule ...string) {
	r.out.rules = append(r.out.rules, placed{d, dispatched{key: k, rule: iptext.Join(rule...)}, shared})
}

// poolChain returns the name of the chain that chooses among a pool's endpoints.
func (r *serviceRenderer) poolChain(t ruleset.Target) string {
	if t == ruleset.TargetLocal {
		return prefixLocal + hashOf(r.id)
	}
	return prefixService + hashOf(r.id)
}

func isPool(t ruleset.Target) bool { return t == ruleset.TargetCluster || t == ruleset.TargetLocal }

// pool renders the endpoints of one pool and the choice among them, if a frontend uses
// the pool.
func (r *serviceRenderer) pool(t ruleset.Target) {
	used := slices.ContainsFunc(r.s.Frontends, func(f ruleset.Frontend) bool { return f.Target == t || f.Internal == t })
	if !used {
		return
	}
	c := chain{table: nat, name: r.poolChain(t), rank: rankService}
	for i := range r.s.Frontends {
		if f := &r.s.Frontends[i]; f.Kind == ruleset.KindClusterIP && f.Target == t {
			c.rules = append(c.rules, r.masquerade(f)...)
		}
	}
	endpoints := r.s.Pool(t)
	choices := make([]choice, len(endpoints))
	if r.names == nil {
		r.names = make(map[string]bool, len(endpoints))
	}
	recent := ""
	if r.s.Spec.Affinity != 0 && !r.noAffinity {
		recent = "--mask 255.255.255.255 --rsource"
		if r.family == tracker.IPv6 {
			recent = "--mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource"
		}
	}
	for i, ep := range endpoints {
		name := prefixEndpoint + hashOf(r.id, ep.Addr.String())
		if choices[i] = (choice{name, max(1, int(ep.Weight))}); !r.names[name] {
			r.names[name] = true
			r.add(r.endpointChain(name, ep, recent))
		}
	}
	choose := func(root string, draw func([]choice) []string) {
		rules, groups := choose(choices, root, 0, draw)
		for _, g := range groups {
			r.add(g)
		}
		c.rules = append(c.rules, rules...)
	}
	if recent != "" {
		seconds := strconv.FormatInt(int64((r.s.Spec.Affinity+time.Second-1)/time.Second), 10)
		choose(c.name+"#recent", func(choices []choice) (rules []string) {
			for _, to := range choices {
				rule := iptext.Jump(to.chain)
				if !strings.HasPrefix(to.chain, prefixGroup) {
					rule = "-m recent --rcheck --seconds " + seconds + " --reap --name " + to.chain + " " + recent + " " + rule
				}
				rules = append(rules, rule)
			}
			return rules
		})
	}
	choose(c.name, draw)
	r.add(c)
}

// endpointChain returns the chain that translates connections to an endpoint. recent is the rest of the match that
// remembers a client, "" without client affinity.
func (r *serviceRenderer) endpointChain(name string, ep *tracker.Endpoint, recent string) chain {
	c := chain{nat, name, []string{iptext.Join(iptext.Source(iptext.Host(ep.Addr.Addr())), iptext.Jump(chainMarkMasq))}, rankEndpoint}
	set := ""
	if recent != "" {
		set = "-m recent --set --name " + name + " " + recent
	}
	c.rules = append(c.rules, iptext.Join("-p "+r.protocol, set, "-j DNAT --to-destination "+ep.Addr.String()))
	return c
}

// masquerade returns the rules that mark connections to a cluster IP that must be
// masqueraded.
func (r *serviceRenderer) masquerade(f *ruleset.Frontend) []string {
	rule := func(src, in, to string) []string {
		return []string{iptext.Join(src, iptext.Destination(iptext.Host(f.Addr)), in, "-p "+r.protocol, iptext.Comment(r.name, " cluster IP"),
			r.port(f), iptext.Jump(to))}
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

func (r *serviceRenderer) clusterIP(f *ruleset.Frontend) {
	k := keyOf(f.Addr, r.s.Key.Protocol, f.Port)
	// In the filter table, this rule refuses the ports that no Service has.
	r.place(clusterIPs, key(f.Addr.AsSlice()), true, iptext.Destination(iptext.Host(f.Addr)), iptext.Comment("no such port of this cluster IP"), iptext.Reject(r.family))
	if isPool(f.Target) {
		r.place(toServices, k, false, r.to(f), iptext.Comment(r.name, " cluster IP"), r.port(f), iptext.Jump(r.poolChain(f.Target)))
	}
	if f.Target != ruleset.TargetCluster {
		verdict, why := r.verdict(f)
		r.place(refusedAddresses, k, false, r.to(f), iptext.Comment(r.name, why), r.port(f), verdict)
	}
}

// to returns the match of a frontend's address and protocol; the match of the port comes after the comment.
func (r *serviceRenderer) to(f *ruleset.Frontend) string {
	if f.Kind == ruleset.KindNodePort {
		return "-p " + r.protocol
	}
	return iptext.Destination(iptext.Host(f.Addr)) + " -p " + r.protocol
}

func (r *serviceRenderer) port(f *ruleset.Frontend) string {
	return iptext.DestinationPort(r.protocol, f.Port)
}

// verdict returns the target, in the filter table, for connections to f that were not forwarded, and the reason. The
// rule exists even while all connections are forwarded: a packet that arrives between the changes of the two tables
// must not leave for an address that no host has.
func (r *serviceRenderer) verdict(f *ruleset.Frontend) (verdict, why string) {
	switch {
	case f.Target == ruleset.TargetReject || f.Internal == ruleset.TargetReject && f.Target != ruleset.TargetDrop:
		return iptext.Reject(r.family), " has no endpoints"
	case f.Target == ruleset.TargetDrop:
		return "-j DROP", " has no local endpoints"
	case f.Target == ruleset.TargetLocal || f.Internal == ruleset.TargetDrop:
		return "-j DROP", " was not forwarded"
	}
	return iptext.Reject(r.family), " was not forwarded"
}

// external renders any frontend but a cluster IP.
func (r *serviceRenderer) external(f *ruleset.Frontend) {
	about := map[ruleset.Kind]string{ruleset.KindExternalIP: " external IP", ruleset.KindLoadBalancerIP: " loadbalancer IP"}[f.Kind]
	port := r.port(f)
	k := keyOf(f.Addr, r.s.Key.Protocol, f.Port)
	to, refused := toServices, refusedAddresses
	if f.Kind == ruleset.KindNodePort {
		to, refused = toNodePorts, refusedNodePorts
	}
	if isPool(f.Target) || isPool(f.Internal) {
		target := r.externalChain(f)
		if len(f.Sources) != 0 {
			target = r.firewallChain(f, target)
		}
		d := dispatched{key: k, rule: iptext.Join(r.to(f), iptext.Comment(r.name, about), port, iptext.Jump(target))}
		if f.Kind == ruleset.KindNodePort && slices.Contains(r.counters, LocalhostNodePorts) {
			d.before = iptext.Join(iptext.Destination(iptext.Loopback(r.family)), r.to(f), iptext.Comment(r.name, about), port, counted(LocalhostNodePorts), iptext.Jump(target))
		}
		r.out.rules = append(r.out.rules, placed{to, d, false})
	}
	if restrict := r.restrict(f, about); restrict != "" {
		r.place(firewalled, k, false, restrict)
	}
	verdict, why := r.verdict(f)
	r.place(refused, k, false, r.to(f), iptext.Comment(r.name, why), port, verdict)
}

// restrict returns the rule of table filter that drops connections to f from sources that are not allowed, or "".
func (r *serviceRenderer) restrict(f *ruleset.Frontend, about string) string {
	if len(f.Sources) == 0 || f.Target == ruleset.TargetReject && len(f.Sources) > flatSources {
		return "" // in the second case, sources that are not allowed are refused, too
	}
	name := prefixFirewall + hashOf(r.variant(sourcesOf, f))
	if f.Target != ruleset.TargetReject {
		return iptext.Join(r.to(f), iptext.Comment(r.name, " traffic not accepted by "+name), r.port(f), "-j DROP")
	}
	// Connections from allowed sources pass, or the next rule, which refuses all, refuses them.
	if r.fresh(filter, name) {
		r.firewall(filter, name, f.Sources, iptext.Comment(r.name, " source allowed")+" -j RETURN", iptext.Comment(r.name, " source not allowed")+" -j DROP")
	}
	return iptext.Join(r.to(f), iptext.Comment(r.name, about), r.port(f), iptext.Jump(name))
}

// variant returns the text that the name of f's chain is a hash of. Frontends with equal aspects share a chain. The
// text is the Service's ID for the first, and usually only, such group.
func (r *serviceRenderer) variant(aspect func(*ruleset.Frontend) string, f *ruleset.Frontend) string {
	var seen []string
	want := aspect(f)
	for i := range r.s.Frontends {
		g := &r.s.Frontends[i]
		if g.Kind == ruleset.KindClusterIP || aspect(g) == "" {
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
			return iptext.Jump(r.poolChain(t))
		}
		return "-j RETURN"
	}
	why := func(what string) string { return iptext.Comment(what, r.name, " external destinations") }
	if f.ShortCircuit() {
		for _, pods := range r.pods {
			c.rules = append(c.rules, iptext.Join(pods, why("pod traffic for "), leave(f.Internal)))
		}
		if isPool(f.Internal) {
			c.rules = append(c.rules, iptext.Join(why("masquerade LOCAL traffic for "), "-m addrtype --src-type LOCAL", iptext.Jump(chainMarkMasq)))
		}
		c.rules = append(c.rules, iptext.Join(why("route LOCAL traffic for "), "-m addrtype --src-type LOCAL", leave(f.Internal)))
	} else if f.Masquerade == ruleset.MasqueradeAlways {
		c.rules = append(c.rules, iptext.Join(why("masquerade traffic for "), iptext.Jump(chainMarkMasq)))
	}
	if isPool(f.Target) {
		c.rules = append(c.rules, leave(f.Target))
	}
	r.add(c)
	return c.name
}

// firewallChain renders the chain that accepts allowed sources, and returns its name.
func (r *serviceRenderer) firewallChain(f *ruleset.Frontend, next string) string {
	name := prefixFirewall + hashOf(r.variant(sourcesOf, f))
	if r.fresh(nat, name) {
		r.firewall(nat, name, f.Sources, iptext.Join(iptext.Comment(r.name, " loadbalancer IP"), iptext.Jump(next)),
			iptext.Comment("other traffic to "+r.name+" will be dropped by "+chainFirewall))
	}
	return name
}

// flatSources is the most sources of one chain. More are divided, so that each chain fits into one message
// to the kernel: tracker allows 100,000.
const flatSources = 250

// firewall renders a chain that has one rule for each source and then one for the rest.
func (r *serviceRenderer) firewall(t table, name string, sources []netip.Prefix, rule, rest string) {
	c := chain{table: t, name: name, rank: rankFirewall}
	for part := range slices.Chunk(sources, flatSources) {
		var rules []string
		for _, p := range part {
			src := ""
			if p.Bits() != 0 {
				src = iptext.Source(p)
			}
			rules = append(rules, iptext.Join(src, rule))
		}
		if len(sources) > flatSources {
			d := chain{t, prefixFirewall + hashOf(name, strconv.Itoa(len(c.rules))), rules, rankSources}
			r.add(d)
			rules = []string{iptext.Jump(d.name)}
		}
		c.rules = append(c.rules, rules...)
	}
	c.rules = append(c.rules, rest)
	r.add(c)
}
