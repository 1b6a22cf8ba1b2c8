// Package metrics exports Prometheus metrics of a node agent, with the names, types, labels
// and buckets of kube-proxy 1.37, so that dashboards and alerts for kube-proxy work:
//
//	set := metrics.NewSet(metrics.Config{Mode: "nftables", Families: families})
//	cursor := rules.Follow("metrics", set) // rules is the cursor of the data plane
//	http.Handle("/metrics", set.Handler())
//
// The source of names, types, labels and buckets is the Kubernetes Metrics Reference; a test
// holds them as a table.
//
// A [Set] holds one agent's metrics in its own registry. Hooks of the library feed it: it
// is a ruleset.Backend that follows the deltas that are in effect, and has methods for the
// hooks of the runner, the cursor and the conntrack cleaner.
//
// Metrics of the whole process come from k8s.io/component-base and its global registry:
// kubernetes_feature_enabled (which the agent sets when it starts), rest_client_* (which exist
// once a client of an API server was made), and those of the Go runtime and the process.
// [Set.Handler] serves both.
//
// # Modes
//
// As in kube-proxy, these metrics depend on the mode:
//   - sync_full_proxy_rules_duration_seconds and sync_partial_proxy_rules_duration_seconds
//     exist in modes iptables and nftables.
//   - sync_proxy_rules_iptables_restore_failures_total exists in modes iptables and ipvs.
//   - sync_proxy_rules_winkernel_lb_create_failures_total and the same for update and delete exist
//     in mode kernelspace, with kube-proxy's labels ip_family, lb_type and error. As in kube-proxy,
//     a series exists from its first failure on.
//   - Mode userspace has none of these.
//   - The other metrics with iptables in their names exist in mode iptables, those with
//     nftables in mode nftables.
//
// The two counters of packets (iptables_ct_state_invalid_dropped_packets_total and
// iptables_localhost_nodeports_accepted_packets_total) are left out if the kernel or
// iptables has no nfacct, the second even if NodePorts do not answer at loopback
// addresses.
//
// [Set.WatchLocalhostNodePorts] adds kube-proxy 1.37's metrics of NodePorts at loopback
// addresses, in every mode in which the agent's process serves them:
//   - nftables_localhost_nodeport_listeners also counts UDP sockets.
//   - nftables_localhost_nodeport_listener_creation_failures_total counts every attempt.
//   - nftables_localhost_nodeport_rejected_packets_total has the protocols TCP and UDP. It
//     counts connections that were reset because a limit was reached or no endpoint answered,
//     and UDP datagrams that no endpoint could get. In kube-proxy it counts packets of UDP and
//     SCTP, which kube-proxy does not serve there. The agent does not count SCTP, which the
//     kernel refuses. Neither counts connections to Services without endpoints.
//
// # Counts
//
// sync_proxy_rules_service_changes_total counts every received Service once for each served
// family, whatever its families and ports are: kube-proxy serves each family by a proxier of
// its own, and both receive all Services. sync_proxy_rules_endpoint_changes_total counts every
// received EndpointSlice once. The gauges of pending changes count objects that differed, once.
//
// One sync covers every family, so its duration is observed once for each family. A
// sync that fails as a whole counts as a failure of each family. If only some Services
// fail, it counts as a failure of their families.
//
// # Traffic
//
// [Set.WatchTraffic] adds metrics of each Service port's traffic, which kube-proxy does not
// have, with the prefix proxier_service. Their number is bounded by TrafficConfig.Limit: up to
// six series for each Service port and family.
//
// # Vanished endpoints
//
// [Set.CountResets] adds proxier_vanished_endpoints_total, the endpoints whose TCP connections
// were ended because they left without terminating,
// proxier_vanished_endpoints_destroyed_sockets_total, and proxier_vanished_endpoints_limited_total, the
// addresses of Services whose connections to such an endpoint were left alone because of the limit.
//
// # Other proxies
//
// [Set.OtherRules] sets proxier_other_proxy_rules, which kube-proxy does not have. It is 1 for
// the rules of another proxy in one of its modes: with state "in-use" while that proxy runs,
// and with state "left" when it has ended. Rules that are left no longer follow the endpoints.
//
// # The age of the objects
//
// [Set.LeftOut] adds to proxier_left_out_total, by the kind of the object and the [tracker.Reason],
// what is left out of each Service and EndpointSlice that is received, even on purpose.
//
// [Set.Contact] sets proxier_api_last_contact_timestamp_seconds for each resource. While the API
// server answers, it is at most a few minutes old. [Set.ConfigInvalid] sets
// proxier_configuration_file_invalid. kube-proxy has neither.
//
// # Differences from kube-proxy
//
// These are intended:
//   - Mode ipvs counts every failed sync in
//     sync_proxy_rules_iptables_restore_failures_total, even if only virtual servers
//     failed. In kube-proxy that metric covers iptables-restore alone.
//   - kubernetes_build_info is missing. It is the version of a build of Kubernetes, which
//     the agent is not, and the alert KubeVersionMismatch of kubernetes-mixin fires if its
//     values differ in a cluster. /statusz has the agent's version.
//   - Counters and gauges with the labels ip_family and traffic_policy start at 0 for
//     each served family. In kube-proxy such a series begins with its first value.
//
// # Stability
//
// This package is made to be imported by agents that follow the ruleset. Names, types and
// labels of metrics follow the newest kube-proxy. The API may change between minor
// versions, with a note on what to write instead.
package metrics
