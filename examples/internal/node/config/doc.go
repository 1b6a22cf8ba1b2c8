// Package config reads the agent's configuration: kube-proxy's flags or its configuration
// file (KubeProxyConfiguration, kubeproxy.config.k8s.io/v1alpha1), which kubeadm and others
// write, and a few flags of the agent's own.
//
//	f := config.NewFlags("run")
//	err := f.Parse(os.Args[1:])
//	...
//	c, err := f.Config()
//
// The defaults are kube-proxy's, and values that kube-proxy rejects are rejected. With a file, as with
// kube-proxy, flags that the file has a field for are ignored, except --hostname-override and the flags of
// logging. A file with unknown or duplicate fields is accepted with a note about each, if the rest can be
// decoded.
//
// Config.Notes names each flag and each field of the file that was set but has no effect, such as the sections
// of other modes. A value that has an effect in kube-proxy but is not supported is an error that names it. Values in
// sections of other modes are not validated, and neither is clusterCIDR with another detectLocalMode.
//
// # Feature gates
//
// A name that no release of Kubernetes up to [Kubernetes] has is an error, as in kube-proxy. The agent honors
// AllowServiceExternalIPs, KubeProxyIPVS, KubeProxyNFTablesLocalhostNodePorts, AllAlpha, AllBeta, and the gates of
// logging, /flagz and /statusz. Setting another gate that matters to a proxy against what the agent does is an error.
// All other gates have no effect, which a note reports.
//
// # Differences from kube-proxy
//
//   - The default mode is nftables, where kube-proxy's is iptables. Mode userspace exists.
//   - Unless minSyncPeriod is configured, the pause after a sync is as long as the sync
//     took, between 1 ms and 1 s, where kube-proxy's is 1 s (0 in mode ipvs).
//   - Addresses and CIDRs with leading zeros, and IPv4-mapped ones, are errors.
//   - KubeProxyNFTablesLocalhostNodePorts is on by default and concerns every mode, and UDP.
//     It has no effect unless nodePortAddresses explicitly contains loopback addresses.
//   - An empty --metrics-bind-address means no server, as kube-proxy documents it.
package config
