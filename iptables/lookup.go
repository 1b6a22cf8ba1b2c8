package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// LookupAll returns the endpoints to which the rules of table nat send the packet of each query, by every way that a
// random choice or client affinity may take. [dataplane.Found.Where] names the chains on the way to the first endpoint.
// Refused and dropped connections have no entry. The rules may be a [Backend]'s or kube-proxy's. LookupAll evaluates
// them for the packet itself and ignores Internal and NodePort. It runs iptables-save once for each family.
//
// The error is that of the first family that has one. It wraps [dataplane.ErrNoRules] if the table has no rules in a
// chain KUBE-SERVICES.
func LookupAll(ctx context.Context, c Config, queries []dataplane.Query) (found []dataplane.Found, err error) {
	err = c.with(func(c Config, k kernel) error {
		found, err = lookup(ctx, c, k, queries)
		return err
	})
	return found, err
}

func lookup(ctx context.Context, c Config, k kernel, queries []dataplane.Query) ([]dataplane.Found, error) {
	found := make([]dataplane.Found, len(queries))
	c.Families = nil
	for _, q := range queries {
		if f := tracker.FamilyOf(q.Packet.To.Addr()); !slices.Contains(c.Families, f) {
			c.Families = append(c.Families, f)
		}
	}
	err := each(ctx, c, k, func(f *family) error {
		saved, err := f.saved(ctx, nat)
		if err != nil {
			return err
		}
		chains := parseRules(saved)
		if len(chains[chainServices]) == 0 { // a clean-up may leave it empty
			return fmt.Errorf("iptables: %w", dataplane.ErrNoRules)
		}
		for i, q := range queries {
			if tracker.FamilyOf(q.Packet.To.Addr()) == f.family {
				found[i] = follow(chains, q.Packet)
			}
		}
		return nil
	})
	return found, err
}

// parseRules returns the rules of table nat in the output of iptables-save, by chain.
func parseRules(text string) map[string][]iptext.Rule {
	out := map[string][]iptext.Rule{}
	iptext.Scan(strings.NewReader(text), func(l iptext.Line) {
		rules := out[string(l.Chain)]
		if l.IsRule {
			rules = append(rules, iptext.ParseRule(string(l.Rule)))
		}
		out[string(l.Chain)] = rules
	})
	return out
}

// serviceName returns the name of the Service port that a rule's comment begins with, or "".
func serviceName(r iptext.Rule) string {
	name, _, _ := strings.Cut(r.Comment, " ")
	if !strings.Contains(name, "/") {
		return ""
	}
	return name
}

func follow(chains map[string][]iptext.Rule, p ruleset.Packet) dataplane.Found {
	w := walker{packet: p, chains: chains}
	w.chain(chainServices, "", 0)
	slices.SortFunc(w.found.Endpoints, netip.AddrPort.Compare)
	w.found.Endpoints = slices.Compact(w.found.Endpoints)
	return w.found
}

// walker follows a packet through chains, every way that it may take.
type walker struct {
	packet ruleset.Packet
	chains map[string][]iptext.Rule
	path   []string // the chains that the packet is in
	found  dataplane.Found
}

// maxDepth bounds how many chains can lead to each other in sequence.
const maxDepth = 64

// chain follows the packet through a chain. service is the Service port that the rules on the way named, or "". chain
// reports whether the packet is certain to get a verdict in this chain.
func (w *walker) chain(name, service string, depth int) (ended bool) {
	if depth == maxDepth {
		return false
	}
	w.path = append(w.path, name)
	defer func() { w.path = w.path[:len(w.path)-1] }()
	for _, r := range w.chains[name] {
		matches, certain := w.matches(r)
		if !matches {
			continue
		}
		switch r.Target {
		case "DNAT":
			if a, err := netip.ParseAddrPort(r.Option("--to-destination")); err == nil {
				w.found.Endpoints = append(w.found.Endpoints, a)
			}
			if !w.found.Entry {
				w.found.Entry, w.found.Service = true, service
				w.found.Where = "chain " + strings.Join(w.path, " > ")
			}
			if certain {
				return true
			}
		case "ACCEPT", "DROP":
			if certain {
				return true
			}
		case "RETURN":
			if certain {
				return false
			}
		default:
			about := service
			if about == "" {
				about = serviceName(r)
			}
			if ended := w.chain(r.Target, about, depth+1); certain && (ended || r.Goto) {
				return ended
			}
		}
	}
	return false
}

// matches reports whether a rule can match the packet, and whether that is certain.
func (w *walker) matches(r iptext.Rule) (matches, certain bool) {
	certain = true
	for _, m := range r.Matches {
		is, known := w.match(m)
		if !known {
			certain = false
		} else if is == m.Not {
			return false, true
		}
	}
	return true, certain
}

// match reports whether an option holds for the packet, regardless of m.Not. It is unknown for random choices,
// affinity, and options that rules for Services do not have.
func (w *walker) match(m iptext.Option) (is, known bool) {
	p := w.packet
	local := func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(p.NodeAddresses, a) }
	within := func(a netip.Addr) bool {
		prefix, err := netip.ParsePrefix(m.Value)
		return err == nil && prefix.Contains(a)
	}
	switch m.Name {
	case "-s":
		return within(p.From), true
	case "-d":
		return within(p.To.Addr()), true
	case "-p":
		return strings.EqualFold(m.Value, string(p.Protocol)), true
	case "--dport":
		from, to, isRange := strings.Cut(m.Value, ":")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		port := int(p.To.Port())
		return err1 == nil && err2 == nil && first <= port && port <= last, true
	case "--src-type":
		return m.Value == "LOCAL" && local(p.From), true
	case "--dst-type":
		return m.Value == "LOCAL" && local(p.To.Addr()), true
	case "-i":
		if prefix, ok := strings.CutSuffix(m.Value, "+"); ok {
			return strings.HasPrefix(p.InInterface, prefix), true
		}
		return p.InInterface == m.Value, true
	case "--nfacct-name":
		return true, true // it counts every packet
	case "--ctstate":
		return slices.Contains(strings.Split(m.Value, ","), "NEW"), true
	}
	return false, false
}
