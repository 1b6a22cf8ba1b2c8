// Package ovs is an example of a third party's data plane: a switch with flows and groups,
// like OpenFlow's, and a backend that programs the switch.
//
// The backend, which [New] makes, has the three properties that make a backend laborious:
//
//   - Groups. A pool of endpoints is a group, and flows name it by a number.
//     [driver.Numbered] allocates the numbers, which survive a restart.
//   - Owners in keys. The key of a frontend's flow holds the Service, so two Services can
//     have a flow for one address. When a frontend moves, the new owner's flow is added
//     before the old owner's flow is removed.
//   - Shared endpoints. The flow for an endpoint is installed once, whatever the number of
//     groups that use it. The driver counts its users.
//
// A full delta first adopts the switch's state. The test runs the conformance suite with a
// switch in memory.
package ovs
