//go:build linux

package wholeagent

import (
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
)

// flowsTo returns the number of UDP flows that the node sends to a port of a pod.
func (s *site) flowsTo(t *testing.T, port uint16) (n int) {
	t.Helper()
	err := s.Node.Do(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		for _, f := range flows {
			if f.Forward.Protocol == unix.IPPROTO_UDP && f.Reverse.SrcPort == port && !f.Reverse.SrcIP.Equal(f.Forward.DstIP) {
				n++
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// mediaIP is a load-balancer IP of the Services media and single.
const mediaIP = "203.0.113.10"

// mediaService is a Service with the endpoints podIPs[:2] and a port to extend in each protocol.
// single has one port in the same range at the same load-balancer IP, and the endpoint podIPs[2].
const mediaService = `apiVersion: v1
kind: Service
metadata:
  name: media
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  ports:
  - {name: rtp, port: 10000, protocol: UDP}
  - {name: data, port: 10000, protocol: TCP, nodePort: 30010}
status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: media-1, labels: {kubernetes.io/service-name: media}}
addressType: IPv4
ports: [{name: rtp, port: 5353, protocol: UDP}, {name: data, port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.1.0.2]}, {addresses: [10.1.0.3]}]
---
apiVersion: v1
kind: Service
metadata: {name: single}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.20
  ports:
  - {name: u, port: 15001, protocol: UDP}
  - {name: t, port: 15001, protocol: TCP}
status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: single-1, labels: {kubernetes.io/service-name: single}}
addressType: IPv4
ports: [{name: u, port: 5353, protocol: UDP}, {name: t, port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.1.0.4]}]
`

// mediaRanges is the annotation of media: ports that are kept, and ports that are shifted by 20,000.
const mediaRanges = `go-proxier.github.io/port-ranges: "rtp=10000-20000,data=10000-20000:30000"`

// newMediaSite returns a site whose pods also listen at the first, middle and last port of the
// ranges of media, and at the ports before and after them. They answer with address and port.
func newMediaSite(t *testing.T) *site {
	t.Helper()
	s := newSite(t)
	s.Client.Routes("", "192.0.2.1", "203.0.113.0/24")
	for _, ip := range podIPs {
		for _, port := range []int{9999, 10000, 15000, 15001, 20000, 20001} {
			at := fmt.Sprintf("%s:%d", ip, port)
			s.pods.ServeUDP(t, at, at+"\n")
			at = fmt.Sprintf("%s:%d", ip, port+20000)
			s.pods.ServeTCP(t, at, func(c net.Conn) { io.WriteString(c, at+"\n") })
		}
	}
	return s
}

// answers returns what answers the client at an address, sorted, or the first error.
func (s *site) answers(network, to string) string {
	return whoAnswers(30, network, func() (*lab.Talk, error) { return lab.Dial(s.Client, network, "", to, testtime.Timeout) })
}

// silent checks that nothing answers the client at an address.
func (s *site) silent(t *testing.T, network, to string) {
	t.Helper()
	c, err := lab.Dial(s.Client, network, "", to, lab.NoAnswerTimeout)
	if err != nil {
		return
	}
	defer c.Close()
	io.WriteString(c, "?")
	c.SetReadDeadline(time.Now().Add(lab.NoAnswerTimeout))
	buf := make([]byte, 64)
	if n, err := c.Read(buf); err == nil {
		t.Errorf("%s %s is answered by %q", network, to, buf[:n])
	}
}

// at joins the first two pods' addresses with a port.
func at(port int) string {
	if port == 0 {
		return podIPs[0] + " " + podIPs[1]
	}
	return fmt.Sprintf("%s:%d %s:%d", podIPs[0], port, podIPs[1], port)
}

// TestPortRangesReachThePods gives a Service ranges by the annotation, in the modes that have them,
// and takes them away. A single port of another Service at the same address keeps its packets.
func TestPortRangesReachThePods(t *testing.T) {
	t.Parallel()
	for _, mode := range explainedModes {
		if objects.PortRanges(mode) != ruleset.PortRangesShifted {
			continue // see TestModesWithoutRangesServeThePortAlone
		}
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			s := newMediaSite(t)
			dir := t.TempDir()
			put(t, dir, "media.yaml", annotated(mediaService, mediaRanges))
			flags := []string{"--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode, "--cluster-cidr", "10.1.0.0/16", "--nodeport-addresses", "primary,localhost", "--allow-annotations", "port-ranges"}
			p := start(t, s.Node, append([]string{"run", "--min-sync-period", "0s"}, flags...)...)
			p.synced(t, "services=2 endpoints=6 changed=4")

			expect := func(network, to, want string) {
				t.Helper()
				if got := s.answers(network, to); got != want {
					t.Errorf("%s %s is answered by %q, want %q", network, to, got, want)
				}
			}
			for _, ip := range []string{"10.96.0.10", mediaIP} {
				for _, port := range []int{10000, 15000, 20000} {
					expect("udp", fmt.Sprintf("%s:%d", ip, port), at(port))
					expect("tcp", fmt.Sprintf("%s:%d", ip, port), at(port+20000))
				}
				for _, port := range []int{9999, 20001} {
					s.silent(t, "udp", fmt.Sprintf("%s:%d", ip, port))
					s.silent(t, "tcp", fmt.Sprintf("%s:%d", ip, port))
				}
			}
			expect("tcp", "192.0.2.1:30010", at(0)) // a NodePort has no range
			for _, network := range []string{"udp", "tcp"} {
				expect(network, mediaIP+":15001", podIPs[2])
			}
			for network, want := range map[string]string{"udp": at(15000), "tcp": at(35000)} {
				if got := s.reached(network, "10.96.0.10:15000"); got != want {
					t.Errorf("from the node, %s 10.96.0.10:15000 is answered by %q, want %q", network, got, want)
				}
			}
			expect("udp", "10.96.0.10:15001", at(15001)) // single does not have this address
			expect("tcp", "10.96.0.10:15001", at(35001))

			for to, endpoint := range map[string]int{"10.96.0.10:15000/udp": 15000, mediaIP + ":15000/tcp": 35000} {
				e := start(t, s.Node, append([]string{"explain", "--from", "192.0.2.9"}, append(flags, to)...)...)
				code, lines := e.exit(t)
				out := strings.Join(lines, "\n") + "\n"
				contains(t, out, ", ports 10000-20000\n", "kernel: agrees\n")
				for _, ip := range podIPs[:2] {
					contains(t, out, fmt.Sprintf("\nendpoint: %s:%d on", ip, endpoint), fmt.Sprintf("\nkernel: endpoint %s:%d\n", ip, endpoint))
				}
				if code != 0 {
					t.Errorf("explain %s: exit status %d:\n%s", to, code, e.log())
				}
				address, network, _ := strings.Cut(to, "/")
				for _, by := range []string{"nftrace", "conntrack"} {
					code, out := runTrace(t, s.Node, func() { expect(network, address, at(endpoint)) }, append(flags, "--count", "5", "--by", by, to)...)
					contains(t, out, " to "+address+"/"+strings.ToUpper(network), fmt.Sprintf(":%d, masqueraded", endpoint), "5 forwarded, 0 refused, 0 neither; kernel and objects AGREE\n")
					if code != 0 {
						t.Errorf("trace --by %s %s: exit status %d:\n%s", by, to, code, out)
					}
				}
			}
			e := start(t, s.Node, append([]string{"explain", "--from", "192.0.2.9"}, append(flags, mediaIP+":15001")...)...)
			if code, out := e.exit(t); code != 0 || !slices.Contains(out, "kernel: endpoint 10.1.0.4:8080") || !slices.Contains(out, "kernel: agrees") {
				t.Errorf("explain of the single port: exit status %d:\n%s\n%s", code, strings.Join(out, "\n"), e.log())
			}

			// Without the annotation the ports are served alone, with the ports of the slice.
			put(t, dir, "media.yaml", mediaService)
			p.synced(t, "services=2 endpoints=6 changed=2")
			// The agent deletes the flows of the ranges after the sync, and a new socket may have the
			// port of an earlier one.
			eventually(t, "the flows of the ranges have ended", func() bool { return s.flowsTo(t, 10000) == 0 })
			for _, network := range []string{"udp", "tcp"} {
				for _, ip := range []string{"10.96.0.10", mediaIP} {
					expect(network, ip+":10000", at(0))
					s.silent(t, network, ip+":15000")
					s.silent(t, network, ip+":20000")
				}
				expect(network, mediaIP+":15001", podIPs[2])
			}
			if p.loggedErrors() || strings.Contains(p.log(), "is ignored") || strings.Contains(p.log(), "exceeds a limit") {
				t.Errorf("log:\n%s", p.log())
			}
			p.stop(t)
		})
	}
}

// TestModesWithoutRangesServeThePortAlone gives a Service ranges by the annotation in the modes that
// do not have them. [objects.TestModesWithoutRangesKeepThePort] has the modes that not every kernel
// has.
func TestModesWithoutRangesServeThePortAlone(t *testing.T) {
	t.Parallel()
	for _, mode := range append(slices.Clone(explainedModes), config.ModeUserspace) {
		if objects.PortRanges(mode) != ruleset.PortRangesNone {
			continue
		}
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			s := newMediaSite(t)
			dir := t.TempDir()
			put(t, dir, "media.yaml", annotated(mediaService, mediaRanges))
			p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode, "--allow-annotations", "port-ranges")
			p.synced(t, "services=2 endpoints=6 changed=4")
			for _, network := range []string{"udp", "tcp"} {
				if got := s.answers(network, "10.96.0.10:10000"); got != at(0) {
					t.Errorf("%s: the port is answered by %q", network, got)
				}
				s.silent(t, network, "10.96.0.10:15000")
			}
			p.logged(t, "annotation go-proxier.github.io/port-ranges is ignored: this mode has no ranges of ports")
		})
	}
}

