//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/examples/internal/standin"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

const (
	nodeName = "winnode"
	nodeIP   = "192.0.2.1"
	// quiet is how long no call must be made after a step.
	quiet = 5 * time.Second
	// patience bounds a step. kube-proxy needs minutes to start with 1,000 Services.
	patience = 10 * time.Minute
)

// site is a node with an API server, HNS in memory and Wine.
type site struct {
	lab     *netlab.Lab
	host    *netlab.Host
	control *controlplane.Server
	hns     *fakehns.Service
	server  *standin.Server
	wine    *standin.Wine
	dir     string
	log     string // the file of the programs' output
	// flags are further flags of the proxy.
	flags []string
	proxy *process.Process // nil unless started

	mu   sync.Mutex
	have int // load balancers
	now  counts
}

// counts is what a step cost.
type counts struct {
	began time.Time
	// calls counts all calls, and writes those that changed the service.
	calls, writes int
	// before is the number of load balancers when the step began, and least the least since then.
	before, least int
	// call and write are the times of the last ones.
	call, write time.Time
}

// took returns the time to the last call, or to the last one that writes if there are any.
func (c *counts) took() time.Duration {
	if c.writes != 0 {
		return c.write.Sub(c.began)
	}
	return c.call.Sub(c.began)
}

func newSite(ctx context.Context, wine *standin.Wine, dir string) (_ *site, err error) {
	s := &site{dir: dir, log: filepath.Join(dir, "proxy.log")}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	s.lab = netlab.New()
	peer := s.lab.Host("peer")
	s.host = s.lab.Host("node")
	s.lab.Link(s.host, "eth0", peer, "eth0")
	s.host.Addrs("eth0", nodeIP+"/24")
	if s.lab.Err != nil {
		return nil, s.lab.Err
	}
	// Wine's sockets are those of its server process, so this network needs its own.
	if s.wine, err = wine.Clone(); err != nil {
		return nil, err
	}
	l, err := s.host.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s.hns = fakehns.New(winkernel.Network{ID: "11111111-2222-3333-4444-555555555555", Name: "cluster", Type: winkernel.L2Bridge}, true)
	s.hns.After = s.wrote
	s.server = &standin.Server{Listener: l, Called: s.called}
	s.server.Version.Major, s.server.Version.Minor = 15, 5
	s.server.Use(s.hns)
	go s.server.Serve()
	s.control, err = controlplane.Start(ctx, controlplane.Config{Host: s.host, Address: nodeIP, Dir: dir})
	if err != nil {
		return nil, err
	}
	// The API server's own Service would change the numbers.
	if err := s.control.WaitFor(ctx, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"); err != nil {
		return nil, err
	}
	return s, s.send(ctx, "POST", "/api/v1/nodes", map[string]any{
		"metadata": map[string]any{"name": nodeName},
		"status":   map[string]any{"addresses": []any{map[string]any{"type": "InternalIP", "address": nodeIP}}},
	})
}

func (s *site) close() {
	s.proxy.Kill()
	if s.wine != nil {
		s.wine.Remove()
	}
	if s.control != nil {
		s.control.Close()
	}
	if s.server != nil {
		s.server.Listener.Close()
	}
	s.lab.Close()
}

func (s *site) send(ctx context.Context, method, path string, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	_, err = s.control.Request(ctx, method, path, text)
	return err
}

// called counts a call.
func (s *site) called() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.calls++
	s.now.call = time.Now()
}

// wrote counts a call that writes.
func (s *site) wrote(c fakehns.Call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch c {
	case fakehns.CreateLoadBalancer:
		s.have++
	case fakehns.DeleteLoadBalancer:
		s.have--
		s.now.least = min(s.now.least, s.have)
	}
	s.now.writes++
	s.now.write = time.Now()
}

// loadBalancers returns the number of load balancers of the Services that createServices made.
func (s *site) loadBalancers() int {
	lbs, _ := s.hns.LoadBalancers() // none if the service is stopped
	return len(slices.DeleteFunc(lbs, func(lb winkernel.LoadBalancer) bool { return lb.Frontend.Port != 80 }))
}

