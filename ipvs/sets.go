package ipvs

import (
	"cmp"
	"net/netip"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// setID names one of the backend's ipsets. Each family has all of them.
type setID uint8

// The sets. Names, types and contents are kube-proxy's, except for the last four, which
// kube-proxy does not have.
const (
	// setLoopBack holds an endpoint, its port, and the endpoint again, for hairpin
	// connections.
	setLoopBack setID = iota
	setClusterIP
	setExternalIP
	// setExternalIPLocal and the other …Local sets hold frontends under
	// externalTrafficPolicy Local.
	setExternalIPLocal
	setLoadBalancer
	setLoadBalancerLocal
	// setLoadBalancerFW holds load-balancer IPs with source ranges. The next two sets
	// hold the ranges.
	setLoadBalancerFW
	setLoadBalancerSourceIP
	setLoadBalancerSourceCIDR
	setNodePortTCP
	setNodePortLocalTCP
	setNodePortUDP
	setNodePortLocalUDP
	setNodePortSCTP
	setNodePortLocalSCTP
	setHealthCheckNodePort
	setIPs
	// setBoundExternal holds the addresses in setIPs that are not cluster IPs.
	setBoundExternal
	// setNoLocal holds frontends that drop connections, because other nodes have
	// endpoints and this one has none.
	setNoLocal
	// setNoEndpoints holds frontends that refuse connections, because no node has endpoints.
	setNoEndpoints
	// setShortCircuit holds frontends that treat internal traffic differently, with the
	// packet mark that internal traffic gets.
	setShortCircuit
	setCount
)

// setKind is a type of ipset.
type setKind uint8

const (
	hashIPPort setKind = iota
	hashIPPortIP
	hashIPPortNet
	hashIP
	bitmapPort
	hashIPPortMark
)

// typeName returns the kernel's name of the type, and its oldest revision that has every feature in use
// (net/netfilter/ipset/ip_set_hash_*.c).
func (k setKind) typeName() (name string, revision uint8) {
	switch k {
	case hashIPPortIP:
		return "hash:ip,port,ip", 1
	case hashIPPortNet:
		return "hash:ip,port,net", 2
	case hashIP:
		return "hash:ip", 0
	case bitmapPort:
		return "bitmap:port", 0
	case hashIPPortMark:
		return "hash:ip,port", 5
	}
	return "hash:ip,port", 1
}

// sets describes each set: its name without the prefix, and its kind.
var sets = [setCount]struct {
	name string
	kind setKind
}{
	setLoopBack:               {"LOOP-BACK", hashIPPortIP},
	setClusterIP:              {"CLUSTER-IP", hashIPPort},
	setExternalIP:             {"EXTERNAL-IP", hashIPPort},
	setExternalIPLocal:        {"EXTERNAL-IP-LOCAL", hashIPPort},
	setLoadBalancer:           {"LOAD-BALANCER", hashIPPort},
	setLoadBalancerLocal:      {"LOAD-BALANCER-LOCAL", hashIPPort},
	setLoadBalancerFW:         {"LOAD-BALANCER-FW", hashIPPort},
	setLoadBalancerSourceIP:   {"LOAD-BALANCER-SOURCE-IP", hashIPPortIP},
	setLoadBalancerSourceCIDR: {"LOAD-BALANCER-SOURCE-CIDR", hashIPPortNet},
	setNodePortTCP:            {"NODE-PORT-TCP", bitmapPort},
	setNodePortLocalTCP:       {"NODE-PORT-LOCAL-TCP", bitmapPort},
	setNodePortUDP:            {"NODE-PORT-UDP", bitmapPort},
	setNodePortLocalUDP:       {"NODE-PORT-LOCAL-UDP", bitmapPort},
	setNodePortSCTP:           {"NODE-PORT-SCTP-HASH", hashIPPort},
	setNodePortLocalSCTP:      {"NODE-PORT-LOCAL-SCTP-HASH", hashIPPort},
	setHealthCheckNodePort:    {"HEALTH-CHECK-NODE-PORT", bitmapPort},
	setIPs:                    {"IPVS-IPS", hashIP},
	setBoundExternal:          {"IPVS-EXTERNAL-IPS", hashIP},
	setNoLocal:                {"NO-LOCAL-ENDPOINTS", hashIPPort},
	setNoEndpoints:            {"NO-ENDPOINTS", hashIPPort},
	setShortCircuit:           {"SHORT-CIRCUIT", hashIPPortMark},
}

// maxElements is how many elements a hash may grow to, more than [ruleset.DefaultBudget] allows in all. It starts small.
const maxElements = 1 << 23

// maxSetName is the longest name a set may have (IPSET_MAXNAMELEN of
// include/uapi/linux/netfilter/ipset/ip_set.h, less the zero at its end).
const maxSetName = 31

func (s setID) name(f tracker.Family) string {
	name := "KUBE-" + sets[s].name
	if f == tracker.IPv6 {
		name = "KUBE-6-" + sets[s].name
	}
	return name[:min(len(name), maxSetName)]
}

// entry is an element of a set. It has the fields that the set's kind has.
type entry struct {
	set    setID
	family tracker.Family
	addr   netip.Addr
	// proto is an IP protocol number.
	proto uint8
	port  uint16
	// other is the second address of hash:ip,port,ip, and the prefix of
	// hash:ip,port,net.
	other netip.Prefix
}

func (e entry) compare(o entry) int {
	return cmp.Or(e.addr.Compare(o.addr), cmp.Compare(e.proto, o.proto), cmp.Compare(e.port, o.port),
		e.other.Addr().Compare(o.other.Addr()), cmp.Compare(e.other.Bits(), o.other.Bits()))
}

func nodePortSet(proto uint8, local bool) setID {
	switch {
	case proto == inet.TCP && local:
		return setNodePortLocalTCP
	case proto == inet.TCP:
		return setNodePortTCP
	case proto == inet.UDP && local:
		return setNodePortLocalUDP
	case proto == inet.UDP:
		return setNodePortUDP
	case local:
		return setNodePortLocalSCTP
	}
	return setNodePortSCTP
}
