//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

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
	logs   []*os.File
	// services is the number of Services. generation is the current set of endpoints of
	// each of them.
	services   int
	generation []int
	// launched is the number of proxies that were started.
	launched int
}

// newControl starts the API server.
func newControl(ctx context.Context, lab *netlab.Lab, o *options, dir string) (_ *control, err error) {
	c := &control{}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	c.host = lab.Host("control")
	// The proxies' hosts come and go; the API server's address stays.
	if c.host.Addrs("lo", controlAddr+"/32"); lab.Err != nil {
		return nil, lab.Err
	}
	for _, name := range []string{"etcd", "kube-apiserver"} {
		log, err := logFile(o.logs, name)
		if err != nil {
			return nil, err
		}
		c.logs = append(c.logs, log)
	}
	c.server, err = controlplane.Start(ctx, controlplane.Config{
		Host: c.host, Address: controlAddr, Programs: o.control, Dir: dir, ServiceRanges: serviceRange,
		EtcdLog: c.logs[0], APIServerLog: c.logs[1],
	})
	if err != nil {
		return nil, err
	}
	if err = c.server.WaitFor(ctx, "/api/v1/namespaces/default"); err != nil {
		return nil, err
	}
	node := `{"apiVersion":"v1","kind":"Node","metadata":{"name":"` + nodeName + `"},"status":{"addresses":[{"type":"InternalIP","address":"` + nodeAddr + `"}]}}`
	return c, c.request(ctx, "POST", "/api/v1/nodes", []byte(node))
}

// logFile creates the log file of a program, and the folder if it is missing. Without a folder it
// opens /dev/null.
func logFile(dir, name string) (*os.File, error) {
	if dir == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	return os.Create(filepath.Join(dir, name+".log"))
}

func (c *control) close() {
	if c.server != nil {
		c.server.Close()
	}
	for _, f := range c.logs {
		f.Close()
	}
}

// request sends a request and ignores the answer.
func (c *control) request(ctx context.Context, method, path string, body []byte) error {
	_, err := c.server.Request(ctx, method, path, body)
	return err
}

// The objects.
const (
	serviceRange = "10.96.0.0/12"
	slicesPath   = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
	workers      = 32 // requests at a time
	minServices  = 2 * watchedChanges
	maxServices  = 60000
	// maxEndpoints is the most endpoints of a Service. Each Service has addresses for three
	// sets: changes alternate between two, and the third is for changes of the number.
	maxEndpoints = 30
)

// The first cluster IP and the first endpoint.
var (
	firstClusterIP = netip.MustParseAddr("10.100.0.1")
	endpointRange  = netip.MustParsePrefix("10.128.0.0/9")
)

const (
	servicePort  = 80
	endpointPort = 8080
)

func number(a netip.Addr) uint32 {
	v := a.As4()
	return binary.BigEndian.Uint32(v[:])
}

func plus(a netip.Addr, n int) netip.Addr {
	var v [4]byte
	binary.BigEndian.PutUint32(v[:], number(a)+uint32(n))
	return netip.AddrFrom4(v)
}

func clusterIP(service int) netip.Addr { return plus(firstClusterIP, service) }

// endpoint returns the n-th address of one of a Service's three sets.
func endpoint(service, set, n int) netip.Addr {
	return plus(endpointRange.Addr(), service*3*maxEndpoints+set*maxEndpoints+n)
}

func setOf(a netip.Addr) (service, set int) {
	n := int(number(a) - number(endpointRange.Addr()))
	return n / (3 * maxEndpoints), n % (3 * maxEndpoints) / maxEndpoints
}

func serviceObject(i int) []byte {
	return fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"s%d"},"spec":{"clusterIP":"%s","ports":[{"port":%d,"targetPort":%d,"protocol":"TCP"}]}}`,
		i, clusterIP(i), servicePort, endpointPort)
}

// nodes is the number of nodes that the endpoints of all Services are distributed over. Their
// addresses are local to the proxy's node nevertheless, so that every connection is answered.
const nodes = 1000

// nodeOf returns the name of an endpoint's node. One of them is the proxy's.
func nodeOf(service, n int) string { return fmt.Sprintf("n%d", (service*maxEndpoints+n)%nodes+1) }

func sliceObject(i, set, n int) []byte {
	b := fmt.Appendf(nil, `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s%d-1","labels":{"kubernetes.io/service-name":"s%d"}},"addressType":"IPv4","ports":[{"name":"","port":%d,"protocol":"TCP"}],"endpoints":[`,
		i, i, endpointPort)
	for j := range n {
		if j > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"addresses":["%s"],"nodeName":"%s","conditions":{"ready":true,"serving":true,"terminating":false}}`, endpoint(i, set, j), nodeOf(i, j))
	}
	return append(b, "]}"...)
}

// grow creates Services until there are n.
func (c *control) grow(ctx context.Context, n int) error {
	if n <= c.services {
		return nil
	}
	first := c.services
	for len(c.generation) < n {
		c.generation = append(c.generation, 0)
	}
	c.services = n
	return parallel(n-first, func(i int) error {
		i += first
		if err := c.request(ctx, "POST", "/api/v1/namespaces/default/services", serviceObject(i)); err != nil {
			return err
		}
		return c.request(ctx, "POST", slicesPath, sliceObject(i, 0, endpoints))
	})
}

// change switches a Service to the other of its first two sets of endpoints and returns
// that set. Calls for the same Service must not be concurrent.
func (c *control) change(ctx context.Context, service int) (set int, err error) {
	c.generation[service] = 1 - c.generation[service]%2
	return c.generation[service], c.put(ctx, service, c.generation[service], endpoints)
}

// resize gives a Service n endpoints of its third set.
func (c *control) resize(ctx context.Context, service, n int) error {
	c.generation[service] = resized
	return c.put(ctx, service, resized, n)
}

// resized is the set of endpoints for changes of the number.
const resized = 2

func (c *control) put(ctx context.Context, service, set, n int) error {
	return c.request(ctx, "PUT", fmt.Sprintf("%s/s%d-1", slicesPath, service), sliceObject(service, set, n))
}

// parallel calls f for each number below n, several at a time, until one fails.
func parallel(n int, f func(int) error) error {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for failed.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(i); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}
