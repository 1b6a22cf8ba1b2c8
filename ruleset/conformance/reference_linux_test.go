package conformance

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// reference is a very simple backend: on every change it writes the whole ruleset as
// a script for the nft program, with a chain for every pool. It validates the suite,
// and the suite validates it. It shares no code with package nftables.
//
// It uses no anonymous sets: a replaced set is empty for packets that traverse the
// chain at that moment.
type reference struct {
	faults   faults
	node     *ruleset.Node
	services map[tracker.Key]*ruleset.Port
	// chains and sets hold the names in the last script.
	chains, sets map[string]bool
}

// faults are the faults of a broken reference; see also broken.
type faults struct {
	noHairpin, noClosedPorts, noUnallocated, uneven bool
	// losesFirst drops the first packet of every TCP connection from other hosts.
	losesFirst bool
	// stopsOwn drops packets of the node to its own addresses on their way out.
	stopsOwn bool
	// refuseUnknown refuses packets to unknown addresses instead of dropping them.
	refuseUnknown bool
	// forgetful rebuilds everything on every change.
	forgetful bool
	// gap is the time without any rules on every change.
	gap time.Duration
}

const markBit = "0x4000"

func (r *reference) Apply(ctx context.Context, d *ruleset.Delta) error {
	if d.Full {
		r.services = map[tracker.Key]*ruleset.Port{}
	}
	for _, c := range d.Changes {
		if c.New == nil {
			delete(r.services, c.Key)
		} else {
			r.services[c.Key] = c.New
		}
	}
	r.node = d.Node
	if r.faults.gap != 0 && r.chains != nil {
		if err := nft(ctx, "delete table inet reference\n"); err != nil {
			return err
		}
		time.Sleep(r.faults.gap)
		r.chains = nil
	}
	if r.faults.forgetful {
		r.chains = nil
	}
	s := &script{chains: map[string][]string{}, sets: map[string]string{}}
	r.render(s)

	var b strings.Builder
	fmt.Fprintln(&b, "add table inet reference")
	if r.chains == nil {
		fmt.Fprintln(&b, "delete table inet reference\nadd table inet reference")
	} else {
		fmt.Fprintln(&b, "flush table inet reference")
	}
	for name, spec := range s.sets {
		fmt.Fprintf(&b, "add set inet reference %s { %s; }\n", name, spec)
	}
	for name := range s.chains {
		fmt.Fprintf(&b, "add chain inet reference %s %s\n", name, hooks[name])
	}
	for name, rules := range s.chains {
		for _, rule := range rules {
			fmt.Fprintf(&b, "add rule inet reference %s %s\n", name, rule)
		}
	}
	for name := range r.chains {
		if s.chains[name] == nil {
			fmt.Fprintf(&b, "delete chain inet reference %s\n", name)
		}
	}
	for name := range r.sets {
		if _, ok := s.sets[name]; !ok {
			fmt.Fprintf(&b, "delete set inet reference %s\n", name)
		}
	}
	if err := nft(ctx, b.String()); err != nil {
		return err
	}
	r.chains, r.sets = map[string]bool{}, map[string]bool{}
	for name := range s.chains {
		r.chains[name] = true
	}
	for name := range s.sets {
		r.sets[name] = true
	}
	return nil
}

