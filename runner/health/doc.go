// Package health serves health checks: the proxy's own probes (/healthz and /livez), and the health-check node
// ports where external load balancers ask whether the node has endpoints of a Service. Its parts can be used alone:
//
//   - [Proxy] tracks whether updates come into effect in time. [Proxy.Hooks] returns hooks for a [runner.Runner].
//     [Proxy.Healthz] and [Proxy.Livez] serve the result.
//   - [Services] is a [ruleset.Backend] that counts each Service's local endpoints. [Services.Handler] serves the
//     count of one Service in one family.
//   - [NodePorts] is a ruleset.Backend that opens and closes the health-check node ports and serves the counts of a
//     Services there. The only goroutines of the package serve open ports.
//
// # Responses
//
// The responses are kube-proxy's. /livez returns 503 if an update has waited longer than the timeout in any address
// family, and 200 otherwise. /healthz also returns 503 until a sync has succeeded in each family, and while the node
// is not eligible for load-balancer traffic ([WhyIneligible]). The body of both is kube-proxy's JSON and, with 503, a
// field "reason".
//
// A Service's health check returns 200 if the node has a local ready endpoint and the proxy is healthy, and 503
// otherwise, whether or not the node is eligible. The body is
//
//	{"service":{"namespace":"ns","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}
//
// The header X-Load-Balancing-Endpoint-Weight holds the number of endpoints, counted by distinct address, of the family
// of the node's address that received the request, or of the Service's only family.
//
// # Bounds
//
// A server that [NewServer] made, and all health-check node ports together, hold up to 512 connections, about 10 MB. A new
// connection replaces one of the namespace, the Service and the client that have most; the addresses of one IPv6 /64, /56
// or /48 count as one client. Slow requests and answers, and connections without a request for a minute, are ended.
//
// # Differences from kube-proxy
//
//   - kube-proxy's /healthz returns 200 before the first sync, when the node has no rules.
//   - kube-proxy serves the check of a single-stack Service only at addresses of the Service's family.
//   - If all NodePort addresses of a family are loopback addresses, this package opens no port in that family.
//   - An update that is queued during a sync waits from the time it was queued, even if that sync succeeds.
package health
