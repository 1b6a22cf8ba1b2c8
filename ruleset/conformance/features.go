package conformance

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
	// ([ruleset.Frontend].Internal). Without, other endpoints' coming and going may move
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
	// TrafficAtOnce: counting a connection before it is made, for backends that are a
	// [ruleset.TrafficReader]. No world is skipped for it; without, the counters are not
	// compared with the connections that were made.
	TrafficAtOnce Feature = "traffic at once"
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