func clusterIP(i int) string       { return fmt.Sprintf("10.96.%d.%d", 1+i/250, 1+i%250) }
func endpoint(i, which int) string { return fmt.Sprintf("10.%d.%d.%d", 200+which, i/250, 1+i%250) }
func slice(i int, which ...int) any {
	var endpoints []any
	for _, w := range which {
		endpoints = append(endpoints, map[string]any{"addresses": []string{endpoint(i, w)}, "nodeName": "other", "conditions": map[string]any{"ready": true}})
	}
	return map[string]any{
		"metadata":    map[string]any{"name": fmt.Sprint("svc-", i), "labels": map[string]string{"kubernetes.io/service-name": fmt.Sprint("svc-", i)}},
		"addressType": "IPv4", "endpoints": endpoints, "ports": []any{map[string]any{"name": "http", "port": 8080, "protocol": "TCP"}},
	}
}

// createServices creates Services, each with a cluster IP and two endpoints of its own.
func (s *site) createServices(ctx context.Context, n int) error {
	for i := range n {
		if err := s.send(ctx, "POST", "/api/v1/namespaces/default/services", map[string]any{
			"metadata": map[string]any{"name": fmt.Sprint("svc-", i)},
			"spec":     map[string]any{"clusterIP": clusterIP(i), "ports": []any{map[string]any{"name": "http", "port": 80, "targetPort": 8080}}},
		}); err != nil {
			return err
		}
		if err := s.send(ctx, "POST", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", slice(i, 0, 1)); err != nil {
			return err
		}
	}
	return nil
}

// replaceEndpoint replaces the second endpoint of the first Service.
func (s *site) replaceEndpoint(ctx context.Context, which int) error {
	return s.send(ctx, "PUT", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/svc-0", slice(0, 0, which))
}

func (s *site) endpointReplaced(which int) bool {
	_, endpoints, ok := s.hns.Find(winkernel.Frontend{VIP: netip.MustParseAddr(clusterIP(0)), Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4})
	return ok && len(endpoints) == 2 && slices.ContainsFunc(endpoints, func(e winkernel.Endpoint) bool { return e.Addrs[0].String() == endpoint(0, which) })
}

// command returns the command that runs a Windows program on the node.
func (s *site) command(exe string, args ...string) *exec.Cmd {
	c := s.wine.Command(exe, args...)
	c.Env = append(c.Env, s.server.Env())
	return c
}

// proxyFlags returns flags that kube-proxy and nodeproxy have in common, and s.flags.
func (s *site) proxyFlags() []string {
	return append([]string{"--proxy-mode=kernelspace", "--hostname-override=" + nodeName, "--network-name=cluster",
		"--kubeconfig=" + windowsPath(s.control.Kubeconfig()), "--bind-address=" + nodeIP,
		"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249"}, s.flags...)
}

func (s *site) startProxy(exe string) (err error) {
	s.proxy, err = process.Start(s.host, s.command(exe, s.proxyFlags()...), s.log)
	return err
}

// windowsPath returns the path of a file of this system for Windows programs.
func windowsPath(path string) string { return "Z:" + strings.ReplaceAll(path, "/", `\`) }

// step does something, and waits until it is in effect and no call follows.
func (s *site) step(ctx context.Context, name string, do func() error, done func() bool) (counts, error) {
	s.mu.Lock()
	s.now = counts{began: time.Now(), before: s.have, least: s.have}
	s.mu.Unlock()
	if err := do(); err != nil {
		return counts{}, err
	}
	for {
		s.mu.Lock()
		c := s.now
		s.mu.Unlock()
		switch {
		case c.calls > 0 && time.Since(c.call) > quiet && done():
			return c, nil
		case time.Since(c.began) > patience:
			text, _ := os.ReadFile(s.log)
			return c, fmt.Errorf("%s: not done after %v; the log ends\n%s", name, patience, text[max(0, len(text)-3000):])
		}
		select {
		case <-ctx.Done():
			return c, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
