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

// row is one line of a world: connections of a kind and what must become of
// them. What must become of them is the oracle's to say; want is there for the
// reader, and to see that a world is about what it means to be about.
type row struct {
	// from lists the hosts, by name.
	from  string
	proto v1.Protocol
	to    target
	// want is "reject", "drop", "pass", or the names of the pods of which each
	// may be reached, with ":port" if it is not podPort, and with a * if it sees
	// the node's address in place of the source.
	want string
}

// enough is how many failures of one check are reported.
const enough = 8

// describe puts a verdict as [row] does. name returns the name of the pod that has an
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
