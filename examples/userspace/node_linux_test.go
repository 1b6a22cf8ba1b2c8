package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// childEnv makes this test program run as userspace. It holds the arguments, one per line.
const childEnv = "USERSPACE_TEST_CHILD"

func TestMain(m *testing.M) {
	if args := os.Getenv(childEnv); args != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := run(ctx, strings.Split(args, "\n"), os.Stdout, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	conformance.Main(m)
}

// node is a world in which only this program serves.
type node struct {
	*conformance.World
	file string
	log  output
	cmd  *exec.Cmd
	done chan error
}

// newNode starts the program on the node of a world. It serves the Service web at webAddr,
// at NodePort 30080 and at an external IP. The endpoints are the local pods, IPv4 only.
func newNode(tb testing.TB) *node {
	tb.Helper()
	n := &node{
		World: conformance.NewWorld(tb, conformance.Options{
			Families: []tracker.Family{tracker.IPv4},
			New: func(testing.TB, conformance.Env) ruleset.Backend {
				return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
			},
		}),
		file: filepath.Join(tb.TempDir(), "world.yaml"),
	}
	if err := os.WriteFile(n.file, []byte(webOn(n.Pods()[:3])), 0o600); err != nil {
		tb.Fatal(err)
	}
	n.start(tb)
	tb.Cleanup(func() {
		n.stop(tb, syscall.SIGTERM)
		if tb.Failed() {
			tb.Log(n.log.String())
		}
	})
	return n
}

// webAddr is the Service's cluster IP.
const webAddr = "10.96.0.10:80"

func webOn(pods []conformance.Pod) string {
	text := `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  externalIPs: [203.0.113.1]
  ports: [{name: http, port: 80, nodePort: 30080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
`
	text += fmt.Sprintf("ports: [{name: http, port: %d, protocol: TCP}]\nendpoints:\n", pods[0].Ports()[0])
	for _, p := range pods {
		text += fmt.Sprintf("- {addresses: [%s], nodeName: %s}\n", p.Addr(tracker.IPv4), p.Node)
	}
	return text
}

func (n *node) start(tb testing.TB) {
	tb.Helper()
	n.cmd = exec.Command("/proc/self/exe")
	n.cmd.Env = append(os.Environ(), childEnv+"=--manifests\n"+n.file+"\n--drain\n1s")
	n.cmd.Stdout, n.cmd.Stderr = &n.log, &n.log
	if err := n.Do(n.cmd.Start); err != nil {
		tb.Fatal(err)
	}
	cmd, done := n.cmd, make(chan error, 1)
	n.done = done
	go func() { done <- cmd.Wait() }()
	for end := time.Now().Add(testtime.Timeout); ; time.Sleep(5 * time.Millisecond) {
		// Packets are lost until the node has the address.
		c, _, err := n.hear(webAddr, 3*time.Second)
		if err == nil {
			c.Close()
			return
		}
		if time.Now().After(end) {
			tb.Fatalf("the Service does not answer: %v\n%s", err, n.log.String())
		}
	}
}

func (n *node) stop(tb testing.TB, s syscall.Signal) {
	tb.Helper()
	if n.cmd == nil {
		return
	}
	n.cmd.Process.Signal(s)
	if err := <-n.done; err != nil && s != syscall.SIGKILL {
		tb.Error(err)
	}
	n.cmd = nil
}

// hear connects from the node and returns the endpoint's greeting.
func (n *node) hear(to string, wait time.Duration) (c net.Conn, greeting string, err error) {
	err = n.Do(func() error {
		d := net.Dialer{Timeout: wait}
		c, err = d.DialContext(context.Background(), "tcp", to)
		return err
	})
	if err != nil {
		return nil, "", err
	}
	c.SetDeadline(time.Now().Add(wait))
	buf := make([]byte, 100)
	got, err := c.Read(buf)
	if err != nil {
		c.Close()
		return nil, "", err
	}
	return c, string(buf[:got]), nil
}

// TestNodeIsServedAndCleanedUp also checks that the program follows changes, and adopts the
// addresses that a killed process left.
func TestNodeIsServedAndCleanedUp(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	at := []string{webAddr, "203.0.113.1:80", "192.0.2.1:30080", "198.51.100.1:30080"}
	reached := func(to string) map[netip.Addr]bool {
		t.Helper()
		out := map[netip.Addr]bool{}
		for range 6 {
			c, greeting, err := n.hear(to, testtime.Timeout)
			if err != nil {
				t.Fatalf("%s: %v", to, err)
			}
			c.Close()
			out[netip.MustParseAddrPort(strings.Fields(greeting)[0]).Addr()] = true
		}
		return out
	}
	for _, to := range at {
		if got := reached(to); len(got) != 3 {
			t.Errorf("%s reaches %v", to, got)
		}
	}
	write(t, n.file, webOn(n.Pods()[1:2]))
	only := n.Pods()[1].Addr(tracker.IPv4)
	for end := time.Now().Add(testtime.Timeout); ; {
		if got := reached(webAddr); len(got) == 1 && got[only] {
			break
		} else if time.Now().After(end) {
			t.Fatalf("after a change the Service reaches %v", got)
		}
	}

	n.stop(t, syscall.SIGKILL)
	if _, _, err := n.hear(webAddr, testtime.Timeout); err == nil {
		t.Error("the Service answers although the program was killed")
	}
	// The next process starts with manifests without the external IP.
	text := strings.Replace(webOn(n.Pods()[:1]), "externalIPs: [203.0.113.1]", "externalIPs: []", 1)
	write(t, n.file, text)
	n.start(t)
	routes := func() string {
		list := netlab.Command(t, "ip", "route", "show", "table", "local", "proto", "112")
		var out []byte
		if err := n.Do(func() (err error) {
			out, err = list.CombinedOutput()
			return err
		}); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	// The program serves before it removes leftovers.
	for end := time.Now().Add(testtime.Timeout); ; time.Sleep(time.Millisecond) {
		got := routes()
		if strings.Contains(got, "10.96.0.10") && !strings.Contains(got, "203.0.113.1") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("routes:\n%s", got)
		}
	}
	n.stop(t, syscall.SIGTERM)
	if got := routes(); got != "" {
		t.Errorf("routes after the program ended:\n%s", got)
	}
}
