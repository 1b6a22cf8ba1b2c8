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
// Nothing is ignored silently: what has no effect here is noted, and what would have
// one for kube-proxy but is not supported is an error that names it.
//
// The default mode is nftables, where kube-proxy's is iptables.
package config
