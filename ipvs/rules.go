package ipvs

import (
	"fmt"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// rules renders the netfilter rules. Their number depends on the node's configuration alone. Rules that drop a
// packet, or select another virtual server for it, are in mangle, because a packet to a Service meets, in this order,
//
//	arriving:           nat PREROUTING, mangle INPUT, filter INPUT, IPVS
//	from the node:      mangle OUTPUT, nat OUTPUT, IPVS
//	forwarded by IPVS:  (OUTPUT again), mangle POSTROUTING, nat POSTROUTING
//	forwarded without:  mangle FORWARD, only while its address is missing on the device
type rules struct {
	family tracker.Family
	// mark is the masquerade mark, 0 if nothing is masqueraded.
	mark uint32
	node *ruleset.Node
}

func (c Config) rules(f tracker.Family, n *ruleset.Node) rules {
	return rules{f, uint32(c.MasqueradeMark), n}
}

// validate returns an error if an interface name of the node is not one word of a rule.
func (r rules) validate() error {
	_, err := iptext.PodMatches(r.node.LocalTraffic, r.family)
	return err
}

// chain is one of the backend's chains with its rules, each without "-A NAME".
type chain struct {
	name  string
	rules []string
}

// jump is a rule that leads from a built-in chain to one of the backend's chains.
type jump struct{ from, rule string }

// table holds the backend's jumps and chains in one of the kernel's tables.
type table struct {
	name   string
	jumps  []jump
	chains []chain
}

// tables renders all rules of a family. It is deterministic.
func (r rules) tables() []table { return []table{r.mangle(), r.nat(), r.filter()} }

func (r rules) set(s setID, dirs string) string {
	return fmt.Sprintf("-m set --match-set %s %s", s.name(r.family), dirs)
}

// pods returns a match for each way in which packets of this node's pods are recognized.
func (r rules) pods() []string {
	matches, _ := iptext.PodMatches(r.node.LocalTraffic, r.family) // validate has no error
	return matches
}

func (r rules) unlessPods(then ...string) (out []string) {
	for _, p := range r.pods() {
		out = append(out, p+" -j RETURN")
	}
	return append(out, then...)
}

const (
	notNew = "-m conntrack ! --ctstate NEW -j RETURN"
	isNew  = "-m conntrack --ctstate NEW"
)

// mangle decides which packets reach IPVS, and with which mark.
func (r rules) mangle() table {
	firewall := r.set(setLoadBalancerFW, "dst,dst") + " -j KUBE-PROXY-FIREWALL"
	noLocal := []string{
		"-m mark --mark " + marksText + " -j RETURN",
		r.set(setNoLocal, "dst,dst") + " " + iptext.Comment("only other nodes have endpoints") + " -j DROP",
	}
	internal := r.set(setShortCircuit, "dst,dst") + " -j KUBE-SHORT-CIRCUIT"
	in := []string{notNew, firewall}
	for _, p := range r.pods() {
		in = append(in, p+" "+internal)
	}
	in = append(in, noLocal...)
	sent := []string{
		"-m ipvs ! --ipvs -j RETURN",
		fmt.Sprintf("-m mark ! --mark %#[1]x/%#[1]x -j RETURN", markDrop),
		fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", markBits),
	}
	sent = append(sent, r.unlessPods(fmt.Sprintf("-m addrtype --src-type LOCAL -j MARK --set-xmark %#x/%#x", r.mark, r.mark))...)
	out := append([]string{"-m ipvs --ipvs -j RETURN", notNew, firewall, internal}, noLocal...)

	return table{
		name: "mangle",
		jumps: []jump{
			{"INPUT", iptext.Comment("kubernetes service portals") + " -j KUBE-IPVS-IN"},
			{"FORWARD", iptext.Comment("kubernetes service portals") + " -j KUBE-IPVS-ASTRAY"},
			{"OUTPUT", iptext.Comment("kubernetes service portals") + " -j KUBE-IPVS-OUT"},
			{"POSTROUTING", iptext.Comment("kubernetes service portals") + " -j KUBE-IPVS-SENT"},
		},
		chains: []chain{
			{"KUBE-IPVS-IN", in},
			{"KUBE-IPVS-OUT", out},
			// If an address is missing on the device, the kernel routes its packets elsewhere. It stops tracking a
			// masqueraded connection if a packet leaves by another device than before (nf_nat_oif_changed of
			// net/netfilter/nf_nat_core.c). So these packets are dropped until the address is back.
			{"KUBE-IPVS-ASTRAY", []string{
				r.set(setIPs, "dst") + " " + iptext.Comment("drop packets to Service addresses that the node lacks") + " -j DROP",
			}},
			{"KUBE-PROXY-FIREWALL", []string{
				r.set(setLoadBalancerSourceCIDR, "dst,dst,src") + " -j RETURN",
				r.set(setLoadBalancerSourceIP, "dst,dst,src") + " -j RETURN",
				iptext.Comment("not in loadBalancerSourceRanges") + " -j DROP",
			}},
			{"KUBE-SHORT-CIRCUIT", []string{
				"-j SET --map-set " + setShortCircuit.name(r.family) + " dst,dst --map-mark",
				fmt.Sprintf("-m mark --mark %#x ", markDrop) + iptext.Comment("no endpoint can be used") + " -j DROP",
			}},
			// After IPVS, these rules replace the mark that named a virtual server with the masquerade mark.
			{"KUBE-IPVS-SENT", sent},
		},
	}
}

// nat decides which packets are masqueraded, and masquerades them.
func (r rules) nat() table {
	loopback := "127.0.0.0/8"
	if r.family == tracker.IPv6 {
		loopback = "::1/128"
	}
	services := []string{
		// There is no virtual server at a loopback address, but the sets of ports match there, and masqueraded
		// packets to it would be lost.
		"-d " + loopback + " -j RETURN",
		"-m mark --mark " + marksText + " -j RETURN",
	}
	cluster := r.set(setClusterIP, "dst,dst")
	switch {
	case r.node.MasqueradeAll:
		services = append(services, cluster+" -j KUBE-IPVS-MARK-MASQ")
	case r.node.LocalTraffic.Detects(r.family):
		services = append(services, cluster+" -j KUBE-CLUSTER-IP")
	default:
		// The kernel may choose a cluster IP as the source of the node's own packets to it, which cannot be answered.
		services = append(services, cluster+" "+r.set(setIPs, "src")+" -j KUBE-IPVS-MARK-MASQ")
	}
	services = append(services,
		r.set(setLoadBalancer, "dst,dst")+" -j KUBE-LOAD-BALANCER",
		r.set(setExternalIP, "dst,dst")+" -j KUBE-IPVS-MARK-MASQ",
		r.set(setExternalIPLocal, "dst,dst")+" -j KUBE-IPVS-MARK-MASQ-NODE",
		"-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
	)
	var nodePort []string
	for _, p := range []struct {
		name       string
		all, local setID
		dirs       string
	}{
		{"tcp", setNodePortTCP, setNodePortLocalTCP, "dst"},
		{"udp", setNodePortUDP, setNodePortLocalUDP, "dst"},
		{"sctp", setNodePortSCTP, setNodePortLocalSCTP, "dst,dst"},
	} {
		nodePort = append(nodePort,
			"-p "+p.name+" "+r.set(p.local, p.dirs)+" -g KUBE-IPVS-MARK-MASQ-NODE",
			"-p "+p.name+" "+r.set(p.all, p.dirs)+" -j KUBE-IPVS-MARK-MASQ")
	}
	markMasq := []string{fmt.Sprintf("-j MARK --set-xmark %#x/%#x", r.mark, r.mark)}
	postrouting := []string{
		r.set(setLoopBack, "dst,dst,src") + " " + iptext.Comment("endpoints that reach themselves") + " -j MASQUERADE",
		fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", r.mark, r.mark),
		fmt.Sprintf("-j MARK --set-xmark %#x/%#x", 0, r.mark),
		iptext.Comment("kubernetes service traffic requiring SNAT") + " -j MASQUERADE --random-fully",
	}
	return table{
		name: "nat",
		jumps: []jump{
			{"PREROUTING", iptext.Comment("kubernetes service portals") + " -j KUBE-IPVS-SERVICES"},
			{"OUTPUT", iptext.Comment("kubernetes service portals") + " -j KUBE-IPVS-SERVICES"},
			{"POSTROUTING", iptext.Comment("kubernetes postrouting rules") + " -j KUBE-IPVS-POSTROUTING"},
		},
		chains: []chain{
			{"KUBE-IPVS-SERVICES", services},
			{"KUBE-CLUSTER-IP", r.unlessPods("-j KUBE-IPVS-MARK-MASQ")},
			{"KUBE-LOAD-BALANCER", []string{
				r.set(setLoadBalancerLocal, "dst,dst") + " -g KUBE-IPVS-MARK-MASQ-NODE",
				"-j KUBE-IPVS-MARK-MASQ",
			}},
			{"KUBE-NODE-PORT", nodePort},
			{"KUBE-IPVS-MARK-MASQ-NODE", r.unlessPods("-m addrtype --src-type LOCAL -j KUBE-IPVS-MARK-MASQ")},
			{"KUBE-IPVS-MARK-MASQ", markMasq},
			{"KUBE-IPVS-POSTROUTING", postrouting},
		},
	}
}

// filter protects the node's own ports and drops packets to addresses without a Service.
func (r rules) filter() table {
	icmp := "icmp"
	if r.family == tracker.IPv6 {
		icmp = "ipv6-icmp"
	}
	var forward, output []string
	for _, c := range inet.Prefixes(r.node.ServiceCIDRs, r.family) {
		drop := "-d " + c.String() + " " + isNew + " " + iptext.Comment("no Service has the address") + " -j DROP"
		forward = append(forward, drop)
		output = append(output, "-m ipvs ! --ipvs -m addrtype ! --dst-type LOCAL "+drop)
	}
	forward = append(forward, "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	in := []string{
		notNew,
		r.set(setNoEndpoints, "dst,dst") + " " + iptext.Comment("no endpoints") + " " + iptext.Reject(r.family),
		"-p " + icmp + " -j RETURN", "-m set ! --match-set " + setIPs.name(r.family) + " dst -j RETURN",
	}
	for _, s := range []setID{setClusterIP, setLoadBalancer, setExternalIP, setExternalIPLocal} {
		in = append(in, r.set(s, "dst,dst")+" -j RETURN")
	}
	in = append(in,
		r.set(setBoundExternal, "dst")+" "+iptext.Comment("not the port of a Service")+" -j DROP",
		iptext.Comment("not the port of a Service")+" "+iptext.Reject(r.family))
	return table{
		name: "filter",
		jumps: []jump{
			{"INPUT", iptext.Comment("kubernetes ipvs access filter") + " -j KUBE-IPVS-FILTER"},
			{"INPUT", iptext.Comment("kubernetes health check rules") + " -j KUBE-NODE-PORT"},
			{"FORWARD", iptext.Comment("kubernetes forwarding rules") + " -j KUBE-IPVS-FORWARD"},
			{"OUTPUT", iptext.Comment("kubernetes ipvs access filter") + " -j KUBE-IPVS-OUT-FILTER"},
		},
		chains: []chain{
			{"KUBE-IPVS-FILTER", in},
			{"KUBE-NODE-PORT", []string{"-p tcp " + r.set(setHealthCheckNodePort, "dst") + " " + iptext.Comment("Kubernetes health check node port") + " -j ACCEPT"}},
			{"KUBE-IPVS-FORWARD", forward},
			{"KUBE-IPVS-OUT-FILTER", output},
		},
	}
}

// restoreAll renders the input of iptables-restore that writes the tables. Jumps that are
// saved stay where they are.
func restoreAll(tables []table, saved iptext.Saved) string {
	var in iptext.Input
	for _, t := range tables {
		in.Begin(t.name)
		for _, c := range t.chains {
			in.Chain(c.name)
		}
		for _, c := range t.chains {
			for _, rule := range c.rules {
				in.Append(c.name, rule)
			}
		}
		for _, j := range slices.Backward(t.jumps) {
			if !slices.Contains(saved[t.name][j.from], j.rule) {
				in.Insert(j.from, j.rule)
			}
		}
		in.Commit()
	}
	return in.String()
}

// removeAll renders the input of iptables-restore that removes the saved parts of the
// tables. It returns "" if nothing of them is saved.
func removeAll(tables []table, saved iptext.Saved) string {
	var in iptext.Input
	for _, t := range tables {
		have := saved[t.name]
		var remove []string
		for _, j := range t.jumps {
			for _, rule := range have[j.from] {
				if rule == j.rule {
					remove = append(remove, iptext.DeleteCommand(j.from, j.rule))
				}
			}
		}
		for _, verb := range []string{"-F ", "-X "} {
			for _, c := range t.chains {
				if _, ok := have[c.name]; ok {
					remove = append(remove, verb+c.name)
				}
			}
		}
		if len(remove) == 0 {
			continue
		}
		in.Begin(t.name)
		for _, c := range remove {
			in.Command(c)
		}
		in.Commit()
	}
	return in.String()
}

func ownRules(tables []table, saved iptext.Saved) string {
	var out iptext.Input
	for _, t := range tables {
		out.Begin(t.name)
		own := map[string][]string{}
		for _, c := range t.chains {
			own[c.name] = saved[t.name][c.name]
		}
		for from, rules := range saved[t.name] {
			for _, rule := range rules {
				if slices.Contains(t.jumps, jump{from, rule}) {
					own[from] = append(own[from], rule)
				}
			}
		}
		for _, name := range slices.Sorted(maps.Keys(own)) {
			for _, rule := range own[name] {
				out.Append(name, rule)
			}
		}
	}
	return out.String()
}
