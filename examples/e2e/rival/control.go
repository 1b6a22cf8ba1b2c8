//go:build linux

package main

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sync/errgroup"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

const (
	controlAddr = "10.0.0.2"
	nodeName    = "n1"
)

// control is an API server on a host of its own, with the objects that it holds.
type control struct {
	host   *netlab.Host
	server *controlplane.Server
	// services is the number of Services. generation is the current set of endpoints of
	// each of them.
	services   int
	generation []int
	// launched is the number of proxies that were started.
	launched int
}

// newControl starts the API server. The caller must close c.server.
func newControl(ctx context.Context, lab *netlab.Lab, dir string) (c *control, err error) {
	c = &control{host: lab.Host("control")}
	// The proxies' hosts come and go; the API server's address stays.
	if c.host.Addrs("lo", controlAddr+"/32"); lab.Err != nil {
		return nil, lab.Err
	}
	if c.server, err = controlplane.Start(ctx, controlplane.Config{Host: c.host, Address: controlAddr, Dir: dir}); err != nil {
		return nil, err
	}
	node := `{"apiVersion":"v1","kind":"Node","metadata":{"name":"` + nodeName + `"},"status":{"addresses":[{"type":"InternalIP","address":"` + nodeAddr + `"}]}}`
	if err = c.server.WaitFor(ctx, "/api/v1/namespaces/default"); err == nil {
		err = c.request(ctx, "POST", "/api/v1/nodes", []byte(node))
	}
	if err != nil {
		c.server.Close()
	}
	return c, err
}

// request sends a request and ignores the answer.
func (c *control) request(ctx context.Context, method, path string, body []byte) error {
	_, err := c.server.Request(ctx, method, path, body)
	return err
}

// The objects.
const (
	slicesPath  = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
	workers     = 32 // requests at a time
	minServices = 2 * watchedChanges
	maxServices = 60000
)

const (
	servicePort  = 80
	endpointPort = 8080
)

func clusterIP(service int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 100, byte(service >> 8), byte(service)})
}

// endpointRange has the endpoints of all Services.
var endpointRange = netip.MustParsePrefix("10.128.0.0/9")

// endpoint returns the n-th address of one of a Service's two sets, between which changes alternate.
func endpoint(service, set, n int) netip.Addr {
	i := (service*2+set)*endpoints + n
	return netip.AddrFrom4([4]byte{10, 128 + byte(i>>16), byte(i >> 8), byte(i)})
}

func setOf(a netip.Addr) (service, set int) {
	b := a.As4()
	i := (int(b[1]-128)<<16 + int(b[2])<<8 + int(b[3])) / endpoints
	return i / 2, i % 2
}

func serviceObject(i int) []byte {
	return fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"s%d"},"spec":{"clusterIP":"%s","ports":[{"port":%d,"targetPort":%d,"protocol":"TCP"}]}}`,
		i, clusterIP(i), servicePort, endpointPort)
}

// nodes is the number of nodes that the endpoints of all Services are distributed over. Their
// addresses are local to the proxy's node nevertheless, so that every connection is answered.
const nodes = 1000

// nodeOf returns the name of an endpoint's node. One of them is the proxy's.
func nodeOf(service, n int) string { return fmt.Sprintf("n%d", (service*endpoints+n)%nodes+1) }

func sliceObject(i, set int) []byte {
	b := fmt.Appendf(nil, `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s%d-1","labels":{"kubernetes.io/service-name":"s%d"}},"addressType":"IPv4","ports":[{"name":"","port":%d,"protocol":"TCP"}],"endpoints":[`,
		i, i, endpointPort)
	for j := range endpoints {
		if j > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"addresses":["%s"],"nodeName":"%s","conditions":{"ready":true,"serving":true,"terminating":false}}`, endpoint(i, set, j), nodeOf(i, j))
	}
	return append(b, "]}"...)
}

// grow creates Services until there are n.
func (c *control) grow(ctx context.Context, n int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for i := c.services; i < n; i++ {
		g.Go(func() error {
			if err := c.request(ctx, "POST", "/api/v1/namespaces/default/services", serviceObject(i)); err != nil {
				return err
			}
			return c.request(ctx, "POST", slicesPath, sliceObject(i, 0))
		})
	}
	c.services, c.generation = n, append(c.generation, make([]int, n-c.services)...)
	return g.Wait()
}

// change switches a Service to the other of its sets of endpoints and returns
// that set. Calls for the same Service must not be concurrent.
func (c *control) change(ctx context.Context, service int) (set int, err error) {
	set = 1 - c.generation[service]
	c.generation[service] = set
	return set, c.request(ctx, "PUT", fmt.Sprintf("%s/s%d-1", slicesPath, service), sliceObject(service, set))
}
