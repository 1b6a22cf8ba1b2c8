// Package metrics exports what the agent does as Prometheus metrics, under the names
// and labels that kube-proxy has for them, so that dashboards and alerts made for
// kube-proxy work.
//
// A [Set] is told by hooks of the library: it is a ruleset.Backend that follows the
// deltas that are in effect, and has methods for the hooks of the runner, the cursor
// and the conntrack cleaner. It registers nothing globally but, with
// [Set.WatchClient], the metrics of client-go, which knows no other way.
//
// Two counters are of mode iptables alone, and left out where the kernel or iptables
// has no nfacct, as by kube-proxy:
// kubeproxy_iptables_ct_state_invalid_dropped_packets_total and
// kubeproxy_iptables_localhost_nodeports_accepted_packets_total, which is also left out
// where NodePorts do not answer at loopback addresses. Missing is
// kubeproxy_nftables_localhost_nodeport_rejected_packets_total: nothing is rejected for
// it, as NodePorts have no rule for loopback addresses in mode nftables.
//
// Where kube-proxy tells address families apart (ip_family), so does the Set. One
// sync covers every family here, so that its duration is observed once for each.
package metrics