// nft runs a script, in one transaction.
func nft(ctx context.Context, script string) error {
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// hooks lists the base chains, by the origin of their packets: from the network, or
// from the node itself.
var hooks = map[string]string{
	"firewall_in":  "{ type filter hook prerouting priority -110; }",
	"firewall_out": "{ type filter hook output priority -110; }",
	"nat_in":       "{ type nat hook prerouting priority -100; }",
	"nat_out":      "{ type nat hook output priority -100; }",
	"filter_fwd":   "{ type filter hook forward priority 0; }",
	"filter_in":    "{ type filter hook input priority 0; }",
	"filter_out":   "{ type filter hook output priority 0; }",
	"nat_post":     "{ type nat hook postrouting priority 100; }",
}

type script struct {
	chains map[string][]string
	sets   map[string]string
}

func (s *script) add(chain, format string, args ...any) {
	s.chains[chain] = append(s.chains[chain], fmt.Sprintf(format, args...))
}

func (r *reference) render(s *script) {
	for name := range hooks {
		s.chains[name] = []string{}
	}
	if r.faults.losesFirst {
		for f, fam := range nfproto {
			s.sets["first_"+fam] = fmt.Sprintf("type %s_addr . inet_service . %[1]s_addr . inet_service; flags dynamic,timeout; timeout 10m; size 65535", fam)
			flow := ip(f) + " saddr . tcp sport . " + ip(f) + " daddr . tcp dport"
			s.add("firewall_in", "tcp flags & (syn | ack) == syn %s != @first_%s add @first_%[2]s { %[1]s } drop", flow, fam)
		}
	}
	s.add("nat_post", "meta mark & %s != 0 meta mark set meta mark & 0xffffbfff masquerade fully-random", markBit)
	for _, key := range slices.SortedFunc(maps.Keys(r.services), tracker.Key.Compare) {
		svc := r.services[key]
		// NodePorts come last: a service address may be bound to the node.
		for i := range svc.Frontends {
			if svc.Frontends[i].Kind != ruleset.KindNodePort {
				r.frontend(s, svc, &svc.Frontends[i], "")
			}
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(r.services), tracker.Key.Compare) {
		svc := r.services[key]
		for i := range svc.Frontends {
			if f := &svc.Frontends[i]; f.Kind == ruleset.KindNodePort {
				for _, addr := range r.nodePortMatches(key.Family) {
					r.frontend(s, svc, f, addr)
				}
			}
		}
		r.pools(s, svc)
	}
	for _, chain := range []string{"filter_fwd", "filter_out"} {
		s.add(chain, "fib daddr type local accept") // a cluster IP of the node itself
	}
	for _, key := range slices.SortedFunc(maps.Keys(r.services), tracker.Key.Compare) {
		svc := r.services[key]
		if f := svc.Frontends; len(f) != 0 && f[0].Kind == ruleset.KindClusterIP && !r.faults.noClosedPorts {
			for _, chain := range []string{"filter_fwd", "filter_out"} {
				s.add(chain, "%s daddr %s ct state new reject", ip(key.Family), f[0].Addr)
			}
		}
	}
	if r.faults.refuseUnknown {
		s.add("filter_fwd", "ct state new reject")
	}
	for _, p := range r.node.ServiceCIDRs {
		if r.faults.noUnallocated {
			break
		}
		for _, chain := range []string{"filter_fwd", "filter_out"} {
			s.add(chain, "%s daddr %s ct state new ct status ! dnat drop", ip(tracker.FamilyOf(p.Addr())), p)
		}
	}
}

func ip(f tracker.Family) string {
	if f == tracker.IPv6 {
		return "ip6"
	}
	return "ip"
}

// nodePortMatches returns matches of the addresses that serve NodePorts.
func (r *reference) nodePortMatches(f tracker.Family) (out []string) {
	n := r.node.NodePorts(f)
	if n.All {
		lo := "127.0.0.0/8"
		if f == tracker.IPv6 {
			lo = "::1"
		}
		return []string{fmt.Sprintf("fib daddr type local %s daddr != %s", ip(f), lo)}
	}
	for _, p := range n.Prefixes {
		out = append(out, fmt.Sprintf("fib daddr type local %s daddr %s", ip(f), p))
	}
	return out
}

// frontend writes the rules of one frontend. addr matches its address; "" means the
// frontend's own.
func (r *reference) frontend(s *script, svc *ruleset.Port, f *ruleset.Frontend, addr string) {
	fam := ip(svc.Key.Family)
	if addr == "" {
		addr = fmt.Sprintf("%s daddr %s", fam, f.Addr)
	}
	match := fmt.Sprintf("meta nfproto %s %s %s dport %d", nfproto[svc.Key.Family], addr, strings.ToLower(string(svc.Key.Protocol)), f.Port)
	if len(f.Sources) != 0 {
		check := fmt.Sprintf("s%d_%d_%s_sources", svc.ID, f.Kind, sanitize(f.Addr))
		for _, p := range f.Sources {
			s.add(check, "%s saddr %s return", fam, p)
		}
		s.add(check, "drop")
		for _, chain := range []string{"firewall_in", "firewall_out"} {
			s.add(chain, "%s ct state new jump %s", match, check)
		}
	}
	for _, hook := range []string{"in", "out"} {
		fromNode := hook == "out"
		// The last rule is for all other clients.
		for _, who := range append(r.fromPods(svc.Key.Family, fromNode), "") {
			pods := who != ""
			target, do := f.TargetFor(pods || fromNode), ""
			if f.Masquerade.Applies(pods, fromNode) {
				do = "meta mark set meta mark | " + markBit
			}
			switch target {
			case ruleset.TargetCluster:
				s.add("nat_"+hook, "%s %s %s goto s%d_cluster", match, who, do, svc.ID)
			case ruleset.TargetLocal:
				s.add("nat_"+hook, "%s %s %s goto s%d_local", match, who, do, svc.ID)
			case ruleset.TargetReject, ruleset.TargetDrop:
				// The unchanged packet passes the filters.
				s.add("nat_"+hook, "%s %s return", match, who)
				verdict := "drop"
				if target == ruleset.TargetReject {
					verdict = "reject"
				}
				if fromNode {
					// Packets of the node to itself pass filter_in.
					leaves := "fib daddr type != local"
					if r.faults.stopsOwn {
						leaves = ""
					}
					s.add("filter_out", "%s %s %s ct state new %s", match, who, leaves, verdict)
					break
				}
				for _, chain := range []string{"filter_fwd", "filter_in"} {
					s.add(chain, "%s %s ct state new %s", match, who, verdict)
				}
			}
		}
	}
}

var nfproto = map[tracker.Family]string{tracker.IPv4: "ipv4", tracker.IPv6: "ipv6"}

// fromPods returns matches of packets from local pods.
func (r *reference) fromPods(f tracker.Family, fromNode bool) (out []string) {
	l := r.node.LocalTraffic
	switch {
	case l.Bridge != "" && !fromNode:
		return []string{fmt.Sprintf("iifname %q", l.Bridge)}
	case l.InterfacePrefix != "" && !fromNode:
		return []string{fmt.Sprintf("iifname %q", l.InterfacePrefix+"*")}
	}
	for _, p := range l.CIDRs {
		if tracker.FamilyOf(p.Addr()) == f {
			out = append(out, fmt.Sprintf("%s saddr %s", ip(f), p))
		}
	}
	return out
}

// pools writes the chains of the Service's pools.
func (r *reference) pools(s *script, svc *ruleset.Port) {
	fam, proto := ip(svc.Key.Family), strings.ToLower(string(svc.Key.Protocol))
	affinity := svc.Spec.Affinity.Milliseconds()
	send := func(ep *tracker.Endpoint) string {
		do := fmt.Sprintf("meta l4proto %s dnat %s to %s", proto, fam, ep.Addr)
		if affinity != 0 {
			do = fmt.Sprintf("update @%s { %s saddr } %s", clients(svc, ep), fam, do)
		}
		return do
	}
	for pool, eps := range map[string][]*tracker.Endpoint{"cluster": svc.Selection.Cluster, "local": svc.Selection.Local} {
		chain := fmt.Sprintf("s%d_%s", svc.ID, pool)
		s.chains[chain] = []string{}
		if affinity != 0 {
			for _, ep := range eps {
				s.add(chain, "%s saddr @%s %s", fam, clients(svc, ep), send(ep))
			}
		}
		if r.faults.uneven && len(eps) != 0 {
			s.add(chain, "numgen random mod 8 == 0 %s", send(eps[0]))
		}
		left := 0
		for _, ep := range eps {
			left += int(ep.Weight)
		}
		for _, ep := range eps {
			if weight := int(ep.Weight); left > weight {
				s.add(chain, "numgen random mod %d < %d %s", left, weight, send(ep))
				left -= weight
			} else {
				s.add(chain, "%s", send(ep))
			}
		}
	}
	for _, ep := range svc.Selection.Reachable {
		if affinity != 0 {
			s.sets[clients(svc, ep)] = fmt.Sprintf("type %s_addr; flags dynamic,timeout; timeout %dms", nfproto[svc.Key.Family], affinity)
		}
		if a := ep.Addr.Addr(); !r.faults.noHairpin {
			s.add("nat_post", "ct status dnat %s saddr %s %s daddr %s masquerade fully-random", fam, a, fam, a)
		}
	}
}

// clients returns the name of the set of clients with affinity to an endpoint.
func clients(svc *ruleset.Port, ep *tracker.Endpoint) string {
	return fmt.Sprintf("s%d_%dms_%s", svc.ID, svc.Spec.Affinity.Milliseconds(), sanitize(ep.Addr))
}

// sanitize converts an address to a part of a name.
func sanitize(addr fmt.Stringer) string {
	return strings.NewReplacer(":", "_", "[", "", "]", "", " ", "_").Replace(addr.String())
}