// TestSourceHashJoinsThePortsOfAService checks what the documentation recommends for FTP: with balance
// "source" and the same target port, a client reaches the same pod through a single port and
// through a range.
func TestSourceHashJoinsThePortsOfAService(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for i := range 8 {
		s.Client.Addrs("eth0", fmt.Sprintf("192.0.2.%d/24", 20+i))
	}
	for _, ip := range podIPs {
		s.pods.ServeTCP(t, ip+":30050", func(c net.Conn) { io.WriteString(c, ip+"\n") })
	}
	const ports = "  - {name: http, port: 80, nodePort: 30080}\n"
	service := strings.Replace(webService, ports, ports+"  - {name: data, port: 30000}\n", 1)
	slice := strings.Replace(webSlice(podIPs...), "- {name: http, port: 8080}\n", "- {name: http, port: 8080}\n- {name: data, port: 8080}\n", 1)
	dir := t.TempDir()
	put(t, dir, "web.yaml", annotated(service, "go-proxier.github.io/balance: source", `go-proxier.github.io/port-ranges: "data=30000-30100"`)+"---\n"+slice)
	p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--allow-annotations", "balance,port-ranges")
	p.synced(t, "services=1 endpoints=6 changed=2")
	reached := map[string]bool{}
	for i := range 8 {
		from := fmt.Sprintf("192.0.2.%d", 20+i)
		control, _, err := lab.Visit(s.Client, from, clusterVIP)
		if err != nil {
			t.Fatal(err)
		}
		data, _, err := lab.Visit(s.Client, from, "10.96.0.10:30050")
		if err != nil || data != control {
			t.Errorf("%s reaches %q by the range, error %v, and %q by the port", from, data, err, control)
		}
		reached[control] = true
	}
	if len(reached) < 2 {
		t.Errorf("all clients reach %v", reached)
	}
}
