package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
)

// ip runs commands of the program ip, until one fails.
func ip(commands ...string) error {
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n"))
	_, err := run(cmd)
	return err
}

// router enables forwarding of packets in the network namespace. It also enables IPv6, which
// a new namespace may inherit turned off, and disables duplicate address detection, which
// would delay the use of addresses by a second. The load balancers' client may have several nodes to choose
// from: each connection goes to one of them.
func router() error {
	_, err := output(context.Background(), "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.fib_multipath_hash_policy=1",
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0",
		"net.ipv6.conf.all.disable_ipv6=0", "net.ipv6.conf.default.disable_ipv6=0", "net.ipv6.conf.all.forwarding=1",
		"net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
	return errors.Join(err, ip("link set lo up"))
}

// bridge is the control plane's interface that connects all nodes.
const bridge = "nodes"

// network prepares the control plane's network namespace: a bridge for the nodes, and
// routes to their pods.
func (p *plane) network() error {
	if err := router(); err != nil {
		return err
	}
	return ip(
		"link add "+bridge+" type bridge",
		"addr add "+controlIP+"/24 dev "+bridge,
		"addr add "+controlIP6+"/64 dev "+bridge+" nodad",
		"link set "+bridge+" up",
		"addr add "+balancerClient+"/32 dev lo",
		// Packets to a load balancer without nodes must be lost. The peer of this interface
		// drops them: without ARP they are not addressed to its hardware address.
		"link add lost type veth peer name lost-peer",
		"link set lost arp off up",
		"link set lost-peer up",
		"route add "+balancerRange+" dev lost",
	)
}

// connect connects the node whose process 1 is pid to the bridge, and routes its pods to it.
func (p *plane) connect(n, pid int) error {
	return ip(
		fmt.Sprintf("link add eth0 netns %d type veth peer name %s", pid, nodeName(n)),
		"link set "+nodeName(n)+" master "+bridge+" up",
		"route add "+podIPs(n)+" via "+nodeIP(n),
		"route add "+podIP6s(n)+" via "+nodeIP6(n),
	)
}

// nodeNetwork configures a node's network namespace, which must have eth0.
func nodeNetwork(n, nodes int) error {
	if err := router(); err != nil {
		return err
	}
	commands := []string{
		"addr add " + nodeIP(n) + "/24 dev eth0",
		"addr add " + nodeIP6(n) + "/64 dev eth0 nodad",
		"link set eth0 up",
		"route add 0.0.0.0/0 via " + controlIP,
		"route add ::/0 via " + controlIP6,
	}
	for m := 1; m <= nodes; m++ {
		if m != n {
			commands = append(commands, "route add "+podIPs(m)+" via "+nodeIP(m), "route add "+podIP6s(m)+" via "+nodeIP6(m))
		}
	}
	return ip(commands...)
}

// cniConfig returns a CNI configuration that connects each pod by a veth and routes. With a
// bridge, and without the kernel's br_netfilter, the replies of an endpoint to a client on
// its node would bypass connection tracking.
func cniConfig(n int) string {
	return `{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": false,
      "mtu": 1500,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": ` + strconv.Quote(podIPs(n)) + `}], [{"subnet": ` + strconv.Quote(podIP6s(n)) + `}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}
  ]
}
`
}

// The addresses of a cluster. They exist in the cluster's own network namespaces only, so
// two clusters can use the same addresses.
const (
	maxNodes = 9

	controlIP  = "172.30.0.1" // of the control plane: API server, CoreDNS, router between the nodes
	controlIP6 = "fd00:172:30::1"

	podRange      = "10.244.0.0/16,fd00:10:244::/48"
	serviceRange  = "10.96.0.0/16,fd00:10:96::/112"
	apiServiceIP  = "10.96.0.1" // the API server's Service takes the first address of serviceRange
	dnsServiceIP  = "10.96.0.10"
	clusterDomain = "cluster.local"

	// balancerRange holds the addresses of load balancers. Upstream's tests treat every
	// source address in the /16 of a node's address as a node, so clients of load
	// balancers have an address elsewhere.
	balancerRange  = "198.51.100.0/24"
	balancerClient = "198.18.0.1"
)

func nodeName(n int) string { return fmt.Sprintf("n%d", n) }
func nodeIP(n int) string   { return fmt.Sprintf("172.30.0.1%d", n) }
func nodeIP6(n int) string  { return fmt.Sprintf("fd00:172:30::1%d", n) }
func podIPs(n int) string   { return fmt.Sprintf("10.244.%d.0/24", n) }
func podIP6s(n int) string  { return fmt.Sprintf("fd00:10:244:%d::/64", n) }
func zone(n int) string     { return fmt.Sprintf("zone-%d", (n-1)%3+1) }
