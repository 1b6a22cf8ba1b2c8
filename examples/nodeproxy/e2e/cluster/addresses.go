package main

import "fmt"

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
