package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
)

// lookupIPTables tells what the rules of table nat do with a packet: the agent's, or
// kube-proxy's, which have the same chains to begin with.
func lookupIPTables(ctx context.Context, out io.Writer, q question) error {
	program := "iptables-save"
	if q.packet.To.Addr().Is6() {
		program = "ip6tables-save"
	}
	var diag bytes.Buffer
	cmd := exec.CommandContext(ctx, program, "-t", "nat")
	cmd.Stderr = &diag
	text, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(diag.Bytes()))
	}
	w := natWalk{packet: q.packet, chains: natChains(string(text))}
	const first = "KUBE-SERVICES"
	if _, ok := w.chains[first]; !ok {
		fmt.Fprintln(out, "kernel: mode iptables has no rules in this network namespace")
		return nil
	}
	w.chain(first, 0)
	slices.SortFunc(w.to, netip.AddrPort.Compare)
	where := "no rule for it"
	if len(w.path) != 0 {
		where = "chain " + strings.Join(w.path, " > ")
	}
	return q.compare(out, where, "", slices.Compact(w.to), q.verdict.Endpoints)
}

// natRule is a rule of iptables-save, as far as it matters here.
type natRule struct {
	matches []natMatch
	target  string
	to      string // --to-destination
}

// natMatch is an option with its value, such as "-d 10.0.0.1/32".
type natMatch struct {
	option, value string
	not           bool
}

// natChains reads the rules that iptables-save prints, by chain.
func natChains(text string) map[string][]natRule {
	out := map[string][]natRule{}
	for line := range strings.Lines(text) {
		words := splitRule(strings.TrimSpace(line))
		if len(words) > 0 && strings.HasPrefix(words[0], ":") {
			out[words[0][1:]] = nil
		}
		if len(words) < 2 || words[0] != "-A" {
			continue
		}
		var r natRule
		not := false
		for i := 2; i < len(words); i++ {
			option := words[i]
			if option == "!" {
				not = true
				continue
			}
			value := ""
			if i+1 < len(words) && !strings.HasPrefix(words[i+1], "-") && words[i+1] != "!" {
				i++
				value = words[i]
			}
			switch option {
			case "-j", "-g":
				r.target = value
			case "--to-destination":
				r.to = value
			case "-m", "--comment":
			default:
				r.matches = append(r.matches, natMatch{option, value, not})
			}
			not = false
		}
		out[words[1]] = append(out[words[1]], r)
	}
	return out
}

// splitRule splits a line at blanks that are not within quotes.
func splitRule(line string) []string {
	var out []string
	var word strings.Builder
	quoted, any := false, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && quoted && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case c == '"':
			quoted, any = !quoted, true
		case c == ' ' && !quoted:
			if word.Len() > 0 || any {
				out = append(out, word.String())
			}
			word.Reset()
			any = false
		default:
			word.WriteByte(c)
		}
	}
	if word.Len() > 0 || any {
		out = append(out, word.String())
	}
	return out
}

// natWalk follows a packet through the chains, every way that chance may take.
type natWalk struct {
	packet ruleset.Packet
	chains map[string][]natRule
	to     []netip.AddrPort
	way    []string // the chains it is in
	path   []string // those on the way to the first endpoint
}

// deepest is more chains than any rules lead through one after another.
const deepest = 64

// chain reports whether the packet certainly gets no further than the chain.
func (w *natWalk) chain(name string, depth int) (ended bool) {
	if depth == deepest {
		return false
	}
	w.way = append(w.way, name)
	defer func() { w.way = w.way[:len(w.way)-1] }()
	for _, r := range w.chains[name] {
		matches, certain := w.matches(r)
		if !matches {
			continue
		}
		switch r.target {
		case "DNAT":
			if a, err := netip.ParseAddrPort(r.to); err == nil {
				w.to = append(w.to, a)
			}
			if w.path == nil {
				w.path = slices.Clone(w.way)
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
			if w.chain(r.target, depth+1) && certain {
				return true
			}
		}
	}
	return false
}

// matches reports whether a rule matches the packet, and whether it does for
// certain or only may.
func (w *natWalk) matches(r natRule) (matches, certain bool) {
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

func (w *natWalk) match(m natMatch) (is, known bool) {
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
		return m.value == strconv.Itoa(int(p.To.Port())), true
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
		return true, true // it counts, whatever comes
	case "--ctstate":
		return slices.Contains(strings.Split(m.value, ","), "NEW"), true
	}
	return false, false // chance, what a client did before, or not known here
}
