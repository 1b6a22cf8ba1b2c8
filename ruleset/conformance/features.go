package conformance

// Feature is a feature that a data plane may lack, for [Options].Skip.
type Feature string

// The features. Every backend must support behavior that is not listed here.
const (
	// SCTP: Services with protocol SCTP.
	SCTP Feature = "SCTP"
	// Affinity: sessionAffinity ClientIP.
	Affinity Feature = "affinity"
	// AffinityInternal: keeping a client with its endpoint even if internal traffic uses other endpoints than
	// external traffic ([ruleset.Frontend].Internal). Without it, changes of other endpoints may move the client for
	// some time.
	AffinityInternal Feature = "affinity of internal traffic"
	// AffinityTimeout: forgetting a client soon after its affinity timeout.
	AffinityTimeout Feature = "affinity timeout"
	// SourceRanges: loadBalancerSourceRanges.
	SourceRanges Feature = "source ranges"
	// NodePortAddresses: NodePorts at some of the node's addresses only.
	NodePortAddresses Feature = "node port addresses"
	// LoopbackNodePorts: NodePorts at loopback addresses ([ruleset.NodePorts].Loopback).
	// Data planes in the kernel usually lack it.
	LoopbackNodePorts Feature = "loopback node ports"
	// ClosedPorts: refusing connections to closed ports of a cluster IP.
	ClosedPorts Feature = "closed ports"
	// ServiceCIDRs: dropping packets to unused addresses of the Service CIDRs.
	ServiceCIDRs Feature = "service CIDRs"
	// MasqueradeAll: [ruleset.Node].MasqueradeAll.
	MasqueradeAll Feature = "masquerade all"
	// InterfaceDetection: recognizing local traffic by bridge or by interface prefix.
	InterfaceDetection Feature = "interface detection"
	// Restart: a new instance of the backend takes over from another one, without disturbing connections, and removes
	// everything that is not needed any more.
	Restart Feature = "restart"
	// Distribution: choosing among endpoints evenly.
	Distribution Feature = "distribution"
	// WeightedEndpoints: weights of endpoints, [tracker.Endpoint].Weight. Without it,
	// all endpoints in a pool get equal shares.
	WeightedEndpoints Feature = "weighted endpoints"
	// ConsistentHash: choosing endpoints by [tracker.ServicePort].Hash, the same on
	// all nodes. Without it, the hash is ignored.
	ConsistentHash Feature = "consistent hash"
	// HashOfEndpoints: choosing by ConsistentHash depends on the current endpoints alone. Without it, a node whose
	// endpoints changed may send some connections elsewhere than others, and clients may move for some time after a
	// change.
	HashOfEndpoints Feature = "hash of endpoints alone"
	// SourceAddress: preserving the client's address when the ruleset does not ask for masquerading. Skipping it
	// skips no world. A backend without it must always show its endpoints an address of the node.
	SourceAddress Feature = "source address"
	// TrafficAtOnce: counting a connection before it is established, for a [dataplane.TrafficReader]. Skipping it
	// skips no world, but the counters are not compared with the connections.
	TrafficAtOnce Feature = "traffic at once"
	// OtherPorts: not affecting the ports of external and load-balancer IPs that no
	// Service has. The address may belong to a real host.
	OtherPorts Feature = "other ports"
	// RefuseBySource: if a Service has no endpoints, refusing connections from
	// allowed sources and dropping those from others.
	RefuseBySource Feature = "refuse by source"
	// LocalErrors: sockets on the node that send to one of its own addresses get ECONNREFUSED, and not EPERM, if the
	// packet is refused, and no error if it is dropped (see [ruleset.Verdict].MayFailSend). Skipping it skips no
	// world.
	LocalErrors Feature = "local errors"
	// Refuse: answering or dropping connections to a frontend without endpoints for them. Without it, only their
	// being forwarded to an endpoint is a failure.
	Refuse Feature = "refuse"
	// ShortCircuit: under externalTrafficPolicy Local, sending traffic from this node
	// and its pods to the endpoints of every node ([ruleset.Frontend.ShortCircuit]).
	// Without it, such traffic is not checked.
	ShortCircuit Feature = "short circuit"
	// PreferLocal: sending traffic to NodePorts, external IPs and load-balancer IPs to
	// endpoints on the node while there are any ([tracker.ServicePort].PreferLocal).
	// Without it, such traffic to a Service that asks for it is not checked.
	PreferLocal Feature = "prefer local"
	// Masquerade: replacing the client's address where the ruleset asks for it, and
	// nowhere else. Without it, the source that endpoints see is not checked.
	Masquerade Feature = "masquerade"
	// Drop: dropping connections if other nodes have endpoints and this node has none
	// that the traffic policy allows. Without it, such connections may be refused.
	Drop Feature = "drop"
	// ReplaceInPlace: changing an entry without removing it first. Without it, Simulate does not check at
	// [SimEnv].Look that a frontend keeps forwarding, or that another entry does not get its packets for a moment.
	// Skipping it skips no world.
	ReplaceInPlace Feature = "replace in place"
	// UDP: Services with protocol UDP. Without it, no UDP packet is sent or checked, and
	// worlds that need UDP are skipped.
	UDP Feature = "UDP"
	// EndpointPorts: endpoints of one Service port with different ports. Without it,
	// traffic to such a Service port is not checked.
	EndpointPorts Feature = "endpoint ports"
)

var features = []Feature{
	SCTP, Affinity, AffinityInternal, AffinityTimeout, SourceRanges, NodePortAddresses,
	LoopbackNodePorts, ClosedPorts, ServiceCIDRs, MasqueradeAll, InterfaceDetection, Restart,
	Distribution, WeightedEndpoints, ConsistentHash, HashOfEndpoints, SourceAddress, TrafficAtOnce,
	OtherPorts, RefuseBySource, LocalErrors, Refuse, ShortCircuit, PreferLocal, Masquerade, Drop,
	ReplaceInPlace, UDP, EndpointPorts,
}
