package conformance

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// world is one of the suite's.
type world struct {
	name string
	// needs is what the backend must do for it.
	needs  []Feature
	config config
	run    func(cluster)
}

// hashSeed is every world's.
const hashSeed = 0x70726f78696572

// config is what a world has of its own.
type config struct {
	// clients and remotePods are how many there are, 0 for a few.
	clients           int
	remotePods        int
	bridge            bool
	sctp              bool
	masqueradeAll     bool
	nodePortAddresses []string
	// bound is further addresses of the node; the ports do not matter.
	bound []target
	// localTraffic is nil for the local pods' CIDR.
	localTraffic *ruleset.LocalTraffic
}

// cluster is what a world's script works on: a [World] or a simulated one.
type cluster interface {
	// set hands Services with their endpoints to the tracker, new or not. change edits
	// one that was set before, and remove deletes one with its endpoints.
	set(services ...service)
	change(name string, edit func(*service))
	remove(name string)
	// node returns the node as the tracker has it, and setNode changes it.
	node() tracker.NodeInfo
	setNode(tracker.NodeInfo)
	setServiceCIDRs([]netip.Prefix)
	families() []tracker.Family

	// Sync has the backend apply what has changed, and fails the test if it cannot.
	Sync()
	// resync makes the next delta full. detach ends the agent's process, and attach
	// starts another.
	resync()
	detach()
	attach()

	// check fails the test if what becomes of connections is not what the oracle and
	// the rows call for. checkFor does so unless the backend does without the feature.
	check(rows ...row)
	checkFor(f Feature, rows ...row)
	// chosen returns the endpoint of each client, and same fails the test if one is not
	// what it was. A simulated data plane has no clients: it states in an [Outcome] that
	// they stay.
	chosen(p v1.Protocol, to target) map[client]netip.AddrPort
	same(why string, before, now map[client]netip.AddrPort)
	// undisturbed fails the test if a connection fails while f runs.
	undisturbed(to []Target, f func())
	// hold opens connections. The function that it returns reports whether they live.
	hold(to []Target) (check func() error)
	errorf(format string, args ...any)
}

// client is one of the clients outside, in one family.
type client struct {
	family tracker.Family
	number int
}

func (c client) String() string { return fmt.Sprintf("client%d (%s)", c.number, c.family) }

// Target is an address at which a Service has endpoints.
type Target struct {
	// Addr is a frontend's, or a NodePort at one of the node's addresses.
	Addr netip.AddrPort
	// Protocol is TCP or UDP.
	Protocol v1.Protocol
}

// scriptedWorlds returns the worlds that need no real packets.
func scriptedWorlds() []world {
	return slices.Concat(
		togetherWorlds(),
		affinityWorlds(),
		changeWorlds(),
		weightWorlds(),
		hashWorlds(),
		clusterIPWorlds(),
		nodePortWorlds(),
		externalWorlds(),
		policyWorlds(),
		masqueradeWorlds(),
		topologyWorlds(),
	)
}

// overUDP returns the rows over TCP and over UDP.
func overUDP(rows ...row) []row {
	out := make([]row, 0, 2*len(rows))
	for _, r := range rows {
		r.proto = tcp
		out = append(out, r)
		r.proto = udp
		out = append(out, r)
	}
	return out
}

// everyone is one host of every sort; of its pods, only pod1 is an endpoint in
// most worlds.
const everyone = "client1 remote3 pod1 pod3 node"

// tcpAndUDP returns a Service's ports: port 80 over both protocols, with node
// ports unless 0.
func tcpAndUDP(nodePort int32) []port {
	return []port{
		{name: "tcp", protocol: tcp, nodePort: nodePort},
		{name: "udp", protocol: udp, nodePort: nodePort},
	}
}

// each returns f of every family.
func each[T any](families []tracker.Family, f func(tracker.Family) T) []T {
	out := make([]T, 0, len(families))
	for _, x := range families {
		out = append(out, f(x))
	}
	return out
}

// validFamilies returns the families to test, both if none are given.
func validFamilies(families []tracker.Family) ([]tracker.Family, error) {
	if families == nil {
		return []tracker.Family{tracker.IPv4, tracker.IPv6}, nil
	}
	if len(families) == 0 {
		return nil, errors.New("conformance: Options.Families is empty")
	}
	for i, f := range families {
		if f != tracker.IPv4 && f != tracker.IPv6 || slices.Contains(families[:i], f) {
			return nil, fmt.Errorf("conformance: Options.Families %v are not one or both of IPv4 and IPv6", families)
		}
	}
	return families, nil
}
