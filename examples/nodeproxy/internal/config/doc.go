// Package config is how the agent is told what to do: by kube-proxy's flags, or by
// its configuration file (KubeProxyConfiguration, kubeproxy.config.k8s.io/v1alpha1)
// as kubeadm and others write it, and by a few flags of the agent's own.
//
//	f := config.NewFlags("run")
//	err := f.Parse(os.Args[1:])
//	...
//	c, err := f.Config()
//
// What kube-proxy does by default is done, and what it would refuse is refused.
// With a file, as with kube-proxy, flags that the file has a field for are ignored,
// but for --hostname-override and those of logging; Config.Notes names each one that
// was given. A file with fields that are not known, or twice there, is accepted
// with a note about each, as long as the rest can be read.
//
// Nothing is ignored silently. Each flag that was given and each field of the file
// that was set, but that has no effect, is named in Config.Notes: those of other
// modes' sections, for example. Null, 0, false and "" in a file are the same as a
// missing field. What would have an effect for kube-proxy but is not supported is an
// error that names it. Values in sections of other modes are not validated, and
// neither is clusterCIDR with another detectLocalMode.
//
// # Feature gates
//
// Every feature gate that has the name of one is accepted. The agent honours
// AllowServiceExternalIPs, KubeProxyIPVS, AllAlpha, AllBeta, and those of logging,
// /flagz and /statusz. Some others matter to a proxy but cannot be changed, because
// the agent always does what they ask for, or never does: giving them the other value
// is an error. The rest has no effect, which is noted.
//
// # Differences from kube-proxy
//
//   - The default mode is nftables, where kube-proxy's is iptables.
//   - Unless minSyncPeriod is configured, the pause after a sync is as long as the sync
//     took, between 1 ms and 1 s, where kube-proxy's is 1 s (0 in mode ipvs). In a file
//     that --write-config-to wrote, minSyncPeriod is configured.
//   - Addresses and CIDRs with leading zeros, and IPv4-mapped ones, are errors, as in
//     objects that the API server of Kubernetes 1.36 and later validates. kube-proxy
//     accepts them in its configuration.
//   - AllAlpha does not turn on KubeProxyNFTablesLocalhostNodePorts.
//   - An empty --metrics-bind-address means no server, as kube-proxy documents it.
package config
