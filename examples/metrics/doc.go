// Package metrics exports Prometheus metrics of a node agent, with the names, types, labels and buckets of kube-proxy
// 1.37, so that dashboards and alerts for kube-proxy work:
//
//	set := metrics.NewSet(metrics.Config{Mode: "nftables", Families: families})
//	cursor := rules.Follow("metrics", set) // rules is the cursor of the data plane
//	http.Handle("/metrics", set.Handler())
//
// A [Set] holds one agent's metrics in its own registry. It is a ruleset.Backend that follows the deltas that are in
// effect, and has methods for the hooks of the runner, the cursor and the conntrack cleaner. [Set.Handler] also
// serves the metrics of the whole process, which come from the global registry of k8s.io/component-base. A program that
// imports k8s.io/component-base/metrics/prometheus/restclient adds kube-proxy's rest_client_* to them.
//
// # Modes
//
// sync_full_proxy_rules_duration_seconds and sync_partial_proxy_rules_duration_seconds exist in modes iptables and
// nftables, sync_proxy_rules_iptables_restore_failures_total in modes iptables and ipvs, and the failures of load
// balancers in mode kernelspace. Other metrics with a mode in their names exist in that mode.
// iptables_ct_state_invalid_dropped_packets_total and iptables_localhost_nodeports_accepted_packets_total need nfacct.
//
// # Counts
//
// sync_proxy_rules_service_changes_total counts every received Service once for each served family, as
// kube-proxy does with a proxier for each. sync_proxy_rules_endpoint_changes_total counts every received
// EndpointSlice once. The gauges of pending changes count each changed object once. A sync covers every
// family: its duration is observed, and its failure counted, once for each.
//
// # Metrics that kube-proxy does not have
//
//   - [Set.WatchTraffic]: proxier_service_…, up to six series for each Service port and family, bounded by
//     TrafficConfig.Limit.
//   - [Set.CountResets]: proxier_vanished_endpoints_total, the endpoints that left without terminating and whose
//     TCP connections were ended; …_destroyed_sockets_total; and …_limited_total, the addresses of Services whose
//     connections were left alone because of the limit.
//   - [Set.OtherRules]: proxier_other_proxy_rules is 1 for the rules of another proxy in one of its modes: with state
//     "in-use" while that proxy runs, and with state "left" when it has ended.
//   - [Set.LeftOut]: proxier_left_out_total, by the kind of the object and the [tracker.Reason].
//   - [Set.Contact]: proxier_api_last_contact_timestamp_seconds for each resource. While the API server answers, it is
//     at most three minutes old.
//   - [Set.ConfigInvalid]: proxier_configuration_file_invalid.
//
// # Differences from kube-proxy
//
//   - Mode ipvs counts every failed sync in sync_proxy_rules_iptables_restore_failures_total.
//   - kubernetes_build_info is missing: the alert KubeVersionMismatch fires if its values differ in a cluster.
//   - Counters and gauges with the labels ip_family and traffic_policy start at 0 for each served family.
package metrics
