//go:build linux

package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	"github.com/go-proxier/proxier/tracker"
)

// The chains that operators know from kube-proxy, and ours that have no
// counterpart there.
const (
	chainServices         = "KUBE-SERVICES"               // nat: to the Services; filter: what is refused at cluster IPs
	chainNodePorts        = "KUBE-NODEPORTS"              // nat: to the NodePorts; filter: health-check node ports
	chainPostrouting      = "KUBE-POSTROUTING"            // nat
	chainMarkMasq         = "KUBE-MARK-MASQ"              // nat
	chainMarkNotPods      = "KUBE-MARK-NOT-PODS"          // nat: the same, but for pods' traffic, where that takes several rules to tell
	chainExternalServices = "KUBE-EXTERNAL-SERVICES"      // filter: what is refused at external addresses
	chainRefusedNodePorts = "KUBE-REFUSED-NODEPORTS"      // filter: what is refused at NodePorts
	chainClusterIPs       = "KUBE-CLUSTER-IPS"            // filter: ports of cluster IPs that no Service has
	chainForward          = "KUBE-FORWARD"                // filter
	chainFirewall         = "KUBE-PROXY-FIREWALL"         // filter: sources that are shut out
	chainLocalnet         = "KUBE-PROXY-LOCALNET"         // filter: guards the loopback range while route_localnet is on
	chainCanary           = "KUBE-PROXY-CANARY"           // every table
	chainSourceRanges     = "KUBE-SOURCE-RANGES-FIREWALL" // filter: sources that are let in, of kube-proxy's ipvs mode; it goes with KUBE-PROXY-FIREWALL
	chainTrial            = "KUBE-PROXY-TRIAL"            // every table, only while a refused input is searched for what is at fault

	prefixService  = "KUBE-SVC-" // nat: one of the endpoints that may be used by all
	prefixLocal    = "KUBE-SVL-" // nat: one of the endpoints that may be used under a policy of Local
	prefixExternal = "KUBE-EXT-" // nat: traffic to external addresses
	prefixFirewall = "KUBE-FW-"  // nat: sources that are let in; filter: the same, where they are rejected
	prefixEndpoint = "KUBE-SEP-" // nat
	prefixGroup    = "KUBE-EPG-" // nat: one of some of the endpoints of a Service that has many
)

// hashOf is the part of a chain's name that tells Services apart: kube-proxy's,
// the beginning of the SHA-256 sum in base 32. 80 bits of it make a collision
// something that cannot be come by.
func hashOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "")))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// serviceID is what the names of a Service port's chains are made from.
func serviceID(k tracker.Key) string {
	return k.ServicePortName.String() + strings.ToLower(string(k.Protocol))
}

// owned reports whether a chain of the table belongs to this package or to
// kube-proxy, whose place it takes. Chains that kubelet has too are not among
// them.
func owned(t table, name string) bool {
	if !strings.HasPrefix(name, "KUBE-") {
		return false
	}
	switch name {
	case chainServices, chainNodePorts, chainCanary, chainTrial:
		return true
	case chainPostrouting, chainMarkMasq, chainMarkNotPods:
		return t == nat
	case chainExternalServices, chainRefusedNodePorts, chainClusterIPs, chainForward, chainFirewall, chainSourceRanges, chainLocalnet:
		return t == filter
	}
	for _, prefix := range []string{prefixService, prefixLocal, prefixExternal, prefixEndpoint, prefixGroup} {
		if strings.HasPrefix(name, prefix) {
			return t == nat
		}
	}
	if strings.HasPrefix(name, prefixFirewall) {
		return true
	}
	for _, d := range dispatchers {
		if d.table == t && strings.HasPrefix(name, d.prefix) {
			return true
		}
	}
	return false
}
