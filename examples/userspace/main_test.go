package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// output collects the output of a run.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// waitFor waits until the output has a match after the given place, and returns
// its groups and the place after it.
func (o *output) waitFor(t *testing.T, after int, pattern string) ([]string, int) {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for end := time.Now().Add(testtime.Timeout); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		s := o.String()[after:]
		if m := re.FindStringSubmatchIndex(s); m != nil {
			return re.FindStringSubmatch(s), after + m[1]
		}
	}
	t.Fatalf("no %q in:\n%s", pattern, o)
	return nil, 0
}

// greet starts an endpoint that sends its name.
func greet(t *testing.T, name string) int {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			io.WriteString(c, name)
			c.Close()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func hear(t *testing.T, at string) string {
	t.Helper()
	c := must.Get(net.DialTimeout("tcp", at, testtime.Timeout))(t)
	defer c.Close()
	c.SetDeadline(time.Now().Add(testtime.Timeout))
	text := must.Get(io.ReadAll(c))(t)
	return string(text)
}

// manifest returns a Service at a port below 1024, with further addresses and with policies
// of Local without local endpoints, and a UDP Service without endpoints. The ports of
// different tests must be far apart.
func manifest(port int, balancer string, ports ...int) string {
	text := fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {proxier.example/balancer: %q}}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  externalIPs: [203.0.113.1]
  internalTrafficPolicy: Local
  externalTrafficPolicy: Local
  ports: [{name: http, port: %d, nodePort: 30080}]
---
apiVersion: v1
kind: Service
metadata: {name: dns, namespace: shop}
spec: {clusterIP: 10.96.0.11, ports: [{port: 53, protocol: UDP}]}
`, balancer, port)
	for i, p := range ports {
		text += fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%d, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: %d, protocol: TCP}]
endpoints: [{addresses: [127.0.0.1], nodeName: elsewhere}]
`, i, p)
	}
	return text
}

func write(t *testing.T, file, text string) {
	t.Helper()
	must.Do(t, os.WriteFile(file+".new", []byte(text), 0o600))
	must.Do(t, os.Rename(file+".new", file))
}

// local is a run of the program.
type local struct {
	file      string
	out, diag output
	stop      context.CancelFunc
	done      chan error
}

// startLocal starts a run, which ends with the test.
func startLocal(t *testing.T, text string, args ...string) *local {
	t.Helper()
	l := &local{file: filepath.Join(t.TempDir(), "world.yaml"), done: make(chan error, 1)}
	write(t, l.file, text)
	var ctx context.Context
	ctx, l.stop = context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.done <- run(ctx, append([]string{"--manifests", l.file}, args...), &l.out, &l.diag)
	}()
	t.Cleanup(func() {
		l.stop()
		<-ended
		if t.Failed() {
			t.Log(l.out.String() + l.diag.String())
		}
	})
	return l
}

// web waits for the Service's row in the table, after the given place in the
// output, and returns its address and the place after it.
func (l *local) web(t *testing.T, after, endpoints int) (string, int) {
	t.Helper()
	row, at := l.out.waitFor(t, after, fmt.Sprintf(`shop/web:http +\d+/TCP +(127\.0\.0\.1:\d+|-) +%d\n`, endpoints))
	return row[1], at
}

func TestLocalServesAndFollowsTheManifests(t *testing.T) {
	t.Parallel()
	one, two := greet(t, "one"), greet(t, "two")
	l := startLocal(t, manifest(181, "round-robin", one, two), "--drain", "0s")
	web, at := l.web(t, 0, 2)
	if want := "127.0.0.1:10181"; web != want {
		t.Errorf("the Service is at %s, want %s", web, want)
	}
	l.out.waitFor(t, 0, `shop/dns +53/UDP +- +0\n`)
	if got := hear(t, web) + hear(t, web) + hear(t, web) + hear(t, web); got != "onetwoonetwo" && got != "twoonetwoone" {
		t.Errorf("heard %s", got)
	}

	write(t, l.file, manifest(181, "source-hash", two))
	again, at := l.web(t, at, 1)
	if again != web {
		t.Errorf("the Service moved from %s to %s", web, again)
	}
	if got := hear(t, web); got != "two" {
		t.Errorf("heard %s", got)
	}

	// A Service with an invalid annotation is logged and left out.
	write(t, l.file, manifest(181, "best", two))
	l.out.waitFor(t, at, `SERVICE.*\nshop/dns`)
	l.diag.waitFor(t, 0, `unknown load balancer \\"best\\"`)

	l.stop()
	if err := <-l.done; err != nil {
		t.Error(err)
	}
	if c, err := net.Dial("tcp", web); err == nil {
		c.Close()
		t.Error("something still listens")
	}
}

