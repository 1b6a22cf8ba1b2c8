//go:build linux

package ipvs

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// newRouted returns a client, a node and a server with the endpoints -1 and -2. The client reaches
// Services, and the server the client, by the node.
func newRouted(t *testing.T) (client, node, server *netlab.Host) {
	t.Helper()
	_, client, node, server = newRoutedLab(t)
	return client, node, server
}

func newRoutedLab(t *testing.T) (lab *netlab.Lab, client, node, server *netlab.Host) {
	t.Helper()
	lab, hosts := netlab.NewHosts(t, "client", "node", "server")
	client, node, server = hosts["client"], hosts["node"], hosts["server"]
	lab.Link(client, "eth0", node, "eth0")
	lab.Link(node, "eth1", server, "eth0")
	client.Addrs("eth0", "192.0.2.9/24")
	node.Addrs("eth0", "192.0.2.1/24")
	node.Addrs("eth1", "10.245.9.1/16")
	server.Addrs("eth0", "10.245.0.1/16", "10.245.0.2/16")
	node.Forward()
	client.Routes("eth0", "192.0.2.1", "10.96.0.0/16", "198.18.0.0/16")
	server.Routes("eth0", "10.245.9.1", "192.0.2.0/24")
	return lab, client, node, server
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
// new process ends the drain at the limit.
func testDrainOutlivesARestart(t *testing.T) {
	client, node, server := newRouted(t)
	echo(t, server)
	r := newRig(t, node, Config{Families: []tracker.Family{tracker.IPv4}, DrainLimit: 10 * time.Minute})
	r.restart()
	r.set(svc(1), 1, -1)
	r.sync()
	c := must.Get(client.Dial(t.Context(), "tcp", "192.0.2.9:0", "10.96.0.1:80"))(t)
	defer c.Close()
	says(t, "at first", c)
	r.terminate(1)
	r.sync()
	says(t, "while its endpoint terminates", c)
	r.restart()
	r.sync()
	for _, after := range []time.Duration{0, 9 * time.Minute} {
		must.Do(t, r.backend.tend(t.Context(), time.Now().Add(after)))
		says(t, "after the restart", c)
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 0")
	must.Do(t, r.backend.tend(t.Context(), time.Now().Add(11*time.Minute)))
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

// testAnswersGoStraightToTheClient sends packets to external IPs with each way of forwarding. The
// server must see the client's address and the Service's. Its answers go to the client over a link
// of their own, or are routed by the node, as those of a pod on the node. The node itself, cluster IPs
// and NodePorts use translation.
func testAnswersGoStraightToTheClient(t *testing.T) {
	const vip = "198.18.0.1"
	for _, how := range []string{"direct", "tunnel", "gue", "gre"} {
		for _, straight := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, by the node %t", how, !straight), func(t *testing.T) {
				lab, client, node, server := newRoutedLab(t)
				run := func(h *netlab.Host, commands ...string) {
					t.Helper()
					for _, c := range commands {
						lines(t, h, c)
					}
				}
				device := map[string]string{"direct": "lo"}[how]
				switch how {
				case "tunnel", "gue":
					device = "ipip9"
					run(server, "ip link add ipip9 type ipip")
				case "gre":
					device = "gre9"
					run(server, "ip link add gre9 type gre")
				}
				if how == "gue" {
					run(server, "ip fou add port 6080 gue")
				}
				run(server, "ip link set "+device+" up", "ip addr add "+vip+"/32 dev "+device, "sysctl -w net.ipv4.conf.all.rp_filter=0",
					"sysctl -w net.ipv4.conf."+device+".rp_filter=0", "sysctl -w net.ipv4.conf.all.arp_ignore=1")
				if straight {
					lab.Link(client, "eth1", server, "eth1")
					run(client, "ip addr add 203.0.113.1/24 dev eth1", "sysctl -w net.ipv4.conf.all.rp_filter=0", "sysctl -w net.ipv4.conf.eth1.rp_filter=0")
					run(server, "ip addr add 203.0.113.2/24 dev eth1", "ip route replace 192.0.2.9/32 via 203.0.113.1")
				} else {
					run(node, "sysctl -w net.ipv4.conf.eth1.accept_local=1", "sysctl -w net.ipv4.conf.all.rp_filter=0", "sysctl -w net.ipv4.conf.eth1.rp_filter=0")
				}
				handle := func(c net.Conn) {
					fmt.Fprintln(c, c.RemoteAddr(), c.LocalAddr())
					_, _ = io.Copy(c, c)
				}
				server.ServeTCP(t, vip+":80", handle)
				server.ServeTCP(t, "10.245.0.1:8080", handle)
				server.ServeTCP(t, "10.245.0.2:8080", handle)
				r := newRig(t, node, Config{Families: []tracker.Family{tracker.IPv4}, Properties: propertiesOf, Schedulers: Schedulers()})
				set := func(how string, eps ...int) {
					t.Helper()
					r.set(svc(1, with("rr "+how), nodePort(30001), externalIPs(vip)), 1, eps...)
					r.sync()
				}
				// open returns a connection, with what the server sees.
				open := func(from *netlab.Host, source, to string) (net.Conn, string) {
					t.Helper()
					c, err := from.Dial(t.Context(), "tcp", source+":0", to)
					if err != nil {
						t.Fatalf("%s to %s: %v", source, to, err)
					}
					t.Cleanup(func() { c.Close() })
					_ = c.SetDeadline(time.Now().Add(testtime.Timeout))
					line, err := bufio.NewReader(c).ReadString('\n')
					if err != nil {
						t.Fatalf("%s to %s: %v", source, to, err)
					}
					return c, strings.TrimSpace(line)
				}
				set(how, -1)
				c, sees := open(client, "192.0.2.9", vip+":80")
				if want := fmt.Sprint(c.LocalAddr(), " ", vip, ":80"); sees != want {
					t.Errorf("the server sees %s, want %s", sees, want)
				}
				found, err := Lookup(t.Context(), Config{NetNS: node.File()}, dataplane.Query{Packet: ruleset.Packet{Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort(vip + ":80")}})
				if err != nil || !strings.Contains(found.Where, ", directly") {
					t.Errorf("Lookup: %+v, %v", found, err)
				}
				// What is translated is answered by the node.
				for _, x := range []struct {
					from       *netlab.Host
					source, to string
				}{{node, "192.0.2.1", vip + ":80"}, {node, "192.0.2.1", "10.96.0.1:80"}} {
					if _, sees := open(x.from, x.source, x.to); !strings.HasSuffix(sees, " 10.245.0.1:8080") {
						t.Errorf("%s to %s: the server sees %s", x.source, x.to, sees)
					}
				}
				set(how, -2)
				says(t, "while its endpoint drains", c)
				r.has("ipvsadm -Sn", "-a -t "+vip+":80 -r 10.245.0.1:8080 "+map[string]string{"direct": "-g -w 0", "tunnel": "-i -w 0 --tun-type ipip",
					"gue": "-i -w 0 --tun-type gue --tun-port 6080 --tun-nocsum", "gre": "-i -w 0 --tun-type gre --tun-nocsum"}[how])
				if err := r.backend.Check(t.Context()); err != nil {
					t.Error(err)
				}
				r.cursor.Resync()
				r.sync()
				says(t, "after a full delta", c)
				r.restart()
				r.sync()
				says(t, "after a restart", c)
				must.Do(t, r.backend.tend(t.Context(), time.Now().Add(time.Hour)))
				says(t, "while it drains on", c)
				open(client, "192.0.2.9", vip+":80")
				set("", -2)
				if how != "gre" { // its device does not unpack IPIP (see DESIGN.md)
					says(t, "after the Service is translated", c)
				}

				// One-packet scheduling sends packets from one port to both endpoints.
				server.ServeUDP(t, vip+":80", "answer")
				one := svc(2, over(v1.ProtocolUDP), with("rr "+how), externalIPs(vip))
				one.Annotations["one-packet"] = "yes"
				r.set(one, 2, -1, -2)
				r.sync()
				u := must.Get(client.Dial(t.Context(), "udp", "192.0.2.9:0", vip+":80"))(t)
				defer u.Close()
				for range 6 {
					_ = u.SetDeadline(time.Now().Add(testtime.Timeout))
					must.Get(u.Write([]byte("hello")))(t)
					if _, err := u.Read(make([]byte, 100)); err != nil {
						t.Fatalf("one-packet scheduling: %v", err)
					}
				}
				r.has("ipvsadm -Sn", "-A -u "+vip+":80 -s rr -o")
				// The kernel sums up its statistics every two seconds.
				shares := func() (n int) {
					for _, l := range r.run("ipvsadm -Ln --stats -u " + vip + ":80") {
						if f := strings.Fields(l); f[0] == "->" && strings.HasPrefix(f[1], "10.245.0.") && f[2] == "3" {
							n++
						}
					}
					return n
				}
				for start := time.Now(); shares() != 2; time.Sleep(100 * time.Millisecond) {
					if time.Since(start) > testtime.Timeout {
						t.Fatalf("the endpoints got %q, want 3 packets each", r.run("ipvsadm -Ln --stats -u "+vip+":80"))
					}
				}
			})
		}
	}
}

