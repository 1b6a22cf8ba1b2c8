package inspect

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/inspect/follow"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// outcome is what the kernel did with a connection.
type outcome struct {
	lines  []string
	action ruleset.Action // 0 if the packet was lost or queued
	// foreign names the chain of another program that stopped the packet, or is "".
	foreign     string
	endpoint    netip.AddrPort // under ActionForward
	masqueraded bool
}

// outcome returns what the kernel did with a packet.
func (t *tracing) outcome(p *follow.Packet) outcome {
	var o outcome
	o.lines = chainLines(p.Steps)
	last := follow.Step{}
	if len(p.Steps) > 0 {
		last = p.Steps[len(p.Steps)-1]
	}
	switch p.Outcome {
	case follow.Sent, follow.Delivered:
		o.action, o.endpoint, o.masqueraded = ruleset.ActionForward, p.LastTo, p.LastFrom.Addr() != p.From.Addr()
		where := ""
		if name, err := interfaceName(p.Out); err == nil {
			where = ", out by " + name
		}
		if p.Outcome == follow.Delivered {
			where = ", on this node"
		}
		if p.LastTo == p.To {
			o.action = ruleset.ActionPass
			o.addf("destination unchanged, %s%s", sourceKept(o.masqueraded), where)
			return o
		}
		o.addf("endpoint %v, %s%s", o.endpoint, sourceKept(o.masqueraded), where)
	case follow.Dropped:
		text, rejects := ruleText(last)
		o.action = ruleset.ActionDrop
		verb := "dropped"
		if rejects {
			o.action, verb = ruleset.ActionReject, "refused"
		}
		where := fmt.Sprintf("%s, chain %s", tableName(last), last.Chain)
		if !ownsChain(t.mode, last) {
			o.foreign = where
			verb = strings.ToUpper(verb) + " by a chain of another program"
		}
		if last.Rule == 0 {
			o.addf("%s: %s, by its policy", verb, where)
			break
		}
		o.addf("%s: %s, rule handle %d", verb, where, last.Rule)
		if text != "" {
			o.addf("that rule: %s", text)
		}
	case follow.Queued:
		o.foreign = fmt.Sprintf("%s, chain %s", tableName(last), last.Chain)
		o.addf("queued to a program, which has not returned it: %s, rule handle %d", o.foreign, last.Rule)
	default:
		o.addf("lost after these chains, for a reason that nf_tables does not show: iptables-legacy, IPVS, routing (no route, rp_filter) or a full connection table")
	}
	return o
}

func (o *outcome) addf(format string, args ...any) {
	o.lines = append(o.lines, fmt.Sprintf(format, args...))
}

// agrees returns nil if the outcome is one that the verdict allows, or an error with the
// difference.
func (o outcome) agrees(v ruleset.Verdict) error {
	switch v.Action {
	case ruleset.ActionForward:
		if o.foreign != "" {
			return fmt.Errorf("stopped by another program: %s", o.foreign)
		}
		i := slices.IndexFunc(v.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == o.endpoint })
		switch {
		case o.action != ruleset.ActionForward:
			return errors.New("not forwarded")
		case i < 0:
			return fmt.Errorf("%v is not one of the expected endpoints", o.endpoint)
		case o.masqueraded != v.MasqueradeTo(v.Endpoints[i]):
			return fmt.Errorf("%s, but must be: %s", sourceKept(o.masqueraded), sourceKept(!o.masqueraded))
		}
	case ruleset.ActionPass:
		// Other programs may stop a packet that belongs to no Service.
		if o.foreign == "" && (o.action == ruleset.ActionReject || o.action == ruleset.ActionDrop) {
			return errors.New("stopped by a rule of the agent")
		}
		if o.action == ruleset.ActionForward {
			return errors.New("destination replaced")
		}
	case ruleset.ActionReject, ruleset.ActionDrop:
		if o.action == v.Action {
			return nil
		}
		if o.foreign != "" {
			return fmt.Errorf("stopped by another program before: %s", o.foreign)
		}
		return fmt.Errorf("not stopped by a rule with action %v", v.Action)
	}
	return nil
}

// chainLines returns a line for each table that the packet met, with the chains in which a
// rule matched.
func chainLines(steps []follow.Step) (lines []string) {
	for i := 0; i < len(steps); {
		first, j := steps[i], i
		var chains []string
		for ; j < len(steps) && steps[j].Table == first.Table && steps[j].Family == first.Family; j++ {
			if n := len(chains); n == 0 || chains[n-1] != steps[j].Chain {
				chains = append(chains, steps[j].Chain)
			}
		}
		lines = append(lines, fmt.Sprintf("%s, chains %s", tableName(first), strings.Join(chains, " > ")))
		i = j
	}
	return lines
}

// familyNames are nft's names of the families of nf_tables.
var familyNames = map[uint8]string{
	unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_NETDEV: "netdev",
}

func tableName(s follow.Step) string {
	return fmt.Sprintf("table %s %s", familyNames[s.Family], s.Table)
}

// ruleText returns a rule as nft lists it, or "" if nft is missing, and whether the rule
// rejects packets.
func ruleText(s follow.Step) (text string, rejects bool) {
	if s.Rule == 0 {
		return "", false
	}
	rejects = ruleRejects(s)
	out, err := exec.Command("nft", "--handle", "list", "chain", familyNames[s.Family], s.Table, s.Chain).Output()
	if err != nil {
		return "", rejects
	}
	end := fmt.Sprintf(" # handle %d", s.Rule)
	for line := range strings.Lines(string(out)) {
		if text, ok := strings.CutSuffix(strings.TrimSpace(line), end); ok {
			return text, rejects
		}
	}
	return "", rejects
}

// ruleRejects reports whether a rule of nft or iptables-nft rejects packets. It returns false if it cannot read the rule.
func ruleRejects(s follow.Step) (rejects bool) {
	conn, err := nft.Dial(nil, 0)
	if err != nil {
		return false
	}
	defer conn.Close()
	request := nfnl.AppendString(nil, unix.NFTA_RULE_TABLE, s.Table)
	request = nfnl.AppendString(request, unix.NFTA_RULE_CHAIN, s.Chain)
	request = nfnl.AppendUint64(request, unix.NFTA_RULE_HANDLE, s.Rule)
	err = conn.Get(unix.NFT_MSG_GETRULE, s.Family, false, request, func(rule []byte) error {
		for typ, list := range nfnl.Attributes(rule) {
			if typ != unix.NFTA_RULE_EXPRESSIONS {
				continue
			}
			for _, expression := range nfnl.Attributes(list) {
				rejects = rejects || named(expression, unix.NFTA_EXPR_NAME, "reject")
				for typ, data := range nfnl.Attributes(expression) {
					target := typ == unix.NFTA_EXPR_DATA && named(expression, unix.NFTA_EXPR_NAME, "target")
					rejects = rejects || target && named(data, unix.NFTA_TARGET_NAME, "REJECT")
				}
			}
		}
		return nil
	})
	return rejects && err == nil
}

func named(attrs []byte, attr uint16, name string) bool {
	for typ, value := range nfnl.Attributes(attrs) {
		if typ == attr {
			return nfnl.String(value) == name
		}
	}
	return false
}

func interfaceName(index int) (string, error) {
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return "", err
	}
	return i.Name, nil
}
