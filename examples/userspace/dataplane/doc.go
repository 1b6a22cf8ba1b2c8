// Package dataplane is a [ruleset.Backend] whose data plane is this process: it
// listens at the frontends of Services, dials an endpoint for each connection and
// copies. It is what kube-proxy's historic userspace mode was, written as a third
// party would: with nothing but the library's exported API.
//
//	b, err := dataplane.New(dataplane.Config{Addresses: addresses})
//	...
//	cursor := engine.Attach("userspace", b)
//	...
//	b.Shutdown(ctx)
//
// # What it does
//
// A frontend that leads to endpoints has a socket at its address and port; a
// NodePort has one at each of the node's own addresses. For a TCP connection an
// endpoint is chosen by a [balance.Balancer] and dialled, another one if that
// fails, and bytes are copied both ways (by splice(2) on Linux, which package net
// does by itself) until both sides have closed; a reset on one side is a reset on
// the other. For UDP there is a session for each client, with a socket of its own
// towards the endpoint. Sessions end when idle, and the oldest when there are too
// many.
//
// A Service that asks for a hash gets [balance.Maglev] in place of its algorithm,
// by the table and the hash that package nftables gives to the kernel: nodes with
// either data plane send a client, or a source port of it, to the same endpoint. If
// that cannot be reached the connection goes where it would if there were no such
// endpoint. A node that takes over from another one cannot go on with its connections,
// though: they end in the process that accepted them.
//
// Changes disturb no connection that need not notice. An endpoint that is gone
// gets [Config.Drain] until what it still has is cut; a UDP session goes on with
// another endpoint from the client's next datagram. A socket passes from one
// Service to another without being closed.
//
// Where a Service has no endpoint anywhere, nothing listens, and the kernel refuses.
// Where connections are to be dropped, Linux is told by a socket filter
// (SO_ATTACH_FILTER) whom not to answer; elsewhere they are accepted and reset.
//
// # What it does not
//
//   - Endpoints see an address of the node in place of the client's.
//   - SCTP Services are left out, with a line in the log.
//   - Pods are not told from others by interface ([ruleset.LocalTraffic]), only
//     by address.
//   - An address of a Service belongs to the node entirely, if [Config.Addresses]
//     makes it so: ports that no Service has are refused, and what listens at the
//     wildcard address on the node can be reached by it.
//   - Connections end with the process, and those by an address end with the last
//     Service that has it.
//   - A Service without endpoints refuses sources that may not connect, which it
//     ought not answer.
package dataplane
