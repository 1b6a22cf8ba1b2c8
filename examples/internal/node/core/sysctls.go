package core

import (
	"errors"
	"log/slog"
	"os"
	"runtime"
	"strings"

	"k8s.io/utils/cpuset"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/tuning"
	"github.com/go-proxier/proxier/tracker"
)

// Tune sets the parameters of connection tracking. It logs a parameter that cannot be set
// and continues: a node with a small table serves better than a node without rules.
func Tune(cfg *config.Config, log *slog.Logger) (err error) {
	for _, s := range tuning.Settings(cfg.Effective.Conntrack, cpus()) {
		switch old, changed, e := s.Apply(""); {
		case e != nil:
			log.Warn("cannot set a kernel parameter", "error", e, "skipWith", s.Skip)
			err = errors.Join(err, e)
		case changed:
			log.Info("set a kernel parameter", "path", "/"+s.Path, "value", s.Value, "was", old)
		}
	}
	return err
}

// checkForwarding warns if the kernel does not forward packets in the calling thread's
// namespace. Enabling it is up to the operator, as with kube-proxy's nftables mode. Mode
// ipvs enables IPv4 forwarding itself.
func checkForwarding(families []tracker.Family, mode string, log *slog.Logger) {
	for _, f := range families {
		sysctl := map[tracker.Family]string{tracker.IPv4: "net/ipv4/ip_forward", tracker.IPv6: "net/ipv6/conf/all/forwarding"}[f]
		if readSysctl(sysctl) == "0" && (f == tracker.IPv6 || mode != config.ModeIPVS) {
			log.Warn("the kernel does not forward packets: clients outside cannot reach pods and other nodes through this node", "sysctl", sysctl)
		}
	}
}

// checkLiberal warns if connection tracking does not translate TCP packets outside of the window in
// the agent's namespace. Mode iptables then drops them; mode nftables does not, like kube-proxy's.
func checkLiberal(log *slog.Logger) {
	if readSysctl("net/netfilter/nf_conntrack_tcp_be_liberal") == "0" {
		log.Warn("mode iptables drops TCP packets that connection tracking considers invalid, mode nftables does not: if they reset connections, set conntrack.tcpBeLiberal")
	}
}

// checkBridge warns if packets between pods on the same bridge skip the rules. A connection from one to
// another through a Service fails then, because the answers are not translated back.
func checkBridge(families []tracker.Family, log *slog.Logger) {
	for _, f := range families {
		sysctl := map[tracker.Family]string{tracker.IPv4: "net/bridge/bridge-nf-call-iptables", tracker.IPv6: "net/bridge/bridge-nf-call-ip6tables"}[f]
		if value := readSysctl(sysctl); value == "" || value == "0" { // without br_netfilter it is missing
			log.Warn("packets between pods on the bridge skip the rules: pods cannot reach each other through Services", "sysctl", sysctl, "want", 1)
		}
	}
}

// readSysctl returns the value of a parameter, or "" if it cannot be read.
func readSysctl(name string) string {
	value, _ := os.ReadFile("/proc/sys/" + name)
	return strings.TrimSpace(string(value))
}

// onlineFile lists the online CPUs (Documentation/admin-guide/cputopology.rst).
const onlineFile = "/sys/devices/system/cpu/online"

// cpus returns the number of CPUs by which connection tracking is sized: the online CPUs of
// the machine, even if the process may not run on all of them. Without a readable sysfs it
// returns [runtime.NumCPU].
func cpus() int {
	text, err := os.ReadFile(onlineFile)
	if err == nil {
		if set, err := cpuset.Parse(strings.TrimSpace(string(text))); err == nil && !set.IsEmpty() {
			return set.Size()
		}
	}
	return runtime.NumCPU()
}
