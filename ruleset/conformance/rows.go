package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
)

const (
	tcp  = v1.ProtocolTCP
	udp  = v1.ProtocolUDP
	sctp = v1.ProtocolSCTP
)

// row is one line of a world: connections of one kind and their expected result.
// Trace determines the result. want documents it, and detects worlds that do not test
// what they should.
type row struct {
	// from lists the hosts, by name.
	from  string
	proto v1.Protocol
	to    target
	// want is "reject", "drop", "pass", or the names of the pods that may be reached,
	// with ":port" if the port is not podPort, and with a * if the pod sees the
	// node's address in place of the source.
	want string
}

// enough bounds the failures reported for one check.
const enough = 8

// describe formats a verdict like row.want. name returns the name of the pod with an
// address, or "".
func describe(v ruleset.Verdict, name func(netip.Addr) string) string {
	if v.Action != ruleset.ActionForward {
		return v.Action.String()
	}
	var names []string
	for _, ep := range v.Endpoints {
		n := name(ep.Addr.Addr())
		switch port := ep.Addr.Port(); {
		case n == "":
			n = ep.String()
		case port != podPort:
			n += fmt.Sprint(":", port)
		}
		if v.MasqueradeTo(ep) {
			n += "*"
		}
		names = append(names, n)
	}
	return sortWords(strings.Join(names, " "))
}

func sortWords(s string) string {
	words := strings.Fields(s)
	slices.Sort(words)
	return strings.Join(words, " ")
}
