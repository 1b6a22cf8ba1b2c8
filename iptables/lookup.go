//go:build linux

package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Lookup returns the endpoints to which the rules of table nat send the packet of q. It
// follows every way that a random choice or client affinity may take.
// [ruleset.Found.Where] names the chains on the way to the first endpoint. Refused and
// dropped connections have no entry in this table. The rules may be a [Backend]'s or
// kube-proxy's. Lookup evaluates them for the packet itself and ignores q.Internal and
// q.NodePort.
//
// The error wraps [ruleset.ErrNoRules] if the table has no chain KUBE-SERVICES.
func Lookup(ctx context.Context, c Config, q ruleset.Query) (ruleset.Found, error) {
	c.Families = []tracker.Family{tracker.FamilyOf(q.Packet.To.Addr())}
	var found ruleset.Found
	_, err := c.each(ctx, func(f *family) error {
		var saved strings.Builder
		if err := f.tool.Save(ctx, nat.String(), &saved); err != nil {
			return fmt.Errorf("iptables: cannot read table nat: %w", err)
		}
		chains := parseRules(saved.String())
		if _, ok := chains[chainServices]; !ok {
			return fmt.Errorf("iptables: %w", ruleset.ErrNoRules)
		}
		found = follow(chains, q.Packet)
		return nil
	})
	return found, err
}

// savedRule is a rule that iptables-save printed.
type savedRule struct {
	matches []savedMatch
	comment string
	target  string
	// isGoto reports that the target is a chain that does not return to this one.
	isGoto bool
	to     string // --to-destination
}

// savedMatch is an option with its value, such as "-d 10.0.0.1/32".
type savedMatch struct {
	option, value string
	not           bool
}

// parseRules returns the rules in the output of iptables-save, by chain.
func parseRules(text string) map[string][]savedRule {
	out := map[string][]savedRule{}
	for line := range strings.Lines(text) {
		words := splitWords(strings.TrimSpace(line))
		if len(words) > 0 && strings.HasPrefix(words[0], "[") {
			words = words[1:] // the rule's counters
		}
		switch {
		case len(words) > 0 && strings.HasPrefix(words[0], ":"):
			out[words[0][1:]] = nil
		case len(words) > 1 && words[0] == "-A":
			out[words[1]] = append(out[words[1]], parseRule(words[2:]))
		}
	}
	return out
}

// parseRule returns the rule with these words.
func parseRule(words []string) savedRule {
	var r savedRule
	not := false
	for i := 0; i < len(words); i++ {
		option, value := words[i], ""
		if option == "!" {
			not = true
			continue
		}
		if i+1 < len(words) && !strings.HasPrefix(words[i+1], "-") && words[i+1] != "!" {
			i++
			value = words[i]
		}
		switch option {
		case "-j", "-g":
			r.target, r.isGoto = value, option == "-g"
		case "--to-destination":
			r.to = value
		case "--comment":
			r.comment = value
		case "-m":
		default:
			r.matches = append(r.matches, savedMatch{option, value, not})
		}
		not = false
	}
	return r
}

// splitWords splits a line at blanks outside quotes.
func splitWords(line string) []string {
	var out []string
	var word strings.Builder
	quoted, any := false, false
	flush := func() {
		if word.Len() > 0 || any {
			out = append(out, word.String())
		}
		word.Reset()
		any = false
	}
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && quoted && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case c == '"':
			quoted, any = !quoted, true
		case c == ' ' && !quoted:
			flush()
		default:
			word.WriteByte(c)
		}
	}
	flush()
	return out
}

// service returns the name of the Service port that the rule's comment begins with,
// or "" if the comment does not begin with one.
func (r savedRule) service() string {
	name, _, _ := strings.Cut(r.comment, " ")
	if !strings.Contains(name, "/") {
		return ""
	}
	return name
}

// follow returns where the chains send a packet.
func follow(chains map[string][]savedRule, p ruleset.Packet) ruleset.Found {
	w := walker{packet: p, chains: chains}
	w.chain(chainServices, "", 0)
	slices.SortFunc(w.found.Endpoints, netip.AddrPort.Compare)
	w.found.Endpoints = slices.Compact(w.found.Endpoints)
	return w.found
}

// walker follows a packet through chains, every way that it may take.
type walker struct {
	packet ruleset.Packet
	chains map[string][]savedRule
	path   []string // the chains that the packet is in
	found  ruleset.Found
}

// maxDepth bounds how many chains can lead to each other in sequence.
const maxDepth = 64

// chain follows the packet through a chain. service is the Service port that the rules on
// the way named, or "". chain reports whether a verdict certainly ends the packet's way.
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
		switch r.target {
		case "DNAT":
			if a, err := netip.ParseAddrPort(r.to); err == nil {
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
				about = r.service()
			}
			if ended := w.chain(r.target, about, depth+1); certain && (ended || r.isGoto) {
				return ended
			}
		}
	}
	return false
}

// matches reports whether a rule can match the packet, and whether that is certain.
func (w *walker) matches(r savedRule) (matches, certain bool) {
	certain = true
	for _, m := range r.matches {
		is, known := w.match(m)
		if !known {
			certain = false
		} else if is == m.not {
			return false, true
		}
	}
	return true, certain
}

// match reports whether an option holds for the packet, regardless of m.not. It is
// unknown for random choices, affinity, and options that rules for Services do not have.
func (w *walker) match(m savedMatch) (is, known bool) {
	p := w.packet
	local := func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(p.NodeAddresses, a) }
	within := func(a netip.Addr) bool {
		prefix, err := netip.ParsePrefix(m.value)
		return err == nil && prefix.Contains(a)
	}
	switch m.option {
	case "-s":
		return within(p.From), true
	case "-d":
		return within(p.To.Addr()), true
	case "-p":
		return strings.EqualFold(m.value, string(p.Protocol)), true
	case "--dport":
		from, to, isRange := strings.Cut(m.value, ":")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		port := int(p.To.Port())
		return err1 == nil && err2 == nil && first <= port && port <= last, true
	case "--src-type":
		return m.value == "LOCAL" && local(p.From), true
	case "--dst-type":
		return m.value == "LOCAL" && local(p.To.Addr()), true
	case "-i":
		if prefix, ok := strings.CutSuffix(m.value, "+"); ok {
			return strings.HasPrefix(p.InInterface, prefix), true
		}
		return p.InInterface == m.value, true
	case "--nfacct-name":
		return true, true // it counts every packet
	case "--ctstate":
		return slices.Contains(strings.Split(m.value, ","), "NEW"), true
	}
	return false, false
}
