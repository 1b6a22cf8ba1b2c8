package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/tracker"
)

// The chains that operators know from kube-proxy, and some that kube-proxy does not
// have.
const (
	chainServices         = "KUBE-SERVICES"               // nat: to the Services; filter: to the next and KUBE-CLUSTER-IPS
	chainNodePorts        = "KUBE-NODEPORTS"              // nat: to the NodePorts; filter: health-check node ports
	chainPostrouting      = "KUBE-POSTROUTING"            // nat
	chainMarkMasq         = "KUBE-MARK-MASQ"              // nat
	chainMarkNotPods      = "KUBE-MARK-NOT-PODS"          // nat: the same, except for pods' traffic, if several rules recognize pods
	chainExternalServices = "KUBE-EXTERNAL-SERVICES"      // filter: refuses at all addresses of Services
	chainRefusedRanges    = "KUBE-REFUSED-RANGES"         // filter: of release 0.2.0, for ranges of ports
	chainRefusedNodePorts = "KUBE-REFUSED-NODEPORTS"      // filter: refuses at NodePorts
	chainClusterIPs       = "KUBE-CLUSTER-IPS"            // filter: refuses at ports of cluster IPs that no Service has
	chainForward          = "KUBE-FORWARD"                // filter
	chainFirewall         = "KUBE-PROXY-FIREWALL"         // filter: sources that are not allowed
	chainLocalnet         = "KUBE-PROXY-LOCALNET"         // filter: guards the loopback range while route_localnet is on
	chainCanary           = "KUBE-PROXY-CANARY"           // every table
	chainSourceRanges     = "KUBE-SOURCE-RANGES-FIREWALL" // filter: sources that are allowed, of kube-proxy's ipvs mode; deleted with KUBE-PROXY-FIREWALL
	chainProbe            = "KUBE-PROXY-TRIAL"            // every table, only while rules are tried

	prefixService  = "KUBE-SVC-"   // nat: selects one of the endpoints for all clients
	prefixLocal    = "KUBE-SVL-"   // nat: selects one of the endpoints under a policy of Local
	prefixExternal = "KUBE-EXT-"   // nat: traffic to external addresses
	prefixFirewall = "KUBE-FW-"    // nat: sources that are allowed; filter: the same, where they are rejected
	prefixEndpoint = "KUBE-SEP-"   // nat
	prefixGroup    = "KUBE-SEP-G-" // nat: selects one of a group of endpoints of a large Service
	prefixRanges   = "KUBE-RRNG-"  // filter: of release 0.2.0, below KUBE-REFUSED-RANGES
	prefixXLB      = "KUBE-XLB-"   // nat: of kube-proxy before 1.24; later releases leave it, with jumps to the chains above
)

// hashOf returns the part of a chain's name that identifies a Service or endpoint, as kube-proxy's: the first 80 bits
// of a SHA-256 sum in base 32.
func hashOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "")))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// EndpointChain returns the name of the chain of an endpoint of a Service port, in a [Backend] and in kube-proxy's
// mode iptables. With client affinity it is also the name of the kernel's list of the endpoint's clients (xt_recent).
func EndpointChain(k tracker.Key, endpoint netip.AddrPort) string {
	return prefixEndpoint + hashOf(serviceID(k), endpoint.String())
}

// serviceID returns the text that the names of a Service port's chains are hashes of.
func serviceID(k tracker.Key) string {
	return k.ServicePortName.String() + strings.ToLower(string(k.Protocol))
}

// owned reports whether a chain of the table belongs to this package or to kube-proxy alone.
func owned(t table, name string) bool {
	if !strings.HasPrefix(name, "KUBE-") {
		return false
	}
	switch name {
	case chainServices, chainNodePorts, chainCanary, chainProbe:
		return true
	case chainPostrouting, chainMarkMasq, chainMarkNotPods:
		return t == nat
	case chainExternalServices, chainRefusedNodePorts, chainRefusedRanges, chainClusterIPs, chainForward, chainFirewall, chainSourceRanges, chainLocalnet:
		return t == filter
	}
	for _, prefix := range []string{prefixService, prefixLocal, prefixExternal, prefixEndpoint, prefixXLB} {
		if strings.HasPrefix(name, prefix) {
			return t == nat
		}
	}
	if strings.HasPrefix(name, prefixFirewall) {
		return true
	}
	if strings.HasPrefix(name, prefixRanges) {
		return t == filter
	}
	for _, d := range dispatchers {
		if d.table == t && strings.HasPrefix(name, d.prefix) {
			return true
		}
	}
	return false
}
