package conformance

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
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

func sortWords(s string) string {
	words := strings.Fields(s)
	slices.Sort(words)
	return strings.Join(words, " ")
}
