//go:build linux

package main

// ipvsFaults damage the virtual servers, sets, addresses and rules of mode ipvs.
var ipvsFaults = []fault{
	shell("clear virtual servers", "ipvsadm -C"),
	shell("flush addresses", "ip addr flush dev kube-ipvs0"),
	shell("delete device", "ip link del kube-ipvs0"),
	{"flush set", func(w *world) (string, error) {
		set := pick(w.rng, "KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-NODE-PORT-TCP", "KUBE-LOAD-BALANCER")
		return w.shell("ipset flush " + set), nil
	}},
	{"flush nat", func(w *world) (string, error) { return w.shell(w.iptables() + " -t nat -F"), nil }},
	{"flush filter", func(w *world) (string, error) { return w.shell(w.iptables() + " -F"), nil }},
	{"delete server", func(w *world) (string, error) {
		return w.shell("ipvsadm -Sn | awk '$1==\"-A\"{print $2, $3; exit}' | xargs -r ipvsadm -D"), nil
	}},
}
