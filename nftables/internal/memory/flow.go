package memory

import (
	"math"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// maxDepth bounds how many chains can lead to each other. The kernel refuses loops.
const maxDepth = 64

// ways holds the states that a packet may have after random choices, with their probabilities.
type ways []way

type way struct {
	state
	share float64
}

func (w *ways) add(s state, share float64) {
	for i := range *w {
		if (*w)[i].state == s {
			(*w)[i].share += share
			return
		}
	}
	*w = append(*w, way{s, share})
}

// Handle returns what the tables do with the first packet of a connection of a new client.
func (k *Kernel) Handle(p ruleset.Packet) conformance.Outcome {
	p.From = p.From.Unmap()
	to := netip.AddrPortFrom(p.To.Addr().Unmap(), p.To.Port())
	w := &k.packet
	w.Packet, w.family = p, "ip"
	if tracker.FamilyOf(to.Addr()) == tracker.IPv6 {
		w.family = "ip6"
	}
	all := ways{{state{to: to}, 1}}
	hooks := []string{"prerouting", "input", "forward", "postrouting"}
	if p.InInterface == "" {
		hooks = []string{"output", "postrouting", "input"}
	}
	for _, hook := range hooks {
		w.hook = hook
		all = k.pass(w, all)
	}
	return outcome(all)
}

// pass sends a packet through the chains of a hook.
func (k *Kernel) pass(w *packet, in ways) ways {
	for _, c := range k.hooks[w.family+" "+w.hook] {
		w.table = c.Table
		out, left := w.room(), w.room()
		for _, e := range in {
			if e.verdict != 0 || !w.meets(&e.state) || c.Base.Type == "nat" && w.hook != "postrouting" && e.translated {
				out = append(out, e)
			} else {
				w.walk(c.Chain, e, &out, &left)
			}
		}
		in = in[:0]
		for _, list := range [...]ways{out, left} {
			for _, e := range list {
				if e.verdict == ruleset.ActionPass {
					e.verdict = 0
				}
				in.add(e.state, e.share)
			}
			w.spare = append(w.spare, list[:0])
		}
	}
	return in
}

// room returns an empty list, which is an old one if there is one to spare.
func (w *packet) room() (out ways) {
	if last := len(w.spare) - 1; last >= 0 {
		out, w.spare = w.spare[last], w.spare[:last]
	}
	return out
}

// walk sends a state through a chain. It adds those with a verdict to out, and the others to left.
func (w *packet) walk(c *Chain, start way, out, left *ways) {
	if w.depth++; w.depth > maxDepth {
		panic("memory: chains lead to each other in a loop")
	}
	defer func() { w.depth-- }()
	meet, next := append(w.room(), start), w.room()
	for _, r := range c.Rules {
		next = next[:0]
		for _, e := range meet {
			n := max(1, r.buckets)
			for bucket := 0; bucket < n; bucket++ {
				w.verb, w.chain, w.chose, w.state, w.bucket = "", "", false, e.state, bucket
				for i := 0; i < len(r.steps) && r.steps[i](w, &w.state); i++ {
				}
				if !w.chose {
					n = 1 // the rule ends before it makes a choice
				}
				s, share := w.state, e.share/float64(n)
				switch {
				case s.verdict != 0:
					out.add(s, share)
				case w.verb == "jump":
					w.walk(w.table.Chains[w.chain], way{s, share}, out, &next)
				case w.verb == "goto":
					w.walk(w.table.Chains[w.chain], way{s, share}, out, left)
				case w.verb == "return":
					left.add(s, share)
				default:
					next.add(s, share)
				}
			}
		}
		meet, next = next, meet
	}
	for _, e := range meet {
		left.add(e.state, e.share)
	}
	w.spare = append(w.spare, meet[:0], next[:0])
}

func (w *packet) meets(s *state) bool {
	own, here := w.InInterface == "", w.local(s.to.Addr())
	switch w.hook {
	case "input":
		return here
	case "forward":
		return !here
	case "postrouting":
		return own || !here
	}
	return true
}

func (w *packet) local(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(w.NodeAddresses, a)
}

// in and out return the interfaces of the packet in the hook.
func (w *packet) in() string {
	if w.InInterface == "" && w.hook == "input" {
		return layout.LoopbackInterface
	}
	return w.InInterface
}

func (w *packet) out(s *state) string {
	if w.InInterface == "" && w.local(s.to.Addr()) && w.hook != "input" {
		return layout.LoopbackInterface
	}
	return ""
}

// outcome sums up what happens to a packet.
func outcome(all ways) conformance.Outcome {
	var out conformance.Outcome
	type place struct {
		to         netip.AddrPort
		masquerade bool
	}
	shares := map[place]float64{}
	buckets, lost := 0, false
	for _, s := range all {
		switch {
		case s.verdict != 0:
			out.Action = s.verdict
		case s.translated:
			out.Action, out.Affinity, out.Hash = ruleset.ActionForward, s.affinity, s.hash
			shares[place{s.to, s.masquerade}] += s.share
			buckets = s.buckets
		default:
			lost = true
		}
	}
	if len(shares) == 0 {
		return out
	}
	if lost {
		out.Endpoints = append(out.Endpoints, conformance.Choice{})
	}
	for at, weight := range weights(shares, buckets) {
		out.Endpoints = append(out.Endpoints, conformance.Choice{Addr: at.to, Weight: weight, Masquerade: at.masquerade})
	}
	slices.SortFunc(out.Endpoints, func(a, b conformance.Choice) int { return a.Addr.Compare(b.Addr) })
	return out
}

// weights returns the smallest integers in the proportions of shares. Those of a pool with empty buckets
// differ by less than a 500th, and those of a hash by a bucket or two.
func weights[K comparable](shares map[K]float64, buckets int) map[K]int {
	out := map[K]int{}
	for sum := len(shares); ; sum++ {
		fits := true
		for k, share := range shares {
			n := share * float64(sum)
			out[k] = int(math.Round(n))
			off := 0.002 * n
			if buckets != 0 {
				off = 2 * float64(sum) / float64(buckets)
			}
			fits = fits && out[k] != 0 && math.Abs(n-float64(out[k])) <= off
		}
		if fits || sum > 1<<14 {
			return out
		}
	}
}
