package iptext

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// maxComment is how many bytes a comment can have: XT_MAX_COMMENT_LEN in the
// kernel's linux/netfilter/xt_comment.h, less the NUL.
const maxComment = 255

// Comment returns the match that carries a text. It replaces every character that could
// end the text or the line, or that iptables could interpret.
func Comment(text ...string) string {
	var b strings.Builder
	b.WriteString(`-m comment --comment "`)
	n := 0
	for _, t := range text {
		for i := 0; i < len(t) && n < maxComment; i++ {
			c := t[i]
			switch {
			case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte(" -._/:>;(),", c) >= 0:
			default:
				c = '?'
			}
			b.WriteByte(c)
			n++
		}
	}
	b.WriteByte('"')
	return b.String()
}

// Join joins the parts of a rule that are not empty with blanks.
func Join(parts ...string) string {
	n := 0
	for _, p := range parts {
		n += len(p) + 1
	}
	var b strings.Builder
	b.Grow(n)
	for _, p := range parts {
		if p == "" {
			continue
		}
		if b.Len() != 0 {
			b.WriteByte(' ')
		}
		b.WriteString(p)
	}
	return b.String()
}

// Source returns the match of a range of source addresses.
func Source(p netip.Prefix) string { return "-s " + p.String() }

// Destination returns the match of a range of destination addresses.
func Destination(p netip.Prefix) string { return "-d " + p.String() }

// Host returns the prefix of one address.
func Host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Jump returns the target that leads to a chain, which returns to the rule.
func Jump(to string) string { return "-j " + to }

// DestinationPort returns the match of a destination port. The rule must match the
// protocol, a result of [Protocol], first.
func DestinationPort(protocol string, port uint16) string {
	return "-m " + protocol + " --dport " + strconv.Itoa(int(port))
}

// Protocol returns the name of a protocol in iptables, "" for one that Services
// cannot have.
func Protocol(p v1.Protocol) string {
	switch p {
	case v1.ProtocolTCP:
		return "tcp"
	case v1.ProtocolUDP:
		return "udp"
	case v1.ProtocolSCTP:
		return "sctp"
	}
	return ""
}

// Reject returns the target that refuses packets as kube-proxy does.
func Reject(f tracker.Family) string {
	if f == tracker.IPv6 {
		return "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return "-j REJECT --reject-with icmp-port-unreachable"
}

// Loopback returns the family's loopback range.
func Loopback(f tracker.Family) netip.Prefix {
	if f == tracker.IPv6 {
		return netip.PrefixFrom(netip.IPv6Loopback(), 128)
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
}

// Target returns the chain that a rule leads to, or its target, "" if it has none. A rule ends
// with the target and its options. A comment cannot be mistaken for it because it ends with a
// quote.
func Target[T ~string | ~[]byte](rule T) string {
	for i := len(rule) - len("-j "); i >= 0; i-- {
		if rule[i] != '-' || rule[i+1] != 'j' && rule[i+1] != 'g' || rule[i+2] != ' ' || i != 0 && rule[i-1] != ' ' {
			continue
		}
		to := rule[i+len("-j "):]
		for end := range len(to) {
			if to[end] == ' ' {
				return string(to[:end])
			}
		}
		return string(to)
	}
	return ""
}

// Option is an option of a rule with its value, such as "-d 10.0.0.1/32".
type Option struct {
	Name, Value string
	// Not reports whether a "!" precedes the option.
	Not bool
}

// Rule is a rule as its parts.
type Rule struct {
	// Matches holds the options of the rule's matches, except the comment and "-m".
	Matches []Option
	Comment string
	// Target is the rule's target or the chain that it leads to, or "". Goto reports that
	// the chain does not return to this one.
	Target string
	Goto   bool
	// Options holds the options of the target.
	Options []Option
}

// Option returns the value of an option of the target, or "".
func (r Rule) Option(name string) string {
	for _, o := range r.Options {
		if o.Name == name {
			return o.Value
		}
	}
	return ""
}

// ParseRule returns the parts of a rule.
func ParseRule(text string) Rule {
	var r Rule
	words := splitWords(text)
	not := false
	for i := 0; i < len(words); i++ {
		o := Option{Name: words[i], Not: not}
		if o.Name == "!" {
			not = true
			continue
		}
		not = false
		for i+1 < len(words) && (o.Name == "--comment" && o.Value == "" || !strings.HasPrefix(words[i+1], "-") && words[i+1] != "!") {
			i++
			o.Value = Join(o.Value, words[i])
			if o.Name == "--comment" {
				break
			}
		}
		switch o.Name {
		case "-j", "-g":
			r.Target, r.Goto = o.Value, o.Name == "-g"
		case "--comment":
			r.Comment = o.Value
		case "-m":
		default:
			if r.Target != "" {
				r.Options = append(r.Options, o)
			} else {
				r.Matches = append(r.Matches, o)
			}
		}
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

// maxInterface is the most bytes that an interface's name can have: IFNAMSIZ of
// linux/if.h, less the NUL.
const maxInterface = 15

// PodMatches returns the matches that recognize packets from this node's pods. Every packet
// from a pod satisfies one. Each match is "-i" with an interface's name, in which a "+" at the
// end stands for the rest of the name, or "-s" with a range of sources. The error is about an
// interface's name that cannot be matched.
func PodMatches(l ruleset.LocalTraffic, f tracker.Family) (matches []string, err error) {
	name := cmp.Or(l.Bridge, l.InterfacePrefix)
	if name == "" {
		for _, p := range inet.Prefixes(l.CIDRs, f) {
			matches = append(matches, "-s "+p.String())
		}
		return matches, nil
	}
	// A "+" ends a name for iptables, and some others would need quoting.
	special := func(c rune) bool { return c <= ' ' || c >= 0x7f || strings.ContainsRune(`"'\!/+`, c) }
	if len(name) > maxInterface || name[0] == '-' || strings.ContainsFunc(name, special) {
		return nil, fmt.Errorf("interface name %q cannot be matched", name)
	}
	if l.Bridge == "" && len(name) < maxInterface {
		name += "+"
	}
	return []string{"-i " + name}, nil
}
