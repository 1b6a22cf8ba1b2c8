package config

import (
	"cmp"
	"net"
	"net/netip"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// The modes.
const (
	ModeNFTables = "nftables"
	ModeIPTables = "iptables"
	ModeIPVS     = "ipvs"
	// ModeKernelspace programs Windows' Host Networking Service. It is the only mode of Windows.
	ModeKernelspace = "kernelspace"
	// ModeUserspace has no rules in the kernel: the agent's process accepts connections and
	// copies data, as in kube-proxy's former mode of that name.
	ModeUserspace = "userspace"
)

// The values of DetectLocalMode.
const (
	ClusterCIDR         = "ClusterCIDR"
	NodeCIDR            = "NodeCIDR"
	BridgeInterface     = "BridgeInterface"
	InterfaceNamePrefix = "InterfaceNamePrefix"
)

// The default ports of kube-proxy's servers.
const (
	healthzPort = 10256
	metricsPort = 10249
)

const protobuf = "application/vnd.kubernetes.protobuf"

// defaultMinSync is kube-proxy's default for minSyncPeriod in modes iptables and
// nftables.
const defaultMinSync = time.Second

// Unless minSyncPeriod is configured, the pause after a sync is as long as the sync was,
// between paceFloor and defaultMinSync. Syncs then use at most half of one core's time, and
// a change waits no longer than about two syncs. The floor lets changes that arrive
// together share a sync. If they did, more are likely to follow, as in a rollout: the pause is
// then at least paceBurst, except in mode iptables, where syncs take several milliseconds anyway
// and no pause exceeds the last one.
const (
	paceFactor = 1
	paceFloor  = time.Millisecond
	paceBurst  = 10 * time.Millisecond
)

// setDefaults sets kube-proxy's defaults in fields that are not set.
func setDefaults(c *v1alpha1.KubeProxyConfiguration, system string) {
	def(&c.Mode, v1alpha1.ProxyMode(defaultMode(system)))
	def(&c.BindAddress, "0.0.0.0")
	any, local := "0.0.0.0", "127.0.0.1"
	if a, err := netip.ParseAddr(c.BindAddress); err == nil && a.Is6() {
		any, local = "::", "::1"
	}
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, any, healthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, local, metricsPort)

	defPtr(&c.IPTables.MasqueradeBit, 14)
	defPtr(&c.IPTables.LocalhostNodePorts, true)
	defPtr(&c.NFTables.MasqueradeBit, 14)
	def(&c.IPTables.SyncPeriod.Duration, 30*time.Second)
	def(&c.IPTables.MinSyncPeriod.Duration, defaultMinSync)
	def(&c.NFTables.SyncPeriod.Duration, 30*time.Second)
	def(&c.NFTables.MinSyncPeriod.Duration, defaultMinSync)
	def(&c.IPVS.SyncPeriod.Duration, 30*time.Second)
	def(&c.IPVS.Scheduler, "rr")

	def(&c.DetectLocalMode, ClusterCIDR)
	if len(c.NodePortAddresses) == 0 && c.Mode == ModeNFTables {
		c.NodePortAddresses = []string{"primary"}
	}
	defPtr(&c.OOMScoreAdj, -999)
	def(&c.ConfigSyncPeriod.Duration, 15*time.Minute)

	ct := &c.Conntrack
	defPtr(&ct.MaxPerCore, 32*1024)
	defPtr(&ct.Min, 128*1024)
	defPtr(&ct.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	defPtr(&ct.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})

	def(&c.ClientConnection.ContentType, protobuf)
	def(&c.ClientConnection.QPS, 5)
	def(&c.ClientConnection.Burst, 10)
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
}

// modesOf returns the modes of a system. The first one is the default.
func modesOf(system string) []string {
	if system == "windows" {
		return []string{ModeKernelspace}
	}
	return []string{ModeNFTables, ModeIPTables, ModeIPVS, ModeUserspace}
}

func defaultMode(system string) string { return modesOf(system)[0] }

func def[T comparable](p *T, value T) { *p = cmp.Or(*p, value) }

func defPtr[T any](p **T, value T) {
	if *p == nil {
		*p = &value
	}
}

// withPort returns an address to listen at: addr, with the port unless it has one,
// or host with the port if addr is empty.
func withPort(addr, host string, port int) string {
	if addr == "" {
		addr = host
	}
	if _, err := netip.ParseAddr(addr); err == nil {
		return net.JoinHostPort(addr, strconv.Itoa(port))
	}
	return addr
}
