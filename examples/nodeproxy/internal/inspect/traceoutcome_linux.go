package inspect

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// describe describes what the kernel did with the connection, in a mode, and sets the action.
func (c *connection) describe(mode string) {
	c.lines = chainLines(c.steps)
	add := func(format string, args ...any) { c.lines = append(c.lines, fmt.Sprintf(format, args...)) }
	var last step
	if len(c.steps) > 0 {
		last = c.steps[len(c.steps)-1]
	}
	chain := fmt.Sprintf("%s, chain %s", last.tableName(), last.chain)
	switch c.end {
	case sent, delivered:
		where := ""
		if c.end == delivered {
			where = ", on this node"
		} else if name := interfaceName(c.out); name != "" {
			where = ", out by " + name
		}
		what := "destination unchanged"
		if c.action = ruleset.ActionPass; c.lastTo != c.to {
			c.action, what = ruleset.ActionForward, fmt.Sprintf("endpoint %v", c.lastTo)
		}
		add("%s, %s%s", what, sourceKept(c.masqueraded()), where)
	case dropped:
		c.action = ruleset.ActionDrop
		verb := "dropped"
		if last.rejects() {
			c.action, verb = ruleset.ActionReject, "refused"
		}
		if !last.isOf(mode) {
			c.foreign = chain
			verb = strings.ToUpper(verb) + " by a chain of another program"
		}
		if last.rule == 0 {
			add("%s: %s, by its policy", verb, chain)
			break
		}
		add("%s: %s, rule handle %d", verb, chain, last.rule)
		if text := last.text(); text != "" {
			add("that rule: %s", text)
		}
	case queued:
		c.foreign = chain
		add("queued to a program, which has not returned it: %s, rule handle %d", chain, last.rule)
	default:
		add("lost after these chains, for a reason that nf_tables does not show: iptables-legacy, IPVS, routing (no route, rp_filter) or a full connection table")
	}
}

func (c *connection) masqueraded() bool { return c.lastFrom.Addr() != c.from.Addr() }

// agrees returns nil if the verdict allows what happened to the connection, or an error with the difference.
func (c *connection) agrees(v ruleset.Verdict) error {
	switch v.Action {
	case ruleset.ActionForward:
		i := slices.IndexFunc(v.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == c.lastTo })
		switch {
		case c.foreign != "":
			return fmt.Errorf("stopped by another program: %s", c.foreign)
		case c.action != ruleset.ActionForward:
			return errors.New("not forwarded")
		case i < 0:
			return fmt.Errorf("%v is not one of the expected endpoints", c.lastTo)
		case c.masqueraded() != v.MasqueradeTo(v.Endpoints[i]):
			return fmt.Errorf("%s, but must be: %s", sourceKept(c.masqueraded()), sourceKept(!c.masqueraded()))
		}
	case ruleset.ActionPass:
		// Other programs may stop a packet that belongs to no Service.
		if c.foreign == "" && (c.action == ruleset.ActionReject || c.action == ruleset.ActionDrop) {
			return errors.New("stopped by a rule of the agent")
		}
		if c.action == ruleset.ActionForward {
			return errors.New("destination replaced")
		}
	case c.action:
	default: // it must be rejected or dropped
		if c.foreign != "" {
			return fmt.Errorf("stopped by another program before: %s", c.foreign)
		}
		return fmt.Errorf("not stopped by a rule with action %v", v.Action)
	}
	return nil
}

// chainLines returns a line for each table that the packet met, with the chains in which a
// rule matched.
func chainLines(steps []step) (lines []string) {
	for i, s := range steps {
		switch before := steps[max(i-1, 0)]; {
		case i == 0 || before.table != s.table || before.family != s.family:
			lines = append(lines, fmt.Sprintf("%s, chains %s", s.tableName(), s.chain))
		case before.chain != s.chain:
			lines[len(lines)-1] += " > " + s.chain
		}
	}
	return lines
}

// isOf reports whether the agent in a mode writes the step's chain.
func (s step) isOf(mode string) bool {
	if mode == config.ModeNFTables {
		return s.table == nftables.DefaultTable || s.table == nftables.DefaultTable+"-shadow"
	}
	return strings.HasPrefix(s.chain, "KUBE-") // also in mode ipvs
}

// familyName returns nft's name of the family of the step's table.
func (s step) familyName() string {
	return map[uint8]string{
		unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_NETDEV: "netdev",
	}[s.family]
}

func (s step) tableName() string { return fmt.Sprintf("table %s %s", s.familyName(), s.table) }

// text returns the rule as nft lists it, or "" if nft is missing.
func (s step) text() string {
	out, err := exec.Command("nft", "--handle", "list", "chain", s.familyName(), s.table, s.chain).Output()
	if err != nil {
		return ""
	}
	end := fmt.Sprintf(" # handle %d", s.rule)
	for line := range strings.Lines(string(out)) {
		if text, ok := strings.CutSuffix(strings.TrimSpace(line), end); ok {
			return text
		}
	}
	return ""
}

// rejects reports whether a rule of nft or iptables-nft rejects packets. It returns false if it cannot read the rule.
func (s step) rejects() (rejects bool) {
	conn, err := nft.Dial(nil, 0)
	if err != nil {
		return false
	}
	defer conn.Close()
	request := nfnl.AppendString(nil, unix.NFTA_RULE_TABLE, s.table)
	request = nfnl.AppendString(request, unix.NFTA_RULE_CHAIN, s.chain)
	request = nfnl.AppendUint64(request, unix.NFTA_RULE_HANDLE, s.rule)
	err = conn.Get(unix.NFT_MSG_GETRULE, s.family, false, request, func(rule []byte) error {
		for _, expression := range nfnl.Attributes(attribute(rule, unix.NFTA_RULE_EXPRESSIONS)) {
			name := nfnl.String(attribute(expression, unix.NFTA_EXPR_NAME))
			if name == "target" { // of iptables
				name = nfnl.String(attribute(expression, unix.NFTA_EXPR_DATA, unix.NFTA_TARGET_NAME))
			}
			rejects = rejects || name == "reject" || name == "REJECT"
		}
		return nil
	})
	return rejects && err == nil
}

// attribute returns the value of an attribute, or nil. path has the attributes that contain it, and then its own type.
func attribute(attrs []byte, path ...uint16) []byte {
	for typ, value := range nfnl.Attributes(attrs) {
		if typ == path[0] && len(path) > 1 {
			return attribute(value, path[1:]...)
		} else if typ == path[0] {
			return value
		}
	}
	return nil
}

// interfaceName returns the name of an interface, or "" if it is unknown or gone.
func interfaceName(index int) string {
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return ""
	}
	return i.Name
}
