package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// The rules in this package are written as the nft tool lists them, for IPv4: complete makes "ip6" of "ip", and sets
// $mark, the bit of the packet mark that requests masquerading, $unmarked, the other bits, and $packets,
// Offload.AfterPackets. compile encodes them for the kernel.
//
// A dispatch key is in the packet's priority (see package layout): fff0:0 covers the handler, f:ffff the pool, and
// 8000:0 is in every dispatch key. ffff:0 covers the pool of a sticky key, and 0:ffff the handler or the endpoint.

// fixedChains are the chains that do not depend on the Services. A chain comes before the chains that go to it.
//
// The base chains for NAT come directly before netfilter's priorities for destination NAT and source NAT
// (linux/netfilter_ipv4.h, NF_IP_PRI_*), at which iptables-nft and other programs have theirs: of chains with the
// same priority, the one that was created last comes first. If a transaction commits between a packet's two look-ups,
// the second may fail. The -again chains, one priority later, repeat both against the new state, for connections that
// no earlier chain translated.
const fixedChains = `
chain firewall-check {
	update @dropped-packets { ip daddr . meta l4proto . th dport counter }
	drop
}
chain internal {
	meta priority set ip daddr . meta l4proto . th dport map @internal-service-ips meta priority & fff0:0 vmap @internal-handlers
	meta priority set meta l4proto . th dport map @internal-service-nodeports meta priority & fff0:0 vmap @internal-handlers
}
chain nodeports {
	meta priority set meta l4proto . th dport map @service-nodeports meta priority & fff0:0 vmap @handlers
}
chain services {
	meta priority set ip daddr . meta l4proto . th dport map @service-ips meta priority & fff0:0 vmap @handlers
	ip daddr @nodeport-ips $local goto nodeports
}
chain cluster-ips-check {
	oifname "lo" fib daddr type local return
	ip daddr @cluster-ips reject
	ip daddr @service-cidrs drop
}
chain own-nodeports {
	meta priority set meta l4proto . th dport map @service-nodeports meta priority & fff0:0 vmap @own-handlers
}
chain own-services {
	meta priority set ip daddr . meta l4proto . th dport map @service-ips meta priority & fff0:0 vmap @own-handlers
	ip daddr @nodeport-ips $local jump own-nodeports
	meta priority & 8000:0 == 8000:0 meta priority set none
}
chain masquerading {
	meta mark & $mark == $mark meta mark set meta mark & $unmarked masquerade fully-random
	ct status dnat ip saddr . ip daddr @hairpin-connections masquerade fully-random
}
chain nat-prerouting {
	type nat hook prerouting priority -102; policy accept;
	jump services
}
chain nat-output {
	type nat hook output priority -102; policy accept;
	jump services
}
chain nat-prerouting-again {
	type nat hook prerouting priority -101; policy accept;
	jump services
}
chain nat-output-again {
	type nat hook output priority -101; policy accept;
	jump services
}
chain nat-postrouting {
	type nat hook postrouting priority 99; policy accept;
	jump masquerading
}
chain filter-forward {
	type filter hook forward priority 0; policy accept;
	ct state new ct status dnat meta priority & 8000:0 == 8000:0 meta priority set none
	ct state new ct status ! dnat jump cluster-ips-check
}
chain filter-input {
	type filter hook input priority 0; policy accept;
	iifname "lo" ct state new ct status ! dnat jump own-services
}
chain filter-output {
	type filter hook output priority 0; policy accept;
	ct state new ct status dnat meta priority & 8000:0 == 8000:0 meta priority set none
	ct state new ct status ! dnat jump cluster-ips-check
}
`

// toFastPath puts connections on the fast path whose original destination is a frontend of a Service. Its rules store
// the dispatch key, because the nft tool cannot show a rule that ignores the result of a map look-up.
const toFastPath = `
	meta l4proto PROTOCOL meta priority set ct original ip daddr . meta l4proto . ct original proto-dst map @service-ips flow add @fast-path
	meta l4proto PROTOCOL ct original ip daddr @nodeport-ips meta priority set meta l4proto . ct original proto-dst map @service-nodeports flow add @fast-path
`

// established is the last rule of filter-forward with Config.Offload.
const established = `ct state established ct status dnat iifname @fast-path-interfaces oifname @fast-path-interfaces ct packets > $packets jump to-fast-path`

// hasDispatch matches packets that carry a dispatch key. resetPriority removes it.
const (
	hasDispatch   = `meta priority & 8000:0 == 8000:0`
	resetPriority = `meta priority set none`
)

// ChainSpec is a chain as it is written. Hook is the line of nft with base, "" for a chain without a hook.
type ChainSpec struct {
	Name  string
	Hook  string
	Base  *nft.BaseChain
	Rules []string
}

