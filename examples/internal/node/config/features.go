package config

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	zpages "k8s.io/component-base/zpages/features"
	"k8s.io/klog/v2"
)

// The agent's own feature gates, with kube-proxy's names. [Config.Gates] also has the gates
// of component-base's logs and zpages.
const (
	// AllowServiceExternalIPs, if off, makes the agent ignore spec.externalIPs of
	// Services (KEP-5707).
	AllowServiceExternalIPs featuregate.Feature = "AllowServiceExternalIPs"
	// KubeProxyIPVS, if off, makes mode ipvs an error (KEP-5495).
	KubeProxyIPVS featuregate.Feature = "KubeProxyIPVS"
	// LocalhostNodePorts, if off, makes the agent's process serve no NodePorts at loopback
	// addresses, in any mode (KEP-6032). Unlike in kube-proxy it is on by default: only
	// loopback addresses in nodePortAddresses have the effect.
	LocalhostNodePorts featuregate.Feature = "KubeProxyNFTablesLocalhostNodePorts"
)

// fixed returns the value of a gate that matters to a proxy but is fixed in the mode. ok is
// false for other gates.
func fixed(gate, mode string) (value, ok bool) {
	switch gate {
	case "EndpointSlice", "EndpointSliceProxying", "IPv6DualStack", "SCTPSupport",
		"KubeProxyDrainingTerminatingNodes", "LoadBalancerIPMode",
		"MultiCIDRServiceAllocator", "NFTablesProxyMode",
		"PreferSameTrafficDistribution", "ProxyTerminatingEndpoints",
		"ServiceInternalTrafficPolicy", "ServiceTrafficDistribution",
		"SupportIPVSProxyMode", "TopologyAwareHints":
		return true, true
	case "WinDSR", "WinOverlay": // networks decide, and winkernel.enableDSR
		return true, mode == ModeKernelspace
	}
	return false, false
}

// setGates returns the gates that the agent honors, with the given values or their
// defaults, and notes about given gates that have no effect. The error names a gate that
// selects behavior that the agent does not support, or that Kubernetes does not have.
func setGates(given map[string]bool, mode string) (_ featuregate.MutableVersionedFeatureGate, notes []string, err error) {
	gates := featuregate.NewFeatureGate()
	err = errors.Join(logsapi.AddFeatureGates(gates), zpages.AddFeatureGates(gates), gates.Add(map[featuregate.Feature]featuregate.FeatureSpec{
		AllowServiceExternalIPs: {Default: true, PreRelease: featuregate.Deprecated},
		KubeProxyIPVS:           {Default: true, PreRelease: featuregate.Deprecated},
		LocalhostNodePorts:      {Default: true, PreRelease: featuregate.Alpha},
	}))
	if err != nil {
		return nil, nil, err
	}
	honored := gates.GetAll()
	set := map[string]bool{}
	var always, ignored []string
	for _, name := range slices.Sorted(maps.Keys(given)) {
		value, isFixed := fixed(name, mode)
		switch _, ok := honored[featuregate.Feature(name)]; {
		case ok:
			set[name] = given[name]
		case isFixed && given[name] != value:
			return nil, nil, fmt.Errorf("feature gate %s=%v is not supported in mode %s: here it is always %v", name, given[name], mode, value)
		case isFixed:
			always = append(always, fmt.Sprintf("%s=%v", name, value))
		case !isKnownGate(name):
			return nil, nil, fmt.Errorf("unrecognized feature gate %q: no release of Kubernetes from 1.20 to %s has it", name, Kubernetes)
		default:
			ignored = append(ignored, name)
		}
	}
	if err := setQuietly(gates, set); err != nil {
		return nil, nil, err
	}
	if mode == ModeIPVS && !gates.Enabled(KubeProxyIPVS) {
		return nil, nil, fmt.Errorf("mode ipvs is disabled by the feature gate %s", KubeProxyIPVS)
	}
	if len(always) != 0 {
		notes = append(notes, "feature gates that are fixed here: "+strings.Join(always, ", "))
	}
	if len(ignored) != 0 {
		notes = append(notes, "feature gates that have no effect here: "+strings.Join(ignored, ", "))
	}
	return gates, notes, nil
}

// setQuietly sets feature gates. Since component-base 1.36 it writes nothing to klog's log of the
// process.
func setQuietly(gates featuregate.MutableFeatureGate, values map[string]bool) error {
	type withLogger interface {
		SetFromMapWithLogger(klog.Logger, map[string]bool) error
	}
	if g, ok := gates.(withLogger); ok {
		return g.SetFromMapWithLogger(logr.Discard(), values)
	}
	return gates.SetFromMap(values)
}

// Kubernetes is the newest release that the agent was compared with. Documents that name
// what kube-proxy does name this release, which a test checks. Update the list of feature
// gates with it.
const Kubernetes = "1.37"

// gateNames has a name in each line, in byte order. Lines with # are comments.
//
//go:embed gates.txt
var gateNames string

// isKnownGate reports whether Kubernetes has had a feature gate in any release up to
// [Kubernetes]. Most gates that were removed before 1.20 are missing: no supported release
// accepts them.
func isKnownGate(gate string) bool {
	for line := range strings.Lines(gateNames) {
		if strings.TrimSpace(line) == gate && !strings.HasPrefix(gate, "#") {
			return true
		}
	}
	return false
}
