package conformance

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Main is for the TestMain of a package that calls [Run] or [NewWorld]. It runs
// the tests as root of new user and network namespaces and exits with their
// status. Where these cannot be made it runs the tests all the same, and the
// package's worlds are skipped.
func Main(m *testing.M) { netlab.Main(m) }

// Options says what is tested.
type Options struct {
	// New makes the backend of one world; required. It is called, as every Apply
	// is, on a thread inside the node's network namespace. What must be undone
	// when the world ends goes to tb.Cleanup.
	New func(tb testing.TB, env Env) ruleset.Backend
	// Families is the address families to test, nil for both.
	Families []tracker.Family
	// Skip says what the backend does not do, and why. Worlds that are about it
	// are skipped with that reason, and in the others the connections that are. Nil
	// means that it does everything.
	Skip map[Feature]string

	// run, if not nil, adds up what the worlds of a run excuse.
	run *excuses

	// The rest is for tests of the suite itself. timeout and silence replace the
	// constants if not 0: for backends that are to fail, in one way or the other.
	timeout, silence time.Duration
	// stalled pretends that the machine stalls all the time, and delay makes every
	// connection that measures a time so much later.
	stalled bool
	delay   time.Duration
}

// Env is where a backend finds itself.
type Env struct {
	// NetNS is an open file of the node's network namespace. It is open until the test
	// ends.
	NetNS *os.File
	// Families is the address families in use.
	Families []tracker.Family

	do func(func() error) error
}

// Do runs f on a thread inside the node's network namespace, where a backend may
// open sockets that it needs later than in New and Apply. Goroutines that f starts
// do not run inside. It may be called from any goroutine, until the test ends. The
// error is f's, or why the namespace could not be entered.
func (e Env) Do(f func() error) error { return e.do(f) }

// Feature is something that a data plane may do without, for [Options.Skip].
type Feature string

// The features. What has none here is expected of every backend.
const (
	// SCTP: Services with protocol SCTP.
	SCTP Feature = "SCTP"
	// Affinity: sessionAffinity ClientIP.
	Affinity Feature = "affinity"
	// AffinityNear: keeping a client with its endpoint, as long as that is there, also
	// where what comes from near goes to other endpoints than what comes from outside
	// ([ruleset.Frontend].Near). Without, other endpoints' coming and going may move
	// it, and that for some time afterwards.
	AffinityNear Feature = "affinity near"
	// AffinityTimeout: forgetting a client soon after its affinity has timed out.
	AffinityTimeout Feature = "affinity timeout"
	// SourceRanges: loadBalancerSourceRanges.
	SourceRanges Feature = "source ranges"
	// NodePortAddresses: NodePorts at some of the node's addresses only.
	NodePortAddresses Feature = "node port addresses"
	// ClosedPorts: refusing connections to ports of a cluster IP that no Service
	// has.
	ClosedPorts Feature = "closed ports"
	// ServiceCIDRs: dropping packets to unused addresses of the Service CIDRs.
	ServiceCIDRs Feature = "service CIDRs"
	// MasqueradeAll: [ruleset.Node].MasqueradeAll.
	MasqueradeAll Feature = "masquerade all"
	// InterfaceDetection: telling local traffic by bridge or by interface prefix.
	InterfaceDetection Feature = "interface detection"
	// Restart: a new instance of the backend, made where another one has been at
	// work (and is not called any more), takes over from it without a disturbance
	// and leaves nothing of what is gone.
	Restart Feature = "restart"
	// Distribution: choosing among endpoints evenly.
	Distribution Feature = "distribution"
	// WeightedEndpoints: weights of endpoints, [tracker.Endpoint].Weight. Without,
	// each endpoint in a pool counts alike.
	WeightedEndpoints Feature = "weighted endpoints"
	// ConsistentHash: choosing endpoints as [tracker.ServicePort].Hash says, all nodes
	// alike. Without, they are chosen as where nothing is said.
	ConsistentHash Feature = "consistent hash"
	// HashOfEndpoints: choosing by ConsistentHash as follows from the endpoints that
	// there are, and from nothing else. Without, nodes choose alike that were started
	// with the same endpoints, but some connections are sent elsewhere by one that
	// has been through changes, and for some time after a change clients may move.
	HashOfEndpoints Feature = "hash of endpoints alone"
	// SourceAddress: letting endpoints see the client's address where nothing calls
	// for masquerading. No world is skipped for it; but a backend without it, such
	// as one that makes connections of its own, must show its endpoints an address
	// of the node always.
	SourceAddress Feature = "source address"
	// OtherPorts: leaving alone the ports of external and load-balancer IPs that no
	// Service has. The address may be a real host's.
	OtherPorts Feature = "other ports"
	// RefuseBySource: refusing connections from the sources that may connect, where
	// a Service has no endpoints, while others get no answer.
	RefuseBySource Feature = "refuse by source"
	// LocalErrors: sockets on the node itself that send to one of its own addresses
	// get ECONNREFUSED, and not EPERM, where the packet is refused, and no error where
	// it is dropped (see [ruleset.Verdict].MayFailSend). No world is skipped for it.
	LocalErrors Feature = "local errors"
)

// validate says what is wrong with the options.
func (o Options) validate() error {
	if o.New == nil {
		return errors.New("conformance: Options.New is required")
	}
	families := o.families()
	if len(families) == 0 {
		return errors.New("conformance: Options.Families is empty")
	}
	for i, f := range families {
		if f != tracker.IPv4 && f != tracker.IPv6 || slices.Contains(families[:i], f) {
			return fmt.Errorf("conformance: Options.Families %v are not one or both of IPv4 and IPv6", families)
		}
	}
	return nil
}

// families returns the families under test.
func (o Options) families() []tracker.Family {
	if o.Families == nil {
		return []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	return o.Families
}
