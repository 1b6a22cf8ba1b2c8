package config

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// validator collects the errors of a configuration, by field.
type validator struct{ errs field.ErrorList }

func (v *validator) check(ok bool, path string, value any, message string) {
	if !ok {
		v.errs = append(v.errs, field.Invalid(field.NewPath(path), value, message))
	}
}

func (v *validator) bit(path string, p *int32) {
	v.check(*p >= 0 && *p <= 31, path, *p, "must be 0 to 31")
}

func (v *validator) notNegative(path string, d time.Duration) {
	v.check(d >= 0, path, d.String(), "must not be negative")
}

// cidr checks a CIDR as the API server checks CIDRs in new objects, except that bits beyond
// the prefix length may be set, as is common in configurations.
func (v *validator) cidr(path, s string) netip.Prefix {
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		v.errs = append(v.errs, validation.IsValidCIDRForLegacyField(field.NewPath(path), s, true, nil)...)
	}
	return p.Masked()
}

// listenAt checks an address to listen at.
func (v *validator) listenAt(path, s string) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		v.check(false, path, s, "must be IP:port")
		return
	}
	v.errs = append(v.errs, validation.IsValidIPForLegacyField(field.NewPath(path), host, true, nil)...)
	n, err := strconv.Atoi(port)
	v.check(err == nil && n > 0 && n <= 65535, path, s, "must have a port from 1 to 65535")
}

// validate returns the errors that kube-proxy would report for a configuration with its
// defaults, with which no pointer that it reads is nil.
func validate(c *v1alpha1.KubeProxyConfiguration, system string, gates featuregate.FeatureGate) error {
	v := &validator{}
	modes := modesOf(system)
	v.check(slices.Contains(modes, string(c.Mode)), "mode", c.Mode, "must be "+strings.Join(modes, ", "))
	if c.Mode == ModeNFTables {
		v.bit("nftables.masqueradeBit", c.NFTables.MasqueradeBit)
	} else {
		v.bit("iptables.masqueradeBit", c.IPTables.MasqueradeBit)
	}
	sync, least := periods(c)
	v.check(*sync > 0, string(c.Mode)+".syncPeriod", sync.String(), "must be positive")
	v.check(*least >= 0 && *least <= *sync, string(c.Mode)+".minSyncPeriod", least.String(), "must not be negative, or longer than syncPeriod")
	if w := c.Winkernel; c.Mode == ModeKernelspace {
		if w.SourceVip != "" {
			v.errs = append(v.errs, validation.IsValidIPForLegacyField(field.NewPath("winkernel.sourceVip"), w.SourceVip, true, nil)...)
		}
		v.check(!w.ForwardHealthCheckVip || w.RootHnsEndpointName != "", "winkernel.rootHnsEndpointName", "", "is required by winkernel.forwardHealthCheckVip")
	}
	if c.Mode == ModeIPVS {
		v.notNegative("ipvs.tcpTimeout", c.IPVS.TCPTimeout.Duration)
		v.notNegative("ipvs.tcpFinTimeout", c.IPVS.TCPFinTimeout.Duration)
		v.notNegative("ipvs.udpTimeout", c.IPVS.UDPTimeout.Duration)
		for i, s := range c.IPVS.ExcludeCIDRs {
			v.cidr(fmt.Sprintf("ipvs.excludeCIDRs[%d]", i), s)
		}
	}

	v.check(*c.OOMScoreAdj >= -1000 && *c.OOMScoreAdj <= 1000, "oomScoreAdj", *c.OOMScoreAdj, "must be -1000 to 1000")
	v.check(c.ConfigSyncPeriod.Duration > 0, "configSyncPeriod", c.ConfigSyncPeriod.Duration.String(), "must be positive")
	ct := c.Conntrack
	v.check(*ct.MaxPerCore >= 0, "conntrack.maxPerCore", *ct.MaxPerCore, "must not be negative")
	v.check(*ct.Min >= 0, "conntrack.min", *ct.Min, "must not be negative")
	v.notNegative("conntrack.tcpEstablishedTimeout", ct.TCPEstablishedTimeout.Duration)
	v.notNegative("conntrack.tcpCloseWaitTimeout", ct.TCPCloseWaitTimeout.Duration)
	v.notNegative("conntrack.udpTimeout", ct.UDPTimeout.Duration)
	v.notNegative("conntrack.udpStreamTimeout", ct.UDPStreamTimeout.Duration)
	v.check(c.ClientConnection.Burst >= 0, "clientConnection.burst", c.ClientConnection.Burst, "must not be negative")

	v.errs = append(v.errs, validation.IsValidIPForLegacyField(field.NewPath("bindAddress"), c.BindAddress, true, nil)...)
	if c.HealthzBindAddress != "" {
		v.listenAt("healthzBindAddress", c.HealthzBindAddress)
	}
	if c.MetricsBindAddress != "" {
		v.listenAt("metricsBindAddress", c.MetricsBindAddress)
	}
	if _, err := ruleset.ParseNodePortAddresses(c.NodePortAddresses); err != nil {
		v.check(false, "nodePortAddresses", strings.Join(c.NodePortAddresses, ","), err.Error())
	}

	local := []string{ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix}
	v.check(slices.Contains(local, string(c.DetectLocalMode)), "detectLocalMode", c.DetectLocalMode, "must be "+strings.Join(local, ", "))
	v.check(c.DetectLocalMode != BridgeInterface || c.DetectLocal.BridgeInterface != "", "detectLocal.bridgeInterface", "", "is required by detectLocalMode BridgeInterface")
	v.check(c.DetectLocalMode != InterfaceNamePrefix || c.DetectLocal.InterfaceNamePrefix != "", "detectLocal.interfaceNamePrefix", "", "is required by detectLocalMode InterfaceNamePrefix")
	if c.DetectLocalMode == ClusterCIDR {
		v.clusterCIDRs("clusterCIDR", c.ClusterCIDR)
	}

	v.errs = append(v.errs, logsapi.Validate(&c.Logging, gates, field.NewPath("logging"))...)
	return v.errs.ToAggregate()
}

// clusterCIDRs parses one CIDR, or two of different families with a comma between.
func (v *validator) clusterCIDRs(path, s string) (out []netip.Prefix) {
	if strings.TrimSpace(s) == "" {
		return nil
	}
	for part := range strings.SplitSeq(s, ",") {
		p := v.cidr(path, strings.TrimSpace(part))
		if !p.IsValid() {
			continue
		}
		family := tracker.FamilyOf(p.Addr())
		v.check(!slices.ContainsFunc(out, func(o netip.Prefix) bool { return tracker.FamilyOf(o.Addr()) == family }),
			path, s, fmt.Sprintf("more than one %v CIDR", family))
		out = append(out, p)
	}
	return out
}