// testOperatorsChooseTheSource adds the rule of DESIGN.md. Masqueraded packets must have its address,
// after a full delta, too.
func testOperatorsChooseTheSource(t *testing.T) {
	client, node, server := newRouted(t)
	must.Do(t, node.AddAddr("eth1", netip.MustParsePrefix("10.245.9.77/16")))
	server.ServeTCP(t, "10.245.0.1:8080", func(c net.Conn) { fmt.Fprintln(c, c.RemoteAddr()) })
	r := newRig(t, node, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, externalIPs("198.18.0.1")), 1, -1)
	r.sync()
	for _, want := range []string{"10.245.9.1:", "10.245.9.77:", "10.245.9.77:"} {
		c := must.Get(client.Dial(t.Context(), "tcp", "192.0.2.9:0", "198.18.0.1:80"))(t)
		_ = c.SetDeadline(time.Now().Add(testtime.Timeout))
		if sees, err := bufio.NewReader(c).ReadString('\n'); !strings.HasPrefix(sees, want) {
			t.Errorf("the server sees %q, %v, want %s", sees, err, want)
		}
		c.Close()
		if want == "10.245.9.1:" {
			r.run("iptables -t nat -I POSTROUTING -m mark --mark 0x4000/0x4000 -j SNAT --to-source 10.245.9.77 --random-fully")
		}
		if err := r.backend.Check(t.Context()); err != nil {
			t.Error(err)
		}
		r.cursor.Resync()
		r.sync()
	}
}