func chainsIn(text string) (out []ChainSpec) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		name, isChain := strings.CutPrefix(line, "chain ")
		switch {
		case isChain:
			out = append(out, ChainSpec{Name: strings.TrimSuffix(name, " {")})
		case strings.HasPrefix(line, "type "):
			base, err := nft.ParseHook(line)
			if err != nil {
				panic(err) // the lines are constants of this package
			}
			out[len(out)-1].Hook, out[len(out)-1].Base = line, base
		case line != "" && line != "}":
			out[len(out)-1].Rules = append(out[len(out)-1].Rules, line)
		}
	}
	return out
}

func (w Rules) fixed() []ChainSpec {
	out := w.Stages.of(chainsIn(fixedChains))
	if w.Offload == nil {
		return out
	}
	text := strings.ReplaceAll(toFastPath, "PROTOCOL", "tcp")
	if w.Offload.UDP {
		text += strings.ReplaceAll(toFastPath, "PROTOCOL", "udp")
	}
	for i := range out {
		if out[i].Name == layout.ChainFilterForward {
			out[i].Rules = append(out[i].Rules, established)
		}
	}
	fast := chainsIn("chain " + layout.ChainToFastPath + " {\n" + text + hasDispatch + " " + resetPriority)
	return append(fast, out...)
}

// of returns the fixed chains without what s leaves out, with the base chains at their priorities.
func (s Stages) of(chains []ChainSpec) []ChainSpec {
	var out []ChainSpec
	for _, c := range chains {
		var shift int
		switch c.Name {
		case layout.ChainNATPrerouting, layout.ChainNATOutput, layout.ChainPreroutingAgain, layout.ChainOutputAgain:
			shift = s.DestinationNAT
		case layout.ChainNATPostrouting:
			if s.NoMasquerade {
				continue
			}
			shift = s.SourceNAT
		case layout.ChainFilterInput:
			if s.NoFilter {
				continue
			}
			shift = s.Filter
		case layout.ChainFilterForward, layout.ChainFilterOutput:
			if s.NoFilter {
				c.Rules = c.Rules[:len(c.Rules)-1] // the last one refuses
			}
			shift = s.Filter
		}
		if shift != 0 {
			b := *c.Base
			b.Priority += int32(shift)
			c.Hook, c.Base = strings.Replace(c.Hook, fmt.Sprintf("priority %d;", c.Base.Priority), fmt.Sprintf("priority %d;", b.Priority), 1), &b
		}
		out = append(out, c)
	}
	return out
}

// Outline returns the chains that objects create: the hooks of base chains, and the number of rules
// of each chain.
func (w Rules) Outline(objects []model.Object) (base map[string]*nft.BaseChain, rules map[string]int) {
	base, rules = map[string]*nft.BaseChain{}, map[string]int{}
	for i := range objects {
		for _, c := range w.chainsOf(&objects[i]) {
			rules[c.Name] = len(c.Rules)
			if c.Base != nil {
				base[c.Name] = c.Base
			}
		}
	}
	return base, rules
}

// chainsOf returns the chains that an object creates. Their rules are not complete.
func (w Rules) chainsOf(o *model.Object) []ChainSpec {
	h := o.Sticky
	switch o.Kind {
	case model.HandlerChain:
		return []ChainSpec{{Name: o.Handler.Chain(), Rules: w.handler(o.Handler)}}
	case model.StickyChains:
		return chainsIn(stickyChains)
	case model.ChooserChain:
		return []ChainSpec{{Name: h.Chooser(), Rules: w.stickyChooser(h)}}
	case model.StickyChain:
		return []ChainSpec{{Name: h.Chain(), Rules: stickyChain(h)}}
	case model.FixedChains, model.BaseChains:
		return slices.DeleteFunc(w.fixed(), func(c ChainSpec) bool { return (c.Base != nil) != (o.Kind == model.BaseChains) })
	}
	return nil
}

func (w Rules) Chains(o *model.Object) []ChainSpec {
	out := w.chainsOf(o)
	for i := range out {
		for j, rule := range out[i].Rules {
			out[i].Rules[j] = w.complete(rule)
		}
	}
	return out
}

// SourceRule returns the rule of an object that has one: see [Rules.allowedSource].
func (w Rules) SourceRule(o *model.Object) string { return w.complete(w.allowedSource(o.Size)) }

func (w Rules) complete(rule string) string {
	if strings.Contains(rule, "$") {
		var packets int
		if w.Offload != nil {
			packets = w.Offload.AfterPackets
		}
		local := "fib daddr type local "
		if w.OwnNodePorts {
			local = ""
		}
		rule = strings.NewReplacer("$local ", local, "$mark", fmt.Sprintf("0x%08x", w.Mark), "$unmarked", fmt.Sprintf("0x%08x", ^w.Mark), "$packets", fmt.Sprint(packets)).Replace(rule)
	}
	if w.Family == tracker.IPv6 {
		rule = strings.ReplaceAll(" "+rule, " ip ", " ip6 ")[1:]
	}
	return rule
}

// markForMasquerade sets the bit that masquerading looks for.
const markForMasquerade = `meta mark set meta mark | $mark`

