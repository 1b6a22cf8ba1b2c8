// Package dataplane is a [ruleset.Backend] whose data plane is its own process: it listens
// at the frontends of Services, dials an endpoint for each connection and copies bytes, like
// kube-proxy's former userspace mode. It uses only the library's exported API, as a third
// party would.
//
//	b := dataplane.New(dataplane.Config{Addresses: addresses})
//	cursor := engine.Attach("userspace", b)
//	...
//	b.Shutdown(ctx)
//
// An [Algorithm] chooses the endpoint of a TCP connection, or the hash of a Service that has one
// ([tracker.ServicePort.Hash]). If the dial fails, the Backend tries another endpoint. A reset on one side becomes a
// reset on the other. Each UDP client has a session with its own socket towards the endpoint. Idle sessions end. If
// there are too many connections or sessions, the Backend ends one of the client with the most.
//
// A change affects only the connections that it concerns. The connections of a removed
// endpoint are reset after [Config.Drain]. A UDP session moves to another endpoint with the
// client's next datagram. A socket passes from one Service to another without being closed.
//
// A Service without endpoints has no socket, so the kernel refuses connections. If connections must be dropped, a socket
// filter on Linux ignores their packets; other systems accept and reset them.
//
// # Limits
//
//   - Endpoints see an address of the node in place of the client's.
//   - The Backend does not use an endpoint at which its own process listens: connections would loop.
//   - A cluster IP that an interface of the node has is left to a program that listens at the port.
//   - SCTP Services are left out and logged.
//   - Pods are recognized by address alone, not by interface ([ruleset.LocalTraffic]).
//   - If [Config.Addresses] adds an address of a Service to the node, ports without a Service are refused, and programs
//     that listen at the wildcard address can be reached through it.
//   - Connections end with the process, and with the last Service that uses an address that was added.
//   - A Service without endpoints refuses sources that may not connect, although it should not answer them.
package dataplane