// listen listens at an address whose socket this process has just closed. Parallel tests start
// processes, and a new process has copies of all sockets until it executes its program.
func listen(t *testing.T, at string) net.Listener {
	t.Helper()
	for end := time.Now().Add(testtime.Timeout); ; time.Sleep(time.Millisecond) {
		l, err := net.Listen("tcp", at)
		if err == nil {
			return l
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// TestTakenLocalPortIsReplaced listens at the port of a Service that has no endpoints.
func TestTakenLocalPortIsReplaced(t *testing.T) {
	t.Parallel()
	mine := greet(t, "mine")
	l := startLocal(t, manifest(300, "", mine), "--drain", "0s")
	web, at := l.web(t, 0, 1)
	write(t, l.file, manifest(300, ""))
	none, at := l.web(t, at, 0)
	if none != "-" {
		t.Errorf("the table has address %s without endpoints", none)
	}
	other := listen(t, web)
	defer other.Close()
	write(t, l.file, manifest(300, "", mine))
	for moved := "-"; moved == "-"; {
		if moved, at = l.web(t, at, 1); moved == web {
			t.Fatalf("the table has address %s, where another program listens", moved)
		} else if moved != "-" && hear(t, moved) != "mine" {
			t.Errorf("another server answers at %s", moved)
		}
	}
	l.diag.waitFor(t, 0, "port is in use by another program")
	if strings.Contains(l.diag.String(), "ERROR") {
		t.Error("the taken port is logged as an error")
	}
}

func TestAnnotationsChooseEndpoints(t *testing.T) {
	t.Parallel()
	text := manifest(400, "", greet(t, "a"), greet(t, "b"))
	weighing := strings.Replace(text, "metadata: {name: web-1,", `metadata: {name: web-1, annotations: {go-proxier.github.io/weight: "3"},`, 1)
	l := startLocal(t, weighing, "--drain", "0s")
	web, _ := l.web(t, 0, 2)
	heard := map[string]int{}
	for range 8 {
		heard[hear(t, web)]++
	}
	if heard["a"] != 2 || heard["b"] != 6 {
		t.Errorf("with weights 1 and 3: %v, want 2 and 6", heard)
	}
	hashed := strings.Replace(weighing, "annotations: {proxier.example", `annotations: {go-proxier.github.io/balance: source, proxier.example`, 1)
	write(t, l.file, hashed)
	// Until the change is in effect, the weighted round robin reaches both endpoints.
	for end := time.Now().Add(testtime.Timeout); ; {
		heard := map[string]int{}
		for range 12 {
			heard[hear(t, web)]++
		}
		if len(heard) == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("with a hash of the source: %v, want one endpoint", heard)
		}
	}
}

func TestBadFlagsAreRejected(t *testing.T) {
	file := filepath.Join(t.TempDir(), "world.yaml")
	write(t, file, manifest(80, ""))
	for want, args := range map[string][]string{
		"--manifests is required": nil,
		`unexpected argument "x"`: {"--manifests", file, "x"},
		"unknown flag":            {"--manifests", file, "--mode", "x"},
		"no such file":            {"--manifests", file + "x"},
		"want one of":             {"--manifests", file, "--balancer", "best"},
		"--drain is negative":     {"--manifests", file, "--drain", "-1s"},
		"pflag: help requested":   {"--help"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := run(ctx, args, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
}

func TestLocalPortsAreAssignedOnce(t *testing.T) {
	name := func(service string, proto v1.Protocol) (n tracker.ServicePortName) {
		n.Namespace, n.Name, n.Protocol = "ns", service, proto
		return n
	}
	tr := must.Get(tracker.New(tracker.Config{}))(t)
	l := &world{Tracker: tr, log: slog.New(slog.DiscardHandler), ports: map[tracker.ServicePortName]uint16{}, taken: map[port]bool{}}
	busy := func(service string, proto v1.Protocol, err error) bool {
		return l.avoid(fmt.Errorf("sync: %w", &ruleset.PartialError{Failed: map[tracker.Key]error{
			{ServicePortName: name(service, proto)}: fmt.Errorf("listen: %w", err),
		}}))
	}
	for _, c := range []struct {
		service string
		proto   v1.Protocol
		own     uint16
		want    uint16 // 0 for an error
	}{
		{"a", v1.ProtocolTCP, 8080, 8080},
		{"b", v1.ProtocolTCP, 8080, 8081}, // the next one
		{"c", v1.ProtocolUDP, 8080, 8080}, // over another protocol
		{"d", v1.ProtocolTCP, 80, 10080},
		{"e", v1.ProtocolTCP, 80, 10081},
		{"a", v1.ProtocolTCP, 9999, 8080}, // keeps its port
		{"f", v1.ProtocolTCP, 65535, 65535},
		{"g", v1.ProtocolTCP, 65535, 0},
	} {
		got, err := l.assign(name(c.service, c.proto), c.own)
		if got != c.want || (err == nil) != (c.want != 0) {
			t.Errorf("%s %d: %d, %v; want %d", c.service, c.own, got, err, c.want)
		}
	}
	if !busy("a", v1.ProtocolTCP, syscall.EADDRINUSE) {
		t.Error("avoid kept a port that another program uses")
	}
	for service, want := range map[string]uint16{"a": 8082, "b": 8081} {
		if got, err := l.assign(name(service, v1.ProtocolTCP), 8080); got != want || err != nil {
			t.Errorf("%s: %d, %v; want %d", service, got, err, want)
		}
	}
	if busy("a", v1.ProtocolTCP, syscall.EADDRNOTAVAIL) || l.avoid(context.Canceled) {
		t.Error("avoid replaced a port that no other program uses")
	}
}

func TestRunWaitsForOpenConnections(t *testing.T) {
	t.Parallel()
	endpoint := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer endpoint.Close()
	world := startLocal(t, manifest(500, "", endpoint.Addr().(*net.TCPAddr).Port), "--drain", "1h")
	web, _ := world.web(t, 0, 1)
	c := must.Get(net.Dial("tcp", web))(t)
	defer c.Close()
	c.SetDeadline(time.Now().Add(testtime.Timeout))
	server := must.Get(endpoint.Accept())(t)
	defer server.Close()
	world.stop()
	listen(t, web).Close() // when the program has closed its own socket
	must.Get(c.Write([]byte("x")))(t)
	must.Get(io.ReadFull(server, make([]byte, 1)))(t)
	select {
	case err := <-world.done:
		t.Errorf("run returned (%v) before the connection ended", err)
	default:
	}
	c.Close()
	server.Close()
	select {
	case err := <-world.done:
		must.Do(t, err)
	case <-time.After(testtime.Timeout):
		t.Error("run did not return after the last connection ended")
	}
}
