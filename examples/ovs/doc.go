// Package ovs is a whole data plane in the shape of a third party's: a switch with
// flows and groups, as OpenFlow has, and a backend that programs it. The switch is in
// memory, and its Process method stands for its pipeline.
//
// The backend, [Plane], has the three properties that make a port laborious:
//
//   - Groups. A pool of endpoints is a group, and flows name it by a number.
//     [ids.Allocator] gives out the numbers, which survive a restart.
//   - Owners in keys. A frontend's flow carries the Service that it belongs to, so two
//     Services can have a flow for one address. A frontend that moves is taken over by
//     the new owner's flow before the old owner's goes.
//   - Shared endpoints. The flow for an endpoint is installed once, however many
//     groups have it as a bucket. [ledger.Ledger] counts.
//
// [Plane.Apply] is the numbered steps of package ruleset. A full delta first adopts
// what the switch has: groups keep their numbers, and only what differs is written.
// The test runs the conformance suite without packets.
package ovs
