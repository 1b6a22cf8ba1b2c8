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

// world is a world of the suite.
type world struct {
	name string
	// needs lists the features that the world requires.
	needs  []Feature
	config config
	run    func(cluster)
}

// hashSeed is the hash seed of every world.
const hashSeed = 0x70726f78696572

// config is the configuration of a world.
type config struct {
	// clients and remotePods are the numbers of hosts, 0 for the default.
	clients           int
	remotePods        int
	bridge            bool
	sctp              bool
	masqueradeAll     bool
	nodePortAddresses []string
	// bound lists further addresses of the node; the ports are ignored.
	bound []target
	// localTraffic nil means the CIDR of the local pods.
	localTraffic *ruleset.LocalTraffic
	// delta is the Delta of the engine's [ruleset.Budget].
	delta int
}

// cluster is the cluster of a world's script: a [World] or a simulated one.
type cluster interface {
	// set adds or replaces a Service with its endpoints. change edits one that was
	// set before, and remove deletes one with its endpoints.
	set(*service)
	change(name string, edit func(*service))
	remove(name string)
	// node returns the node information of the tracker, and setNode changes it.
	node() tracker.NodeInfo
	setNode(tracker.NodeInfo)
	setServiceCIDRs(cidrs, inUse []netip.Prefix)
	families() []tracker.Family
	does(Feature) bool
	// lacks reports whether the backend lacks one of the features.
	lacks([]Feature) bool
	// targets returns targets in every family, over each protocol.
	targets([]aim) []Target

	// Sync syncs the backend and fails the test on an error. Scripts call it where no
	// method below does.
	Sync()
	// resync makes the next delta full. detach stops the agent's process, and attach
	// starts a new one.
	resync()
	detach()
	attach()

	// check syncs the backend. It fails the test if connections do not match Trace and
	// the rows.
	check(rows ...row)
	// chosen syncs the backend and returns the endpoint of each client. same fails the
	// test if one differs from before. A simulated data plane has no clients: its
	// [Outcome] states that they stay.
	chosen(p v1.Protocol, to target) map[client]netip.AddrPort
	same(why string, before, now map[client]netip.AddrPort)
	// undisturbed fails the test if a connection fails while f runs.
	undisturbed(to []Target, f func())
	// hold opens connections and returns a function that checks that they still work.
	hold(to []Target) (check func() error)
	errorf(format string, args ...any)
}

// client is an external client in one family.
type client struct {
	family tracker.Family
	number int
}

func (c client) String() string { return fmt.Sprintf("client%d (%s)", c.number, c.family) }

// Target is an address of a Service with endpoints.
type Target struct {
	// Addr is the address of a frontend, or a NodePort at one of the node's addresses.
	Addr netip.AddrPort
	// Protocol is TCP or UDP.
	Protocol v1.Protocol
}

// scriptedWorlds returns the worlds that need no real packets.
func scriptedWorlds() []world { return slices.Concat(loopWorlds(), textWorlds()) }

// affinityClients is the number of clients in worlds about affinity. That all of them
// choose the same of six endpoints by accident has a probability of one in 10^11, and
// so has that none of them chooses another one when free to do so.
const affinityClients = 16

// each returns the results of f for every family.
func each[T any](families []tracker.Family, f func(tracker.Family) T) []T {
	out := make([]T, 0, len(families))
	for _, x := range families {
		out = append(out, f(x))
	}
	return out
}

// validFamilies validates the families to test. Nil means both.
func validFamilies(families []tracker.Family) ([]tracker.Family, error) {
	if families == nil {
		return []tracker.Family{tracker.IPv4, tracker.IPv6}, nil
	}
	if len(families) == 0 {
		return nil, errors.New("conformance: Options.Families is empty")
	}
	for i, f := range families {
		if f != tracker.IPv4 && f != tracker.IPv6 || slices.Contains(families[:i], f) {
			return nil, fmt.Errorf("conformance: Options.Families %v must be one or both of IPv4 and IPv6", families)
		}
	}
	return families, nil
}
