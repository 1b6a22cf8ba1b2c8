// Package patterns shows, by examples that are compiled and tested, how the things
// are done that vendors of data planes have in common. It has no code of its own.
//
// # Services
//
//   - Example_annotations: data of one's own on a Service, from an annotation, and
//     how a change of it is noticed when it matters and only then.
//   - Example_selection: to serve some Services and leave the others, by label or
//     by class.
//   - Example_lookup: which Service is behind an address, be it a frontend's or an
//     endpoint's, for flow logs and policies.
//   - Example_allNodes: one process that computes what every node is to do.
//
// # Data planes
//
//   - Package mapplane: two maps, as a BPF program has them, fed entry by entry in
//     an order in which no frontend ever leads to nothing, and with failures. Pools
//     are numbered without gaps by ruleset/slots.
//   - Package grouptable: endpoints that several Services share, installed once
//     and counted by ruleset/ledger, as a switch with an OpenFlow group table needs.
//     Groups keep their IDs over a restart by ruleset/ids.
//   - Package ovs, beside this folder: a backend with groups, Services in the keys of
//     frontends and shared endpoints, on a switch in memory.
//   - The program userspace, beside this folder: a whole third-party proxy.
//
// The tests of all three packages run the conformance suite without packets.
//
// # More followers
//
//   - Example_followers: a health check and the clean-up of stale flows beside a
//     data plane, each with a position of its own.
package patterns
