//go:build linux

package ipvs

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// newRouted returns a client, a node and a server with the endpoints -1 and -2. The client reaches
// Services, and the server the client, by the node.
func newRouted(t *testing.T) (client, node, server *netlab.Host) {
	t.Helper()
	lab, hosts := netlab.NewHosts(t, "client", "node", "server")
	client, node, server = hosts["client"], hosts["node"], hosts["server"]
	must := func(errs ...error) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	must(lab.Link(client, "eth0", node, "eth0"), lab.Link(node, "eth1", server, "eth0"))
	must(client.AddAddr("eth0", prefix("192.0.2.9/24")), node.AddAddr("eth0", prefix("192.0.2.1/24")), node.AddAddr("eth1", prefix("10.245.9.1/16")),
		server.AddAddr("eth0", prefix("10.245.0.1/16")), server.AddAddr("eth0", prefix("10.245.0.2/16")), node.Forward())
	for _, to := range []string{"10.96.0.0/16", "198.18.0.0/16"} {
		must(client.AddRoute(prefix(to), addr("192.0.2.1"), "eth0"))
	}
	must(server.AddRoute(prefix("192.0.2.0/24"), addr("10.245.9.1"), "eth0"))
	return client, node, server
}

// echo serves TCP connections at the endpoints -1 and -2.
func echo(t *testing.T, server *netlab.Host) {
	t.Helper()
	for _, a := range []string{"10.245.0.1", "10.245.0.2"} {
		server.ServeTCP(t, a+":8080", func(c net.Conn) { _, _ = io.Copy(c, c) })
	}
}

// says fails the test unless the other end of a connection answers.
func says(t *testing.T, what string, c net.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(testtime.Timeout))
	fmt.Fprintln(c, "hello")
	if got, err := bufio.NewReader(c).ReadString('\n'); got != "hello\n" {
		t.Errorf("%s: %q, %v", what, got, err)
	}
}

// testDrainOutlivesARestart restarts the backend while an endpoint with a connection terminates. The
// new process ends the drain at the endpoint's own limit.
func testDrainOutlivesARestart(t *testing.T) {
	client, node, server := newRouted(t)
	echo(t, server)
	r := newRig(t, node, Config{Families: []tracker.Family{tracker.IPv4}, DrainLimit: time.Hour})
	r.config.DrainLimitOf = func(_ *ruleset.Port, ep *tracker.Endpoint) time.Duration {
		if ep.Terminating {
			return 10 * time.Minute
		}
		return 0
	}
	r.restart()
	r.set(svc(1), 1, -1)
	r.sync()
	c, err := client.Dial(t.Context(), "tcp", "192.0.2.9:0", "10.96.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	says(t, "at first", c)
	r.terminate(1)
	r.sync()
	says(t, "while its endpoint terminates", c)
	r.restart()
	r.sync()
	for _, after := range []time.Duration{0, 9 * time.Minute} {
		if err := r.backend.tend(t.Context(), time.Now().Add(after)); err != nil {
			t.Fatal(err)
		}
		says(t, "after the restart", c)
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 0")
	if err := r.backend.tend(t.Context(), time.Now().Add(11*time.Minute)); err != nil {
		t.Fatal(err)
	}
	r.hasNot("ipvsadm -Sn", "10.245.0.1:8080")
}

// testNewSchedulerKeepsConnections changes the scheduler of a Service with an open connection.
func testNewSchedulerKeepsConnections(t *testing.T) {
	client, node, server := newRouted(t)
	echo(t, server)
	r := newRig(t, node, Config{Families: []tracker.Family{tracker.IPv4}, Properties: propertiesOf, Schedulers: Schedulers()})
	var open []net.Conn
	for _, s := range append(Schedulers(), "") {
		if s == "ovf" {
			continue // refuses more connections than the endpoint's weight
		}
		r.set(svc(1, with(string(s))), 1, -1, -2)
		r.sync()
		c, err := client.Dial(t.Context(), "tcp", "192.0.2.9:0", "10.96.0.1:80")
		if err != nil {
			t.Fatalf("scheduler %s: %v", s, err)
		}
		defer c.Close()
		open = append(open, c)
		for i, c := range open {
			says(t, fmt.Sprintf("scheduler %s, connection %d", s, i), c)
		}
	}
}
