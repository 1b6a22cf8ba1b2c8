package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// patience is how long anything may take that must happen.
const patience = 20 * time.Second

// output is what a run wrote, by then.
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
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		s := o.String()[after:]
		if m := re.FindStringSubmatchIndex(s); m != nil {
			return re.FindStringSubmatch(s), after + m[1]
		}
	}
	t.Fatalf("no %q in:\n%s", pattern, o)
	return nil, 0
}

// greet is an endpoint that says its name.
func greet(t *testing.T, name string) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
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
	c, err := net.DialTimeout("tcp", at, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	text, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// manifest is a Service with a policy that no endpoint of this machine meets, and
// with other addresses besides; and one over UDP, which has no endpoint.
func manifest(balancer string, ports ...int) string {
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
  ports: [{name: http, port: 80, nodePort: 30080}]
---
apiVersion: v1
kind: Service
metadata: {name: dns, namespace: shop}
spec: {clusterIP: 10.96.0.11, ports: [{port: 53, protocol: UDP}]}
`, balancer)
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
	if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

// TestLocal is a developer's session.
func TestLocal(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "world.yaml")
	one, two := greet(t, "one"), greet(t, "two")
	write(t, file, manifest("round-robin", one, two))
	var out, diag output
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, []string{"--manifests", file, "--local", "--drain", "0s"}, &out, &diag)
	}()
	defer func() {
		stop()
		<-done
		if t.Failed() {
			t.Log(diag.String())
		}
	}()
	row, at := out.waitFor(t, 0, `shop/web:http +80/TCP +(127\.0\.0\.1:\d+) +2\n`)
	web := row[1]
	out.waitFor(t, 0, `shop/dns +53/UDP +127\.0\.0\.1:\d+ +0\n`)
	if got := hear(t, web) + hear(t, web) + hear(t, web) + hear(t, web); got != "onetwoonetwo" && got != "twoonetwoone" {
		t.Errorf("heard %s", got)
	}

	write(t, file, manifest("source-hash", two))
	_, at = out.waitFor(t, at, `shop/web:http +80/TCP +`+regexp.QuoteMeta(web)+` +1\n`)
	if got := hear(t, web); got != "two" {
		t.Errorf("heard %s", got)
	}

	// What cannot be used is left out and said.
	write(t, file, manifest("best", two))
	out.waitFor(t, at, `SERVICE.*\nshop/dns`)
	diag.waitFor(t, 0, `unknown algorithm \\"best\\"`)

	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	done <- nil
	if c, err := net.Dial("tcp", web); err == nil {
		c.Close()
		t.Error("something still listens")
	}
}

func TestFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "world.yaml")
	write(t, file, manifest(""))
	for want, args := range map[string][]string{
		"--manifests is required":   {"--local"},
		`what is "x"?`:              {"--manifests", file, "x"},
		"unknown flag":              {"--manifests", file, "--mode", "x"},
		"no such file":              {"--local", "--manifests", file + "x"},
		"want one of":               {"--local", "--manifests", file, "--balancer", "best"},
		"--cluster-cidr":            {"--local", "--manifests", file, "--cluster-cidr", "10.0.0.0"},
		"NodePort addresses":        {"--local", "--manifests", file, "--nodeport-addresses", "x"},
		"--drain is negative":       {"--local", "--manifests", file, "--drain", "-1s"},
		"MaxSessions is negative":   {"--local", "--manifests", file, "--max-sessions", "-1"},
		"pflag: help requested":     {"--help"},
		"DialTimeout is negative":   {"--local", "--manifests", file, "--dial-timeout", "-1s"},
		"invalid argument \"many\"": {"--local", "--manifests", file, "--max-connections", "many"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := run(ctx, args, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
}

func TestLocalPorts(t *testing.T) {
	name := func(service string, proto v1.Protocol) (n tracker.ServicePortName) {
		n.Namespace, n.Name, n.Protocol = "ns", service, proto
		return n
	}
	busy := map[uint16]bool{8081: true, 8082: true, 65535: true}
	l := newLocalPorts()
	l.free = func(p localPort) bool { return !busy[p.number] }
	for _, c := range []struct {
		service string
		proto   v1.Protocol
		own     uint16
		want    uint16 // 0: none
	}{
		{"a", v1.ProtocolTCP, 8080, 8080},
		{"b", v1.ProtocolTCP, 8080, 8083}, // the next ones are busy
		{"c", v1.ProtocolUDP, 8080, 8080}, // over another protocol
		{"d", v1.ProtocolTCP, 80, 10080},
		{"e", v1.ProtocolTCP, 80, 10081},
		{"a", v1.ProtocolTCP, 9999, 8080}, // it keeps what it has
		{"f", v1.ProtocolTCP, 65535, 0},
	} {
		got, err := l.assign(name(c.service, c.proto), c.own)
		if got != c.want || (err == nil) != (c.want != 0) {
			t.Errorf("%s %d: %d, %v; want %d", c.service, c.own, got, err, c.want)
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	p := localPort{v1.ProtocolTCP, uint16(taken.Addr().(*net.TCPAddr).Port)}
	if isFree(p) {
		t.Errorf("%v is free", p)
	}
	taken.Close()
	if !isFree(p) {
		t.Errorf("%v is not free", p)
	}
}

// TestEnd: connections get time to end.
func TestEnd(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	file := filepath.Join(t.TempDir(), "world.yaml")
	write(t, file, manifest("", l.Addr().(*net.TCPAddr).Port))
	var out, diag output
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, []string{"--manifests", file, "--local", "--drain", "1h"}, &out, &diag) }()
	row, _ := out.waitFor(t, 0, `shop/web:http +80/TCP +(127\.0\.0\.1:\d+) +1\n`)
	c, err := net.Dial("tcp", row[1])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	echo := func() error {
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 1))
		return err
	}
	if err := echo(); err != nil {
		t.Fatal(err)
	}
	stop()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		again, err := net.Dial("tcp", row[1])
		if err != nil {
			break
		}
		again.Close()
		if time.Now().After(end) {
			t.Fatal("it goes on listening")
		}
	}
	if err := echo(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-done:
		t.Errorf("it ended (%v) before the connection did", err)
	default:
	}
	c.Close()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error(errors.New("it did not end with the last connection"))
	}
}
