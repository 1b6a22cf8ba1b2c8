package iptool

import (
	"fmt"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
)

// Contents is what nf_tables returns about a table that iptables-save cannot print: see [ErrUnreadable].
type Contents struct {
	// Chains holds the names of all chains.
	Chains []string
	// Jumps holds the rules that lead to another chain, in order.
	Jumps []Jump
	// Foreign is the first chain found to have a rule that iptables cannot express, or "".
	Foreign string
}

// Jump is a rule that leads from a chain to another one.
type Jump struct{ From, To string }

// Unreadable returns an error that names the foreign chain. It wraps [ErrUnreadable].
func (c Contents) Unreadable() error {
	if c.Foreign == "" {
		return ErrUnreadable
	}
	return fmt.Errorf("chain %s: %w", c.Foreign, ErrUnreadable)
}

// Text renders the contents in the form of iptables-save: the chains, the rules that lead to other chains, without
// their matches, and those of known, each in the form "CHAIN RULE", that exist. check applies an input of
// iptables-restore that changes nothing.
func (c Contents) Text(table string, known []string, check func(input []byte) error) string {
	full := map[Jump]string{}
	var others iptext.Input
	for _, rule := range known {
		from, text, _ := strings.Cut(rule, " ")
		var in iptext.Input
		in.Begin(table)
		in.Expect(from, text)
		in.Commit()
		switch to := iptext.Target(text); {
		case check(in.Bytes()) != nil:
		case to == "":
			others.Append(from, text)
		default:
			full[Jump{from, to}] = text
		}
	}
	var out iptext.Input
	out.Begin(table)
	for _, name := range c.Chains {
		out.Chain(name)
	}
	for _, j := range c.Jumps {
		text, ok := full[j]
		if !ok {
			text = iptext.Jump(j.To)
		}
		out.Append(j.From, text)
	}
	return out.String() + others.String() + "COMMIT\n"
}
