// Package takeover finds the rules of other Service proxies in a network namespace and
// decides when their owner has ended, so that the rules can be removed without breaking
// connections.
//
// The rules of a proxy that has ended no longer follow the endpoints, and may come before the agent's own. A proxy that
// still runs repairs its rules. So rules may only be removed after their owner has ended.
//
// [Look] reads which rules exist, [Prober] finds out which proxies run, and [Watch] decides.
package takeover

// Owner is a program that programs rules for Services.
type Owner string

// The owners.
const (
	KubeProxy Owner = "kube-proxy"
	Nodeproxy Owner = "nodeproxy"
)

// Kind is the rules of a program in one of its modes: nftables, iptables or ipvs.
type Kind struct {
	Owner Owner
	Mode  string
}

// String returns a form like "kube-proxy's mode iptables".
func (k Kind) String() string { return string(k.Owner) + "'s mode " + k.Mode }
