// Package health tells others whether a node should get Service traffic: the
// probes that ask for the proxy as a whole (/healthz and /livez), and external
// load balancers that ask at a Service's health-check node port whether this node
// has endpoints of it.
//
// There are three parts, each of use without the others:
//
//   - [Proxy] is the proxy's health: whether what there is to do gets done in time.
//     [Proxy.Trace] has a [runner.Runner] tell it, [Proxy.Healthz] and [Proxy.Livez]
//     answer with it.
//   - [Services] is a [ruleset.Backend] that counts each Service's local endpoints.
//     [Services.Handler] answers for one Service in one family. It opens no port.
//   - [NodePorts] is a ruleset.Backend that opens and closes the health-check node
//     ports as Services come and go, and answers there with Services.
//
// A node agent has all of them:
//
//	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: 2 * syncPeriod})
//	...
//	services := health.NewServices(health.ServicesConfig{ProxyHealthy: proxy.Healthy})
//	ports := health.NewNodePorts(health.NodePortsConfig{Services: services})
//	defer ports.Close(context.Background())
//	rules := engine.Attach("nftables", backend)
//	checks := engine.Attach("health", ports)
//	r, err := runner.New(runner.Config{..., Trace: proxy.Trace()},
//		func(ctx context.Context) error {
//			// Load balancers are told of what is in effect, and not before.
//			if err := rules.Sync(ctx); err != nil {
//				return err
//			}
//			return checks.Sync(ctx)
//		})
//	mux.Handle("/healthz", proxy.Healthz())
//	mux.Handle("/livez", proxy.Livez())
//
// # What is answered
//
// As by kube-proxy, so that probes and load balancers need not care. /livez is 200
// as long as no update has waited longer than the timeout to come into effect, in
// any address family, and 503 otherwise. /healthz is the same but 503 also while
// the node is not eligible for load-balancer traffic ([Eligible]). Both have a
// JSON body, [Status].
//
// A Service's health check is 200 if the node has a local ready endpoint and the
// proxy is healthy, and 503 otherwise; that the node is not eligible makes no
// difference. The body is
//
//	{"service":{"namespace":"ns","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}
//
// and the header X-Load-Balancing-Endpoint-Weight has the number of endpoints.
// Endpoints are counted by distinct address; one that serves while it terminates
// does not count.
//
// The answer depends on the family of the address that was asked. If the Service
// has that family, which means that it has a cluster IP in it, the answer counts
// the endpoints of that family alone: a dual-stack Service whose only local
// endpoints are IPv4 answers 503 with weight 0 at the node's IPv6 addresses. If
// the Service has only the other family, the answer is the same as at that
// family's addresses.
//
// # Differences from kube-proxy
//
// kube-proxy answers for a single-stack Service at the addresses of its own family
// only, so that a load balancer that checks a node at the other family's address
// takes the node out of service.
//
// Loopback addresses are no NodePort addresses here. If all NodePort addresses of
// a family are loopback addresses, such as 127.0.0.0/8, no health-check node port is
// opened in that family; kube-proxy opens them at those addresses.
//
// An update that is queued while a sync runs counts from when it was queued, also
// if that sync succeeds. A port that moves from one Service to another is closed
// before it is opened. A port that cannot be opened is tried again, by the error
// that NodePorts.Apply returns, and reported once. Servers are shut down, not
// abandoned. No goroutine is started but those that serve an open port.
package health
