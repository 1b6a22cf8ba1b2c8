//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
)

const (
	controlAddr = "10.0.0.2"
	token       = "rival-token"
	nodeName    = "n1"
)

// control is an API server with its etcd, on a host of their own.
type control struct {
	host       *netlab.Host
	dir, logs  string
	kubeconfig string
	http       *http.Client
	processes  []*exec.Cmd
	// services is how many Services there are. generation is which of its sets of
	// endpoints a Service has.
	services   int
	endpoints  int
	generation []int
}

// newControl starts the API server.
func newControl(ctx context.Context, lab *netlab.Lab, o *options, dir string) (_ *control, err error) {
	c := &control{dir: dir, logs: o.logs, endpoints: o.endpoints}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.host, err = lab.Host("control"); err != nil {
		return nil, err
	}
	// The proxies' hosts come and go; the API server's address stays.
	if err = c.host.AddAddr("lo", netip.MustParsePrefix(controlAddr+"/32")); err != nil {
		return nil, err
	}
	c.http = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return c.host.Dial(ctx, network, "", to)
		},
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, // a certificate that the server makes for itself
		MaxIdleConnsPerHost: workers,
		ForceAttemptHTTP2:   true,
	}}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	sa := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	c.kubeconfig = filepath.Join(dir, "kubeconfig")
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "sa.key"), sa, 0o600),
		os.WriteFile(filepath.Join(dir, "tokens.csv"), []byte(token+",admin,1,system:masters\n"), 0o600),
		os.WriteFile(c.kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s:6443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, controlAddr, token), 0o600))
	if err != nil {
		return nil, err
	}
	err = c.start("etcd", o.etcd, "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--quota-backend-bytes", "8000000000",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380")
	if err == nil {
		err = c.start("kube-apiserver", o.apiserver,
			"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", controlAddr, "--advertise-address", controlAddr, "--secure-port", "6443",
			"--cert-dir", filepath.Join(dir, "certs"), "--token-auth-file", filepath.Join(dir, "tokens.csv"),
			"--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount",
			"--service-cluster-ip-range", serviceRange, "--service-account-issuer", "https://cluster.test",
			"--service-account-key-file", filepath.Join(dir, "sa.key"), "--service-account-signing-key-file", filepath.Join(dir, "sa.key"))
	}
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if err = c.ask(ctx, "GET", "/api/v1/namespaces/default", nil); err == nil {
			break
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, fmt.Errorf("the API server is not ready: %w", err)
		}
	}
	node := `{"apiVersion":"v1","kind":"Node","metadata":{"name":"` + nodeName + `"},"status":{"addresses":[{"type":"InternalIP","address":"` + nodeAddr + `"}]}}`
	return c, c.ask(ctx, "POST", "/api/v1/nodes", []byte(node))
}

// start starts a process on the API server's host.
func (c *control) start(name, bin string, args ...string) error {
	cmd := exec.Command(bin, args...)
	log, err := logFile(c.logs, name)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	if log != nil {
		defer log.Close()
	}
	if err := c.host.Start(cmd); err != nil {
		return err
	}
	c.processes = append(c.processes, cmd)
	return nil
}

// logFile returns a file for the log of a process, nil without a folder for it.
func logFile(dir, name string) (*os.File, error) {
	if dir == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	return os.Create(filepath.Join(dir, name+".log"))
}

func (c *control) close() {
	for _, p := range c.processes {
		p.Process.Kill()
		p.Wait()
	}
}

// ask sends a request that must succeed.
func (c *control) ask(ctx context.Context, method, path string, body []byte) error {
	r, err := http.NewRequestWithContext(ctx, method, "https://"+controlAddr+":6443"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, out)
	}
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
	// times as many: two sets for changes to alternate, and one for changes of the number.
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

// setOf returns the Service and the set that an endpoint is of.
func setOf(a netip.Addr) (service, set int) {
	n := int(number(a) - number(endpointRange.Addr()))
	return n / (3 * maxEndpoints), n % (3 * maxEndpoints) / maxEndpoints
}

func serviceObject(i int) []byte {
	return fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"s%d"},"spec":{"clusterIP":"%s","ports":[{"port":%d,"targetPort":%d,"protocol":"TCP"}]}}`,
		i, clusterIP(i), servicePort, endpointPort)
}

func sliceObject(i, set, n int) []byte {
	b := fmt.Appendf(nil, `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"s%d-1","labels":{"kubernetes.io/service-name":"s%d"}},"addressType":"IPv4","ports":[{"name":"","port":%d,"protocol":"TCP"}],"endpoints":[`,
		i, i, endpointPort)
	for j := range n {
		if j > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"addresses":["%s"],"nodeName":"%s","conditions":{"ready":true,"serving":true,"terminating":false}}`, endpoint(i, set, j), nodeName)
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
		if err := c.ask(ctx, "POST", "/api/v1/namespaces/default/services", serviceObject(i)); err != nil {
			return err
		}
		return c.ask(ctx, "POST", slicesPath, sliceObject(i, 0, c.endpoints))
	})
}

// change gives a Service the other of its first two sets of endpoints, and returns which.
// It must not be called for the same Service twice at a time.
func (c *control) change(ctx context.Context, service int) (set int, err error) {
	c.generation[service] = 1 - c.generation[service]%2
	return c.generation[service], c.put(ctx, service, c.generation[service], c.endpoints)
}

// resize gives a Service n endpoints of its third set.
func (c *control) resize(ctx context.Context, service, n int) error {
	c.generation[service] = resized
	return c.put(ctx, service, resized, n)
}

// resized is the set of endpoints for changes of the number.
const resized = 2

func (c *control) put(ctx context.Context, service, set, n int) error {
	return c.ask(ctx, "PUT", fmt.Sprintf("%s/s%d-1", slicesPath, service), sliceObject(service, set, n))
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