// handler returns the rules of the handler's chain, which go to the chains of its direct and unguarded forms.
func (w Rules) handler(c layout.Handler) []string {
	if c.Firewall {
		return []string{"jump " + layout.ChainFirewallCheck, "goto " + c.Unguarded().Chain()}
	}
	toPool := "goto " + c.Direct().Chain()
	internalFirst := func(last ...string) (out []string) {
		for _, from := range w.localTraffic("== ") {
			out = append(out, from+" goto "+layout.ChainInternal)
		}
		return append(append(out, "fib saddr type local "+markForMasquerade+" goto "+layout.ChainInternal), last...)
	}
	switch c.Handling {
	case layout.HandleReject:
		return stop(layout.Refused, "reject")
	case layout.HandleDrop:
		return stop(layout.Dropped, "drop")
	case layout.HandleInternalOrDrop:
		return internalFirst(count(layout.Dropped), "drop")
	case layout.HandleInternal:
		return internalFirst(toPool)
	case layout.HandleAlways:
		return []string{markForMasquerade + " " + toPool}
	case layout.HandleNotPods:
		return []string{strings.Join(append(w.localTraffic("!= "), markForMasquerade), " "), toPool}
	}
	if c.Sticky {
		return []string{"meta priority set meta priority & f:ffff map @sticky-pools meta priority & 0:ffff vmap @" + layout.StickyHandlers.Name()}
	}
	return w.poolChain(c)
}

// stop renders a chain that counts a packet in a set and ends its connection by the verdict. In the output hook,
// packets from the node to itself go on to filter-input, because the kernel returns EPERM to a socket whose packet is
// stopped there. The interface does not suffice: packets that another route sends to the loopback interface never
// reach the input hook.
func stop(counters layout.Set, verdict string) []string {
	return []string{`oifname "lo" fib daddr type local ` + resetPriority + " return", count(counters), verdict}
}

// count adds a packet that was not translated to the counter of its destination. If the set is full, the rule ends
// there, so a verdict that must not depend on the counter is in the next rule.
func count(s layout.Set) string {
	return "update @" + s.Name() + " { ip daddr . meta l4proto . th dport counter }"
}

// allowedSource lets sources within prefixes of the given length pass the firewall.
func (w Rules) allowedSource(bits int) string {
	from := "ip saddr"
	if bits != w.Family.Bits() {
		mask, _ := netip.AddrFromSlice(net.CIDRMask(bits, w.Family.Bits()))
		from += " & " + mask.String()
	}
	return from + " . ip daddr . meta l4proto . th dport @" + layout.Allowed(bits).Name() + " return"
}

// hashed is a number below n: the Jenkins hash of the connection's source address, or of that and
// the source port, scaled down.
func (w Rules) hashed(h tracker.Hash, n int) string {
	of := "ip saddr"
	if h == tracker.HashSourcePort {
		of += " . th sport"
	}
	return fmt.Sprintf("jhash %s mod %d seed %#x", of, n, w.Seed)
}

func drawn(n int) string { return fmt.Sprintf("numgen random mod %d", n) }

// poolChain counts the connection, draws a bucket or finds it by a hash, and sends the connection to the endpoint in
// the bucket. The first rule only counts, and does nothing if the set of counters is full. It looks up no map of
// endpoints, because the kernel checks each new element of a map against every rule that looks it up.
func (w Rules) poolChain(c layout.Handler) []string {
	out := []string{count(layout.Connections)}
	buckets := []string{drawn(c.Buckets)}
	if c.Hash != tracker.HashNone {
		buckets = []string{w.hashed(c.Hash, c.Buckets)}
	} else if n := c.Buckets; n > layout.ExactBuckets {
		// Fewer than one draw in five finds an empty bucket. After four, the last rule draws from the buckets that
		// are never empty.
		buckets = []string{drawn(n), drawn(n), drawn(n), drawn(n), drawn(layout.BucketsBelow(n))}
	}
	for _, p := range [...]string{"tcp", "udp", "sctp"} {
		for _, bucket := range buckets {
			out = append(out, "meta l4proto "+p+" dnat ip to meta priority & f:ffff . "+bucket+" map @"+p+"-endpoints")
		}
	}
	return out
}

// localTraffic returns a condition for each way in which a connection comes from one of this node's
// pods or, with the operator "!= " instead of "== ", does not.
func (w Rules) localTraffic(operator string) (out []string) {
	switch l := w.Local; {
	case l.Bridge != "":
		return []string{"iifname " + operator + `"` + escaped(l.Bridge) + `"`}
	case l.InterfacePrefix != "":
		return []string{"iifname " + operator + `"` + escaped(l.InterfacePrefix) + `*"`}
	default:
		for _, c := range inet.Prefixes(l.CIDRs, w.Family) {
			out = append(out, "ip saddr "+operator+c.Masked().String())
		}
	}
	return out
}

// escaped returns the name of an interface for a rule, with bytes replaced that end a word, a string or a
// placeholder. compile reads them, nft does not.
func escaped(name string) string {
	var b strings.Builder
	for _, c := range []byte(name) {
		if c <= ' ' || c > '~' || strings.IndexByte(`"$*\`, c) >= 0 {
			fmt.Fprintf(&b, `\x%02x`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
